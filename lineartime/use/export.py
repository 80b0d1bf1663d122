"""Export a run to a folder for sharing: weights, configuration, tokenizer and a model card, in
Markdown. `load_model` and `transformers` open it."""

import re
import time
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from lineartime.base.errors import UsageError
from lineartime.base.files import damaged, new_folder, system_errors
from lineartime.base.settings import field_text, require
from lineartime.base.stores import Name, check_new_folder, is_address, uploaded
from lineartime.base.words import Progress, in_markdown, installed_version, markdown, mib
from lineartime.config import ModelConfig, TrainConfig
from lineartime.data.mixture import read_mixture
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import Manifest, open_data, read_manifests, sha256_of
from lineartime.folders import CONFIG_FILE, RUN_FILE, WEIGHTS_FILE, model_config_json, read_run, shipped_models
from lineartime.model.language_model import LanguageModel, SpanModel
from lineartime.training.evaluation import Evaluation, evaluate_data
from lineartime.training.run_config import nearest_preset
from lineartime.training.runtime import StopSignal
from lineartime.use.info import describe
from lineartime.weights.checkpoint import FORMAT, MANIFEST, manifest_of, write_file
from lineartime.weights.generation.generate import generate
from lineartime.weights.load import is_exported, load_model
from lineartime.weights.transformers_files import AUTO_MAP, CODE, CODE_FILE, tokenizer_files

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 120, 0.8  # the card has a sample: so many tokens at most, and how they are drawn


def export(run: Path, out: Name, *, data: Name | None, about: str, device: torch.device,
           progress: Progress | None = None) -> tuple[dict[str, Evaluation], int]:
    """Write the newest checkpoint of a run to the new folder `out`, which may be in a store:
    weights rounded to bfloat16, what `transformers` reads, and a card with the scores of these
    rounded weights. Returns these scores by split, and the bytes of the weights.

    data: the prepared text, by default the run's folder. about: the card's beginning, in Markdown.
    progress counts scored tokens. Raises UsageError if `out` exists, `run` is no run of a language
    model, or the data is not the run's; CheckpointError for damage, ResourceError for the disk."""
    check_new_folder(out)
    require(not is_exported(run), "this is an exported folder already", str(run), "copy it")
    description = read_run(run)
    model, tokenizer, facts = load_model(run)
    if isinstance(model, SpanModel):
        raise UsageError("a model that answers questions is not exported", str(run), "export a language model")
    named = str(data or description["data"])
    manifests = manifests_of_run(run, description, named, is_given=data is not None)
    text = [*zip(manifests, read_mixture(named).values(), strict=True)]
    with damaged(run / RUN_FILE):  # is found here, before the scores, which take minutes
        card = [card_head(about, description, model.config),
                card_training(description, facts["step"], tokenizer.sha256, text)]

    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    model = model.to(device)
    scores, n_documents = {}, {}
    for split in ("validation", "test"):
        if all(split in manifest.splits for manifest in manifests):
            stream = open_data(named, split)
            watched = StopSignal().watch("", progress, "evaluating", stream.n_tokens)
            scores[split] = evaluate_data(model, stream, progress=watched)[0]
            n_documents[split] = sum(manifest.splits[split].documents for manifest in manifests)
    sample = generate(model, [""], tokenizer=tokenizer, max_new_tokens=SAMPLE_TOKENS,
                      temperature=SAMPLE_TEMPERATURE)[0] if model.decodes else None
    card += [card_scores(model.config, n_documents, scores), card_end(sample)]
    return scores, write_folder(out, model, tokenizer, "\n\n".join(card))


def manifests_of_run(run: Path, description: dict[str, Any], named: str, is_given: bool) -> list[Manifest]:
    """The manifests of `named`. Raises UsageError unless it is here and what the run learned. An
    address that only the run names is not opened: the run may be a stranger's."""
    for folder in () if is_given else read_mixture(named):
        require(not is_address(folder), "the run names data at an address", f"{folder} in {run / RUN_FILE}",
                "to open it, name it yourself with --data")
        require(Path(folder).is_dir(), "the run's data are not here", folder, "name their folder with --data")
    manifests = read_manifests(named)
    with damaged(run / RUN_FILE):
        of_run = description["data_sha256"]
    require(sha256_of(named, manifests) == of_run, "this is not the run's data", named,
            f"give --data what the run was trained on; {run / RUN_FILE} has its hash")
    return manifests


def write_folder(out: Name, model: LanguageModel, tokenizer: Tokenizer, card: str) -> int:
    """Write the weights in bfloat16, what `transformers` reads beside them, a manifest of these,
    and the card. `out` is there when all of it is. Returns the bytes of the weights."""
    texts = {CONFIG_FILE: model_config_json(model.config, auto_map=AUTO_MAP), CODE_FILE: CODE,
             **tokenizer_files(tokenizer)}
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
    with system_errors(out), (uploaded(out) if is_address(out) else new_folder(Path(out))) as aside:
        entries = {name: write_file(aside / name, text.encode()) for name, text in texts.items()}
        entries[WEIGHTS_FILE] = write_file(aside / WEIGHTS_FILE, weights)
        write_file(aside / MANIFEST, manifest_of({"format": FORMAT, "files": entries}))
        write_file(aside / "README.md", card.encode())
    return int(entries[WEIGHTS_FILE]["bytes"])


def card_head(about: str, run: dict[str, Any], config: ModelConfig) -> str:
    """The front matter, the heading and the table of the model. `about` replaces the heading, and
    the front matter too if it begins with its own. run: the run's `run.json`."""
    described = describe(config)
    about = about.strip() or f"# {run['preset']}, {described.n_parameters:,} parameters"
    lines = [("preset", f"`{run['preset']}`"), *described.specification[:-1],
             *([("Query and key width s", f"{config.query_key_dim}")] if config.ffn == "gau" else []),
             ("Context", f"{config.context:,}"), ("Vocabulary", f"{config.vocab_size:,}"),
             ("Parameters", f"{described.n_parameters:,}"),
             ("Weights", f"bfloat16, {2 * described.n_parameters / 1e6:.1f} MB")]
    if described.decoding.constant and not described.decoding.per_token:
        lines.append(("Decoding state", f"{mib(described.decoding.constant)} in float32, at any length"))
    # The YAML that model hubs read at the beginning, without licence and language.
    tags = [nearest_preset(config), *(["gated-attention-unit"] if config.ffn == "gau" else []),
            *(["linear-attention"] if config.attn_type in ("mixed_chunk", "linear") else [])]
    fields = ModelCardData(library_name="lineartime", tags=tags,
                           pipeline_tag="text-generation" if config.causal else "fill-mask").to_yaml()
    if not about.startswith("---"):
        about = f"---\n# license and language: not known to lineartime; name them here\n{fields}\n---\n\n{about}"
    return "\n\n".join([about, "## Model", markdown(["", ""], lines)])


def card_training(run: dict[str, Any], step: int, tokenizer_sha256: str, text: list[tuple[Manifest, int]]) -> str:
    """The text, the steps, the settings that are not the paper's, and the hashes. text: the
    manifest of each prepared text that the run was trained on, and its share of the rows."""
    train, n_tokens, total = run["train"], step * run["train"]["tokens_per_step"], sum(weight for _, weight in text)
    lines, times = [], []
    if "from" in run:  # a folder's name is of one machine
        source = run["from"] if run["from"] in shipped_models() else "WEIGHTS"
        lines.append(("Began with", f"{source}, sha256 {in_markdown(run['from_sha256'])}"))
    for manifest, weight in text:
        split, share = manifest.splits["train"], f"{100 * weight / total:.3g} % of the rows: " * (len(text) > 1)
        lines.append(("Text", f"{share}{split.documents:,} documents, {split.words:,} words, {split.bytes:,} bytes, "
                              f"{split.tokens:,} tokens"))
        times.append(f"{n_tokens * weight / total / split.tokens:.2f}")
    changed = [f"`{name}={field_text(value)}`" for name, value in train.items() if value != getattr(TrainConfig, name)]
    lines += [("Steps", f"{step:,} of {train['steps']:,}, of {train['tokens_per_step']:,} tokens"),
              ("Tokens", f"{n_tokens:,}: {' and '.join(times)} times the text"),
              ("Settings", f"{', '.join(changed)}; the others are the defaults of `TrainConfig`"),
              ("Data", f"sha256 {run['data_sha256']}"), ("Tokenizer", f"sha256 {tokenizer_sha256}")]
    return f"## Training\n\n{markdown(['', ''], lines)}"


CAUSAL_SCORES = {"bits per byte": "{0.bits_per_byte:.3f}", "nats per token": "{0.loss:.4f}",
                 "perplexity per token": "{0.perplexity:.2f}", "perplexity per word": "{0.word_perplexity:.1f}",
                 "tokens": "{0.n_tokens:,}", "words": "{0.n_words:,} ({0.word_count})", "bytes": "{0.n_bytes:,}"}
MASKED_SCORES = {"nats per masked token": "{0.loss:.4f}", "perplexity per masked token": "{0.perplexity:.2f}",
                 "masked tokens": "{0.n_tokens:,}"}  # what the card has of an `Evaluation`, by the name of its line


def card_scores(config: ModelConfig, n_documents: dict[str, int], scores: dict[str, Evaluation]) -> str:
    """The scores of all splits side by side. Both dictionaries are by split."""
    kinds = CAUSAL_SCORES if config.causal else MASKED_SCORES
    lines = [["documents", *(f"{n_documents[split]:,}" for split in scores)],
             *([name, *map(text.format, scores.values())] for name, text in kinds.items())]
    return ("## Held-out scores\n\nOf the weights in this folder, in float32 arithmetic, every token once, in rows of "
            f"{config.context:,}.\n\n{markdown(['', *scores], lines, n_words=1)}")


def card_end(sample: str | None) -> str:
    """How a model that decodes begins a document, and the versions that made the card."""
    made = (f"<sub>Made by `lineartime export` on {time.strftime('%Y-%m-%d', time.gmtime())}: "
            f"torch {torch.__version__}; lineartime {installed_version()}.</sub>\n")
    if sample is None:
        return made
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", sample)), default=0))  # more than the sample has in a row
    return (f"## Sample\n\nThe first {SAMPLE_TOKENS} tokens from the beginning of a document at temperature "
            f"{SAMPLE_TEMPERATURE} with seed 0, not chosen:\n\n{fence}text\n{sample}\n{fence}\n\n{made}")

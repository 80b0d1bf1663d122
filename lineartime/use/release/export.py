"""Export a run, or a model fine-tuned on documents, to a folder for sharing: weights, configuration, tokenizer and a
model card. `load_model` and `transformers` open it, and of documents `sentence-transformers` too."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from lineartime.base.errors import UsageError
from lineartime.base.files import remove_leftovers, system_errors, written_aside
from lineartime.base.settings import require
from lineartime.base.stores import Name, exists, is_address, is_folder, uploaded
from lineartime.config import model_config
from lineartime.config_json import model_config_json
from lineartime.data.mixture import read_mixture
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import open_data, read_manifests, sha256_of
from lineartime.folders import CONFIG_FILE, METRICS_FILE, RUN_FILE, WEIGHTS_FILE, damaged, read_metrics, read_run
from lineartime.model.language_model import LanguageModel, SpanModel
from lineartime.training.evaluation import Evaluation, evaluate_data
from lineartime.training.stop import Progress, StopSignal
from lineartime.use.release.card import SAMPLE_TEMPERATURE, SAMPLE_TOKENS, Card, model_card
from lineartime.use.release.provenance import provenance
from lineartime.weights.checkpoint import MANIFEST, manifest_of, write_file
from lineartime.weights.generation.generate import generate
from lineartime.weights.load import is_exported, load_model
from lineartime.weights.transformers_files import CODE, CODE_FILE, config_with_code, tokenizer_files

logger = logging.getLogger(__name__)
CARD_FILE = "README.md"
HELD_OUT_SPLITS = ("validation", "test")


def export(run: Path, out: Name, *, data: Name | None, about: str, device: torch.device,
           progress: Progress | None = None) -> tuple[dict[str, Evaluation], int]:
    """Write the newest checkpoint of a run to the new folder `out`, which may be in a store: weights rounded to
    bfloat16, what `transformers` reads, and a card with the scores of these rounded weights. Returns these scores by
    split, and the bytes of the weights.

    data: the prepared text, by default the run's; its held-out splits are scored. about: the beginning of the card, in
    Markdown. progress counts scored tokens. Raises UsageError if `out` exists, `run` is no run of a language model, or
    the data is not the run's; CheckpointError for damage, ResourceError for the disk."""
    require_new(out)
    require(not is_exported(run), "this is an exported folder already", str(run), "copy it")
    description = read_run(run)
    model, tokenizer, facts = load_model(run)
    if isinstance(model, SpanModel):
        raise UsageError("a model that answers questions is not exported", str(run), "export a language model")
    # The card has the command that trains such a model, and the hashes of what it was trained from.
    with damaged(run / RUN_FILE):
        model_config(description["preset"], description["task"])
        needed = ["data_sha256", "from_sha256"] if "from" in description else ["data_sha256"]
        hashes = {name: description[name] for name in needed}
    named = str(data or description["data"])
    for each in () if data else read_mixture(named):
        require(is_folder(each), "the run's data are not here", each, "name their folder with --data")
    manifests = read_manifests(named)
    require(sha256_of(named, manifests) == hashes["data_sha256"], "this is not the run's data", named,
            f"give --data what the run was trained on; {run / RUN_FILE} has its hash")
    lines = read_metrics(run)
    if not lines:
        logger.warning(f"{run / METRICS_FILE} is missing or empty: the card has no training time")
    card = Card(description, model.config, tokenizer.sha256,
                text=[*zip(manifests, read_mixture(named).values(), strict=True)],
                metrics=[line for line in lines if line["step"] <= facts["step"]], step=facts["step"],
                provenance={**provenance(), "device": device.type, "threads": torch.get_num_threads()})
    model_card(card, about)  # what is wrong with it shows before the scores, which take minutes
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    model = model.to(device)
    streams = {split: open_data(named, split) for split in HELD_OUT_SPLITS
               if all(split in each.splits for each in manifests)}
    scores = {split: evaluate_data(model, stream, batch_rows=8, progress=StopSignal().watch(
        "", progress, "evaluating", stream.n_tokens))[0] for split, stream in streams.items()}
    sample = generate(model, [""], tokenizer=tokenizer, max_new_tokens=SAMPLE_TOKENS,
                      temperature=SAMPLE_TEMPERATURE)[0] if model.config.decodes else None
    with new_folder(out, model, model_config_json(model.config), tokenizer, torch.bfloat16) as (aside, n_bytes):
        card = replace(card, n_bytes=n_bytes, scores=scores, sample=sample)
        (aside / CARD_FILE).write_text(model_card(card, about), encoding="utf-8")
    return scores, n_bytes


def require_new(out: Name) -> None:
    """Raise UsageError for an output that is there."""
    if not is_address(out):
        remove_leftovers(Path(out))
    require(not exists(out), "the output exists already", str(out), "choose another or delete it")


@contextmanager
def new_folder(out: Name, model: LanguageModel, config_json: str, tokenizer: Tokenizer,
               dtype: torch.dtype) -> Iterator[tuple[Path, int]]:
    """Write a model's weights in `dtype`, what `transformers` reads beside them, and a manifest of all of these to a
    folder that becomes `out` at the end of the block; yields the folder and the bytes of the weights. The block adds
    what may be edited later. Raises ResourceError for the disk."""
    texts = {CONFIG_FILE: config_with_code(config_json), CODE_FILE: CODE, **tokenizer_files(tokenizer)}
    files = {name: text.encode() for name, text in texts.items()}
    weights = {name: weight.detach().to(dtype) for name, weight in model.named_parameters()}
    with system_errors(str(out)), (uploaded(out) if is_address(out) else written_aside(Path(out))) as aside:
        entry = write_file(aside / WEIGHTS_FILE, weights)
        files[MANIFEST] = manifest_of(files, {WEIGHTS_FILE: entry})
        for name, content in files.items():
            (aside / name).write_bytes(content)
        yield aside, int(entry["bytes"])

"""Export a run to a folder for sharing: weights, configuration, tokenizer and a model card.
`load_model` and `transformers` open it."""

from pathlib import Path
from typing import Any

import torch

from lineartime.base.errors import UsageError
from lineartime.base.files import damaged, new_folder, system_errors
from lineartime.base.settings import require
from lineartime.base.stores import Name, exists, is_address, is_folder, uploaded
from lineartime.base.words import Progress
from lineartime.data.mixture import read_mixture
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import Manifest, open_data, read_manifests, sha256_of
from lineartime.folders import CONFIG_FILE, RUN_FILE, WEIGHTS_FILE, model_config_json, read_run
from lineartime.model.language_model import LanguageModel, SpanModel
from lineartime.training.evaluation import Evaluation, evaluate_data
from lineartime.training.runtime import StopSignal
from lineartime.use.card import SAMPLE_TEMPERATURE, SAMPLE_TOKENS, card_end, card_head, card_scores, card_training
from lineartime.weights.checkpoint import MANIFEST, manifest_of, write_file
from lineartime.weights.generation.generate import generate
from lineartime.weights.load import is_exported, load_model
from lineartime.weights.transformers_files import CODE, CODE_FILE, config_with_code, tokenizer_files

CARD_FILE = "README.md"
HELD_OUT_SPLITS = ("validation", "test")


def export(run: Path, out: Name, *, data: Name | None, about: str, device: torch.device,
           progress: Progress | None = None) -> tuple[dict[str, Evaluation], int]:
    """Write the newest checkpoint of a run to the new folder `out`, which may be in a store:
    weights rounded to bfloat16, what `transformers` reads, and a card with the scores of these
    rounded weights. Returns these scores by split, and the bytes of the weights.

    data: the prepared text, by default the run's; its held-out splits are scored. about: the
    beginning of the card, in Markdown. progress counts scored tokens. Raises UsageError if `out`
    exists, `run` is no run of a language model, or the data is not the run's; CheckpointError for
    damage, ResourceError for the disk."""
    require(not exists(out), "the output exists already", str(out), "choose another or delete it")
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
    for split in HELD_OUT_SPLITS:
        if all(split in manifest.splits for manifest in manifests):
            stream = open_data(named, split)
            watched = StopSignal().watch("", progress, "evaluating", stream.n_tokens)
            scores[split] = evaluate_data(model, stream, batch_rows=8, progress=watched)[0]
            n_documents[split] = sum(manifest.splits[split].documents for manifest in manifests)
    sample = generate(model, [""], tokenizer=tokenizer, max_new_tokens=SAMPLE_TOKENS,
                      temperature=SAMPLE_TEMPERATURE)[0] if model.config.decodes else None
    card += [card_scores(model.config, n_documents, scores), card_end(sample)]
    return scores, write_folder(out, model, tokenizer, "\n\n".join(card))


def manifests_of_run(run: Path, description: dict[str, Any], named: str, is_given: bool) -> list[Manifest]:
    """The manifests of the text `named`. Raises UsageError unless it is here and is what the run
    was trained on."""
    for folder in () if is_given else read_mixture(named):
        require(is_folder(folder), "the run's data are not here", folder, "name their folder with --data")
    manifests = read_manifests(named)
    with damaged(run / RUN_FILE):
        of_run = description["data_sha256"]
    require(sha256_of(named, manifests) == of_run, "this is not the run's data", named,
            f"give --data what the run was trained on; {run / RUN_FILE} has its hash")
    return manifests


def write_folder(out: Name, model: LanguageModel, tokenizer: Tokenizer, card: str) -> int:
    """Write the weights in bfloat16, what `transformers` reads beside them, a manifest of all of
    these, and the card, which may be edited later. `out` is there when all of it is. Returns the
    bytes of the weights."""
    texts = {CONFIG_FILE: config_with_code(model_config_json(model.config)), CODE_FILE: CODE,
             **tokenizer_files(tokenizer)}
    files = {name: text.encode() for name, text in texts.items()}
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
    with system_errors(str(out)), (uploaded(out) if is_address(out) else new_folder(Path(out))) as aside:
        entry = write_file(aside / WEIGHTS_FILE, weights)
        files |= {MANIFEST: manifest_of(files, {WEIGHTS_FILE: entry}), CARD_FILE: card.encode()}
        for name, content in files.items():
            (aside / name).write_bytes(content)
    return int(entry["bytes"])

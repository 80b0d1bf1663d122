"""Export a run to a folder for sharing: bfloat16 weights, configuration, tokenizer and a model card.

The card's scores are of the exported bfloat16 weights, not of the float32 weights of training."""

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from lineartime.atomic_io import remove_leftovers, written_aside
from lineartime.checkpoint import MANIFEST, manifest_of, write_tensors
from lineartime.config import model_config
from lineartime.config_json import model_config_json
from lineartime.data.mixture import read_mixture
from lineartime.data.run_settings import RUN_FILE
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import open_data, read_manifests, sha256_of
from lineartime.errors import CheckpointError, ResourceError, UsageError
from lineartime.evaluation import Evaluation, evaluate_data
from lineartime.generation.generate import generate
from lineartime.load import is_exported, load_model
from lineartime.model import DocumentClassifier, DocumentEncoder, LanguageModel, SpanModel
from lineartime.release.card import Card, Sample, model_card
from lineartime.release.provenance import provenance
from lineartime.run import CONFIG_FILE, METRICS_FILE, WEIGHTS_FILE, read_metrics, read_run
from lineartime.settings import require
from lineartime.training import Progress, StopSignal
from lineartime.weights.folder import CODE, CODE_FILE, config_with_code, tokenizer_files

logger = logging.getLogger(__name__)
CARD_FILE = "README.md"
SPLITS = ("validation", "test")
SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 120, 0.8


class Exported(NamedTuple):
    """The result of `export`."""

    scores: dict[str, Evaluation]
    """By split."""
    task: str | None
    """The `--task` that the data was prepared with."""
    n_bytes: int
    """Size of the file of weights."""


def export(run: Path, out: Path, *, data: Path | None, about: str, prompt: str, device: torch.device,
           strict: bool = False, progress: Progress | None = None) -> Exported:
    """Write the newest checkpoint of a run to the new folder `out`: weights rounded to bfloat16, `config.json`,
    `tokenizer.json`, what `transformers` needs to open it without an import of ours (`weights.folder`), the card, and a
    manifest of all but the card. `lineartime.load_model` opens it too.

    data: the prepared text, by default the run's; its held-out splits are scored. about: the beginning of the card, in
    Markdown. prompt: the prompt of the card's sample. strict: see `load_model`. progress counts scored tokens. Raises
    UsageError if `out` exists, `run` is no run of a language model, or the data is not the run's; CheckpointError for
    damage, ResourceError for the disk."""
    remove_leftovers(out)
    require(not out.exists(), "the output exists already", str(out), "choose another or delete it")
    require(not is_exported(run), "this is an exported folder already", str(run), "copy it")
    description = read_run(run)
    model, tokenizer, facts = load_model(run, strict=strict)
    if isinstance(model, SpanModel):
        raise UsageError("a model that answers questions is not exported", str(run), "export a language model")
    if isinstance(model, DocumentClassifier | DocumentEncoder):
        raise UsageError("this is one run of a fine-tuning on documents", str(run), "name the folder that holds it")
    try:
        model_config(description["preset"], description["task"])  # the card has the command that trains such a model
    except UsageError as e:
        raise CheckpointError("damaged", run / RUN_FILE, str(e)) from None
    named = str(data or description["data"])
    manifests = read_manifests(named)
    require(sha256_of(named, manifests) == description["data_sha256"], "this is not the run's data", named,
            f"give --data what the run was trained on; {run / RUN_FILE} has its hash")
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    model = model.to(device)
    streams = {split: open_data(named, split) for split in SPLITS if all(split in each.splits for each in manifests)}
    scores = {split: evaluate_data(model, stream, batch_rows=8, progress=StopSignal().watch(
        "", progress, "evaluating", stream.n_tokens))[0] for split, stream in streams.items()}
    lines = read_metrics(run) if (run / METRICS_FILE).exists() else []
    if not lines:
        logger.warning(f"{run / METRICS_FILE} is missing or empty: the card has no training time")
    metrics = [line for line in lines if line["step"] <= facts["step"]]
    sample = write_sample(model, tokenizer, prompt) if model.config.causal else None
    made = {**provenance(), "device": device.type, "threads": torch.get_num_threads()}
    text = [(manifest, each.weight) for manifest, each in zip(manifests, read_mixture(named), strict=True)]
    texts = {CONFIG_FILE: config_with_code(model_config_json(model.config)), CODE_FILE: CODE,
             **tokenizer_files(tokenizer)}
    files = {name: text.encode() for name, text in texts.items()}
    weights = dict(model.named_parameters())
    like = {name: torch.empty_like(weight, dtype=torch.bfloat16, device="meta") for name, weight in weights.items()}
    try:
        with written_aside(out) as aside:
            entry = write_tensors(aside / WEIGHTS_FILE, like, lambda name: weights[name].detach().bfloat16())
            card = Card(description, model.config, tokenizer.sha256, text, metrics, facts["step"], entry["bytes"],
                        scores, sample, made)
            files |= {MANIFEST: manifest_of(files, {WEIGHTS_FILE: entry}), CARD_FILE: model_card(card, about).encode()}
            for name, content in files.items():
                (aside / name).write_bytes(content)
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None
    return Exported(scores, manifests[0].settings.get("task"), entry["bytes"])


def write_sample(model: LanguageModel, tokenizer: Tokenizer, prompt: str) -> Sample:
    """Continue a prompt as `lineartime generate` does with seed 0."""
    ids = generate(model, [[tokenizer.end_of_document, *tokenizer.encode(prompt)]], max_new_tokens=SAMPLE_TOKENS,
                   temperature=SAMPLE_TEMPERATURE)[0]
    return Sample(prompt, tokenizer.decode(ids), len(ids), SAMPLE_TEMPERATURE)

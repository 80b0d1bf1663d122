"""Export of a model fine-tuned on documents: a folder that `load_model`, `transformers` and `sentence-transformers`
open."""

import os
from pathlib import Path

import torch

from lineartime.atomic_io import read_bytes, remove_leftovers, written_aside
from lineartime.checkpoint import MANIFEST, manifest_of, write_tensors
from lineartime.documents.report import PICTURES, REPORT_FILE
from lineartime.errors import CheckpointError, ResourceError
from lineartime.load import load_model
from lineartime.model import DocumentClassifier
from lineartime.release.card import front_matter
from lineartime.release.export import CARD_FILE
from lineartime.run import CONFIG_FILE, WEIGHTS_FILE
from lineartime.settings import require
from lineartime.weights.folder import CODE, CODE_FILE, config_with_code, sentence_files, tokenizer_files


def export_documents(folder: Path, out: Path, *, strict: bool = False) -> int:
    """Write the best model of a folder of `lineartime finetune --task classify` or `embed` to the new folder `out`:
    weights in float32, what `transformers` and `sentence-transformers` read, and its report as the card; returns the
    bytes of the weights. Raises UsageError if `out` exists, CheckpointError for damage, ResourceError for the disk."""
    remove_leftovers(out)
    require(not out.exists(), "the output exists already", str(out), "choose another or delete it")
    model, tokenizer, facts = load_model(folder, strict=strict)
    config = read_bytes(Path(facts["checkpoint"]) / CONFIG_FILE).decode()
    files = {name: text.encode() for name, text in {
        CONFIG_FILE: config_with_code(config), CODE_FILE: CODE, **tokenizer_files(tokenizer)}.items()}
    does = "text-classification" if isinstance(model, DocumentClassifier) else "feature-extraction"
    pictures = [name for name in PICTURES if os.path.lexists(folder / name)]
    try:
        shown = {name: read_bytes(folder / name) for name in pictures}
        report = read_bytes(folder / REPORT_FILE)
    except OSError as e:
        raise CheckpointError("cannot read", e.filename, e.strerror) from None
    if not report.startswith(b"# "):
        raise CheckpointError("damaged report", folder / REPORT_FILE,
                              "take it from a copy, or fine-tune into another folder")
    shown[CARD_FILE] = front_matter(model.config, does).encode() + report
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    like = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
    try:
        with written_aside(out) as aside:
            entry = write_tensors(aside / WEIGHTS_FILE, like, lambda name: weights[name])
            files |= {MANIFEST: manifest_of(files, {WEIGHTS_FILE: entry}), **shown}
            files |= {name: text.encode() for name, text in sentence_files(model.config.d_model).items()}
            for name, content in files.items():
                (aside / name).parent.mkdir(exist_ok=True)
                (aside / name).write_bytes(content)
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None
    return int(entry["bytes"])

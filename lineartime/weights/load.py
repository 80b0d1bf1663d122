"""Open a model from a run, a checkpoint, an export, or what `save_pretrained` wrote."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime import folders
from lineartime.base.errors import CheckpointError, UsageError
from lineartime.base.files import damaged, read_json, read_text
from lineartime.base.settings import require
from lineartime.base.stores import Name, hash_of
from lineartime.config import StartingWeights, to_dict
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, as_saved
from lineartime.folders import CONFIG_FILE, WEIGHTS, WEIGHTS_FILE, best_run, named_folder, read_config, read_run
from lineartime.model.language_model import LanguageModel, SpanModel, empty_model
from lineartime.weights import checkpoint

GENERATION_FILE = "generation_config.json"
SHARDS_FILE = f"{WEIGHTS_FILE}.index.json"
"""What `save_pretrained` writes: how to generate, and which of several files has each tensor."""

logger = logging.getLogger(__name__)


def load_model(path: Name) -> tuple[LanguageModel, Tokenizer, dict[str, Any]]:
    """The model, the tokenizer, and {"checkpoint": folder, "step": step} (no step for an exported
    model). The model is in evaluation mode on the CPU, in float32; fine-tuned it is a `SpanModel`.

    path: a run, whose newest valid checkpoint is read; a checkpoint; a folder of `lineartime
    export` or `save_pretrained`; a folder of `lineartime finetune`, whose best run is read; the
    address of an exported folder; or the name of a model that ships with the package, "small". If a
    run's newest checkpoint is damaged, a warning says so and an older one is read; `run/latest`
    names the newest alone. Raises UsageError for any other path, CheckpointError for a checkpoint
    that is damaged, of another run or not finite, DataError for a bad tokenizer."""
    # The weights: of an exported folder, of a checkpoint, or of a run's newest checkpoint.
    path = best_run(named_folder(path))
    folder = path.resolve()  # `latest` is a link
    if is_exported(path):
        names, weights = weight_files(folder), dict[str, Tensor]()
        step = check_shared(folder, (CONFIG_FILE, TOKENIZER_FILE, *names))
        for name in names:
            with checkpoint.open_tensors(folder / name) as file:
                # Copies, as a run's are: views of the file lie at any byte, which matmuls round by.
                weights |= {each: file.get_tensor(each).to(torch.float32, copy=True) for each in file.keys()}
    else:
        found = checkpoint.check(folder) if (folder / checkpoint.MANIFEST).exists() else newest_checkpoint(path)
        folder, step, weights = found.path, found.step, checkpoint.read_tensors(found.path, WEIGHTS)
    facts: dict[str, Any] = {"checkpoint": str(folder), **({} if step is None else {"step": step})}
    config, kind = read_config(folder)
    tokenizer = Tokenizer(as_saved(read_text(folder / TOKENIZER_FILE), folder), str(folder / TOKENIZER_FILE))
    if config.n_layers > len(weights):  # a layer takes milliseconds to build
        raise CheckpointError("the weights are not this model's", folder / WEIGHTS_FILE,
                              f"{len(weights)} tensors for n_layers = {config.n_layers} in {CONFIG_FILE}")
    # Built without memory of its own; then the weights that were read become its parameters.
    model = empty_model(config, SpanModel if kind == folders.QUESTION_ANSWERING else LanguageModel)
    checkpoint.check_tensors(weights, dict(model.float().named_parameters()), folder / WEIGHTS_FILE)
    model.load_state_dict(weights, assign=True)
    model.end_tokens |= end_tokens(folder)
    return model.eval(), tokenizer, facts


def load_span_model(run: Name) -> tuple[SpanModel, Tokenizer, dict[str, Any]]:
    """`load_model` for a model fine-tuned on questions. Raises UsageError for any other model."""
    model, tokenizer, facts = load_model(run)
    if not isinstance(model, SpanModel):
        raise UsageError("this model was not fine-tuned on questions", run, "see `lineartime finetune`")
    return model, tokenizer, facts


def find_weights(source: StartingWeights) -> tuple[Path, dict[str, Any]]:
    """The folder of the weights that a run begins with, and what `run.json` stores of them. Raises
    UsageError and CheckpointError as `load_model` does."""
    folder = named_folder(source.name).resolve()  # `latest` is a link
    require((folder / WEIGHTS_FILE).exists() or not (folder / SHARDS_FILE).exists(), "weights in several files",
            str(folder), "save them in one: save_pretrained(..., max_shard_size='1TB')")
    if is_exported(folder):
        check_shared(folder, (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE))
    elif (folder / checkpoint.MANIFEST).exists():
        checkpoint.check(folder)
    else:
        folder = newest_checkpoint(folder).path
    # Weights of a sharded run lie in several files; their manifest has the hash of each.
    hashed = hash_of(folder / (WEIGHTS_FILE if (folder / WEIGHTS_FILE).exists() else checkpoint.MANIFEST))
    return folder, {"from": source.name, "from_sha256": hashed["sha256"], "from_model": to_dict(source.model)}


def newest_checkpoint(run: Path) -> checkpoint.Checkpoint:
    """A run's newest valid checkpoint, with a warning if a newer one is damaged. Raises UsageError
    if there is none, CheckpointError for damage and for a checkpoint of another run."""
    id_of_run, newest = read_run(run)["id"], checkpoint.newest(run)
    if newest is None:
        raise UsageError("no checkpoint yet", run, "let the training save one")
    if newest.damaged:
        logger.warning(f"using step {newest.step} of {run}, newer checkpoints are damaged ({newest.reasons()})")
    require(newest.run == id_of_run, "a checkpoint of another run", newest.path, "move it away", CheckpointError)
    return newest


def is_exported(path: Path) -> bool:
    """Whether a folder holds weights, or only their manifest, but is no checkpoint and no run."""
    here = any((path / name).exists() for name in (WEIGHTS_FILE, SHARDS_FILE, checkpoint.MANIFEST))
    return here and not has_optimizer(path) and not (path / folders.RUN_FILE).exists()


def has_optimizer(folder: Path) -> bool:
    """Whether a folder holds an optimizer's state, as a checkpoint does."""
    return any(folder.glob(f"{folders.OPTIMIZER}*{checkpoint.TENSORS}"))


def check_shared(folder: Path, names: Iterable[str]) -> int | None:
    """Compare files with a folder's manifest, if it has one; returns its step. Raises UsageError
    for weights in parts, CheckpointError for a difference and a checkpoint without it."""
    require(not (folder / f"{WEIGHTS}{checkpoint.INDEX}").exists(), "the weights of a sharded run are in parts", folder,
            "`lineartime export` writes them as one file, and load_model reads them")
    if (folder / checkpoint.MANIFEST).exists():
        return checkpoint.check_files(folder, names).get("step")
    if has_optimizer(folder):
        raise CheckpointError("damaged checkpoint", folder, f"{checkpoint.MANIFEST} is missing")
    return None


def weight_files(folder: Path) -> list[str]:
    """An exported folder's files of weights. Raises CheckpointError if their list is damaged."""
    if (folder / WEIGHTS_FILE).exists() or not (folder / SHARDS_FILE).exists():
        return [WEIGHTS_FILE]
    with damaged(folder / SHARDS_FILE):
        return sorted({str(name) for name in read_json(folder / SHARDS_FILE)["weight_map"].values()})


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end a text for transformers, from generation_config.json or else config.json.
    Raises CheckpointError for a file that is damaged."""
    place = folder / (GENERATION_FILE if (folder / GENERATION_FILE).exists() else CONFIG_FILE)
    found = read_json(place).get("eos_token_id")
    with damaged(place):
        return {int(each) for each in (found if isinstance(found, list) else [] if found is None else [found])}

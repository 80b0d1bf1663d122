"""A run's folder: description, metrics, checkpoints. It stays valid whenever the process dies."""

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime import folders
from lineartime.base.errors import CheckpointError, ResourceError
from lineartime.base.files import open_regular, read_json, write_atomically, write_json
from lineartime.base.ranks import ALONE, Ranks, gather_json
from lineartime.base.settings import require
from lineartime.config import TrainConfig, to_dict
from lineartime.data.tokens import DATA_MANIFEST
from lineartime.model.language_model import LanguageModel
from lineartime.training.ordered import ParameterPart, parameter_parts
from lineartime.training.plot import PLOT_FILE
from lineartime.training.run_config import RunConfig
from lineartime.weights import checkpoint

SAMPLE_FILE = "sample.txt"
Wanted = dict[str, tuple[Sequence[int], int, int]]
"""Elements of flattened tensors by name: the whole tensor's shape, and where they begin and end."""

logger = logging.getLogger(__name__)


class Run:
    """A run's folder. Each of several ranks has a `Run`: rank 0 alone writes the description
    (`run.json`) and the metrics, every rank a part of a checkpoint."""

    def __init__(self, out: Path, config: RunConfig, facts: dict[str, Any], ranks: Ranks = ALONE):
        """Open or create the folder; a run without a checkpoint is overwritten. facts: what the
        numbers depend on, such as the data's hash. Raises UsageError, with the differences, if the
        folder holds another run; CheckpointError if the run there has lost its description."""
        self.out, self.config, self.ranks = out, config, ranks
        self.id: str = gather_json(self.describe(facts) if ranks.is_first else None, ranks)[0]

    @property
    def is_sharded(self) -> bool:
        return self.config.train.shard and self.ranks.size > 1

    def describe(self, facts: dict[str, Any]) -> str:
        """Write the description, or compare it with the one there; returns the run's id."""
        out, config = self.out, self.config
        # What a run is: its settings, and the facts that its numbers depend on.
        description = {"preset": config.preset, "task": config.task, "data": config.data,
                       "model": to_dict(config.model), "train": to_dict(config.train), **facts}
        path = out / folders.RUN_FILE
        saved = (out / folders.RESULT_FILE).exists() or folders.saved_steps(out)
        if not path.exists() and (saved or (out / folders.METRICS_FILE).exists()):
            raise CheckpointError("a run without its description", out, f"{path.name} is missing; give another --out")
        if not saved:
            if path.exists():  # of a run that has saved nothing, or somebody's own
                folders.read_run(out)
            else:
                for name in (SAMPLE_FILE, PLOT_FILE, DATA_MANIFEST):
                    require(not (out / name).exists(), "a file that is no run's", out / name, "give another --out")
            description = {"id": secrets.token_hex(8), **description}
            write_json(path, description)
            return description["id"]
        stored = folders.read_run(out)
        # The data and the first weights are compared by hash: a folder may have moved.
        same_weights = stored.get("from_sha256") == description.get("from_sha256")
        kept = ("id", "data", "from_model", "minutes", *["from"] * same_weights)
        description |= {name: stored.get(name) for name in kept}
        # A run that differs in nothing but more steps goes on to these.
        changed, steps = different(stored, description), config.train.steps
        if steps > stored["train"]["steps"] and len(changed) == 1:
            self.lengthen(TrainConfig(**stored["train"]), steps)
        else:
            how = f"{'; '.join(changed)}. Give another --out, or the same settings"
            require(not changed, "another run is here", out, how)
        return stored["id"]

    def lengthen(self, train: TrainConfig, steps: int) -> None:
        """Give the run more steps, and remove its old result. Raises UsageError without a
        checkpoint, and if a run of that length would have made other steps so far."""
        done = max(folders.saved_steps(self.out), default=0)
        why = None if done else "no checkpoint is there to go on from. Give another --out"
        last_at_peak = {"wsd": train.decay_from + 1, "constant": steps}.get(train.schedule, train.warmup_steps)
        if done > last_at_peak:
            why = (f"its learning rate has already fallen, by schedule = {train.schedule}. Give another --out, and "
                   f"begin anew with --from {self.out}")
        require(why is None, "another run is here", self.out, f"steps: {train.steps} -> {steps}; {why}")
        (self.out / folders.RESULT_FILE).unlink(missing_ok=True)  # first: a kill must leave no result of other steps
        description = read_json(self.out / folders.RUN_FILE)
        description["train"]["steps"] = steps
        write_json(self.out / folders.RUN_FILE, description)
        logger.info(f"the run of {train.steps:,} steps goes on to step {steps:,}")

    def resume(self, model: LanguageModel, parts: Sequence[ParameterPart], optimizer: torch.optim.AdamW,
               first: Callable[[Wanted], dict[str, Tensor]] | None = None) -> int:
        """Load the newest valid checkpoint, with a warning if a newer one is damaged; returns the
        number of steps done. Without a checkpoint `first` gives the weights to begin with, or the
        model keeps its own. The rank reads the moments of its `parts`, whatever number of ranks
        wrote them. Raises CheckpointError, and DataError for damaged metrics."""
        # The weights that this rank holds: all of them, or its parts of a sharded model.
        newest = checkpoint.newest(self.out, self.ranks)
        held = parts if self.config.train.shard else parameter_parts(model)
        wanted: Wanted = {part.name: part.place for part in held}
        step = 0
        if newest is not None:
            require(newest.run == self.id, "a checkpoint of another run", newest.path, "move it away", CheckpointError)
            put(checkpoint.read_parts(newest.path, folders.WEIGHTS, wanted), held)
            self.load_moments(newest, parts, optimizer)
            step = newest.step
        elif first is not None:
            put(first(wanted), held)
        if self.ranks.is_first:
            self.truncate_metrics(step)
        if newest is not None and newest.damaged:
            logger.warning(f"going back to step {step}, newer checkpoints are damaged ({newest.reasons()})")
        return step

    def load_moments(self, saved: checkpoint.Checkpoint, parts: Sequence[ParameterPart],
                     optimizer: torch.optim.AdamW) -> None:
        """Give the optimizer its state in the form that its first step makes."""
        moments = checkpoint.read_parts(saved.path, folders.OPTIMIZER, {
            f"{kind}.{part.name}": part.place for part in parts for kind in part.moments})
        with torch.no_grad():
            for part in parts:
                state = {"step": torch.tensor(float(saved.step), device=part.updated.device)}
                for kind in part.moments:
                    state[kind] = torch.zeros_like(part.updated)
                    state[kind].view(-1)[: part.stop - part.start] = moments[f"{kind}.{part.name}"]
                optimizer.state[part.updated] = state

    def save(self, step: int, model: LanguageModel, parts: Sequence[ParameterPart], optimizer: torch.optim.AdamW,
             extra_files: dict[str, str]) -> None:
        """Write a checkpoint: weights, moments, `config.json` for `transformers`, and the texts
        `extra_files` by file name. Every rank writes its moments and, if sharded, weights."""
        ranks, files = self.ranks, {}
        own = [part for part in parts if part.start < part.stop]
        tensors = {folders.OPTIMIZER: {f"{kind}.{part.name}": held_by(part, optimizer.state[part.updated][kind])
                               for part in own for kind in part.moments}}
        if self.is_sharded:
            tensors[folders.WEIGHTS] = {part.name: held_by(part, part.updated.detach()) for part in own}
        # Each of several ranks writes a file, and an index says which elements each file has.
        if ranks.size > 1:
            places = gather_json({part.name: [part.start, part.stop] for part in own}, ranks)
            for stem in tuple(tensors):
                tensors[file_of(stem, ranks.rank, ranks.size)] = tensors.pop(stem)
                files[f"{stem}{checkpoint.INDEX}"] = json.dumps(index_of(stem, parts, places), indent=1) + "\n"
        if ranks.is_first:
            if not self.is_sharded:
                tensors[folders.WEIGHTS] = {name: p.detach() for name, p in model.named_parameters()}
            files |= {folders.CONFIG_FILE: folders.model_config_json(model.config), **extra_files}
            with suppress(OSError), open_regular(self.out / folders.METRICS_FILE) as metrics:
                os.fsync(metrics.fileno())  # metrics reach the disk before the checkpoint of their step
        checkpoint.save(self.out, step, run=self.id, tensors=tensors, files=files if ranks.is_first else {},
                        keep=self.config.train.keep, ranks=ranks)

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics, or raise ResourceError; a resume drops half a line."""
        path = self.out / folders.METRICS_FILE
        if not self.ranks.is_first:
            return
        try:
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as e:
            raise ResourceError("the metrics cannot be written", f"{path}: {e.strerror}",
                                "free some space; the same command goes on from the newest checkpoint") from e

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines that a resume writes again: those after `step`, the scores of `step`, a
        partial line. Raises DataError, and changes nothing, if another line is damaged."""
        path = self.out / folders.METRICS_FILE
        if path.exists():
            kept = [record for record in (folders.read_metrics(self.out) if step else [])
                    if record["step"] < step or (record["step"] == step and "held_out" not in record)]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def put(weights: dict[str, Tensor], parts: Sequence[ParameterPart]) -> None:
    """Copy stored weights into the parts of a model."""
    with torch.no_grad():
        for part in parts:
            part.updated.view(-1)[: part.stop - part.start] = weights[part.name].to(part.updated.device)


def held_by(part: ParameterPart, x: Tensor) -> Tensor:
    """A part's weights or moments as in a checkpoint: the parameter's shape if whole, else flat."""
    n = part.stop - part.start
    return x.view(-1)[:n].view(part.parameter.shape) if n == part.parameter.numel() else x[:n]


def file_of(stem: str, rank: int, n_ranks: int) -> str:
    """The stem of one rank's file of tensors that are in several files."""
    return f"{stem}-{rank + 1}-of-{n_ranks}"


def index_of(stem: str, parts: Sequence[ParameterPart], places: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """The index of tensors in several files: their shapes, and which elements each file has.
    places: where each rank's part of each parameter begins and ends, by name."""
    index = {}
    for part in parts:
        files = [[file_of(stem, rank, len(places)) + checkpoint.TENSORS, *at[part.name]]
                 for rank, at in enumerate(places) if part.name in at]
        for name in [part.name] if stem == folders.WEIGHTS else [f"{kind}.{part.name}" for kind in part.moments]:
            index[name] = {"shape": list(part.parameter.shape), "parts": files}
    return index


def different(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences of two descriptions, each as `name: old -> new`."""
    changed = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            changed += different(a, b)
        elif a != b:
            changed.append(f"{name}: {a} -> {b}")
    return changed

"""A run's folder: its description, metrics and checkpoints. It stays valid if the process is killed at any moment."""

import errno
import json
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lineartime import checkpoint
from lineartime.atomic_io import open_regular, read_bytes, read_json, read_json_lines, write_atomically, write_json
from lineartime.config import ModelConfig, TrainConfig, stored_train, to_dict
from lineartime.config_json import (
    CLASSIFICATION,
    QUESTION_ANSWERING,
    architecture_of,
    head_from_json,
    is_encoder,
    model_config_from_json,
    model_config_json,
)
from lineartime.data.pretrained import named_folder
from lineartime.data.run_settings import RESULT_FILE, RUN_FILE
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer
from lineartime.distributed.ordered import Part, parts_of
from lineartime.distributed.ranks import ALONE, Ranks, gather_json
from lineartime.errors import CheckpointError, ResourceError, UsageError
from lineartime.model import DocumentClassifier, DocumentEncoder, LanguageModel, SpanModel
from lineartime.run_config import RunConfig
from lineartime.settings import replace_fields

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
WEIGHTS, WEIGHTS_FILE = "model", "model.safetensors"
SHARDS_FILE = f"{WEIGHTS_FILE}.index.json"
"""What `save_pretrained` writes beside weights in several files: the file of each tensor."""
OPTIMIZER = "optimizer"
"""Name of the moments: those of one process are in `optimizer.safetensors`, those of several in a file each."""
MAX_TIME = 1e11
"""Seconds since 1970 that a line of metrics may tell; the year is about 5100."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each parameter."""

Wanted = dict[str, tuple[Sequence[int], int, int]]
"""Elements of tensors by name: the shape of the whole tensor, the first element of it flattened, and the end."""

logger = logging.getLogger(__name__)


class Run:
    """A run's folder: its description (`run.json`), its metrics, its checkpoints.

    Each of several ranks has one. Rank 0 alone writes the description and the metrics; a checkpoint has a part of every
    rank."""

    def __init__(self, out: Path, config: RunConfig, facts: dict[str, Any], ranks: Ranks = ALONE):
        """Open or create the folder. facts: hashes of the data and the tokenizer.

        A run without a checkpoint is overwritten. Raises UsageError, with the differences, if the folder holds another
        run; CheckpointError if the run there has lost its description."""
        self.out, self.config, self.ranks = out, config, ranks
        self.id: str = gather_json(self.describe(facts) if ranks.is_first else None, ranks)[0]
        self.waiting = ""
        """Metrics lines that could not be written yet."""
        self.best: int | None = None
        """The step whose checkpoint is kept, see `best_so_far`."""
        self.whole: int | None = None
        """Bytes of the metrics before a line that could not be written, a part of which may be there."""

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.config.train.shard and self.ranks.size > 1

    def describe(self, facts: dict[str, Any]) -> str:
        """Write the description, or compare it with the one that is there; returns the run's id. Raises as `Run`."""
        out, config = self.out, self.config
        description = {"preset": config.preset, "task": config.task, "data": config.data,
                       "model": to_dict(config.model), "train": to_dict(config.train), **facts}
        path = out / RUN_FILE
        saved = (out / RESULT_FILE).exists() or any(out.glob("step-*"))
        if not path.exists() and (saved or (out / METRICS_FILE).exists()):
            raise CheckpointError("a run without its description", out, f"{RUN_FILE} is missing; give another --out")
        if not saved:
            description = {"id": secrets.token_hex(8), **description}
            write_json(path, description)
            return description["id"]
        stored = read_run(out)
        # The data's hash counts, not its folder; the name of the weights counts, not what they are now.
        same_anyway = {"id": stored["id"], "data": config.data, "from_model": stored.get("from_model")}
        old, new = stored["train"]["steps"], config.train.steps
        longer = stored | {"train": stored["train"] | {"steps": new}}
        if new > old and not different({**longer, **same_anyway}, {**description, **same_anyway}):
            self.lengthen(TrainConfig(**stored["train"]), new)
            stored = longer
        changed = different({**stored, **same_anyway}, {**description, **same_anyway})
        if changed:
            todo = f"{'; '.join(changed)}. Give another --out, or the same settings"
            raise UsageError("another run is here", out, todo)
        return stored["id"]

    def lengthen(self, train: TrainConfig, steps: int) -> None:
        """Give the run more steps, if what it has trained is what it would have with these from the start. The result
        of its old end is removed. Raises UsageError if the learning rate has fallen already."""
        done = max(checkpoint.saved_steps(self.out), default=0)
        why = None if done else "no checkpoint is there to go on from. Give another --out"
        if train.schedule in ("linear", "cosine") or (train.schedule == "wsd" and done - 1 > train.decay_from):
            why = (f"its learning rate has already fallen, by schedule = {train.schedule}. Give another --out, and "
                   f"begin anew with --from {self.out}")
        if why is not None:
            raise UsageError("another run is here", self.out, f"steps: {train.steps} -> {steps}; {why}")
        (self.out / RESULT_FILE).unlink(missing_ok=True)  # before its steps are no longer those of the description
        description = read_json(self.out / RUN_FILE)
        description["train"]["steps"] = steps
        write_json(self.out / RUN_FILE, description)
        logger.info(f"the run of {train.steps:,} steps goes on to step {steps:,}")

    def resume(self, model: LanguageModel, parts: Sequence[Part], optimizer: torch.optim.AdamW,
               first: Callable[[Wanted], dict[str, Tensor]] | None = None) -> int:
        """Load the newest valid checkpoint, with a warning if a newer one is damaged. Returns the number of steps done,
        0 without a checkpoint; then `first` gives the weights to begin with, or the model keeps its own. Raises
        CheckpointError, and DataError for damaged metrics.

        parts: what the rank updates; it reads no other moments, whatever number of ranks has written them."""
        newest = checkpoint.newest(self.out, self.ranks)
        held = parts if self.config.train.shard else parts_of(model)
        wanted: Wanted = {part.name: (part.whole.shape, part.start, part.stop) for part in held}

        def put(weights: dict[str, Tensor]) -> None:
            with torch.no_grad():
                for part in held:
                    part.own.view(-1)[: part.stop - part.start] = weights[part.name].to(part.own.device)

        if newest is None:
            if first is not None:
                put(first(wanted))
            if self.ranks.is_first:
                self.truncate_metrics(0)
            return 0
        if newest.run != self.id:
            raise CheckpointError("a checkpoint of another run", newest.path, "move it away")
        put(checkpoint.read_parts(newest.path, WEIGHTS, wanted))
        moments = checkpoint.read_parts(newest.path, OPTIMIZER, {
            f"{kind}.{part.name}": (part.whole.shape, part.start, part.stop) for part in parts for kind in MOMENTS})
        with torch.no_grad():
            for part in parts:
                state = {kind: torch.zeros_like(part.own) for kind in MOMENTS}
                for kind in MOMENTS:
                    state[kind].view(-1)[: part.stop - part.start] = moments[f"{kind}.{part.name}"]
                optimizer.state[part.own] = {"step": torch.tensor(float(newest.step), device=part.own.device), **state}
        if self.ranks.is_first:
            self.truncate_metrics(newest.step)
        if newest.damaged:
            logger.warning(f"going back to step {newest.step}, newer checkpoints are damaged ({newest.reasons()})")
        return newest.step

    def save(self, step: int, model: LanguageModel, parts: Sequence[Part], optimizer: torch.optim.AdamW,
             extra_files: dict[str, str]) -> None:
        """Write a checkpoint: weights, optimizer state, `config.json` for `transformers`, and the texts `extra_files`
        by file name. Every rank calls it, and writes the moments of its parts."""
        ranks, files = self.ranks, {}
        own = [part for part in parts if part.start < part.stop]
        tensors = {OPTIMIZER: {f"{kind}.{part.name}": held_by(part, optimizer.state[part.own][kind])
                               if part.own in optimizer.state else torch.zeros_like(held_by(part, part.own))
                               for part in own for kind in MOMENTS}}
        if self.is_sharded:
            tensors[WEIGHTS] = {part.name: held_by(part, part.own.detach()) for part in own}
        shapes = {name: list(p.shape) for name, p in model.named_parameters()}
        if ranks.size > 1:
            places = gather_json({part.name: [part.start, part.stop] for part in own}, ranks)
            for stem, kinds in ((OPTIMIZER, [f"{kind}." for kind in MOMENTS]), (WEIGHTS, [""])):
                if stem in tensors:
                    tensors[file_of(stem, ranks.rank, ranks.size)] = tensors.pop(stem)
                    files[checkpoint.index_name(stem)] = json.dumps({f"{kind}{name}": {"shape": shape, "parts": [
                        [file_of(stem, rank, ranks.size) + checkpoint.TENSORS, *at[name]]
                        for rank, at in enumerate(places) if name in at]}
                        for name, shape in shapes.items() for kind in kinds}, indent=1) + "\n"
        if ranks.is_first:
            if not self.is_sharded:
                tensors[WEIGHTS] = {name: p.detach() for name, p in model.named_parameters()}
            files |= {CONFIG_FILE: model_config_json(model.config), **extra_files}
            with suppress(OSError), open_regular(self.out / METRICS_FILE) as metrics:
                os.fsync(metrics.fileno())  # metrics reach the disk before the checkpoint of their step
        checkpoint.save(self.out, step, run=self.id, tensors=tensors, files=files if ranks.is_first else {},
                        keep=self.config.train.keep, spare=self.best, ranks=ranks)

    def best_so_far(self) -> int:
        """The number of evaluations since the last with a held-out "score" or loss better than all before: a score such
        as macro F1 may stand still while the model learns. From now on the checkpoint of `best` is kept: the step of
        the highest score, of equal ones that with the lowest loss."""
        lines = read_metrics(self.out) if self.ranks.is_first and (self.out / METRICS_FILE).exists() else []
        scored = gather_json([(line["step"], line["held_out"]["score"], -line["held_out"]["loss"]) for line in lines
                              if "held_out" in line], self.ranks)[0]
        if not scored:
            return 0
        self.best = max(scored, key=lambda each: each[1:])[0]
        n_since, most = 0, (-math.inf, -math.inf)
        for _, score, gain in scored:
            n_since = 0 if score > most[0] or gain > most[1] else n_since + 1
            most = max(most[0], score), max(most[1], gain)
        return n_since

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics. If the disk is full, warn once and keep the lines until there is room."""
        if not self.ranks.is_first:
            return
        path, warned = self.out / METRICS_FILE, bool(self.waiting)
        self.waiting += json.dumps(record) + "\n"
        try:
            with open(path, "ab", buffering=0, opener=lambda name, flags: os.open(
                    name, flags | os.O_NONBLOCK, 0o666)) as file:  # a pipe is not waited for
                self.drop_half_line()
                self.whole = file.seek(0, os.SEEK_END) if path.is_file() else None
                if file.write(self.waiting.encode()) < len(self.waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting, self.whole = "", None
        except OSError as e:
            with suppress(OSError):
                self.drop_half_line()
            if not warned:
                logger.warning(f"metrics not written: {path}; {e.strerror}")

    def drop_half_line(self) -> None:
        """Remove what `log` could write of a line. Raises OSError."""
        path = self.out / METRICS_FILE
        if self.whole is not None and path.stat().st_size > self.whole:
            os.truncate(path, self.whole)

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines that a resume writes again: those after `step`, the scores of `step`, a partial line. Raises
        DataError, and changes nothing, if another line is damaged."""
        path = self.out / METRICS_FILE
        if path.exists():
            kept = [record for record in (read_metrics(self.out) if step else [])
                    if record["step"] < step or (record["step"] == step and "held_out" not in record)]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def held_by(part: Part, x: Tensor) -> Tensor:
    """A tensor of the optimizer's as a checkpoint has it: in the shape of a whole parameter, or flat and not padded."""
    n = part.stop - part.start
    if n == part.whole.numel():
        return x.view(-1)[:n].view(part.whole.shape)
    return x[:n]


def file_of(stem: str, rank: int, n_ranks: int) -> str:
    """The stem of a rank's file of tensors that are in several."""
    return f"{stem}-{rank + 1}-of-{n_ranks}"


def read_run(out: Path) -> dict[str, Any]:
    """A run's description, in which a field that is newer than the run has its default. Raises UsageError if it is
    missing, CheckpointError if it is damaged."""
    if not (out / RUN_FILE).exists():
        raise UsageError("not a run", out, "give the --out folder of `lineartime train`")
    description = read_json(out / RUN_FILE)
    texts, tables = ("id", "preset", "task", "data"), ("model", "train")
    if not (all(isinstance(description.get(name), str) for name in texts)
            and all(isinstance(description.get(name), dict) for name in tables)):
        raise CheckpointError("damaged", out / RUN_FILE, "it is no description of a run")
    try:
        configs = {"model": replace_fields(ModelConfig(), description["model"]),
                   "train": stored_train(description["train"])}
    except UsageError as e:
        raise CheckpointError("damaged", out / RUN_FILE, str(e)) from None
    return description | {name: to_dict(config) for name, config in configs.items()}


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without a last line that was cut off. Raises DataError for any other line that is damaged.
    """
    def parse(record: Any) -> dict[str, Any]:
        if type(record["step"]) is not int or record["step"] < 0:
            raise ValueError("a step is a whole number")
        if not (has_numbers(record["held_out"], "loss") if "held_out" in record
                else has_numbers(record, "loss", "learning_rate")):
            raise ValueError("its numbers are missing or not numbers")
        clock, trained = record["clock"], "held_out" not in record
        if not has_numbers(clock, "time", *["tokens_per_s", "cpu_s"] * trained) or not 0 < clock["time"] < MAX_TIME or (
                trained and clock["tokens_per_s"] <= 0):
            raise ValueError("its clock has no times")
        return record

    return read_json_lines(out / METRICS_FILE, parse, "a line of metrics")


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


def read_result(out: Path) -> dict[str, Any]:
    """A completed run's result. Raises CheckpointError if it is missing, damaged, or of another run."""
    path, result, run = out / RESULT_FILE, read_json(out / RESULT_FILE), read_run(out)
    if result.get("run", run["id"]) != run["id"]:  # older versions wrote no id
        raise CheckpointError("damaged", path, "it is the result of another run")
    if type(result.get("steps")) is not int or result["steps"] != run["train"].get("steps"):
        raise CheckpointError("damaged", path, f"its steps are not those of {RUN_FILE}")
    if "held_out" in result:
        scores = result["held_out"]
        blocks = scores.get("loss_by_position", []) if isinstance(scores, dict) else []
        whole = has_numbers(scores, "loss") and isinstance(blocks, list) and all(
            has_numbers(block, "first", "last", "loss") and 1 <= block["first"] <= block["last"] for block in blocks)
    else:
        whole = has_numbers(result, "loss", "exact_match", "f1")
    if not whole or not has_numbers({"peak_mib": 0.0, **result}, "peak_mib"):
        raise CheckpointError("damaged", path, "its scores are missing or not numbers")
    return result


def read_fine_tuning(out: Path) -> dict[str, Any]:
    """The result of a completed folder of `lineartime finetune`. Raises CheckpointError if it is missing or damaged."""
    path, result = out / RESULT_FILE, read_json(out / RESULT_FILE)
    best, rates = result.get("best"), result.get("learning_rates")
    if not isinstance(rates, dict) or best not in [f"lr-{rate}" for rate in rates]:
        raise CheckpointError("damaged", path, "it names no best run")
    documents = "task" in result
    if not all(has_numbers(scores, "score", "best_step") if documents else has_numbers(scores, "exact_match", "f1")
               for scores in [*rates.values(), *([] if documents else [result.get("word_overlap")])]):
        raise CheckpointError("damaged", path, "its scores are missing or not numbers")
    settings = result.get("fine_tuning")
    trained = settings.get("train") if isinstance(settings, dict) else None
    if not (isinstance(trained, dict) and all(isinstance(each, dict) for each in trained.values())):
        raise CheckpointError("damaged", path, "its settings are missing")
    return result


def has_numbers(scores: Any, *names: str) -> bool:
    """Whether a table has a finite number under each of these names."""
    return isinstance(scores, dict) and all(
        type(scores.get(name)) in (int, float) and abs(scores[name]) < sys.float_info.max for name in names)


def result_or_none(out: Path, read: Callable[[Path], dict[str, Any]], checkpoints: str) -> dict[str, Any] | None:
    """The complete result in a folder, by `read`. None without one and, with a warning, for a damaged one that can be
    written again, because the folder holds `checkpoints` (a pattern). Raises as `read` for any other."""
    if not (out / RESULT_FILE).exists():
        return None
    try:
        return read(out)
    except CheckpointError as e:
        if not any(out.glob(checkpoints)):
            raise
        logger.warning(f"{e}; going on from the newest checkpoint, to write it again")
        return None


def best_run(out: Path) -> Path:
    """The best run in a completed folder of `lineartime finetune`, of documents the best checkpoint of that run; any
    other folder itself. Raises CheckpointError for a damaged folder."""
    if (out / RUN_FILE).exists() or not (out / RESULT_FILE).exists():
        return out
    result = read_fine_tuning(out)
    best = out / result["best"]
    if not (best / RUN_FILE).exists():
        raise CheckpointError("damaged", out / RESULT_FILE, "the best run is not there")
    if "task" not in result:
        return best
    step = int(result["learning_rates"][result["best"].removeprefix("lr-")]["best_step"])
    return best / f"step-{step:08d}"


def load_model(path: Path | str, *, strict: bool = False) -> tuple[LanguageModel, Tokenizer, dict[str, Any]]:
    """The model, the tokenizer, and {"checkpoint": folder, "step": step} (no step for an exported model).

    path: a run, whose newest valid checkpoint is read; a checkpoint; a folder of `lineartime export` or
    `save_pretrained`; a folder of `lineartime finetune`, whose best run is read; or the name of a model that ships with
    the package, "small". strict: whether a damaged newer
    checkpoint of a run is an error; by default it is a warning. A fine-tuned model is a `SpanModel`, a
    `DocumentClassifier` or a `DocumentEncoder`. The model is in evaluation mode on the CPU, in float32. Raises
    UsageError for any other path, CheckpointError for a checkpoint that is damaged, of another run or not finite."""
    path = best_run(named_folder(path))
    folder = path.resolve()  # `latest` is a link
    if is_exported(path):
        files, weights, step = read_exported(folder)
        facts: dict[str, Any] = {"checkpoint": str(folder), **({} if step is None else {"step": step})}
    else:
        if not checkpoint.has_manifest(path):
            folder = newest_checkpoint(path, strict=strict)
        loaded = checkpoint.load(folder, WEIGHTS)
        facts = {"checkpoint": str(folder), "step": loaded.step}
        files, weights = loaded.files, checkpoint.joined(loaded, WEIGHTS)
    try:
        config = model_config_from_json(files[CONFIG_FILE])
        kind = architecture_of(files[CONFIG_FILE])
        head = head_from_json(files[CONFIG_FILE]) if kind == CLASSIFICATION else None
        tokenizer = Tokenizer(files[TOKENIZER_FILE], str(folder / TOKENIZER_FILE))
    except KeyError as e:
        raise CheckpointError("incomplete checkpoint", folder, f"{e.args[0]} is missing") from None
    except UsageError as e:
        where = folder / CONFIG_FILE
        raise UsageError(e.what, where if e.where == CONFIG_FILE else f"{e.where} in {where}", e.todo) from None
    if config.n_layers > len(weights):  # a layer takes milliseconds to build
        raise CheckpointError("the weights are not this model's", folder / WEIGHTS_FILE,
                              f"{len(weights)} tensors for n_layers = {config.n_layers} in {CONFIG_FILE}")
    with torch.device("meta"):
        model = (DocumentClassifier(config, head) if head else SpanModel(config) if kind == QUESTION_ANSWERING else
                 DocumentEncoder(config) if is_encoder(files[CONFIG_FILE]) else LanguageModel(config))
    weights = checkpoint.check_tensors(weights, dict(model.named_parameters()), folder / WEIGHTS_FILE)
    model.load_state_dict(weights, assign=True)
    return model.eval(), tokenizer, facts


def newest_checkpoint(run: Path, *, strict: bool = False) -> Path:
    """A run's newest valid checkpoint, with a warning if a newer one is damaged, which with `strict` is an error.
    Raises UsageError for another folder and without a checkpoint, CheckpointError for damage and for a checkpoint of
    another run."""
    id_of_run, newest = read_run(run)["id"], checkpoint.newest(run)
    if newest is None:
        raise UsageError("no checkpoint yet", run, "let the training save one")
    if newest.damaged and strict:
        raise CheckpointError("newer checkpoints are damaged", newest.reasons(),
                              f"step {newest.step} is whole: name {newest.path}, or do not ask for strict")
    if newest.damaged:
        logger.warning(f"using step {newest.step} of {run}, newer checkpoints are damaged ({newest.reasons()})")
    if newest.run != id_of_run:
        raise CheckpointError("a checkpoint of another run", newest.path, "move it away")
    return newest.path


def load_span_model(run: Path | str, *, strict: bool = False) -> tuple[SpanModel, Tokenizer, dict[str, Any]]:
    """`load_model` for a model fine-tuned on questions. Raises UsageError for any other model."""
    model, tokenizer, facts = load_model(run, strict=strict)
    if not isinstance(model, SpanModel):
        raise UsageError("this model was not fine-tuned on questions", run, "see `lineartime finetune`")
    return model, tokenizer, facts


def load_classifier(run: Path | str, *,
                    strict: bool = False) -> tuple[DocumentClassifier, Tokenizer, dict[str, Any]]:
    """`load_model` for a model fine-tuned on labels. Raises UsageError for any other model."""
    model, tokenizer, facts = load_model(run, strict=strict)
    if not isinstance(model, DocumentClassifier):
        raise UsageError("this model was not fine-tuned on labels", run, "see `lineartime finetune --task classify`")
    return model, tokenizer, facts


def is_exported(path: Path) -> bool:
    """Whether a folder holds weights, or a manifest of lost ones, but is neither a checkpoint nor a run."""
    here = any((path / name).exists() for name in (WEIGHTS_FILE, SHARDS_FILE)) or checkpoint.has_manifest(path)
    return here and not has_optimizer(path) and not (path / RUN_FILE).exists()


def has_optimizer(folder: Path) -> bool:
    """Whether a folder holds an optimizer's state, as a checkpoint does."""
    return any(folder.glob(f"{OPTIMIZER}*{checkpoint.TENSORS}"))


def check_shared(folder: Path, names: Iterable[str]) -> int | None:
    """Compare files with the folder's manifest; a folder of `save_pretrained`, or of an older `export`, has none.
    Returns the step of a checkpoint.

    Raises CheckpointError for a difference, and for a checkpoint without its manifest; UsageError for one whose weights
    are in parts."""
    if (folder / checkpoint.index_name(WEIGHTS)).exists():
        raise UsageError("the weights of a sharded run are in parts", folder,
                         "`lineartime export` writes them as one file, and load_model reads them")
    if checkpoint.has_manifest(folder):
        return checkpoint.check_files(folder, names)
    if has_optimizer(folder):
        raise CheckpointError("damaged checkpoint", f"{folder}: {checkpoint.MANIFEST} is missing")
    return None


def weight_files(folder: Path) -> list[str]:
    """The names of an exported folder's files of weights: one, or those that `save_pretrained` cut them into. Raises
    CheckpointError for a list of them that is none."""
    if (folder / WEIGHTS_FILE).exists() or not (folder / SHARDS_FILE).exists():
        return [WEIGHTS_FILE]
    places = read_json(folder / SHARDS_FILE).get("weight_map")
    if not isinstance(places, dict) or not all(
            isinstance(name, str) and checkpoint.FILE_NAME.fullmatch(name) for name in places.values()):
        raise CheckpointError("damaged", folder / SHARDS_FILE, "it has no file of each tensor")
    return sorted({*places.values()})


def read_exported(folder: Path) -> tuple[dict[str, str], dict[str, Tensor], int | None]:
    """The text files and the weights, converted to float32, of an exported folder; and the step, if it is a checkpoint
    without its optimizer. Raises CheckpointError, and ResourceError for weights that do not fit into memory."""
    names = weight_files(folder)
    step = check_shared(folder, (CONFIG_FILE, TOKENIZER_FILE, *names))
    files: dict[str, str] = {}
    weights: dict[str, Tensor] = {}
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        try:
            files[name] = read_bytes(folder / name).decode()
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError("cannot read", folder / name, getattr(e, "strerror", None) or str(e)) from None
    for name in names:
        try:
            open_regular(folder / name).close()  # the library would wait for a pipe
            stored = safetensors.torch.load_file(folder / name)
        except (OSError, ValueError, safetensors.SafetensorError) as e:
            raise CheckpointError("damaged", folder / name, str(e)) from None
        except MemoryError:
            raise ResourceError("out of memory", folder / name) from None
        wrong = [f"{each} is {weight.dtype}" for each, weight in stored.items() if not weight.is_floating_point()]
        if wrong:
            raise CheckpointError("weights of a wrong type", f"{folder / name}: {checkpoint.first_five(wrong)}")
        weights |= {each: weight.float() for each, weight in stored.items()}
    return files, weights, step

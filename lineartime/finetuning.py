"""Fine-tuning for any task: a pretrained model's weights in a model with a new head, and a run per learning rate.

`DIR/lr-1e-04`, ... are ordinary runs. `DIR/result.json` names the best of them, `DIR/best` is a link to it."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lineartime import checkpoint
from lineartime.atomic_io import write_json
from lineartime.config import TRAIN_FIELDS, ModelConfig, TrainConfig, stored_train
from lineartime.config import to_dict as fields_of
from lineartime.data.run_settings import RESULT_FILE, RUN_FILE
from lineartime.distributed.ranks import Ranks, connected, gather_json
from lineartime.errors import CheckpointError, UsageError
from lineartime.gau import GatedAttentionUnit
from lineartime.layers import RelPosBias
from lineartime.mhsa import MultiHeadAttention
from lineartime.model import LanguageModel
from lineartime.run import different, read_fine_tuning, result_or_none
from lineartime.run_config import RunConfig
from lineartime.settings import replace_fields, require
from lineartime.training import StopSignal

LEARNING_RATES = (1e-4, 7e-5, 5e-5)
ROWS_PER_STEP, EPOCHS, WARMUP_SHARE = 32, 5, 0.1
MOST_EPOCHS = 10**6
BEST = "best"

logger = logging.getLogger(__name__)


def require_folder(out: Path) -> None:
    """Raise UsageError for the folder of a fine-tuning where a file or another run is, before anything is read."""
    require(out.is_dir() or not out.exists(), "not a folder", str(out), "give another --out")
    require(not (out / RUN_FILE).exists(), "another run is here", str(out), "give another --out")


def with_context(model: LanguageModel, context: int, changes: dict[str, Any]) -> ModelConfig:
    """A pretrained model's configuration with rows of another length, then `changes`. Without chunks, n of
    relu(q k / n + b)^2 keeps its value. Raises UsageError for a context longer than the position tables allow."""
    config = model.config
    model.check_length(context)
    fields: dict[str, Any] = {"context": context}
    if config.chunk_size is None and config.has_bias:
        fields["attn_scale_len"] = config.scale_len
    return replace_fields(config, fields | changes)


def is_flash(config: ModelConfig) -> bool:
    """Whether a model has GAUs with chunks: the one that Section 4.3 fine-tunes with small chunks, softmax for [CLS]
    and no clipping."""
    return config.ffn == "gau" and config.chunk_size is not None


@torch.no_grad()
def copy_weights(model: LanguageModel, pretrained: LanguageModel, head: str) -> None:
    """Give a model a pretrained model's weights. head: how the names of weights begin that the pretrained model need
    not have; these stay as they are.

    Weights of the same name and shape are copied. A position table is cut to a shorter context. A position bias for
    another chunk size keeps its values by distance; greater distances get the value of the greatest. Queries are
    scaled so that q k / n keeps its value. first_to_all adds heads. Raises CheckpointError with the names of weights
    that do not fit."""
    old = dict(pretrained.named_parameters())
    old_modules = dict(pretrained.named_modules())
    done: set[str] = set()
    for name, module in model.named_modules():
        before = old_modules.get(name)
        if isinstance(module, RelPosBias) and isinstance(before, RelPosBias) and hasattr(module, "weight"):
            reach = before.n - 1
            offset = torch.arange(1 - module.n, module.n)
            module.weight.copy_(before.at(offset.clamp(-reach, reach) if hasattr(before, "weight") else offset))
            done.add(f"{name}.weight")
    wrong = []
    for name, p in model.named_parameters():
        if name in done or (name.startswith(head) and name not in old):
            continue
        if name not in old:
            wrong.append(f"{name} is missing")
        elif p.shape == old[name].shape:
            p.copy_(old[name])
        elif name == "abs_pos.weight" and p.shape[0] < old[name].shape[0]:
            p.copy_(old[name][: p.shape[0]])
        elif name.endswith((".scale_offset.gamma", ".scale_offset.beta")) and p.shape[0] > old[name].shape[0]:
            p[: old[name].shape[0]] = old[name]
        else:
            wrong.append(f"{name} is {list(old[name].shape)}, not {list(p.shape)}")
    if wrong:
        raise CheckpointError("the pretrained weights do not fit", checkpoint.first_five(wrong),
                              "keep more of the pretrained configuration")
    for name, module in model.named_modules():
        if isinstance(module, GatedAttentionUnit | MultiHeadAttention):
            scale_queries(module, old_modules[name].config)


def scale_queries(layer: GatedAttentionUnit | MultiHeadAttention, old: ModelConfig) -> None:
    """Keep q k / n of relu(q k / n + b)^2 in a layer with the weights of another n: inside chunks, and between chunks
    that have learned weights. The linear half stays as it is."""
    config = layer.config
    ratio = config.scale_len / old.scale_len if config.attn_kernel == "relu2" else 1.0
    if isinstance(layer, GatedAttentionUnit):
        for part in layer.scale_offset.parameters():
            part[0] *= ratio
        if config.chunk_pooling == "attention":
            for part in layer.get_submodule("chunk_scale_offset").parameters():
                part[0] *= config.n_chunks / old.n_chunks
    else:
        for part in layer.in_proj.parameters():
            part[: config.d_model] *= ratio
        if config.attn_type == "mixed_chunk":
            layer.scale_offset.gamma[0] /= ratio


def check_rates(learning_rates: tuple[float, ...], epochs: float, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for learning rates, epochs and settings with which no fine-tuning can be made."""
    require(len(learning_rates) > 0, "no learning rate", "learning_rates")
    require(len(set(learning_rates)) == len(learning_rates), "the same learning rate twice",
            ", ".join(f"{rate:g}" for rate in learning_rates))
    for rate in learning_rates:
        require(math.isfinite(rate) and rate > 0, "wrong value", f"learning_rate = {rate}", "it takes numbers above 0")
    require(0 < epochs <= MOST_EPOCHS, "wrong value", f"epochs = {epochs}",
            f"it takes numbers above 0, up to {MOST_EPOCHS:,}")
    require(not settings.get("shard"), "a fine-tuning is not sharded", "shard = true", "leave it out")
    require("learning_rate" not in settings, "several learning rates are tried", "learning_rate",
            "give --learning-rates")
    for name, off in (("context_parallel", 1), ("window_tokens", None)):
        require(settings.get(name) in (None, off), f"{name} is for language modelling",
                f"{name} = {settings.get(name)}", "leave it out")


def train_config(settings: Mapping[str, Any], learning_rate: float, *, n_rows: int, context: int, epochs: float,
                 clip: float | None) -> TrainConfig:
    """The fields of TrainConfig among `settings`, then batches of 32 rows, a tenth of the steps for warm-up, a save
    after each tenth and at least each 500 steps, five scores, and `clip`. n_rows: rows to train on, of `context`
    tokens. Raises UsageError for wrong values."""
    given = {name: value for name, value in settings.items() if name in TRAIN_FIELDS}
    require(context >= 1, "wrong value", f"context = {context}", "it takes whole numbers from 1")
    tokens_per_step = given.get("tokens_per_step", ROWS_PER_STEP * context)
    require(tokens_per_step >= context and tokens_per_step % context == 0,
            "tokens_per_step must be a multiple of context",
            f"tokens_per_step = {tokens_per_step}, context = {context}")
    rows = tokens_per_step // context
    most = max(TrainConfig().micro_batch_tokens // context, 1)
    micro_rows = max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)
    steps = given.get("steps", max(-(-round(n_rows * epochs) // rows), 1))
    defaults = {"tokens_per_step": tokens_per_step, "micro_batch_tokens": micro_rows * context, "steps": steps,
                "warmup_steps": round(WARMUP_SHARE * steps), "clip": clip, "keep": 1,
                "eval_every": max(steps // 5, 1), "save_every": min(max(steps // 10, 1), 500)}
    return replace_fields(TrainConfig(), {**defaults, **given, "learning_rate": learning_rate})


def name_of(rate: float) -> str:
    """A learning rate in the name of its run: `1e-04`, with as many digits as necessary."""
    return next(text for digits in range(17) if float(text := f"{rate:.{digits}e}") == rate)


def try_rates(out: Path, configs: Mapping[str, RunConfig], settings: dict[str, Any], device: torch.device,
              rank_timeout: float, stop: StopSignal, train_one: Callable[[RunConfig, Ranks], dict[str, Any]],
              rank_of: Callable[[dict[str, Any]], Any],
              finish: Callable[[str, dict[str, Any], Ranks], dict[str, Any]]) -> dict[str, Any]:
    """Train once per learning rate, or resume. Returns the content of `out`'s result file: "best" (the best run's
    folder), scores by learning rate, what `finish` returns, and the settings; with "already" if the folder was
    complete before.

    configs: runs by the names of their learning rates. settings: all that the result depends on. train_one runs one,
    or resumes it, and returns its scores; rank_of gives the number, or numbers, by which the best has the most. finish
    gets the best run's folder and all scores, and writes on rank 0 what is beside the result. Raises UsageError for a
    folder with another fine-tuning or another run, and as train_one does."""
    require_folder(out)
    with (connected(device.type, rank_timeout, between=partial(stop.check, "before the ranks met")) as ranks,
          checkpoint.lock(out) if ranks.is_first else nullcontext()):
        found = result_or_none(out, read_fine_tuning, "lr-*/step-*") if ranks.is_first else None
        complete = gather_json(found, ranks)[0]
        if complete is not None:
            check_settings(complete["fine_tuning"], settings, out)
            if ranks.is_first:
                point_to_best(out, complete)
            return {**complete, "already": True}
        rates = {}
        for name, each in configs.items():
            logger.info(f"learning rate {name}")
            rates[name] = train_one(each, ranks)
        best = f"lr-{max(rates, key=lambda name: rank_of(rates[name]))}"
        result = {"best": best, "learning_rates": rates, **finish(best, rates, ranks), "fine_tuning": settings}
        if ranks.is_first:
            point_to_best(out, result)
            write_json(out / RESULT_FILE, result)
    return result


def point_to_best(out: Path, result: dict[str, Any]) -> None:
    """Point the link `best` in a folder of fine-tunings at the best weights."""
    best = result["best"]
    step = result["learning_rates"][best.removeprefix("lr-")].get("best_step")
    checkpoint.point(out / BEST, Path(best) / ("latest" if step is None else f"step-{step:08d}"))


def check_settings(stored: dict[str, Any], whole: dict[str, Any], out: Path) -> None:
    """Raise UsageError if the completed fine-tuning in `out` had other settings."""
    trained = {name: fields_of(stored_train(each)) for name, each in stored["train"].items()}
    changed = different(stored | {"train": trained}, json.loads(json.dumps(whole)))  # older ones have fewer fields
    if changed:
        raise UsageError("another fine-tuning is here", out,
                         f"{'; '.join(changed)}. Give another --out, or the same settings")

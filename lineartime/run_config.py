"""One training run: the settings of the command line and of files, resolved to a model, its hyperparameters and its
folders."""

import typing
from dataclasses import dataclass
from typing import Any

from lineartime.config import (
    MODEL_FIELDS,
    PRESETS,
    TRAIN_FIELDS,
    ModelConfig,
    TrainConfig,
    check_context_parallel,
    model_config,
)
from lineartime.settings import parse_field, replace_fields, require, require_name

RUN_FIELDS = ("model", "from", "task", "size", "data", "out")


@dataclass(frozen=True)
class Source:
    """The weights that a run begins with: a run, a checkpoint, an exported folder or a shipped model, by the name that
    was given, and the specification of their own model."""

    name: str
    model: ModelConfig


@dataclass(frozen=True)
class RunConfig:
    """A model, its hyperparameters and its folders: `lineartime train` resolves its arguments to this and stores it.

    Raises UsageError if a micro-batch would not hold whole rows."""

    model: ModelConfig
    train: TrainConfig
    preset: str
    task: str
    data: str
    out: str
    source: Source | None = None
    """None: the initial values are drawn from the seed."""

    def __post_init__(self) -> None:
        context, micro = self.model.context, self.train.micro_batch_tokens
        require(micro % context == 0, "micro_batch_tokens must be a multiple of context",
                f"micro_batch_tokens = {micro}, context = {context}", "a micro-batch holds whole rows")
        check_context_parallel(self.model, self.train.context_parallel)
        if (window := self.train.window_tokens) is not None:
            require(self.model.causal, "window_tokens is for causal models", "causal = false", "leave it out")
            require(context % window == 0 and window % (self.model.chunk_size or 1) == 0,
                    "a row must be whole windows, and a window whole chunks",
                    f"context = {context}, window_tokens = {window}, chunk_size = {self.model.chunk_size}")
            check_context_parallel(self.model, self.n_windows, "window_tokens")

    @property
    def rows_per_step(self) -> int:
        """Rows per batch."""
        return self.train.tokens_per_step // self.model.context

    @property
    def micro_batch_rows(self) -> int:
        """Rows per forward and backward pass, at least 1."""
        return self.train.micro_batch_tokens // self.model.context

    @property
    def n_windows(self) -> int:
        """Windows of a row, see `TrainConfig.window_tokens`."""
        return self.model.context // (self.train.window_tokens or self.model.context)


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layers": 6, "d_model": 192, "query_key_dim": 64, "chunk_size": 128, "context": 512,
             "tokens_per_step": 4096, "micro_batch_tokens": 2048, "steps": 500, "learning_rate": 8e-3,
             "eval_every": 50, "eval_tokens": 16_384, "save_every": 50},
    "small": {"n_layers": 10, "d_model": 256, "query_key_dim": 128, "chunk_size": 256, "context": 2048,
              "tokens_per_step": 16_384, "micro_batch_tokens": 4096, "steps": 2000, "learning_rate": 4e-3,
              "eval_every": 100, "eval_tokens": 65_536, "save_every": 100},
    "base": {"n_layers": 24, "d_model": 512, "query_key_dim": 128, "chunk_size": 256, "context": 2048,
             "tokens_per_step": 131_072, "micro_batch_tokens": 16_384, "steps": 20_000, "learning_rate": 1e-3,
             "eval_every": 500, "eval_tokens": 262_144, "save_every": 500},
    "paper": {}}
"""Sizes of a model and its training by name, as a GAU has them. "tiny" takes minutes on a laptop, "small" hours; "base"
is for one GPU; "paper" is the preset of the task, with the steps and rates of Tables 6-10."""
HALF_RATE = ("transformer", "transformer+", "transformer++", "combiner")
"""Presets that take half of a size's learning rate, by the search at "tiny" in docs/results.md."""
PAIRS = {"clip": 1.0, "clip_scope": "global", "adam_beta2": 0.95}
"""What suits pairs of attention and FFN better than the paper's values, by the same search."""
SHAPE_FIELDS = ("n_heads", "n_layers", "d_model", "expansion_factor", "query_key_dim", "chunk_size")
"""Fields that say how large a model is."""
RECIPE_FIELDS = ("learning_rate", "warmup_steps", "clip", "clip_scope", "adam_beta2", "init_std")
"""Fields in which the sizes of another version may differ: a run that is there keeps its own."""


def size_settings(size: str, model: str, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a size for a preset, next to those that are `given`, which rows, batches, heads and warm-up fit:
    a pair of attention and FFN counts as two GAUs and has the values of `PAIRS`, a head is at least 64 wide, and the
    warm-up is a twentieth of the steps, of pairs a fifth. "paper" has none.

    Raises UsageError for an unknown size or model."""
    require_name("size", size, SIZES)
    require_name("model", model, PRESETS)
    if not (own := dict(SIZES[size])):
        return own
    preset = PRESETS[model]
    if model in HALF_RATE:
        own["learning_rate"] /= 2
    if is_pairs := preset.ffn != "gau":
        own |= {**PAIRS, "n_layers": own["n_layers"] // 2}
        del own["query_key_dim"]
    if preset.chunk_size is None:
        del own["chunk_size"]
    # A micro-batch is whole rows, and a step whole micro-batches, whatever context was given.
    both = own | given
    numbers = [both[name] for name in ("context", "micro_batch_tokens", "tokens_per_step", "steps", "d_model")]
    if all(type(number) is int and number > 0 for number in numbers):  # wrong ones are refused by the configurations
        context, micro, tokens, steps, width = numbers
        if is_pairs:
            own["n_heads"] = next((n for n in range(width // 64, 1, -1) if width % (2 * n) == 0), 1)
        micro = max(min(micro, tokens) // context, 1) * context
        own |= {"micro_batch_tokens": micro, "tokens_per_step": max(tokens // micro, 1) * micro,
                "warmup_steps": min(max(steps // (5 if is_pairs else 20), 1), steps),
                "init_std": round(ModelConfig.init_std * (ModelConfig.d_model / width) ** 0.5, 3)}
    return {name: value for name, value in own.items() if name not in given}


def run_config(settings: dict[str, Any], source: ModelConfig | None = None) -> RunConfig:
    """The run described by a flat table of settings: `model` or `from`, `task`, `data`, `out`, any field of
    `ModelConfig` and `TrainConfig`, and `size`, one of `SIZES`, which the fields that are not set are taken from;
    without one, "paper". With `from` it gives those of training alone, without the rate.

    source: the model of the weights that `from` names; its fields stand for those of a preset. Without chunks, n of
    relu(q k / n + b)^2 keeps its value, so that the weights give what they gave. Raises UsageError for an unknown name
    (with the nearest valid one), a wrong type or a wrong value."""
    check_names(settings)
    model = {k: v for k, v in settings.items() if k in MODEL_FIELDS}
    # Where a field is given by more than one, the setting counts, then the weights' own model, then the size.
    if source is not None:
        preset, task = nearest_preset(source), "wiki40b"
        kept = {"attn_scale_len": source.scale_len} if source.has_bias and source.chunk_size is None else {}
        config = replace_fields(source, kept | model)
        sized = size_settings(settings.get("size", "paper"), preset, {"context": config.context, **settings})
        # A size's rate is for weights that are drawn: trained ones would first lose much of what they know.
        settings = {k: v for k, v in sized.items() if k != "learning_rate"} | settings
    else:
        preset, task = settings["model"], settings.get("task", "wiki40b")
        settings = size_settings(settings.get("size", "paper"), preset, settings) | settings
        config = model_config(preset, task, **{k: v for k, v in settings.items() if k in MODEL_FIELDS})
    return RunConfig(config, train_config(settings, preset), preset, task, settings["data"], settings["out"],
                     None if source is None else Source(settings["from"], source))


def train_config(settings: dict[str, Any], preset: str) -> TrainConfig:
    """The hyperparameters among the settings of a run. Where they name none, the vanilla Transformer is not clipped, as
    in its table, and a warm-up is at most a fifth of the steps."""
    defaults: dict[str, Any] = {"clip": None} if preset == "transformer" else {}
    steps = settings.get("steps", TrainConfig.steps)
    if isinstance(steps, int):
        defaults["warmup_steps"] = min(TrainConfig.warmup_steps, max(steps, 0) // 5)
    return replace_fields(TrainConfig(), defaults | {k: v for k, v in settings.items() if k in TRAIN_FIELDS})


def check_names(settings: dict[str, Any]) -> None:
    """Raise UsageError for an unknown name of a setting (with the nearest valid one), for a model, data or a folder
    that is not named, and for a model of which there are two."""
    for name in settings:
        require_name("setting", name, RUN_FIELDS + MODEL_FIELDS + TRAIN_FIELDS)
    require("model" in settings or "from" in settings, "training needs a model", "none is named",
            f"name one of {', '.join(PRESETS)}, or begin with trained weights: --from RUN")
    for other in ("model", "task"):
        require(not {other, "from"} <= settings.keys(), "weights have their own model",
                f"{other} = {settings.get(other)}, from = {settings.get('from')}", "leave one out")
    require(settings.get("data", "") != "", "training needs text", "no data is named",
            "give --data a folder made by `lineartime prepare`")
    require(settings.get("out", "") != "", "training needs a folder for the run", "none is named",
            "give --out a new folder")
    for name in ("data", "out", "from"):
        value = settings.get(name, "-")
        require(isinstance(value, str) and value != "" and "\0" not in value, "wrong value", f"{name} = {value!r}",
                "it takes a folder's path")


def nearest_preset(config: ModelConfig) -> str:
    """The preset that a model differs from in the fewest fields."""
    def n_different(name: str) -> int:
        return sum(getattr(config, field) != getattr(PRESETS[name], field) for field in MODEL_FIELDS)

    return min(PRESETS, key=n_different)


def parse_setting(text: str) -> tuple[str, Any]:
    """Name and value of a setting `name=value` from the command line, the value in its field's type; "none" is None.

    Raises UsageError for a missing "=", an unknown name or a wrong type."""
    name, equals, value = text.partition("=")
    require(bool(equals), "a setting is NAME=VALUE", repr(text))
    name = name.strip()
    require_name("setting", name, RUN_FIELDS + MODEL_FIELDS + TRAIN_FIELDS)
    if name in RUN_FIELDS:
        return name, value.strip()
    kind = typing.get_type_hints(ModelConfig if name in MODEL_FIELDS else TrainConfig)[name]
    return name, parse_field(name, value.strip(), kind)

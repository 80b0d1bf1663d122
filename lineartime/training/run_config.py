"""The settings of a training run, with what its data, its weights and the run in its folder give.
Nothing here imports torch, so that wrong settings are refused at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from lineartime import config
from lineartime.base.settings import parse_field, replace_fields, require, require_name
from lineartime.base.stores import is_address
from lineartime.config import MODEL_FIELDS, PRESETS, TRAIN_FIELDS, ModelConfig, StartingWeights, TrainConfig
from lineartime.folders import QUESTION_ANSWERING, read_config, saved_run, weights_folder

RUN_FIELDS = ("model", "from", "task", "size", "data", "out", "minutes")
MOST_MINUTES = 10**5


@dataclass(frozen=True)
class RunConfig:
    """What `lineartime train` makes of its arguments, and stores. Raises UsageError unless
    micro-batches hold whole rows and ranks can share a row."""

    model: ModelConfig
    train: TrainConfig
    preset: str
    task: str
    data: str
    out: str
    source: StartingWeights | None = None  # None: the initial values are drawn from the seed

    def __post_init__(self) -> None:
        context, micro = self.model.context, self.train.micro_batch_tokens
        require(micro % context == 0, "micro_batch_tokens must be a multiple of context",
                f"micro_batch_tokens = {micro}, context = {context}", "a micro-batch holds whole rows")
        config.check_context_parallel(self.model, self.train.context_parallel)

    @property
    def rows_per_step(self) -> int:
        return self.train.tokens_per_step // self.model.context

    @property
    def micro_batch_rows(self) -> int:
        """Rows per forward and backward pass, at least 1."""
        return self.train.micro_batch_tokens // self.model.context


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layers": 6, "d_model": 192, "query_key_dim": 64, "chunk_size": 128, "context": 512,
             "tokens_per_step": 4096, "micro_batch_tokens": 2048, "steps": 500, "learning_rate": 8e-3,
             "optimizer": "muon", "eval_every": 50, "eval_tokens": 16_384, "save_every": 50},
    "small": {"n_layers": 10, "d_model": 256, "query_key_dim": 128, "chunk_size": 256, "context": 2048,
              "tokens_per_step": 16_384, "micro_batch_tokens": 4096, "steps": 2000, "learning_rate": 4e-3,
              "optimizer": "muon", "eval_every": 100, "eval_tokens": 65_536, "save_every": 100},
    "base": {"n_layers": 24, "d_model": 512, "query_key_dim": 128, "chunk_size": 256, "context": 2048,
             "tokens_per_step": 131_072, "micro_batch_tokens": 16_384, "steps": 20_000, "learning_rate": 1e-3,
             "eval_every": 500, "eval_tokens": 262_144, "save_every": 500},
    "paper": {}}
"""Sizes of a model and its training, as a GAU has them. "tiny" takes minutes on a laptop, "small"
hours; "base" is for one GPU; "paper" is the task's preset, with steps and rates of Tables 6-10."""
HALF_RATE = ("transformer", "transformer+", "transformer++", "combiner")
"""Presets that take half of a size's learning rate, by the search at "tiny" in docs/results.md."""
PAIRS = {"clip": 1.0, "clip_scope": "global", "adam_beta2": 0.95}
"""What suits pairs of attention and FFN better than the paper's values, by the same search."""
DEFAULT_SIZE, MOST_STEPS = "tiny", 1 << 40


def size_settings(size: str, model: str, given: dict[str, Any]) -> dict[str, Any]:
    """What a size sets for a preset beside the settings `given`; "paper" sets nothing. A pair of
    attention and FFN is two GAUs and has the values of `PAIRS`."""
    require_name("size", size, SIZES)
    preset, own = PRESETS[model], dict(SIZES[size])
    if not own:
        return own
    if model in HALF_RATE:
        own["learning_rate"] /= 2
    if given.get("shard") is True:  # Muon takes whole matrices
        own.pop("optimizer", None)
    if preset.ffn != "gau":
        own |= {**PAIRS, "n_layers": own["n_layers"] // 2}
        del own["query_key_dim"]
    if preset.chunk_size is None:
        del own["chunk_size"]
    if given.get("layers"):  # they say how many there are
        del own["n_layers"]
    both = own | given
    if both.get("optimizer") == "muon" and type(both["learning_rate"]) is float:
        # In units of AdamW's, the best of "Muon" in docs/results.md.
        factor = 1.25 if preset.ffn != "gau" else 2.5 if preset.chunk_size else 5
        own["muon_learning_rate"] = both["learning_rate"] * factor
    own |= fitted_settings(preset, both, given)
    return {name: value for name, value in own.items() if name not in given}


def fitted_settings(preset: ModelConfig, settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What follows from context, batch, steps and width, of which some are `given`: whole rows in a
    micro-batch, whole micro-batches in a step, the warm-up, and the first weights."""
    numbers = [settings[name] for name in ("context", "micro_batch_tokens", "tokens_per_step", "steps", "d_model")]
    if not all(type(number) is int and number > 0 for number in numbers):
        return {}  # the configurations refuse them
    context, micro, tokens, steps, width = numbers
    if "micro_batch_tokens" not in given:
        n_rows = max(min(micro, tokens) // context, 1)  # as many as fit
        while "tokens_per_step" in given and tokens // context % n_rows:
            n_rows -= 1  # a given step is not changed: its rows must be a multiple
        micro = n_rows * context
    is_pairs = preset.ffn != "gau"
    fitted: dict[str, Any] = {"micro_batch_tokens": micro, "tokens_per_step": max(tokens // micro, 1) * micro,
              "warmup_steps": max(steps // (5 if is_pairs else 20), min(steps - 1, 1)),
              "init_std": round(ModelConfig.init_std * (ModelConfig.d_model / width) ** 0.5, 3)}
    if is_pairs:  # the most heads of an even width of at least 64; 1 for a narrow model
        fitted["n_heads"] = next((n for n in range(width // 64, 1, -1) if width % (2 * n) == 0), 1)
    return fitted


def run_config(settings: dict[str, Any], source: ModelConfig | None = None) -> RunConfig:
    """The run of a flat table of settings: `model` or `from`, `task`, `data`, `out`, fields of
    `ModelConfig` and `TrainConfig`, and `size` (by default "paper"), which gives fields that are
    not set: with `from` only fields of training, and neither optimizer nor learning rates. By
    default a warm-up is at most a fifth of the steps.

    source: the model of the weights that `from` names; its fields stand for a preset's. Without
    chunks, n of relu(q k / n + b)^2 keeps its value, so that the weights give what they gave.
    Raises UsageError for an unknown name (with the nearest valid one), a wrong type or value."""
    check_names(settings)
    # If several give a field, the setting counts, then the weights' own model, then the size.
    if source is None:
        preset, task, weights = settings["model"], settings.get("task", "wiki40b"), None
        settings = size_settings(settings.get("size", "paper"), preset, settings) | settings
        model = config.model_config(preset, task, **named(settings, MODEL_FIELDS))
    else:
        preset, task, weights = nearest_preset(source), "wiki40b", StartingWeights(settings["from"], source)
        model = replace_fields(source, source.kept_scale | named(settings, MODEL_FIELDS))
        sized = size_settings(settings.get("size", "paper"), preset, {"context": model.context, **settings})
        # A size's rates are for drawn weights: trained ones would lose much of what they know.
        for name in ("optimizer", "learning_rate", "muon_learning_rate"):
            sized.pop(name, None)
        settings = sized | settings
    defaults: dict[str, Any] = {"clip": None} if preset == "transformer" else {}  # as in its table
    steps = settings.get("steps", TrainConfig.steps)
    if isinstance(steps, int):
        defaults["warmup_steps"] = min(TrainConfig.warmup_steps, max(steps, 0) // 5)
    train = replace_fields(TrainConfig(), defaults | named(settings, TRAIN_FIELDS))
    return RunConfig(model, train, preset, task, settings["data"], settings["out"], weights)


def named(settings: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in fields}


def check_names(settings: dict[str, Any]) -> None:
    """Raise UsageError for an unknown or wrong name, and for `from` with `model` or `task`."""
    for name in config.without_removed(settings):
        require_name("setting", name, RUN_FIELDS + MODEL_FIELDS + TRAIN_FIELDS)
    require("model" in settings or "from" in settings, "training needs a model", "none is named",
            f"name one of {', '.join(PRESETS)}, or begin with trained weights: --from RUN")
    for other in ("model", "task"):
        require(not {other, "from"} <= settings.keys(), "weights have their own model",
                f"{other} = {settings.get(other)}, from = {settings.get('from')}", "leave one out")
    require_name("model", settings.get("model", "flash"), PRESETS)
    minutes, steps = settings.get("minutes", 1), settings.get("steps")
    require(type(minutes) in (int, float) and 0 < minutes <= MOST_MINUTES, "wrong value", f"minutes = {minutes!r}",
            f"it takes a number above 0, up to {MOST_MINUTES:,}")
    require(not {"minutes", "steps"} <= settings.keys(), "a run has minutes or steps, not both",
            f"minutes = {minutes}, steps = {steps}", "leave one out")
    require(settings.get("data", "") != "", "training needs text", "no data is named",
            "give --data a folder made by `lineartime prepare`")
    require(settings.get("out", "") != "", "training needs a folder for the run", "none is named",
            "give --out a new folder")
    require(not is_address(settings.get("out", "")), "a run is written on this machine", str(settings.get("out")),
            "give a folder; `lineartime export` writes to a store")
    for name in ("data", "out", "from"):
        value = settings.get(name, "-")
        require(isinstance(value, str) and value != "" and "\0" not in value, "wrong value", f"{name} = {value!r}",
                "it takes a folder's path")


def nearest_preset(model: ModelConfig) -> str:
    """The preset that a model differs from in the fewest fields."""
    return min(PRESETS, key=lambda preset: sum(
        getattr(model, name) != getattr(PRESETS[preset], name) for name in MODEL_FIELDS))


def parse_setting(text: str) -> tuple[str, Any]:
    """Name and value of a setting `name=value`, the value in its field's type; "none" is None.
    Raises UsageError for a missing "=", an unknown name or a wrong type."""
    name, equals, value = text.partition("=")
    require(bool(equals), "a setting is NAME=VALUE", repr(text), "such as steps=1000")
    name = name.strip()
    require(name not in config.REMOVED, "a setting that is gone", name, config.REMOVED.get(name, ("", ""))[1])
    require_name("setting", name, RUN_FIELDS + MODEL_FIELDS + TRAIN_FIELDS)
    kinds = {"minutes": float, **get_type_hints(ModelConfig), **get_type_hints(TrainConfig)}
    return name, parse_field(name, value.strip(), kinds[name]) if name in kinds else value.strip()


def config_for_data(settings: Mapping[str, Any]) -> RunConfig:
    """The run of a flat table of settings, see `run_config`; without a `size` it is "tiny". The
    prepared data give the vocabulary's size and the end-of-document token if the settings do not.
    With `from` the weights give the model. A run that is saved in the folder keeps its warm-up if
    the settings name none, and knows the model of its weights, which need not be there.

    Raises UsageError for a vocabulary smaller than the data's, for data of several tokenizers or
    not the weights', and for data without [MASK] if the model is not causal; and as `run_config`,
    `read_source` and `read_manifest` do."""
    from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer, same_tokens
    from lineartime.data.tokens import read_manifests, require_mask, tokenizer_of  # the command starts without numpy

    paths_as_text = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    given = {"size": DEFAULT_SIZE, **paths_as_text}
    check_names(given)
    if given.pop("minutes", None) is not None:  # `language.planned` finds the steps: until then there are enough
        given["steps"] = MOST_STEPS
    there, source = saved_run(Path(given["out"])), None
    has_begun = "from" in given and there.get("from") == given["from"]
    if "from" in given:
        source = ModelConfig(**there["from_model"]) if has_begun else read_source(given["from"])
    asked = run_config(given, source).train  # wrong settings are refused before the data are looked for
    if there and there["train"]["warmup_steps"] <= asked.steps:
        given = {"warmup_steps": there["train"]["warmup_steps"], **given}
    manifest = read_manifests(given["data"])[0]
    if source is None:
        given = {"vocab_size": manifest.vocab_size, "end_of_document": manifest.end_of_document, **given}
    else:
        if not has_begun:
            weights, data = given["from"], given["data"]
            old, new = load_tokenizer(weights_folder(weights) / TOKENIZER_FILE), tokenizer_of(data)
            require(same_tokens(old, new), "the weights and the data have different tokenizers",
                    f"{old.sha256[:12]} of {weights} and {new.sha256[:12]} of {data}",
                    f"prepare the data with --tokenizer {weights}")
        vocab_size = max(source.vocab_size, manifest.vocab_size)
        require(given.get("vocab_size", vocab_size) == vocab_size, "the vocabulary is that of the weights and the data",
                f"vocab_size = {given.get('vocab_size')}, not {vocab_size}", "leave it out")
        given["vocab_size"] = vocab_size
    run = run_config(given, source)
    require(run.model.vocab_size >= manifest.vocab_size, "vocab_size is smaller than the tokenizer's",
            f"{run.model.vocab_size} < {manifest.vocab_size}", "leave it out")
    if not run.model.causal:
        require_mask(manifest.tokenizer.get("mask"), given["data"])
    return run


def read_source(name: str) -> ModelConfig:
    """The model of weights that a run can begin with. Raises UsageError where there are none, and
    for a model with another head; CheckpointError for files that cannot be read."""
    model, kind = read_config(weights_folder(name))
    require(kind != QUESTION_ANSWERING, "this model answers questions", name, "begin with a language model")
    return model

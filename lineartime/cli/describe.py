"""The verbs that say what there is: `lineartime models` and `lineartime config`, which do not import torch, and
`lineartime info`."""

import textwrap
import typing
from pathlib import Path
from typing import Annotated, Any

from lineartime.cli.options import Model, Setting, Size, Task
from lineartime.cli.prepare import say_counts
from lineartime.cli.terminal import say
from lineartime.config import MODEL_FIELDS, PRESETS, TRAIN_FIELDS, ModelConfig, TrainConfig, model_config, source_of
from lineartime.run_config import SIZES, read_config, run_config, shipped_models, weights_folder
from lineartime.settings import describe_kind, replace_fields, require

MODELS: dict[str, tuple[str, tuple[float, ...]]] = {
    "transformer": ("learned positions, GELU: for calibration", (7.6, 12.7, 55.3, 110.1)),
    "transformer+": ("Transformer with RoPE: the paper's baseline", (7.5, 12.2, 54.2, 109.7)),
    "transformer++": ("Transformer with RoPE and GLU: the strongest baseline", (7.5, 12.2, 54.3, 109.7)),
    "performer": ("linear attention with a ReLU kernel: a baseline", (7.5, 12.2, 54.2, 109.7)),
    "performer-matmul": ("Performer, its sums by matmuls: for the paper's latency table", (7.5, 12.2, 54.2, 109.7)),
    "combiner": ("attention to a chunk and to summaries of the others: a baseline", (7.7, 12.8, 60.6, 123.9)),
    "mc-tfm++": ("Transformer++ with mixed chunk attention: to see what the GAU adds", (7.5, 12.2, 54.3, 109.7)),
    "flash-quad": ("GAU with quadratic attention: to compare with FLASH", (7.6, 12.5, 55.8, 112.1)),
    "flash": ("GAU with mixed chunk attention: for long rows and long prompts", (7.6, 12.5, 55.9, 112.1)),
    "flash+": ("FLASH that learns to recall across chunks: ours, not the paper's", (7.6, 12.5, 55.9, 112.1))}
"""What each preset is, and its millions of parameters at each size with 32,000 tokens of vocabulary."""


def models() -> None:
    """List the models that can be trained, and their sizes."""
    say(f"{'model':<17}" + "".join(f"{size:>9}" for size in SIZES) + "   M parameters, at 32,000 tokens of vocabulary")
    for name, (what, counts) in MODELS.items():
        say(f"{name:<17}" + "".join(f"{count:>9.1f}" for count in counts) + f"   {what}")
    say("")
    for size in SIZES:
        run = run_config({"model": "flash", "size": size, "data": "-", "out": "-"})
        say(f"{size:<8} {run.model.n_layers} layers of width {run.model.d_model}, rows of {run.model.context:,}; "
            f"{run.train.steps:,} steps of {run.train.tokens_per_step:,} tokens")
    say("\na trained model that ships with the package: small (`lineartime generate small`)")
    say("next     lineartime config flash --size tiny, or lineartime train flash --data DATA --out RUN")


def config(model: Model = "flash", size: Size = "paper", task: Task = "wiki40b") -> None:
    """List every field that --set takes.
    Of each: its value for a model, what values it takes, what it is, and the paper's table that has it. Where the value
    is not that of the size `paper`, that one stands behind it."""
    made, paper = (fields_of({"model": model, "size": each, "task": task}) for each in (size, "paper"))
    for title, kind, names in (("The model", ModelConfig, MODEL_FIELDS), ("Training", TrainConfig, TRAIN_FIELDS)):
        say(f"{title}: {model}, {task}, size {size}\n")
        hints = typing.get_type_hints(kind, include_extras=True)
        for name in names:
            field, text = typing.get_args(hints[name])
            other = "" if made[name] == paper[name] else f"  (paper: {in_words(paper[name])})"
            say(f"{name} = {in_words(made[name])}{other}  [{describe_kind(field)}; {source_of(name)}]")
            say(textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    "))
        say("")
    say("vocab_size and end_of_document are those of the data where they are not set")
    say(f"next     lineartime train {model} --size {size} --data DATA --out RUN --set NAME=VALUE")


def fields_of(settings: dict[str, Any]) -> dict[str, Any]:
    run = run_config({**settings, "data": "-", "out": "-"})
    return {**vars(run.model), **vars(run.train)}


def in_words(value: Any) -> str:
    """A value as --set takes it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def info(
    model: Annotated[str, f"A model: {', '.join(PRESETS)}; a run, one of its checkpoints, an exported folder, or the "
                     "shipped model `small`; or a folder made by `lineartime prepare`.", "MODEL|RUN|DATA", PRESETS],
    *,
    task: Task = "wiki40b",
    settings: Setting,
    verify: Annotated[bool, "Read all files of prepared data and compare their SHA-256."] = False,
    plan: Annotated[int | None, "Print how much memory each of N processes needs to train the model.", "--plan N"
                    ] = None,
) -> None:
    """Describe a model, a run or prepared text.
    Of a model: its specification, the parameters of each part, training FLOPs per token and the size of its decoding
    state; or with --plan the memory that its training needs."""
    require(plan is None or 1 <= plan <= 2**16, "wrong value", f"--plan {plan}", "it takes 1 to 65,536 processes")
    is_trained = model in shipped_models() or any((Path(model) / name).is_file() for name in (
        "run.json", "config.json"))
    if model not in PRESETS and is_trained and not verify and plan is None:
        from lineartime.info import print_description

        print_description(replace_fields(read_config(weights_folder(model))[0], settings), model)
        return
    if model not in PRESETS and Path(model).is_dir():
        require(plan is None, "--plan takes the name of a model", model, f"give one of {', '.join(PRESETS)}")
        say_data(Path(model), verify)
        return
    require(not verify, "--verify takes a folder of prepared data", model, "see `lineartime prepare`")
    chosen = {"model": model, "task": task, **settings}
    if plan is not None:
        from lineartime.plan import print_plan

        print_plan(run_config({"data": "-", "out": "-", **chosen}), plan)
        return
    made = model_config(**chosen)
    from lineartime.info import print_description

    print_description(made, f"{chosen['model']} ({chosen['task']})")


def say_data(folder: Path, verify: bool) -> None:
    """Print what prepared data hold. verify: read all files and compare their SHA-256."""
    from lineartime.data.tokens import read_manifest, verify_data

    manifest = verify_data(folder) if verify else read_manifest(folder)
    say_counts(manifest)
    say(f"tokenizer   {manifest.vocab_size:,} tokens, SHA-256 {manifest.tokenizer['sha256']}")
    say(f"manifest    SHA-256 {manifest.sha256}")
    size = sum(file["bytes"] for file in manifest.files.values())
    say(f"files       {len(manifest.files):,}, {size:,} bytes, "
        + ("verified by SHA-256" if verify else "not read; --verify compares their SHA-256"))

"""Arguments that several verbs share, and their parsers. Heavy modules are imported only when needed."""

import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lineartime.config import MODEL_FIELDS, PRESETS, TASKS, TRAIN_FIELDS, ModelConfig, TrainConfig
from lineartime.errors import UsageError
from lineartime.run_config import RUN_FIELDS, SIZES
from lineartime.settings import describe_kind

if TYPE_CHECKING:
    import torch



def complete_setting(incomplete: str) -> list[str]:
    """For the shell: the fields of --set, and after "=" the values of a field that has few."""
    name, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{field}=" for field in (*RUN_FIELDS, *MODEL_FIELDS, *TRAIN_FIELDS) if field.startswith(incomplete)]
    named: dict[str, tuple[str, ...]] = {"model": tuple(PRESETS), "task": TASKS, "size": tuple(SIZES)}
    kinds = typing.get_type_hints(ModelConfig) | typing.get_type_hints(TrainConfig)
    choices = named.get(name) or (describe_kind(kinds[name]).split(" or ") if name in kinds else ())
    return [f"{name}={choice}" for choice in choices if choice.startswith(value) and " " not in choice]


def complete_from(names: Iterable[str]) -> Callable[[str], list[str]]:
    """For the shell: those of the names that begin as what is written."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Model = Annotated[str, typer.Argument(help=f"A model: {', '.join(PRESETS)}.", autocompletion=complete_from(PRESETS))]
Size = Annotated[str, typer.Option(help=f"{', '.join(SIZES)}.", autocompletion=complete_from(SIZES))]
Task = Annotated[str, typer.Option(help="Whose specification: c4, wiki40b or pg19.",
                                   autocompletion=complete_from(TASKS))]
Setting = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", autocompletion=complete_setting,
                                                   help="Any field, see `lineartime config`; `none` switches one off.")]
QuestionFiles = Annotated[list[Path] | None, typer.Option(
    help="Questions: SQuAD or TriviaQA JSON, TriviaQA parquet, or hub:rc.wikipedia/train; may be given again.")]
Evidence = Annotated[Path | None, typer.Option(
    help="Folder with wikipedia/ and web/ of TriviaQA; by default ../evidence beside the questions' folder.")]
Stride = Annotated[int | None, typer.Option(
    help="Tokens from one window of a document to the next; by default three quarters of the context.")]
RankTimeout = Annotated[float, typer.Option(
    help="Under torchrun: seconds after which a process that does not answer is lost.")]
MaxAnswerTokens = Annotated[int, typer.Option(help="Longest answer.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if available.")]
ShippedModel = Annotated[str | None, typer.Option("--model", metavar="NAME", hidden=True)]
"""The older way to name a model that ships with the package; its name now stands wherever a run does."""
Strict = Annotated[bool, typer.Option(
    "--strict", help="Refuse a run whose newest checkpoint is damaged; by default one before it is used, and said.")]


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers between 0 and 1, such as `1e-4,7e-5`. Raises UsageError."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < 1 for value in values):
        raise UsageError("wrong value", text, "it takes numbers between 0 and 1, with commas")
    return values


def whole_numbers(text: str) -> list[int]:
    """Parse whole numbers from 1, such as `1024,2048`. Raises UsageError."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError("wrong value", text, "it takes whole numbers from 1, with commas")
    return numbers


def pick_device(name: str | None) -> "torch.device":
    """`runtime.pick_device`, imported when called because it imports torch."""
    from lineartime.runtime import pick_device

    return pick_device(name)

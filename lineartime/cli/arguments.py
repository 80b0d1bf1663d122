"""Arguments that several verbs share, and their parsers. Heavy modules are imported only when needed."""

from typing import TYPE_CHECKING, Annotated

import typer

from lineartime.errors import UsageError

if TYPE_CHECKING:
    import torch

Setting = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE",
                                                   help="Any field; `none` switches one off.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if available.")]
ShippedModel = Annotated[str | None, typer.Option("--model", metavar="NAME",
                                                  help="A model that ships with the package: small.")]
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

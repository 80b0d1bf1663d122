"""What arguments of several verbs look like, and what they mean. Nothing heavy is imported before it is needed."""

from typing import TYPE_CHECKING, Annotated

import typer

from lineartime.cli.terminal import say
from lineartime.errors import UsageError

if TYPE_CHECKING:
    import torch

Setting = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE",
                                                   help="Any field; `none` switches one off.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")]
ShippedModel = Annotated[str | None, typer.Option("--model", metavar="NAME",
                                                  help="A model that ships with the package: small.")]


def numbers(text: str) -> tuple[float, ...]:
    """`1e-4,7e-5` as numbers above 0."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < 1 for value in values):
        raise UsageError("wrong value", text, "it takes numbers between 0 and 1, with commas")
    return values


def whole_numbers(text: str) -> list[int]:
    """`1024,2048` as numbers from 1."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError("wrong value", text, "it takes whole numbers from 1, with commas")
    return numbers


def pick_device(name: str | None, *, tell: bool = False) -> "torch.device":
    """The device asked for, else cuda where there is one, with the process set up for it (see `machine`); tell: a line
    says how. Raises UsageError for one that is not there."""
    import torch

    from lineartime.runtime import choose_settings

    if name is not None and name not in ("cpu", "cuda"):
        raise UsageError("unknown device", name, "one of cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no such device here", name, "use --device cpu")
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = choose_settings(device)
    if tell:
        say(f"on {device.type}: " + ", ".join(f"{what} {how}" for what, how in chosen.items()))
    return device

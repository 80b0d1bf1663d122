"""The command line: each verb is a function here. Arguments are checked before heavy imports."""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from lineartime.base.errors import UsageError
from lineartime.base.processors import share_processors
from lineartime.base.ranks import WITH_RANKS, launched
from lineartime.base.words import installed_version
from lineartime.cli import train, use
from lineartime.cli.options import with_options
from lineartime.cli.terminal import exit_code, say, screens

VERBS: dict[Callable[..., None], list[str]] = {
    train.prepare: ["prepare books/ --out data --held-out 0.05 --vocab-size 8192",
                    "cat notes.txt | lineartime prepare - --out data --held-out 0.05",
                    "prepare --sample --out data --held-out 0.1 --vocab-size 1024"],
    train.train: ["train flash --data data --out run",
                  "train flash --data data --out run --size small --set seed=1",
                  "train flash --size paper --task pg19 --data data --out run"],
    train.finetune: ["finetune mlm --questions train.json --validation dev.json --out qa --context 512"],
    use.evaluate: ["evaluate run --data data"],
    use.score: ["score small book.txt", "tail -f app.log | lineartime score run -",
                "score run app.log --state app.state --json"],
    use.generate: ['generate run "Once upon a time" --temperature 0.8',
                   'generate small "It was a dark and stormy night, and"',
                   'generate small --state book.state " Who was it?" " And then"'],
    use.read: ["read book.txt --model small --out book.state",
               "cat book.txt | lineartime read - --model run --out book.state"],
    use.export: ["export run --out folder"],
    use.plot: ["plot run", "plot A=run1 B=run2 --out curves.png"],
    train.config: ["config", "config transformer++ --size tiny", "config flash --task c4"],
    train.info: ["info flash --set context=8192", "info data --verify"]}
"""The verbs, with examples for the end of their --help."""


def add_verb(app: typer.Typer, program: str, name: str, verb: Callable[..., None], examples: list[str],
             opens: bool = True) -> None:
    """Make a function, as `with_options` takes it, a verb whose help ends with examples."""
    lines = (line if f"{program} " in line else f"{program} {line}" for line in examples)
    app.command(name, epilog="\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines))(with_options(verb, opens))


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train, evaluate and run FLASH and the models of 'Transformer Quality in Linear Time'.")
for verb, examples in VERBS.items():
    add_verb(app, "lineartime", verb.__name__, verb, examples, verb not in (train.prepare, train.config))


def say_version(asked: bool) -> None:
    if asked:
        say(f"lineartime {installed_version()}")
        raise typer.Exit


@app.callback()
def options(context: typer.Context,
            debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
            version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True,
                                                  callback=say_version)] = False) -> None:
    """The options before the verb."""
    if launched().size > 1 and context.invoked_subcommand not in WITH_RANKS:
        raise UsageError("this verb runs in one process", context.invoked_subcommand, "leave out torchrun")


def main(app: typer.Typer = app, program: str = "lineartime") -> None:
    """Run a command line; errors become one line on stderr and an exit code, see `errors`."""
    arguments = sys.argv[1:] or ["--help"]
    share_processors()
    atexit.register(gc.freeze)  # or Python looks through all objects of torch before it ends, for .3 s
    try:
        ranks = launched()
    except UsageError as e:  # before anything asks for the rank again
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    if ranks.size > 1:  # else PyTorch writes the stack of each failed connection
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if not ranks.is_first:  # rank 0 speaks for all, but for errors
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
    with screens():
        code = exit_code(lambda: run_verb(app, program, arguments), debug=arguments[0] == "--debug")
    sys.exit(code)


def run_verb(app: typer.Typer, program: str, arguments: list[str]) -> int | None:
    """The exit code of a command line that ended well."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:  # click makes it of a BrokenPipeError: the reader of stdout has what it wants
        return 0
    if code == 130:
        raise KeyboardInterrupt
    return code

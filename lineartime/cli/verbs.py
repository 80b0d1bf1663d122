"""The command line: a verb is a function of a module here. Arguments are checked before heavy modules are imported."""

import os
import sys
from typing import Annotated

import typer

from lineartime.cli import describe, documents, evaluate, export_plot, generate, prepare, questions, train
from lineartime.cli.examples import add_examples
from lineartime.cli.exits import exit_code
from lineartime.cli.options import with_options
from lineartime.cli.terminal import say, screens, shown_log
from lineartime.distributed.ranks import WITH_RANKS, launched
from lineartime.errors import UsageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train, evaluate and run FLASH and the models of 'Transformer Quality in Linear Time'.")
for verb in (prepare.prepare, train.train, evaluate.evaluate, generate.generate, export_plot.export, export_plot.plot,
             describe.models, describe.config, describe.info, questions.finetune, questions.answer,
             documents.classify, documents.embed):
    app.command()(with_options(verb))
add_examples(app)


def say_version(asked: bool) -> None:
    """Print the version and exit."""
    if asked:
        from lineartime import __version__

        say(f"lineartime {__version__}")
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
    if launched().size > 1:  # else PyTorch writes the stack of each failed connection
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if not launched().is_first:  # rank 0 speaks for all, but for errors
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
    with screens():
        code = exit_code(lambda: run_verb(app, program, arguments), debug=arguments[0] == "--debug")
    sys.exit(code)


def run_verb(app: typer.Typer, program: str, arguments: list[str]) -> int | None:
    """The exit code of a command line that ended well."""
    try:
        with shown_log():
            code = typer.main.get_command(app).main(arguments, prog_name=program, standalone_mode=False)
            sys.stdout.flush()
    except SystemExit:  # rich makes it of a BrokenPipeError
        return 0
    if code == 130:
        raise KeyboardInterrupt
    return code

"""The command line: a verb is a function of a module here. Arguments are checked before heavy modules are imported."""

import os
import socket
import sys
from typing import Annotated

import typer

from lineartime.cli import (
    benchmark,
    describe,
    documents,
    evaluate,
    finished,
    generate,
    prepare,
    questions,
    recall,
    report,
    reproduce,
    train,
)
from lineartime.cli.examples import add_examples
from lineartime.cli.terminal import say, screens, shown_log
from lineartime.distributed.ranks import WITH_RANKS, launched, speaks_first
from lineartime.errors import CheckpointError, DataError, LineartimeError, ResourceError, Stopped, UsageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train, evaluate and run FLASH and the models of 'Transformer Quality in Linear Time'.")
for verb in (prepare.prepare, train.train, evaluate.evaluate, generate.generate, finished.export, finished.plot,
             describe.models, describe.config, describe.info, questions.finetune, questions.answer,
             documents.classify, documents.embed, recall.recall, reproduce.reproduce, report.report):
    app.command()(verb)
app.add_typer(benchmark.benchmark, name="benchmark")
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
    if launched().size > 1 and context.invoked_subcommand not in (*WITH_RANKS, "benchmark"):
        raise UsageError("this verb runs in one process", context.invoked_subcommand, "leave out torchrun")


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code, see `errors`."""
    arguments = sys.argv[1:] or ["--help"]
    if not launched().is_first:  # rank 0 speaks for all, but for errors
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
    with screens():
        code = run_verb(arguments, debug=arguments[0] == "--debug")
    sys.exit(code)


def run_verb(arguments: list[str], *, debug: bool) -> int:
    """The exit code of a command line. debug: show a traceback with an error."""
    try:
        with shown_log():
            code = typer.main.get_command(app).main(arguments, prog_name="lineartime", standalone_mode=False)
            sys.stdout.flush()
        return fail(KeyboardInterrupt(), 130, debug, "interrupted") if code == 130 else code or 0
    except LineartimeError as e:
        return fail(e, e.exit_code, debug)
    except KeyboardInterrupt as e:
        return fail(e, 130, debug, "interrupted")
    except (BrokenPipeError, SystemExit):  # the reader of stdout has what it wants; rich makes it a SystemExit
        return 0
    except MemoryError as e:
        return fail(e, 6, debug, "out of memory")
    except OSError as e:
        what = e.strerror or f"{type(e).__name__}: {e}"
        return fail(e, 6, debug, f"{what}: {e.filename!r}" if e.filename is not None else what)
    except Exception as e:
        if isinstance(e, RuntimeError):
            from lineartime.training import out_of_memory  # it imports torch, which raised this or was imported anyway

            if out_of_memory(e):
                return fail(e, 6, debug, "out of memory")
        refused = getattr(e, "format_message", None)
        what = refused() if refused else f"internal: {type(e).__name__}: {e}; run again with --debug and report it"
        return fail(e, 2 if refused else 1, debug, what)


LONGEST_ERROR = 700
"""Characters; less than ten lines of a terminal."""


def fail(error: BaseException, code: int, debug: bool, message: str | None = None) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    ranks = launched()
    if not (ranks.is_first if isinstance(error, Stopped) else speaks_first(ranks)):
        return code
    line = " ".join((message or str(error)).split())
    if ranks.size > 1 and isinstance(error, DataError | CheckpointError | ResourceError):
        line += f" (rank {ranks.rank} on {socket.gethostname()})"
    if len(line) > LONGEST_ERROR:
        line = f"{line[:LONGEST_ERROR // 2]} ... {line[-LONGEST_ERROR // 2:]}"
    print(f"error: {line}", file=sys.stderr if ranks.is_first else sys.__stderr__)
    return code

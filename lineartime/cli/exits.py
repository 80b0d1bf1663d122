"""How a command ends: an error is one line on stderr and an exit code, see `errors`."""

import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from lineartime.base.errors import LineartimeError, Stopped, escaped
from lineartime.base.ranks import launched, speaks_first


def exit_code(call: Callable[[], int | None], *, debug: bool = False) -> int:
    """Call a function; returns what it returns, 0 for None, or the exit code of its error, which is
    said in one line. debug: show a traceback with an error."""
    try:
        return call() or 0
    except LineartimeError as e:
        return fail(e, e.exit_code, debug)
    except KeyboardInterrupt as e:
        return fail(e, 130, debug, "interrupted")
    except BrokenPipeError:  # the reader of stdout has what it wants
        return 0
    except MemoryError as e:
        return fail(e, 6, debug, "out of memory")
    except OSError as e:
        what = e.strerror or f"{type(e).__name__}: {e}"
        return fail(e, 6, debug, f"{what}: {e.filename!r}" if e.filename is not None else what)
    except Exception as e:
        if isinstance(e, RuntimeError):
            from lineartime.training.loop import (
                out_of_memory,  # it imports torch, which raised this or was imported anyway
            )

            if out_of_memory(e):
                return fail(e, 6, debug, "out of memory")
        refused = getattr(e, "format_message", None)  # what typer does not understand, such as an unknown option
        text = str(e).partition("\nException raised from")[0]  # the rest is the stack of PyTorch's C++
        what = refused() if refused else f"internal: {type(e).__name__}: {text}; run again with --debug and report it"
        return fail(e, 2 if refused else 1, debug, what)


def fail(error: BaseException, code: int, debug: bool, message: str | None = None) -> int:
    """Say an error, or which signal ended the command, in one line on the first rank that has one;
    returns the code."""
    if debug:
        import traceback

        traceback.print_exception(error)
    ranks = launched()
    if not speaks_first(ranks, error):
        return code
    line = escaped(" ".join((message or str(error)).split()))
    if ranks.size > 1 and code in (1, 3, 4, 6):  # what one rank can have alone
        line += f" (rank {ranks.rank} on {socket.gethostname()})"
    begin = "" if isinstance(error, Stopped | KeyboardInterrupt) else "error: "  # a stop that was asked for is none
    with suppress(OSError):  # the code counts where stderr is full
        print(begin + line, file=sys.stderr if ranks.is_first else sys.__stderr__)
    return code

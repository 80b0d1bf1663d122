"""The command `lineartime`. It imports nothing heavy before it listens for Ctrl-C."""

import os
import signal
from types import FrameType


def interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; but in an import end at once. A library may swallow the exception
    there, or break, and nothing has been written yet."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            try:
                os.write(2, b"interrupted\n")
            finally:
                os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, interrupted)
    from lineartime.cli import verbs

    verbs.main()


if __name__ == "__main__":
    main()

"""`baton` and `python -m baton`: the command line, loaded where a Ctrl-C is one line as well."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run one command and return its exit code."""
    # Nothing has begun, and an exception amid the imports of others becomes anything at all.
    before = signal.signal(signal.SIGINT, _leave)
    from baton.cli import main as command

    signal.signal(signal.SIGINT, before)
    code = command()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said and done: a late Ctrl-C must not change how it ended
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())

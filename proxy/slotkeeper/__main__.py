"""The program: `slotkeeper`, or `python -m slotkeeper`."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """Run the command line. Returns the exit code.

    While the modules load, Ctrl-C ends the process at once, without a traceback: nothing has begun.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slotkeeper.cli.main import main  # noqa: PLC0415 - takes a part of a second

    return main()


if __name__ == "__main__":
    sys.exit(run())

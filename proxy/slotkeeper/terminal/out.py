"""Where the commands print: a terminal as wide as it is, lines for programs, and complaints."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Final

import orjson
from rich.console import Console

from slotkeeper.observe.standard_error import StandardError

PIPED: Final = 160  # columns where no terminal sets a width


def console() -> Console:
    """Of standard output. What its encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED
    return Console(width=wide, highlight=False)


def say(document: Any) -> None:
    """One line of JSON."""
    print(orjson.dumps(document).decode(), flush=True)  # noqa: T201


def complain(command: str, what: object) -> None:
    StandardError().write(f"slotkeeper {command}: {what}\n")

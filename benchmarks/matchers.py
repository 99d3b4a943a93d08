"""Texts that are made to be slow: the time to search them for facts, from 1 kB to 10 MB.

Every search in a client's text takes a time that grows linearly with its length, up to the length after which
nothing is searched. `tests/unit/conversation/test_linear.py` checks that, text by text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.table import Table

from benchmarks.figures import console
from slotkeeper.api.document import named
from slotkeeper.conversation.causes import value_cause
from slotkeeper.conversation.divergence import common_start
from slotkeeper.conversation.layout import Section, Text, bare, found_in
from slotkeeper.conversation.naming import title_in
from slotkeeper.conversation.rules.rules import left_of
from slotkeeper.vocab.tokenizer import too_blank

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
TEXTS: Final[dict[str, Callable[[int], str]]] = {
    "names in one line": lambda n: "Contents of AGENTS.md " * (n // 22),
    "names in one line that ends well": lambda n: "Contents of " + "AGENTS.md " * (n // 10) + "\n",
    "lines of names": lambda n: "Contents of AGENTS.md\n" * (n // 22),
    "instructions that do not end": lambda n: "# AGENTS.md instructions for x\n<INSTRUCTIONS>\n" * (n // 46),
    "instructions in one line": lambda n: "# AGENTS.md instructions for x" * (n // 30),
    "tags that do not end": lambda n: "<INSTRUCTIONS>" * (n // 14),
    "reminders that do not end": lambda n: "<system-reminder>" * (n // 17),
    "reminders in one line": lambda n: "<system-reminder></system-reminder>" * (n // 35),
    "reminders behind words": lambda n: "x <system-reminder></system-reminder>" * (n // 37),
    "only ends of reminders": lambda n: "</system-reminder>" * (n // 18),
    "contexts with names of their own": lambda n: "".join(
        f"--- Context from: {k} ---\n" for k in range(n // 25)
    ),
    "ends with names of their own": lambda n: "".join(
        f"--- Context from: {k} ---\n--- End of Context from: -{k} ---\n" for k in range(n // 50)
    ),
    "contexts in one line": lambda n: "--- Context from: " * (n // 18) + " ---\nx",
    "listings that do not end": lambda n: "".join(
        f"The directory listing of current working directory is:\n```{'`' * (k % 50)}\n"
        for k in range(n // 83)
    ),
    "files of instructions": lambda n: "Instructions from: x\n" * (n // 21),
    "files far from their end": lambda n: ("<!-- From: x -->\n" + "`" * 20 + "\n") * (n // 38),
    "git": lambda n: "gitStatus: This is x\n\nStatus:\n" * (n // 31),
    "git, many lines": lambda n: "gitStatus: This is x\n\nStatus:\n" + "M a\n" * (n // 4),
    "git, branches": lambda n: "gitContext: This is x\n\n" + "Main branch" * (n // 11),
    "dates": lambda n: "Today's date: 2026-11-21\n" * (n // 25),
    "dates in one line": lambda n: "Today's date: " * (n // 14),
    "a long day": lambda n: "Today's date: S" + "a" * n,
    "keys": lambda n: "Platform: " * (n // 10),
    "a key and blanks": lambda n: "Platform: x" + " " * n + "\n",
    "blanks": lambda n: " " * n,
    "blanks before a word": lambda n: " " * n + "x",
    "lines of blanks": lambda n: " \t\r\n" * (n // 4) + "x",
    "empty lines": lambda n: "\n" * n,
    "empty lines behind a reminder": lambda n: "<system-reminder></system-reminder>" + "\n" * n + "x",
    "one word": lambda n: "a" * n,
    "one word of digits": lambda n: "1" * n,
    "one path": lambda n: "/" * n,
    "brackets": lambda n: "{[" * (n // 2),
    "stars": lambda n: "x" + "*" * n + "x",
    "spaces of many kinds": lambda n: "\u2028\u00a0\x0c" * (n // 3) + "x",
}


def all_matchers(text: str) -> None:
    """Run every search that the sidecar does in a text of a client."""
    found_in.cache_clear()
    for section in (Section.SYSTEM, Section.USER):
        bare(Text((), text, section))
        found_in.cache_clear()
    other = text + "x"
    value_cause(text, other, common_start(text, other), Section.SYSTEM)
    title_in({"content": text})
    named({}, {"metadata": {"user_id": text}})
    too_blank(text)
    left_of(text, other + text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matchers", description=__doc__)
    parser.parse_args(argv)
    table = Table("text", *(f"{size // 1000:,} kB" for size in SIZES), title="milliseconds")
    for name, make in TEXTS.items():
        table.add_row(name, *(f"{_milliseconds(make(size)):.2f}" for size in SIZES))
    console.print(table)
    return 0


def _milliseconds(text: str) -> float:
    begun = time.thread_time()
    all_matchers(text)
    return 1000 * (time.thread_time() - begun)


if __name__ == "__main__":
    raise SystemExit(main())

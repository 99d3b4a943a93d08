"""What an engine's build is called. Many builds do not know their own number: /props says `b0-unknown`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

FIRST: Final = 1000  # below that a number is a private build's own, such as b0-unknown and b1-7e4c0a9
LAZY_SINCE: Final = 11434  # the first build read that thins checkpoints only when full (engine.md T7)
CARRYING: Final = 4  # the version of slot files that carry checkpoints (engine.md 2.2)


def number_in(said: str) -> int | None:
    """llama.cpp's own number in `b11549-7e4c0a9`; None for any other."""
    found = re.match(r"b(\d+)(?:-|$)", said)
    return int(found[1]) if found and int(found[1]) >= FIRST else None


def of_package(name: str) -> int | None:
    """The build that an installed package holds: the largest number of its version, `2026.10.11549`."""
    try:
        numbers = [int(part) for part in re.findall(r"\d+", version(name))]
    except PackageNotFoundError:
        return None
    return max(numbers, default=0) or None


def in_words(said: str, started: int, model: Mapping[str, Any], files: int) -> str:
    """`b11549`, or what can be seen of a build that has no number.

    1. What /props says, where that is one of llama.cpp's numbers.
    2. `started`: the number of the program that we have started; 0 for one that others did.
    3. What its slot files carry: `files` is their version, 0 where none was seen.
    4. What it says of its `model`: "architecture" is in b11549's answer, not in b10434's.
    """
    number = number_in(said) or started  # (1) (2)
    if number:
        return f"b{number}"
    if files:  # (3)
        seen = "checkpoint files" if files >= CARRYING else "files without checkpoints"
    elif model:  # (4)
        seen = f"b{LAZY_SINCE} or newer" if "architecture" in model else f"older than b{LAZY_SINCE}"
    else:
        return "unknown build"
    return f"unknown build ({seen})"

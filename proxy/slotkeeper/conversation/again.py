"""How much of what stood behind a place is still there: all of that is computed again, unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

TELLING: Final = 12  # characters: shorter lines (braces) are found anywhere
LOOKED_AT: Final = 2**22  # characters of either side whose lines are compared


def found_again(old: Sequence[str], new: Sequence[str]) -> int:
    """Characters of whole old texts that are among the new ones, and of lines of the others."""
    there = Counter(new)
    found, odd = 0, []
    for text in old:
        if there[text]:
            there[text] -= 1
            found += len(text)
        else:
            odd.append(text)
    return found + _lines_again(odd, there.elements())


def _lines_again(old: Iterable[str], new: Iterable[str]) -> int:
    there = Counter(line for line in _lines(new) if len(line) >= TELLING)
    found = 0
    for line in _lines(old):
        if there[line]:
            there[line] -= 1
            found += len(line) + 1
    return found


def _lines(texts: Iterable[str]) -> Iterator[str]:
    left = LOOKED_AT
    for text in texts:
        yield from text[:left].split("\n")
        left -= len(text)
        if left <= 0:
            return

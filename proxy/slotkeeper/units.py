"""Names and values of settings as people write them: sizes in units, lists with commas, misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

from pydantic import ByteSize

CLOSE: Final = (
    0.7  # of difflib: `listn` and `log_levle` are close to what was meant, `model` is not to `slot_dir`
)


def in_words(value: Any) -> str:
    """A value as a person would set it, "" for none."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case ByteSize():
            return _size(value)
        case tuple():
            return ", ".join(value)
        case _:
            return str(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """The name that was probably meant, "" where none is close."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=CLOSE)), "")


def meant(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist."""
    name = nearest(word, known)
    return f"; did you mean {name}?" if name else ""


_UNITS: Final = {
    f"{prefix}{tail}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for tail, base in (("iB", 1024), ("B", 1000))
}


def _size(count: int) -> str:
    """In the unit that makes it shortest and leaves nothing over: read again, it is the same number."""
    exact = [f"{count // unit}{name}" for name, unit in _UNITS.items() if count and not count % unit]
    return min([*exact, str(count)], key=len)

"""Values of settings as people write them: sizes in units, lists with commas."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ByteSize


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


_UNITS: Final = {
    f"{prefix}{tail}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for tail, base in (("iB", 1024), ("B", 1000))
}


def _size(count: int) -> str:
    """In the unit that makes it shortest and leaves nothing over: read again, it is the same number."""
    exact = [f"{count // unit}{name}" for name, unit in _UNITS.items() if count and not count % unit]
    return min([*exact, str(count)], key=len)

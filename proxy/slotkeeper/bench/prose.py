"""Text of any length, the same at every call: parts of Python's own documentation, which every Python has.

So no recorded prompt is needed to fill a context. Another version of Python has another text:
figures then differ by a few tokens.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

STRIDE: Final = 7919 * 13  # two seeds next to each other begin far apart


@cache
def library() -> str:
    """All there is, about 700,000 characters."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte that only this needs

    whole = "\n".join(topics[key] for key in sorted(topics))
    return " ".join(re.sub(r"[^ -~\n]", "", whole).split("  "))


def prose(characters: int, seed: int = 0) -> str:
    """About so many characters, from a place that depends on the seed."""
    text = library()
    start = (seed * STRIDE) % (len(text) - characters - 1)
    return text[start : start + characters].strip()

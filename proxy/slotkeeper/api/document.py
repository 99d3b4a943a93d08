"""Reading JSON documents that others wrote: small total functions, and what a request's shape comes down to.

They follow the engine's own `json_value`: a key that is missing, null or of another type is its default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

Doc = dict[str, Any]
Prompt = str | list[Any]  # text, token ids, or strings and ids mixed

# Not orjson: the engine writes 1e-05 and 1e+22 as Python does, and the text of a tool call's arguments
# becomes part of the prompt.
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


class NotOurs(Exception):  # noqa: N818 (not an error: the engine may answer it all the same)
    """What we cannot make out. The engine may still answer it, or say better than we what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a body of any API comes down to."""

    chat: Doc | None = None  # for /apply-template
    lead: int = 0  # how many of the first messages stand outside the client's own list (system, instructions)
    prompt: Prompt | None = None
    media: bool = False


def text(doc: Doc, key: str, default: str = "") -> str:
    """The string under `key`."""
    value = doc.get(key)
    return value if isinstance(value, str) else default


def table(doc: Doc, key: str) -> Doc:
    """The object under `key`, or an empty one."""
    value = doc.get(key)
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[Doc]:
    """The objects of a list; other elements are left out."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def integer(value: Any) -> int | None:
    """A JSON integer, which in Python must not be a bool."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


LIMITS: Final = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")


def longest(doc: Doc) -> int | None:
    """Tokens that an answer may have, by the largest limit that the body names; None: there is none."""
    named = [limit for key in LIMITS if (limit := integer(doc.get(key))) is not None]
    return max(named) if named and min(named) >= 0 else None


def compact(value: Any) -> str:
    """JSON text as the engine's own `dump()` writes it: no spaces, keys in their order."""
    try:
        return _COMPACT.encode(value)
    except RecursionError as error:
        raise NotOurs("nesting") from error


def pick(doc: Doc, keys: tuple[str, ...]) -> Doc:
    """The part of `doc` under `keys`."""
    return {key: doc[key] for key in keys if key in doc}

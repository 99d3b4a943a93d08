"""What a request takes of the engine, and the body that goes out with the slot that we chose.

Two tasks in one slot change a running answer silently (engine.md T1). So what the engine will read in a
body is read here first, by the engine's own conversions, and what could be read otherwise is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import orjson

from slotkeeper.api.document import Doc, NotOurs
from slotkeeper.api.llama import split
from slotkeeper.api.routes import Api

_BOM: Final = b"\xef\xbb\xbf"  # the engine skips one
_INT32: Final = 2**31
_ABSENT: Final = object()
_PLAIN: Final = re.compile(r"(?:/(?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)+", re.ASCII)
_CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]")
_DOTS: Final = frozenset({b".", b".."})


class Doubt(StrEnum):
    """Why a request is not sent on: the engine might read it otherwise than we do."""

    JSON = "json"
    OBJECT = "object"
    ENCODING = "encoding"
    PATH = "path"


class NotPlain(NotOurs):
    """A request that must not go on: the engine might read it otherwise. The message says what to do."""

    def __init__(self, doubt: Doubt, message: str) -> None:
        super().__init__(doubt.value)
        self.doubt = doubt
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a body takes of the engine, whatever else it says."""

    named: Any  # what stands under `id_slot`, if anything does
    id_slot: int | None  # the slot that this chooses, as the engine reads it (T8); None: it chooses none
    copies: int  # tasks that it becomes: `n`, times the number of prompts


UNNAMED: Final = Claim(named=_ABSENT, id_slot=None, copies=1)


def load(body: bytes, encoding: str = "") -> Doc:
    """The object in `body`, which came with this Content-Encoding. Raises NotPlain.

    Of two equal keys the last counts, however they are escaped: here as in the engine. What the engine
    would accept and this does not: a NUL byte behind the document, and nesting deeper than 1024.
    """
    if encoding.strip().lower() not in {"", "identity"}:
        raise NotPlain(
            Doubt.ENCODING, f"Content-Encoding {encoding[:40]!r} is not read here; send the body as it is"
        )
    try:
        doc = orjson.loads(body.removeprefix(_BOM))
    except orjson.JSONDecodeError as error:
        raise NotPlain(
            Doubt.JSON, f"the body is not JSON: {error}; send one object in UTF-8, with nothing behind it"
        ) from error
    if not isinstance(doc, dict):
        raise NotPlain(Doubt.OBJECT, "the body is JSON, but not an object; send {...}")
    return doc


def claim(api: Api, doc: Doc) -> Claim:
    """What `doc` takes on a route of this kind."""
    named = doc.get("id_slot", _ABSENT)
    if not api.pinnable:  # there the engine drops id_slot and n (T5)
        return Claim(named=named, id_slot=None, copies=_tasks(doc) if api is Api.TASK else 1)
    slot = as_int(named)
    prompts = _count(doc.get("prompt")) if api in {Api.COMPLETION, Api.COMPLETIONS} else 1
    copies = as_int(doc.get("n_cmpl"))
    if copies is None:
        copies = as_int(doc.get("n"))
    return Claim(named=named, id_slot=None if slot == -1 else slot, copies=max(1, copies or 1) * prompts)


def placed(body: bytes, taken: Claim, slot: int | None) -> bytes:
    """The bytes of `body` that name this slot or, for None, no slot; `taken` is what was read there.

    Nothing else is changed. The field stands first; where the body names a slot itself, however it spells
    the key, it stands last, because of two equal keys the engine takes the last.
    """
    wanted = -1 if slot is None else slot
    if taken.named is _ABSENT:
        return body if slot is None else _first(body, b'"id_slot":%d' % slot)
    if type(taken.named) is int and taken.named == wanted:
        return body
    end = body.rindex(b"}")
    return body[:end] + b',"id_slot":%d' % wanted + body[end:]


def uncached(body: bytes) -> bytes:
    """The bytes of `body`, but the engine reuses nothing for it: of two equal keys it takes the last."""
    end = body.rindex(b"}")
    empty = body[:end].rstrip().endswith(b"{")
    return body[:end] + (b"" if empty else b",") + b'"cache_prompt":false' + body[end:]


def plain(path: str) -> str:
    """The same path (without its query), which every parser reads alike. Raises NotPlain.

    The engine's HTTP library also decodes %uXXXX, and drops a tab at the end.
    """
    decoded = unquote_to_bytes(path)
    names = decoded.split(b"/")[1:]
    if (
        _PLAIN.fullmatch(path)
        and len(names) == path.count("/")
        and _DOTS.isdisjoint(names)
        and b"" not in names[:-1]
        and not _CONTROL.search(decoded)
    ):
        return path
    raise NotPlain(
        Doubt.PATH,
        f"the path {path[:80]!r} can be read in several ways; send it without %u escapes, encoded or doubled "
        "slashes, and dot segments",
    )


def as_int(value: Any) -> int | None:
    """What the engine makes of a value where it expects a 32-bit integer; None: nothing, or unknown.

    Whole numbers wrap around, others lose their fraction, true is 1. Beyond 32 bits a fraction's
    conversion is not defined.
    """
    if isinstance(value, int):
        return (value + _INT32) % (2 * _INT32) - _INT32
    if isinstance(value, float) and isfinite(value) and -_INT32 - 1 < value < _INT32:
        return int(value)
    return None


def _count(prompt: Any) -> int:
    """How many tasks a `prompt` becomes."""
    return max(1, len(split(prompt)))


def _tasks(doc: Doc) -> int:
    """Embeddings: one for each input; rankings: one for each document. Rather too many than too few."""
    ranked = (len(rows) for key in ("documents", "texts") if isinstance(rows := doc.get(key), list))
    return max(_count(doc.get("input")), _count(doc.get("content")), *ranked)


def _first(body: bytes, field: bytes) -> bytes:
    start = body.index(b"{") + 1
    empty = body[start:].lstrip().startswith(b"}")
    return body[:start] + field + (b"" if empty else b",") + body[start:]

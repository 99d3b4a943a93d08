"""`POST /slots/N?action=save|restore|erase`, parsed once and written again: what we checked is what is sent.

The engine reads a path and a query in ways of its own (`stoi`, the last of two), and our files lie in the
folder where it saves. What could be read in two ways is sent on as something that is wrong in either, and the
client hears so in the engine's own words.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import orjson

from slotkeeper.api.errors import ClientFault

OURS: Final = "slotkeeper"  # how the names of all our files begin
NO_SLOT: Final = "x"
NO_ACTION: Final = "none"
_SLOT: Final = re.compile(r"[0-9]{1,9}")


class Act(StrEnum):
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAction:
    slot: int | None  # as the client named it, modulo the number of slots (engine.md T8); None: it is none
    act: Act | None
    target: str  # path and query
    body: bytes

    @property
    def refused(self) -> bool:
        """Whether the engine can only say what is wrong with it."""
        return self.slot is None or self.act is None


def read_action(target: str, body: bytes, prefix: str = "") -> SlotAction:
    """Raises ClientFault for what is not for clients. `prefix` is the engine's --api-prefix."""
    path, _, query = target.partition("?")
    word = unquote(path).rpartition("/")[2]
    slot = int(word) if _SLOT.fullmatch(word) else None
    named = parse_qs(query, keep_blank_values=True).get("action", [])
    act = Act(named[0]) if len(named) == 1 and named[0] in set(Act) else None
    return SlotAction(
        slot=slot,
        act=act,
        target=f"{prefix}/slots/{NO_SLOT if slot is None else slot}?action={act or NO_ACTION}",
        body=b"{}" if act is Act.ERASE or act is None else _checked(body),
    )


def _checked(body: bytes) -> bytes:
    """The same document; none stays none."""
    if not body:
        return b""
    try:
        doc: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:  # another parser might read it all the same
        raise ClientFault(f"the body is not JSON: {error}") from None
    if not isinstance(doc, dict):
        return orjson.dumps(doc)
    name = doc.get("filename")
    # As a file system might fold it that does not tell capitals or ligatures apart.
    if isinstance(name, str) and unicodedata.normalize("NFKC", name).casefold().startswith(OURS):
        raise ClientFault(f"files whose names begin with {OURS} are the sidecar's own; choose another name")
    return orjson.dumps({"filename": name} if "filename" in doc else {})


def left_by(act: Act | None, status: int, answer: bytes) -> int | None:
    """The tokens that the slot holds after the engine's answer; None where it is as it was."""
    if act in {None, Act.SAVE} or (act is Act.ERASE and status >= 400):
        return None
    if status >= 400:  # a restore that fails leaves the slot empty (engine.md 2.1)
        return 0
    try:
        return int(orjson.loads(answer)["n_restored"]) if act is Act.RESTORE else 0
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return 0

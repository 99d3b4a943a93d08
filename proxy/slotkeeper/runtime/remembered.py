"""What was found out about engines' slot files, kept beside them for the next start of the sidecar.

Whether files carry checkpoints is learnt from a canary, which is not possible in an engine that is in use
(engine.md 2.2). It is true for every engine with the same fingerprint.

Their layout is not kept: a layout that is wrong would make every save look torn, and where the fingerprint
had to be guessed it may be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson

from slotkeeper.scheduler.traits import EngineTraits
from slotkeeper.store import files, names

FILE: Final = "slotkeeper-engines.json"
MOST: Final = 64  # engines, the oldest are forgotten
LARGEST: Final = 64 << 10  # bytes; what is larger is none of ours

Known = Mapping[str, bool]  # fingerprint -> whether its files carry checkpoints, the newest last


# -- pure ----------------------------------------------------------------------------------------------


def decode(data: bytes) -> Known:
    """Read what `encode` wrote. From anything else nothing is known."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(found, dict) or any(type(carry) is not bool for carry in found.values()):
        return {}
    return dict(list(found.items())[-MOST:])


def encode(known: Known) -> bytes:
    return orjson.dumps(known, option=orjson.OPT_INDENT_2)


def learnt(known: Known, fingerprint: str, *, carry: bool) -> Known:
    """The same and this one, which is the newest now."""
    others = [item for item in known.items() if item[0] != fingerprint]
    return dict([*others, (fingerprint, carry)][-MOST:])


# -- beside the slot files -----------------------------------------------------------------------------


async def completed(folder: Path, traits: EngineTraits) -> EngineTraits:
    """The traits with what is remembered, where nothing was found out; else that is remembered.

    A folder that cannot be read or written costs the memory, never the engine.
    """
    if not traits.fingerprint:
        return traits
    known = await asyncio.to_thread(recalled, folder)
    before = known.get(traits.fingerprint)
    if traits.files_carry is None:
        return replace(traits, files_carry=before)
    if traits.files_carry is not before:
        now = learnt(known, traits.fingerprint, carry=traits.files_carry)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember, folder, now)
    return traits


def recalled(folder: Path) -> Known:
    """Blocks. Nothing where the file cannot be read, or is not what we wrote."""
    try:
        with files.open_ours(folder / FILE) as file:
            return decode(file.read(LARGEST))
    except OSError:
        return {}


def remember(folder: Path, known: Known) -> None:
    """Blocks. Raises OSError. Written aside first, at a name that the store clears away after a crash."""
    files.write_small(folder / FILE, folder / names.new_temporary(time.time()), encode(known))

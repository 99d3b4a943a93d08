"""What was found out about the flags of one process, kept beside the slot files for the next sidecar.

An engine that is in use cannot be tried out; but as long as it is the same process it has the same flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from slotkeeper.scheduler.traits import FLAGS, EngineTraits, Known
from slotkeeper.store import files, names

FILE: Final = "slotkeeper-flags.json"
MOST: Final = 16  # processes, the oldest are forgotten
LARGEST: Final = 64 << 10  # bytes; what is larger is none of ours

Found = Mapping[str, tuple[bool | int | float, Known]]  # by the name of the field
READER: Final = TypeAdapter(dict[str, dict[str, tuple[bool | int | float, Known]]])


async def with_flags(folder: Path, process: str, traits: EngineTraits) -> EngineTraits:
    """The traits with what is remembered of this process, where nothing newer is known."""
    found = (await asyncio.to_thread(recalled, folder)).get(process, {})
    for name, (value, how) in found.items():
        if name in FLAGS and traits.known(name) is Known.DEFAULT:
            traits = traits.learned(how, **{name: value})
    return traits


async def keep_flags(folder: Path, process: str, traits: EngineTraits) -> None:
    """A folder that cannot be read or written costs the memory, never the engine."""
    found = {
        told: (getattr(traits, told), how) for told, how in traits.knowledge.items() if how is not Known.FLAGS
    }
    if found and process:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember, folder, process, found)


def recalled(folder: Path) -> dict[str, Found]:
    """Blocks. Nothing where the file cannot be read, or is not what we wrote."""
    try:
        with files.open_ours(folder / FILE) as file:
            return dict(READER.validate_json(file.read(LARGEST)))
    except (OSError, ValidationError):
        return {}


def remember(folder: Path, process: str, found: Found) -> None:
    """Blocks. Raises OSError. Written aside first, at a name that the store clears away after a crash."""
    others = {known: of for known, of in recalled(folder).items() if known != process}
    kept = dict([*others.items(), (process, found)][-MOST:])
    files.write_small(folder / FILE, folder / names.new_temporary(time.time()), orjson.dumps(kept))

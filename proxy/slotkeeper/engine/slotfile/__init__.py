"""Slot files: read one without an engine, and edit one without reading its payload.

`read` never raises for any bytes: a file is a SlotFile, or Damage with a verdict.
Edits are recipes, so that they are carried out in one pass of copying and hashing.
Nothing here knows about events, logs or folders: a caller gives an open file, and may do so in a thread.
"""

from slotkeeper.engine.slotfile.reading import read
from slotkeeper.engine.slotfile.recipes import (
    ByteSpan,
    Patch,
    Piece,
    Recipe,
    keep,
    patched,
    repair_window,
    size_of,
)
from slotkeeper.engine.slotfile.values import Cache, Damage, SlotFile, SlotFileRecord, Verdict

__all__ = [
    "ByteSpan",
    "Cache",
    "Damage",
    "Patch",
    "Piece",
    "Recipe",
    "SlotFile",
    "SlotFileRecord",
    "Verdict",
    "keep",
    "patched",
    "read",
    "repair_window",
    "size_of",
]

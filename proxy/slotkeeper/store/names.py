"""The names of our files. Files with other names in these folders are not ours."""

from __future__ import annotations

import re
import secrets
from typing import Final

from slotkeeper.scheduler.snapshots import SnapshotId

LOCK: Final = "slotkeeper.lock"
INDEX: Final = "slotkeeper.sqlite"
SEAL: Final = "slotkeeper.seal"
FIRST_SEAL: Final = "slotkeeper.seal.first"  # while manifests without one are taken over
QUARANTINE: Final = "slotkeeper-quarantine"
SLOT: Final = ".slot"  # the engine's file
MANIFEST: Final = ".json"
TEMPORARY: Final = ".tmp"  # being written, by the engine or by us

# Time first, so that a listing is in the order of making; none of the characters that the engine refuses
# in a file name (engine.md 2.1).
_ID: Final = r"slotkeeper-[0-9a-f]{12}-[0-9a-f]{8}"
_OURS: Final = re.compile(rf"({_ID})(\.slot|\.json|\.tmp)")


def new_id(now: float) -> SnapshotId:
    """`now` is the wall clock, in seconds."""
    return SnapshotId(f"slotkeeper-{int(now * 1000) & 0xFFFFFFFFFFFF:012x}-{secrets.token_hex(4)}")


def new_temporary(now: float) -> str:
    return new_id(now) + TEMPORARY


def ours(name: str) -> tuple[SnapshotId, str] | None:
    """The id and the suffix of a file that we made, None for any other name."""
    match = _OURS.fullmatch(name)
    return (SnapshotId(match[1]), match[2]) if match else None


def is_temporary(name: str) -> bool:
    known = ours(name)
    return known is not None and known[1] == TEMPORARY

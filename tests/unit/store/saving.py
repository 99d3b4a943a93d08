"""Saves without an engine: complete slot files of a few hundred bytes in the store's hot folder."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import SavedFile
from slotkeeper.store.store import Store
from unit.engine.slotfiles import slot_file

ENGINE = "0123456789abcdef"  # a fingerprint
_numbers = itertools.count(1)


def ids(seed: int, length: int = 20) -> tuple[int, ...]:
    return tuple(range(1000 * seed, 1000 * seed + length))


def file_of(seed: int, kind: str = "hybrid", cuts: tuple[int, ...] = (8, 16)) -> bytes:
    return slot_file(kind, 4, ids(seed), cuts=cuts)


SAVED: Final = SavedFile(fingerprint=ENGINE, tokens=Tokens(ids(1)), written=len(file_of(1)))


def state(n: int, kind: str = "dense", *, seed: int = 1, slot: int = 0) -> bytes:
    """Return a slot file of a prompt that has `n` tokens: 0, 1, ..."""
    return slot_file(kind, 4, range(n), cuts=(n // 2,), seed=seed, slot=slot)


@asynccontextmanager
async def opened(hot: Path, cold: Path | None = None, **more: Any) -> AsyncIterator[Store]:
    store = Store(hot, cold, **more)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def keep(store: Store, hot: Path, data: bytes | None = None, seed: int = 0, **facts: Any) -> Kept:
    """Save and keep a state: a new one each time, unless `data` or `seed` is given."""
    seed = seed or next(_numbers)
    data = file_of(seed) if data is None else data
    name = await store.temporary(len(data))
    (hot / name).write_bytes(data)
    known: dict[str, Any] = {"fingerprint": ENGINE, "tokens": Tokens(ids(seed)), "written": len(data)}
    return await store.keep(name, SavedFile(**known | facts))


async def offered(store: Store, hot: Path, snapshot: SnapshotId) -> bytes:
    """Return the bytes that an engine would read."""
    return (hot / await store.offer(snapshot, ENGINE)).read_bytes()


def names_in(folder: Path) -> set[str]:
    """Return all files there and below, except the lock, the seal and the index.

    A SQLite that was killed before it wrote its journal's header leaves the journal, and later ignores it.
    """
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = {"slotkeeper.lock", "slotkeeper.seal", "slotkeeper.seal.first"}
    return found - own - {"slotkeeper.sqlite", "slotkeeper.sqlite-journal"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def owner(path: Path) -> int:
    return path.stat().st_uid


def times(path: Path) -> tuple[int, int]:
    """Return the file's mtime and ctime, in nanoseconds."""
    return path.stat().st_mtime_ns, path.stat().st_ctime_ns


# -- damage ----------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

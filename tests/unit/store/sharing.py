"""Two sidecars' stores over one shared folder, without engines: states of a few kilobytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from slotkeeper.engine.slotfile import PartSizes
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store.index import Kept
from slotkeeper.store.shared_store.objects import Objects
from slotkeeper.store.shared_store.sealing import StoreKey
from slotkeeper.store.shared_store.shared import SharedStore
from slotkeeper.store.store import Store
from unit.engine.slotfiles import slot_file
from unit.store.saving import ENGINE, ids, keep

LONG: Final = 700  # tokens: two whole blocks, and a part of one
KEY: Final = StoreKey(b"k" * 32)
ALL_IN_PARTS: Final = PartSizes()  # also the smallest states
ALL_WHOLE: Final = PartSizes(least=1 << 60)


def unheard(up: bool, why: str) -> None:
    """Ignore that a store is lost or back."""


@asynccontextmanager
async def sidecar(
    hot: Path, url: str | Path, key: StoreKey | None = None, **more: Any
) -> AsyncIterator[tuple[Store, SharedStore]]:
    shared = SharedStore(Objects(str(url), unheard), key, **more)
    store = Store(hot, shared)
    try:
        await store.open()
        yield store, shared
    finally:
        await store.close()


async def kept_state(store: Store, hot: Path, seed: int, length: int = LONG, space: str = "") -> Kept:
    data = slot_file("hybrid", 4, ids(seed, length), cuts=(8, length - 4))
    tokens = Tokens(ids(seed, length)).within(space)
    return await keep(store, hot, data, seed, tokens=tokens)


async def found(
    shared: SharedStore, prompt: Tokens, *, beyond: int = 0, fingerprint: str = ENGINE
) -> list[Kept]:
    return await shared.find(prompt, fingerprint, beyond=beyond, known=())

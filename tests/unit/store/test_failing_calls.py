"""Every system call of an operation fails once: nothing unfinished stays, and all else can be used."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from recipes import whole
from slotkeeper.scheduler.slot_contents import Tier
from slotkeeper.store import files
from slotkeeper.store.files import SLOT
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import SnapshotError, StoreError
from unit.store.saving import ENGINE, keep, names_in, opened

# Not unlink: what cannot be removed stays.
CALLS: Final = ("open", "replace", "fsync", "utime", "fchmod", "fstat", "stat", "lstat", "statvfs", "mkdir")
Operation = Callable[[Store, Path, Kept, Kept], Awaitable[object]]


@contextmanager
def failing_once(at: int) -> Iterator[list[str]]:
    """Make the call with this number fail, and yield its name when it has. A write fails half done."""
    calls, failed = count(1), list[str]()

    def injected(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            if next(calls) == at:
                failed.append(name)
                if name == "write_all":
                    words[0].write(words[1][: len(words[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*words, **more)

        return call

    with ExitStack() as stack:
        for module, name in (*((os, name) for name in CALLS), (files, "write_all")):
            stack.enter_context(patch.object(module, name, injected(name, getattr(module, name))))
        yield failed


async def save(store: Store, hot: Path, _: Kept, __: Kept) -> None:
    await keep(store, hot)


async def edit(store: Store, hot: Path, _: Kept, __: Kept) -> None:
    await keep(store, hot, edit=lambda _file, found: SlotFileEdit(recipe=whole(found)))


async def demote(store: Store, _: Path, one: Kept, __: Kept) -> None:
    await store.demote(one.id)


async def fetch(store: Store, _: Path, __: Kept, cold: Kept) -> None:
    await store.offer(cold.id, ENGINE)


async def set_aside(store: Store, hot: Path, one: Kept, _: Kept) -> None:
    (hot / f"{one.id}{SLOT}").write_bytes(b"damaged")
    await store.offer(one.id, ENGINE)


@pytest.mark.parametrize("operation", [save, edit, demote, fetch, set_aside])
async def test_a_system_call_that_fails_leaves_no_file(tmp_path: Path, operation: Operation):
    for number in range(1, 100):
        hot, cold = tmp_path / f"hot{number}", tmp_path / f"cold{number}"
        async with opened(hot, cold) as store:
            one, other = await keep(store, hot), await keep(store, hot)
            await store.demote(other.id)
            with failing_once(number) as failed, suppress(StoreError, SnapshotError):
                await operation(store, hot, one, other)
            if not failed:
                assert number > 10
                return
            for tier, folder in ((Tier.HOT, hot), (Tier.COLD, cold)):
                there = {kept.id for kept in store.listing() if tier in kept.tiers}
                found = {name for name in names_in(folder) if not name.startswith(files.QUARANTINE)}
                assert found == {f"{id_}.{s}" for id_ in there for s in ("slot", "json")}, failed
    pytest.fail("there is always one more call")

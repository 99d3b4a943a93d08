"""Every system call of an operation fails once: nothing unfinished stays, and all else can be used."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from recipes import whole
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import Tier
from slotkeeper.store import files
from slotkeeper.store.files import SLOT
from slotkeeper.store.index import Kept
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import SnapshotError, StoreError
from unit.engine.slotfiles import slot_file
from unit.store.saving import ENGINE, keep, names_in, offered, opened

# Not unlink: what cannot be removed stays.
CALLS: Final = ("open", "replace", "fsync", "utime", "fchmod", "fstat", "stat", "lstat", "statvfs", "mkdir")
WRITES: Final = ((os, "pwrite"), (files, "write_all"))
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
        for module, name in (*((os, name) for name in CALLS), *WRITES):
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


async def each_call_fails(
    tmp_path: Path, operation: Operation, *sizes: int
) -> AsyncIterator[tuple[Store, Path, Path, Kept, str]]:
    """Do it again with the first, second, third call failing; yield the folders, a cold state and the call.

    `sizes`: the tokens of the states, one in the hot folder and one in the cold folder.
    """
    for number in range(1, 200):
        hot, cold = tmp_path / f"hot{number}", tmp_path / f"cold{number}"
        async with opened(hot, cold) as store:
            one, other = [await keep(store, hot, state(n), tokens=Tokens(range(n))) for n in sizes]
            await store.demote(other.id)
            with failing_once(number) as failed, suppress(StoreError, SnapshotError):
                await operation(store, hot, one, other)
            if not failed:
                assert number > 10
                return
            yield store, hot, cold, other, failed[0]
    pytest.fail("there is always one more call")


@pytest.mark.parametrize("operation", [save, edit, demote, fetch, set_aside])
async def test_a_system_call_that_fails_leaves_no_file(tmp_path: Path, operation: Operation):
    async for store, hot, cold, _, failed in each_call_fails(tmp_path, operation, 20, 30):
        for tier, folder in ((Tier.HOT, hot), (Tier.COLD, cold)):
            there = {kept.id for kept in store.listing() if tier in kept.tiers}
            found = {name for name in names_in(folder) if not name.startswith(files.QUARANTINE)}
            assert found == {f"{id_}.{s}" for id_ in there for s in ("slot", "json")}, failed


@pytest.mark.parametrize("operation", [demote, fetch])
async def test_a_system_call_that_fails_leaves_no_part_of_a_state_in_runs(
    tmp_path: Path, operation: Operation
):
    """Both states have their first run in common."""
    async for store, hot, cold, other, failed in each_call_fails(tmp_path, operation, 150, 200):
        there = {kept.id: kept.tiers for kept in store.listing()}
        in_cold = [id_ for id_, tiers in there.items() if Tier.COLD in tiers]
        runs = {name for name in names_in(cold) if name.startswith(files.RUN_FOLDER)}
        assert names_in(cold) - runs == {f"{id_}.{s}" for id_ in in_cold for s in ("runs", "json")}, failed
        if operation is demote:
            assert len(runs) == sum(2 if id_ == other.id else 1 for id_ in in_cold), failed
        for id_ in there:
            assert await offered(store, hot, id_) == state(200 if id_ == other.id else 150)


def state(n: int) -> bytes:
    return slot_file("dense", 4, range(n), seed=1)

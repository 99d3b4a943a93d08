"""Garbage collection in a shared store, normally by one sidecar at a time.

Two sidecars that collect at once do no harm: both remove the same objects in the same order. A collector may
be killed after any step:

1. Blobs are listed before heads. A blob without a head is a leftover, or its head is not written yet. It is
   removed when it is older than any writer needs from the blob to the head.
2. A head without a blob cannot be restored. It is removed at the same age.
3. While all blobs together exceed the budget, the least recently used state is removed: the head first,
   because a blob without a head is never looked for. A state that was just fetched or written stays.
4. If the folder of the blobs or of the heads is not there, as when a disk is unmounted, nothing is removed.
5. Marks of use are removed with their state; elections are removed when their term has ended.

All ages are by the store's own clock, which is read from an object that is written for this purpose.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from slotkeeper.store.object_names import BLOBS, ELECTIONS, HEADS, USED, HeadName, parsed, state_of
from slotkeeper.store.objects import AT_A_TIME, Objects, ObjectSeen
from slotkeeper.store.shared import FRESH, SharedStore
from slotkeeper.store.trouble import MissingError

GRACE: Final = 2 * FRESH  # seconds after which an unfinished state will not be finished
SPARED: Final = 600.0  # seconds for which a state that was written or fetched is not removed
TERM: Final = 300  # seconds for which one sidecar is elected


@dataclass(slots=True)
class Collected:
    """The numbers of objects (leftovers) and states that one round removed, and the bytes of blobs left."""

    leftovers: int = 0
    states: int = 0
    left_bytes: int = 0


@dataclass(slots=True)
class _State:
    """All objects of one state."""

    blobs: list[ObjectSeen] = field(default_factory=list)
    head: ObjectSeen | None = None
    entry: HeadName | None = None
    used: ObjectSeen | None = None

    @property
    def touched(self) -> float:
        return max((seen.changed for seen in (self.head, self.used, *self.blobs) if seen), default=0.0)

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.blobs)


class StoreCollector:
    """Keeps one store within a budget in bytes. 0 means no budget: only leftovers are removed."""

    def __init__(
        self, store: SharedStore, budget: int, *, grace: float = GRACE, spared: float = SPARED
    ) -> None:
        self._store = store
        self._objects: Objects = store.objects
        self._budget = budget
        self._grace = grace
        self._spared = spared

    async def elected(self, now: float) -> bool:
        """Whether this sidecar collects in this term. `now` is the wall clock; other sidecars' may differ."""
        if self._store.hints:
            ours = await self._store.hints.collects(TERM)
            if ours is not None:
                return ours
        return await self._objects.create(f"{ELECTIONS}/{int(now / TERM):012d}", b"")

    async def collect(self) -> Collected:
        """Collect once. Raises StoreError; the next round continues where this one ended."""
        now = await self._time()
        try:
            states = await self._survey()
        except MissingError:  # (4), or nothing was ever written
            return Collected()
        done = Collected()
        for number, state in enumerate(list(states.values()), start=1):
            done.leftovers += await self._clear(state, now)
            if number % AT_A_TIME == 0:  # most states are as they should be, and need no call
                await asyncio.sleep(0)
        await self._fit(list(states.values()), now, done)
        return done

    async def _fit(self, states: Sequence[_State], now: float, done: Collected) -> None:
        """Remove states until the budget holds all others (3)."""
        total = sum(state.size for state in states)
        for state in sorted((s for s in states if s.entry), key=lambda state: state.touched):
            if not self._budget or total <= self._budget:
                break
            if now - state.touched > self._spared and await self._removed(state):
                total -= state.size
                done.states += 1
        done.left_bytes = total

    async def _time(self) -> float:
        """Return the time of the store's clock, in seconds, from an object written for that.

        Objects of elections whose term has ended are removed.
        """
        path = f"{ELECTIONS}/clock-{secrets.token_hex(8)}"
        await self._objects.create(path, b"")
        seen = [each async for each in self._objects.listing(ELECTIONS)]
        now = next((each.changed for each in seen if each.path == path), 0.0)
        await self._objects.remove(path)
        for each in seen:
            if now - each.changed > max(self._grace, 2 * TERM):
                await self._objects.remove(each.path)
        return now

    async def _survey(self) -> dict[str, _State]:
        """Return all states. Raises MissingError if a folder of blobs or heads is not there."""
        states: dict[str, _State] = {}
        async for seen in self._objects.listing(BLOBS, existing=True):  # (1)
            if name := state_of(seen.path):
                states.setdefault(name, _State()).blobs.append(seen)
        async for seen in self._objects.listing(HEADS, existing=True):
            if entry := parsed(seen.path):
                state = states.setdefault(entry.state, _State())
                state.head, state.entry = seen, entry
        async for seen in self._objects.listing(USED):
            if name := state_of(seen.path):
                states.setdefault(name, _State()).used = seen
        return states

    async def _clear(self, state: _State, now: float) -> int:
        """Remove the unusable objects of one state, and return how many."""
        gone = [seen for seen in await self._unusable(state) if now - seen.changed > self._grace]
        for seen in gone:
            await self._objects.remove(seen.path)
            if seen in state.blobs:
                state.blobs.remove(seen)
        return len(gone)

    async def _unusable(self, state: _State) -> list[ObjectSeen]:
        if state.entry is None or state.head is None:
            return [*state.blobs, *filter(None, [state.used])]  # (1), (5)
        if not state.blobs:
            return [state.head]  # (2)
        named = await self._store.blob_of(state.entry) if len(state.blobs) > 1 else None
        return [blob for blob in state.blobs if blob.path != named] if named else []

    async def _removed(self, state: _State) -> bool:
        hints = self._store.hints
        if state.entry is None or (hints and await hints.is_read(state.entry.state)):
            return False
        await self._store.unlink(state.entry)  # (3)
        for seen in (*state.blobs, *filter(None, [state.used])):
            await self._objects.remove(seen.path)
        return True

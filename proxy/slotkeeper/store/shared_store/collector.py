"""Garbage collection in a shared store, normally by one sidecar at a time.

Two sidecars that collect at once do no harm: both remove the same objects in the same order. A collector may
be killed after any step:

1. Blobs are listed before heads. A blob without a head is a leftover, or its head is not written yet. It is
   removed when it is older than any writer needs from the blob to the head.
2. A head without its blob, or without one of its parts, cannot be restored. It is removed at the same age.
3. While all blobs and parts together exceed the budget, the least recently used state is removed: the head
   first, because a blob without a head is never looked for. A state that was just fetched or written stays.
4. If the folder of the blobs, parts or heads is not there, as when a disk is unmounted, nothing is removed.
5. Marks of use are removed with their state; elections are removed when their term has ended.
6. A part that no head names is doomed first and removed in a later round, by the rules in `part_objects`.
   Once it is doomed it does not count for the budget.

All ages are by the store's own clock, which is read from an object that is written for this purpose.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from slotkeeper.store.shared_store.object_names import (
    BLOBS,
    DOOMED,
    ELECTIONS,
    HEADS,
    IN_PARTS,
    MARKS,
    PARTS,
    USED,
    HeadName,
    parsed,
    part_at,
    part_path,
    parts_in,
    state_of,
)
from slotkeeper.store.shared_store.objects import AT_A_TIME, Objects, ObjectSeen
from slotkeeper.store.shared_store.part_objects import FRESH, LOOKS, MOST_DOOMED, in_turn
from slotkeeper.store.shared_store.shared import SharedStore
from slotkeeper.store.trouble import MissingError

GRACE: Final = 2 * FRESH  # seconds after which an unfinished state will not be finished
SPARED: Final = 600.0  # seconds for which a state that was written or fetched is not removed
TERM: Final = 300  # seconds for which one sidecar is elected
SETTLED: Final = 60.0  # seconds; a younger head may be replaced by one that has the same time


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
    named: bytes = b""  # the parts in its head

    @property
    def parts(self) -> list[bytes]:
        return parts_in(self.named)

    @property
    def touched(self) -> float:
        return max((seen.changed for seen in (self.head, self.used, *self.blobs) if seen), default=0.0)


@dataclass(slots=True)
class _Survey:
    """All that a store has: states, and the bytes and times of parts."""

    states: dict[str, _State] = field(default_factory=dict)
    parts: dict[bytes, ObjectSeen] = field(default_factory=dict)
    needed: Counter[bytes] = field(default_factory=Counter)  # in how many heads a part is

    def state(self, name: str, *, in_parts: bool) -> _State:
        """Return the record of a state, which may be there both ways; make one if there is none."""
        return self.states.setdefault(name + IN_PARTS * in_parts, _State())

    def released(self, state: _State) -> Iterator[bytes]:
        """Yield the parts that no state needs once this one is removed."""
        for part in state.parts:
            self.needed[part] -= 1
            if not self.needed[part] and part in self.parts:
                yield part

    def size_of(self, parts: Collection[bytes]) -> int:
        return sum(self.parts[part].size for part in parts if part in self.parts)


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
        self._named: dict[ObjectSeen, bytes] = {}  # the parts in each head, which never changes

    async def elected(self, now: float) -> bool:
        """Whether this sidecar collects in this term. `now` is the wall clock; other sidecars' may differ."""
        if self._store.hints:
            ours = await self._store.hints.collects(TERM)
            if ours is not None:
                return ours
        return await self._objects.create(f"{ELECTIONS}/{int(now / TERM):012d}", b"")

    async def collect(self) -> Collected:
        """Collect once. Raises StoreError; the next round continues where this one ended."""
        began = time.monotonic()
        now = await self._time()
        doomed = await self._store.parts.doomed()
        try:
            survey = await self._survey(now)
        except MissingError:  # (4), or nothing was ever written
            return Collected()
        done = Collected()
        for number, state in enumerate(list(survey.states.values()), start=1):
            done.leftovers += await self._clear(state, survey, now)
            if number % AT_A_TIME == 0:  # most states are as they should be, and need no call
                await asyncio.sleep(0)
        for seen, parts in doomed:
            done.leftovers += await self._clear_doomed(seen, parts, survey, now, began)
        names = frozenset[bytes]().union(*(parts for _, parts in doomed))
        leaving = {part for part in names if part in survey.parts and not survey.needed[part]}
        leaving |= {
            part
            for part, seen in survey.parts.items()
            if now - seen.changed > self._grace and not survey.needed[part]
        }
        await self._fit(survey, leaving, now, done)
        await self._doom(sorted(leaving - names))
        return done

    async def _fit(self, survey: _Survey, leaving: set[bytes], now: float, done: Collected) -> None:
        """Remove states until the budget holds all others (3). Adds parts that none needs to `leaving`."""
        states = survey.states.values()
        total = sum(blob.size for state in states for blob in state.blobs) + survey.size_of(survey.parts)
        done.left_bytes = total
        total -= survey.size_of(leaving)
        for state in sorted((s for s in states if s.entry), key=lambda state: state.touched):
            if not self._budget or total <= self._budget:
                break
            if now - state.touched > self._spared and await self._removed(state):
                blobs, parts = sum(blob.size for blob in state.blobs), set(survey.released(state))
                total -= blobs + survey.size_of(parts - leaving)
                leaving |= parts
                done.left_bytes -= blobs
                done.states += 1

    # -- parts (6) ---------------------------------------------------------------------------------

    async def _clear_doomed(
        self, seen: ObjectSeen, parts: Collection[bytes], survey: _Survey, now: float, began: float
    ) -> int:
        """Remove the parts that were doomed long enough and that no head names. Returns how many."""
        age, cleared = now - seen.changed - self._grace, 0
        if age > 2 * FRESH:
            await self._objects.remove(seen.path)
        if not 0.0 <= age <= FRESH:
            return 0
        for part in parts:
            if part not in survey.parts or survey.needed[part]:
                continue
            if time.monotonic() - began > FRESH / 2:  # a writer may soon use this name again
                break
            await self._objects.remove(part_path(part))
            del survey.parts[part]
            cleared += 1
        return cleared

    async def _doom(self, parts: Sequence[bytes]) -> None:
        for at in range(0, len(parts), MOST_DOOMED):
            path = f"{DOOMED}/{secrets.token_hex(8)}"
            await self._objects.create(path, b"".join(parts[at : at + MOST_DOOMED]))

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

    async def _survey(self, now: float) -> _Survey:
        """Return what there is. Raises MissingError if a folder that should be there is not."""
        survey = _Survey()
        absent = {folder for folder in (BLOBS, PARTS) if not await self._bodies(folder, survey)}  # (1)
        async for seen in self._objects.listing(HEADS, existing=True):
            if entry := parsed(seen.path):
                if (PARTS if entry.in_parts else BLOBS) in absent:
                    raise MissingError("there are heads, but no folder of what they name")
                state = survey.state(entry.state, in_parts=entry.in_parts)
                state.head, state.entry = seen, entry
        for folder in (USED, MARKS):
            async for seen in self._objects.listing(folder):
                if name := state_of(seen.path):
                    survey.state(name, in_parts=folder == MARKS).used = seen
        await self._read_heads(survey, now)
        return survey

    async def _bodies(self, folder: str, survey: _Survey) -> bool:
        """List the blobs or parts; whether their folder, and each in it, is there."""
        try:
            async for seen in self._objects.listing(folder, existing=True):
                if part := part_at(seen.path):
                    survey.parts[part] = seen
                elif name := state_of(seen.path):
                    survey.state(name, in_parts=False).blobs.append(seen)
        except MissingError:
            return False
        return True

    async def _read_heads(self, survey: _Survey, now: float) -> None:
        """Read which parts are needed. A head is read once in the life of this process.

        Raises MissingError if a head is not there any more.
        """
        states = {
            state.head: state
            for state in survey.states.values()
            if state.head and state.entry and state.entry.in_parts
        }
        self._named = {head: named for head, named in self._named.items() if head in states}
        new = (
            partial(self._read_head, state, now) for head, state in states.items() if head not in self._named
        )
        await in_turn(new, LOOKS)
        for number, (head, state) in enumerate(states.items(), start=1):
            state.named = self._named.get(head, state.named)
            survey.needed.update(state.parts)
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)

    async def _read_head(self, state: _State, now: float) -> None:
        if state.head and state.entry:
            state.named = await self._store.parts_of(state.entry)
            if now - state.head.changed > SETTLED:
                self._named[state.head] = state.named

    async def _clear(self, state: _State, survey: _Survey, now: float) -> int:
        """Remove the unusable objects of one state, and return how many."""
        gone = [seen for seen in await self._unusable(state, survey) if now - seen.changed > self._grace]
        for seen in gone:
            await self._objects.remove(seen.path)
            if seen in state.blobs:
                state.blobs.remove(seen)
            if seen is state.head:
                survey.needed.subtract(state.parts)
                state.head = state.entry = None
        return len(gone)

    async def _unusable(self, state: _State, survey: _Survey) -> list[ObjectSeen]:
        if state.entry is None or state.head is None:
            return [*state.blobs, *filter(None, [state.used])]  # (1), (5)
        if state.entry.in_parts:
            whole = state.named and all(part in survey.parts for part in state.parts)
            return [] if whole else [state.head]  # (2)
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

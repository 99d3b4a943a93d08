"""Flags that no answer shows, found out by what an unused engine does with a few short prompts.

Each prompt is prefilled where the engine likes, so none meets a running answer (engine.md T1), and must find
what the one before it left: where one does not, another client is there, or the engine chooses slots in a way
of its own, and nothing more is concluded. It costs 200 tokens in all, 350 with a sliding window.

1. Four prompts, each the beginning of the next. The first shows whether checkpoints are made at all: the
   engine ends a batch TAIL tokens before a prompt's end for them.
2. One that parts from the fourth within the second. It goes back to the second's checkpoint, unless the
   tasks since have thrown that away: then to the first's, or to none (engine.md T7).
3. Prompts that grow by a few tokens each, and leave one or two checkpoints each, until an engine that keeps
   as many as stock would have thrown one away which an engine that keeps as many as we advise would have.
   Then one that parts behind that. It ends early where the engine is slow.
4. One that has nearly nothing in common with that, in the same slot: the engine copies what the slot held to
   its RAM cache, if it has one. Then the one before again: it finds its copy, or nothing. (A copy of a
   sliding window is good for nothing without a checkpoint, so there nothing proves nothing.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from slotkeeper.engine.answers import PrefillResult
from slotkeeper.engine.canary import ANY, swept, unused
from slotkeeper.engine.client import EngineClient, EngineError, Headers
from slotkeeper.engine.fingerprint import TEXT
from slotkeeper.scheduler.engine_model import (
    TAIL,
    Checkpoint,
    EngineTraits,
    Known,
    Memory,
    after_prefill,
    checkpoints_last,
    newest_usable,
)
from slotkeeper.scheduler.types import SlotId

STEP: Final = 10  # tokens by which a prompt is longer than the one before
PROMPTS: Final = 4
PARTS: Final = 18  # where (2) parts: behind what the second prompt left, before what the third did
LATE: Final = 12  # with that checkpoint at least so many are reused, without it at most half as many
SHARED: Final = 4  # tokens that (4) has in common: a fifth of it, so that it is sent to the same slot
MANY: Final = 64  # checkpoints that (3) looks for: what we advise
GROWTH: Final = 44  # prompts at most in (3)
PATIENCE: Final = 2.0  # seconds, for (3) to begin or go on: requests wait meanwhile
SPREAD: Final = 1  # tokens by which an engine with a sliding window may go back farther than the model
FEW: Final = 4  # checkpoints of an engine that has lost them all by then, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of it."""

    traits: EngineTraits
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens that could not be taken out of slots


async def try_flags(client: EngineClient, traits: EngineTraits, headers: Headers | None = None) -> Tried:
    """The traits with what could be found out. Nothing where a slot was used already.

    Raises EngineGoneError.
    """
    canary = _Canary(client, headers)
    try:
        if not await unused(client, headers):
            return Tried(traits=traits)
        words = list(dict.fromkeys(await client.tokenize(TEXT, add_special=False, parse_special=False)))
        traits = await canary.try_all(traits, words)
    except EngineError:  # one that refuses such prompts, or does not show its slots
        pass
    left = await canary.sweep()
    return Tried(traits=traits, left=left)


class _Canary:
    """Prompts one after another, all in the slot that the engine chose for the first."""

    def __init__(self, client: EngineClient, headers: Headers | None) -> None:
        self._client = client
        self._headers = headers
        self._slot = ANY  # the one that the engine chose
        self._left: dict[SlotId, int] = {}  # tokens in each slot that was used
        self._tasks: list[tuple[int, int]] = []  # in that slot: tokens reused, and in all
        self._began = time.monotonic()

    async def try_all(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        long, others = words[: STEP * PROMPTS], words[STEP * PROMPTS :]
        if len(others) < 3 * STEP:  # a vocabulary of hardly any words
            return traits
        parted = [*long[:PARTS], *others[: 2 * STEP - PARTS]]
        if not traits.cuttable:
            tried = await self._checkpoints_tried(traits, long, parted, words)
            if tried is None:
                return traits
            traits = tried
        return await self._ram_cache(traits, parted, others)

    async def _checkpoints_tried(
        self, traits: EngineTraits, long: list[int], parted: list[int], words: list[int]
    ) -> EngineTraits | None:
        """Do (1) to (3). None: nothing more can be concluded."""
        first = await self._send(long[:STEP])  # (1)
        if first is None or first.cached or first.cuts is None:
            return None
        if STEP - TAIL not in first.cuts:
            may_be_dense = traits.memory is Memory.UNKNOWN
            return traits if may_be_dense else traits.learned(Known.CANARY, checkpoint_cap=0)
        if not await self._each_follows(long):
            return None
        back = await self._send(parted)  # (2)
        if back is None:
            return None
        traits = _about_checkpoints(traits, back.cached)
        lasting = checkpoints_last(traits) and traits.checkpoint_cap > FEW
        return await self._cap(traits, words) if lasting else traits  # (3)

    async def _each_follows(self, long: list[int]) -> bool:
        """Whether each longer prompt finds the one before it."""
        for end in range(2 * STEP, len(long) + 1, STEP):
            found = await self._send(long[:end])
            if found is None or found.cached < end - 2 * STEP + SHARED:
                return False
        return True

    async def _cap(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        """Whether the engine keeps as many checkpoints as we advise, or no more than we believed."""
        thinned = replace(traits, checkpoint_min_step=0)
        # Newer builds thin a full list, or not; with a sliding window they keep one more than the model.
        believed = (traits, thinned, replace(thinned, checkpoint_cap=traits.checkpoint_cap + 1))
        advised = replace(traits, checkpoint_cap=MANY)
        # With a sliding window a prompt computes its last TAIL + 1 tokens again and leaves one checkpoint
        # that lasts, so it takes more prompts.
        growth = 2 if traits.memory is Memory.SWA else TAIL + 1
        ids = words[:STEP]
        for _ in range(GROWTH):
            if time.monotonic() - self._began > PATIENCE or await self._send(ids) is None:
                return traits
            few, many = [self._checkpoints(kind) for kind in believed], self._checkpoints(advised)
            for at in range(STEP, len(ids) - STEP):
                less, more = {newest_usable(c, at, traits) for c in few}, newest_usable(many, at, traits)
                if max(less) + SHARED < more:
                    back = await self._send([*ids[:at], *(2 * [words[-1]])])
                    if back is None or min(abs(back.cached - place) for place in (*less, more)) > SPREAD:
                        return traits
                    kept = MANY if abs(back.cached - more) <= SPREAD else traits.checkpoint_cap
                    return traits.learned(Known.CANARY, checkpoint_cap=kept)
            ids = [*ids, *(words[(len(ids) + n) % (len(words) - 1)] for n in range(growth))]
        return traits

    def _checkpoints(self, traits: EngineTraits) -> tuple[Checkpoint, ...]:
        """Those that an engine with these flags would have in the slot now."""
        made: tuple[Checkpoint, ...] = ()
        for task, (reuse, end) in enumerate(self._tasks):
            made = after_prefill(made, reuse=reuse, end=end, user_starts=(), task=task, traits=traits)
        return made

    async def _ram_cache(self, traits: EngineTraits, ids: list[int], others: list[int]) -> EngineTraits:
        if self._left.get(self._slot) != len(ids) and await self._send(ids) is None:
            return traits
        if await self._send([*ids[:SHARED], *others[STEP : STEP + len(ids) - SHARED]]) is None:
            return traits
        again = await self._send([*ids, others[STEP - 1]])
        if again is None:
            return traits
        found = again.cached > SHARED
        windowed = traits.memory in {Memory.SWA, Memory.UNKNOWN} and traits.checkpoint_cap == 0
        return traits if windowed and not found else traits.learned(Known.CANARY, ram_cache=found)

    async def _send(self, ids: list[int]) -> PrefillResult | None:
        """None where it did not go to the slot of the others."""
        result = await self._client.prefill(ids, ANY, headers=self._headers)
        self._left[result.slot] = result.held
        if self._slot == ANY:
            self._slot = result.slot
        if result.slot != self._slot:
            return None
        self._tasks.append((result.cached, result.held))
        return result

    async def sweep(self) -> dict[SlotId, int]:
        """Empty the slots again. Returns what had to stay: without --slot-save-path all of it."""
        try:
            for slot, held in tuple(self._left.items()):
                await swept(self._client, slot, held, self._headers)
                del self._left[slot]
        except EngineError:
            pass
        return self._left


def _about_checkpoints(traits: EngineTraits, back: int) -> EngineTraits:
    """What it means that a prompt was taken back to `back` tokens in (2)."""
    if back >= LATE:
        return traits.learned(Known.CANARY, checkpoint_min_step=0) if traits.eager_thinning else traits
    if back and traits.eager_thinning:
        return traits.learned(Known.CANARY, checkpoint_min_step=traits.checkpoint_min_step)
    return traits.learned(Known.CANARY, checkpoint_cap=FEW)

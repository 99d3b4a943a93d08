"""Experiments on an engine: the flags that no answer of the API shows, by how it handles short prompts.

`file_canary` tries out its slot files; `traits` reads what the engine's answers show.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from slotkeeper.engine.answers import EngineError, PrefillResult
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.file_canary import ANY, swept, unused
from slotkeeper.engine.http import Headers
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

# Only for an unused engine. The engine chooses the slot of each prompt, so no prompt meets a running answer
# (engine.md T1). Each prompt must reuse what the one before it left. If one does not, another client uses the
# engine, or the engine chooses slots in a different way, and we conclude nothing more. All prompts together
# cost 200 tokens, or 350 with a sliding window.
#
# 1. Four prompts, each the beginning of the next. The first shows whether the engine makes checkpoints: for
#    them it ends a batch TAIL tokens before a prompt's end.
# 2. A prompt that diverges from the fourth within the range of the second. The engine goes back to the second
#    prompt's checkpoint. If later tasks have dropped it, the engine goes back to the first prompt's
#    checkpoint, or to none (engine.md T7).
# 3. Prompts that grow by a few tokens each and leave one or two checkpoints each. They end when an engine
#    with the stock limit would have dropped a checkpoint that an engine with the advised limit still has.
#    Then a prompt that diverges after that checkpoint. This step ends early if the engine is slow.
# 4. A prompt that shares nearly nothing with the one before, in the same slot. The engine copies the slot to
#    its RAM cache, if it has one. Then the earlier prompt again: it finds its copy, or nothing. (With a
#    sliding window a copy without a checkpoint is useless, so there a miss proves nothing.)

# A text that can continue in many ways: if one next token were certain, all engines would agree on it.
TEXT: Final = (
    "The harbour master wrote seven names on a slate, sold the copper lamp to a stranger and said nothing "
    "more. Winter came early to the north valley; a train of grey mules carried salt, paper and window glass "
    "over the pass. In the third cellar they found a clock, two letters in an unknown hand, and a box of "
    "dried pears. Nobody asked why the river had changed its colour, for the council was busy with taxes, "
    "wolves and a wedding. A child counted backwards from ninety while her brother drew maps of cities that "
    "had never been built. On the last page of the ledger somebody had drawn a bird and below it one word: "
)
STEP: Final = 10  # tokens by which a prompt is longer than the one before
PROMPTS: Final = 4
PARTS: Final = 18  # token where (2) diverges: after the second prompt's checkpoint, before the third's
LATE: Final = 12  # tokens: with that checkpoint (2) reuses at least so many, without it at most half of them
SHARED: Final = 4  # tokens that (4) has in common: a fifth of it, so that it is sent to the same slot
MANY: Final = 64  # checkpoints that (3) looks for: the number that we advise
GROWTH: Final = 44  # prompts at most in (3)
PATIENCE: Final = 2.0  # seconds after which (3) sends no further prompt: requests wait meanwhile
SPREAD: Final = 1  # tokens by which an engine with a sliding window may go back farther than the model
FEW: Final = 4  # the largest limit of an engine that has dropped all checkpoints by (2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Result of `try_flags`."""

    traits: EngineTraits
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens of ours that could not be erased


async def try_flags(client: EngineClient, traits: EngineTraits, headers: Headers | None = None) -> Tried:
    """Return the traits with the flags that could be inferred; unchanged if a slot was used already.

    Raises EngineGoneError.
    """
    canary = _Canary(client, headers)
    try:
        if not await unused(client, headers):
            return Tried(traits=traits)
        ids = await client.tokenize(TEXT, add_special=False, parse_special=False, headers=headers)
        words = list(dict.fromkeys(ids))
        traits = await canary.try_all(traits, words)
    except EngineError:  # the engine refuses such prompts, or does not show its slots
        pass
    left = await canary.sweep()
    return Tried(traits=traits, left=left)


class _Canary:
    """Sends prompts one after another, all to the slot that the engine chose for the first."""

    def __init__(self, client: EngineClient, headers: Headers | None) -> None:
        self._client = client
        self._headers = headers
        self._slot = ANY  # the slot that the engine chose
        self._left: dict[SlotId, int] = {}  # tokens that we left in each slot
        self._tasks: list[tuple[int, int]] = []  # tasks in that slot: tokens reused, and tokens in all
        self._began = time.monotonic()

    async def try_all(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        long, others = words[: STEP * PROMPTS], words[STEP * PROMPTS :]
        if len(others) < 3 * STEP:  # the vocabulary is too small
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
        """Run steps (1) to (3). Return None if nothing more can be concluded."""
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
        """Whether each longer prompt reuses what the one before it left."""
        for end in range(2 * STEP, len(long) + 1, STEP):
            found = await self._send(long[:end])
            if found is None or found.cached < end - 2 * STEP + SHARED:
                return False
        return True

    async def _cap(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        """Run step (3): find out whether the engine keeps as many checkpoints as assumed, or as advised."""
        thinned = replace(traits, checkpoint_min_step=0)
        # Some newer builds thin a full list; with a sliding window they keep one more than our model does.
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
        """Return the checkpoints that an engine with these traits would have in the slot now."""
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
        """Prefill a prompt. Return None if the engine put it in another slot than the first prompt."""
        result = await self._client.prefill(ids, ANY, headers=self._headers)
        self._left[result.slot] = result.held
        if self._slot == ANY:
            self._slot = result.slot
        if result.slot != self._slot:
            return None
        self._tasks.append((result.cached, result.held))
        return result

    async def sweep(self) -> dict[SlotId, int]:
        """Erase the slots that we used. Return the tokens that had to stay: without --slot-save-path all."""
        try:
            for slot, held in tuple(self._left.items()):
                await swept(self._client, slot, held, self._headers)
                del self._left[slot]
        except EngineError:
            pass
        return self._left


def _about_checkpoints(traits: EngineTraits, back: int) -> EngineTraits:
    """Return the traits after step (2), in which the engine reused `back` tokens."""
    if back >= LATE:
        return traits.learned(Known.CANARY, checkpoint_min_step=0) if traits.eager_thinning else traits
    if back and traits.eager_thinning:
        return traits.learned(Known.CANARY, checkpoint_min_step=traits.checkpoint_min_step)
    return traits.learned(Known.CANARY, checkpoint_cap=FEW)

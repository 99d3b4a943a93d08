"""Short prompts to an unused engine whose flags cannot be read: its logprobs, and how it treats checkpoints.

The first prompt shows whether the engine makes checkpoints. On builds that drop close ones at every task
(engine.md T7), unless --checkpoint-min-step is 0, four more show whether this engine does: without them a
session of edits costs 1.4 times as many tokens until its answers show the flag.

`file_canary` reads its slot files; `traits` reads what the engine's answers show. Everything else is learnt
from the engine's answers (`scheduler/slots/evidence`): experiments that show more cost more tokens than they
save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from slotkeeper.engine.answers import EngineError, Odds
from slotkeeper.engine.client import EngineClient, Headers
from slotkeeper.engine.file_canary import ANY, swept, unused
from slotkeeper.scheduler.policies.adapters import BASE, Adapter, Scales, scales_of
from slotkeeper.scheduler.slots.engine_model import TAIL, EngineTraits, Known, Memory
from slotkeeper.scheduler.types import SlotId

# A text that can continue in many ways: if one next token were certain, all engines would agree on it.
TEXT: Final = (
    "The harbour master wrote seven names on a slate, sold the copper lamp to a stranger and said nothing "
    "more. Winter came early to the north valley; a train of grey mules carried salt, paper and window glass "
    "over the pass. In the third cellar they found a clock, two letters in an unknown hand, and a box of "
    "dried pears. Nobody asked why the river had changed its colour, for the council was busy with taxes, "
    "wolves and a wedding. A child counted backwards from ninety while her brother drew maps of cities that "
    "had never been built. On the last page of the ledger somebody had drawn a bird and below it one word: "
)
# Far enough for positions to change the logprobs: another rope base or scale moves them by 0.11 or more
# (three tiny models); after 24 tokens it was 0.006 once.
TOKENS: Final = 32
LIKELIEST: Final = 8

# Then prompts that each begin with the one before, so that the checkpoints of the second one are neither the
# oldest nor of the last task: these are the ones that are dropped. (With a sliding window each prompt also
# leaves a checkpoint where it begins, so it takes three.) The last one diverges right behind them.
GROWN: Final = (40, 48, 56)  # tokens
DIVERGES: Final = 38  # tokens
LAST: Final = 42  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What an unused engine made of the text."""

    odds: Odds
    cuts: tuple[int, ...] | None  # where batches ended, in tokens; None: not reported
    tokens: int
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens of ours that could not be erased
    thins: bool | None = None  # whether it drops close checkpoints at every task; None: not tried, or unclear

    def traits_into(self, traits: EngineTraits) -> EngineTraits:
        """Return the traits; the engine makes no checkpoints if no batch ended where it would make one."""
        if self.thins is not None:
            step = traits.checkpoint_min_step if self.thins else 0
            return traits.learned(Known.CANARY, checkpoint_min_step=step)
        may_be_dense = traits.memory is Memory.UNKNOWN
        if self.cuts is None or traits.cuttable or may_be_dense or self.tokens - TAIL in self.cuts:
            return traits
        return traits.learned(Known.CANARY, checkpoint_cap=0)


async def try_out(
    client: EngineClient,
    headers: Headers | None = None,
    adapters: Sequence[Adapter] = (),
    *,
    may_thin: Callable[[], bool] = lambda: False,
) -> Tried | None:
    """Send the text's first tokens to an unused engine, and erase the slot again; None if it is in use.

    `may_thin` says, before each prompt, whether it may be tried out what becomes of checkpoints.

    The engine chooses the slot, so the prompt meets no running answer (engine.md T1). All LoRA adapters are
    off for this call, because their scales may change while the engine runs. Also returns None if the engine
    refuses. Raises EngineGoneError.
    """
    none = scales_of(adapters, BASE) if adapters else None
    try:
        if not await unused(client, headers):
            return None
        ids = await client.tokenize(TEXT, add_special=False, parse_special=False, headers=headers)
        guess = await client.guess(ids[:TOKENS], LIKELIEST, headers=headers, lora=none)
    except EngineError:  # it refuses such prompts, or does not show its slots
        return None
    trial = _Trial(client, headers, none, may_thin, slot=guess.slot, left={guess.slot: guess.held})
    tokens = min(TOKENS, len(ids))
    thins = await trial.thins(ids) if guess.cuts and tokens - TAIL in guess.cuts else None
    await trial.sweep()
    return Tried(odds=guess.odds, cuts=guess.cuts, tokens=tokens, left=trial.left, thins=thins)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Prompts that follow the first one in its slot."""

    client: EngineClient
    headers: Headers | None
    lora: Scales | None
    may_go_on: Callable[[], bool]
    slot: SlotId
    left: dict[SlotId, int]  # tokens of ours in each slot

    async def thins(self, ids: Sequence[int]) -> bool | None:
        """Whether a checkpoint of the second prompt is gone when the last one needs it; None: unclear."""
        others = [token for token in ids[GROWN[-1] :] if token != ids[DIVERGES]][: LAST - DIVERGES]
        if len(others) < LAST - DIVERGES:
            return None
        for end in GROWN:
            if not await self._reused(ids[:end]):
                return None
        reused = await self._reused([*ids[:DIVERGES], *others])
        return reused < TOKENS if reused else None

    async def _reused(self, ids: Sequence[int]) -> int:
        """Prefill a prompt where the engine wants it, and return the tokens that it reused.

        0 also if it was not sent, was refused, or went to another slot.
        """
        if not self.may_go_on():
            return 0
        try:
            result = await self.client.prefill(ids, ANY, headers=self.headers, lora=self.lora)
        except EngineError:
            return 0
        self.left[result.slot] = result.held
        return result.cached if result.slot == self.slot else 0

    async def sweep(self) -> None:
        """Erase the slots that we used. Without --slot-save-path nothing can be erased."""
        try:
            for slot, held in tuple(self.left.items()):
                await swept(self.client, slot, held, self.headers)
                del self.left[slot]
        except EngineError:
            pass

"""A short prompt to an unused engine whose flags cannot be read: does it make checkpoints, and its logprobs.

`file_canary` reads its slot files; `traits` reads what the engine's answers show. Everything else is learnt
from the engine's answers (`scheduler/evidence`): experiments that show more cost more tokens than they save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from slotkeeper.engine.answers import EngineError, Odds
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.file_canary import swept, unused
from slotkeeper.engine.http import Headers
from slotkeeper.scheduler.adapters import BASE, Adapter, scales_of
from slotkeeper.scheduler.engine_model import TAIL, EngineTraits, Known, Memory
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What an unused engine made of the text."""

    odds: Odds
    cuts: tuple[int, ...] | None  # where batches ended, in tokens; None: not reported
    tokens: int
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens of ours that could not be erased

    def traits_into(self, traits: EngineTraits) -> EngineTraits:
        """Return the traits; the engine makes no checkpoints if no batch ended where it would make one."""
        may_be_dense = traits.memory is Memory.UNKNOWN
        if self.cuts is None or traits.cuttable or may_be_dense or self.tokens - TAIL in self.cuts:
            return traits
        return traits.learned(Known.CANARY, checkpoint_cap=0)


async def try_out(
    client: EngineClient, headers: Headers | None = None, adapters: Sequence[Adapter] = ()
) -> Tried | None:
    """Send the text's first tokens to an unused engine, and erase the slot again; None if it is in use.

    The engine chooses the slot, so the prompt meets no running answer (engine.md T1). All LoRA adapters are
    off for this call, because their scales may change while the engine runs. Also returns None if the engine
    refuses. Raises EngineGoneError.
    """
    none = scales_of(adapters, BASE) if adapters else None
    try:
        if not await unused(client, headers):
            return None
        ids = await client.tokenize(TEXT, add_special=False, parse_special=False, headers=headers)
        ids = ids[:TOKENS]
        guess = await client.guess(ids, LIKELIEST, headers=headers, lora=none)
    except EngineError:  # it refuses such prompts, or does not show its slots
        return None
    left = {guess.slot: guess.held}
    try:
        await swept(client, guess.slot, guess.held, headers)
        left = {}
    except EngineError:  # without --slot-save-path nothing can be erased
        pass
    return Tried(odds=guess.odds, cuts=guess.cuts, tokens=len(ids), left=left)

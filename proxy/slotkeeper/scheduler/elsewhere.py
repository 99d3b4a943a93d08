"""Decide whether to ask a shared store, which other sidecars write to, for the state of a prompt.

What is found there enters the catalog as `SnapshotsChanged` before placement learns the prompt's tokens. Then
it is a snapshot of the cold tier like any other, and has its price.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.costs import WORTH_A_FILE
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import RequestId, SlotId, Tokens

LEAST_SECONDS: Final = 1.0  # for an answer: a shorter wait depends more on chance than on the store
MOST_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A state that would save more tokens of a prompt than any state here.

    `within`: seconds for which the request waits for the store's answer. That is the time that computing the
    missing tokens takes, so a search that finds nothing costs at most half of the wait.
    """

    traits: EngineTraits
    prompt: Tokens
    here: int  # tokens that a slot or file of ours covers
    within: float


def wanted_elsewhere(state: State, request: RequestId, prompt: Tokens) -> Iterator[Wanted]:
    """Yield a state for each kind of engine that can serve the request; none if it has a place.

    The text before the first image is looked for as well, because states of it are kept apart from states
    with images: other images may follow it, and other projectors may encode them.
    """
    pending = state.requests.get(request)
    if pending is None or request not in state.queue:
        return
    prompt = prompt.within(pending.arrived.space)
    text = (prompt.cut(0, chunk.start) for chunk in prompt.chunks[:1])
    for part in (prompt, *text):
        yield from _wanted(state, state.up_for(pending.arrived.model), part)


def _wanted(state: State, there: Iterable[EngineTable], prompt: Tokens) -> Iterator[Wanted]:
    kinds: dict[str, list[EngineTable]] = {}
    for table in there:
        if table.traits.snapshots and (fingerprint := table.traits.fingerprint_of(prompt)):
            kinds.setdefault(fingerprint, []).append(table)
    for tables in kinds.values():
        here = max(_at_hand(state, table, prompt) for table in tables)
        missing = len(prompt) - here
        if missing >= WORTH_A_FILE:
            seconds = missing / max(table.rates.prefill for table in tables)
            within = min(MOST_SECONDS, max(LEAST_SECONDS, seconds))
            yield Wanted(traits=tables[0].traits, prompt=prompt, here=here, within=within)


def _at_hand(state: State, table: EngineTable, prompt: Tokens) -> int:
    slots = (table.shadow.plan_reuse(SlotId(slot), prompt).reuse for slot in range(table.traits.n_slots))
    return max(state.catalog.covered(prompt, table.traits), *slots)

"""What a place costs, in tokens of prefill of its engine.

That is what the engine must compute now, the time that files take (at the rate that the engine has shown),
and what overwriting a slot will probably cost later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.shadow import ReusePlan, Source
from slotkeeper.scheduler.slot_contents import (
    SlotContents,
    Snapshot,
    Tier,
    continues,
    goes_on_from,
    succeeds,
)
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.types import EngineId, SlotId, Tokens

# Of what the RAM cache promises with a draft model: of several states of one conversation the engine may load
# an older one. What lies in a slot is copied there by the very task that makes the engine look: it is sure.
RAM_DOUBT: Final = 0.03
IN_RAM: Final = 0.1  # share of a loss that remains when the RAM cache keeps a copy: it may drop it
# Share of a loss that remains when the messages go on behind other tools: a sub-agent leaves its main agent's
# state wanted, while a conversation that got another tool will not go back. Which it is cannot be known.
OTHER_HEAD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Want:
    """What is to be placed, when, and the files there are."""

    prompt: Tokens
    hash_chain: Sequence[bytes]
    now: float
    catalog: Catalog
    plain: bool = False  # without any step before
    losses: dict[tuple[EngineId, SlotId, bool], float] = field(default_factory=dict)  # see `loss`


def price_of(table: EngineTable, reuse_plan: ReusePlan, want: Want) -> float:
    """Of sending it where `reuse_plan` says, less the steps before."""
    moved = reuse_plan.base if reuse_plan.source is Source.RAM else None
    lost = loss(table, reuse_plan, want)
    if moved and not any(h and _same(h, moved) for h in table.shadow.slots):
        lost += _missed(moved, want)  # a loaded entry leaves the RAM cache
        lost += RAM_DOUBT * reuse_plan.reuse if table.traits.speculative else 0.0
    return len(want.prompt) - reuse_plan.reuse + lost


def loss(table: EngineTable, reuse_plan: ReusePlan, want: Want) -> float:
    """What will be missed of the slot's content once it is overwritten, found once for all plans there."""
    key = table.engine, reuse_plan.slot, reuse_plan.parked
    if key not in want.losses:
        want.losses[key] = _loss(table, reuse_plan, want)
    return want.losses[key]


def _loss(table: EngineTable, reuse_plan: ReusePlan, want: Want) -> float:
    victim = table.shadow.slots[reuse_plan.slot]
    if victim is None or continues(want.hash_chain, victim):
        return 0.0
    missed = _missed(victim, want)
    if succeeds(want.hash_chain, victim):
        missed *= OTHER_HEAD
    if reuse_plan.parked or table.shadow.elsewhere(victim, reuse_plan.slot):
        return missed * IN_RAM
    return min(missed, file_price(table, victim, want.catalog) * victim.chance(want.now))


def file_price(table: EngineTable, contents: SlotContents, catalog: Catalog) -> float:
    """Of having this state again when it was overwritten: from a file as far as one goes, then computed.

    That is, for its next turn: what is in a file from which that cannot go on does not count.
    """
    end = goes_on_from(contents, table.traits)
    covered = catalog.covered(contents.tokens.cut(0, end), table.traits) if contents.tokens else 0
    if not covered:
        return contents.total
    return end - covered + table.rates.restore_price(table.rates.size_of(covered))


def parked_price(table: EngineTable, contents: SlotContents, now: float) -> float:
    """Of saving this state now and, if it is asked for again, restoring it."""
    rates = table.rates
    again = rates.restore_price(rates.size_of(contents.total)) * contents.chance(now)
    return rates.save_price(contents.total) + again


def restore_price(table: EngineTable, snapshot: Snapshot) -> float:
    return table.rates.restore_price(snapshot.size, cold=snapshot.tier is Tier.COLD)


def blind_price(table: EngineTable, contents: SlotContents | None, catalog: Catalog, now: float) -> float:
    """Of overwriting a slot with a prompt of which nothing is known."""
    return (
        min(contents.total, file_price(table, contents, catalog)) * contents.chance(now) if contents else 0.0
    )


def _missed(contents: SlotContents, want: Want) -> float:
    return (contents.total - contents.tokens.lcp(want.prompt)) * contents.chance(want.now)


def _same(one: SlotContents, other: SlotContents) -> bool:
    return one.total == other.total and one.tokens == other.tokens

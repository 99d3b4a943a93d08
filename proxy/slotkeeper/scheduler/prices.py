"""The price of a place, in tokens of prefill of its engine.

It is what the engine must compute now, plus the time that files take (at the engine's measured rates), plus
what overwriting the slot will probably cost later.
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
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import EngineId, SlotId

# Share of what the RAM cache promises, with a draft model: the engine may load an older state of the same
# conversation. The contents of a slot are certain, because the task that makes the engine search copies them
# first.
RAM_DOUBT: Final = 0.03
IN_RAM: Final = 0.1  # share of a loss that remains if the RAM cache has a copy, which it may drop
# Share of a loss that remains if the messages continue after other tools. If the request is a sub-agent's,
# the main agent will need its state again; if the conversation got another tool, it will not. We cannot tell.
OTHER_HEAD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Want:
    """What is to be placed and when, and the available files."""

    prompt: Tokens
    hash_chain: Sequence[bytes]
    now: float
    catalog: Catalog
    plain: bool = False  # no steps before the request
    own_scales: bool = False  # the request names its LoRA adapters
    losses: dict[tuple[EngineId, SlotId, bool], float] = field(default_factory=dict)  # see `loss`


def price_of(table: EngineTable, reuse_plan: ReusePlan, want: Want) -> float:
    """Return the price of sending the request as `reuse_plan` says, without the steps before it."""
    moved = reuse_plan.base if reuse_plan.source is Source.RAM else None
    lost = loss(table, reuse_plan, want)
    if moved and not any(h and _same(h, moved) for h in table.shadow.slots):
        lost += _missed(moved, want)  # a loaded entry leaves the RAM cache
        lost += RAM_DOUBT * reuse_plan.reuse if table.traits.speculative else 0.0
    return len(want.prompt) - reuse_plan.reuse + lost


def loss(table: EngineTable, reuse_plan: ReusePlan, want: Want) -> float:
    """Return the expected loss if the slot is overwritten, in tokens.

    It is computed once for all plans there.
    """
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
    """Return the price of this state once it is overwritten: a restore as far as a file goes, then prefill.

    A file counts only as far as the next turn can continue from it.
    """
    end = goes_on_from(contents, table.traits)
    covered = catalog.covered(contents.tokens.cut(0, end), table.traits) if contents.tokens else 0
    if not covered:
        return contents.total
    return end - covered + table.rates.restore_price(table.rates.size_of(covered))


def parked_price(table: EngineTable, contents: SlotContents, now: float) -> float:
    """Return the price of saving this state now, plus the restore if it is needed again."""
    rates = table.rates
    again = rates.restore_price(rates.size_of(contents.total)) * contents.chance(now)
    return rates.save_price(contents.total) + again


def restore_price(table: EngineTable, snapshot: Snapshot) -> float:
    return table.rates.restore_price(snapshot.size, cold=snapshot.tier is Tier.COLD)


def blind_price(table: EngineTable, contents: SlotContents | None, catalog: Catalog, now: float) -> float:
    """Return the price of overwriting a slot with a prompt that is unknown."""
    return (
        min(contents.total, file_price(table, contents, catalog)) * contents.chance(now) if contents else 0.0
    )


def _missed(contents: SlotContents, want: Want) -> float:
    return (contents.total - contents.tokens.lcp(want.prompt)) * contents.chance(want.now)


def _same(one: SlotContents, other: SlotContents) -> bool:
    return one.total == other.total and one.tokens == other.tokens

"""The price of a place: in tokens of prefill on one engine, in seconds between several engines.

On one engine it is what the engine must compute now, plus the time that files take (at the engine's measured
rates) and copies to and from its RAM cache, plus what overwriting the slot will probably cost later.

Between engines of different speed and load, what counts is when the answer ends, and how long other requests
wait because of it. An engine computes one prompt after the other, and generates nothing for its running
requests meanwhile. So each token of prefill costs its time once for its own client, and once more for each
running request. LMetric (OSDI '26) places requests by this product of new prefill tokens and batch size; here
it is in seconds.

There is no threshold. A conversation stays where its state is while that is the cheapest place. It moves as
soon as waiting there costs more than computing or restoring its state elsewhere.

Engines count as equally fast while the middle halves of their measured speeds overlap. Otherwise noise could
take a slot from a conversation on one machine while an equal machine has an empty one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, Self

from slotkeeper.scheduler.effects import Restore
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import Measured
from slotkeeper.scheduler.requests.pending import Plan
from slotkeeper.scheduler.slots.engine_model import SlotContents, Snapshot, continues, edits, goes_on_from
from slotkeeper.scheduler.slots.shadow import ReusePlan, Source
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import EngineId, SlotId, Tier

# Share of a loss that remains if the RAM cache has a copy, which it may drop: with room for four such states
# or fewer, and for sixteen or more.
IN_RAM: Final = 0.1
IN_LARGE_RAM: Final = 0.025
KEPT_AFTER_EDIT: Final = 0.1  # share of a loss that remains if the request edits the state's last message


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
    copying = table.rates.copy_price(table.shadow.copied_bytes(reuse_plan, table.idle))
    return len(want.prompt) - reuse_plan.reuse + lost + copying


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
    if edits(want.hash_chain, victim, want.now):
        missed *= KEPT_AFTER_EDIT
    kept = reuse_plan.parked or table.shadow.elsewhere(victim, reuse_plan.slot)
    if kept and not table.shadow.exceeds_ram(victim):
        share = IN_RAM * 4 * table.shadow.ram_share(victim)
        return missed * max(IN_LARGE_RAM, min(IN_RAM, share))
    return min(missed, file_price(table, victim, want.catalog) * victim.chance(want.now))


def file_price(table: EngineTable, contents: SlotContents, catalog: Catalog) -> float:
    """Return the price of this state once it is overwritten: a restore as far as a file goes, then prefill.

    A file counts only as far as the next turn can continue from it.
    """
    end = goes_on_from(contents, table.traits)
    covered = catalog.covered(contents.tokens.cut(0, end), table.traits) if contents.tokens else 0
    if not covered:
        return contents.total
    checkpoints = sum(1 for checkpoint in contents.checkpoints if checkpoint.at <= covered)
    return end - covered + table.rates.restore_price(table.file_bytes(covered, checkpoints))


def parked_price(table: EngineTable, contents: SlotContents, now: float) -> float:
    """Return the price of saving this state now, plus the restore if it is needed again."""
    rates = table.rates
    again = rates.restore_price(table.bytes_of(contents)) * contents.chance(now)
    return table.save_seconds(contents) * rates.marginal_prefill + again


def restore_price(table: EngineTable, snapshot: Snapshot) -> float:
    return table.rates.restore_price(snapshot.size, cold=snapshot.tier is Tier.COLD)


def blind_price(table: EngineTable, contents: SlotContents | None, catalog: Catalog, now: float) -> float:
    """Return the price of overwriting a slot with a prompt that is unknown."""
    return (
        min(contents.total, file_price(table, contents, catalog)) * contents.chance(now) if contents else 0.0
    )


def _missed(contents: SlotContents, want: Want) -> float:
    return (contents.total - want.prompt.lcp(contents.tokens)) * contents.chance(want.now)


def _same(one: SlotContents, other: SlotContents) -> bool:
    return one.total == other.total and one.tokens == other.tokens


def computed(plan: Plan | None, prompt: Tokens | None) -> float | None:
    """Return the tokens that the engine would compute at this place, plus the file times, in tokens."""
    if plan is None or prompt is None:
        return None
    reuse_plan = plan.reuse_plan
    if reuse_plan is None and plan.slot is not None:
        reuse_plan = plan.table.shadow.plan_reuse(plan.slot, prompt)
    if reuse_plan is None:
        return None
    files = sum(restore_price(plan.table, step.snapshot) for step in plan.steps if isinstance(step, Restore))
    return len(prompt) - reuse_plan.reuse + files


# -- several engines: prices in seconds -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured speeds of several engines, used to compare places on them."""

    prefill: Mapping[EngineId, float]  # tokens per second
    decode: Mapping[EngineId, float]  # tokens per second for one answer
    reply: float  # tokens of a usual answer

    @property
    def fastest(self) -> float:
        return max(self.prefill.values())

    @classmethod
    def of(cls, tables: Collection[EngineTable]) -> Self:
        return cls(
            _speeds({table.engine: table.rates.prefill for table in tables}),
            _speeds({table.engine: table.rates.decode for table in tables}),
            fmean(table.rates.reply.mean for table in tables) if tables else 0.0,
        )

    def seconds(
        self,
        table: EngineTable,
        price: float,
        now: float,
        *,
        computes: int = 0,
        lost: float = 0.0,
        until: float = 0.0,
    ) -> float:
        """Return the seconds until the answer ends, plus what later requests and other clients lose.

        `price` is in tokens of prefill on this engine. `computes` of them are the request's own. `lost` of
        them belong to a state that is overwritten, which will be computed again on the fastest engine. The
        slot is free in `until` seconds.
        """
        held_up = max(until, table.work.ahead(now), table.stalled(now))
        beside = len(table.work.served) - (until > 0)
        here = (price - lost + computes * beside) / self.prefill[table.engine]
        later = lost / self.fastest
        return held_up + here + later + self.reply / self.decode[table.engine]


def _speeds(engines: Mapping[EngineId, Measured]) -> dict[EngineId, float]:
    """Return the speed of each engine. One with too few measurements gets the mean of the others.

    Engines whose measurements overlap are equally fast.
    """
    known = sorted(
        ((speed, engine) for engine, speed in engines.items() if speed.comparable),
        key=lambda one: one[0].middle,
    )
    if not known:
        return dict.fromkeys(engines, fmean(speed.mean for speed in engines.values()))
    groups: list[list[tuple[Measured, EngineId]]] = []
    for speed, engine in known:
        if groups and speed.low <= max(other.high for other, _ in groups[-1]):
            groups[-1].append((speed, engine))
        else:
            groups.append([(speed, engine)])
    usual = fmean(speed.middle for speed, _ in known)
    speeds = dict.fromkeys(engines, usual)
    for group in groups:
        speeds |= dict.fromkeys((engine for _, engine in group), fmean(speed.middle for speed, _ in group))
    return speeds


def share_guesses(tables: Collection[EngineTable]) -> None:
    """Give an engine without measurements the mean of the others."""
    figures = ((table.rates.prefill, table.rates.decode, table.rates.reply) for table in tables)
    for figure in zip(*figures, strict=True):
        measured = [of_one.mean for of_one in figure if of_one.measured]
        for of_one in figure if measured else ():
            if not of_one.measured:
                of_one.mean = fmean(measured)

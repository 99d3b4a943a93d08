"""Lower bounds of the prices of places, so that among many slots only a few have to be priced.

Hundreds of slots hold nothing of a prompt. They differ in what their contents are worth, how loaded and how
fast their engines are, and what files cost there. All of that is known without the prompt, or once for each
engine. A bound consists of

* the time until the engine can begin, and the time of the answer;
* the tokens that must be computed: the prompt less the most that any source can give (the slot, the RAM
  cache, the best file with its price);
* what is lost by overwriting the slot, or the price of saving it first, if that is less.

No plan for a slot is cheaper than the slot's bound. The losses fade with time, all at one rate, so they are
kept for each engine until something changes that they depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import zip_longest
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple

from slotkeeper.scheduler.catalog import Catalog, Covered
from slotkeeper.scheduler.costs import WORTH_A_FILE
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.live_states import NEAR, Held, LiveStates, NearStates
from slotkeeper.scheduler.offers import Options, over_in
from slotkeeper.scheduler.prices import IN_LARGE_RAM, Comparison, Want, file_price, restore_price
from slotkeeper.scheduler.slot_contents import HALF_LIFE, SlotContents, Snapshot, goes_on_from
from slotkeeper.scheduler.table import EngineTable, SlotState
from slotkeeper.scheduler.types import EngineId, SlotId

DRAINS: Final = frozenset({SlotState.DRAINING, SlotState.MAINTENANCE})
OUTDATED: Final = attrgetter("outdated")
ROUNDING: Final = 1e-9  # share of a bound: more than the errors of floating point


class Worth(NamedTuple):
    """The parts of the cost of overwriting a slot that no prompt changes, at one moment; costs in tokens."""

    total: int = 0  # tokens held
    chance: float = 0.0  # of their use
    share: float = 1.0  # of the loss that remains
    recovery: float = 0.0  # the most that they cost once they are lost
    save: float = inf  # the price of saving them before
    restore: float = 0.0  # the price of restoring them

    def lost(self, common: int, faded: float) -> float:
        """Return the least loss if the next prompt shares `common` tokens."""
        return self.chance * faded * min(self.share * max(0, self.total - common), self.recovery)


NOTHING: Final = Worth()
UNCOVERED: Final = Covered(0, None)


@dataclass(frozen=True, slots=True)
class Overwrites:
    """What overwriting the slots of one engine costs at one moment, and all that this was computed from."""

    at: float
    traits: EngineTraits
    terms: tuple[float, ...]
    slots: list[SlotContents | None]
    ram: list[SlotContents]
    covered: list[Covered]
    worths: list[Worth]
    writers: frozenset[bytes]  # `_telling` messages of the requests that wrote the slots
    kind: int  # equal for engines with equal traits and equal prices of files
    least: Worth  # no slot is worth less, whatever it shares below `NEAR` tokens with a prompt

    @classmethod
    def of(
        cls, table: EngineTable, catalog: Catalog, now: float, kind: int, before: Overwrites | None
    ) -> Overwrites:
        """Compute what overwriting costs; costs in `before` that still hold are not computed again."""
        shadow, traits, terms = table.shadow, table.traits, table.file_terms
        kept = before if before and before.traits is traits and before.terms == terms else None
        covered, worths = [], []
        for slot, contents in enumerate(shadow.slots):
            if contents is None:
                covered.append(UNCOVERED)
                worths.append(NOTHING)
            elif kept and kept.slots[slot] is contents and not kept.covered[slot].outdated:
                covered.append(kept.covered[slot])
                share = _share(table, SlotId(slot), contents)
                worths.append(kept.worths[slot]._replace(chance=contents.chance(now), share=share))
            else:
                covered.append(catalog.answer(contents.tokens.cut(0, goes_on_from(contents, traits)), traits))
                worths.append(_worth(table, SlotId(slot), contents, catalog, now))
        writers = frozenset(digest for held in shadow.slots if held for digest in _telling(held.hash_chain))
        slots, ram = ([*shadow.slots], [*shadow.ram])
        return cls(now, traits, terms, slots, ram, covered, worths, writers, kind, _least(worths))

    def hold(self, table: EngineTable) -> bool:
        """Whether nothing has changed that the costs depend on."""
        shadow = table.shadow
        states = self.traits is shadow.traits and self.slots == shadow.slots and self.ram == shadow.ram
        return states and self.terms == table.file_terms and not any(map(OUTDATED, self.covered))


def _share(table: EngineTable, slot: SlotId, contents: SlotContents) -> float:
    """Return the least share of a loss that remains. With a RAM cache, there may be a copy."""
    copied = table.traits.ram_cache or table.shadow.elsewhere(contents, slot)
    return IN_LARGE_RAM if copied else 1.0


def _worth(table: EngineTable, slot: SlotId, contents: SlotContents, catalog: Catalog, now: float) -> Worth:
    rates, total, size = table.rates, contents.total, table.bytes_of(contents)
    return Worth(
        total=total,
        chance=contents.chance(now),
        share=_share(table, slot, contents),
        recovery=file_price(table, contents, catalog),
        save=rates.save_price(size) if total >= WORTH_A_FILE else inf,
        restore=rates.restore_price(size),
    )


def _least(worths: Sequence[Worth]) -> Worth:
    return Worth(
        total=sum(worth.total for worth in worths) + NEAR,
        chance=1.0,
        recovery=min(worth.lost(NEAR, 1.0) for worth in worths),
        save=min(worth.save for worth in worths),
        restore=min(worth.restore * worth.chance for worth in worths),
    )


@dataclass(frozen=True, slots=True)
class SharedTerms:
    """What bounds on all engines share, for one prompt."""

    want: Want
    length: int  # tokens of the prompt
    chain: frozenset[bytes]  # its messages
    near: NearStates
    compared: Comparison | None
    later: float  # the price of a token that is lost
    # The best file for each kind of engine: those with equal traits and equal prices of files.
    files: dict[int, tuple[Snapshot, int] | None] = field(default_factory=dict)


class Engine(NamedTuple):
    """What one engine adds to the bounds of all its slots, for one prompt; in the unit of `ranked`."""

    shared: SharedTerms
    table: EngineTable
    overwrites: Overwrites
    begins: float  # the time until it can begin, and that of the answer
    computes: float  # prefill of the prompt, with the best source besides the slot itself
    token: float  # of each token of the prompt, with the delay of the requests beside it
    price: float  # of each token of prefill, in all other prices
    faded: float  # what is left of the chances since they were computed
    saves: bool
    common: dict[SlotId, int]  # tokens that slots share with the prompt

    def bound(self, worth: Worth, common: int) -> float:
        """Return a lower bound of the price of every plan for a slot that shares `common` tokens."""
        lost = worth.lost(common, self.faded) * self.shared.later
        if self.saves:
            parked = worth.save + worth.restore * worth.chance * self.faded
            lost = min(lost, parked * self.price)
        computes = min(self.computes, max(1, self.shared.length - common) * self.token)
        bound = self.begins + computes + lost
        return bound - ROUNDING * (1 + abs(bound))

    @property
    def rest(self) -> float:
        """A lower bound of the prices in all slots that share too little with the prompt to be told apart."""
        return self.bound(self.overwrites.least, self.shared.near.others)

    @property
    def known(self) -> Sequence[SlotId]:
        """The slots that get a bound of their own at once."""
        states = self.table.states
        differ = SlotState.IDLE not in states or SlotState.MAINTENANCE in states
        if differ or not self.shared.chain.isdisjoint(self.overwrites.writers):
            return [SlotId(slot) for slot in range(len(states))]
        return [*self.common]

    def bound_of(self, slot: SlotId) -> float:
        """Return a lower bound of every plan for this slot."""
        common, worth = self.common.get(slot, self.shared.near.others), self.overwrites.worths[slot]
        contents = self.overwrites.slots[slot]
        if contents and not self.shared.chain.isdisjoint(_telling(contents.hash_chain)):
            worth = NOTHING  # it may be the next turn of what the slot holds, or an edit of its last one
        if self.table.states[slot] is SlotState.MAINTENANCE:
            becomes = self.table.maintenance[slot].becomes
            common = max(common, becomes.same_ids(self.shared.want.prompt) if becomes else 0)
        return self.bound(worth, common)


REST: Final = SlotId(-1)  # in place of a slot: all slots of an engine that have no bound of their own yet


class PriceBounds:
    """Lower bounds of the prices on the engines of the last decision."""

    def __init__(self) -> None:
        self._states = LiveStates()
        self._of: dict[EngineId, Overwrites] = {}
        self._kinds: dict[Hashable, int] = {}
        self._kinds_seen = 0
        self._catalog: Catalog | None = None

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"<PriceBounds {len(self._of)} engines {len(self)} states>"

    def ranked(
        self, options: Sequence[Options], compared: Comparison | None
    ) -> Iterator[tuple[float, int, SlotId]]:
        """Yield a lower bound, the place in `options` and the slot, for each slot; the lowest bounds first.

        Bounds are in seconds, or in tokens of prefill if there is nothing to compare.
        """
        want = options[0].want
        self._update(options, want)
        near = self._states.near(want.prompt)
        later = 1 / compared.fastest if compared else 1.0
        shared = SharedTerms(want, len(want.prompt), frozenset(want.hash_chain), near, compared, later)
        engines = [self._engine(at, shared) for at in options]
        heap: list[tuple[float, int, SlotId]] = []
        for number, engine in enumerate(engines):
            known = engine.known
            heap += ((engine.bound_of(slot), number, slot) for slot in known)
            if len(known) < len(engine.table.states):
                heap.append((engine.rest, number, REST))
        heapify(heap)
        while heap:
            bound, number, slot = heappop(heap)
            if slot != REST:
                yield bound, number, slot
                continue
            engine = engines[number]
            for other in range(len(engine.table.states)):
                if (slot := SlotId(other)) not in engine.common:
                    heappush(heap, (engine.bound_of(slot), number, slot))

    def _update(self, options: Sequence[Options], want: Want) -> None:
        """Bring costs and states up to date with the engines."""
        if self._catalog is not want.catalog:
            self._of.clear()
            self._states, self._catalog = LiveStates(), want.catalog
        for at in options:
            table, before = at.table, self._of.get(at.table.engine)
            if before is None or not before.hold(table):
                kind = self._kind(table.traits, table.file_terms)
                now = Overwrites.of(table, want.catalog, want.now, kind, before)
                self._of[table.engine] = now
                self._moved(table.engine, before, now)
        if len(self._of) > len(options):
            for engine in self._of.keys() - {at.table.engine for at in options}:
                self._moved(engine, self._of.pop(engine), None)

    def _moved(self, engine: EngineId, before: Overwrites | None, now: Overwrites | None) -> None:
        """Replace the states that one engine no longer holds by those that it holds now."""
        old, new = before.slots if before else [], now.slots if now else []
        for slot, (gone, come) in enumerate(zip_longest(old, new)):
            if gone is not come:
                self._states.replace(Held(engine, SlotId(slot)), gone, come)
        old_ram, new_ram = before.ram if before else [], now.ram if now else []
        for gone in _less(old_ram, new_ram):
            self._states.replace(Held(engine, None), gone, None)
        for come in _less(new_ram, old_ram):
            self._states.replace(Held(engine, None), None, come)

    def _kind(self, traits: EngineTraits, terms: tuple[float, ...]) -> int:
        """Return a number that only engines with equal traits and equal prices of files share."""
        if len(self._kinds) > 2 * len(self._of) + 1:
            self._kinds.clear()
        if (key := (traits, terms)) not in self._kinds:
            self._kinds_seen += 1
            self._kinds[key] = self._kinds_seen
        return self._kinds[key]

    def _engine(self, at: Options, shared: SharedTerms) -> Engine:
        table, want = at.table, at.want
        overwrites = self._of[table.engine]
        begins, beside, price = _terms(at, shared.compared)
        token = price * (1 + beside)
        common, source = shared.near.slots.get(table.engine, {}), shared.near.in_ram(table.engine)
        if common and table.traits.ram_cache:  # a touch may copy any slot there
            source = max(source, *common.values())
        computes = max(1, shared.length - source) * token
        if overwrites.kind not in shared.files:
            found = want.catalog.best(want.prompt, table.traits, partial(restore_price, table))
            shared.files[overwrites.kind] = found
        best = shared.files[overwrites.kind]
        at.file = best[0] if best else None
        if best:
            restored = (shared.length - best[1]) * token + restore_price(table, best[0]) * price
            computes = min(computes, restored)
        faded = 2.0 ** (-max(0.0, want.now - overwrites.at) / HALF_LIFE)
        saves = table.may_save(want.now)
        return Engine(shared, table, overwrites, begins, computes, token, price, faded, saves, common)


def _telling(hash_chain: Sequence[bytes]) -> Sequence[bytes]:
    """Return the messages of which a request has one if it continues or replaces (`replaces`) this one."""
    return hash_chain[-2:] if len(hash_chain) > 2 else hash_chain[-1:]


def _less(some: Sequence[SlotContents], others: Sequence[SlotContents]) -> Iterator[SlotContents]:
    """Yield those of some states that are not among the others, by identity."""
    left = Counter(map(id, others))
    for contents in some:
        left[id(contents)] -= 1
        if left[id(contents)] < 0:
            yield contents


def _terms(at: Options, compared: Comparison | None) -> tuple[float, int, float]:
    """Return when the engine can begin, with its answer; the requests beside; the price of a token.

    A slot in which a request runs is free later, and has one request less beside it.
    """
    table, now = at.table, at.want.now
    if compared is None:
        return table.stalled(now) * table.rates.prefill, 0, 1.0
    held_up, beside = max(table.work.ahead(now), table.stalled(now)), len(table.work.served)
    if (until := over_in(at)) is not None:
        held_up, beside = held_up if DRAINS & set(table.states) else max(held_up, until), max(0, beside - 1)
    answer = compared.reply / compared.decode[table.engine]
    return held_up + answer, beside, 1 / compared.prefill[table.engine]

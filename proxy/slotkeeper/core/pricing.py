"""What a place costs: tokens to compute now, time that files take, and what will be missed later.

Everything is in tokens of prefill; seconds become tokens at the rate that the engine has shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.core.held import Held, continues, goes_on_from, succeeds
from slotkeeper.core.shadow import Look, Source
from slotkeeper.core.shelf import Shelf
from slotkeeper.core.snapshots import Snapshot, Tier
from slotkeeper.core.table import EngineTable
from slotkeeper.core.tokens import Tokens

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
    outline: Sequence[bytes]
    now: float
    shelf: Shelf
    plain: bool = False  # without any step before


def price_of(table: EngineTable, look: Look, want: Want) -> float:
    """Of sending it where `look` says, less the steps before."""
    moved = look.base if look.source is Source.RAM else None
    lost = loss(table, look, want)
    if moved and not any(h and _same(h, moved) for h in table.shadow.slots):
        lost += _missed(moved, want)  # a loaded entry leaves the RAM cache
        lost += RAM_DOUBT * look.reuse if table.traits.speculative else 0.0
    return len(want.prompt) - look.reuse + lost


def loss(table: EngineTable, look: Look, want: Want) -> float:
    """What will be missed of the slot's content once it is overwritten."""
    victim = table.shadow.slots[look.slot]
    if victim is None or continues(want.outline, victim):
        return 0.0
    missed = _missed(victim, want)
    if succeeds(want.outline, victim):
        missed *= OTHER_HEAD
    if look.parked or table.shadow.elsewhere(victim, look.slot):
        return missed * IN_RAM
    return min(missed, file_price(table, victim, want.shelf) * victim.chance(want.now))


def file_price(table: EngineTable, held: Held, shelf: Shelf) -> float:
    """Of having this state again when it was overwritten: from a file as far as one goes, then computed.

    That is, for its next turn: what is in a file from which that cannot go on does not count.
    """
    end = goes_on_from(held, table.traits)
    covered = shelf.covered(held.tokens.cut(0, end), table.traits) if held.tokens else 0
    if not covered:
        return held.total
    return end - covered + table.rates.restore_price(table.rates.size_of(covered))


def parked_price(table: EngineTable, held: Held, now: float) -> float:
    """Of saving this state now and, if it is asked for again, restoring it."""
    rates = table.rates
    again = rates.restore_price(rates.size_of(held.total)) * held.chance(now)
    return rates.save_price(held.total) + again


def restore_price(table: EngineTable, snapshot: Snapshot) -> float:
    return table.rates.restore_price(snapshot.size, cold=snapshot.tier is Tier.COLD)


def blind_price(table: EngineTable, held: Held | None, shelf: Shelf, now: float) -> float:
    """Of overwriting a slot with a prompt of which nothing is known."""
    return min(held.total, file_price(table, held, shelf)) * held.chance(now) if held else 0.0


def _missed(held: Held, want: Want) -> float:
    return (held.total - held.tokens.lcp(want.prompt)) * held.chance(want.now)


def _same(one: Held, other: Held) -> bool:
    return one.total == other.total and one.tokens == other.tokens

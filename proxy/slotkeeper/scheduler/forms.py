"""Two forms of one request: as its client wrote it, and as rules would have it. The cheaper one goes out.

A form is priced by what the engine would have to compute for it now: at the place that it would get. A tie
is the client's own. Tools in another order must save as much as is moved: the next agent may share the order
that this client wrote, and without us would find it in the slot. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.choice import Plan, continuing
from slotkeeper.scheduler.pricing import restore_price
from slotkeeper.scheduler.slot_contents import shared_messages
from slotkeeper.scheduler.steps import Load
from slotkeeper.scheduler.structure import Boundary
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.tokens import Tokens

BYTES_PER_TOKEN: Final = 4  # of JSON schemas, about


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a request: its messages as digests, and its tokens once they are known."""

    hash_chain: tuple[bytes, ...]
    prompt: Tokens | None = None
    boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True, slots=True)
class Weighed:
    """What was decided. Prices are tokens to compute, files among them; None: it was not looked at."""

    own: float | None
    changed: float | None
    taken: bool  # the changed one goes out

    @classmethod
    def of(cls, own: float | None, changed: float | None, *, moved: int = 0) -> Weighed:
        """Nothing is changed where a price is not known. `moved`: bytes that rules put elsewhere."""
        if own is None or changed is None:
            return cls(own, changed, taken=False)
        return cls(own, changed, taken=changed < own and changed + moved // BYTES_PER_TOKEN <= own)


def changed_by_messages(
    tables: Collection[EngineTable], own: Sequence[bytes], changed: Sequence[bytes], now: float
) -> Plan | None:
    """Where it goes changed, if no token is needed to see that this is cheaper; else None.

    So it is where a free slot, which can be cut anywhere, holds all earlier messages of the changed form, and
    no state as many of the client's own: what both have in common behind that must be computed for either.
    The contrary needs tokens: objects with their keys in another order have the same digest.
    """
    if _reach(tables, changed) <= _reach(tables, own):
        return None
    plan = continuing(tables, changed, now)
    return plan if plan is not None and plan.table.traits.cuttable else None


def computed(plan: Plan | None, prompt: Tokens | None) -> float | None:
    """What the engine would have to compute at this place, and the time that a file takes, in tokens."""
    if plan is None or prompt is None:
        return None
    reuse_plan = plan.reuse_plan
    if reuse_plan is None and plan.slot is not None:
        reuse_plan = plan.table.shadow.plan_reuse(plan.slot, prompt)
    if reuse_plan is None:
        return None
    files = sum(restore_price(plan.table, step.snapshot) for step in plan.steps if isinstance(step, Load))
    return len(prompt) - reuse_plan.reuse + files


def _reach(tables: Collection[EngineTable], hash_chain: Sequence[bytes]) -> int:
    """Messages of the longest known state that begins as this form does, tools and all."""
    shadows = [table.shadow for table in tables]
    states = [
        contents
        for shadow in shadows
        for contents in (*shadow.slots, *shadow.ram)
        if contents and contents.hash_chain
    ]
    same_head = (contents for contents in states if hash_chain and contents.hash_chain[0] == hash_chain[0])
    return max((shared_messages(hash_chain, contents) for contents in same_head), default=0)

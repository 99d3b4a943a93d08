"""What happens to a request between its place being chosen and its going there: planting, and waiting for it.

What to plant is decided in `planting`; here that is made part of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slotkeeper.scheduler import planting
from slotkeeper.scheduler.checkpoints import TAIL
from slotkeeper.scheduler.choice import STEER_TAIL, Plan, steer
from slotkeeper.scheduler.limits import WORTH_A_FILE
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.planting import Structure
from slotkeeper.scheduler.rates import Rates
from slotkeeper.scheduler.shadow import Source
from slotkeeper.scheduler.state import State, user_starts
from slotkeeper.scheduler.structure import UNKNOWN, Boundary, in_replies
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import Reason


def structured(state: State, prompt: Tokens, boundaries: tuple[Boundary, ...]) -> Structure:
    """Where other prompts may part from this one.

    Not within a reply: where one comes back otherwise than it was sampled, no other prompt will part.
    """
    markers = next((table.traits.markers for table in state.up), UNKNOWN)
    found = state.tree.branches(prompt)
    said = in_replies((branch.at for branch in found), prompt, boundaries, markers) if found else ()
    asked = tuple(branch for branch in found if branch.at not in said)
    return Structure(
        boundaries=boundaries,
        branches=asked,
        known=state.tree.longest(prompt),
        known_at=state.tree.passed_at(prompt),
    )


def behind(state: State, pending: Pending, plan: Plan | None) -> Plan | None:
    """The plan; but a request that begins with what is just being saved waits until it lies in a file."""
    prompt, reuse_plan = pending.prompt, plan.reuse_plan if plan else None
    if plan is None or prompt is None or reuse_plan is None or pending.plain:
        return plan
    for shared, least in _coming(state, pending, plan.table.rates):
        common = prompt.lcp(shared)
        if common >= len(shared) - TAIL and common - reuse_plan.reuse > least:
            return replace(plan, wait=True)
    return plan


def _coming(state: State, but: Pending, rates: Rates) -> Iterator[tuple[Tokens, float]]:
    """What will lie in a file in a moment, and how many tokens that must save to be waited for.

    What is written is only checked yet, which takes about as long as its restore will.
    """
    for contents in state.coming.values():
        yield contents.tokens, 2 * rates.restore_price(rates.size_of(contents.total))
    for other in state.requests.values():
        if other.stage is Stage.PREPARING and other.plan and other is not but:
            shared = planting.kept(other.plan.steps, other.steps_left)
            if shared:
                yield shared, WORTH_A_FILE


def planted(state: State, pending: Pending, plan: Plan, now: float) -> Plan:
    """The same plan, with what is planted on the way."""
    prompt, reuse_plan, request = pending.prompt, plan.reuse_plan, pending.arrived
    if prompt is None or reuse_plan is None or pending.plain or request.adapted:
        return plan
    if prompt.space and plan.pinned and not plan.apart:  # it goes uncached: what is planted would be lost
        return plan
    table = plan.table
    found = planting.steps(
        prompt,
        pending.structure,
        reuse_plan=reuse_plan,
        table=table,
        catalog=state.catalog,
        writes=state.writes,
        user_starts=user_starts(prompt, table.traits),
        now=now,
    )
    if not found:
        return plan
    if plan.pinned:
        return replace(plan, steps=(*plan.steps, *found))
    if plan.steps and plan.reason is Reason.STEERED:
        return replace(plan, steps=(*plan.steps[:-1], *found, plan.steps[-1]))
    if request.pinnable and reuse_plan.source is not Source.RAM:
        reason = Reason.PREFIX if reuse_plan.reuse else Reason.COLD
        return replace(plan, pinned=True, reason=reason, steps=found)
    if reuse_plan.source is not Source.RAM and len(prompt) > STEER_TAIL:
        return replace(plan, reason=Reason.STEERED, steps=(*found, steer(prompt)))
    return plan

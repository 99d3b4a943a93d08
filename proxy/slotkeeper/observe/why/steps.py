"""What the core plans and does to slots, in the words of records."""

from __future__ import annotations

from slotkeeper.observe.why.record import Option, RequestStage
from slotkeeper.scheduler.choice import Plan
from slotkeeper.scheduler.effects import Erase, Plant, Restore, Save
from slotkeeper.scheduler.steps import Keep, Load, Prefill, Step, Wipe

Effort = Plant | Save | Restore | Erase  # a step that is being taken


def told(effort: Effort) -> tuple[RequestStage, int | None, str]:
    """Its stage, how many tokens it is about, and a note."""
    match effort:
        case Plant():
            return RequestStage.PLANT, len(effort.tokens), effort.purpose.value
        case Save():
            return RequestStage.SAVE, len(effort.tokens), effort.moment.value
        case Restore():
            return RequestStage.RESTORE, len(effort.snapshot.tokens), effort.snapshot.id
        case Erase():
            return RequestStage.ERASE, None, ""


def option(plan: Plan) -> Option:
    return Option(
        reason=plan.reason,
        engine=plan.table.engine,
        slot=plan.slot,
        reuse=plan.reuse_plan.reuse if plan.reuse_plan else None,
        price=plan.price,
        steps=tuple(map(_word, plan.steps)),
    )


def _word(step: Step) -> str:
    match step:
        case Prefill():
            return step.purpose.value
        case Keep():
            return step.moment.value
        case Load():
            return RequestStage.RESTORE.value
        case Wipe():
            return RequestStage.ERASE.value

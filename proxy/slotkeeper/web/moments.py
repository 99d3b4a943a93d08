"""Where requests are at this moment, put together from the core's account and the journal's."""

from __future__ import annotations

from slotkeeper.observe.why.moment import Doing, Moment, prefilling
from slotkeeper.observe.why.record import RUNNING, Record
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.pending import Pending, Stage
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.steps import Prefill


def moment_of(driver: Driver, record: Record) -> Moment | None:
    """None where it has ended."""
    if record.outcome != RUNNING:
        return None
    pending = driver.placement.pending(record.key)
    if record.first_token is not None or record.status is not None:
        return Moment(doing=Doing.GENERATING)
    if pending is None or pending.stage is Stage.QUEUED:
        return Moment(doing=Doing.QUEUED, place=_place(driver.placement, record))
    work = record.work
    if work is None or (pending.stage is Stage.PREPARING and not _plants(pending)):
        return Moment(doing=Doing.PREPARING)
    prompt = None if pending.prompt is None else len(pending.prompt)
    return prefilling(record, work, prompt, driver.now())


def _place(placement: Placement, record: Record) -> int | None:
    line = placement.line
    return line.index(record.key) + 1 if record.key in line else None


def _plants(pending: Pending) -> bool:
    return bool(pending.plan and pending.steps_left and isinstance(pending.step, Prefill))

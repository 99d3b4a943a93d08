"""Describes acts for a request besides its placement: shared cells, priorities and deadlines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.observe.request_record import Record
from slotkeeper.scheduler.effects import PoolAct, Ranked
from slotkeeper.scheduler.types import Priority, PriorityAct, id_of

POOLED: Final[Mapping[PoolAct, str]] = MappingProxyType(
    {
        PoolAct.WAITED: "It waited: {cells:,} cells were missing in the KV buffer that all slots share.",
        PoolAct.PARKED: "Slot {slot} was emptied for it ({cells:,} cells); what it held can be loaded again.",
        PoolAct.ERASED: "Slot {slot} was emptied for it ({cells:,} cells); nothing else has what it held.",
        PoolAct.PURGED: "The engine emptied slot {slot} by itself ({cells:,} cells).",
        PoolAct.RETRIED: "It failed for lack of cells and was sent again; its client had no byte yet.",
        PoolAct.FAILED: "It failed for lack of cells. With -np N each slot has a KV buffer of its own.",
    }
)
RANKED: Final[Mapping[PriorityAct, str]] = MappingProxyType(
    {
        PriorityAct.WENT_FIRST: "Its priority is {priority}: it went before {other}, which came earlier",
        PriorityAct.AGED: "No request of priority {priority} was served for long, so it was the next",
        PriorityAct.STOOD_BACK: "Its priority is {priority}: it waited while {other} was at work there",
        PriorityAct.GAVE_WAY: "Its priority is {priority}: its prefill paused after a batch for {other}",
        PriorityAct.KEPT_ON: "Its prefill did not pause for {other}, since that would have cost more",
        PriorityAct.EXPIRED: "It could not be started in time, and was refused",
    }
)


def done(record: Record) -> Iterator[str]:
    """Yield a sentence for each act; for equal acts in a row, only for the last."""
    for pooled in record.pooled:
        yield POOLED[pooled.act].format(cells=pooled.cells, slot=pooled.slot)
    for at, ranked in enumerate(record.ranked):
        following = record.ranked[at + 1 : at + 2]
        if not following or following[0].act is not ranked.act:
            yield _ranked(ranked, _times(record.ranked[: at + 1]))


def _times(ranked: list[Ranked]) -> int:
    """Return the number of equal acts at the end of the list."""
    count = 0
    while count < len(ranked) and ranked[-1 - count].act is ranked[-1].act:
        count += 1
    return count


def _ranked(ranked: Ranked, times: int) -> str:
    other = f"request {id_of(ranked.other)}" if ranked.other else "others"
    words = RANKED[ranked.act].format(priority=ranked.priority.value, other=other)
    often = f", the last of {times} times" if times > 1 else ""
    priced = "" if ranked.gain is None else f"; gain {ranked.gain:,.2f} s, loss {ranked.loss:,.2f} s"
    return f"{words}{often} (after {ranked.waited:,.1f} s in the queue{priced})."


def urgency(record: Record, *, apart: bool) -> str:
    """Return priority and acts for the header of an answer; "" for normal priority without acts.

    `apart`: acts are left out, because they would reveal the load of other namespaces.
    """
    acts = dict.fromkeys(ranked.act.value for ranked in ([] if apart else record.ranked))
    return "; ".join([record.priority.value, *acts]) if acts or record.priority is not Priority.NORMAL else ""


def documents(record: Record) -> dict[str, Any]:
    """Return the acts as fields of a JSON document."""
    return {
        "pool": [{"act": each.act.value, "slot": each.slot, "cells": each.cells} for each in record.pooled],
        "priority_acts": [
            {
                "act": each.act.value,
                "other": id_of(each.other) if each.other else None,
                "waited_seconds": round(each.waited, 3),
                "gain_seconds": None if each.gain is None else round(each.gain, 3),
                "loss_seconds": None if each.loss is None else round(each.loss, 3),
            }
            for each in record.ranked
        ],
    }

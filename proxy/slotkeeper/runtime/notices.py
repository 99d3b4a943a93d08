"""Counts and logs the scheduler's reports, and makes the errors of requests that it refuses."""

from __future__ import annotations

from slotkeeper.api.errors import UpstreamFault
from slotkeeper.engine.http import EngineAddress
from slotkeeper.observe.log import Seldom, get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.scheduler.effects import Poisoned, Pooled, Ranked, Refuse
from slotkeeper.scheduler.router import RETRY_SECONDS
from slotkeeper.scheduler.types import id_of

log = get_logger(__name__)


class Notices:
    """Counts and logs effects that only report."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seldom = Seldom(log)

    def say(self, what: Pooled | Poisoned | Ranked) -> None:
        match what:
            case Pooled():
                self._pooled(what)
            case Poisoned():
                self._poisoned(what)
            case Ranked():
                self._ranked(what)

    def _poisoned(self, what: Poisoned) -> None:
        place, why = str(what.place) if what.place else None, what.why.value
        self._metrics.poisoned.labels(reason=why).inc()
        self._seldom.warning(
            "slot_poisoned",
            request_id=id_of(what.request),
            place=place,
            reason=why,
            cached=what.cached,
            possible=what.possible,
        )

    def _pooled(self, what: Pooled) -> None:
        self._metrics.pool_acts.labels(reason=what.act.value).inc()
        about = {"engine": what.engine, "act": what.act.value, "slot": what.slot, "cells": what.cells}
        log.info("kv_pool", request_id=id_of(what.request), **about)

    def _ranked(self, what: Ranked) -> None:
        self._metrics.priority_acts.labels(reason=what.act.value).inc()
        log.info(
            "priority",
            request_id=id_of(what.request),
            act=what.act.value,
            priority=what.priority.value,
            other=id_of(what.other) if what.other else None,
            engine=what.engine,
            waited=round(what.waited, 3),
            gain=None if what.gain is None else round(what.gain, 3),
            loss=None if what.loss is None else round(what.loss, 3),
        )


def fault_of(what: Refuse | Ranked) -> UpstreamFault:
    """Return the error for the client of a refused request."""
    if isinstance(what, Ranked):
        return UpstreamFault(
            f"no slot was free within {what.waited:.1f} s, and X-Slotkeeper-Max-Wait allows no more; "
            "nothing of this request was sent to an engine",
            status=503,
            retry_after=what.retry_after,
        )
    model = EngineAddress.of(what.engine).model
    return UpstreamFault(
        f"the model {model} could not be loaded; the log of its router says why",
        status=503,
        retry_after=int(RETRY_SECONDS),
    )

"""A playbook that passes every event and effect to a journal, as the driver does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from playbooks.playbook import STEP, Outcome, Play, Sees, arrives, goes, knows, starts
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.request_record import Record, RequestStage
from slotkeeper.scheduler.effects import Effect
from slotkeeper.scheduler.events import EngineUp, Event
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import RequestId
from unit.looking import counted

THOUGHT = 0.001  # seconds of a decision
BESIDE = {
    RequestStage.PARSE,
    RequestStage.RENDER,
}  # these may happen while the request is queued


def record(request_id: str = "r1", **more: Any) -> Record:
    known: dict[str, Any] = {
        "request_id": request_id,
        "route": "chat",
        "received": 1_700_000_000.0,
        "at": 1000.0,
    }
    return Record(**known | counted(**more))


class WatchedPlay(Play):
    def __init__(self, *, journal: Journal | None = None, **more: Any) -> None:
        self.journal = Journal(100) if journal is None else journal
        super().__init__(**more)
        for table in self.placement.tables.values():
            up = EngineUp(at=self.clock, engine=table.engine, traits=table.traits, model=table.model)
            self.journal.saw(up, [], self.clock, self.clock, self.placement.pending)
        self.placement.on = self._watched(self.placement.on)  # type: ignore[method-assign]

    def _watched(self, on: Any) -> Any:
        def watched(event: Event) -> list[Effect]:
            effects = on(event)
            begun = event.at + THOUGHT
            self.journal.saw(event, effects, begun, begun + THOUGHT, self.placement.pending)
            self.journal.look(event, effects, begun, self.placement.waiting)
            return effects

        return watched

    def comes(self, request: str, **more: Any) -> Record:
        """A request arrives, and its record is followed from then on."""
        came = record(request, at=self.clock + STEP)  # when the next event will be
        self.journal.arrived(came)
        self.journal.follow(RequestId(request), came)
        _ = self << arrives(request, **more)
        return came

    def fills_both_slots(self, first: Tokens, second: Tokens) -> None:
        """Begin the requests r1 and r2, with these prompts."""
        for request, prompt in (("r1", first), ("r2", second)):
            self.comes(request)
            assert self << knows(request, prompt) >> goes(request) << starts(request)

    def __lshift__(self, happening: Event | Sees | Outcome) -> WatchedPlay:
        super().__lshift__(happening)
        return self


def stages(came: Record) -> list[RequestStage]:
    """Return the stages in the order of their beginnings."""
    return [span.stage for span in sorted(came.spans, key=lambda span: (span.begin, span.end))]


def without_gaps(came: Record) -> bool:
    """Check that stages follow each other without gaps from the arrival on, except the time of a decision."""
    spans = sorted(
        (span for span in came.spans if span.stage not in BESIDE), key=lambda span: (span.begin, span.end)
    )
    assert all(0 <= span.begin <= span.end for span in spans)
    assert all(one.end <= other.begin + 1e-9 for one, other in pairwise(spans)), spans
    return all(other.begin - one.end < 0.02 for one, other in pairwise(spans))

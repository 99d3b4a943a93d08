"""A script of events and the effects they must have:

    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0, reason=Reason.COLD)

`<<` lets something happen, `>>` names the next effect; where the line ends, no effect may be left over.
Looks at GET /slots are not named: `play.looking` tells which engines were asked about. Time goes on by
itself, a hundredth of a second with every event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slotkeeper.core.effects import Effect, Forward, Observe, Plant, Purpose, Report
from slotkeeper.core.events import (
    Arrived,
    EngineLost,
    EngineUp,
    Event,
    Finished,
    Gone,
    Observed,
    ObserveFailed,
    Planted,
    Rendered,
    ReplyKnown,
    Started,
)
from slotkeeper.core.observed import SlotView
from slotkeeper.core.placement import Placement
from slotkeeper.core.table import EngineTable, SlotState
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.traits import EngineTraits, Memory
from slotkeeper.core.types import ClientId, EngineId, Reason, RequestId, SlotId

STEP = 0.01
ENGINE = "e0"


class Play:
    def __init__(self, *, engines: int = 1, up: bool = True, **traits: Any) -> None:
        self.names = [EngineId(f"e{n}") for n in range(engines)]
        memory = Memory(traits.pop("memory", "hybrid"))
        self.traits = EngineTraits(**{"n_slots": 2, "memory": memory, "ram_cache": False, **traits})
        self.placement = Placement(*self.names)
        self.clock = 1000.0
        self.effects: deque[Effect] = deque()
        self.looking: set[str] = set()
        self.delays: list[float] = []
        for name in self.names if up else ():
            assert self << engine_up(name) << sees(engine=name)

    def __lshift__(self, happening: Event | Sees) -> Play:
        asked = self.clock + STEP / 2
        self.clock += STEP
        if isinstance(happening, Sees):
            happening = happening.of(self, asked)
        if isinstance(happening, EngineUp):
            happening = replace(happening, traits=self.traits)
        if isinstance(happening, Observed | ObserveFailed):
            self.looking.discard(happening.engine)
        for effect in self.placement.on(replace(happening, at=self.clock)):
            if isinstance(effect, Observe):
                self.looking.add(effect.engine)
                self.delays.append(effect.delay)
            else:
                self.effects.append(effect)
        return self

    def __rshift__(self, expected: Expected) -> Play:
        assert self.effects, f"nothing happened, but {expected} was expected: {self.placement!r}"
        expected.check(self.effects.popleft())
        return self

    def __bool__(self) -> bool:
        assert not self.effects, f"nobody expected {list(self.effects)}"
        return True

    def later(self, seconds: float) -> Play:
        self.clock += seconds
        return self

    @property
    def table(self) -> EngineTable:
        return self.placement.tables[self.names[0]]

    @property
    def states(self) -> list[str]:
        return [state.value for state in self.table.states]

    def rests(self) -> bool:
        """Nothing is left over, and nobody will be asked anything any more."""
        state = self.placement._state
        left = [*state.requests, *state.queue, *state.bypassing, *state.steered]
        tables = state.tables.values()
        quiet = all(set(t.states) == {SlotState.IDLE} and not t.unsettled and not t.orphans for t in tables)
        return bool(self) and not left and quiet and not self.looking


# -- what happens ----------------------------------------------------------------------------------------


def arrives(request: str, client: str = "anna", **more: Any) -> Arrived:
    return Arrived(at=0.0, request=RequestId(request), client=ClientId(client), **more)


def knows(request: str, prompt: Tokens | None) -> Rendered:
    return Rendered(at=0.0, request=RequestId(request), prompt=prompt)


def starts(request: str) -> Started:
    return Started(at=0.0, request=RequestId(request))


def ends(request: str, tokens: int | None = 100, cached: int | None = 0, **more: Any) -> Finished:
    figures = {"generated": 1, **more}
    return Finished(at=0.0, request=RequestId(request), prompt_tokens=tokens, cached=cached, **figures)


def fails(request: str) -> Finished:
    """The engine answered with an error."""
    return ends(request, None, None, generated=None)


def leaves(request: str) -> Gone:
    return Gone(at=0.0, request=RequestId(request))


def replies(request: str, tokens: Tokens) -> ReplyKnown:
    return ReplyKnown(at=0.0, request=RequestId(request), tokens=tokens)


def planted(request: str, computed: int | None = 1) -> Planted:
    return Planted(at=0.0, request=RequestId(request), computed=computed)


def engine_up(engine: str = ENGINE, **more: Any) -> EngineUp:
    return EngineUp(at=0.0, engine=EngineId(engine), traits=EngineTraits(), **more)


def engine_lost(engine: str = ENGINE) -> EngineLost:
    return EngineLost(at=0.0, engine=EngineId(engine))


def look_failed(engine: str = ENGINE) -> ObserveFailed:
    return ObserveFailed(at=0.0, engine=EngineId(engine))


@dataclass(frozen=True)
class Sees:
    """GET /slots: these slots are busy; the others hold what we think, or what is said here."""

    busy: tuple[int, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    engine: str = ENGINE
    asked: float | None = None

    def of(self, play: Play, asked: float) -> Observed:
        table = play.placement.tables[EngineId(self.engine)]
        views = []
        for n, believed in enumerate(table.shadow.slots):
            held = self.held.get(n, believed.total if believed else 0)
            views.append(SlotView(slot=SlotId(n), busy=n in self.busy, task=n, held=held or None))
        when = asked if self.asked is None else self.asked
        return Observed(at=0.0, asked=when, engine=EngineId(self.engine), slots=tuple(views))


def sees(*busy: int, **more: Any) -> Sees:
    return Sees(busy=busy, **more)


# -- what must follow ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    kind: type
    wanted: Mapping[str, Any]

    def check(self, effect: Effect) -> None:
        assert isinstance(effect, self.kind), f"{effect} instead of {self}"
        found = {name: _get(effect, name) for name in self.wanted}
        assert found == self.wanted, f"{effect} instead of {self}"


def _get(effect: Effect, name: str) -> Any:
    value: Any = effect
    for part in name.split("__"):
        value = getattr(value, part)
    return value


def _expected(kind: type) -> Callable[..., Expected]:
    def expect(request: str, **wanted: Any) -> Expected:
        return Expected(kind, {"request": request, **wanted})

    return expect


goes = _expected(Forward)
reports = _expected(Report)


def plants(request: str, slot: int, purpose: Purpose, **wanted: Any) -> Expected:
    return Expected(Plant, {"request": request, "place__slot": slot, "purpose": purpose, **wanted})


def unpinned(request: str, reason: Reason, **wanted: Any) -> Expected:
    return Expected(Forward, {"request": request, "slot": None, "pin": False, "reason": reason, **wanted})

"""Random traffic with priorities: every request is served in time, and equal priorities change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from playbooks.playbook import Play, arrives, ends, knows
from properties.test_placement_machine import ARRIVALS, SETTINGS, PlacementMachine, seen_by_a
from slotkeeper.scheduler.effects import Effect, Forward, Ranked
from slotkeeper.scheduler.events import Arrived, Event
from slotkeeper.scheduler.policies.priority import AGES_AFTER
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Memory
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import NO_HINTS, Priority, PriorityAct, RequestHints, SaidBy

SAID: Sequence[RequestHints] = (
    NO_HINTS,
    RequestHints(priority=Priority.HIGH, said_by=SaidBy.HEADER),
    RequestHints(priority=Priority.LOW, said_by=SaidBy.HEADER),
    RequestHints(priority=Priority.LOW, said_by=SaidBy.SIDE_REQUEST),
)
EQUAL = (SAID[1], SAID[3], RequestHints(said_by=SaidBy.HEADER))
CYCLE = (2, 0, 2, 1, 2, 3, 1)  # many that can be divided
PATIENCES = (0.0, 0.3, 30.0)  # seconds, of some requests


class PriorityMachine(PlacementMachine):
    """As the machine above, but each request has a priority, and some have a deadline."""

    offered = (
        "chat",
        "messages",
        "own slot",
        "two copies",
        "embeddings",
        "resumable",
    )  # a bypass has no turn

    def more_traits(self) -> dict[str, Any]:
        return {"n_ubatch": 32}  # so that prompts are longer than a batch, and divided

    def post(self, event: Event) -> None:
        if isinstance(event, Arrived):
            event = replace(event, hints=self.hints(len(self.prompts)))
        super().post(event)

    def hints(self, number: int) -> RequestHints:
        said = SAID[CYCLE[number % len(CYCLE)]]
        patience = PATIENCES[number % len(PATIENCES)]
        return replace(said, start_by=self.clock + patience) if number % 5 == 0 else said

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Ranked) and effect.act is PriorityAct.EXPIRED:
            assert not self.forwards[effect.request], "refused, but it was sent"
            self.alive.remove(effect.request)
        super().perform(effect)


TestPriority = PriorityMachine.TestCase
TestPriority.settings = SETTINGS


class EqualPriorityMachine(PlacementMachine):
    """All requests have the same priority."""

    said = NO_HINTS

    def post(self, event: Event) -> None:
        if isinstance(event, Arrived):
            event = replace(event, hints=self.said)
        super().post(event)

    def perform(self, effect: Effect) -> None:
        by_cost = {PriorityAct.CHEAPER, PriorityAct.SLOT_KEPT}
        assert not isinstance(effect, Ranked) or effect.act in by_cost, "nothing was decided by priorities"
        super().perform(effect)

    def decided(self, build: dict[str, Any], arrivals: list[Any]) -> list[Any]:
        """Return the decisions and figures of all requests."""
        seen_by_a(self, build, arrivals)
        return [(request, self.reasons.get(request), self.told.get(request)) for request in self.kinds]


@given(
    arrivals=ARRIVALS,
    build=st.fixed_dictionaries(
        {
            "slots": st.lists(st.integers(1, 3), min_size=1, max_size=1),
            "ram": st.booleans(),
            "files": st.sampled_from([0, 2, 4]),
            "memory": st.sampled_from([Memory.DENSE, Memory.HYBRID]),
        }
    ),
    said=st.sampled_from(EQUAL),
)
@settings(max_examples=60)
def test_equal_priorities_give_the_same_decisions_as_no_priorities(arrivals, build, said):
    plain, alike = EqualPriorityMachine(), EqualPriorityMachine()
    alike.said = said
    assert plain.decided(build, arrivals) == alike.decided(build, arrivals)


# -- no request starves ----------------------------------------------------------------------------------

SERVICE = 3.0  # seconds that an answer takes, with all that happens meanwhile
MARGIN = 1.0


def begun(play: Play) -> str | None:
    """Return the request that was sent."""
    found = [effect.request for effect in play.effects if isinstance(effect, Forward)]
    play.effects.clear()
    return found[-1] if found else None


def asked(play: Play, request: str, hints: RequestHints) -> None:
    number = 1000 * (1 + int(request))
    (
        play
        << arrives(request, client=f"c{number % 3}", hints=hints)
        << knows(request, Tokens(range(number, number + 50)))
    )


@given(kinds=st.lists(st.sampled_from(SAID), min_size=2, max_size=12), flood=st.sampled_from(SAID[:2]))
@settings(max_examples=40)
def test_every_request_begins_in_bounded_time_under_urgent_load(
    kinds: list[RequestHints], flood: RequestHints
) -> None:
    """One slot, and as soon as it is free there is always another urgent request."""
    play = Play(limits=Limits(pause=1e6, idle_tokens=0), n_slots=1, memory="dense")
    came: dict[str, float] = {}
    for number, hints in enumerate(kinds):
        came[str(number)] = play.clock
        asked(play, str(number), hints)
    running, number = begun(play) or "0", len(kinds)
    waits: dict[str, float] = {}
    missing = set(came)
    while missing and number < 2000:
        waits.setdefault(running, play.clock - came[running])
        missing.discard(running)
        asked(play, str(number), flood)
        came[str(number)] = play.clock
        number += 1
        play.later(SERVICE)
        play << ends(running, 50)
        running = begun(play) or ""
        assert running, "the slot is free, and nothing begins"
    bound = len(kinds) * (AGES_AFTER + 4 * SERVICE)
    assert not missing
    assert max(waits[str(number)] for number in range(len(kinds))) <= bound


def test_at_most_one_aged_request_is_served_per_aging_period() -> None:
    """Of the requests that are served, at most one in so many seconds is one that has aged."""
    play: Any = Play(limits=Limits(pause=1e6, idle_tokens=0), n_slots=1, memory="dense")
    for number in range(20):
        asked(play, str(number), SAID[2])
    running, number, aged, since = "0", 20, 0, play.clock
    while number < 220:
        asked(play, str(number), SAID[1])
        number += 1
        play.later(SERVICE)
        play << ends(running, 50)
        aged += any(isinstance(e, Ranked) and e.act is PriorityAct.AGED for e in play.effects)
        running = begun(play) or ""
    assert 1 <= aged <= (play.clock - since) / AGES_AFTER + MARGIN

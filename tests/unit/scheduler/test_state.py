from random import Random
from typing import get_args, get_type_hints

import pytest

from slotkeeper.scheduler.events import Arrived, EngineUp, Event
from slotkeeper.scheduler.placement import TAKE_IN, Placement
from slotkeeper.scheduler.policies.adapters import Adapter
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Pending, Plan
from slotkeeper.scheduler.slots.engine_model import EngineTraits, user_starts
from slotkeeper.scheduler.slots.table import Maintenance, Orphan, SlotState
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import ClientId, EngineId, Place, Reason, RequestId, SlotId

E = EngineId("http://e0")
R = RequestId("r1")


def state_with_engine():
    placement = Placement(E)
    placement.on(EngineUp(at=1.0, engine=E, traits=EngineTraits(n_slots=2)))
    return placement._state, placement.tables[E]


def pending(table, slot):
    arrived = Arrived(at=1.0, request=R, client=ClientId("c"))
    plan = Plan(table=table, reason=Reason.COLD) if table else None
    return Pending(arrived=arrived, plan=plan, slot=slot)


@pytest.mark.parametrize("kind", get_args(Event))
def test_each_event_is_taken_in_by_a_function_for_it(kind):
    _, event, *_ = get_type_hints(TAKE_IN[kind]).values()
    assert kind in (get_args(event) or (event,))


def test_a_request_owns_its_slot_until_the_table_changes():
    _, table = state_with_engine()
    table.move(SlotId(1), SlotState.RUNNING, R, 2.0)
    assert pending(table, SlotId(1)).owned == (table, 1)
    assert pending(table, SlotId(0)).owned is None
    assert pending(table, None).owned is None
    assert pending(None, SlotId(1)).owned is None
    table.reset(EngineTraits(n_slots=1), 3.0)
    assert pending(table, SlotId(1)).owned is None


def test_an_engine_that_is_down_is_not_listed_as_up():
    state, table = state_with_engine()
    assert state.up == [table]
    table.up = False
    assert state.up == []


def test_a_request_may_wait_in_the_queue_or_outside_it():
    assert not State(engines=(E,)).waiting
    for line in ("bypassing", "steered"):
        state = State(engines=(E,))
        getattr(state, line).append(R)
        assert state.waiting
    state = State(engines=(E,))
    state.queue.add(R, ClientId("c"))
    assert state.waiting


def test_user_messages_begin_at_any_opener():
    traits = EngineTraits(user_start=((7, 8), (9,)))
    assert user_starts(Tokens([1, 7, 8, 2, 9, 7, 8]), traits) == [1, 4, 5]
    assert user_starts(None, traits) == ()
    assert user_starts(Tokens([1, 7]), traits) == []


def test_a_place_is_written_as_engine_and_slot():
    assert str(Place(E, SlotId(3))) == "http://e0#3"


@pytest.mark.parametrize("seed", range(300))
def test_a_scene_has_what_each_engine_is_open_for(seed):
    """It is found with fewer questions, because each answer follows from the one before it."""
    chance, now = Random(seed), 100.0
    adapters = (Adapter("a", 1.0),) if chance.random() < 0.2 else ()
    placement = Placement()
    placement.on(EngineUp(at=90.0, engine=EngineId("e0"), traits=EngineTraits(n_slots=3, adapters=adapters)))
    table = placement.tables[EngineId("e0")]
    table.unseen, table.adapters_at = chance.random() < 0.1, now - chance.choice([0.5, 5.0])
    table.shared_until, table.observed_at = now + chance.choice([-1, -1, 1]), now - chance.choice([0.01, 1])
    table.awaited, table.leaving = chance.random() < 0.1, chance.random() < 0.1
    for slot in table.idle:
        state = chance.choice([SlotState.IDLE, SlotState.IDLE, *SlotState])
        table.move(slot, state, None, now + chance.choice([-1, -1, -1, 0.1]))
        if state is SlotState.MAINTENANCE:
            table.maintenance[slot] = Maintenance(now - chance.choice([0.1, 2]), 0.5, None, stalls=True)
    if chance.random() < 0.2:
        table.send(RequestId("r1"), chance.randint(1, 3), now, alone=chance.random() < 0.2)
    if chance.random() < 0.2:
        table.orphans.append(Orphan(RequestId("r2"), chance.choice([None, 5]), now))
    assert placement._state.scene(now) == (
        (
            table.moves,
            table.open_for_pins(now),
            table.open_for_unpinned(now),
            table.open_for_anything(now),
            table.overdue(now),
        ),
    )

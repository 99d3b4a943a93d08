from random import Random
from typing import get_args, get_type_hints

import pytest

from slotkeeper.scheduler.events import EngineUp, Event
from slotkeeper.scheduler.placement import TAKE_IN, Placement
from slotkeeper.scheduler.policies.adapters import Adapter
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, user_starts
from slotkeeper.scheduler.slots.table import EngineTable, Maintenance, Orphan, SlotState
from slotkeeper.scheduler.types import EngineId, Place, RequestId, SlotId

E = EngineId("http://e0")


@pytest.mark.parametrize("kind", get_args(Event))
def test_each_event_is_taken_in_by_a_function_for_it(kind):
    _, event, *_ = get_type_hints(TAKE_IN[kind]).values()
    assert kind in (get_args(event) or (event,))


def test_user_messages_begin_at_any_opener():
    traits = EngineTraits(user_start=((7, 8), (9,)))
    assert user_starts(Tokens([1, 7, 8, 2, 9, 7, 8]), traits) == [1, 4, 5]
    assert user_starts(None, traits) == ()
    assert user_starts(Tokens([1, 7]), traits) == []


def test_a_place_is_written_as_engine_and_slot():
    assert str(Place(E, SlotId(3))) == "http://e0#3"


def some_engine(chance: Random, now: float) -> tuple[Placement, EngineTable]:
    """Return a scheduler with one engine, whose slots may be in any state."""
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
    return placement, table


def test_a_scene_has_what_each_engine_is_open_for():
    """It is found with fewer questions, because each answer follows from the one before it."""
    for seed in range(300):
        now = 100.0
        placement, table = some_engine(Random(seed), now)
        is_open = (table.open_for_pins(now), table.open_for_unpinned(now), table.open_for_anything(now))
        assert placement._state.scene(now) == ((table.moves, *is_open, table.overdue(now)),), seed

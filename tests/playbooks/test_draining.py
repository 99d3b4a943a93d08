"""Engines that a user drains, undrains, adds and removes while the others run."""

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    drain,
    drained,
    ends,
    engine_lost,
    engine_up,
    erased,
    erases,
    goes,
    knows,
    lists,
    named,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    snapshots_changed,
    starts,
    unpinned,
)
from slotkeeper.scheduler.costs import Limits
from slotkeeper.scheduler.effects import SaveMoment
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import EngineId, Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
PATIENT = Limits(pause=1000.0, idle_tokens=0)


def two(**more):
    return Play(**{"engines": 2, "memory": "dense", "limits": PATIENT, **NEW_FILES, **more})


def test_an_engine_without_work_is_drained_at_once():
    assert two() << drain("e0") >> drained("e0")


def test_a_second_drain_request_is_answered_too():
    play = two()
    assert play << drain("e0") >> drained("e0")
    assert play << drain("e0") >> drained("e0")


def test_no_new_request_begins_on_a_drained_engine():
    play = two()
    assert play << drain("e0") >> drained("e0")
    for name, prompt in (("r1", A), ("r2", B)):
        assert play << arrives(name) << knows(name, prompt) >> goes(name, engine="e1")
        assert play << starts(name)
    assert play << arrives("r3") << knows("r3", C)  # waits, though e0 has free slots
    assert play.placement.queued == 1
    assert play << ends("r1", 1000) >> reports("r1") >> saves(0, SaveMoment.PARK)
    assert play << saved("a") >> goes("r3", engine="e1")


def test_a_request_whose_slot_is_being_prepared_moves_if_the_engine_is_drained():
    play = two()
    assert play << arrives("r1", namespace="anna") << knows("r1", A) >> erases(0)
    assert play << drain("e0")
    assert play << erased() >> erases(0) >> drained("e0")
    assert play << erased() >> goes("r1", engine="e1")


def test_unpinned_requests_avoid_a_drained_engine():
    play = two()
    assert play << drain("e0") >> drained("e0")
    assert play << arrives("r1", bypass=True) >> unpinned("r1", Reason.BYPASS, engine="e1")
    play << arrives("r2", copies=2, rendered=False)
    assert play >> unpinned("r2", Reason.UNPINNABLE, engine="e1")


def test_a_running_answer_ends_and_its_state_is_saved_before_the_engine_is_drained():
    play = two()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e0", slot=0)
    assert play << starts("r1")
    assert play << drain("e0")
    assert play << ends("r1", 1000) >> reports("r1") >> saves(0)
    assert play << saved("a") >> drained("e0")
    play << arrives("r2") << knows("r2", A + Tokens(range(50)))
    assert play >> restores(0, "a", place__engine="e1")
    assert play << restored() >> goes("r2", engine="e1", reason=Reason.SNAPSHOT)


def test_idle_slots_are_saved_at_once_when_their_engine_is_drained():
    play = two()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e0")
    assert play << starts("r1")
    assert play << ends("r1", 1000) >> reports("r1")
    assert play << drain("e0") >> saves(0, place__engine="e0")
    assert play << saved("a") >> drained("e0")


def test_an_engine_whose_drain_ends_gets_requests_again():
    play = two()
    assert play << drain("e0") >> drained("e0")
    assert play << drain("e1") >> drained("e1")
    assert play << arrives("r1") << knows("r1", A)
    assert play.placement.queued == 1
    assert play << drain("e0", on=False) >> goes("r1", engine="e0")
    assert not play.placement.drained(EngineId("e0"))
    assert play.placement.drained(EngineId("e1"))


def test_a_drained_engine_stays_drained_after_a_restart():
    play = two()
    assert play << drain("e0") >> drained("e0")
    assert play << engine_lost("e0")
    assert play << engine_up("e0") << sees(engine="e0")
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e1")


def test_an_engine_that_is_down_counts_as_drained():
    play = two()
    assert play << engine_lost("e0")
    assert play << drain("e0") >> drained("e0")


def test_a_new_engine_gets_requests_and_a_removed_engine_is_forgotten():
    play = two()
    assert play << named("e0", "e1", "e2")
    assert play << engine_up("e2") << sees(engine="e2")
    assert play << drain("e0") >> drained("e0")
    assert play << drain("e1") >> drained("e1")
    assert play << named("e2")
    assert list(play.placement.tables) == ["e2"]
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", engine="e2")
    assert play << ends("r1", 1000) >> reports("r1")
    assert play << engine_lost("e2")
    assert play << arrives("r2") >> unpinned("r2", Reason.FAIL_OPEN, engine="e2")


def test_no_engine_is_reported_as_drained_without_a_drain_request():
    play = two()
    assert play << snapshots_changed()
    assert play.rests()


def test_a_router_is_drained_with_all_of_its_models():
    play = Play(memory="dense", up=False, limits=PATIENT, **NEW_FILES)
    assert play << lists("a")
    assert play << engine_up("a", model="a") << sees(engine="a")
    assert play << arrives("r1", model="a") << knows("r1", A) >> goes("r1", engine="a")
    assert play << starts("r1")
    assert play << drain("e0")
    assert play << arrives("r2", model="b") << knows("r2", B)  # no model is loaded for it
    assert play << ends("r1", 1000) >> reports("r1") >> saves(0)
    assert play << saved("a") >> drained("e0")

"""Engines that a user drains, undrains, adds and removes while the others run."""

import pytest

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
    loads,
    named,
    planted,
    plants,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    starts,
    unpinned,
)
from slotkeeper.scheduler.effects import Purpose, SaveMoment
from slotkeeper.scheduler.events import ModelsListed
from slotkeeper.scheduler.policies.router import ModelStatus, ModelView
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import EngineId, ModelName, Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
PATIENT = Limits(pause=1000.0, idle_tokens=0)


def two(**more):
    return Play(**{"engines": 2, "memory": "dense", "limits": PATIENT, **NEW_FILES, **more})


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


def test_an_engine_whose_drain_ends_gets_requests_again():
    play = two()
    assert play << drain("e0") >> drained("e0")
    assert play << drain("e1") >> drained("e1")
    assert play << arrives("r1") << knows("r1", A)
    assert play.placement.queued == 1
    assert play << drain("e0", on=False) >> goes("r1", engine="e0")
    assert not play.placement.drained(EngineId("e0"))
    assert play.placement.drained(EngineId("e1"))


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
    assert play << arrives("r2") >> unpinned("r2", Reason.NO_ENGINE, engine="e2")


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


def test_a_steered_request_whose_engine_is_drained_goes_elsewhere():
    """Its prompt was in place, and it waited for another request to begin."""
    play = two()
    system, beside = Tokens(range(50_000, 50_400)), Tokens(range(60_000, 60_500))
    assert play << drain("e1") >> drained("e1")
    assert play << arrives("r1") << knows("r1", system + A) >> goes("r1", slot=0)
    assert play << ends("r1", 1400) >> reports("r1")
    play << arrives("r2", pinnable=False) << knows("r2", system + B.cut(0, 600))
    assert play >> saves(0, SaveMoment.PARK) << saved("a") >> plants("r2", 0, Purpose.STEER)
    assert play << sees(0) << arrives("r3") << knows("r3", beside) >> goes("r3", slot=1)
    assert play << planted("r2", 996)
    assert play << drain("e1", on=False)
    assert play << drain("e0") >> restores(0, "a", place__engine="e1")
    play << sees(1) << restored()
    assert play >> plants("r2", 0, Purpose.STEER, place__engine="e1")
    assert play << planted("r2", 596) >> unpinned("r2", Reason.STEERED, engine="e1")
    assert play << ends("r3", 500) >> reports("r3") >> saves(0, place__engine="e0")
    assert play << saved("b") >> saves(1, place__engine="e0") << saved("c") >> drained("e0")


def test_a_bypassing_request_for_a_drained_router_keeps_no_other_request_waiting():
    play = Play(engines=2, memory="dense", up=False, limits=PATIENT, **NEW_FILES)
    assert play << lists("a")
    for engine, model in (("a", "a"), ("e1", "")):
        assert play << engine_up(engine, model=model) << sees(engine=engine)
    assert play << drain("e0") >> drained("e0")
    assert play << arrives("r1", model="a", bypass=True)  # waits until its router is put back
    assert play << arrives("r2") << knows("r2", A) >> goes("r2", engine="e1")
    assert play << drain("e0", on=False) >> unpinned("r1", Reason.BYPASS, engine="a")


@pytest.mark.parametrize("bypass", [False, True])
def test_of_two_routers_with_one_model_the_drained_one_that_is_lost_is_not_asked(bypass):
    play = Play(engines=2, up=False, limits=PATIENT)
    other = ModelView(engine=EngineId("a of e1"), name=ModelName("a"), status=ModelStatus.UNLOADED)
    assert play << lists() << ModelsListed(at=0.0, router=EngineId("e1"), models=(other,), most=1)
    assert play << drain("e0") >> drained("e0")
    assert play << ModelsListed(at=0.0, router=EngineId("e0"), models=(), most=1)  # it does not answer
    assert play.later(1000.0) << arrives("r1", model="a", bypass=bypass) >> loads("a of e1")


def test_where_all_routers_of_a_model_are_lost_the_drained_one_is_asked_last():
    play = Play(engines=2, up=False, limits=PATIENT)
    other = ModelView(engine=EngineId("a of e1"), name=ModelName("a"), status=ModelStatus.UNLOADED)
    assert play << lists() << ModelsListed(at=0.0, router=EngineId("e1"), models=(other,), most=1)
    assert play << drain("e0") >> drained("e0")
    for router in ("e0", "e1"):
        assert play << ModelsListed(at=0.0, router=EngineId(router), models=(), most=1)
    play.later(1000.0) << arrives("r1", model="a", bypass=True)
    assert play >> unpinned("r1", Reason.BYPASS, engine="a of e1")

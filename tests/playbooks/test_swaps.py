"""Which model a router loads, which one is unloaded for it, and what is saved before."""

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    arrives,
    ends,
    engine_lost,
    engine_up,
    goes,
    knows,
    leaves,
    lists,
    loads,
    named,
    refuses,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    starts,
    swap_fails,
    unloads,
    unpinned,
)
from slotkeeper.scheduler.effects import Purpose
from slotkeeper.scheduler.events import ModelsListed
from slotkeeper.scheduler.policies.router import RETRY_SECONDS
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import EngineId, Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
SHORT = Tokens(range(10))


def routed(*loaded, most=1, **more):
    """In front of a router with the models a and b, of which some are loaded."""
    play = Play(**{"memory": "dense", "up": False, **NEW_FILES, **more})
    assert play << lists(*loaded, most=most)
    for name in loaded:
        assert play << engine_up(name, model=name) << sees(engine=name)
    return play


def up(play, name):
    """A model was loaded."""
    assert play << lists(name)
    return bool(play << engine_up(name, model=name) << sees(engine=name))


def down(play, name):
    """A model was unloaded; the expected effects are left to the caller."""
    assert play << engine_lost(name)
    return play << lists()


def turn(play, request, prompt, *, model, **how):
    play << arrives(request, model=model) << knows(request, prompt)
    assert play >> goes(request, engine=model, **how)
    assert play << starts(request)
    return bool(play << ends(request, len(prompt), 0) >> reports(request))


def next_decision(play):
    """Let time pass until an effect follows."""
    while not play.effects:
        play.wakes()
    return play


def test_the_same_messages_for_another_model_are_not_a_continuation():
    play = routed("a", "b", most=2)
    chain = (b"tools", b"one")
    assert play << arrives("r1", model="a", hash_chain=chain) << knows("r1", A) >> goes("r1", engine="a")
    assert play << ends("r1", 1000) >> reports("r1")
    assert play << arrives("r2", model="b", hash_chain=(*chain, b"two"))
    assert play << knows("r2", A + B) >> goes("r2", engine="b", reason=Reason.COLD)


def test_a_swap_saves_the_slots_of_the_victim_and_its_next_turn_restores_them():
    play = routed("a")
    assert turn(play, "r1", A, model="a")
    assert play << arrives("r2", model="b") >> saves(0, place__engine="a")
    assert play << saved("s1") >> unloads("a")
    assert down(play, "a") >> loads("b")
    assert up(play, "b")
    assert play << knows("r2", B) >> goes("r2", engine="b", reason=Reason.COLD)
    assert play << ends("r2", 1000) >> reports("r2")
    assert play << arrives("r3", model="a")
    assert next_decision(play) >> saves(0, place__engine="b")
    assert play << saved("s2") >> unloads("b")
    assert down(play, "b") >> loads("a")
    assert up(play, "a")
    assert play << knows("r3", A + C) >> restores(0, "s1", place__engine="a")
    assert play << restored() >> goes("r3", engine="a", reason=Reason.SNAPSHOT)


def test_a_model_is_not_unloaded_during_an_answer():
    play = routed("a")
    assert play << arrives("r1", model="a") << knows("r1", A) >> goes("r1", engine="a")
    assert play << starts("r1")
    assert play << arrives("r2", model="b")
    assert play << ends("r1", 1000) >> reports("r1") >> saves(0, place__engine="a")
    assert play << saved("s1") >> unloads("a")


def test_a_swap_waits_until_the_tokens_of_a_slot_are_known_before_saving_it():
    """The tokens of a brief request are found after its answer."""
    play = routed("a")
    assert play << arrives("r1", model="a", brief=True) >> goes("r1", engine="a", reason=Reason.BRIEF)
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << ends("r1", 1000)
    assert play << knows("r1", A) >> reports("r1") >> saves(0, tokens=A)
    assert play << saved("s1") >> unloads("a")


def test_a_swap_waits_until_the_engine_has_ended_a_cancelled_request():
    play = routed("a")
    assert play << arrives("r1", model="a") << knows("r1", A) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << leaves("r1")
    assert play.later(1) << sees(0, engine="a")
    assert play.later(1) << sees(engine="a", contents={0: 300}) >> saves(0, place__engine="a")
    assert play << saved("s1") >> unloads("a")


def test_requests_for_the_loaded_model_are_served_first_until_the_swap_wait_ends():
    play = routed("a", limits=Limits(swap_wait=10.0))
    assert play << arrives("r1", model="a") << knows("r1", A) >> goes("r1", engine="a", slot=0)
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << arrives("r3", model="a") << knows("r3", B) >> goes("r3", engine="a", slot=1)
    assert play << starts("r3")
    assert play.later(10) << arrives("r4", model="a") << knows("r4", C)
    assert play << ends("r1", 1000) >> reports("r1")
    assert play << ends("r3", 1000) >> reports("r3") >> saves(0)
    assert play << saved("s1") >> saves(1)
    assert play << saved("s2") >> unloads("a")
    assert down(play, "a") >> loads("b")
    assert up(play, "b")
    assert play << knows("r2", SHORT) >> goes("r2", engine="b")


def test_a_model_that_was_just_loaded_stays_for_the_swap_wait():
    """Otherwise the requests that came meanwhile for the other model would load that again at once."""
    play = routed("a", limits=Limits(swap_wait=10.0))
    assert play << arrives("r1", model="a") << knows("r1", SHORT) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b") << arrives("r3", model="b", client="ben")
    assert play.later(11) << arrives("r4", model="a")
    assert play << ends("r1", 10) >> reports("r1") >> unloads("a")
    assert down(play.later(30), "a") >> loads("b")
    assert up(play, "b")
    assert play << knows("r2", SHORT) >> goes("r2", engine="b") << starts("r2")
    assert play << knows("r3", SHORT + SHORT) >> goes("r3", engine="b") << starts("r3")
    assert play << ends("r2", 10) >> reports("r2")
    assert play.later(5) << arrives("r5", model="b") << knows("r5", SHORT) >> goes("r5", engine="b")


def test_a_model_is_kept_for_its_next_turn_as_long_as_a_swap_takes():
    play = routed()
    assert play << arrives("r1", model="a") >> loads("a")
    assert up(play.later(3), "a")
    assert play << knows("r1", SHORT) >> goes("r1", engine="a")
    assert play << ends("r1", 10) >> reports("r1")
    assert play << arrives("r2", model="b")
    assert play << arrives("r3", model="a") << knows("r3", SHORT) >> goes("r3", engine="a")
    assert play << ends("r3", 10) >> reports("r3")
    ended = play.clock
    assert next_decision(play) >> unloads("a")
    assert play.clock == pytest.approx(ended + 3, abs=0.2)


def test_the_least_recently_used_model_is_unloaded():
    play = routed("a", "b", most=2)
    assert turn(play, "r1", SHORT, model="b")
    assert turn(play, "r2", SHORT, model="a")
    assert play << lists("a", "b", c="unloaded", most=2)
    assert play << arrives("r3", model="c") >> unloads("b")


def test_a_sleeping_model_is_unloaded_before_one_that_holds_a_state():
    play = routed("a", "b", most=2)
    assert turn(play, "r1", SHORT, model="a")
    assert turn(play, "r2", SHORT, model="b")
    assert play << engine_lost("b")
    assert play << lists("a", b="sleeping", c="unloaded", most=2)
    assert play << arrives("r3", model="c") >> unloads("b")


def test_no_model_is_unloaded_if_there_is_room():
    play = routed("a", most=0)
    assert turn(play, "r1", SHORT, model="a")
    assert play << arrives("r2", model="b") >> loads("b")


def test_requests_for_a_model_that_cannot_be_loaded_are_refused_without_a_retry_at_once():
    play = routed("a")
    assert play << arrives("r1", model="b") >> unloads("a")
    assert down(play, "a") >> loads("b")
    assert play << swap_fails("b", broken=True) >> refuses("r1", engine="b")
    assert play << arrives("r2", model="b") >> refuses("r2", engine="b")
    assert play << arrives("r3", model="a") >> loads("a")
    assert up(play, "a")
    assert play << knows("r3", SHORT) >> goes("r3", engine="a")
    assert play << ends("r3", 10) >> reports("r3")
    assert play.later(RETRY_SECONDS) << arrives("r4", model="b") >> unloads("a")


def test_a_load_that_was_only_too_early_is_retried():
    play = routed()
    assert play << arrives("r1", model="a") >> loads("a")
    assert play << swap_fails("a", broken=False) >> loads("a")


def test_a_model_that_is_already_loading_is_not_loaded_again():
    play = routed()
    assert play << lists(a="loading")
    assert play << arrives("r1", model="a")
    assert up(play, "a")
    assert play << knows("r1", SHORT) >> goes("r1", engine="a")


def test_a_client_that_leaves_stops_a_swap_that_has_not_begun():
    play = routed("a")
    assert play << arrives("r1", model="a") << knows("r1", A) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b") << leaves("r2")
    assert play << ends("r1", 1000) >> reports("r1")


def test_a_client_that_leaves_while_the_victim_drains_stops_the_swap():
    play = routed("a", limits=Limits(swap_wait=0))
    assert play << arrives("r1", model="a") << knows("r1", SHORT) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << arrives("r3", model="a") << knows("r3", SHORT + SHORT)
    assert play << leaves("r2") >> goes("r3", engine="a")


def test_a_loaded_model_that_cannot_be_probed_is_used_without_pinning():
    play = routed()
    assert play << lists("a")
    assert play << arrives("r1", model="a")
    assert play << swap_fails("a", broken=True) >> unpinned("r1", Reason.NOT_PROBED, engine="a")


def test_a_request_that_uses_no_slot_waits_for_its_model_as_well():
    play = routed("a")
    assert play << arrives("r1", model="a", slotless=True) >> unpinned("r1", Reason.SLOTLESS, engine="a")
    assert play << arrives("r2", model="b", slotless=True) >> unloads("a")
    assert down(play, "a") >> loads("b")
    assert play << lists("b")
    assert play << engine_up("b", model="b") >> unpinned("r2", Reason.SLOTLESS, engine="b")
    assert play << sees(engine="b")
    assert play.rests()


def test_a_bypass_waits_for_its_model_too():
    play = routed("a")
    assert play << arrives("r1", model="b", bypass=True) >> unloads("a")
    assert down(play, "a") >> loads("b")
    assert play << lists("b")
    assert play << engine_up("b", model="b") >> unpinned("r1", Reason.BYPASS, engine="b")


def test_idle_work_ends_for_a_swap():
    """A prefill for the next turn is stopped, and no other one begins."""
    play = routed("a", limits=Limits(pause=0.25))
    assert turn(play, "r1", A, model="a")
    assert play << arrives("r2", model="b") >> saves(0)
    assert not any(effect for effect in play.effects if getattr(effect, "purpose", None) is Purpose.NEXT)
    assert play << saved("s1") >> unloads("a")


def test_a_request_for_a_model_of_no_router_goes_to_the_first_engine():
    play = routed("a")
    assert play << arrives("r1", model="zzz") >> unpinned("r1", Reason.NO_ENGINE, engine="e0")


def test_a_request_waits_for_a_lost_router_as_for_any_engine():
    play = routed("a", limits=Limits(engine_wait=60))
    assert play << engine_lost("a")
    assert play << ModelsListed(at=0.0, router=EngineId("e0"), models=())
    assert play << arrives("r1", model="a") << arrives("r2", model="b")
    assert play << lists() >> loads("a")
    assert up(play, "a")
    assert play << knows("r1", SHORT) >> goes("r1", engine="a")


def test_a_model_that_was_given_up_is_tried_again_once_its_router_was_lost():
    """It was loaded, but not probed in time; that must not refuse requests that wait for the router."""
    play = routed(limits=Limits(engine_wait=60))
    assert play << lists("a")
    assert play << arrives("r1", model="a")
    assert play << swap_fails("a", broken=True) >> unpinned("r1", Reason.NOT_PROBED, engine="a")
    assert play << ModelsListed(at=0.0, router=EngineId("e0"), models=())
    assert play << arrives("r2", model="a")
    assert play << lists() >> loads("a")


@pytest.mark.parametrize("slotless", [False, True])
def test_a_request_for_an_engine_that_does_not_return_fails_open(slotless):
    play = routed("a", limits=Limits(engine_wait=60))
    assert play << engine_lost("a")
    assert play << ModelsListed(at=0.0, router=EngineId("e0"), models=())
    assert play << arrives("r1", model="a", slotless=slotless)
    assert next_decision(play) >> unpinned("r1", Reason.NO_ENGINE, engine="a")


def test_a_model_that_the_router_no_longer_lists_is_forgotten():
    play = routed("a", "b", most=2)
    assert turn(play, "r1", SHORT, model="b")
    assert play << engine_lost("b")
    only = lists("a", most=2).models[:1]
    assert play << ModelsListed(at=0.0, router=EngineId("e0"), models=only, most=2)
    assert list(play.placement.tables) == ["a"]
    assert "b" not in play.placement._state.trees


def test_the_models_of_a_router_that_is_removed_are_forgotten():
    play = routed("a", "b", most=2)
    assert turn(play, "r1", SHORT, model="b")
    assert play << engine_lost("a") << engine_lost("b") << named("e1")
    assert not play.placement.tables
    assert "b" not in play.placement._state.trees


def test_a_swap_counts_from_its_unload():
    """A model is kept for its next turn for as long."""
    play = routed("a")
    assert play << arrives("r1", model="b") >> unloads("a")
    assert down(play.later(5), "a") >> loads("b")
    assert up(play.later(2), "b")
    (router,) = play.placement._state.routers.values()
    assert router.swap_seconds == pytest.approx(7, abs=0.5)

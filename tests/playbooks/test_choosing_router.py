"""A router that itself chooses which models a load unloads, and does not say which (llama-swap)."""

from dataclasses import replace
from functools import partial

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
    loads,
    reports,
    restored,
    restores,
    saved,
    saves,
    sees,
    starts,
    swap_fails,
    unpinned,
)
from playbooks.playbook import lists as listed
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
SHORT = Tokens(range(10))
NOW = Limits(swap_wait=0)

lists = partial(listed, most=0, chooses=True)


def swapped(*loaded, **more):
    """In front of such a router with the models a and b, of which some are loaded."""
    play = Play(**{"memory": "dense", "up": False, **NEW_FILES, **more})
    assert play << lists(*loaded)
    for name in loaded:
        assert play << engine_up(name, model=name) << sees(engine=name)
    return play


def up(play, name, *others):
    """A model was loaded, and these others are still loaded."""
    assert play << lists(name, *others)
    return bool(play << engine_up(name, model=name) << sees(engine=name))


def turn(play, request, prompt, *, model, **how):
    play << arrives(request, model=model) << knows(request, prompt)
    assert play >> goes(request, engine=model, **how)
    assert play << starts(request)
    return bool(play << ends(request, len(prompt), 0) >> reports(request))


def learned(*, stays):
    """In a play that has seen b loaded beside a, which stayed or left."""
    play = swapped("a", limits=NOW)
    assert play << arrives("r0", model="b") >> loads("b", aside=("a",))
    assert play << engine_lost("a")
    assert up(play, "b", *(("a",) if stays else ()))
    if stays:
        assert play << engine_up("a", model="a") << sees(engine="a")
    assert play << knows("r0", SHORT) >> goes("r0", engine="b")
    assert play << ends("r0", 10) >> reports("r0")
    return play


def test_a_load_waits_until_the_slots_of_all_models_that_may_leave_are_saved():
    play = swapped("a")
    assert turn(play, "r1", A, model="a")
    assert play << arrives("r2", model="b") >> saves(0, place__engine="a")
    assert play << saved("s1") >> loads("b", aside=("a",))
    assert play << engine_lost("a")
    assert up(play, "b")
    assert play << knows("r2", B) >> goes("r2", engine="b")
    assert play << ends("r2", 1000) >> reports("r2")
    assert play << arrives("r3", model="a")
    while not play.effects:
        play.wakes()
    assert play >> saves(0, place__engine="b")
    assert play << saved("s2") >> loads("a", aside=("b",))
    assert play << engine_lost("b")
    assert up(play, "a")
    assert play << knows("r3", A + C) >> restores(0, "s1", place__engine="a")
    assert play << restored() >> goes("r3", engine="a", reason=Reason.SNAPSHOT)


def test_nothing_begins_on_a_model_that_may_leave():
    play = swapped("a", limits=NOW)
    assert play << arrives("r1", model="a") << knows("r1", SHORT) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << arrives("r3", model="a") << knows("r3", SHORT + SHORT)
    assert play << ends("r1", 10) >> reports("r1") >> loads("b", aside=("a",))


def test_a_model_that_has_stayed_is_used_again_and_not_prepared_another_time():
    play = learned(stays=True)
    assert play << arrives("r1", model="a") << knows("r1", A) >> goes("r1", engine="a")
    assert play << starts("r1")
    assert play << engine_lost("b") << lists("a")  # by its ttl
    assert play << arrives("r2", model="b") >> loads("b", aside=())


def test_a_model_that_left_is_prepared_each_time():
    play = learned(stays=False)
    assert play << arrives("r1", model="a") >> loads("a", aside=("b",))
    assert play << engine_lost("b")
    assert up(play, "a")
    assert play << knows("r1", A) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << ends("r1", 1000) >> reports("r1") >> saves(0)
    assert play << saved("s1") >> loads("b", aside=("a",))


def test_a_model_that_stayed_and_then_left_is_prepared_from_then_on():
    play = learned(stays=True)
    assert play << engine_lost("b") << lists("a")
    assert play << arrives("r1", model="b") >> loads("b", aside=())
    assert play << engine_lost("a")
    assert up(play, "b")
    assert play << knows("r1", SHORT) >> goes("r1", engine="b")
    assert play << ends("r1", 10) >> reports("r1")
    assert play << engine_lost("b") << lists("a")
    assert play << engine_up("a", model="a") << sees(engine="a")
    assert play << arrives("r2", model="b") >> loads("b", aside=("a",))


def test_a_client_that_leaves_stops_a_load_that_has_not_begun():
    play = swapped("a", limits=NOW)
    assert play << arrives("r1", model="a") << knows("r1", SHORT) >> goes("r1", engine="a")
    assert play << starts("r1") << arrives("r2", model="b")
    assert play << arrives("r3", model="a") << knows("r3", SHORT + SHORT)
    assert play << leaves("r2") >> goes("r3", engine="a")


def test_a_failed_load_gives_back_the_models_that_were_put_aside():
    play = swapped("a", limits=NOW)
    assert play << arrives("r1", model="b") >> loads("b", aside=("a",))
    assert play << engine_lost("a")
    assert play << swap_fails("b", broken=False) >> loads("b", aside=("a",))
    assert play << leaves("r1")
    assert play << swap_fails("b", broken=False)
    assert play << engine_up("a", model="a") << sees(engine="a")
    assert play << arrives("r2", model="a") << knows("r2", A) >> goes("r2", engine="a")


def test_requests_for_a_model_of_another_server_wait_for_it_and_pass_unpinned():
    play = swapped("a", limits=NOW)
    assert play << arrives("r1", model="b") >> loads("b", aside=("a",))
    assert play << engine_lost("a")
    assert play << lists("b")
    assert play << lists("b", foreign=["b"]) >> unpinned("r1", Reason.SLOTLESS, engine="b")
    assert play << arrives("r2", model="b") >> unpinned("r2", Reason.SLOTLESS, engine="b")
    assert play << arrives("r3", model="a") >> loads("a", aside=("b",))
    assert play << arrives("r4", model="b")  # b may be about to leave
    assert play << leaves("r4")
    assert up(play, "a")
    assert play << knows("r3", A) >> goes("r3", engine="a")


def test_what_is_known_of_a_model_is_forgotten_with_it():
    play = learned(stays=True)
    (router,) = play.placement._state.routers.values()
    assert router.stays
    play << engine_lost("b")
    play << replace(lists("a"), models=lists("a").models[:1])
    assert not router.stays

"""One task per slot, until the engine has really released it."""

import pytest

from playbooks.playbook import (
    NEW_FILES,
    Play,
    acts,
    arrives,
    ends,
    engine_lost,
    engine_up,
    fails,
    goes,
    knows,
    leaves,
    look_failed,
    one_turn,
    reports,
    restores,
    sees,
    snapshot,
    snapshots_changed,
    starts,
    unpinned,
)
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Arrived
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Wait, Waiting
from slotkeeper.scheduler.slots.table import LINGER
from slotkeeper.scheduler.state import PASSES
from slotkeeper.scheduler.types import Reason, RequestId, SlotId

A, B, C = (Tokens(range(n, n + 100)) for n in (1000, 2000, 3000))
MORE = Tokens(range(50))


# -- one prompt to a batch -------------------------------------------------------------------------------


def two_at_once(prompt=B, **more):
    """A request is on its way to an engine of 1,000 tokens/s and 50 ms a pass when the next one comes."""
    play = Play(**more)
    for tokens in (100, 300, 500, 900):
        play.table.rates.prefilled(tokens, 0.05 + tokens / 1000)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    play << arrives("r2") << knows("r2", prompt)
    return play


def test_a_second_prompt_is_sent_when_the_engine_has_begun_the_first_one():
    """Otherwise the engine would compute both in one batch, and both clients would wait for both."""
    play = two_at_once()
    assert play
    assert play.placement.waiting("r2") == Waiting(Wait.TURN)
    assert play << starts("r1") >> goes("r2", slot=1)


@pytest.mark.parametrize(("tokens", "waits"), [(55, False), (70, True)])
def test_a_prompt_that_takes_hardly_longer_than_a_pass_is_sent_at_once(tokens, waits):
    play = two_at_once(B.cut(0, tokens))
    assert play if waits else play >> goes("r2", slot=1)


def test_a_stream_of_short_prompts_does_not_keep_back_one_that_waits_for_a_batch_of_its_own():
    """Each of them waits for no other, so that one is always about to begin."""
    play = two_at_once(n_slots=PASSES + 3)
    for number in range(PASSES):
        request, prompt = f"s{number}", Tokens(range(10_000 + 1000 * number, 10_055 + 1000 * number))
        assert play << arrives(request) << knows(request, prompt) >> goes(request, slot=1 + number)
    assert play << arrives("last") << knows("last", C.cut(0, 55))
    assert play << starts("r1")  # there are short ones that may be in the next batch
    for number in range(PASSES):
        play << starts(f"s{number}")
    assert play >> goes("r2", slot=PASSES + 1) >> goes("last", slot=PASSES + 2)


def test_a_prompt_is_sent_at_once_beside_a_long_one_that_fills_each_batch():
    play = Play(n_slots=3)
    assert play << arrives("r0") << knows("r0", Tokens(range(50_000))) >> goes("r0", slot=0) << starts("r0")
    assert play << arrives("r1") << knows("r1", B) >> goes("r1", slot=1)
    assert play << arrives("r2") << knows("r2", C) >> goes("r2", slot=2)


def test_the_next_turn_goes_to_the_slot_of_the_previous_turn():
    play = Play()
    assert one_turn(play, "r1", A, slot=0)
    assert one_turn(play, "r2", B, slot=1)
    assert play << arrives("r3") << knows("r3", A + MORE) >> goes("r3", slot=0, reason=Reason.PREFIX)
    assert play << ends("r3", 150, 100) >> reports("r3", predicted=100, oracle=50)


@pytest.mark.parametrize(
    ("calls_tools", "seconds", "slot"), [(False, 1.0, 0), (True, 1.0, 1), (None, 1.0, 1), (True, 4.0, 0)]
)
def test_an_edit_takes_the_place_of_what_it_edits_unless_it_may_be_a_sub_agent_instead(
    calls_tools, seconds, slot
):
    first, second = (Tokens(range(600)) + Tokens(range(n, n + 1000)) for n in (1000, 2000))
    play = Play(n_slots=2, memory="dense")
    play << arrives("r1", hash_chain=(b"head", b"one", b"two")) << knows("r1", first) >> goes("r1", slot=0)
    play << ends("r1", 1600, 0, calls_tools=calls_tools) >> reports("r1")
    play.clock += seconds
    play << arrives("r2", hash_chain=(b"head", b"one", b"edited")) << knows("r2", second)
    assert play >> goes("r2", slot=slot)


def test_a_slot_is_not_reused_while_a_cancelled_prompt_is_still_computed():
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << leaves("r1") << arrives("r2") << knows("r2", B)
    assert play << sees(0)
    assert play << sees(0)
    assert play.looking
    assert play << sees(contents={0: 64}) >> goes("r2", slot=0)


def test_a_cancelled_request_that_may_not_have_arrived_keeps_its_slot_for_a_moment():
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << leaves("r1") << arrives("r2") << knows("r2", B)
    assert play << sees()
    assert play.states == ["draining"]
    assert play.later(LINGER) << sees() >> goes("r2", slot=0)


def test_no_unpinned_request_is_sent_while_a_cancelled_pinned_request_may_still_begin():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << leaves("r1")
    assert play << arrives("r2", pinnable=False, rendered=False)
    assert play << arrives("r3", bypass=True)
    assert play.later(LINGER) << sees() >> unpinned("r3", Reason.BYPASS) >> unpinned("r2", Reason.UNPINNABLE)


def test_a_retry_waits_for_the_slot_that_still_computes_its_prompt():
    long = Tokens(range(20_000))
    play = Play()
    assert play << arrives("r1") << knows("r1", long) >> goes("r1", slot=0) << starts("r1") << leaves("r1")
    assert play << arrives("r2") << knows("r2", long)  # slot 1 is free, but has nothing of it
    assert play << sees(contents={0: 18_432}) >> goes("r2", slot=0, reason=Reason.PREFIX)
    assert play << ends("r2", 20_000, 18_432) >> reports("r2", predicted=18_432)


@pytest.mark.parametrize("memory", ["dense", "swa"])
def test_a_retry_reuses_the_tokens_computed_for_the_cancelled_request(memory):
    long = Tokens(range(20_000))
    play = Play(memory=memory, n_swa=512)
    assert play << arrives("r1") << knows("r1", long) >> goes("r1", slot=0) << starts("r1") << leaves("r1")
    assert play << arrives("r2") << knows("r2", long) << sees(contents={0: 20_003}) >> goes("r2", slot=0)
    assert (
        play << ends("r2", 20_000, 19_999) >> reports("r2", predicted=19_999 if memory == "dense" else 19_995)
    )


def test_a_retry_on_a_route_without_id_slot_waits_too():
    long = Tokens(range(20_000))
    play = Play()
    assert play << arrives("r1") << knows("r1", long) >> goes("r1", slot=0) << starts("r1") << leaves("r1")
    assert play << arrives("r2", pinnable=False) << knows("r2", long)
    assert play << sees(contents={0: 18_432}) >> unpinned("r2", Reason.ENGINE_CHOSE)


def test_after_an_error_answer_the_slot_keeps_its_contents_once_seen_idle():
    play = Play(n_slots=1)
    assert one_turn(play, "r1", A, slot=0)
    assert play << arrives("r2") << knows("r2", A + MORE) >> goes("r2", slot=0) << starts("r2")
    assert play << fails("r2") >> reports("r2", usage=None, oracle=None, exact=None)
    assert play.states == ["draining"]
    assert play << sees(contents={0: 100})
    assert play << arrives("r3") << knows("r3", A + MORE) >> goes("r3", slot=0, reason=Reason.PREFIX)


def test_a_slot_with_a_reply_of_unknown_length_keeps_the_prompts_tokens():
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << ends("r1", generated=None) >> reports("r1")
    assert play << sees(contents={0: 180})
    contents = play.table.shadow.slots[0]
    assert (contents.tokens, contents.opaque, contents.rough) == (A, 80, False)
    assert play.rests()


def test_a_client_chosen_slot_number_wraps_and_its_request_waits_for_that_slot():
    play = Play()
    assert play << arrives("r1", id_slot=99, rendered=False) >> goes("r1", slot=1)
    assert play << arrives("r2", id_slot=-5, rendered=False)  # slot 1 again (T8)
    assert play << arrives("r3", id_slot=2, rendered=False) >> goes("r3", slot=0, reason=Reason.CLIENT_CHOSE)
    assert play << ends("r3") >> reports("r3")
    assert play << ends("r1") >> reports("r1") >> goes("r2", slot=1)


def action(request: str, slot: int = 0) -> Arrived:
    return arrives(request, id_slot=slot, rendered=False, action=True)


def test_a_clients_slot_action_waits_for_the_slot_and_blocks_other_requests():
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << action("a")
    assert play << ends("r1") >> reports("r1") >> goes("a", slot=0)
    assert play << arrives("r2") << knows("r2", A)
    assert play << acts("a") >> goes("r2", slot=0)


def test_the_contents_of_a_slot_after_a_clients_slot_action_are_known():
    play = Play(n_slots=1)
    assert one_turn(play, "r1", A, slot=0)
    contents = play.table.shadow.slots[0]
    assert play << action("saves") >> goes("saves") << acts("saves", None)
    assert play.table.shadow.slots[0] is contents
    assert play << action("restores") >> goes("restores") << acts("restores", 77)
    assert play.table.shadow.slots[0].total == 77
    assert not play.table.shadow.slots[0].tokens
    assert play << action("erases") >> goes("erases") << acts("erases", 0)
    assert play.table.shadow.slots[0] is None
    assert play.rests()


def test_a_slot_action_fails_open_if_no_engine_is_up():
    play = Play(up=False)
    assert play << action("a") >> goes("a", slot=None, reason=Reason.NO_ENGINE) << acts("a", 0)
    assert play.rests()


def test_a_resumable_stream_keeps_its_slot_after_its_client_leaves():
    play = Play(n_slots=1)
    assert play << arrives("r1", resumable=True) << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << leaves("r1")
    assert play.states == ["foreign"]
    assert play << arrives("r2") << knows("r2", A + MORE) << sees(0)
    assert play << sees(contents={0: 130}) >> goes("r2", slot=0)


def released(play: Play) -> list[tuple[str, int | None]]:
    return [(str(one.request), one.held) for one in play.released]


@pytest.mark.parametrize("resumable", [False, True])
def test_a_request_whose_client_left_is_released_when_the_engine_frees_its_slot(resumable):
    play = Play(n_slots=1)
    play << arrives("r1", resumable=resumable) << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    play << leaves("r1") << sees(0)
    assert play.placement.works_for(RequestId("r1"))
    assert released(play) == []
    play << sees(contents={0: 150})
    assert not play.placement.works_for(RequestId("r1"))
    assert released(play) == [("r1", 150)]


def test_an_unpinned_request_whose_client_left_is_released_when_its_slot_is_free():
    play = Play(n_slots=2)
    play << arrives("r1", copies=2) << knows("r1", None) >> unpinned("r1", Reason.UNPINNABLE)
    play << leaves("r1") << sees(0, 1)
    assert play.placement.works_for(RequestId("r1"))
    play << sees()
    assert [request for request, _ in released(play)] == ["r1"]


@pytest.mark.parametrize("end", [engine_lost(), engine_up()])
def test_an_engine_that_ends_works_for_no_client_that_left(end):
    play = Play(n_slots=2)
    play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << leaves("r1")
    play << arrives("r2", copies=2) << knows("r2", None) << end
    assert not play.placement.works_for(RequestId("r1"))
    assert released(play) == [("r1", None)]


def test_two_hundred_requests_on_two_slots_are_served_in_fair_order():
    play = Play()
    order = []
    for n in range(200):  # a hundred and fifty of anna's before the first of bob's
        client = "anna" if n < 150 else "bob"
        play << arrives(f"{client}{n}", client) << knows(f"{client}{n}", Tokens([n] * 10))
    while play.effects:
        effect = play.effects.popleft()
        if isinstance(effect, Forward):
            order.append(effect.request)
            play << ends(effect.request, 10)
    assert len(order) == 200
    assert (play << sees()).rests()
    first = [request.rstrip("0123456789") for request in order[2:102]]
    assert first.count("bob") == 50
    assert all(first[n] != first[n + 1] for n in range(99))
    assert [r for r in order if r.startswith("anna")] == [f"anna{n}" for n in range(150)]


def test_on_an_engine_with_other_clients_only_a_fresh_observation_frees_a_slot():
    play = Play()
    assert play << arrives("r0", bypass=True) >> unpinned("r0", Reason.BYPASS) << sees(0, 1) << sees(0)
    assert play.later(1.0) << arrives("r1") << knows("r1", A)
    assert play.looking
    assert play << sees(0) >> goes("r1", slot=1)


def test_failing_observations_are_retried_at_growing_intervals():
    play = Play()
    assert play << arrives("r0", bypass=True) >> unpinned("r0", Reason.BYPASS)
    play.delays.clear()
    for _ in range(8):
        assert play << look_failed()
    assert play.delays == sorted(play.delays)
    assert play.delays[-1] >= 1.0


# -- slots that another program erased -------------------------------------------------------------------

LONG = Tokens(range(5000))


@pytest.mark.parametrize("erased", [False, True])
def test_after_some_seconds_a_long_state_is_seen_before_it_is_counted_on(erased):
    play = Play(n_slots=1, memory="dense", **NEW_FILES)
    assert one_turn(play, "r1", LONG, slot=0)
    play.table.settled[SlotId(0)] = play.table.shadow.slots[0]  # it was saved
    assert play << snapshots_changed(snapshot("s1", LONG))
    assert play.later(3) << arrives("r2") << knows("r2", LONG + A)
    assert play.looking
    play << sees(contents={0: 0 if erased else len(LONG)})
    if erased:
        assert play >> restores(0, "s1")
    else:
        assert play >> goes("r2", slot=0, reason=Reason.PREFIX)


def test_a_short_or_recent_state_needs_no_poll():
    for prompt, pause in ((A, 3), (LONG, 1)):
        play = Play(n_slots=1, memory="dense")
        assert one_turn(play, "r1", prompt, slot=0)
        assert one_turn(play.later(pause), "r2", prompt + B, slot=0, cached=len(prompt))
        assert not play.looking


def test_a_request_does_not_wait_for_a_poll_that_fails_or_for_one_beside_a_running_answer():
    play = Play(n_slots=2, memory="dense")
    assert one_turn(play, "r1", LONG, slot=0)
    assert play << arrives("r2") << knows("r2", C) >> goes("r2", slot=1) << starts("r2")
    assert play.later(3) << arrives("r3") << knows("r3", LONG + A) >> goes("r3", slot=0)
    assert play << ends("r3", len(LONG + A), len(LONG)) >> reports("r3")
    assert play << ends("r2", len(C), 0) >> reports("r2")
    assert play.later(3) << arrives("r4") << knows("r4", LONG + A + B)
    assert play << look_failed() >> goes("r4", slot=0)

"""Requests whose slot the sidecar cannot choose: bypass, n > 1, /v1/messages, embeddings."""

from collections import deque

import pytest

from playbooks.playbook import (
    FILES,
    Play,
    arrives,
    ends,
    engine_lost,
    engine_up,
    fails,
    goes,
    knows,
    learns,
    leaves,
    one_turn,
    planted,
    plants,
    renders,
    replies,
    reports,
    sees,
    starts,
    unpinned,
)
from slotkeeper.scheduler.effects import Erase, Forward, Prefill, Purpose
from slotkeeper.scheduler.events import Erased, Event
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Known
from slotkeeper.scheduler.slots.table import LINGER
from slotkeeper.scheduler.state import EARLY, PASSES
from slotkeeper.scheduler.types import Reason

A, B, C = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000))
MORE = Tokens(range(200))


def bypass(request):
    return arrives(request, bypass=True, rendered=False)


def test_a_bypass_waits_for_pinned_requests_to_begin_and_delays_pins_until_its_slot_is_seen():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0)
    assert play << bypass("r2")
    assert play << starts("r1") >> unpinned("r2", Reason.BYPASS)
    assert play << arrives("r3") << knows("r3", B)
    assert play << sees(0)
    assert play.looking
    assert play << sees(0, 1)
    assert play.states == ["running", "running"]
    assert play << ends("r2", 40) >> reports("r2", slot=1, reason=Reason.BYPASS, predicted=None)
    assert play << sees(0, contents={1: 40}) >> goes("r3", slot=1)


def test_a_request_that_disables_the_cache_is_predicted_to_reuse_nothing():
    play = Play()
    play << arrives("r1", pinnable=False, copies=2, uncached=True) << knows("r1", A)
    assert play >> unpinned("r1", Reason.UNPINNABLE)
    assert play.pending("r1").predicted == 0  # before /slots shows where it runs


def test_the_slot_of_an_unpinned_request_is_free_only_if_get_slots_shows_it():
    play = Play()
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    assert play << bypass("r2") >> unpinned("r2", Reason.BYPASS)
    assert play << sees(0, 1)  # which task is in which slot is a guess
    assert play << arrives("r3") << knows("r3", A)
    assert play << ends("r1", 40) >> reports("r1")
    assert play << sees(0)  # the guess was wrong
    assert play << sees(0)
    assert "idle" not in play.states
    assert play << ends("r2", 50) >> reports("r2")
    assert play << sees(contents={0: 50, 1: 40}) >> goes("r3")


def test_two_unpinned_requests_are_not_mistaken_for_one():
    play = Play()
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    assert play << bypass("r2") >> unpinned("r2", Reason.BYPASS)
    assert play << sees(1)  # one of them; the other has not begun
    assert play << arrives("r3") << knows("r3", A)
    assert play.placement.queued == 1
    assert play << sees(0, 1)
    assert play.states == ["running", "running"]


def test_a_slot_seen_busy_before_an_unpinned_request_was_sent_is_not_attributed_to_it():
    play = Play()
    before = play.clock
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    assert play << sees(1, asked=before)
    assert "running" not in play.states


def test_a_request_whose_slot_was_not_seen_is_attributed_by_the_slots_token_count():
    play = Play()
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    assert play << ends("r1", 300, 0, generated=21)
    assert play << arrives("r2") << knows("r2", A)
    assert play.placement.queued == 1  # nothing is pinned while a slot's contents are unknown
    assert play << sees(contents={1: 320}) >> reports("r1", slot=1) >> goes("r2", slot=0)
    assert play.table.shadow.slots[1].total == 320


def test_an_old_observation_of_an_ended_request_does_not_show_a_foreign_task():
    play = Play()
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    asked = play.clock + 0.001
    assert play << ends("r1", 300) << sees(0, asked=asked)
    assert play.states == ["idle", "idle"]
    assert play << sees(contents={0: 300}) >> reports("r1", slot=0)
    assert play << arrives("r2") << knows("r2", A) >> goes("r2")  # no other client was seen here


@pytest.mark.parametrize(("speculative", "more", "slot"), [(True, 9, 1), (False, 9, None), (True, -9, None)])
def test_the_slot_of_a_reply_that_ended_within_a_draft_holds_more_tokens(speculative, more, slot):
    play = Play(speculative=speculative)
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    assert play << ends("r1", 300, 0, generated=21)
    assert play << sees(contents={1: 320 + more}) >> reports("r1", slot=slot)


def test_two_requests_whose_slots_were_not_seen_are_attributed_to_two_slots():
    play = Play()
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS)
    assert play << bypass("r2") >> unpinned("r2", Reason.BYPASS)
    assert play << ends("r1", 300) << ends("r2", 300)
    assert play << sees(contents={0: 300, 1: 300}) >> reports("r1", slot=1) >> reports("r2", slot=0)


def test_a_cancelled_request_that_was_not_seen_may_still_begin():
    play = Play(n_slots=1)
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS) << leaves("r1")
    assert play << arrives("r2") << knows("r2", A) << sees()
    assert play.placement.queued == 1
    assert play.later(LINGER) << sees(0)
    assert play.states == ["draining"]
    assert play << sees(contents={0: 30}) >> goes("r2", slot=0)


def test_a_request_for_several_answers_waits_for_several_free_slots():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << arrives("r2", copies=2)
    assert play << ends("r1", 1000) >> reports("r1") >> unpinned("r2", Reason.UNPINNABLE)
    assert play << sees(0, 1)
    assert play << knows("r2", B)
    assert play << ends("r2", 1000) >> reports("r2", exact=True)
    assert play << sees(contents={0: 1000, 1: 0})
    assert play.rests()


def test_a_request_for_more_answers_than_slots_is_sent():
    play = Play()
    assert play << arrives("r1", copies=9, rendered=False) >> unpinned("r1", Reason.UNPINNABLE)


def test_unrendered_requests_on_unpinnable_routes_are_sent_while_slots_are_free():
    play = Play()
    for request in ("r1", "r2"):
        embeddings = arrives(request, pinnable=False, rendered=False)
        assert play << embeddings >> unpinned(request, Reason.UNPINNABLE)
    assert play << arrives("r3", pinnable=False, rendered=False)
    assert play << fails("r1") >> unpinned("r3", Reason.UNPINNABLE)
    assert play << sees(0, 1) >> reports("r1", slot=None)
    assert play.states == ["running", "running"]


def test_an_unrendered_request_does_not_overtake_a_pin_that_waits_for_another_to_be_seen():
    play = Play(n_slots=3)
    embeddings = [arrives(request, pinnable=False, rendered=False) for request in ("r1", "r3")]
    assert play << embeddings[0] >> unpinned("r1", Reason.UNPINNABLE)
    assert play << arrives("r2") << knows("r2", A)
    assert play << embeddings[1]
    assert play << sees(0) >> goes("r2", slot=1)
    assert play << starts("r2") >> unpinned("r3", Reason.UNPINNABLE)


# -- /v1/messages (T5) -------------------------------------------------------------------------------


def messages(request):
    return arrives(request, pinnable=False)


def conversation(play, request, prompt, slot):
    assert one_turn(play, request, prompt, slot=slot)


def test_a_messages_request_is_steered_if_the_engine_would_overwrite_a_more_valuable_slot():
    system = Tokens(range(50_000, 50_400))  # 40 % of a prompt: similar enough for the engine
    play = Play(ram_cache=False, memory="dense")
    first = system + A
    conversation(play, "r1", first, 0)
    newcomer = system + B.cut(0, 600)
    assert (
        play
        << messages("r2")
        << knows("r2", newcomer)
        >> plants("r2", 1, Purpose.STEER, tokens=newcomer.cut(0, 996))
    )
    assert play << planted("r2", 996) >> unpinned("r2", Reason.STEERED)
    assert play << sees(1)
    assert (
        play << ends("r2", 1000, 996) >> reports("r2", slot=1, usage__planted=996, predicted=996, oracle=600)
    )
    assert play.table.shadow.slots[0].tokens == first


def steered(play):
    system = Tokens(range(50_000, 50_400))
    conversation(play, "r1", system + A, 0)
    prompt = system + B.cut(0, 600)
    assert play << messages("r2") << knows("r2", prompt) >> plants("r2", 1, Purpose.STEER)
    return prompt


def test_a_steered_request_whose_plant_is_done_waits_for_pins_that_have_not_begun():
    play = Play(memory="dense")
    steered(play)
    assert play << sees(1) << arrives("r3") << knows("r3", A) >> goes("r3", slot=0)
    assert play << planted("r2", 996)
    assert play << sees(0) >> unpinned("r2", Reason.STEERED)


def test_a_steered_request_whose_engine_is_lost_fails_open():
    play = Play(memory="dense")
    steered(play)
    assert play << sees(1) << arrives("r3") << knows("r3", A) >> goes("r3", slot=0)
    assert play << planted("r2", 996)  # waits for r3
    assert play << engine_lost() >> unpinned("r2", Reason.NO_ENGINE)
    assert not play.placement._state.steered


def test_a_steered_request_whose_plant_is_done_is_not_overtaken():
    play = Play(n_slots=3, memory="dense")
    steered(play)
    assert play << sees(1) << arrives("r3") << knows("r3", A) >> goes("r3", slot=2)
    assert play << planted("r2", 996)  # waits for r3
    assert play << arrives("r4") << knows("r4", C) << arrives("r5", pinnable=False, rendered=False)
    assert play << sees(2) >> unpinned("r2", Reason.STEERED)
    assert play << sees(1, 2) >> goes("r4", slot=0)


def test_if_the_client_leaves_during_the_plant_its_slot_is_free_only_when_seen_idle():
    play = Play(memory="dense")
    steered(play)
    assert play << sees(1) << leaves("r2")
    assert play.states == ["idle", "draining"]
    assert play << planted("r2", 996)  # too late, but harmless
    assert play << sees(contents={1: 512})
    assert play.table.shadow.slots[1].tokens == Tokens()
    assert play.rests()


def test_a_request_whose_client_leaves_after_the_plant_is_not_sent():
    play = Play(memory="dense")
    steered(play)
    assert play << sees(1) << arrives("r3") << knows("r3", A) >> goes("r3", slot=0)
    assert play << planted("r2", 996) << leaves("r2") >> reports("r2", usage__computed=996)
    assert play << sees(0) << sees(0, contents={1: 996})
    assert play << ends("r3", 1000) >> reports("r3")
    assert (play << sees(contents={1: 996})).rests()


# -- the touch (T6) -----------------------------------------------------------------------------------


def test_a_touch_lets_a_second_conversation_share_the_system_prompt():
    system = Tokens(range(50_000, 52_000))
    play = Play(ram_cache=True, memory="dense")
    first, second = system + A.cut(0, 500), system + B.cut(0, 500)
    conversation(play, "r1", first, 0)
    assert play << arrives("r2") << knows("r2", second) >> plants("r2", 1, Purpose.TOUCH)
    assert play << planted("r2", 1) >> goes("r2", slot=1, reason=Reason.RAM_CACHE)
    assert play << ends("r2", 2500, 2000) >> reports("r2", predicted=2000, oracle=500, usage__planted=1)
    assert play.table.shadow.slots[0].tokens == first


def test_the_engine_may_load_a_longer_entry_of_its_ram_cache_than_we_knew():
    """It copies idle slots when a task begins, perhaps later than we thought: that is no foreign state."""
    system = Tokens(range(50_000, 52_000))
    play = Play(ram_cache=True, memory="dense")
    second = system + B.cut(0, 500)
    conversation(play, "r1", second, 0)
    play.table.shadow.slots[0] = None
    conversation(play, "r2", system + A.cut(0, 500), 0)
    play.table.shadow.forget_ram()
    assert play << arrives("r3") << knows("r3", second + A) >> plants("r3", 1, Purpose.TOUCH)
    assert play << planted("r3", 1) >> goes("r3", slot=1, reason=Reason.RAM_CACHE)
    assert play << ends("r3", len(second + A), 2500) >> reports("r3", predicted=2000, usage__cached=2500)


def test_a_slot_is_reserved_between_two_plants_of_a_request():
    system = Tokens(range(50_000, 52_000))
    play = Play(ram_cache=True, memory="dense")
    conversation(play, "r1", system + A, 0)
    assert play << messages("r2") << knows("r2", system + B) >> plants("r2", 1, Purpose.TOUCH)
    assert play << sees(1) << planted("r2", 1) >> plants("r2", 1, Purpose.STEER)
    assert play << bypass("r3")  # the steering prompt is on its way to a slot that looks free
    assert play << sees(1) >> unpinned("r3", Reason.BYPASS)


def test_a_slot_that_another_task_may_have_taken_between_two_steps_is_observed_first():
    """The engine releases it when a plant ends, and gives it to a deferred task (T1)."""
    system = Tokens(range(50_000, 52_000))
    play = Play(ram_cache=True, memory="dense")
    conversation(play, "r1", system + A, 0)
    assert play << arrives("r2") << knows("r2", system + B) >> plants("r2", 1, Purpose.TOUCH) << sees(1)
    twice = arrives("r3", copies=2, bypass=True, rendered=False)
    assert play << twice >> unpinned("r3", Reason.BYPASS)  # one task in slot 0, one waits for slot 1
    assert play << planted("r2", 1)
    assert play.placement.queued == 1
    assert play << sees(0, 1)
    assert play.states == ["running", "foreign"]
    play << ends("r3", 40) >> reports("r3", slot=0) << sees(contents={0: 40, 1: 0})
    assert play >> goes("r2", slot=0)


def test_a_ram_cache_that_fails_twice_is_no_longer_expected():
    system = Tokens(range(50_000, 52_000))
    play = Play(ram_cache=True, memory="dense")
    conversation(play, "r1", system + A, 0)
    for n in (2, 3):
        request, prompt = f"r{n}", system + Tokens(range(n * 1000, n * 1000 + 900))
        play.table.shadow.slots[1] = None
        assert play << arrives(request) << knows(request, prompt) >> plants(request, 1, Purpose.TOUCH)
        assert play << planted(request) >> goes(request, slot=1, reason=Reason.RAM_CACHE)
        play << ends(request, len(prompt), 0) >> reports(request, predicted=2000, usage__cached=0)
        if n == 3:
            play >> learns(name="ram_cache", value=False, how=Known.UNFOUND)
        assert play << sees()
    assert not play.table.traits.ram_cache


def test_the_tasks_of_a_request_for_several_answers_are_not_mistaken_for_another_request():
    play = Play(n_slots=3)
    assert play << arrives("r1", copies=2, rendered=False) >> unpinned("r1", Reason.UNPINNABLE)
    assert play << bypass("r2") >> unpinned("r2", Reason.BYPASS)
    assert play << sees(0, 1)  # both are the first request's: the second is still on its way to slot 2
    assert play << arrives("r3") << knows("r3", A)
    assert play.placement.queued == 1
    assert play << sees(0, 1, 2)
    assert "idle" not in play.states


def test_several_tasks_whose_client_left_are_not_mistaken_for_another_request():
    play = Play(n_slots=3)
    assert play << arrives("r1", copies=2, rendered=False) >> unpinned("r1", Reason.UNPINNABLE)
    assert play << leaves("r1")
    assert play << bypass("r2")  # it would take slot 2, and look like a copy
    assert play << sees(0, 1) >> unpinned("r2", Reason.BYPASS)  # the engine has not noticed yet
    assert play << arrives("r3") << knows("r3", A) << sees(0, 1)
    assert play.placement.queued == 1
    assert play << sees(0, 1, 2)
    assert "idle" not in play.states


def test_an_observation_from_before_a_request_was_sent_does_not_show_its_tasks():
    """The busy slot is another client's that left, too: the copies are on their way to slots 0 and 2."""
    play = Play(n_slots=3)
    assert play << bypass("r0") >> unpinned("r0", Reason.BYPASS) << leaves("r0")
    assert play.later(LINGER) << sees() << sees()
    before = play.clock
    twice = arrives("r1", copies=2, bypass=True, rendered=False)
    assert play << twice >> unpinned("r1", Reason.BYPASS) << leaves("r1")
    assert play << sees(1, asked=before)
    assert play << arrives("r2") << knows("r2", A)
    assert play.placement.queued == 1
    assert play.later(LINGER) << sees(0, 1, 2)
    assert "idle" not in play.states


def test_a_task_whose_client_left_is_not_mistaken_for_a_request_that_has_not_begun():
    play = Play()
    assert play << bypass("r1") >> unpinned("r1", Reason.BYPASS) << leaves("r1")
    play.later(LINGER)
    assert play << bypass("r2")
    assert play << sees(0) >> unpinned("r2", Reason.BYPASS)  # the first one still runs there
    assert play.states == ["draining", "idle"]
    assert play << arrives("r3") << knows("r3", A)
    assert play.placement.queued == 1


def test_a_request_deferred_by_the_engine_is_not_mistaken_for_a_cancelled_one():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << bypass("r2") >> unpinned("r2", Reason.BYPASS) << leaves("r2")
    assert play << arrives("r3", pinnable=False, rendered=False)  # no room: the second is in slot 1
    assert play.placement.queued == 1
    assert play.later(LINGER) << sees(0, 1) << sees(0, 1)
    assert play << ends("r1", 1000) >> reports("r1") >> unpinned("r3", Reason.UNPINNABLE)


def test_a_request_deferred_by_the_engine_may_begin_long_after_its_client_left():
    play = Play(n_slots=1)
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << bypass("r2") >> unpinned("r2", Reason.BYPASS) << sees(0) << leaves("r2")
    assert play.later(LINGER) << sees(0)
    assert play << arrives("r3") << knows("r3", B)
    assert play << ends("r1", 1000) >> reports("r1")
    assert play.placement.queued == 1


def test_a_prompt_that_waits_in_the_engine_may_begin_after_its_client_left():
    play = Play()
    assert play << arrives("r1") << knows("r1", A) >> goes("r1", slot=0) << starts("r1")
    assert play << arrives("r2", copies=2, bypass=True, rendered=False) >> unpinned("r2", Reason.BYPASS)
    assert play << leaves("r2")
    assert play.later(LINGER) << sees(0, 1)
    assert play << arrives("r3") << knows("r3", B)
    assert play << ends("r1", 1000) >> reports("r1")
    assert play.placement.queued == 1
    assert play << sees(0, 1)
    assert "idle" not in play.states


# -- requests that were sent before their engine was known ---------------------------------------------


def sent_open(play, request, tokens):
    """An unprobed engine answers a request. Its tokens cannot be counted."""
    play << arrives(request, hash_chain=(request.encode(),))
    assert play >> unpinned(request, Reason.NO_ENGINE) << knows(request, None)
    assert play << ends(request, tokens) >> reports(request, usage__prompt=tokens, oracle=None)


def test_a_request_that_ended_before_its_engine_was_known_is_found_in_its_slot_and_rendered():
    play = Play(up=False)
    sent_open(play, "r1", 1000)
    assert play << engine_up() >> renders("r1") << arrives("r2") << knows("r2", A + MORE)
    assert play << sees(contents={1: 1000}) >> goes("r2", slot=0, reason=Reason.COLD)
    assert play << starts("r2") << knows("r1", A)  # no second report
    assert play.table.shadow.slots[1].tokens == A
    assert play << replies("r1", A + MORE.cut(0, 1))
    assert play << arrives("r3") << knows("r3", A + MORE) >> goes("r3", slot=1, reason=Reason.PREFIX)


def test_of_two_turns_in_one_slot_the_last_one_is_there():
    play = Play(up=False)
    sent_open(play, "r1", 1000)
    sent_open(play, "r2", 1200)
    assert play << engine_up() >> renders("r2") >> renders("r1")
    assert play << sees(contents={0: 1200}) << knows("r1", A) << knows("r2", A + MORE)
    assert play.table.shadow.slots[0].tokens == A + MORE
    assert play.rests()


def test_of_two_requests_of_the_same_length_the_last_one_has_the_newest_task():
    play = Play(up=False)
    sent_open(play, "r1", 1000)
    sent_open(play, "r2", 1000)
    assert play << engine_up() >> renders("r2") >> renders("r1")
    assert play << sees(contents={0: 1000, 1: 1000}) << knows("r1", A) << knows("r2", B)
    assert [held.tokens for held in play.table.shadow.slots] == [A, B]


def test_a_request_whose_slot_was_overwritten_before_its_engine_was_known_is_forgotten():
    play = Play(up=False)
    sent_open(play, "r1", 1000)
    assert play << engine_up() >> renders("r1") << knows("r1", A) << sees(contents={0: 77})
    assert play.table.shadow.slots[0].tokens == Tokens()
    assert play.rests()


def test_a_request_that_runs_when_its_engine_is_known_is_rendered_then():
    play = Play(up=False)
    assert play << arrives("r1") >> unpinned("r1", Reason.NO_ENGINE) << knows("r1", None)
    assert play << engine_up() >> renders("r1") << sees(1) << knows("r1", A)
    assert play << ends("r1", 1000, 0) >> reports("r1", slot=1, exact=True)
    assert play << sees(contents={1: 1000})
    assert play.table.shadow.slots[1].tokens == A


def test_an_error_or_an_embedding_leaves_nothing_to_find():
    play = Play(up=False)
    assert play << arrives("r1") >> unpinned("r1", Reason.NO_ENGINE) << knows("r1", None)
    assert play << fails("r1") >> reports("r1")
    play << arrives("r2", generates=False, pinnable=False, rendered=False)
    assert play >> unpinned("r2", Reason.NO_ENGINE) << ends("r2", 100) >> reports("r2")
    assert play << engine_up() << sees()
    assert play.rests()


def test_only_the_last_requests_are_kept_until_their_engine_is_known():
    play = Play(up=False)
    for number in range(EARLY + 2):
        sent_open(play, f"r{number}", 100 + 10 * number)
    play << engine_up()
    for number in reversed(range(2, EARLY + 2)):
        play >> renders(f"r{number}")
    assert play


# -- constant load of pinned requests ------------------------------------------------------------------

SLOTS = 4
SYSTEM = Tokens(range(50_000, 50_400))


class Rush:
    """Pinned requests on all slots: when one ends, another is on its way, and more are queued."""

    def __init__(self, *, space="", **traits):
        self.play = Play(n_slots=SLOTS, memory="dense", **traits)
        self.space = space
        self.pins = 0
        self.launched, self.running = deque[str](), deque[str]()
        self.forwarded, self.steps = list[str](), deque[Event]()
        for _ in range(2 * SLOTS):
            self.arrives()
        for _ in range(SLOTS // 2):
            self.starts()

    def happens(self, *events):
        for event in events:
            self.play << event
            for effect in self.play.effects:
                if isinstance(effect, Prefill):
                    self.steps.append(planted(effect.request, len(effect.tokens)))
                elif isinstance(effect, Erase):
                    self.steps.append(Erased(at=0.0, request=effect.request, ok=True))
                elif isinstance(effect, Forward):
                    self.forwarded.append(effect.request)
                    self.launched.extend([effect.request] if effect.slot is not None else ())
            self.play.effects.clear()

    def arrives(self):
        self.pins += 1
        name, first = f"p{self.pins}", 100_000 + 1000 * self.pins
        prompt = None if self.space else SYSTEM + Tokens(range(first, first + 600))
        self.happens(arrives(name, f"client {name}", namespace=self.space), knows(name, prompt))

    def starts(self):
        if self.launched:
            self.running.append(self.launched.popleft())
            self.happens(starts(self.running[-1]))

    def next_request(self):
        """One request ends, one step ends, one request arrives, one begins to run."""
        if self.running:
            self.happens(ends(self.running.popleft(), 1000))
        if self.steps:
            self.happens(self.steps.popleft())
        self.arrives()
        self.starts()

    def overtaken_by(self, request):
        """Return how many requests that arrived later were sent before `request`."""
        before = self.pins
        for _ in range(20 * SLOTS):
            if request in self.forwarded:
                break
            self.next_request()
        later = (
            self.forwarded[: self.forwarded.index(request)] if request in self.forwarded else self.forwarded
        )
        return sum(one.startswith("p") and int(one[1:]) > before for one in later)


ONE_SLOT = {
    "messages": (arrives("m", pinnable=False), knows("m", A)),
    "messages with the same system prompt": (
        arrives("m", pinnable=False),
        knows("m", SYSTEM + B.cut(0, 600)),
    ),
    "embeddings": (arrives("m", pinnable=False, rendered=False),),
    "bypass": (arrives("m", bypass=True, rendered=False),),
}


@pytest.mark.parametrize("name", ONE_SLOT)
def test_under_constant_pinned_load_an_unpinned_request_is_overtaken_by_few_later_ones(name):
    rush = Rush()
    rush.happens(*ONE_SLOT[name])
    assert rush.overtaken_by("m") <= SLOTS
    assert "m" in rush.forwarded


@pytest.mark.parametrize("copies", [2, SLOTS])
def test_under_pinned_load_a_request_for_several_answers_is_overtaken_a_limited_number_of_times(copies):
    rush = Rush()
    rush.happens(arrives("m", copies=copies, rendered=False))
    assert 0 < rush.overtaken_by("m") <= PASSES + SLOTS
    assert "m" in rush.forwarded


def test_under_constant_load_messages_in_a_namespace_are_overtaken_a_limited_number_of_times():
    rush = Rush(space="b", **FILES)  # with unknown prompts: any may begin like this one
    rush.happens(arrives("m", pinnable=False, namespace="a"), knows("m", A))
    assert 0 < rush.overtaken_by("m") <= PASSES + SLOTS
    assert "m" in rush.forwarded


def test_no_request_is_sent_after_messages_in_a_namespace_until_they_are_seen_running():
    """It could end before they arrive: its slot would then look best to the engine."""
    play = Play(n_slots=3, **FILES)
    play << arrives("m", pinnable=False, namespace="a") << knows("m", None)
    assert play >> unpinned("m", Reason.UNPINNABLE, isolated=True)
    assert play << arrives("two", pinnable=False, copies=2, namespace="b") << knows("two", A)
    assert play << sees(0) >> unpinned("two", Reason.UNPINNABLE)


def test_a_copy_that_ended_unseen_may_have_overwritten_a_slot_of_another_namespace():
    """GET /slots shows one of two copies. The other left as many tokens in slot 0 as that slot had before."""
    play = Play(n_slots=3, memory="dense")
    assert one_turn(play, "r1", A, slot=0, namespace="a")
    assert play.table.shadow.slots[0].tokens.space == "a"
    play << arrives("two", pinnable=False, copies=2, namespace="b") << knows("two", None)
    assert play >> unpinned("two", Reason.UNPINNABLE)
    play << sees(1, contents={0: play.table.shadow.slots[0].total})
    assert play.table.shadow.slots[0].tokens.space == ""

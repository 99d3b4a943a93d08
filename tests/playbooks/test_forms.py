"""A request that rules would change is priced in both forms, and is sent in the cheaper one."""

from __future__ import annotations

import pytest

from playbooks.playbook import Play, arrives, ends, goes, knows, one_turn, reports
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.pending import Weighed
from slotkeeper.scheduler.types import Reason

HEAD, OTHER_HEAD = Tokens(range(1000)), Tokens(range(5000, 6000))
ASKED, NEXT = Tokens(range(2000, 2300)), Tokens(range(3000, 3100))
FIRST, OWN, CHANGED = HEAD + ASKED, OTHER_HEAD + ASKED + NEXT, HEAD + ASKED + NEXT
MINE, THEIRS = (b"h", b"u1"), (b"H", b"u1", b"a1", b"u2")
AS_CHANGED = (b"h", b"u1", b"a1", b"u2")


def begun(memory: str) -> Play:
    play = Play(memory=memory)
    assert play << arrives("r1", hash_chain=MINE) << knows("r1", FIRST) >> goes("r1", slot=0, changed=False)
    assert play << ends("r1", 1300, 0) >> reports("r1")
    return play


def weighed(play: Play, request: str = "r2") -> Weighed | None:
    return next(p.weighed for key, p in play.placement._state.requests.items() if key == request)


def both(own: Tokens | None, changed: Tokens | None):
    known = knows("r2", own)
    return type(known)(at=0.0, request=known.request, prompt=own, rewritten=changed)


def test_on_a_dense_model_a_rewritten_request_is_sent_by_its_messages_and_priced_afterwards():
    play = begun("dense")
    asked = arrives("r2", hash_chain=THEIRS, rewritten=AS_CHANGED)
    assert play << asked >> goes("r2", slot=0, changed=True, reason=Reason.CONTINUES)
    assert play << both(OWN, CHANGED)
    assert weighed(play) == Weighed(own=1400, changed=100, taken=True)
    assert play << ends("r2", 1400, 1300) >> reports("r2", predicted=1300)


def test_on_a_hybrid_model_a_rewritten_request_waits_for_its_tokens():
    play = begun("hybrid")
    assert play << arrives("r2", hash_chain=THEIRS, rewritten=AS_CHANGED)
    assert play << both(OWN, CHANGED) >> goes("r2", slot=0, changed=True)
    assert weighed(play) == Weighed(own=1400, changed=100, taken=True)


def test_tools_are_reordered_only_if_that_saves_at_least_the_tokens_that_it_moves():
    """Otherwise the next agent with this client's order could reuse nothing of it."""
    for moved, taken in ((1300 * 4, True), (1301 * 4, False)):
        play = begun("dense")
        assert play << arrives("r2", hash_chain=THEIRS, rewritten=THEIRS, moved=moved)
        assert play << both(OWN, CHANGED) >> goes("r2", changed=taken)


def test_a_restored_result_is_sent_only_if_its_prompt_fits_and_only_after_its_tokens_are_known():
    """Without such a limit the messages alone would place it, as in the first of these tests."""
    for most, taken in ((len(CHANGED), True), (len(CHANGED) - 1, False)):
        play = begun("dense")
        assert play << arrives("r2", hash_chain=THEIRS, rewritten=AS_CHANGED, most=most)
        assert play << both(OWN, CHANGED) >> goes("r2", changed=taken)
        assert weighed(play) == Weighed(own=1400, changed=100, taken=taken)


@pytest.mark.parametrize(
    ("own", "changed", "prices"),
    [
        (CHANGED, OWN, (100, 1400)),  # the change would cost tokens
        (CHANGED, CHANGED, (100, 100)),  # no difference
        (OWN, OTHER_HEAD + NEXT + ASKED, (1400, 1400)),  # neither form is in a slot
        (CHANGED, None, (100, None)),  # it cannot be rendered
        (None, CHANGED, (None, 100)),
    ],
)
def test_the_clients_form_is_sent_if_the_rewritten_form_saves_nothing(own, changed, prices):
    play = begun("dense")
    assert play << arrives("r2", hash_chain=THEIRS, rewritten=THEIRS)
    assert play << both(own, changed) >> goes("r2", changed=False)
    found = weighed(play)
    assert found is not None
    assert not found.taken
    if own is not None:
        assert (found.own, found.changed) == prices


def test_tokens_decide_between_two_forms_with_equal_hash_chains():
    """Both hash chains continue from the slot, but only the changed form's tokens do."""
    play = begun("dense")
    assert play << arrives("r2", hash_chain=AS_CHANGED, rewritten=AS_CHANGED)
    assert play << both(OWN, CHANGED) >> goes("r2", slot=0, changed=True)


def test_a_request_is_not_priced_if_no_rule_changes_it_or_it_may_reuse_nothing():
    play = begun("dense")
    assert play << arrives("r2", hash_chain=AS_CHANGED) >> goes("r2", slot=0, changed=False)
    assert weighed(play) is None
    play = begun("dense")
    assert play << arrives("r2", hash_chain=THEIRS, rewritten=AS_CHANGED, uncached=True)
    assert play << both(OWN, CHANGED) >> goes("r2", changed=False)


def test_a_queued_request_is_priced_again_when_a_slot_is_free():
    """Its slot was overwritten meanwhile, so the change saves nothing any more."""
    play = Play(memory="dense", n_slots=1)
    assert one_turn(play, "r1", FIRST, slot=0, hash_chain=MINE)
    assert play << arrives("busy") << knows("busy", OTHER_HEAD + ASKED) >> goes("busy", slot=0)
    assert play << arrives("r2", hash_chain=THEIRS, rewritten=AS_CHANGED) << both(OWN, CHANGED)
    play << ends("busy", 1300, 0)
    assert play >> reports("busy") >> goes("r2", slot=0, changed=False)
    assert weighed(play) == Weighed(own=100, changed=1400, taken=False)


def test_a_sub_agent_that_quotes_its_main_agents_messages_does_not_take_its_slot():
    """Its messages continue from there, but behind other tools: it can reuse nothing of that state."""
    play = begun("dense")
    sub = (b"H", b"u1", b"a1", b"q")
    assert play << arrives("r2", hash_chain=sub) << knows("r2", OWN) >> goes("r2", slot=1)

"""Brief requests are placed at once: waiting for their tokens costs more than it saves."""

from playbooks.playbook import Play, arrives, ends, goes, knows, reports
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import Reason

LONG = Tokens(range(1000, 4000))
WORDS = Tokens(range(40))


def test_a_brief_request_is_placed_without_its_tokens_and_not_over_a_long_conversation():
    play = Play()
    assert play << arrives("r1") << knows("r1", LONG) >> goes("r1", slot=0) << ends("r1") >> reports("r1")
    assert play << arrives("r2", brief=True) >> goes("r2", slot=1, reason=Reason.BRIEF)
    assert play << knows("r2", WORDS) << ends("r2", 40, 0) >> reports("r2", predicted=0, oracle=40)


def test_a_brief_request_that_continues_a_conversation_goes_to_its_slot():
    play = Play()
    mine, next_turn = (b"h", b"u1"), (b"h", b"u1", b"a1", b"u2")
    assert play << arrives("r1", brief=True, hash_chain=mine) >> goes("r1", slot=0, reason=Reason.BRIEF)
    assert play << knows("r1", WORDS) << ends("r1", 40, 0) >> reports("r1")
    assert (
        play << arrives("r2", brief=True, hash_chain=next_turn) >> goes("r2", slot=0, reason=Reason.CONTINUES)
    )


def test_the_prediction_for_a_client_chosen_slot_uses_the_contents_of_that_slot():
    play = Play()
    assert play << arrives("r1", id_slot=1) >> goes("r1", slot=1, reason=Reason.CLIENT_CHOSE)
    assert play << knows("r1", LONG) << ends("r1", 3000, 0) >> reports("r1")
    assert play << arrives("r2", id_slot=1) >> goes("r2", slot=1) << knows("r2", LONG + WORDS)
    assert play << ends("r2", 3040, 3000) >> reports("r2", predicted=3000)

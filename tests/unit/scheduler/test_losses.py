"""Why tokens were computed twice, by what is known of a request at its end."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import UNPLACED, Answered, Loss, Lost, lost
from slotkeeper.scheduler.slots.slot_contents import SlotContents
from slotkeeper.scheduler.types import Reason

PROMPT = Tokens(range(1000))
OTHER = Tokens(range(5000, 6000))


def answered(**more) -> Answered:
    """Return the report on a request whose whole prompt had been computed once, and that no slot had now."""
    usual: dict[str, Any] = {
        "reason": Reason.COLD,
        "prompt": PROMPT,
        "cached": 0,
        "predicted": 0,
        "base": None,
        "known": 1000,
        "restarted": False,
    }
    return Answered(**(usual | more))


def why(**more) -> Loss:
    found = lost(answered(**more), 900)
    assert found is not None
    assert found.tokens == 900
    return found.why


def test_a_single_token_is_a_loss():
    assert lost(answered(), 1) == Lost(Loss.OVERWRITTEN, 1)


def test_the_larger_part_of_the_tokens_names_the_loss():
    """The slot held this many of 1000 tokens without a checkpoint for them; the rest was nowhere."""
    assert why(base=SlotContents(tokens=PROMPT.cut(0, 499) + OTHER)) is Loss.OVERWRITTEN
    assert why(base=SlotContents(tokens=PROMPT.cut(0, 501) + OTHER)) is Loss.CHECKPOINT


def test_predicted_tokens_that_were_not_reused_were_mispredicted():
    contents = SlotContents(tokens=PROMPT)
    assert why(base=contents, predicted=999) is Loss.MISPREDICTED
    assert why(base=contents, predicted=499) is Loss.CHECKPOINT  # most of the prefix was not predicted
    assert why(base=contents, predicted=None) is Loss.CHECKPOINT  # there was no prediction


def test_a_prediction_that_came_true_is_not_a_misprediction():
    assert why(predicted=100, cached=100) is Loss.OVERWRITTEN


@pytest.mark.parametrize("reason", sorted(UNPLACED))
def test_the_loss_of_a_request_not_placed_by_its_tokens_is_unplaced(reason):
    assert why(reason=reason) is Loss.UNPLACED
    assert why(reason=reason, restarted=True) is Loss.UNPLACED


@pytest.mark.parametrize("reason", sorted(UNPLACED))
def test_tokens_that_the_right_slot_held_are_not_lost_by_the_placement(reason):
    assert why(reason=reason, base=SlotContents(tokens=PROMPT + OTHER)) is Loss.CHECKPOINT


@pytest.mark.parametrize("asked", [{"reason": Reason.BYPASS}, {"uncached": True}])
def test_the_loss_of_a_request_that_asks_for_no_reuse_is_bypassed(asked):
    assert why(**asked) is Loss.BYPASSED
    assert why(**asked, base=SlotContents(tokens=PROMPT), predicted=999, restarted=True) is Loss.BYPASSED


lengths = st.integers(min_value=0, max_value=1000)


@given(
    reason=st.sampled_from(sorted(Reason)),
    cached=lengths,
    predicted=st.none() | lengths,
    contents=lengths,
    known=lengths,
    restarted=st.booleans(),
    uncached=st.booleans(),
    tokens=st.integers(min_value=-1000, max_value=1000),
)
def test_every_loss_has_a_name_and_its_own_number(contents, tokens, **known):
    found = lost(
        replace(answered(), base=SlotContents(tokens=PROMPT.cut(0, contents) + OTHER), **known), tokens
    )
    assert found is None if tokens <= 0 else found is not None and found.tokens == tokens

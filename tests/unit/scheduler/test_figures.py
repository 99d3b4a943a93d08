"""The cost of requests: the definitions that every view reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import (
    Answered,
    Counted,
    Loss,
    Lost,
    Sums,
    Usage,
    hit_rate,
    lost,
    oracle,
    usage_of,
)
from slotkeeper.scheduler.slots.engine_model import marked
from slotkeeper.scheduler.state import MOST, Ahead
from slotkeeper.scheduler.types import Reason

COUNTS = st.integers(0, 5000)


def test_tokens_planted_for_a_request_count_as_computed_and_not_as_reused():
    usage = usage_of(30_000, 29_996, planted=29_396)
    assert usage is not None
    assert (usage.reused, usage.computed, usage.evaluated) == (600, 29_400, 4)


def test_tokens_computed_in_idle_time_count_as_reused_and_as_prepared():
    usage = usage_of(1000, 900, planted=100, ahead_from=700)
    assert usage == Usage(prompt=1000, cached=900, planted=100, prepared=100)
    assert (usage.reused, usage.computed) == (800, 200)


def test_without_figures_there_is_no_usage():
    assert usage_of(None, 5) is None
    assert usage_of(5, None) is None


def test_a_useless_plant_counts_as_work_but_not_as_tokens_of_the_prompt():
    usage = usage_of(1000, 0, planted=800)
    assert usage is not None
    assert (usage.reused, usage.computed, usage.work) == (0, 1000, 1800)


@given(prompt=st.integers(1, 5000), cached=COUNTS, planted=COUNTS, known=COUNTS, ahead=st.none() | COUNTS)
def test_the_figures_of_each_request_are_consistent(prompt, cached, planted, known, ahead):
    usage = usage_of(prompt, min(cached, prompt), planted=planted, ahead_from=ahead)  # all: broke off early
    assert usage is not None
    least = oracle(usage, min(known, prompt))
    assert usage.reused + usage.computed == usage.prompt
    assert 0 <= usage.prepared <= usage.reused
    assert min(1, usage.computed) <= least <= usage.computed + usage.prepared
    assert usage.work - usage.computed == max(0, usage.work - usage.prompt)


def test_tokens_that_only_idle_work_had_computed_count_as_new_for_the_oracle():
    ahead = Usage(prompt=1000, cached=900, prepared=300)
    assert oracle(ahead, known=600) == 400
    forgotten = Usage(prompt=1000, cached=900)  # by us: a file of a sidecar before
    assert oracle(forgotten, known=0) == 100
    assert oracle(Usage(prompt=10, cached=9), known=10) == 1
    assert oracle(Usage(prompt=10, cached=10), known=10) == 0


def test_both_ratios_and_the_hit_rate_follow_from_the_sums():
    sums = Sums(prompt_tokens=1000, reused=700, oracle=200, client=210, plant=90, idle=100, probe=16)
    assert (sums.hit_rate, sums.waited, sums.total, sums.engine) == (0.7, 1.5, 2.0, 416)
    shown = sums.shown()
    assert (shown["hit_rate"], shown["waited"], shown["total"]) == (0.7, 1.5, 2.0)


def test_ratios_of_empty_sums_are_none():
    assert (Sums().hit_rate, Sums().waited, Sums().total, hit_rate(0, 0)) == (None, None, None, None)


def test_saved_time_may_be_negative():
    assert Sums(reused_seconds=0.5, step_seconds=2.0).shown()["saved_seconds"] == -1.5


def test_saved_time_is_unknown_until_it_is_known_of_a_request():
    """Not 0.0: an engine whose speed is unknown may have saved much."""
    sums, usage = Sums(), Usage(prompt=100, cached=90)
    sums.count(Counted(usage=usage, oracle=10, unknown=None, step_seconds=0.5))
    assert (sums.shown()["saved_seconds"], sums.shown()["reused_seconds"]) == (None, None)
    sums.count(Counted(usage=usage, oracle=10, unknown=None, reused_seconds=2.0))
    assert sums.shown()["saved_seconds"] == 1.5


def test_a_single_token_is_a_loss():
    answered = Answered(
        reason=Reason.COLD,
        prompt=Tokens(range(1000)),
        cached=0,
        predicted=0,
        base=None,
        known=1000,
        restarted=False,
    )
    assert lost(answered, 1) == Lost(Loss.OVERWRITTEN, 1)
    assert lost(answered, 0) is None


def test_a_state_computed_ahead_is_found_with_or_without_a_mark():
    ahead, tokens = Ahead(), Tokens(range(100))
    ahead.computed(tokens, 60)
    assert ahead.begins(tokens) == 60
    assert ahead.begins(marked(tokens)) == 60
    assert ahead.begins(tokens.cut(0, 99)) is None


def test_the_oldest_states_are_forgotten():
    ahead = Ahead()
    for number in range(MOST + 1):
        ahead.computed(Tokens([number]), 0)
    assert ahead.begins(Tokens([0])) is None
    assert ahead.begins(Tokens([1])) == 0

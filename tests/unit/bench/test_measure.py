"""The arithmetic of comparisons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from slotkeeper.bench.measure import (
    Oracle,
    Sample,
    by_session,
    comparison,
    impossible,
    later,
    times_of,
    totals,
)
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Usage

PROMPTS = some.lists(some.lists(some.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def sample(session="a", **known):
    return Sample(session=session, label="x", **known)


def counted(session="a", *, prompt=100, computed=40, oracle=20, wait=1.0, planted=0, **more):
    return sample(
        session,
        usage=Usage(prompt=prompt, cached=prompt - computed + planted, planted=planted),
        oracle=oracle,
        first_token_seconds=wait,
        **more,
    )


@given(PROMPTS)
def test_the_oracle_is_the_prompt_less_the_longest_prefix_ever_computed(prompts):
    oracle, seen = Oracle(), list[list[int]]()
    for prompt in prompts:
        common = max((lcp(prompt, earlier) for earlier in seen), default=0)
        assert oracle.least(Tokens(prompt)) == max(1, len(prompt) - common)
        oracle.saw(Tokens(prompt))
        seen.append(prompt)


def lcp(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_the_oracle_remembers_a_reply_with_its_prompt():
    oracle = Oracle()
    oracle.saw(Tokens([1, 2]) + Tokens([3]))
    assert oracle.least(Tokens([1, 2, 3, 4, 5])) == 2


def test_totals_are_sums_of_the_figures_of_the_engine():
    found = totals([counted(computed=40, oracle=20), counted(computed=60, oracle=30)])
    assert (found.requests, found.failed, found.uncounted) == (2, 0, 0)
    assert (found.prompt, found.computed, found.sums.reused, found.oracle) == (200, 100, 100, 50)
    assert found.sums.waited == 2.0


def test_a_failed_request_is_counted_but_adds_no_tokens_and_no_time():
    failed = counted(computed=7, wait=99.0, failure="500: no")
    found = totals([counted(wait=1.0), failed])
    assert (found.requests, found.failed, found.computed) == (2, 1, 40)
    assert found.waits.first_token_p95 == 1.0


def test_waited_seconds_are_the_sum_of_all_waits_and_a_stall_is_the_longest_gap_in_one_answer():
    found = totals(
        [
            counted(wait=1.0, stall_seconds=0.2),
            counted(wait=3.0, stall_seconds=0.7),
            counted(wait=9.0, stall_seconds=9.0, failure="500: no"),
            counted(wait=2.0),  # not a stream
        ]
    )
    assert (found.waits.waited_seconds, found.waits.stall_seconds) == (6.0, 0.7)
    assert totals([counted()]).waits.stall_seconds is None


def timed(computed, *, prompt=4000, oracle=None):
    """Return a request on an engine with a pass of 100 ms, 2 ms a token, 1 us a token of context."""
    context = prompt - computed
    took = 0.1 + 0.002 * computed + 1e-6 * (computed * context + computed * (computed - 1) / 2)
    return counted(prompt=prompt, computed=computed, oracle=oracle, wait=took, prefill_seconds=took)


def test_the_least_wait_is_the_oracle_at_the_engines_own_speed():
    samples = [timed(n, oracle=10) for n in (10, 40, 100, 500, 1000, 2000)]
    times = times_of(samples)
    least = timed(10).first_token_seconds
    assert totals(samples, times).least_seconds == pytest.approx(len(samples) * least)
    assert totals([*samples, timed(50)], times).least_seconds is None  # one oracle is unknown
    assert totals(samples).least_seconds is None
    assert times_of(samples[:5]) is None
    assert "least" in str([column.header for column in comparison({"a": samples}).columns])


def test_an_answer_without_an_oracle_is_in_no_ratio():
    """The metrics leave it out in the same way."""
    found = totals([counted(computed=40, oracle=20), counted(prompt=2000, computed=1000, oracle=None)])
    assert (found.computed, found.oracle, found.uncounted) == (1040, 20, 1)
    assert found.sums.waited == 2.0


def test_planted_tokens_count_as_waiting_and_idle_tokens_only_in_the_total():
    found = totals([counted(computed=40, planted=30, oracle=20, idle=20)])
    assert (found.sums.client, found.sums.plant, found.sums.idle) == (10, 30, 20)
    assert (found.sums.waited, found.total) == (2.0, 3.0)


def test_without_the_counter_of_the_engine_the_total_is_unknown():
    assert totals([counted(idle=5), counted(idle=None)]).total is None


# -- impossible figures ----------------------------------------------------------------------------------


def test_computing_less_than_the_oracle_is_a_fault_unless_it_is_explained():
    assert impossible([counted(computed=20, oracle=20)]) == 0
    assert impossible([counted(computed=5, oracle=20)]) == 15
    assert impossible([counted(computed=5, oracle=20), counted(computed=16, oracle=20)], alike=4) == 11
    assert impossible([counted(computed=5, oracle=20, rewritten=True)]) == 0
    assert impossible([counted(computed=5, oracle=20, idle=10)]) == 5
    assert impossible([counted(computed=5, oracle=20, failure="500: no")]) == 0


def test_extra_computation_elsewhere_does_not_explain_computing_less_than_the_oracle():
    assert impossible([counted(computed=90, oracle=20), counted(computed=5, oracle=20)]) == 15


def test_replies_and_prompts_unknown_to_the_oracle_explain_computing_less():
    assert impossible([counted(generated=15), counted(computed=5, oracle=20)]) == 0
    assert impossible([counted(oracle=None), counted(computed=5, oracle=20)]) == 0
    assert impossible([counted(exact=False, computed=5), counted(computed=5, oracle=20)]) == 0


def test_empty_totals_have_no_ratio_and_no_percentile():
    found = totals([])
    assert (found.requests, found.sums.waited, found.waits.first_token_p50) == (0, None, None)


def test_the_first_request_of_each_session_can_be_left_out():
    samples = [sample(session, oracle=n) for n, session in enumerate("abab")]
    assert [left.oracle for left in later(samples)] == [2, 3]


def test_sessions_keep_their_order():
    samples = [sample("b"), sample("a"), sample("b")]
    assert [(name, len(found)) for name, found in by_session(samples).items()] == [("b", 2), ("a", 1)]

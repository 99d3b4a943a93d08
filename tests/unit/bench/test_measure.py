"""The arithmetic of the comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from slotkeeper.bench.measure import Oracle, Sample, by_session, later, percentile, totals
from slotkeeper.core.tokens import Tokens

PROMPTS = some.lists(some.lists(some.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def sample(session="a", **known):
    return Sample(session=session, label="x", **known)


def counted(session="a", *, prompt=100, computed=40, oracle=20, wait=1.0):
    return sample(
        session,
        prompt=prompt,
        computed=computed,
        cached=prompt - computed,
        oracle=oracle,
        first_token_seconds=wait,
    )


@given(PROMPTS)
def test_the_oracle_is_the_prompt_less_the_longest_prefix_ever_computed(prompts):
    oracle, seen = Oracle(), []
    for prompt in prompts:
        common = max((lcp(prompt, earlier) for earlier in seen), default=0)
        assert oracle.least(Tokens(prompt)) == max(1, len(prompt) - common)
        oracle.saw(Tokens(prompt))
        seen.append(prompt)


def lcp(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_reply_is_remembered_with_its_prompt():
    oracle = Oracle()
    oracle.saw(Tokens([1, 2]) + Tokens([3]))
    assert oracle.least(Tokens([1, 2, 3, 4, 5])) == 2


def test_totals_are_sums_of_the_engines_figures():
    found = totals([counted(computed=40, oracle=20), counted(computed=60, oracle=30)])
    assert (found.requests, found.failed, found.uncounted) == (2, 0, 0)
    assert (found.prompt, found.computed, found.cached, found.oracle) == (200, 100, 100, 50)
    assert found.ratio == 2.0


def test_a_failed_request_is_counted_but_adds_no_tokens_and_no_time():
    found = totals([counted(wait=1.0), sample(failure="500: no", computed=7, first_token_seconds=99.0)])
    assert (found.requests, found.failed, found.computed) == (2, 1, 40)
    assert found.first_token_p95 == 1.0


def test_the_ratio_leaves_out_answers_without_an_oracle():
    found = totals([counted(computed=40, oracle=20), counted(computed=1000, oracle=None)])
    assert found.ratio == 2.0
    assert found.computed == 1040
    assert found.uncounted == 1


def test_nothing_has_no_ratio_and_no_percentile():
    found = totals([])
    assert (found.requests, found.ratio, found.first_token_p50) == (0, None, None)


def test_the_first_request_of_each_session_can_be_left_out():
    samples = [sample("a", prompt=1), sample("b", prompt=2), sample("a", prompt=3), sample("b", prompt=4)]
    assert [left.prompt for left in later(samples)] == [3, 4]


def test_sessions_keep_their_order():
    samples = [sample("b"), sample("a"), sample("b")]
    assert [(name, len(found)) for name, found in by_session(samples).items()] == [("b", 2), ("a", 1)]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3, 1, 2], 50, 2),
        ([1, 2, 3, 4], 50, 2),
        ([5], 95, 5),
        (range(1, 101), 95, 95),
        (range(1, 21), 95, 19),
        ([], 50, None),
    ],
)
def test_percentiles_are_values_that_occurred(values, percent, expected):
    assert percentile(values, percent) == expected

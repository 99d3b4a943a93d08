"""How long clients wait for tokens: of one answer, and of many."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from slotkeeper.api.answers.answer import AnswerReader, comment
from slotkeeper.api.answers.latency import (
    REMEMBERED,
    EngineSpeed,
    Prefilled,
    PrefillTimes,
    TokenTimes,
    Waited,
    Waits,
    least_seconds,
    percentile,
    prefill_times,
    waits,
)
from slotkeeper.api.head import Api

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def timed(*chunks: tuple[float, bytes], stream: bool = True) -> TokenTimes:
    """Return the times of an answer whose chunks came at these moments."""
    reader, times = AnswerReader(Api.CHAT, stream=stream), TokenTimes()
    for at, chunk in chunks:
        reader.feed(chunk)
        times.read(reader, iter([at]).__next__)
    return times


def test_a_stall_is_the_longest_time_between_two_events_from_the_first_token_on():
    times = timed((1.0, ROLE), (9.0, TOKEN), (10.0, TOKEN + TOKEN), (14.0, TOKEN), (15.0, TOKEN))
    assert (times.first, times.stall) == (9.0, 4.0)


def test_neither_comments_nor_the_parts_of_an_event_end_a_stall():
    times = timed((1.0, TOKEN), (2.0, comment("waiting")), (4.0, TOKEN[:20]), (6.0, TOKEN[20:]))
    assert (times.first, times.stall) == (1.0, 5.0)


def test_an_answer_of_one_token_has_no_stall_and_a_body_has_none_either():
    assert timed((3.0, TOKEN)).stall is None
    whole = timed((2.0, b'{"choices":'), (7.0, b"[]}"), stream=False)
    assert (whole.first, whole.stall) == (2.0, None)


def test_without_a_token_there_is_no_time():
    assert timed((1.0, ROLE)).first is None


@given(some.lists(some.floats(0.001, 9.0), min_size=2, max_size=20))
def test_the_stall_is_the_largest_of_all_gaps(gaps: list[float]):
    moments = list(itertools.accumulate(gaps))
    times = timed(*((at, TOKEN) for at in moments))
    assert times.stall == max(b - a for a, b in itertools.pairwise(moments))


def test_sums_leave_out_what_is_unknown():
    answers = [(1.0, None, 0.5), (3.0, 0.5, None), (None, None, 9.0), (2.0, 0.25, 1.75)]
    assert waits(itertools.starmap(Waited, answers)) == Waits(
        answers=3, waited_seconds=6.0, first_token_p50=2.0, first_token_p95=3.0, stall_seconds=0.5,
        compared=2, compared_seconds=3.0, least_seconds=2.25,
    )  # fmt: skip
    assert waits([]).shown() == {
        "answers": 0, "waited_seconds": 0, "first_token_p50": None, "first_token_p95": None,
        "stall_seconds": None, "compared": 0, "compared_seconds": None, "least_seconds": None,
    }  # fmt: skip


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


# -- the least wait --------------------------------------------------------------------------------------

ENGINE = PrefillTimes(pass_seconds=0.3, token_seconds=0.016, depth_seconds=2e-6)
LENGTHS = ((1, 0), (12, 600), (40, 900), (70, 3000), (90, 80), (300, 4000), (600, 0), (1500, 2000), (2000, 0))


def prefilled(times: PrefillTimes, *, slower: float = 1.0) -> list[Prefilled]:
    """Return prefills of this engine; every fourth of them takes so many times as long."""
    return [
        Prefilled(tokens=n, context=c, seconds=times.seconds(n, c) * (1.0 if at % 4 else slower))
        for at, (n, c) in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("slower", [1.0, 3.0], ids=["alone", "some beside other work"])
def test_an_engines_times_follow_from_its_prefills(slower: float):
    found = prefill_times(prefilled(ENGINE, slower=slower))
    assert found is not None
    for tokens, context in LENGTHS:
        assert found.seconds(tokens, context) == pytest.approx(ENGINE.seconds(tokens, context), rel=0.02)


@pytest.mark.parametrize("part", ["pass_seconds", "depth_seconds"])
def test_no_part_of_a_time_is_negative(part: str):
    found = prefill_times(prefilled(replace(ENGINE, **{part: 0.0})))
    assert found is not None
    assert min(found.pass_seconds, found.token_seconds, found.depth_seconds) >= 0.0


def test_prefills_that_are_few_or_alike_tell_no_times():
    assert prefill_times(prefilled(ENGINE)[:5]) is None
    assert prefill_times([Prefilled(tokens=100, context=c, seconds=1.0) for c in range(20)]) is None
    assert prefill_times([]) is None


def test_what_new_prefills_do_not_tell_stays_known():
    speed = EngineSpeed()
    for n, prefill in enumerate(prefilled(ENGINE)):
        assert (speed.times is None) == (n < 6), "six prefills are needed"
        speed.took(prefill)
    for _ in range(2 * REMEMBERED):
        speed.took(Prefilled(tokens=100, context=0, seconds=ENGINE.seconds(100, 0)))
    assert speed.times is not None
    assert speed.times.token_seconds == pytest.approx(ENGINE.token_seconds, rel=0.02)


def test_the_least_wait_is_the_time_of_the_tokens_that_any_cache_must_compute():
    assert least_seconds(ENGINE, 100, 4000) == ENGINE.seconds(100, 3900)
    assert least_seconds(None, 100, 4000) is None
    assert least_seconds(ENGINE, None, 4000) is None

"""How long clients wait for tokens: of one answer, and of many."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slotkeeper.api.answers.answer import (
    REMEMBERED,
    AnswerReader,
    EngineSpeed,
    Prefilled,
    PrefillTimes,
    TokenTimes,
    Waited,
    Waits,
    comment,
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


@pytest.mark.parametrize(
    ("chunks", "first", "stall"),
    [
        ([(1.0, ROLE)], None, None),
        ([(1.0, ROLE), (9.0, TOKEN), (10.0, TOKEN * 2), (14.0, TOKEN), (15.0, TOKEN)], 9.0, 4.0),
        ([(1.0, TOKEN), (2.0, comment("waiting")), (4.0, TOKEN[:20]), (6.0, TOKEN[20:])], 1.0, 5.0),
        ([(3.0, TOKEN)], 3.0, None),
    ],
    ids=["no token", "role first", "comments and parts of an event", "one token"],
)
def test_a_stall_is_the_longest_time_between_two_events_from_the_first_token_on(chunks, first, stall):
    times = timed(*chunks)
    assert (times.first, times.stall) == (first, stall)


def test_an_answer_that_is_no_stream_has_no_stall():
    whole = timed((2.0, b'{"choices":'), (7.0, b"[]}"), stream=False)
    assert (whole.first, whole.stall) == (2.0, None)


def test_sums_leave_out_what_is_unknown():
    answers = [(1.0, None, 0.5), (3.0, 0.5, None), (None, None, 9.0), (2.0, 0.25, 1.75)]
    assert waits(itertools.starmap(Waited, answers)) == Waits(
        answers=3, waited_seconds=6.0, first_token_p50=2.0, first_token_p95=3.0, stall_seconds=0.5,
        compared=2, compared_seconds=3.0, least_seconds=2.25,
    )  # fmt: skip
    nothing = waits([]).shown()
    assert {name for name, value in nothing.items() if value == 0} == {
        "answers",
        "waited_seconds",
        "compared",
    }
    assert [value for value in nothing.values() if value != 0] == [None] * 5


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

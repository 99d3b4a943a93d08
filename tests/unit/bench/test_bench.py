"""How long `slotkeeper bench` plays, and which rounds count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from slotkeeper.bench import bench as module
from slotkeeper.bench.bench import AnyWay, Bench, BenchError, FoundEngine, Leg, Way, bench, code_of
from slotkeeper.bench.bench_report import markdown
from slotkeeper.bench.consumption import Used
from slotkeeper.bench.measure import Sample
from slotkeeper.bench.rivals import Rival
from slotkeeper.scheduler.requests.figures import Usage, usage_of

RIVAL = Rival(value="mine", command=("mine", "{upstream}", "{port}"))
ENGINE = FoundEngine(base="http://engine")
QUIET = Console(quiet=True)


def sample(computed: int = 40, oracle: int = 40, **more: Any) -> Sample:
    usage = usage_of(100, 100 - computed, planted=0)
    assert isinstance(usage, Usage)
    return Sample(session="s", label="l", usage=usage, idle=0, oracle=oracle, first_token_seconds=2.0, **more)


def leg(**more: Any) -> Leg:
    return Leg(samples=[sample(**more)], used=Used(written_bytes=3))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list whose sum is the time."""
    passed = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: sum(passed))
    return passed


def play(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], seconds: Iterator[float | None]
) -> list[AnyWay]:
    """Have each leg take so many seconds; None: Ctrl-C comes while it runs."""
    played: list[AnyWay] = []

    async def one(_engine: object, way: AnyWay, *_: object) -> Leg:
        took = next(seconds)
        if took is None:
            raise asyncio.CancelledError
        clock.append(took)
        played.append(way)
        return leg()

    monkeypatch.setattr(module, "_leg", one)
    return played


@pytest.mark.parametrize(("minutes", "rounds"), [(0, 1), (1, 2), (1.5, 3), (2.4, 4), (2.5, 5)])
async def test_no_round_begins_that_would_end_after_the_time(monkeypatch, clock, minutes, rounds):
    played = play(monkeypatch, clock, iter([10.0] * 100))
    found = await bench(ENGINE, minutes=minutes, console=QUIET)
    assert found.rounds == rounds
    assert len(played) == 3 * rounds
    assert all(set(played[3 * at : 3 * at + 3]) == set(ENGINE.ways) for at in range(rounds))


async def test_ctrl_c_keeps_the_rounds_that_every_way_has_played(monkeypatch, clock):
    play(monkeypatch, clock, iter([10.0] * 4 + [None]))
    found = await bench(ENGINE, minutes=60, console=QUIET)
    assert found.rounds == 1
    report = found.report()
    assert report["rounds"] == 1
    assert {figures["requests"] for figures in report["ways"].values()} == {1}


async def test_ctrl_c_in_the_first_round_keeps_the_ways_that_have_ended(monkeypatch, clock):
    """On a slow machine one round can take longer than anybody waits."""
    played = play(monkeypatch, clock, iter([10.0, 10.0, None]))
    report = (await bench(ENGINE, minutes=60, console=QUIET)).report()
    assert report["rounds"] == 1
    assert set(report["ways"]) == {way.value for way in played}
    assert "1 round of the same work" in markdown(report | {"engine": dict.fromkeys(("model", "build"), "x")})


async def test_with_only_one_way_there_is_nothing_to_compare(monkeypatch, clock):
    play(monkeypatch, clock, iter([10.0, None]))
    with pytest.raises(BenchError, match="nothing to compare"):
        await bench(ENGINE, minutes=60, console=QUIET)


async def test_rivals_play_every_round(monkeypatch, clock):
    played = play(monkeypatch, clock, iter([10.0] * 8))
    found = await bench(ENGINE, minutes=1, console=QUIET, rivals=[RIVAL])
    assert found.rounds == 2 - (len(played) == 4)
    assert set(played) == {*ENGINE.ways, RIVAL}
    assert list(found.report()["ways"]) == [*(way.value for way in ENGINE.ways), "mine"]


async def test_rivals_alone_are_nothing_to_compare(monkeypatch, clock):
    play(monkeypatch, clock, iter([10.0, 10.0, None]))
    monkeypatch.setattr("random.sample", lambda ways, _: sorted(ways, key=lambda way: isinstance(way, Way)))
    other = replace(RIVAL, value="other")
    with pytest.raises(BenchError, match="nothing to compare"):
        await bench(ENGINE, minutes=60, console=QUIET, rivals=[RIVAL, other])


def test_failures_of_a_rival_are_figures_and_no_error():
    failing = Leg(samples=[sample(failure="502")] * 2, used=Used(), started=False)
    found = Bench(engine={}, legs={Way.STOCK: [leg()], RIVAL: [failing]})
    figures = found.report()["ways"]["mine"]
    assert (figures["failed"], figures["not_started"]) == (2, 1)
    assert (figures["waited_seconds"], figures["prompt_tokens"]) == (None, None)
    assert code_of(found) == 0
    found.legs[RIVAL] = [leg(computed=10, oracle=40)]
    assert code_of(found) == 1


def test_the_report_has_the_figures_of_all_rounds_and_of_each():
    found = Bench(
        engine={"build": "b1"}, legs={Way.STOCK: [leg(), leg(computed=60)], Way.FIX: [leg(), leg()]}
    )
    stock = found.report()["ways"]["stock"]
    assert (stock["requests"], stock["computed_tokens"], stock["least_tokens"]) == (2, 100, 80)
    assert (stock["waited_ratio"], stock["waited_seconds"]) == (1.25, 4.0)
    assert stock["round_seconds"] == [2.0, 2.0]
    assert stock["written_bytes"] == 6


@pytest.mark.parametrize(
    ("more", "code"), [({}, 0), ({"failure": "500"}, 1), ({"computed": 10, "oracle": 40}, 1)]
)
def test_a_failed_request_and_impossible_figures_are_an_error(more, code):
    assert code_of(Bench(engine={}, legs={Way.STOCK: [leg(**more)]})) == code

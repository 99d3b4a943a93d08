"""`slotkeeper top`: the screen at any width, and after the sidecar stops."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from patience import PATIENCE
from slotkeeper.admin.admin import summary, time_of
from slotkeeper.api.answers.answer import Waited, waits
from slotkeeper.cli.top import HISTORY, ScreenState, history, screen, top
from slotkeeper.observe.request_record import Record, RequestStage
from slotkeeper.observe.states import (
    ENGINE_TEXTS,
    EngineState,
    Service,
    service_text,
    unknown_text,
)
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.requests.figures import Sums, Unknown
from slotkeeper.scheduler.snapshots.budgets import GIB, Budgets
from unit.looking import CAME, ENGINE, Document, admin, ended, lost, rewritten, state

NO_SERVER = "http://127.0.0.1:1"


def drawn(width: int = 100, trouble: str = "", requests=(), **given) -> str:
    """Return the screen as text, without the spaces at the ends of lines."""
    out = io.StringIO()
    seen = ScreenState(state=state(**given), requests=[listed(one) for one in requests], at=CAME)
    Console(file=out, width=width).print(screen(seen, "127.0.0.1:9090", width, trouble))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def listed(one: Record) -> Document:
    """Return what `/api/requests` says of an ended request."""
    return {"now": None, **time_of(one, CAME), **summary(one)}


def line(out: str, start: str) -> list[str]:
    return next(words for text in out.splitlines() if (words := text.split())[:1] == [start])


def below(out: str, head: str) -> list[str]:
    lines = out.splitlines()
    return lines[next(at for at, text in enumerate(lines) if head in text) + 1].split()


def engine(**given) -> Document:
    return state()["engines"][0] | given


# -- the screen ----------------------------------------------------------------------------------------


def test_the_first_line_shows_the_totals_of_all_requests():
    out = drawn()
    assert out.splitlines()[0] == "slotkeeper 1.2.3 at 127.0.0.1:9090, up 2 h"
    tokens = ["800", "200", "30"]  # reused, computed, idle
    assert below(out, "waited") == [
        "1.05",
        "1.21",
        "80",
        "%",
        "12.5",
        "s",
        *tokens,
        "12",
        "4",
        "1",
        "of",
        "1",
    ]


def test_figures_without_requests_are_dashes():
    out = drawn(totals=Sums().shown() | {"unknown_text": ""}, history=[])
    assert below(out, "waited")[:3] == ["-", "-", "-"]


def test_what_is_unknown_is_said_with_its_number_and_its_reason():
    sums = Sums(requests=1200)
    sums.leave_out(Unknown.NO_SLOTS, 10, requests=1200)
    out = drawn(120, totals=sums.shown() | {"unknown_text": unknown_text(sums)})
    assert "unknown for 1,200 of 1,200 requests: the engine has no --slots" in out.splitlines()
    assert below(out, "waited")[:4] == ["-", "-", "-", "unknown"]
    assert "unknown" not in drawn()


def test_lost_time_is_shown_as_negative():
    totals = state()["totals"] | {"saved_seconds": -0.25}
    assert below(drawn(totals=totals), "waited")[4:6] == ["-250", "ms"]


def test_each_slot_shows_its_fill_level_and_its_conversation():
    out = drawn(190)
    full = "████············"
    assert " ".join(line(out, "0")) == (
        f"0 idle {full} 25 % 2,048 opencode #3: Fix the importer 1 min 2 yes request-00000001"
    )
    assert line(out, "1") == ["1", "running", "················", "0", "%", "0", "-", "-", "0", "-", "-"]


def stated(state: EngineState, **given) -> Document:
    return engine(up=state is EngineState.UP, state=state.value, state_text=ENGINE_TEXTS[state], **given)


@pytest.mark.parametrize("found", Service)
def test_an_engine_that_is_down_is_reported_with_what_happens_to_requests(found):
    down = stated(EngineState.DOWN, down_seconds=190.0, slots=[], prefill_tokens_per_second=None)
    text = service_text(found, 60)
    out = drawn(engines=[down], service={"state": found.value, "text": text})
    assert f"{ENGINE}, b11549, hybrid, down" in out.splitlines()
    assert f"{ENGINE} does not answer, for 3 min" in out
    assert text in " ".join(out.split())
    assert ("requests fail" in out) == (found is Service.FAILS)
    assert "0 of 1" in out
    assert "tokens/s" not in out
    assert "812 tokens/s" in drawn()


def test_an_unloaded_model_of_a_router_is_not_an_error():
    model = stated(EngineState.UNLOADED) | {"engine": f"{ENGINE}#coder", "down_seconds": None}
    out = drawn(engines=[model])
    assert f"{ENGINE}#coder, b11549, hybrid, 812 tokens/s, unloaded" in out
    assert "does not answer" not in out
    assert "No engine is up" not in out


def slow(number: int, queue: float, prefill: float, answer: float = 1.0) -> Record:
    """Return a request that spent so many seconds in these stages."""
    found, at = ended(number, first_token=queue + prefill, seconds=queue + prefill + answer), 10.0
    took = {RequestStage.QUEUE: queue, RequestStage.PREFILL: prefill, RequestStage.GENERATE: answer}
    for stage, seconds in took.items():
        found.add(stage, at, at := at + seconds)
    found.doing = None
    return found


def test_the_slowest_requests_are_shown_with_their_stages():
    out = drawn(
        120, requests=[slow(1, 0, 0.5), slow(2, 7, 1), slow(3, 1, 2), slow(4, 0, 0.75), slow(5, 2, 12)]
    )
    at = next(at for at, text in enumerate(out.splitlines()) if text.startswith("slowest"))
    assert [text.split("  ")[-1].strip() for text in out.splitlines()[at + 1 : at + 4]] == [
        "prefill 12.0 s, queue 2.0 s, answer 1.0 s",
        "queue 7.0 s, prefill 1.0 s, answer 1.0 s",
        "prefill 2.0 s, queue 1.0 s, answer 1.0 s",
    ]
    assert out.splitlines()[at + 4] == ""


def test_a_running_request_shows_its_stages_and_counts_as_slow():
    waits = slow(2, 7, 0)
    waits.outcome, waits.first_token, waits.seconds, waits.spans = "running", None, None, waits.spans[:1]
    row = summary(waits) | time_of(waits, 17.0) | {"now": {"text": "queued, place 1", "percent": None}}
    seen = ScreenState(state=state(running=[row | {"slot": None}]), requests=[row], at=CAME)
    out = io.StringIO()
    Console(file=out, width=160).print(screen(seen, "", 160))
    words = [" ".join(text.split()) for text in out.getvalue().splitlines()]
    assert any(text.endswith("queue 7.0 s queued, place 1") for text in words)
    assert any(text.endswith("7.0 s so far queue 7.0 s") for text in words)


def test_slots_of_an_engine_without_a_known_context_have_no_fill_level():
    out = drawn(engines=[engine(context_tokens=0)])
    assert line(out, "0")[2:4] == ["················", "-"]


def test_tiers_show_their_use_and_budget_and_an_absent_tier_is_left_out():
    cold = {"tier": "cold", "snapshots": 0, "bytes": 0, "budget_bytes": 0, "advice": ""}
    out = drawn(tiers=[*state()["tiers"], cold])
    assert line(out, "hot") == ["hot", "████············", "2", "1.0", "MiB", "of", "4.0", "MiB"]
    assert "cold" not in out
    assert "snapshots" not in drawn(tiers=[])


def test_the_waits_of_the_last_answers_are_shown_if_there_are_any():
    assert "first token p50 500 ms, p95 2.0 s, longest stall 250 ms, of the last 2 answers" in drawn()
    assert "stall" not in drawn(waits=waits([Waited(1.0, None, None)]).shown())
    assert "first token p50" not in drawn(waits=waits([]).shown())


def test_a_folder_for_fewer_than_two_conversations_says_what_to_set():
    small = Budgets(hot=GIB, cold=0, hourly=0, largest=GIB)
    (hot,) = state()["tiers"]
    assert "Set --hot-bytes 2GiB" in drawn(tiers=[hot | {"advice": small.advice}])


@pytest.mark.parametrize(("drained", "word"), [(False, "draining"), (True, "drained")])
def test_a_draining_engine_shows_its_state_and_labels(drained, word):
    found = {"engine": "cuda", "state": word, "draining": True, "drained": drained}
    out = drawn(engines=[engine(**found, labels={"card": "4090"})])
    (line,) = (line for line in out.splitlines() if line.startswith("cuda"))
    assert "card 4090" in line
    assert line.endswith(f", {word}")


def test_the_title_shows_that_the_sidecar_is_draining():
    assert drawn(draining=True).splitlines()[0].endswith("up 2 h, draining")


def test_the_last_requests_show_their_verdicts():
    out = drawn(190, requests=[rewritten(2), lost(1)])
    assert out.splitlines()[-2].endswith("a date changed")
    assert out.splitlines()[-1].endswith("cache: overwritten")
    assert "No request has come yet." in drawn()


@pytest.mark.parametrize("width", [40, 60, 80, 132])
def test_the_screen_fits_the_width_and_drops_the_least_important_columns(width):
    out = drawn(width, requests=[rewritten(2), lost(1)])
    assert max(map(len, out.splitlines())) <= width
    assert line(out, "0")[1] == "idle"
    assert "2,048" in out
    heads = " ".join(text for text in out.splitlines() if "tokens" in text or "id" in text.split())
    assert "…" not in heads
    assert ("opencode #3" in out) == (width >= 60)
    assert ("oracle " in out.replace("/oracle", "")) == (width >= 132)


# -- the last half hour --------------------------------------------------------------------------------


def bucket(ago: float, reused: int, prompt: int = 100) -> Document:
    return {"at": CAME - ago, "reused": reused, "prompt_tokens": prompt}


def rates(*buckets: Document, now: float = CAME, width: int = 80) -> str:
    return history(buckets, now, width).plain.split("min  ")[1]


def test_each_hit_rate_is_drawn_at_its_time_and_height():
    shown = rates(bucket(HISTORY - 1, 0), bucket(HISTORY / 2 - 1, 50), bucket(0, 100))
    assert len(shown) == 60
    assert {at: cell for at, cell in enumerate(shown) if cell != "·"} == {0: "▁", 30: "▅", 59: "█"}


def test_hit_rates_in_one_cell_are_weighted_by_their_tokens():
    assert rates(bucket(1, 0, 700), bucket(2, 100))[-1] == "▂"


def test_buckets_outside_the_time_range_are_drawn_at_the_edges():
    assert rates(bucket(-500, 100))[-1] == "█"
    assert rates(bucket(9_999, 100))[0] == "█"


def test_buckets_without_tokens_are_not_drawn_as_misses():
    assert set(rates(bucket(1, 0, 0))) == {"·"}


# -- the command ---------------------------------------------------------------------------------------


def documents() -> dict[str, Document]:
    return {"/api/state": state(), "/api/requests": {"requests": [listed(ended())]}}


async def test_once_prints_one_screen_of_plain_text():
    out = io.StringIO()
    async with admin(documents()) as said:
        console = Console(file=out, width=100, force_terminal=True, color_system=None)
        code = await top(console, admin=said.url, token=None, every=1.0, once=True)
    assert code == 0
    assert out.getvalue().startswith("slotkeeper 1.2.3 at 127.0.0.1:")
    assert "\x1b" not in out.getvalue()
    assert said.asked[0] == "/api/state"


async def test_without_a_terminal_screens_follow_each_other_even_while_the_sidecar_is_away():
    """It reports the lost connection, shows the last state, and continues when the sidecar is back."""
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    out = io.StringIO()
    async with admin(documents()) as said:
        watched: Any = top(Console(file=out, width=100), admin=said.url, token=None, every=0.01, once=False)
        watching = tasks.start(watched)
        await until(out, "up 2 h")
        kept = said.documents.pop("/api/state")
        await until(out, "trying again: there is none")
        said.documents["/api/state"] = kept | {"version": "2.0.0"}
        await until(out, "slotkeeper 2.0.0")
        watching.cancel()
    said_ = out.getvalue()
    assert "\x1b" not in said_
    assert failures == []
    lost_at = said_.index("trying again")
    assert "2,048" in said_[lost_at : said_.index("slotkeeper 2.0.0")]


async def until(out: io.StringIO, text: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while text not in out.getvalue():
            await asyncio.sleep(0.01)

"""The bound and the workloads of `benchmarks.waiting`."""

from __future__ import annotations

import pytest
from benchmarks import misses
from benchmarks.least_waits import LeastRequest, least_waits
from benchmarks.waiting_figures import COLUMNS, grouped
from benchmarks.waiting_work import WORK, append
from hypothesis import given
from hypothesis import strategies as some

from unit.bench.test_sessions import played


def request(prefill: float, *, pause: float = 0.0, answer: float = 1.0) -> LeastRequest:
    return LeastRequest(pause=pause, prefill=prefill, answer=answer)


REQUESTS = some.builds(
    LeastRequest, pause=some.floats(0, 9), prefill=some.floats(0, 9), answer=some.floats(0, 9)
)


@given(some.lists(REQUESTS, max_size=5), some.integers(1, 3))
def test_a_client_alone_waits_for_its_own_prompts_only(requests: list[LeastRequest], slots: int):
    waits = least_waits([requests], slots)
    assert waits == pytest.approx([one.prefill for one in requests])


def test_prompts_are_computed_one_after_the_other():
    assert least_waits([[request(2.0)], [request(3.0)]], slots=2) == [2.0, 5.0]


def test_without_a_free_slot_a_request_waits_for_the_end_of_an_answer():
    clients = [[request(2.0, answer=4.0)], [request(1.0, answer=9.0)], [request(1.0, pause=0.5)]]
    assert least_waits(clients, slots=2) == [2.0, 3.0, 6.5]  # the third begins at 6, when the first has ended


def test_a_pause_counts_from_the_end_of_the_answer_before():
    first, second = [request(2.0, answer=1.0), request(1.0, pause=5.0)], [request(1.0, pause=7.5)]
    assert least_waits([first, second], slots=2) == [2.0, 1.0, 1.5]


# -- workloads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [append(3, 1.0), *WORK.values()], ids=["append", *WORK])
def test_a_workload_is_the_same_every_time(work):
    def requests():
        return [
            (client.name, client.pause, [turn.body() for turn in played(client.script)])
            for phase in work.phases()
            for client in phase.clients
        ]

    found = requests()
    assert found == requests()
    assert all(turns for _, _, turns in found)


def test_a_client_goes_on_in_the_next_phase_where_it_stopped():
    first, second = WORK["beside"].phases()
    (begins,) = played(first.clients[0].script)
    goes_on = played(second.clients[1].script)
    assert goes_on[0].messages[: len(begins.messages)] == begins.messages
    assert len(goes_on) > 1


# -- the table -------------------------------------------------------------------------------------------


def row(ours: float, *, least: float | None = 1.0, **more):
    fixed = {
        "model": "fat-dense", "work": "append", "pause": 0.3, "busy": 0, "stock_seconds": 2.0,
        "ours_seconds": ours, "least_seconds": least, "stock_p95": 1.0, "ours_p95": ours, "stock_stall": 0.2,
        "ours_stall": 0.1 * ours, "stock_engine_bytes": 2**30, "ours_engine_bytes": 2**31,
        "sidecar_bytes": 2**26, "written_bytes": 2**24, "idle": 4,
    }  # fmt: skip
    return fixed | more


def test_the_table_has_the_ratio_of_each_round_and_else_the_worst_round_of_each_workload():
    rounds = [row(3.0), row(2.5, stock_seconds=2.5), row(9.0, busy=2)]
    shown = [dict(zip(COLUMNS, cells, strict=True)) for _, cells in grouped(rounds)]
    assert len(shown) == 2
    assert (shown[0]["stock, s"], shown[0]["ours ÷ stock"]) == ("2.0-2.5", "1.00, 1.50")
    assert (shown[0]["ours ÷ least"], shown[0]["p95, s"]) == ("3.00", "3.00/1.00")
    assert shown[0]["longest stall, ms"] == "300/200"
    assert (shown[0]["engine, GiB"], shown[0]["sidecar, MiB"]) == ("2.00/1.00", "64")


def test_of_more_than_three_rounds_the_least_the_median_and_the_most_are_shown():
    ((_, cells),) = grouped([row(ours) for ours in (2.0, 9.0, 2.4, 2.2, 2.6)])
    assert dict(zip(COLUMNS, cells, strict=True))["ours ÷ stock"] == "1.00, 1.20, 4.50"


def test_the_time_beside_the_prefill_is_that_of_the_round_in_which_it_differs_most():
    rounds = [
        row(2.0),
        row(2.0, ours_beside=0.025, stock_beside=0.015),
        row(2.0, ours_beside=0.03, stock_beside=0.03),
    ]
    ((_, cells),) = grouped(rounds)
    assert dict(zip(COLUMNS, cells, strict=True))["beside prefill, ms"] == "25/15"


def test_a_bound_that_is_unknown_in_a_round_is_shown_as_unknown():
    ((_, cells),) = grouped([row(2.0), row(2.0, least=None)])
    shown = dict(zip(COLUMNS, cells, strict=True))
    assert (shown["ours ÷ least"], shown["stock ÷ least"]) == ("-", "-")


# -- bounds that are missed ------------------------------------------------------------------------------


def test_each_work_above_the_bound_is_named_with_its_worst_median_and_each_other_bound_with_its_worst_work():
    pauses = [row(2.0), row(2.6), row(2.4), row(2.2, pause=2.0)]  # medians of 1.20 and 1.10
    found = [*pauses, row(2.1, work="edits"), row(2.04, work="titles"), row(9.0, busy=2)]
    said = misses.of_waiting(found).splitlines()
    assert said[0].endswith(": `fat-dense` append 1.20, edits 1.05")
    assert said[1].endswith(": `fat-dense` append 2.60")
    assert said[2].endswith(": `fat-dense` append 1.30")
    assert said[3].endswith(": `fat-dense` append 2.60")


def test_a_model_that_meets_a_bound_misses_nothing():
    said = misses.of_waiting([row(1.0, model="fat-swa")]).splitlines()
    assert [line.rpartition(": ")[2] for line in said] == ["`fat-swa` nothing"] * 4


def test_a_figure_that_is_shown_as_the_bound_meets_it():
    assert misses.above(1.02, {"a": 1.0249, "b": 1.0251, "c": 1.5}) == "c 1.50, b 1.03"

"""The priority hints of requests, in headers and in bodies."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from slotkeeper.api.agent_hints import LONGEST_WAIT, Asked, in_body
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.head import MAX_WAIT, PRIORITY, Api
from slotkeeper.api.request import claim
from slotkeeper.scheduler.types import NO_HINTS, Priority, RequestHints, SaidBy

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


def agent(**given: Any) -> dict[str, Any]:
    return {"nvext": {"agent_hints": given}}


def test_a_body_without_hints_gives_neutral_hints():
    assert in_body(Api.CHAT, {"messages": []}) == NO_HINTS
    assert NO_HINTS.neutral


@pytest.mark.parametrize(
    ("given", "priority"),
    [
        ({"priority": 5}, HIGH),
        ({"priority": 0}, NORMAL),
        ({"priority": -1}, LOW),
        ({"strict_priority": 1}, HIGH),
        ({"latency_sensitivity": 1.2}, HIGH),
        ({"latency_sensitivity": 0.0, "priority": -1}, LOW),
    ],
)
def test_agent_hints_set_the_priority(given: dict[str, Any], priority: Priority):
    found = in_body(Api.MESSAGES, agent(**given))
    assert (found.priority, found.said_by) == (priority, SaidBy.AGENT_HINTS)


@pytest.mark.parametrize(
    ("doc", "priority"),
    [
        ({"service_tier": "priority"}, HIGH),
        ({"service_tier": "flex"}, LOW),
        ({"priority": -1}, HIGH),
        ({"priority": 10}, LOW),
        ({"priority": 0}, NORMAL),
    ],
)
def test_service_tier_and_vllm_priority_fields_set_the_priority(doc: dict[str, Any], priority: Priority):
    found = in_body(Api.CHAT, doc)
    assert (found.priority, found.said_by) == (priority, SaidBy.BODY)


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.COMPLETION, Api.INFILL, Api.TASK])
def test_other_apis_ignore_service_tier_and_priority_fields(api: Api):
    assert in_body(api, {"service_tier": "flex", "priority": 10}) == NO_HINTS


@pytest.mark.parametrize("tier", ["auto", "default", "scale", "standard_only", 1, None, ["flex"], {}])
def test_a_service_tier_without_urgency_is_ignored(tier: Any):
    assert in_body(Api.CHAT, {"service_tier": tier}) == NO_HINTS


@pytest.mark.parametrize("value", ["high", None, True, [1], {}, float("nan"), float("inf")])
def test_a_hint_that_is_not_a_number_is_ignored(value: Any):
    names = ("priority", "strict_priority", "latency_sensitivity", "osl")
    assert in_body(Api.CHAT, agent(**dict.fromkeys(names, value))) == NO_HINTS


@pytest.mark.parametrize("nvext", [None, 1, "agent_hints", [], {"agent_hints": None}, {"agent_hints": [1]}])
def test_hints_of_an_unknown_shape_are_ignored(nvext: Any):
    assert in_body(Api.CHAT, {"nvext": nvext}) == NO_HINTS


@pytest.mark.parametrize(("osl", "output"), [(512, 512), (1.5, 1), (0, None), (-1, None), (2**40, None)])
def test_the_expected_answer_length_is_read_from_osl(osl: Any, output: int | None):
    found = in_body(Api.CHAT, agent(osl=osl))
    assert (found.output, found.priority) == (output, NORMAL)


def test_the_next_turn_is_prefetched_unless_the_agent_declines():
    assert in_body(Api.CHAT, agent(speculative_prefill=True)).prefetch
    assert in_body(Api.CHAT, agent(speculative_prefill="no")).prefetch
    assert not in_body(Api.CHAT, agent(speculative_prefill=False)).prefetch


def test_a_claim_has_the_hints_of_its_body():
    assert claim(Api.CHAT, agent(priority=1)).hints.priority is HIGH
    assert claim(Api.MESSAGES, agent(priority=1)).hints.priority is HIGH


# -- headers ---------------------------------------------------------------------------------------------


def asked(
    headers: dict[str, str], body: RequestHints = NO_HINTS, *, aside: bool = False, since: float = 100.0
) -> RequestHints:
    return Asked.by(headers).hints(body, aside=aside, since=since)


@pytest.mark.parametrize("value", ["low", " Low ", "LOW"])
def test_the_priority_header_outweighs_the_body(value: str):
    found = asked({PRIORITY: value}, in_body(Api.CHAT, agent(priority=1, osl=7)))
    assert (found.priority, found.said_by, found.output) == (LOW, SaidBy.HEADER, 7)


@pytest.mark.parametrize("value", ["", "urgent", "1", "high, low"])
def test_a_priority_header_with_an_unknown_value_is_refused(value: str):
    with pytest.raises(ClientFault, match="say high, normal or low") as fault:
        asked({PRIORITY: value})
    assert fault.value.status == 400


def test_a_refusal_does_not_repeat_the_headers_value():
    for header in (PRIORITY, MAX_WAIT):
        with pytest.raises(ClientFault) as fault:
            asked({header: "hunter2"})
        assert "hunter2" not in fault.value.message


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", str(LONGEST_WAIT + 1)])
def test_a_max_wait_header_that_is_not_a_number_of_seconds_is_refused(value: str):
    with pytest.raises(ClientFault, match="a number of seconds"):
        asked({MAX_WAIT: value})


def test_the_max_wait_header_sets_the_latest_start_of_a_request():
    assert asked({}).start_by == inf
    found = asked({MAX_WAIT: "2.5"}, since=100.0)
    assert (found.start_by, found.priority, found.neutral) == (102.5, NORMAL, False)


def test_a_side_request_has_low_priority_unless_its_header_or_body_sets_one():
    assert asked({}, aside=True) == RequestHints(priority=LOW, said_by=SaidBy.SIDE_REQUEST)
    assert asked({PRIORITY: "high"}, aside=True).priority is HIGH
    assert asked({}, in_body(Api.CHAT, agent(priority=0)), aside=True).priority is NORMAL


@pytest.mark.parametrize("most", list(Priority))
@pytest.mark.parametrize("value", list(Priority))
def test_a_request_is_no_more_urgent_than_its_key_allows(value: Priority, most: Priority):
    said = asked({PRIORITY: value.value, MAX_WAIT: "2"}, in_body(Api.CHAT, agent(osl=7)))
    found = said.limited(most)
    assert found.priority.rank == min(value.rank, most.rank)
    assert found.said_by is (SaidBy.HEADER if found == said else SaidBy.KEY)
    assert (found.output, found.start_by) == (said.output, said.start_by)

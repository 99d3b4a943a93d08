"""The priority hints of requests, in headers and in bodies."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from slotkeeper.api.errors import ClientFault
from slotkeeper.api.head import MAX_WAIT, PRIORITY, Api
from slotkeeper.api.request import LONGEST_WAIT, Asked, claim, in_body
from slotkeeper.scheduler.types import NO_HINTS, Priority, RequestHints, SaidBy

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


def agent(**given: Any) -> dict[str, Any]:
    return {"nvext": {"agent_hints": given}}


@pytest.mark.parametrize(
    ("doc", "priority", "said_by"),
    [
        (agent(priority=5), HIGH, SaidBy.AGENT_HINTS),
        (agent(priority=0), NORMAL, SaidBy.AGENT_HINTS),
        (agent(priority=-1), LOW, SaidBy.AGENT_HINTS),
        (agent(strict_priority=1), HIGH, SaidBy.AGENT_HINTS),
        (agent(latency_sensitivity=1.2), HIGH, SaidBy.AGENT_HINTS),
        (agent(latency_sensitivity=0.0, priority=-1), LOW, SaidBy.AGENT_HINTS),
        ({"service_tier": "priority"}, HIGH, SaidBy.BODY),
        ({"service_tier": "flex"}, LOW, SaidBy.BODY),
        ({"priority": -1}, HIGH, SaidBy.BODY),
        ({"priority": 10}, LOW, SaidBy.BODY),
        ({"priority": 0}, NORMAL, SaidBy.BODY),
    ],
)
def test_hints_of_agents_service_tiers_and_vllms_priority_set_the_priority(
    doc: dict[str, Any], priority: Priority, said_by: SaidBy
):
    found = in_body(Api.CHAT, doc)
    assert (found.priority, found.said_by) == (priority, said_by)
    for api in (Api.MESSAGES, Api.COMPLETION, Api.INFILL, Api.TASK):
        assert in_body(api, doc) == (NO_HINTS if said_by is SaidBy.BODY else found)


NUMBERS = ("priority", "strict_priority", "latency_sensitivity", "osl")
TIERS: list[Any] = ["auto", "standard_only", 1, None, ["flex"], {}]
NO_NUMBERS: list[Any] = ["high", None, True, [1], {}, float("nan"), float("inf")]
SHAPES: list[Any] = [None, 1, [], {"agent_hints": None}, {"agent_hints": [1]}]


@pytest.mark.parametrize(
    "doc",
    [
        {"messages": []},
        *({"service_tier": tier} for tier in TIERS),
        *(agent(**dict.fromkeys(NUMBERS, value)) for value in NO_NUMBERS),
        *({"nvext": nvext} for nvext in SHAPES),
    ],
    ids=str,
)
def test_hints_of_an_unknown_shape_are_ignored(doc: dict[str, Any]):
    assert in_body(Api.CHAT, doc) == NO_HINTS
    assert NO_HINTS.neutral


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


@pytest.mark.parametrize(
    ("header", "values", "advice"),
    [
        (PRIORITY, ["", "urgent", "1", "high, low"], "say high, normal or low"),
        (MAX_WAIT, ["", "soon", "-1", "nan", "inf", str(LONGEST_WAIT + 1)], "a number of seconds"),
    ],
)
def test_a_header_with_an_unknown_value_is_refused_without_repeating_it(
    header: str, values: list[str], advice: str
):
    for value in (*values, "hunter2"):
        with pytest.raises(ClientFault, match=advice) as fault:
            asked({header: value})
        assert fault.value.status == 400
        assert "hunter2" not in fault.value.message


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

"""The table of clients: sums that agree with those of all requests, in a bounded number of rows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from slotkeeper.conversation.naming import Name
from slotkeeper.observe.request_record import OTHER, ClientFigures, Clients, Record
from slotkeeper.scheduler.requests.figures import Sums, Usage
from unit.observe.watched import record

ANNA, BERT = "a" * 16 + "/1", "b" * 16 + "/1"


def asked(agent: str, client: str, *, prompt: int = 1000, cached: int = 900, at: float = 0.0) -> Record:
    usage = Usage(prompt=prompt, cached=cached, planted=50)
    return record(
        name=Name(agent), client=client, usage=usage, at=at, oracle=40, reused_seconds=2.0, step_seconds=0.5
    )


def test_each_program_with_a_key_has_a_row_with_the_sums_of_its_requests():
    clients = Clients()
    for one in (asked("opencode", ANNA), asked("opencode", ANNA, at=7.0), asked("codex", ANNA)):
        clients.add(one)
    opencode, codex = (client.shown(now=10.0) for client in clients)
    assert opencode == {
        "agent": "opencode",
        "key": "aaaaaaaa",
        "idle_seconds": 3.0,
        "requests": 2,
        "prompt_tokens": 2000,
        "reused": 1700,
        "prepared": 0,
        "computed": 300,
        "saved_seconds": 3.0,
        "hit_rate": 0.85,
    }
    assert (codex["agent"], codex["requests"]) == ("codex", 1)


def test_two_keys_are_two_clients_and_the_full_key_is_not_shown():
    clients = Clients()
    clients.add(asked("opencode", ANNA))
    clients.add(asked("opencode", BERT))
    assert [client.key for client in clients] == ["aaaaaaaa", "bbbbbbbb"]


def test_a_request_without_figures_is_not_counted():
    clients = Clients()
    clients.add(record(client=ANNA))
    assert list(clients) == []


def test_the_number_of_rows_is_limited_and_the_sums_stay_complete():
    clients, total = Clients(most=3), Sums()
    for number in range(50):
        one = asked(f"agent-{number}", ANNA, cached=900 - number)
        clients.add(one)
        total.add(prompt_tokens=one.usage.prompt, computed=one.usage.computed)
    rows = [client.shown(now=0.0) for client in clients]
    assert [row["agent"] for row in rows[:3]] == ["agent-2", "agent-1", "agent-0"]  # by computed tokens
    assert (rows[3]["agent"], rows[3]["key"], rows[3]["requests"], len(rows)) == (OTHER, OTHER, 47, 4)
    for figure in ("prompt_tokens", "computed"):
        assert sum(row[figure] for row in rows) == getattr(total, figure)


def test_the_metrics_have_the_same_figures_as_the_table():
    clients, registry = Clients(), CollectorRegistry()
    registry.register(ClientFigures(clients))
    clients.add(asked("opencode", ANNA))
    labels = {"agent": "opencode", "key": "aaaaaaaa"}
    value = registry.get_sample_value
    assert value("slotkeeper_client_requests_total", labels) == 1
    assert value("slotkeeper_client_prompt_tokens_total", labels | {"source": "cached"}) == 850
    assert value("slotkeeper_client_prompt_tokens_total", labels | {"source": "computed"}) == 150
    assert value("slotkeeper_client_saved_seconds", labels) == 1.5

"""The last requests on the admin port: a list, a request by its id, and excerpts where they may be kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slotkeeper.admin.admin import LIMIT, MOST, AdminPort
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.naming import Name
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.observe.journal import Journal
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import PromptDivergence, Record
from slotkeeper.observe.sentences import FEW
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.requests.figures import Loss, Lost
from slotkeeper.scheduler.snapshots.budgets import Limits
from unit.observe.watched import record
from unit.runtime.stubs import ENGINE, StubLink

ODD_IDS = ["a/b:c+d=e@f~1", "../../etc", "%2F%41", "ü" * 20, "a b?c#d", "\N{SNOWMAN}/../x", "last one"]


class LetterVocabulary:
    """An engine's vocabulary in which ids are letters."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.trouble = trouble
        self.asked: list[tuple[list[int], dict[str, str]]] = []

    async def detokenize(self, ids: Sequence[int], *, headers: dict[str, str]) -> str:
        self.asked.append((list(ids), headers))
        if self.trouble:
            raise self.trouble
        return "".join(map(chr, ids))

    async def close(self) -> None:
        """Close nothing."""


@asynccontextmanager
async def port(
    *records: Record, size: int = 1000, token: str | None = None, vocabulary: LetterVocabulary | None = None
) -> AsyncIterator[TestClient]:
    """Run the admin port of a sidecar that has served these requests, in their order."""
    journal, link = Journal(size), StubLink()
    client: Any = vocabulary or LetterVocabulary()
    link.client = client
    link.auth = {"Authorization": "Bearer k"}
    for one in records:
        journal.arrived(one)
    driver = Driver({ENGINE: link}, Metrics(), journal=journal)
    app = AdminPort(driver, driver.metrics, token, Limits()).app()
    async with TestClient(TestServer(app)) as client:
        yield client
    await driver.close()


async def listed(client: TestClient, query: str = "") -> list[str]:
    async with client.get(f"/api/requests{query}") as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        return [one["id"] for one in (await answer.json())["requests"]]


async def detail_of(client: TestClient, name: str) -> tuple[int, dict[str, Any]]:
    async with client.get(f"/api/requests/{quote(name, safe='')}") as answer:
        assert answer.content_type == "application/json"
        return answer.status, await answer.json()


# -- the list ------------------------------------------------------------------------------------------


async def test_the_list_has_the_newest_first_and_at_most_the_requested_number():
    async with port(*(record(f"r{n}") for n in range(MOST + 100))) as client:
        newest = [f"r{n}" for n in reversed(range(MOST + 100))]
        assert await listed(client) == newest[:LIMIT]
        assert await listed(client, "?limit=3") == newest[:3]
        assert await listed(client, "?limit=0") == []
        assert await listed(client, "?limit=100000000000000000000") == newest[:MOST]


async def test_the_list_can_be_filtered_by_conversation():
    talks = [record(f"r{n}", conversation=n % 3 or None) for n in range(9)]
    async with port(*talks) as client:
        assert await listed(client, "?conversation=1") == ["r7", "r4", "r1"]
        assert await listed(client, "?conversation=1&limit=2") == ["r7", "r4"]
        assert await listed(client, "?conversation=0") == []


async def test_a_queued_request_is_selected_with_its_conversation():
    waits = record("waits", name=Name("opencode", 1))
    async with port(record("r1", conversation=1), record("r2", conversation=2), waits) as client:
        assert await listed(client, "?conversation=1") == ["waits", "r1"]


async def test_requests_that_computed_tokens_twice_can_be_selected():
    counted = {"prompt_tokens": 2000, "cached": 1000, "oracle": 100}
    twice = record("twice", **counted, lost=Lost(Loss.OVERWRITTEN, FEW + 1))
    hardly = record("hardly", **counted, lost=Lost(Loss.OVERWRITTEN, FEW))
    async with port(twice, hardly, record("once", **counted), record("running")) as client:
        assert await listed(client, "?repeated=1") == ["twice"]
        assert await listed(client, "?repeated=0") == ["running", "once", "hardly", "twice"]
        assert (await detail_of(client, "hardly"))[1]["verdict"] == "nothing twice"


@pytest.mark.parametrize("name", ["limit", "conversation"])
@pytest.mark.parametrize("value", ["-1", "x", "", "1.5", "²", "1 2", "٣"])
async def test_a_parameter_that_is_not_a_number_is_refused_with_an_explanation(name, value):
    async with port(record()) as client:
        answer = await client.get("/api/requests", params={name: value})
        assert answer.status == 400
        assert answer.content_type == "application/json"
        assert name in (await answer.json())["error"]


async def test_a_journal_of_size_0_lists_nothing():
    async with port(record(), size=0) as client:
        assert await listed(client) == []
        assert (await detail_of(client, "last"))[0] == 404


# -- one request -----------------------------------------------------------------------------------------


async def test_a_request_is_found_by_its_id_or_the_end_of_its_id_or_as_the_last():
    async with port(record("abc-11112222"), record("r2"), record("abc-33334444")) as client:
        for name, found in (
            ("abc-11112222", "abc-11112222"),
            ("2222", "abc-11112222"),
            ("r2", "r2"),
            ("last", "abc-33334444"),
            ("abc-33334444", "abc-33334444"),
        ):
            status, document = await detail_of(client, name)
            assert (status, document["id"]) == (200, found)


async def test_the_detail_contains_the_summary_and_more():
    async with port(record("some-request")) as client:
        async with client.get("/api/requests") as answer:
            (line,) = (await answer.json())["requests"]
        _, document = await detail_of(client, "some-request")
    assert line.pop("stages").keys() == document["stages"].keys() == {"read"}  # it is still running
    assert line.pop("to_first_token_seconds") <= document["to_first_token_seconds"]  # so is its wait
    assert {name: document[name] for name in line} == line
    assert document["explanation"] == ["It has not ended yet."]
    assert {"timeline", "choice", "parting", "changes"} <= document.keys() - line.keys()


@pytest.mark.parametrize("name", ["222", "nobody-knows-it", "ABC-11112222", *ODD_IDS])
async def test_an_unknown_id_is_not_found_and_is_named_in_the_error(name):
    async with port(record("abc-11112222")) as client:
        status, document = await detail_of(client, name)
        assert status == 404
        assert "none of the last 1 requests" in document["error"]
        assert name in document["error"]


@pytest.mark.parametrize("name", ODD_IDS)
async def test_an_id_may_contain_any_characters(name):
    async with port(record(name), record("other")) as client:
        status, document = await detail_of(client, name)
        assert (status, document["id"]) == (200, name)


async def test_an_id_that_is_not_valid_utf_8_is_not_found():
    async with port(record()) as client:
        answer = await client.get("/api/requests/%ff%fe%00")
        assert answer.status == 404


async def test_the_request_that_took_the_slot_is_named():
    mine = {"conversation": 1, "engine": ENGINE, "slot": 0}
    async with port(
        record("mine", **mine),
        record("other", conversation=2, engine=ENGINE, slot=0),
        record("again", **mine),
    ) as client:
        assert (await detail_of(client, "again"))[1]["slot_taken_by"] == "other"


# -- access ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/requests", "/api/requests/last", "/api/state", "/api/tree"])
@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret2"])
async def test_without_the_token_no_state_is_shown(path, key):
    async with port(record(), token="s3cret") as client:  # noqa: S106
        refused = await client.get(path, headers={"Authorization": key} if key else {})
        assert refused.status == 401
        assert set(await refused.json()) == {"error"}
        granted = await client.get(path, headers={"Authorization": "Bearer s3cret"})
        assert granted.status == 200


# -- excerpts --------------------------------------------------------------------------------------------


def diverged(*, text: bool, engine: str | None = ENGINE) -> Record:
    was, now = (tuple(map(ord, word)) for word in ("day 21.", "day 22?"))
    divergence = PromptDivergence(
        cause=Cause.DATE,
        section=Section.SYSTEM,
        message=0,
        token=5,
        tokens=100,
        seconds=None,
        rule=None,
        fixed=False,
        was=was if text else (),
        now=now if text else (),
        lead=5,
    )
    return record("parted", divergence=divergence, engine=engine, outcome="ok")


async def test_the_text_around_a_divergence_is_decoded_by_the_engine_if_text_is_kept():
    vocabulary = LetterVocabulary()
    async with port(diverged(text=True), vocabulary=vocabulary) as client:
        _, document = await detail_of(client, "parted")
    assert document["parting"]["text"] == {"lead": "day 2", "was": "1.", "now": "2?"}
    assert {tuple(headers.items()) for _, headers in vocabulary.asked} == {(("Authorization", "Bearer k"),)}


async def test_without_kept_text_the_engine_is_not_asked_to_decode():
    vocabulary = LetterVocabulary()
    async with port(diverged(text=False), record("plain"), vocabulary=vocabulary) as client:
        assert (await detail_of(client, "parted"))[1]["parting"]["text"] is None
        assert (await detail_of(client, "plain"))[1]["parting"] is None
    assert vocabulary.asked == []


async def test_the_list_contains_no_text_and_asks_no_engine():
    vocabulary = LetterVocabulary()
    async with port(diverged(text=True), vocabulary=vocabulary) as client:
        async with client.get("/api/requests") as answer:
            assert "day" not in await answer.text()
    assert vocabulary.asked == []


@pytest.mark.parametrize(
    "trouble", [EngineGoneError("gone"), EngineError(500, "no"), EngineError(401, "key")]
)
async def test_if_the_engine_does_not_answer_only_the_text_is_missing(trouble):
    async with port(diverged(text=True), vocabulary=LetterVocabulary(trouble)) as client:
        status, document = await detail_of(client, "parted")
    assert (status, document["parting"]["text"]) == (200, None)
    assert document["parting"]["cause"] == "date"


@pytest.mark.parametrize("engine", [None, "http://was-here-once"])
async def test_only_the_engine_that_served_the_request_is_asked(engine):
    vocabulary = LetterVocabulary()
    async with port(diverged(text=True, engine=engine), vocabulary=vocabulary) as client:
        assert (await detail_of(client, "parted"))[1]["parting"]["text"] is None
    assert vocabulary.asked == []

"""If a part of the sidecar fails, the request is answered as by the engine alone."""

import asyncio
import re
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import aiohttp
import orjson
import pytest

from chaos.conftest import settings
from chaos.fake_answers import PATHS, looks_whole, request_body
from chaos.fake_engine import Fault
from chaos.fake_http import STREAM_HEAD
from chaos.raw import Head, dial, until
from slotkeeper.api.answers.answer import AnswerReader
from slotkeeper.api.head import Api
from slotkeeper.app import running
from slotkeeper.exchange import exchange
from slotkeeper.observe.journal import Journal
from slotkeeper.scheduler.placement import Placement

CHAT = PATHS[Api.CHAT]


async def ask(data: str, api: Api = Api.CHAT, *, headers: dict[str, str] | None = None, **more: Any) -> Head:
    """Send a streamed request, whose answer must be complete."""
    async with dial(data) as wire:
        await wire.post(PATHS[api], request_body(api, stream=True, **more), headers)
        head = await wire.head()
        assert head.status == 200
        assert looks_whole(api, await wire.body(head))
        return head


@pytest.mark.parametrize("route", ["/apply-template", "/tokenize", "/slots"])
@pytest.mark.parametrize("status", [500, 501])
async def test_requests_are_answered_while_a_control_route_fails(fake, data, route, status):
    fake.broken[route] = status
    async with asyncio.TaskGroup() as group:
        for number, api in product(range(6), PATHS):
            group.create_task(ask(data, api, text=f"{number} green bottles"))
    assert len(fake.ran) >= 6 * len(PATHS)


@pytest.mark.parametrize("route", ["/props", "/slots", "/v1/models", "/tokenize", "/apply-template"])
@pytest.mark.parametrize("status", [401, 500, 501])
async def test_requests_are_answered_if_a_control_route_never_worked(fake, route, status):
    fake.broken[route] = status
    async with running(settings(fake.base, drain_timeout=1.0)) as sidecar, asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(ask(sidecar.addresses[0], text=f"{number} green bottles"))


@contextmanager
def bug(owner: object, name: str):
    """Make a part of the sidecar raise an unexpected exception."""
    with patch.object(owner, name, side_effect=RuntimeError("a bug")) as broken:
        yield broken
    assert broken.called, f"{name} was never called"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (exchange, "prompt_of"),
        (exchange, "with_reply"),
        (AnswerReader, "feed"),
        (AnswerReader, "close"),
        (AnswerReader, "first_token"),
        (Placement, "on"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_a_bug_in_the_sidecar_does_not_fail_an_answer(fake, data, owner, name, monkeypatch):
    monkeypatch.setattr(exchange, "BRIEF_REPLY_TOKENS", 0)  # short replies are learned, too
    with bug(owner, name) as broken:
        for api in PATHS:
            broken.reset_mock()
            await ask(data, api)
            await ask(data, api)
            await until(lambda: broken.called, f"{api} uses it")  # a reply is rendered in idle time
    assert len(fake.ran) >= 2 * len(PATHS)


@pytest.mark.parametrize("name", ["report", "forwarded", "planted"])
async def test_a_bug_in_the_metrics_does_not_fail_an_answer(fake, sidecar, data, name):
    with patch.object(type(sidecar.metrics), name, side_effect=RuntimeError("a bug")):
        await ask(data)
        await ask(data, Api.MESSAGES)
    await ask(data)


@pytest.mark.parametrize("name", ["arrived", "follow", "saw"])
async def test_a_bug_in_the_journal_fails_no_answer_and_holds_no_slot(fake, sidecar, data, name):
    with bug(Journal, name):
        for api in PATHS:
            await ask(data, api)
    head = await ask(data)
    assert head["X-Slotkeeper-Decision"] != "fail_open"
    assert sidecar.metrics.registry.get_sample_value("slotkeeper_fallbacks_total", {"reason": "journal"}) > 0
    async with aiohttp.ClientSession(f"http://{sidecar.addresses[1]}") as admin:
        async with admin.get("/api/requests/last") as answer:
            assert (await answer.json())["outcome"] == "ok"


@pytest.mark.parametrize("cut", [1, 7, 4096])
async def test_an_unreadable_stream_is_forwarded_unchanged(fake, data, cut):
    garbage = b"data: {not json\n\n\xff\xfe\x00data:\r\r\n: \n\ndata: [1,2\n\nevent: \xc3\n\ndata: 7\n\n" * 99
    garbage += b"data: [DONE]\n\n"  # without it the stream has not ended, and is cut
    pieces = [garbage[at : at + cut] for at in range(0, len(garbage), cut)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    fake.script.append(Fault.CUSTOM)
    fake.custom = STREAM_HEAD + chunks + b"0\r\n\r\n"
    async with dial(data) as wire:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        assert await wire.body(await wire.head()) == garbage


async def test_a_bypass_request_is_forwarded_without_a_slot(fake, data):
    head = await ask(data, headers={"X-Slotkeeper-Bypass": "1"})
    assert head["X-Slotkeeper-Decision"] == "bypass"
    assert not head.all("X-Slotkeeper-Slot")
    (heard,) = fake.ran
    assert "id_slot" not in orjson.loads(heard.body)
    assert not heard.header("X-Slotkeeper-Bypass")


async def test_the_slot_in_the_answers_header_is_the_slot_of_the_forwarded_body(fake, data):
    for number in range(6):
        head = await ask(data, text=f"{number} of six stories")
        assert head["X-Request-Id"]
        if slots := head.all("X-Slotkeeper-Slot"):
            assert orjson.loads(fake.ran[-1].body)["id_slot"] == int(slots[0])
        else:
            assert "id_slot" not in orjson.loads(fake.ran[-1].body)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"messages":[' * 2000, b"\xff"],
    ids=["empty", "open", "list", "null", "deep", "bytes"],
)
async def test_an_ambiguous_body_is_refused(fake, sidecar, data, body):
    value = sidecar.metrics.registry.get_sample_value
    reason = "object" if body in {b"[]", b"null"} else "json"
    for number, (api, path) in enumerate(PATHS.items(), 1):
        async with dial(data) as wire:
            await wire.post(path, body)
            head = await wire.head()
            told = orjson.loads(await wire.body(head))
        assert head.status == 400
        assert told["error"]["type"] == "invalid_request_error"
        assert told.get("type") == ("error" if api is Api.MESSAGES else None)
        assert value("slotkeeper_refused_requests_total", {"reason": reason}) == number
        assert value("slotkeeper_requests_total", {"route": api, "outcome": "client_error"}) == 1
    assert not fake.ran


@pytest.mark.parametrize("body", [b'{"messages":7}', b'{"prompt":[1,-1,"x"]}'], ids=["shape", "ids"])
async def test_a_prompt_that_the_sidecar_cannot_parse_is_forwarded_unchanged(fake, data, body):
    for number, path in enumerate(PATHS.values(), 1):
        async with dial(data) as wire:
            await wire.post(path, body)
            assert (await wire.head()).status == 200
        assert len(fake.ran) == number
        assert re.sub(rb'"id_slot":[01],', b"", fake.ran[-1].body) == body


async def test_the_admin_port_answers_while_the_engine_hangs(fake, sidecar, data):
    fake.script.append(Fault.HANG)
    async with dial(data) as wire, aiohttp.ClientSession(f"http://{sidecar.addresses[1]}") as admin:
        await wire.post(CHAT, request_body(Api.CHAT, stream=True))
        for path in ("/livez", "/readyz", "/metrics", "/api/state"):
            async with admin.get(path) as answer:
                assert answer.status == 200


@pytest.mark.parametrize(("status", "outcome"), [(404, "client_error"), (500, "upstream_error")])
async def test_an_error_of_the_engine_on_a_route_without_a_slot_is_counted_as_its_own(
    fake, sidecar, data, status, outcome
):
    fake.broken["/tokenize"] = status
    async with dial(data) as wire:
        await wire.post("/tokenize", b'{"content":"x"}')
        assert (await wire.head()).status == status
    counted = sidecar.metrics.registry.get_sample_value
    await until(lambda: counted("slotkeeper_requests_total", {"route": "other", "outcome": outcome}) == 1)

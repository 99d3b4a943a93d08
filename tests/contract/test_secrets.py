"""A key that a client sends in a wrong place is in no log, record, metric, recording, span, and no `why`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from yarl import URL

from chaos.conftest import ready, settings
from collector import collecting
from slotkeeper.app import running
from slotkeeper.bench import lab
from slotkeeper.observe.log import configure

OWN: Final = "0123456789abcdef-of-somebody"  # does not look like a key
SHAPED: Final = "sk-proj-0123456789abcdefghij"  # looks like a key, but no header or query names it as one
PLACES: Final = (
    {"X-Request-Id": "{key}"},
    {"X-Request-Id": "request-{key}"},
    {"X-Slotkeeper-Conversation": "chat-{key}"},
    {"User-Agent": "{key}"},
    {"User-Agent": "agent/1.0 ({key})"},
    {"X-Session-Id": "{key}", "Thread-Id": "t-{key}"},
    {"X-Title": "{key}", "X-OpenWebUI-User-Id": "{key}"},
    {"Traceparent": "{key}", "Tracestate": "a={key}", "Origin": "http://{key}"},
    {"Traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "Tracestate": "vendor={key}"},
)
SENT_AS: Final = {
    "own, by Authorization": ({"Authorization": f"Bearer {OWN}"}, "", OWN),
    "own, by X-Api-Key": ({"X-Api-Key": OWN}, "", OWN),
    "own, by a cookie": ({"Cookie": f"theme=dark; session={OWN}"}, "", OWN),
    "own, by the query": ({}, f"?api_key={OWN}", OWN),
    "by nothing at all": ({}, "", SHAPED),
}
ROUTES: Final = ("/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/models")
READ_IN_TWO_WAYS: Final = "/v1//chat/{key}"  # the refusal of such a path quotes it


def lines_in(folder: Path) -> list[bytes]:
    return [line for path in folder.iterdir() for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("sent_as", SENT_AS)
async def test_a_clients_key_is_sent_to_the_engine_and_stored_nowhere(
    engine_factory, capsys, tmp_path, sent_as
):
    credentials, query, key = SENT_AS[sent_as]
    engine, traces = engine_factory("tiny-dense"), tmp_path / "traces"
    configure("debug", "json")
    shown = []
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(collecting())
        watched = {"record": traces, "otlp_endpoint": collector.url, "why_text": True}
        sidecar = await stack.enter_async_context(
            running(settings(engine.base, drain_timeout=1.0, **watched))
        )
        await ready(sidecar)
        data, admin = (f"http://{address}" for address in sidecar.addresses)
        async with aiohttp.ClientSession(headers=credentials) as client:
            for number, place in enumerate(PLACES):
                headers = {name: value.format(key=key) for name, value in place.items()}
                said = [f"Task {number}: {text}" for text in (f"the key is {key}.", "none.")]
                body = {"max_tokens": 1, "model": key}
                if key == OWN:  # another key in a body cannot be recognised
                    body |= {"user": key, "metadata": {"user_id": f"u_{key}", "session_id": key}}
                for path, text in product(ROUTES, said):  # the second text diverges from the first
                    messages = [{"role": "user", "content": text}, {"role": "user", "content": "Begin."}]
                    whole = body | {"content": "a", "messages": messages}
                    more: dict[str, Any] = {} if path == "/v1/models" else {"json": whole}
                    method = "POST" if more else "GET"
                    async with client.request(method, data + path + query, headers=headers, **more) as answer:
                        assert answer.status == 200, await answer.text()
                        shown.append(answer.headers["X-Request-Id"])
                    async with client.request(
                        "POST", data + path + query, headers=headers, data=b"{"
                    ) as answer:
                        shown.append(answer.headers["X-Request-Id"])
                where = URL(data + READ_IN_TWO_WAYS.format(key=key) + query, encoded=True)
                async with client.post(where, headers=headers, data=b"{}") as answer:
                    assert answer.status == 400
        await lab.rested(sidecar)
        async with aiohttp.ClientSession(admin) as operator:
            async with operator.get("/api/requests?limit=500") as answer:
                ids = [one["id"] for one in (await answer.json())["requests"]]
            assert len(ids) >= 2 * len(PLACES)
            pages = [
                "/api/requests?limit=500",
                "/api/state",
                "/metrics",
                *(f"/api/requests/{id_}" for id_ in ids),
            ]
            for page in pages:
                openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
                async with operator.get(page, headers=openmetrics) as answer:
                    assert answer.status == 200
                    shown.append(await answer.text())
    heard = capsys.readouterr().err
    assert heard.count('"event":"request"') >= 2 * len(PLACES)
    assert [line for line in heard.splitlines() if key in line] == []
    assert [text for text in shown if key in text] == []
    assert collector.spans
    assert key.encode() not in collector.raw
    written = lines_in(traces)
    assert len(written) >= 2 * len(PLACES)
    if key == OWN:
        assert [line for line in written if key.encode() in line] == []
    else:
        assert [line for line in written if key.encode() in line] == []

"""Bytes that are not HTTP cost a connection and a count: no traceback, no quote, no log line for each."""

from __future__ import annotations

import orjson
import pytest

from chaos.conftest import ready, settings
from chaos.raw import dial
from slotkeeper.app import Sidecar, running
from slotkeeper.observe.log import configure

KEY = b"sk-of-somebody-0123456789"
HEAD = b"Host: x\r\nX-Api-Key: " + KEY + b"\r\n"
NO_HTTP = {
    "garbage": b"\x00\x01\x02 " + KEY + b"\r\n\r\n",
    "a method": b"G@T /?key=" + KEY + b" HTTP/1.1\r\n" + HEAD + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 300,
    "a version": b"GET / HTTP/9.9\r\n" + HEAD + b"\r\n",
    "a target": b"GET http://[" + KEY + b" HTTP/1.1\r\n" + HEAD + b"\r\n",
    "a target's bytes": b"GET /?key=" + KEY + b"\xff HTTP/1.1\r\n" + HEAD + b"\r\n",
    "a header's name": b"GET / HTTP/1.1\r\n" + HEAD + b"X " + KEY + b": b\r\n\r\n",
    "a header's size": b"GET / HTTP/1.1\r\n" + HEAD + b"X-A: " + KEY + b"a" * 200_000 + b"\r\n\r\n",
    "a length": b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: " + KEY + b"\r\n\r\n",
    "two framings": b"POST / HTTP/1.1\r\n"
    + HEAD
    + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a chunk": b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + KEY + b"\r\n\r\n",
}
TIMES = 10


def malformed(sidecar: Sidecar) -> float:
    value = sidecar.metrics.registry.get_sample_value
    return value("slotkeeper_connections_cut_total", {"reason": "malformed"}) or 0.0


@pytest.mark.parametrize("port", [0, 1], ids=["data", "admin"])
async def test_a_malformed_request_is_refused_counted_and_logged_once(fake, capsys, port):
    configure("info", "json")
    async with running(settings(fake.base, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        for name, sent in NO_HTTP.items():
            before = malformed(sidecar)
            for _ in range(TIMES):
                async with dial(sidecar.addresses[port]) as wire:
                    await wire.send(sent)
                    assert (await wire.head()).status == 400, name
            assert malformed(sidecar) == before + TIMES, name
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert KEY.decode() not in said
    lines = [orjson.loads(line) for line in said.splitlines()]
    (told,) = [line for line in lines if line["event"] == "malformed_request"]
    assert (told["level"], told["error"], told["client"]) == ("warning", "BadHttpMethod", "127.0.0.1")
    assert [line["event"] for line in lines if line["level"] == "error"] == []


async def test_a_malformed_request_does_not_disturb_other_clients(data):
    async with dial(data) as bad, dial(data) as good:
        await bad.send(b"\x00\r\n\r\n")
        await good.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]})
        head = await good.head()
        assert head.status == 200
        assert (await bad.head()).status == 400
        assert b"choices" in await good.body(head)


async def test_a_page_of_another_origin_can_read_our_errors(data):
    """llama-server names the origin in every answer; without it a browser hides the answer from the page."""
    async with dial(data) as wire:
        await wire.post("/v1/chat/completions", b"{", {"Origin": "http://page.example"})
        head = await wire.head()
    assert (head.status, head["Access-Control-Allow-Origin"]) == (400, "http://page.example")

"""`make soak` detects errors, wrong words, and leaks."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from chaos import soak
from chaos.fake_answers import PATHS, answer_body, answer_events
from chaos.soak import Heard, Standing, Step, Verdict, judged
from slotkeeper.api.head import Api
from slotkeeper.engine.client import KEPT

SAID = "one two three four"
SHAPES = pytest.mark.parametrize("api", PATHS)
STANDING = Standing(memory_kib=100_000, descriptors=40, sockets=20, kept=2, tasks=12)


def said(api: Api, *, text: str = SAID) -> Step:
    return Step(api=api, body={}, text=text)


def heard(data: bytes, *, status: int = 200, left: bool = False, failure: str = "") -> Heard:
    return Heard(began=10.0, status=status, data=bytearray(data), left=left, failure=failure)


@SHAPES
def test_a_correct_answer_is_ok_and_any_other_text_is_wrong(api):
    stream, whole = b"".join(answer_events(api, 9, 0)), answer_body(api, 9, 0)
    for data, streamed in ((stream, True), (whole, False)):
        assert judged(said(api), heard(data), streamed=streamed, killed=0) is Verdict.OK
        for other in ("one two three", SAID + " five", "one too three four"):
            step = said(api, text=other)
            assert judged(step, heard(data), streamed=streamed, killed=11) is Verdict.WRONG


@SHAPES
def test_an_incomplete_stream_is_an_error_unless_a_kill_explains_it(api):
    half = b"".join(answer_events(api, 9, 0)[:3])
    for killed, verdict in ((0.0, Verdict.ERROR), (11.0, Verdict.BROKEN)):
        assert judged(said(api), heard(half, failure="cut"), streamed=True, killed=killed) is verdict
    assert judged(said(api), heard(b": waiting\n\n"), streamed=True, killed=11.0) is Verdict.ERROR
    assert judged(said(api), heard(half, left=True), streamed=True, killed=0) is Verdict.LEFT
    wrong = said(api, text="one five")
    assert judged(wrong, heard(half, left=True), streamed=True, killed=11.0) is Verdict.WRONG


def test_a_refusal_is_an_error_even_during_a_kill():
    refused = heard(orjson.dumps({"error": {}}), status=503)
    assert judged(said(Api.CHAT), refused, streamed=True, killed=11.0) is Verdict.ERROR


@pytest.mark.parametrize(
    ("name", "room"),
    [("descriptors", 0), ("sockets", 0), ("tasks", 0), ("memory_kib", soak.GROWTH_KIB), ("kept", KEPT)],
)
def test_more_than_the_allowed_growth_is_a_leak(name, room):
    allowed = replace(STANDING, **{name: getattr(STANDING, name) + room})
    more = replace(allowed, **{name: getattr(allowed, name) + 1})
    assert allowed.leaks(STANDING) == STANDING.leaks(more) == []
    assert more.leaks(STANDING)


def test_connections_to_a_port_are_distinguished_from_others():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as one:
            own = {f"socket:[{os.fstat(one.fileno()).st_ino}]"}
            assert soak.connections(Path("/proc/self/net/tcp"), address[1]) == own

"""What a client hears while its request waits: its place, the work in its slot, how much is computed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from engine.test_engine_waits import CHAT, ENDLESS
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny

pytestmark = pytest.mark.one_in(4)

ONE_SLOT = ("-np", "1")
LONG = "night and day " * 5000  # many comments, while it is computed in batches of 64 tokens


@pytest.fixture
async def sidecar(build, tmp_path) -> AsyncIterator[Sidecar]:
    opening = lab.tiny_engine(
        Tiny.HYBRID, build, tmp_path, *ONE_SLOT, "-b", "64", "-ub", "64", context_tokens=65536
    )
    async with opening as engine, lab.keeping(engine, keep_alive=0.05) as sidecar:
        yield sidecar


@pytest.fixture
async def client(sidecar) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        yield client


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True, **more}


async def heard_while_queued(sidecar, client, body: dict[str, Any], **headers: str) -> bytes:
    """Return what a client gets that waits behind another client's answer, until all is over."""
    async with client.post(CHAT, json=said("Who is first?", **ENDLESS)) as first:
        await first.content.readany()
        async with client.post(CHAT, json=body, headers=headers) as second:
            heard = bytearray()
            while heard.count(b"queued") < 2:
                heard += await second.content.readany()
            first.close()  # leaves the slot
            return bytes(heard + await second.read())


async def test_comments_say_the_place_in_the_queue_and_then_how_much_is_computed(sidecar, client):
    heard = await heard_while_queued(sidecar, client, said(LONG))
    comments = [line for line in heard.split(b"\n") if line.startswith(b": waiting: ")]
    assert comments[0] == b": waiting: queued, place 1: all slots are busy"
    assert any(re.match(rb": waiting: prefill \d+ %", line) for line in comments)
    assert heard.endswith(b"data: [DONE]\n\n")
    assert b"prompt_progress" not in heard


async def test_a_client_that_asks_for_the_engines_progress_gets_events_of_that_shape(sidecar, client):
    heard = await heard_while_queued(sidecar, client, said(LONG, return_progress=True))
    events = [orjson.loads(line[6:]) for line in heard.split(b"\n") if line.startswith(b"data: {")]
    ours = [event for event in events if "slotkeeper" in event]
    theirs = next(event for event in events if "prompt_progress" in event and "slotkeeper" not in event)
    assert ours[0]["slotkeeper"]["doing"] == "queued"
    assert ours[0]["slotkeeper"]["place"] == 1
    assert ours[0]["slotkeeper"]["behind"] == [], "no request of another client is named"
    assert ours[0]["object"] == theirs["object"]
    assert ours[0]["choices"] == theirs["choices"]
    assert events.index(theirs) > events.index(ours[-1])


async def test_a_header_asks_for_comments_each_second(build, tmp_path):
    async with (
        lab.tiny_engine(Tiny.HYBRID, build, tmp_path, *ONE_SLOT, context_tokens=65536) as engine,
        lab.keeping(engine) as sidecar,  # without the header: after ten seconds
        aiohttp.ClientSession(lab.url_of(sidecar)) as client,
    ):
        header = {"X-Slotkeeper-Progress": "1"}
        heard = await heard_while_queued(sidecar, client, said("Who is second?"), **header)
        assert heard.startswith(b": waiting: queued")

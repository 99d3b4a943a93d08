"""What a waiting client receives, without sockets; with them: tests/chaos/test_waiting_client.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from patience import PATIENCE
from slotkeeper.api.answers.answer import SseSplitter
from slotkeeper.api.errors import ClientFault, UpstreamFault, body, retold, sse
from slotkeeper.api.head import Api
from slotkeeper.exchange.exchange import Waiting
from slotkeeper.runtime.tasks import Tasks

SHORT = 0.001

WAITING = b": waiting\n\n"


class Response:
    """A client's answer, which records every write until the client disconnects."""

    def __init__(self, *, takes: int) -> None:
        self.takes = takes
        self.written: list[bytes] = []
        self.full = asyncio.Event()

    async def write(self, data: bytes) -> None:
        if len(self.written) == self.takes:
            raise aiohttp.ClientConnectionResetError
        self.written.append(data)
        if len(self.written) == self.takes:
            self.full.set()


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    failed: list[BaseException] = []
    tasks = Tasks(failed.append)
    yield tasks
    await tasks.close()
    assert not failed


async def fewer(tasks: Tasks, left: int) -> None:
    """Wait until at most `left` tasks run."""
    async with asyncio.timeout(PATIENCE):
        while len(tasks) > left:
            await asyncio.sleep(SHORT)


def waiting(tasks: Tasks, response: Any) -> Waiting:
    waits = Waiting(None, "id", tasks, seconds=SHORT, labels=dict, says=lambda: WAITING)
    waits.opened = response
    return waits


async def test_a_failed_write_to_a_client_ends_its_request(tasks):
    gone = Response(takes=2)

    async def request() -> None:
        waiting(tasks, gone).start()
        await asyncio.Event().wait()

    task = tasks.start(request())
    await asyncio.wait({task}, timeout=PATIENCE)
    assert task.cancelled()
    assert gone.written == [WAITING, WAITING]
    assert not len(tasks)


async def test_without_a_time_between_comments_there_are_none(tasks):
    waits = Waiting(None, "id", tasks, seconds=0, labels=dict, says=lambda: WAITING)
    waits.start()
    assert not len(tasks)
    waits.stop()


async def test_a_request_that_is_already_being_cancelled_is_left_to_its_cleanup(tasks):
    gone, cleaned = Response(takes=1), asyncio.Event()

    async def request() -> None:
        waiting(tasks, gone).start()
        try:
            await asyncio.Event().wait()
        finally:
            await fewer(tasks, 1)
            cleaned.set()

    task = tasks.start(request())
    await gone.full.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cleaned.is_set()


async def test_keep_alive_comments_end_with_the_first_bytes_of_the_answer(tasks):
    response = Response(takes=1000)
    talk = waiting(tasks, response)
    talk.start()
    while not response.written:
        await asyncio.sleep(SHORT)
    assert talk.ends_with(b"") == b""
    assert len(tasks), "nothing went on: it still waits"
    assert talk.ends_with(b"data: 1\n\n") == b"data: 1\n\n"
    heard = len(response.written)
    await fewer(tasks, 0)
    assert len(response.written) == heard


@pytest.mark.parametrize(
    ("passing", "begun"),
    [
        (b":\n\n", False),
        (b": ping\n\n: ping\n\n", False),
        (b": pi", True),  # a comment of ours would stand in the middle of it
        (b": ping\n", True),
        (b":\n\ndata: 1\n\n", True),
        (b": ping\ndata: 1\n\n", True),
        (b"{}", True),
    ],
)
async def test_whole_comments_of_the_engine_do_not_begin_its_answer(tasks, passing, begun):
    talk = waiting(tasks, Response(takes=1000))
    assert talk.ends_with(passing) == passing
    assert talk.begun == begun


async def test_waiting_again_continues_one_wait_that_ends_with_the_answer(tasks):
    """A request is sent again if its engine ends before it sends anything."""
    response = Response(takes=1000)
    talk = waiting(tasks, response)
    talk.start()
    talk.start()
    while not response.written:
        await asyncio.sleep(SHORT)
    talk.ends_with(b"data: 1\n\n")
    heard = len(response.written)
    await fewer(tasks, 0)
    assert len(response.written) == heard, "a comment may stand between two pieces of one event"


async def test_the_response_head_has_the_known_labels_and_comments_add_later_ones(tasks):
    known = {"X-Slotkeeper-Decision": "prefix", "X-Slotkeeper-Slot": "1"}
    request = make_mocked_request("POST", "/", {"Origin": "http://page.example"})
    talk = Waiting(request, "id", tasks, seconds=SHORT, labels=lambda: known, says=lambda: WAITING)

    async def wait() -> None:
        talk.start()
        while talk.opened is None:
            await asyncio.sleep(SHORT)
        talk.stop()

    await tasks.start(wait())
    head = talk.opened.headers
    assert (head["X-Slotkeeper-Decision"], head["X-Slotkeeper-Slot"]) == ("prefix", "1")
    assert (head["X-Request-Id"], head["Access-Control-Allow-Origin"]) == ("id", "http://page.example")
    known |= {"X-Slotkeeper-Slot": "0", "X-Slotkeeper-Predicted": "7"}  # another engine serves it now
    assert await talk.accept(None) is talk.opened
    write: Any = request._payload_writer.write
    (late,) = write.call_args.args
    assert late == b": X-Slotkeeper-Slot: 0\n: X-Slotkeeper-Predicted: 7\n\n"


TOO_LONG = {"code": 400, "message": "x", "type": "exceed_context_size_error", "n_ctx": 8}


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (400, {"error": TOO_LONG}, ClientFault("x", type="exceed_context_size_error")),
        (
            401,
            {"type": "error", "error": {"type": "a", "message": "x"}},
            ClientFault("x", status=401, type="a"),
        ),
        (503, {"error": {"message": "Loading model"}}, UpstreamFault("Loading model", status=503)),
        (500, {"error": {"message": 7}}, UpstreamFault('{"error":{"message":7}}', status=500)),
        (404, {"error": "File Not Found"}, ClientFault('{"error":"File Not Found"}', status=404)),
        (404, ["no object"], ClientFault('["no object"]', status=404)),
        (502, b"Bad Gateway", UpstreamFault("Bad Gateway")),
        (502, b"", UpstreamFault("the engine answered 502")),
        (502, b"\x1f\x8b\xff", UpstreamFault("the engine answered 502")),
        (502, b"x" * 10**6, UpstreamFault("x" * 2000)),
    ],
    ids=[
        "fields",
        "anthropic",
        "503",
        "a number",
        "a text",
        "no object",
        "not JSON",
        "empty",
        "bytes",
        "long",
    ],
)
def test_an_error_of_the_engine_keeps_its_text_and_fields(status, said, expected):
    fault = retold(status, said if isinstance(said, bytes) else orjson.dumps(said))
    assert repr(fault) == repr(expected)
    more = orjson.loads(body(fault, Api.CHAT))["error"]
    assert more.get("n_ctx") == (8 if status == 400 else None)


def test_an_error_passed_on_in_a_stream_has_the_shape_of_its_api():
    fault = retold(400, b'{"error":{"code":400,"message":"too long","type":"t","n_ctx":8}}')
    (event,) = SseSplitter().feed(sse(fault, Api.MESSAGES))
    assert event.name == "error"
    assert orjson.loads(event.data)["error"] == {"type": "invalid_request_error", "message": "too long"}
    (event,) = SseSplitter().feed(sse(fault, Api.CHAT))
    assert orjson.loads(event.data)["error"]["n_ctx"] == 8

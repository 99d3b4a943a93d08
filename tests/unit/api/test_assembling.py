"""Whole answers that are made of streams. tests/engine/test_assembling.py compares them with real ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.answers.assembling import NOT_FROM_STREAMS, Assembler, WholeAnswer, as_stream
from slotkeeper.api.head import Api
from slotkeeper.api.request import can_assemble, parse

ASKED: Final[dict[Api, dict[str, Any]]] = {
    Api.CHAT: {"messages": [{"role": "user", "content": "a"}]},
    Api.COMPLETION: {"prompt": "a"},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    Api.RESPONSES: {"input": "a"},
}
HEAD = {"created": 7, "id": "c1", "model": "m", "system_fingerprint": "b1"}


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"finish_reason": finish, "index": 0, "delta": delta}
    return {"choices": [choice], **HEAD, "object": "chat.completion.chunk"}


def called(index: int, arguments: str, **begins: str) -> dict[str, Any]:
    name = {"name": begins["name"]} if begins else {}
    more = {"id": begins["id"], "type": "function"} if begins else {}
    return {"tool_calls": [{"index": index, **more, "function": {**name, "arguments": arguments}}]}


CHAT = [
    chunk({"role": "assistant", "content": None}),
    chunk({"reasoning_content": "Well"}),
    chunk({"content": "A "}),
    chunk({"content": "é"}),
    chunk(called(0, "", name="ls", id="t1")),
    chunk(called(0, '{"a":')),
    chunk(called(0, "1}")),
    chunk({}, "tool_calls"),
    {"choices": [], **HEAD, "object": "chat.completion.chunk", "usage": {"total_tokens": 9}},
]


def stream(events: list[dict[str, Any]], done: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + done


def assembled(api: Api, *chunks: bytes) -> WholeAnswer | None:
    made = Assembler(api)
    for piece in chunks:
        made.feed(piece)
    return made.close()


@given(places=st.lists(st.integers(0, 2000)))
def test_chunk_boundaries_do_not_change_an_assembled_chat_answer(places):
    text = stream(CHAT)
    at = sorted({0, len(text), *(place % len(text) for place in places)})
    whole = assembled(Api.CHAT, *(text[begin:end] for begin, end in pairwise(at)))
    assert whole
    assert whole.status == 200
    call = {"type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}, "id": "t1"}
    message = {"role": "assistant", "content": "A é", "reasoning_content": "Well", "tool_calls": [call]}
    assert orjson.loads(whole.body) == {
        "choices": [{"finish_reason": "tool_calls", "index": 0, "message": message}],
        **HEAD,
        "object": "chat.completion",
        "usage": {"total_tokens": 9},
    }


@pytest.mark.parametrize("missing", [CHAT[:-1], CHAT[:-2] + CHAT[-1:], []], ids=["figures", "end", "all"])
def test_an_incomplete_stream_gives_no_assembled_answer(missing):
    assert assembled(Api.CHAT, stream(missing)) is None


@pytest.mark.parametrize("api", ASKED)
@pytest.mark.parametrize("events", [b'data: {"a":1}\n\n', b"data: proxy error\n\n", b"data: [1]\n\n", b""])
def test_a_stream_of_an_unknown_shape_gives_no_assembled_answer(api, events):
    assert assembled(api, events, b"data: [DONE]\n\n") is None


ERROR = {"code": 400, "message": "no", "type": "invalid_request_error"}


@pytest.mark.parametrize("api", ASKED)
@pytest.mark.parametrize(
    "event", [b"data: " + orjson.dumps({"error": ERROR}), b"event: error\ndata: " + orjson.dumps(ERROR)]
)
def test_an_error_in_a_stream_becomes_the_answer(api, event):
    whole = assembled(api, event + b"\n\n")
    assert whole
    assert (whole.status, orjson.loads(whole.body)) == (400, {"error": ERROR})


@pytest.mark.parametrize("error", [{"message": "no"}, {"code": 7000}, {"code": "E1"}, "no", [1]])
def test_an_error_without_a_status_gets_status_500(error):
    whole = assembled(Api.CHAT, b"data: " + orjson.dumps({"error": error}) + b"\n\n")
    assert whole
    assert whole.status == 500


@pytest.mark.parametrize("api", ASKED)
def test_the_sent_body_requests_a_stream_and_changes_nothing_else(api):
    body = orjson.dumps({**ASKED[api], "stream": False, "seed": 1})
    asked = orjson.loads(as_stream(body, api, progress=True))
    usage = {"stream_options": {"include_usage": True}} if api is Api.CHAT else {}
    assert asked == {**ASKED[api], "seed": 1, "stream": True, "return_progress": True, **usage}


@pytest.mark.parametrize("api", ASKED)
@pytest.mark.parametrize("field", sorted(NOT_FROM_STREAMS | {"n"}))
def test_a_request_for_fields_that_streams_lack_is_left_to_the_engine(api, field):
    assert can_assemble(parse(api, orjson.dumps(ASKED[api])))
    dropped = api is Api.MESSAGES and field == "n"  # the engine does not read it there
    assert can_assemble(parse(api, orjson.dumps({**ASKED[api], field: 2}))) == dropped
    assert not can_assemble(parse(api, orjson.dumps({**ASKED[api], "stream": True})))


def test_arguments_that_are_not_json_become_an_empty_object_as_in_the_engine():
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"content": [], "usage": {"output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "input_json_delta", "partial_json": '{"a'},
        },
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]
    whole = assembled(Api.MESSAGES, stream(events, b""))
    assert whole
    assert orjson.loads(whole.body) == {
        "content": [{"type": "tool_use", "input": {}}],
        "usage": {"output_tokens": 3},
        "stop_reason": "max_tokens",
    }

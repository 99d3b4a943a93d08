import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.answers.answer import Answer, AnswerReader
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.head import Api

TIMINGS = {
    "cache_n": 176,
    "prompt_n": 4,
    "prompt_ms": 2.5,
    "predicted_n": 3,
    "predicted_ms": 7,
    "predicted_per_second": 1,
}
USAGE = {"prompt_tokens": 180, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 176}}
WHOLE = Figures(
    prompt_tokens=180,
    computed=4,
    cached=176,
    generated=3,
    slot=None,
    prefill_ms=2.5,
    generate_ms=7.0,
    draft=None,
    draft_accepted=None,
)
COUNTED = Figures(prompt_tokens=180, computed=4, cached=176, generated=3)
CALL = {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
REPLY = {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [CALL]}


def event(document, name=None):
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {document if isinstance(document, str) else json.dumps(document)}\n\n"


def native(index, *, stop, **fields):
    of = {} if index is None else {"index": index}
    return event({**of, "content": "a", "stop": stop, **fields})


def delta(**fields):
    return event({"choices": [{"index": 0, "finish_reason": None, "delta": fields}]})


def typed(kind, **fields):
    return event({"type": kind, **fields}, kind)


def block(index, **content):
    return typed("content_block_start", index=index, content_block=content)


def block_delta(index, kind, **fields):
    return typed("content_block_delta", index=index, delta={"type": kind, **fields})


CHAT_STREAM = [
    event({"choices": [], "prompt_progress": {"total": 180, "cache": 176, "processed": 176, "time_ms": 0}}),
    ":\n\n",
    delta(role="assistant", content=None),
    delta(reasoning_content="h"),
    delta(reasoning_content="m"),
    delta(content="Look."),
    delta(tool_calls=[{**CALL, "index": 0, "function": {"name": "ls", "arguments": '{"a"'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    event({"choices": [{"index": 0, "finish_reason": "tool_calls", "delta": {}}]}),
    event({"choices": [], "usage": USAGE, "timings": TIMINGS}),
    event("[DONE]"),
]
MESSAGES_STREAM = [
    typed(
        "message_start",
        message={
            "content": [],
            "usage": {"cache_read_input_tokens": 176, "input_tokens": 4, "output_tokens": 0},
        },
    ),
    typed("ping"),
    block(0, type="thinking", thinking=""),
    block_delta(0, "thinking_delta", thinking="hm"),
    block_delta(0, "signature_delta", signature=""),
    typed("content_block_stop", index=0),
    block(1, type="text", text=""),
    block_delta(1, "text_delta", text="Look."),
    block(2, type="tool_use", id="t1", name="ls", input={}),
    block_delta(2, "input_json_delta", partial_json='{"a"'),
    block_delta(2, "input_json_delta", partial_json=": 1}"),
    typed("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 3}),
    typed("message_stop"),
]
OUTPUT: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Look."}],
    },
    {"type": "function_call", "id": "fc", "call_id": "t1", "name": "ls", "arguments": '{"a": 1}'},
    {"type": "web_search_call", "id": "w"},
]
RESPONSES_USAGE = {"input_tokens": 180, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 176}}
RESPONSES_DELTAS = [
    typed("response.created", response={"status": "in_progress"}),
    typed("response.output_item.added", item={"type": "reasoning", "id": "rs"}),
    typed("response.reasoning_text.delta", delta="hm", item_id="rs"),
    typed("response.output_text.delta", delta="Look.", item_id="m"),
    typed("response.output_text.done", text="Look."),
    typed("response.output_item.added", item={**OUTPUT[2], "arguments": ""}),
    typed("response.function_call_arguments.delta", delta='{"a": 1}', item_id="fc"),
    typed("response.output_item.done", item=OUTPUT[2]),
]
RESPONSES_STREAM = [
    *RESPONSES_DELTAS,
    typed("response.completed", response={"output": OUTPUT, "usage": RESPONSES_USAGE}, timings=TIMINGS),
]
COMPLETION_STREAM = [
    event("null"),
    native(0, stop=False, content="Lo", tokens=[5], id_slot=-1, tokens_evaluated=180),
    native(1, stop=False, content="another", tokens=[5], id_slot=-1),
    native(0, stop=False, content="ok.", tokens=[6], id_slot=-1, tokens_evaluated=180),
    native(None, stop=True, content="", id_slot=1, tokens_evaluated=180, tokens_predicted=3, timings=TIMINGS),
]
COMPLETIONS_STREAM = [
    event({"choices": [{"text": "Lo", "index": 0}]}),
    event({"choices": [{"text": "another", "index": 1}]}),
    event({"choices": [{"text": "ok.", "index": 0}]}),
    event(
        {"choices": [{"text": "", "index": 0, "finish_reason": "stop"}], "usage": USAGE, "timings": TIMINGS}
    ),
    event("[DONE]"),
]

SAID = {"role": "assistant", "content": "Look."}
AT_SLOT_1 = Figures(**{name: getattr(WHOLE, name) for name in WHOLE.__slots__ if name != "slot"}, slot=1)
STREAMS: dict[Api, Any] = {
    Api.CHAT: (CHAT_STREAM, WHOLE, REPLY),
    Api.MESSAGES: (MESSAGES_STREAM, COUNTED, REPLY),
    Api.RESPONSES: (RESPONSES_STREAM, WHOLE, REPLY),
    Api.COMPLETION: (COMPLETION_STREAM, AT_SLOT_1, SAID),
    Api.COMPLETIONS: (COMPLETIONS_STREAM, WHOLE, SAID),
}
BODIES: dict[Api, Any] = {
    Api.CHAT: (
        {"choices": [{"index": 0, "message": REPLY}], "usage": USAGE, "timings": TIMINGS},
        WHOLE,
        REPLY,
    ),
    Api.MESSAGES: (
        {
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"a": 1}},
            ],
            "usage": {"cache_read_input_tokens": 176, "input_tokens": 4, "output_tokens": 3},
        },
        COUNTED,
        {**REPLY, "tool_calls": [{**CALL, "function": {"name": "ls", "arguments": '{"a":1}'}}]},
    ),
    Api.RESPONSES: ({"output": OUTPUT, "usage": RESPONSES_USAGE}, COUNTED, REPLY),
    Api.COMPLETION: (
        {"content": "Look.", "id_slot": 1, "tokens_evaluated": 180, "timings": TIMINGS},
        AT_SLOT_1,
        SAID,
    ),
    Api.COMPLETIONS: ({"choices": [{"text": "Look."}], "usage": USAGE, "timings": TIMINGS}, WHOLE, SAID),
}


def read(api, *chunks, stream=True, status=200):
    reader = AnswerReader(api, stream=stream, status=status)
    for chunk in chunks:
        reader.feed(chunk if isinstance(chunk, bytes) else chunk.encode())
    return reader.close()


@pytest.mark.parametrize("api", STREAMS)
def test_a_stream_gives_the_engines_figures_and_the_reply(api):
    stream, figures, reply = STREAMS[api]
    answer = read(api, *stream)
    assert answer == Answer(figures=figures, reply=reply, complete=True, error=None)
    assert answer.calls_tools is ("tool_calls" in reply)


@pytest.mark.parametrize("api", BODIES)
def test_a_body_gives_the_engines_figures_and_the_reply(api):
    body, figures, reply = BODIES[api]
    found = read(api, json.dumps(body), stream=False)
    assert found == Answer(figures=figures, reply=reply, complete=True, error=None)


@given(api=st.sampled_from(list(STREAMS)), cuts=st.lists(st.integers(0, 3000), max_size=30))
def test_chunk_boundaries_do_not_change_the_answer(api, cuts):
    whole = "".join(STREAMS[api][0]).encode()
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    assert read(api, *(whole[a:b] for a, b in pairwise(places))) == read(api, whole)


KEYS = """
choices delta message index usage timings content type output response content_block item tool_calls function
error text
"""


@given(
    api=st.sampled_from(list(Api)),
    stream=st.booleans(),
    status=st.sampled_from([200, 400, 500]),
    data=st.data(),
)
def test_reading_an_answer_never_raises(api, stream, status, data):
    keys = st.sampled_from(KEYS.split())
    kinds = st.sampled_from(
        ["message_start", "content_block_start", "response.completed", "error", "tool_use"]
    )
    leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | kinds
    values = st.recursive(
        leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=4), max_leaves=20
    )
    document = data.draw(values)
    chunks = [
        json.dumps(document),
        event(document),
        event(document, data.draw(kinds)),
        data.draw(st.binary()),
    ]
    reader = AnswerReader(api, stream=stream, status=status)
    for chunk in data.draw(st.permutations(chunks)):
        reader.feed(chunk if isinstance(chunk, bytes) else chunk.encode())
        assert reader.first_token() in {True, False}
    assert isinstance(reader.close(), Answer)


@pytest.mark.parametrize(
    ("api", "silent"),
    [(Api.CHAT, 3), (Api.MESSAGES, 3), (Api.RESPONSES, 2), (Api.COMPLETION, 1), (Api.COMPLETIONS, 0)],
)
def test_the_first_token_is_the_first_event_with_content_or_tokens(api, silent):
    reader, seen = AnswerReader(api, stream=True), []
    for chunk in STREAMS[api][0]:
        seen.append(reader.first_token())
        reader.feed(chunk.encode())
    assert seen.index(True) == silent + 1
    empty = AnswerReader(Api.COMPLETION, stream=True)
    empty.feed(event({"content": "", "tokens": [7], "stop": False}).encode())
    assert empty.first_token()


def test_the_first_byte_of_a_body_is_its_first_token_unless_the_request_failed():
    for status, expected in ((200, True), (500, False)):
        reader = AnswerReader(Api.CHAT, stream=False, status=status)
        reader.feed(b"")
        assert not reader.first_token()
        reader.feed(b"{")
        assert reader.first_token() is expected


@pytest.mark.parametrize("api", STREAMS)
def test_a_stream_that_breaks_off_within_its_last_event_is_not_complete(api):
    whole = "".join(STREAMS[api][0]).rstrip("\n")
    last = len(whole) - len(STREAMS[api][0][-1].rstrip("\n"))
    for end in range(last, len(whole)):
        broken = read(api, whole[:end])
        assert (broken.complete, broken.error, broken.calls_tools) == (False, None, None)


def test_the_stream_of_several_native_answers_is_complete_with_the_last_of_them():
    one, other = ([native(n, stop=False), native(n, stop=True)] for n in (0, 1))
    for whole in ([one[0], other[0], one[1], other[1]], [one[0], other[0], other[1], one[1]]):
        assert read(Api.COMPLETION, *whole).complete
        assert not read(Api.COMPLETION, *whole[:-1]).complete


def test_the_reply_of_a_broken_responses_stream_is_built_from_its_deltas():
    assert read(Api.RESPONSES, *RESPONSES_DELTAS).reply == REPLY


def test_a_stream_without_its_last_empty_line_is_complete():
    whole = "".join(CHAT_STREAM)
    assert read(Api.CHAT, whole.rstrip("\n")).complete
    assert read(Api.CHAT, whole.removesuffix("\n")).complete


PROMPT = Figures(prompt_tokens=180, computed=4, cached=176)


@pytest.mark.parametrize(
    ("fields", "figures"),
    [
        ({"usage": USAGE}, COUNTED),
        ({"timings": TIMINGS}, WHOLE),
        ({"usage": {"prompt_tokens": 180}, "timings": {"prompt_n": 4}}, PROMPT),
        ({"prompt_progress": {"total": 180, "cache": 176, "processed": 176, "time_ms": 0}}, PROMPT),
        ({"timings": {"draft_n": 9, "draft_n_accepted": 4}}, Figures(draft=9, draft_accepted=4)),
        ({}, Figures()),
    ],
)
def test_figures_are_read_from_any_field_that_has_them(fields, figures):
    assert read(Api.CHAT, event({"choices": [], **fields})).figures == figures


def test_native_answers_with_selected_fields_are_read_and_complete_without_a_stop():
    lifted = {"content": "Look.", "cache_n": 176, "prompt_n": 4}
    for got in (
        read(Api.COMPLETION, event({"index": 0, "content": "", "stop": False}), event(lifted)),
        read(Api.COMPLETION, json.dumps(lifted), stream=False),
    ):
        assert got.complete
        assert got.reply == SAID
        assert got.figures == Figures(prompt_tokens=180, computed=4, cached=176)


def test_the_first_of_several_choices_or_native_answers_is_read():
    choices = [{"index": 1, "message": {"content": "another"}}, {"index": 0, "message": {"content": "Look."}}]
    assert read(Api.CHAT, json.dumps({"choices": choices}), stream=False).reply == SAID
    answers = [{"content": "Look.", "id_slot": 1}, {"content": "another", "id_slot": 0}]
    answer = read(Api.COMPLETION, json.dumps(answers), stream=False)
    assert (answer.reply, answer.figures.slot) == (SAID, 1)


def test_parallel_calls_stay_separate_and_missing_arguments_become_an_empty_object():
    chunks = [
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "x"}}]),
        delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "y", "arguments": "{"}}]),
        delta(tool_calls=[{"index": 1, "function": {"arguments": "}"}}]),
    ]
    calls = read(Api.CHAT, *chunks).reply["tool_calls"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("a", "x", "{}"),
        ("b", "y", "{}"),
    ]


@pytest.mark.parametrize(
    ("api", "chunk", "error"),
    [
        (
            Api.CHAT,
            event({"error": {"code": 500, "message": "secret", "type": "server_error"}}),
            "server_error",
        ),
        (Api.CHAT, event({"error": "secret"}), "error"),
        (Api.CHAT, event({"error": {"code": 500, "message": "secret"}}), "500"),
        (Api.COMPLETION, event({"error": {"type": "server_error"}}), "server_error"),
        (Api.MESSAGES, typed("error", error={"type": "api_error", "message": "secret"}), "api_error"),
        (Api.MESSAGES, b'event: error\ndata: {"code":500,"type":"server_error"}\n\n', "server_error"),
        (Api.RESPONSES, typed("error", code="x", message="secret"), "x"),
        (Api.RESPONSES, typed("response.failed", response={"error": {"code": "y"}}), "y"),
        (Api.RESPONSES, event({"error": {"type": "server_error"}}), "server_error"),
    ],
)
def test_an_error_in_a_stream_is_named_and_the_answer_is_incomplete(api, chunk, error):
    first, last = STREAMS[api][0][0], STREAMS[api][0][-1]
    answer = read(api, first, chunk, *([last] if api not in {Api.COMPLETION, Api.RESPONSES} else []))
    assert (answer.error, answer.complete, answer.reply) == (error, False, None)


def test_an_error_body_is_named_even_if_the_client_requested_a_stream():
    body = json.dumps({"error": {"code": 400, "type": "exceed_context_size_error", "message": "secret"}})
    answer = read(Api.CHAT, body, stream=True, status=400)
    assert (answer.error, answer.reply, answer.complete) == ("exceed_context_size_error", None, True)
    assert read(Api.CHAT, "<html>", stream=False, status=502).error == "502"
    assert "secret" not in repr(answer)


def test_an_unreadable_body_gives_no_reply_and_is_incomplete():
    for body in ("<html>", "[1]", "7"):
        answer = read(Api.CHAT, body, stream=False)
        assert (answer.reply, answer.figures) == (None, Figures())
    assert not read(Api.CHAT, "<html>", stream=False).complete
    assert not read(Api.CHAT, b"", stream=False).complete


def test_an_unreadable_or_unknown_event_is_skipped():
    assert read(Api.CHAT, "data: {\n\n", "data: 7\n\n", *CHAT_STREAM).reply == REPLY
    answer = read(Api.MESSAGES, typed("content_block_seal", index=0), *MESSAGES_STREAM)
    assert (answer.reply, answer.complete) == (REPLY, True)


def test_an_answer_with_empty_content_is_a_reply():
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}}]}
    assert read(Api.CHAT, json.dumps(body), stream=False).reply == {"role": "assistant", "content": ""}
    assert read(Api.CHAT, event("[DONE]")).reply is None


def test_a_body_over_the_limit_is_not_kept(monkeypatch):
    monkeypatch.setattr("slotkeeper.api.answers.answer.BODY_LIMIT_BYTES", 20)
    reader = AnswerReader(Api.CHAT, stream=False)
    for _ in range(9):
        reader.feed(b'{"choices":')
    assert reader._body == []
    assert reader.close().reply is None


def test_a_reply_over_the_limit_is_not_kept(monkeypatch):
    monkeypatch.setattr("slotkeeper.api.answers.answer_builder.REPLY_LIMIT_CHARS", 20)
    reader = AnswerReader(Api.CHAT, stream=True)
    for _ in range(9):
        reader.feed(delta(content="x" * 15).encode())
    assert len(reader._draft._content) == 1
    assert reader.close().reply is None


def test_the_repr_of_a_reader_shows_its_progress():
    reader = AnswerReader(Api.CHAT, stream=True)
    reader.feed("".join(CHAT_STREAM[:6]).encode())
    assert "stream, <AnswerBuilder open, 7 characters, 0 calls, 0 unread>" in repr(reader)
    reader = AnswerReader(Api.MESSAGES, stream=False)
    reader.feed(b"{}")
    assert "body of 2 bytes" in repr(reader)

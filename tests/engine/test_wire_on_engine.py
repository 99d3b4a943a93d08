"""The conversions and the readers, compared with the real engines: token for token, number for number."""

import json
import lzma
from typing import Any

import httpx
import pytest

import recorded
from patience import PATIENCE
from slotkeeper.api.answers.answer import AnswerReader
from slotkeeper.api.document import NotOurs
from slotkeeper.api.head import Api, classify
from slotkeeper.api.request import parse

COUNT = {
    Api.CHAT: "/v1/chat/completions/input_tokens",
    Api.MESSAGES: "/v1/messages/count_tokens",
    Api.RESPONSES: "/v1/responses/input_tokens",
}
PATH = {
    Api.CHAT: "/v1/chat/completions",
    Api.MESSAGES: "/v1/messages",
    Api.RESPONSES: "/v1/responses",
    Api.COMPLETION: "/completion",
    Api.COMPLETIONS: "/v1/completions",
}

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["path"],
}
ANTHROPIC_TOOLS = [
    {
        "name": "ls",
        "description": "List \u00fcber",
        "input_schema": SCHEMA,
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "bare"},
]
TOOL_TURN = [
    {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "again"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "let me\nsee", "signature": "x"},
            {"type": "text", "text": "I look."},
            {
                "type": "tool_use",
                "id": "t1",
                "name": "ls",
                "input": {"path": "\u00e9 \u2603", "n": 1, "x": [1.5, 1e-5]},
            },
            {"type": "tool_use", "id": "t2", "name": "ls", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "a\nb"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "c"}] * 2},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a51f5;You are Claude Code."

MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "hello"}]},
    "system": {"system": "Be brief.", "messages": [{"role": "user", "content": "hello"}]},
    "empty system": {"system": "", "messages": [{"role": "user", "content": "hello"}]},
    "system blocks": {
        "system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Two."}, {"type": "other"}],
        "messages": [{"role": "user", "content": "hello"}],
    },
    "billing": {"system": BILLING, "messages": [{"role": "user", "content": "hello"}]},
    "tools": {"tools": ANTHROPIC_TOOLS, "messages": TOOL_TURN[:1]},
    "tool turn": {"tools": ANTHROPIC_TOOLS, "messages": TOOL_TURN},
    "tool turn without tools": {"messages": TOOL_TURN},
    "forced tool": {
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "tool", "name": "ls"},
        "messages": TOOL_TURN[:1],
    },
    "no tool": {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "none"}, "messages": TOOL_TURN[:1]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "messages": TOOL_TURN},
    "thinking off": {"thinking": {"type": "disabled"}, "messages": TOOL_TURN},
    "no budget": {"thinking": {"type": "enabled", "budget_tokens": 0}, "messages": TOOL_TURN},
    "kwargs": {"chat_template_kwargs": {"enable_thinking": False}, "messages": TOOL_TURN},
    "reasoning only": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
            {"role": "user", "content": "b"},
        ],
    },
    "empty": {"messages": [{"role": "user", "content": []}, {"role": "user", "content": "b"}]},
    "skipped": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "document"}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            {"role": "assistant"},
            {"role": "user", "content": "b"},
        ],
    },
    "prefill": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "ignored": {
        "reasoning_effort": "none",
        "id_slot": 1,
        "n": 2,
        "messages": [{"role": "user", "content": "a"}],
    },
}

RESPONSES_TOOLS = [
    {"type": "function", "name": "ls", "description": "d", "parameters": SCHEMA},
    {"type": "function", "name": "cat", "parameters": SCHEMA, "strict": False},
    {"type": "web_search"},
    {"type": "namespace", "name": "n", "tools": []},
]
ITEMS = [
    {"role": "developer", "type": "message", "content": [{"type": "input_text", "text": "rules"}]},
    {"role": "user", "content": "look", "id": "msg_1", "status": "completed"},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm\nso"}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "message", "role": "assistant", "content": "Really."},
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"path": "x"}', "id": "fc_1"},
    {"type": "function_call", "call_id": "c2", "name": "ls", "arguments": '{"path":"y","n":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a\nb"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "c"}] * 2},
    {"role": "user", "content": [{"type": "input_text", "text": "go"}, {"type": "input_text", "text": "on"}]},
]

RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "hello"},
    "instructions": {"instructions": "Be brief.", "input": "hello"},
    "null instructions": {"instructions": None, "input": "hello"},
    "items": {"input": ITEMS},
    "items and tools": {"input": ITEMS, "tools": RESPONSES_TOOLS, "instructions": "Be brief."},
    "only foreign tools": {"input": ITEMS, "tools": RESPONSES_TOOLS[2:]},
    "no tools": {"input": ITEMS, "tools": []},
    "tool choice": {"input": ITEMS, "tools": RESPONSES_TOOLS, "tool_choice": "required"},
    "tool choice object": {
        "input": ITEMS,
        "tools": RESPONSES_TOOLS,
        "tool_choice": {"type": "function", "name": "ls"},
    },
    "effort none": {"input": ITEMS, "reasoning": {"effort": "none"}},
    "effort high": {"input": ITEMS, "reasoning": {"effort": "high", "summary": "auto"}},
    "format": {
        "input": "hello",
        "text": {"format": {"type": "json_schema", "name": "t", "schema": SCHEMA, "strict": True}},
    },
    "call first": {"input": [{"role": "user", "content": "a"}, *ITEMS[5:]]},
    "kwargs": {"input": ITEMS, "chat_template_kwargs": {"enable_thinking": False}},
}

OPENAI_TOOLS = [{"type": "function", "function": {"name": "ls", "description": "d", "parameters": SCHEMA}}]
CHAT: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "stream": True},
    "tools": {"messages": [{"role": "user", "content": "hello"}], "tools": OPENAI_TOOLS},
    "no tools wanted": {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": OPENAI_TOOLS,
        "tool_choice": "none",
    },
    "effort none": {"messages": [{"role": "user", "content": "hello"}], "reasoning_effort": "none"},
    "kwargs": {
        "messages": [{"role": "user", "content": "hello"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "format": {
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}},
    },
    "no generation prompt": {
        "messages": [{"role": "user", "content": "hello"}],
        "add_generation_prompt": False,
    },
    "budget": {"messages": [{"role": "user", "content": "hello"}], "thinking_budget_tokens": 0},
}

TABLE = [
    pytest.param(api, body, id=f"{api}: {name}")
    for api, bodies in ((Api.MESSAGES, MESSAGES), (Api.RESPONSES, RESPONSES), (Api.CHAT, CHAT))
    for name, body in bodies.items()
]


def post(engine, path, content):
    # b10434 drops kept-alive connections after a stream.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    return httpx.post(engine.base + path, content=content, headers=headers, timeout=PATIENCE)


def tokens(engine, chat):
    """Return the tokens of a converted body, by the engine's own template and tokenizer."""
    rendered = post(engine, "/apply-template", json.dumps(chat))
    assert rendered.status_code == 200, rendered.text
    ask = {"content": rendered.json()["prompt"], "add_special": True, "parse_special": True}
    return len(post(engine, "/tokenize", json.dumps(ask)).json()["tokens"])


def counted(engine, api, body):
    """Return the request's tokens by the engine's count, or None if it refuses it."""
    answer = post(engine, COUNT[api], json.dumps(body))
    return answer.json()["input_tokens"] if answer.status_code == 200 else None


@pytest.mark.parametrize(("api", "body"), TABLE)
def test_a_converted_body_has_the_engines_token_count(engine, api, body):
    ask = parse(api, json.dumps(body).encode())
    assert ask.chat is not None
    assert tokens(engine, ask.chat) == counted(engine, api, body)


# The text of arguments goes into the prompt as the engine writes JSON.
AS_TEXT = """{% for m in messages %}
{{ m.tool_calls[0].function.arguments if m.tool_calls else m.content }}
{% endfor %}"""
NUMBERS = """
    1e14 999999999999999.9 1e15 -1e15 1234567890123456.5 9999999999999998.0 1e16 1e22 1e-4 1e-5 1E-7 -0.0 1.0
    1e2 0.30000000000000004 3.14159265358979323846 5e-324 9223372036854775808 18446744073709551615
    18446744073709551616 -9223372036854775809 "1000000000000000.0" "\\\"",1e15,"1000000000000000.0"
"""


def test_numbers_in_arguments_are_written_as_the_engine_writes_them(engine_factory, build, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(AS_TEXT)
    engine = engine_factory("tiny-dense", build, args=["--chat-template-file", str(template)])
    differ = []
    for number in NUMBERS.split():
        use = b'{"type":"tool_use","id":"t","name":"ls","input":{"x":[%s]}}' % number.encode()
        said = b'{"role":"assistant","content":[%s]}' % use
        body = b'{"messages":[{"role":"user","content":"a"},%s,{"role":"user","content":"b"}]}' % said
        chat = parse(Api.MESSAGES, body).chat
        if tokens(engine, chat) != post(engine, COUNT[Api.MESSAGES], body).json()["input_tokens"]:
            differ.append(number)
    assert differ == []


def some_requests():
    """Return a few requests of each recorded session on other routes than chat, and of one on chat."""
    for name in ("pi/anth1", "qwen-code/anth1", "codex/main1", "codex/compact1", "claude-code/trace-0100"):
        path = recorded.FOLDER / f"{name}.jsonl.xz"
        if path.exists():
            yield pytest.param(path, id=name)


@recorded.needed
@pytest.mark.parametrize("path", list(some_requests()))
def test_recorded_requests_have_the_engines_token_count(engine, path):
    with lzma.open(path) as lines:
        requests = [json.loads(line) for line in lines]
    for request in (requests[0], requests[len(requests) // 2], requests[-1]):
        api, raw = classify("POST", request["path"]), json.dumps(request["body"])
        chat = parse(api, raw.encode()).chat
        assert tokens(engine, chat) == counted(engine, api, request["body"])


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.RESPONSES, {"input": [{"type": "item_reference", "id": "m"}]}),
        (Api.RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}),
        (Api.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
        (Api.CHAT, {"messages": "x"}),
        (Api.MESSAGES, {"max_tokens": 1}),
    ],
)
def test_bodies_that_the_sidecar_cannot_parse_are_refused_by_the_engine(engine, api, body):
    with pytest.raises(NotOurs):
        parse(api, json.dumps(body).encode())
    assert counted(engine, api, body) is None


ANSWERS = [
    (Api.CHAT, {"messages": [{"role": "user", "content": "seven"}], "max_tokens": 3}),
    (Api.CHAT, {**CHAT["plain"], "max_tokens": 3, "stream_options": {"include_usage": True}}),
    (Api.CHAT, {**CHAT["plain"], "max_tokens": 3, "return_progress": True, "timings_per_token": True}),
    (Api.CHAT, {**CHAT["plain"], "max_tokens": 3, "n": 2}),
    (Api.MESSAGES, {**MESSAGES["system"], "max_tokens": 3}),
    (Api.RESPONSES, {**RESPONSES["instructions"], "max_output_tokens": 3}),
    (Api.COMPLETION, {"prompt": "eight nine ten", "n_predict": 3}),
    (Api.COMPLETION, {"prompt": "eight nine ten", "n_predict": 3, "response_fields": ["content", "timings"]}),
    (Api.COMPLETIONS, {"prompt": "eight nine ten", "max_tokens": 3}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "body"), ANSWERS)
def test_every_answer_has_computed_and_cached_tokens(engine, api, body, stream):
    answer = read(engine, api, {**body, "stream": stream, "temperature": 0})
    figures = answer.figures
    assert answer.complete
    assert answer.error is None
    assert answer.reply is not None
    assert answer.reply.get("content") or answer.reply.get("reasoning_content")
    assert figures.computed + figures.cached == figures.prompt_tokens
    assert figures.computed > 0
    assert 1 <= figures.generated <= 3
    if api in COUNT:
        assert figures.prompt_tokens == counted(engine, api, body)


# Random weights never end a string; an enum makes the grammar end it.
SHORT = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
LOOK = [{"role": "user", "content": "look"}]
CALLS = [
    (
        Api.CHAT,
        {
            "messages": LOOK,
            "tools": [{"type": "function", "function": {"name": "ls", "parameters": SHORT}}],
            "tool_choice": "required",
        },
    ),
    (
        Api.MESSAGES,
        {"messages": LOOK, "tools": [{"name": "ls", "input_schema": SHORT}], "tool_choice": {"type": "any"}},
    ),
    (
        Api.RESPONSES,
        {
            "input": "look",
            "tools": [{"type": "function", "name": "ls", "parameters": SHORT}],
            "tool_choice": "required",
        },
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "body"), CALLS)
def test_a_tool_call_is_read_as_the_client_will_send_it_back(engine, api, body, stream):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0, "stream": stream}
    reply = read(engine, api, {**body, **extra, "max_tokens": 1000}).reply
    (call,) = reply["tool_calls"]
    assert call["id"]
    assert call["function"]["name"] == "ls"
    assert json.loads(call["function"]["arguments"]) in ({"path": "a"}, {"path": "b"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", list(COUNT))
def test_an_error_answer_is_not_read_as_a_reply(engine, api, stream):
    answer = read(engine, api, {"stream": stream, "messages": 7, "input": 7, "max_tokens": "x"})
    assert answer.error in {"invalid_request_error", "server_error"}
    assert answer.reply is None


def read(engine, api, body):
    response = post(engine, PATH[api], json.dumps(body))
    reader = AnswerReader(api, stream=body["stream"], status=response.status_code)
    for start in range(0, len(response.content), 100):
        reader.feed(response.content[start : start + 100])
    assert reader.first_token() is (response.status_code == 200)
    return reader.close()

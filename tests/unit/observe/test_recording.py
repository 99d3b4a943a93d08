"""Recordings: what is written of a request, and what is not."""

from __future__ import annotations

import json

import orjson
import pytest
from multidict import CIMultiDict

from slotkeeper.api.document import SESSION_HEADERS
from slotkeeper.api.head import Secrets
from slotkeeper.bench.replay import read
from slotkeeper.observe import recording
from slotkeeper.observe.recording import harmless, product
from unit.observe.room import BODY, Room, recorded, write

SECRETS = {
    "Authorization": "Bearer sk-1",
    "X-Api-Key": "sk-2",
    "Cookie": "sid=sk-3",
    "Proxy-Authorization": "Basic sk-4",
    "Anthropic-Api-Key": "sk-5",
    "OpenAI-Session-Token": "sk-6",
    "X-Whatever": "sk-7",
    "X-Session-Id": "sk-2",  # a client that names its session by its key
    "Traceparent": "00-sk-8",
}


async def test_a_recorded_request_is_read_back_unchanged(room):
    entry = await recorded(room)
    assert (entry.at, entry.client, entry.session, entry.method) == (12.5, "pi", "s", "POST")
    assert entry.path == "/v1/chat/completions"
    assert entry.body == orjson.loads(BODY)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"a": "two\nlines", "b": [1e-05, "\u00e9"]}, indent=2).replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + BODY + b"\n\n",
        b'{"a":1,"a":2,"big":123456789012345678901234567890}',
    ],
)
async def test_a_body_is_recorded_unchanged_on_one_line(room, body):
    entry = await recorded(room, body)
    assert entry.body == orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    (path,) = room.files
    assert path.read_bytes().count(b"\n") == 1


KEY = "sk-proj-0123456789abcdefghij"  # no header of the request has it


@pytest.mark.parametrize(
    "body",
    [
        {"api_key": KEY},
        {"messages": [{"content": f"use {KEY} for it"}], "tools": [{"deep": {"env": [KEY]}}]},
        {"tool_calls": [{"arguments": json.dumps({"key": KEY, "again": json.dumps({"key": KEY})})}]},
        {KEY: f"ghp_{KEY}"},
    ],
    ids=["field", "text and tools", "JSON within JSON", "name"],
)
async def test_a_key_anywhere_in_a_body_is_masked(room, body):
    sent = orjson.dumps(body)
    entry = await recorded(room, sent)
    assert KEY not in orjson.dumps(entry.body).decode()
    assert entry.body == orjson.loads(sent.replace(KEY.encode(), b"***").replace(b"ghp_***", b"***"))


@pytest.mark.parametrize("body", [b"", b"[1]", b"hello", b"\x1f\x8b\x08{}", b"null"])
async def test_a_body_that_is_not_a_json_object_is_left_out(room, body):
    assert (await recorded(room, body)).body is None


@pytest.mark.parametrize(
    "body",
    [
        b"{broken}",
        b'{"a": \n oops }',
        b'{"a":"\xff"}',
        b'{"a":1}{"b":2}',
        b'{"a":' * 1000 + b"{}" + b"}" * 1000,
        b'{"a":[' + b"1," * 2_000_001 + b"1]}",
    ],
    ids=["name", "value", "utf-8", "two", "deep", "many"],
)
async def test_a_body_that_is_refused_is_left_out_of_its_line(body, tmp_path):
    room = Room(tmp_path)
    recorder = room.recorder(budget=1 << 27)
    for sent in (BODY, body, BODY):
        write(recorder, sent)
    await recorder.close()
    entries = [read(path) for path in room.files]
    assert [entry.body is None for trace in entries for entry in trace.entries] == [False, True, False]
    assert not any(trace.problems for trace in entries)


async def test_a_body_that_was_parsed_is_not_parsed_again(room, monkeypatch):
    monkeypatch.setattr(recording, "checked", None)
    assert (await recorded(room, BODY, parsed=True)).body == orjson.loads(BODY)


@pytest.mark.parametrize(
    ("cookie", "body", "masked"),
    [
        ('session="abcdefghijklmnop"', b'{"user":"abcdefghijklmnop"}', {"user": "***"}),
        ("session=123456789012", b'{"n":123456789012,"m":[1123456789012]}', {"n": "***", "m": ["1***"]}),
        ("session=nabcdefghijklmnop", b'{"user":"a\\nabcdefghijklmnop"}', {"user": "a\nabcdefghijklmnop"}),
        ("session=abcdefghijkl\\mnop", b'{"user":"abcdefghijkl\\\\mnop"}', {"user": "***"}),
        ('session=abcdef"ghijklmnop', b'{"user":"abcdef\\"ghijklmnop\\\\"}', {"user": "***\\"}),
        ('session=":[1],"abcdefgh', b'{"a":[1],"abcdefgh":1}', {"a": [1], "abcdefgh": 1}),
        ("session=abcdefghijklmnop", b'{"abcdefghijklmnop":[true,null,1e5]}', {"***": [True, None, 1e5]}),
        ("session=abcdefgh/ijklmnop", b'{"user":"abcdefgh\\/ijklmnop"}', {"user": "***"}),
        ("session=abcdefghijklmnop", b'{"\\u0061bcdefghijklmnop":["\\\\u0061"]}', {"***": ["\\u0061"]}),
        ('session=abcdef"ghijklmnop', b'{"user":"abcdef\\u0022ghijklmnop"}', {"user": "***"}),
    ],
)
async def test_a_masked_body_stays_json(room, cookie, body, masked):
    assert (await recorded(room, body, headers={"Cookie": cookie})).body == masked


async def test_no_credential_is_recorded(room):
    headers = CIMultiDict(SECRETS | {"User-Agent": "codex_cli_rs/0.50", "Anthropic-Version": "2023-06-01"})
    entry = await recorded(room, headers=headers, path="/v1/messages?beta=true&key=sk-9")
    assert dict(entry.headers) == {"user-agent": "codex_cli_rs/0.50", "anthropic-version": "2023-06-01"}
    assert entry.path == "/v1/messages"
    assert b"sk-" not in room.files[0].read_bytes()


async def test_a_key_in_a_name_or_an_agent_or_a_body_is_masked(room):
    key = "0123456789abcdef"
    headers = CIMultiDict({"X-Api-Key": key, "User-Agent": f"{key}/1", "X-Session-Id": f"chat-{key}"})
    body = orjson.dumps({"user": key, "metadata": {"user_id": f"a_{key}"}})
    entry = await recorded(room, body, headers=headers, session=f"chat-{key}")
    assert (entry.client, entry.session, dict(entry.headers)) == ("d1ge57", "", {})
    assert entry.body == {"user": "***", "metadata": {"user_id": "a_***"}}
    assert key.encode() not in room.files[0].read_bytes()


def test_a_recording_has_every_header_that_names_a_conversation():
    given = dict.fromkeys(SESSION_HEADERS, "mine")
    assert dict(harmless(given, Secrets.of(given))) == given


async def test_a_header_that_is_not_valid_text_is_recorded_with_replacements(room):
    entry = await recorded(room, headers={"User-Agent": "pi/1 \udcff"}, session="a\udcff")
    assert entry.headers["user-agent"] == "pi/1 ?"
    assert entry.session == "a?"


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [("claude-cli/2.0 (external, cli)", "claude-cli"), ("OpenAI/JS 5.1", "OpenAI"), ("", ""), ("(x)", "")],
)
def test_a_client_is_named_after_its_user_agent(user_agent, name):
    assert product(user_agent) == name


async def test_a_client_without_a_user_agent_is_named_by_its_digest(room):
    assert (await recorded(room, headers={})).client == "d1ge57"


async def test_conversation_numbers_differ_between_runs(room):
    first, second = [(await recorded(room, session=1)).session for _ in range(2)]
    assert first != second
    assert first.endswith("-1")
    assert second.endswith("-1")

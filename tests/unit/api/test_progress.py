"""Progress events leave no trace in the stream that the client reads."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.answers.answer import (
    END,
    LONGEST,
    AnswerReader,
    Progress,
    ProgressFilter,
    read_progress,
    waiting_event,
)
from slotkeeper.api.head import Api
from slotkeeper.api.request import UNNAMED, ask_for, can_ask, parse, placed

PING = b":\n\n"
PROGRESS = b'data: {"choices":[],"prompt_progress":{"total":9,"cache":0,"processed":4}}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
QUOTED = b'data: {"choices":[{"delta":{"content":"say \\"prompt_progress\\":{} twice"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    places = sorted({min(a, len(stream)) for a in at})
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


@given(
    st.lists(st.sampled_from([PROGRESS, PING]), max_size=5),
    st.lists(st.sampled_from([ROLE, QUOTED, PING]), max_size=5),
    st.lists(st.integers(0, 600), max_size=12),
)
def test_only_leading_progress_events_are_removed_for_any_chunk_boundaries(before, after, cuts):
    rest = [ROLE, *after, DONE]
    filtered = ProgressFilter()
    out = b"".join(filtered.feed(chunk) for chunk in cut(b"".join([*before, *rest]), cuts))
    assert out + filtered.close() == b"".join([*(e for e in before if e == PING), *rest])


def test_nothing_is_held_back_after_the_first_content_event_or_the_end():
    filtered = ProgressFilter()
    assert filtered.feed(PROGRESS + ROLE) == ROLE
    assert filtered.feed(b"data: {") == b"data: {"
    filtered = ProgressFilter()
    assert filtered.feed(b"data: {") == b""
    assert filtered.close() == b"data: {"


def test_an_event_that_is_too_long_for_progress_is_not_held_back():
    filtered, first = ProgressFilter(), b"data: {" + b"x" * LONGEST
    assert filtered.feed(PROGRESS + first[:100]) == b""
    assert filtered.feed(first[100:]) == first
    assert filtered.feed(b"}\n\n" + PROGRESS) == b"}\n\n" + PROGRESS
    assert filtered.close() == b""


@pytest.mark.parametrize(
    ("api", "fields", "expected"),
    [
        (Api.CHAT, b'"stream":true', True),
        (Api.CHAT, b'"stream":false', False),
        (Api.CHAT, b'"stream":true,"return_progress":false', False),
        (Api.CHAT, b'"stream":true,"return\\u005fprogress":true', False),
        (Api.CHAT, b'"stream":true,"n":2', False),
        (Api.MESSAGES, b'"stream":true', False),
    ],
)
def test_progress_is_requested_only_if_the_client_cannot_notice_it(api, fields, expected):
    body = b'{"messages":[{"role":"user","content":"hello"}],' + fields + b"}"
    assert can_ask(parse(api, body)) is expected


def test_the_request_for_progress_changes_nothing_else_in_the_body():
    body = b' {"stream": true, "messages": [{"role":"user","content":"x"}]}'
    assert orjson.loads(ask_for(body)) == {**orjson.loads(body), "return_progress": True}
    assert orjson.loads(placed(ask_for(body), UNNAMED, 1))["id_slot"] == 1


def test_removed_progress_events_are_read():
    filtered = ProgressFilter()
    assert filtered.latest is None
    filtered.feed(PROGRESS)
    assert filtered.latest == Progress(total=9, reused=0, processed=4, seconds=0.0)
    later = b'data: {"prompt_progress":{"total":9,"cache":2,"processed":8,"time_ms":1500.5}}\n\n'
    filtered.feed(later)
    assert filtered.latest == Progress(total=9, reused=2, processed=8, seconds=1.5005)


@pytest.mark.parametrize(
    "malformed", [b'{"total":"x"}', b'{"total":9}', b"{", b'{"total":9,"cache":0,"processed":null}']
)
def test_progress_events_of_an_unknown_shape_are_removed_and_ignored(malformed):
    filtered = ProgressFilter()
    assert filtered.feed(b'data: {"prompt_progress":{},"x":1}\n\n' + PROGRESS) == b""
    known = filtered.latest
    assert filtered.feed(b'data: {"prompt_progress":' + malformed + b"}\n\n" + ROLE) == ROLE
    assert filtered.latest == known


# -- events of our own, before the engine has sent one -----------------------------------------------------

NOW = {"doing": "queued", "place": 2}


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.COMPLETION])
def test_an_event_of_ours_has_no_text_and_says_what_the_request_waits_for(api):
    reader = AnswerReader(api, stream=True)
    event = waiting_event(api, "id", 1, NOW, None)
    assert event is not None
    reader.feed(event)
    assert not reader.first_token()
    assert event.endswith(END)
    doc = orjson.loads(event.removeprefix(b"data: "))
    assert doc["slotkeeper"] == NOW
    assert "prompt_progress" not in doc, "it is not known yet what is to be computed"


def test_an_event_of_ours_has_the_progress_in_the_engines_shape():
    event = waiting_event(Api.CHAT, "id", 1, NOW, Progress(total=100, reused=40, processed=60, seconds=0.5))
    assert event is not None
    assert read_progress(event) == Progress(total=100, reused=40, processed=60, seconds=0.5)


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.RESPONSES, Api.INFILL])
def test_routes_without_progress_events_get_none_of_ours(api):
    assert waiting_event(api, "id", 1, NOW, None) is None

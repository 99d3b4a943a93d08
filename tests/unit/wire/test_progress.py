"""Progress events leave no trace in what the client reads."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.wire.progress import ProgressFilter, ask_for, can_ask
from slotkeeper.wire.request import parse, pin
from slotkeeper.wire.routes import Api

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
def test_only_progress_is_taken_out_however_the_stream_is_cut(before, after, cuts):
    rest = [ROLE, *after, DONE]
    filtered = ProgressFilter()
    out = b"".join(filtered.feed(chunk) for chunk in cut(b"".join([*before, *rest]), cuts))
    assert out + filtered.close() == b"".join([*(e for e in before if e == PING), *rest])


def test_after_the_first_event_nothing_is_held_back():
    filtered = ProgressFilter()
    assert filtered.feed(PROGRESS + ROLE) == ROLE
    assert filtered.feed(b"data: {") == b"data: {"


def test_a_stream_that_breaks_in_its_first_event_is_not_lost():
    filtered = ProgressFilter()
    assert filtered.feed(b"data: {") == b""
    assert filtered.close() == b"data: {"


@pytest.mark.parametrize(
    ("api", "fields", "expected"),
    [
        (Api.CHAT, {"stream": True}, True),
        (Api.CHAT, {"stream": False}, False),
        (Api.CHAT, {"stream": True, "return_progress": False}, False),
        (Api.CHAT, {"stream": True, "n": 2}, False),
        (Api.MESSAGES, {"stream": True}, False),
    ],
)
def test_progress_is_asked_for_only_where_nobody_notices(api, fields, expected):
    body = orjson.dumps({"messages": [{"role": "user", "content": "hello"}], **fields})
    assert can_ask(parse(api, body), body) is expected


def test_asking_changes_nothing_else():
    body = b' {"stream": true, "messages": [{"role":"user","content":"x"}]}'
    assert orjson.loads(ask_for(body)) == {**orjson.loads(body), "return_progress": True}
    assert orjson.loads(pin(ask_for(body), 1))["id_slot"] == 1


def test_how_far_the_prefill_was_is_remembered():
    filtered = ProgressFilter()
    assert (filtered.reached, filtered.cached) == (None, 0)
    later = PROGRESS.replace(b'"cache":0,"processed":4', b'"cache":3,"processed":7')
    filtered.feed(PROGRESS + later)
    assert (filtered.reached, filtered.cached) == (7, 3)


@pytest.mark.parametrize("said", [b"{", b'{"prompt_progress":{"cache":1}}', b'{"prompt_progress":{"x":[]}}'])
def test_progress_that_cannot_be_read_says_nothing(said):
    filtered = ProgressFilter()
    assert filtered.feed(b"data: " + said + b',"prompt_progress":{}\n\n' + ROLE) == ROLE
    assert filtered.reached is None

"""Resumable streams: ids that other namespaces cannot name, lookups, and the end of a resumed stream."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.exchange.streams import LastEvent, Lookup, digest, is_stream_route, within

TEXT = st.text(alphabet="ab:1~", min_size=1, max_size=6)


@given(TEXT, TEXT, TEXT, TEXT)
def test_two_ids_are_one_stream_only_if_namespace_and_id_are_equal(one, first, other, second):
    assert (digest(one, first) == digest(other, second)) is ((one, first) == (other, second))


def test_a_routers_model_stays_readable_in_an_id():
    assert digest("ann", "chat::writer") == digest("ann", "chat") + "::writer"


@pytest.mark.parametrize(
    "query",
    [
        "conv_id=chat&from=7",
        "from=7&conv_id=chat",
        "conv_id=chat&conv_id=other&from=7",
        "conv%5fid=chat&from=7",
    ],
)
def test_the_query_of_a_resumed_stream_has_one_id_and_it_is_the_engines(query):
    path = within("ann", f"/v1/stream?{query}")
    assert path == f"/v1/stream?conv_id={digest('ann', 'chat')}&from=7"


def test_a_query_without_an_id_stays_without_one():
    assert within("ann", "/v1/stream?from=7").partition("?")[2] == "from=7"


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/v1/stream", True),
        ("/v1/strea%6d", True),
        ("/v1/streams/lookup", True),
        ("/v1/streams", False),
        ("/v1/chat/completions", False),
    ],
)
def test_the_routes_of_streams_are_recognised_also_if_they_are_escaped(path, is_one):
    assert is_stream_route(path) is is_one


def test_a_lookup_asks_for_digests_and_answers_with_the_clients_ids():
    lookup = Lookup("ann", orjson.dumps({"conversation_ids": ["chat", "talk::writer", 7]}))
    known = digest("ann", "chat"), digest("ann", "talk::writer")
    assert orjson.loads(lookup.body) == {"conversation_ids": [*known]}
    found = [known[0], known[0] + "::coder", known[1], digest("bob", "chat"), "chat"]
    rows = [{"conversation_id": each, "is_done": False} for each in found]
    told = [row["conversation_id"] for row in orjson.loads(lookup.answer(orjson.dumps(rows)))]
    assert told == ["chat", "chat::coder", "talk::writer"]


@pytest.mark.parametrize(
    ("stream", "ends"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b'data: {"content":"","stop":true}\n\n', True),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (b"event: response.completed\ndata: {}\n\n", True),
        (b'data: {"error":{"code":500}}\n\n', True),
        (b'data: {"content":"a","stop":false}\n\n', False),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b"", False),
    ],
)
def test_the_last_event_tells_whether_a_resumed_stream_is_whole(stream, ends):
    for size in (1, 7, 100):
        last = LastEvent()
        for at in range(0, len(stream), size):
            last.read(stream[at : at + size])
        assert last.ends is ends

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.answers.answer import SseEvent, SseSplitter

LINES = st.sampled_from(
    [
        *(b"data: a", b"data:b", b"data", b"data:  two", b"event: ping", b"event:x", b": comment", b":", b""),
        *(
            b"id: 4",
            b"retry: 10",
            b"data: [DONE]",
            "data: é☃".encode(),
            b"nonsense",
            b"error: x",
            b"event: \xff",
        ),
    ],
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.lists(st.tuples(LINES, ENDS), max_size=20).map(lambda pairs: b"".join(a + b for a, b in pairs))


def events(*chunks, limit=2**20):
    splitter = SseSplitter(limit=limit)
    found = [event for chunk in chunks for event in splitter.feed(chunk)]
    return found + splitter.close()


@given(stream=STREAMS | st.binary(max_size=60), cuts=st.lists(st.integers(0, 200)), limit=st.integers(4, 60))
def test_chunk_boundaries_do_not_change_the_events(stream, cuts, limit):
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[a:b] for a, b in pairwise(places)]
    assert events(*chunks, limit=limit) == events(stream, limit=limit)
    assert events(*(bytes([byte]) for byte in stream), limit=limit) == events(stream, limit=limit)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_ends_a_line(end):
    stream = end.join([b"event: e", b"data: 1", b"data: 2", b"", b"data:3", b"", b""])
    assert events(stream) == [SseEvent("e", b"1\n2"), SseEvent("", b"3")]


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (b":\n\n: ping\nid: 1\nretry: 2\n\ndata: x\n: in between\n\n", [b"x"]),  # comments, unknown fields
        (b"event: a\n\ndata: x\n\n", [b"x"]),  # a name belongs to one event
        (b"\xef\xbb\xbfdata:  x\n\n", [b" x"]),  # a byte order mark, and one space
        (b"data: x\n\ndata: y", [b"x", b"y"]),  # an unfinished event at the close
        (b"data: x\r", [b"x"]),
        (b"event: a\n", []),
    ],
)
def test_only_the_data_of_whole_and_last_events_are_returned(stream, found):
    assert events(stream) == [SseEvent("", data) for data in found]


@pytest.mark.parametrize("long", [b"data: " + b"x" * 50, b"data: xxxx\n" * 10, b"y" * 90])
def test_an_event_over_the_limit_is_dropped_and_the_next_is_not(long):
    assert events(b"data: 1\n\n" + long + b"\n\ndata: 2\n\n", limit=40) == [
        SseEvent("", b"1"),
        SseEvent("", b"2"),
    ]


def test_a_long_line_in_small_pieces_costs_linear_time():
    def seconds(pieces):
        splitter = SseSplitter()
        start = time.process_time()
        for _ in range(pieces):
            splitter.feed(b"x" * 16)
        splitter.feed(b"\n\n")
        return time.process_time() - start

    seconds(1000)
    small, large = min(seconds(10_000) for _ in range(3)), min(seconds(100_000) for _ in range(3))
    assert large < 40 * small  # quadratic would be 100 times

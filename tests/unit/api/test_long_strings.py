"""A body that is heavy by its images is read as the JSON parser reads it."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slotkeeper.api import document
from slotkeeper.api.document import count_of, inserted, loads, longest_string

RUN = "iVBORw0KGgo" * 5 + "+/=="
PIECES = [RUN, RUN[:30], "\\", "\\n", "\\u00e9", *'"""{}[]:, 1', "data:,", "é", "\x00"]
PARTS = st.sampled_from(PIECES)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Make runs of 32 bytes long ones."""
    monkeypatch.setattr(document, "LONG_BYTES", 32)
    monkeypatch.setattr(document, "PIECE_BYTES", 16)


def outcome(read, body):
    try:
        return read(body)
    except orjson.JSONDecodeError:
        return "not JSON"


def cuts(body):
    return [body[start:end] for start, end in document._long_runs(body)]


@pytest.mark.parametrize(
    ("doc", "runs"),
    [
        ({"messages": [{"content": [{"image_url": {"url": f"data:image/png;base64,{RUN}"}}]}]}, 1),
        ({"a": RUN, "b": [RUN, {"c": RUN}], "d": RUN[:20]}, 3),
        ({"a": f"é{RUN}", "b": f"{RUN} and more"}, 1),
        ({RUN: RUN}, 1),  # a key is none
        ({"a": f"\n{RUN}"}, 0),  # the run begins with the letter of an escape
        ([RUN], 1),
        (RUN, 1),
    ],
)
def test_a_run_at_the_end_of_a_value_is_cut_out_and_put_back(doc, runs):
    body = json.dumps(doc, ensure_ascii=False).encode()
    assert len(cuts(body)) == runs
    assert loads(body) == doc or doc == RUN  # a lone string is no request


def test_a_run_without_an_end_is_no_json():
    body = b'{"a": "' + RUN.encode() * 4
    assert cuts(body) == []
    with pytest.raises(orjson.JSONDecodeError):
        loads(body)


@given(st.lists(PARTS, min_size=1, max_size=14).map("".join))
@example('{"a":"' + RUN + '"  :"' + RUN + '"}')
def test_whatever_the_body_says_is_read_as_the_parser_reads_it(text):
    body = ('{"k":"' + text).encode()
    read = outcome(loads, body)
    expected = outcome(orjson.loads, body)
    assert read == expected


def test_the_longest_string_may_be_a_key():
    assert longest_string({"ab": ["c", {"abcd": None}], "e": "abc"}) == 4
    assert longest_string([]) == 0


@given(body=st.binary(max_size=70), at=st.integers(0, 70), added=st.binary(max_size=40))
def test_bytes_are_counted_and_inserted_across_pieces(body, at, added):
    assert inserted(body, at, added) == body[:at] + added + body[at:]
    assert count_of(body, b"\0", b"x") == body.count(b"\0") + body.count(b"x")

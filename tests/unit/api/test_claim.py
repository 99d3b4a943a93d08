"""What a body requests from the engine, and the bytes that are sent (test_bodies.py: on real engines)."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.document import PIECE_BYTES
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.head import Api
from slotkeeper.api.request import (
    MOST_VALUES,
    UNNAMED,
    Claim,
    Doubt,
    NotPlain,
    as_int,
    checked,
    claim,
    load,
    placed,
    plain,
)

SPELLED = ["id_slot", "id\\u005fslot", "\\u0069d_slot", "id_sl\\u006ft"]  # spellings of the same key
OTHER = ["ID_SLOT", "id_slot\\u0000", "id slot", "x"]

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
fields = st.lists(
    st.tuples(st.sampled_from(SPELLED + OTHER), values.map(orjson.dumps)),
    max_size=5,
)
spaces = st.sampled_from([b"", b" ", b"\r\n\t "])


def written(pairs: list[tuple[str, bytes]], space: bytes) -> bytes:
    inside = (b"," + space).join(b'"%s"%s:%s' % (key.encode(), space, value) for key, value in pairs)
    return space + b"{" + space + inside + space + b"}" + space


def taken(api: Api = Api.CHAT, /, **body: object) -> Claim:
    return claim(api, load(orjson.dumps(body)))


@given(pairs=fields, space=spaces, slot=st.none() | st.integers(0, 99), api=st.sampled_from(list(Api)))
def test_the_sent_body_names_the_chosen_slot_and_changes_nothing_else(pairs, space, slot, api):
    raw = written(pairs, space)
    before = json.loads(raw)
    after = json.loads(placed(raw, claim(api, load(raw)), slot))
    named = after.pop("id_slot", None)
    had = before.pop("id_slot", None) is not None or "id_slot" in json.loads(raw)
    assert after == before
    assert named == (slot if slot is not None else -1 if had else None)


def test_the_slot_is_inserted_in_front_or_appended_if_the_body_already_names_one():
    assert placed(b' {"a":1}', UNNAMED, 3) == b' {"id_slot":3,"a":1}'
    assert placed(b"{ }", UNNAMED, 3) == b'{"id_slot":3 }'
    assert placed(b"{ }", UNNAMED, None) == b"{ }"
    for own in (b"-1", b"null", b'"1"'):
        raw = b'{"id\\u005fslot":' + own + b',"a":{}}\n'
        assert placed(raw, claim(Api.CHAT, load(raw)), 3) == raw[:-2] + b',"id_slot":3}\n'


@pytest.mark.parametrize("raw", [b'{"a":1,"id_slot":3 }', b'{"id_slot":7,"id\\u005fslot":3}'])
def test_a_body_that_already_names_the_chosen_slot_is_not_changed(raw):
    assert placed(raw, claim(Api.CHAT, load(raw)), 3) == raw


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0, 0),
        (3, 3),
        (-5, -5),
        (1.7, 1),
        (-1.5, -1),
        (True, 1),
        (2**32 + 2, 2),
        (-(2**32) + 2, 2),
        (2**31, -(2**31)),
        (2**64 - 1, -1),
        (2.0**31, None),
        (1e300, None),
        ("1", None),
        (None, None),
        ([1], None),
    ],
)
def test_a_number_is_converted_as_the_engine_converts_it(value, read):
    assert as_int(value) == read
    assert taken(id_slot=value).id_slot == (None if read == -1 else read)
    assert taken(Api.TASK, id_slot=value).id_slot is None


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2.0}, 2),
        ({"n": 2.9}, 2),
        ({"n": 2**32 + 2}, 2),
        ({"n_cmpl": 2}, 2),
        ({"n_cmpl": 1, "n": 2}, 1),
        ({"n_cmpl": 0, "n": 2}, 1),
        ({"n_cmpl": None, "n": 2}, 2),
        ({"n": "3"}, 1),
        ({"n": -2}, 1),
        ({"n": True}, 1),
    ],
)
def test_copies_count_the_tasks_of_a_request(body, copies):
    assert taken(**body).copies == copies
    assert taken(Api.COMPLETION, prompt=["a", "b"], **body).copies == 2 * copies
    assert taken(Api.MESSAGES, **body).copies == 1  # the engine drops them there (engine.md T5)


@pytest.mark.parametrize(
    ("prompt", "tasks"),
    [
        ("x", 1),
        (["a", "b"], 2),
        ([[1], [2], "c"], 3),
        ([1, 2.5, "x"], 1),
        (["x", 1], 1),
        ([True, "x"], 2),
        ([1.0, 2.0], 2),
        ([], 1),
        (None, 1),
    ],
)
def test_a_list_without_a_token_id_is_a_list_of_prompts(prompt, tasks):
    assert taken(Api.COMPLETIONS, prompt=prompt).copies == tasks
    assert taken(Api.TASK, input=prompt).copies == tasks
    assert taken(Api.CHAT, prompt=prompt).copies == taken(Api.INFILL, prompt=prompt).copies == 1
    rows = {"query": "q", "documents": ["a", "b", "c"]}, {"query": "q", "texts": ["a", "b"]}
    assert [taken(Api.TASK, id_slot=1, **body).copies for body in rows] == [3, 2]


def test_a_byte_order_mark_is_skipped_as_the_engine_skips_it():
    assert load(b'\xef\xbb\xbf{"a":1}', "identity") == {"a": 1}


REFUSED = [
    (b"", Doubt.JSON),
    (b'{"id_slot":1}\0', Doubt.JSON),
    (b'{"id_slot":1}\0{', Doubt.JSON),
    (b'{"id_slot":1}x', Doubt.JSON),
    (b'{"x":' + b"[" * 1025 + b"]" * 1025 + b"}", Doubt.JSON),
    (b"\xef\xbb\xbf\xef\xbb\xbf{}", Doubt.JSON),
    ('{"id_slot":1}'.encode("utf-16"), Doubt.JSON),
    (b'{"x":"\xff"}', Doubt.JSON),
    (b'{"x":NaN}', Doubt.JSON),
    (b'{"x":1e400}', Doubt.JSON),
    (b'{"x":1/**/}', Doubt.JSON),
    (b"[]", Doubt.OBJECT),
    (b"null", Doubt.OBJECT),
]


@pytest.mark.parametrize(
    ("body", "encoding", "doubt"),
    [*((body, "", doubt) for body, doubt in REFUSED), *((b"{}", e, Doubt.ENCODING) for e in ("gzip", "br"))],
)
def test_an_ambiguous_or_encoded_body_is_refused_with_advice(body, encoding, doubt):
    with pytest.raises(NotPlain) as refused:
        load(body, encoding)
    assert refused.value.doubt is doubt
    assert "send" in refused.value.message


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/completion",
        "/completion/",
        "/%63ompletion",
        "/v1/chat/completions",
        "/a%20b/%e2%98%83",
        "/x...y/z",
    ],
)
def test_an_unambiguous_path_is_accepted(path):
    assert plain(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "/completio%u006e",
        "/completion%",
        "/completion%zz",
        "/completion%00",
        "/completion%09",
        "/completion\t",
        "/completion\\x",
        "/v1%2fcompletions",
        "/v1/%2e%2e/completion",
        "/./completion",
        "/x/../completion",
        "//completion",
        "/v1//completions",
        "/completi\u00f6n",
        "completion",
        "",
    ],
)
def test_an_ambiguous_path_is_refused(path):
    with pytest.raises(NotPlain) as refused:
        plain(path)
    assert refused.value.doubt is Doubt.PATH
    assert "send" in refused.value.message


class Counted(bytes):
    """Bytes that note how many of them each count looks at."""

    looked: list[int]

    def count(self, mark, start=0, end=None):
        self.looked.append(len(self[start:end]))
        return super().count(mark, start, end)


def test_a_body_is_checked_in_pieces_between_which_the_event_loop_runs():
    body = Counted(orjson.dumps({"a": "x" * 3 * PIECE_BYTES}))
    body.looked = []
    assert checked(body) == orjson.loads(bytes(body))
    assert sum(body.looked) >= 5 * len(body)  # three marks of values and two of depth
    assert max(body.looked) <= PIECE_BYTES


def test_a_body_with_more_values_than_any_prompt_is_refused():
    most = b'{"a":[1%s]}' % (b",1" * (MOST_VALUES - 2))
    assert checked(most)
    with pytest.raises(ClientFault, match="more than 2,000,000 values"):
        checked(most.replace(b"]", b",1]"))

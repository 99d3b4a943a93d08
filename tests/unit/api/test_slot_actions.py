"""A client's slot action is read as the engine would read it, or refused."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.api.errors import ClientFault
from slotkeeper.exchange.slot_actions import Act, left_by, read_action


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("/slots/1?action=save", "/slots/1?action=save"),
        ("/slots/01?x=1&action=%73ave", "/slots/1?action=save"),
        ("/%73lots/%37?action=save", "/slots/7?action=save"),
    ],
)
def test_a_slot_action_is_sent_in_canonical_form(target, sent):
    action = read_action(target, b'{"filename": "a", "filename": "b"}')
    assert (action.target, action.body, action.act) == (sent, b'{"filename":"b"}', Act.SAVE)


@pytest.mark.parametrize("word", ["", "-1", "+1", "1x", "%201", "\u0661", "4294967297", "x/../1?y"])
def test_an_ambiguous_slot_id_is_refused(word):
    action = read_action(f"/slots/{word}?action=save", b'{"filename": "a"}')
    assert action.refused


@pytest.mark.parametrize("query", ["", "action=SAVE", "action=save&action=erase", "action=", "Action=save"])
def test_an_ambiguous_action_is_refused(query):
    action = read_action(f"/slots/1?{query}", b'{"filename": "slotkeeper.sqlite"}')
    assert action.refused
    assert (action.target, action.body) == ("/slots/1?action=none", b"{}")


@pytest.mark.parametrize("body", [b"", b"[3]", b"{}", b'{"filename":3}', b'{"filename":null}'])
def test_a_body_without_a_file_name_is_left_to_the_engine(body):
    assert read_action("/slots/0?action=restore", body).body == body


@pytest.mark.parametrize(
    "body",
    [b"\xef\xbb\xbf{}", b"{", b'{"filename": "slotkeeper.lock", "a": ' + b"[" * 9999 + b"]" * 9999 + b"}"],
)
def test_a_body_that_is_not_plain_json_is_refused(body):
    with pytest.raises(ClientFault, match="not JSON"):
        read_action("/slots/0?action=restore", body)


@pytest.mark.parametrize(
    "name", ["slotkeeper", "SlotKeeper.json", "\uff53lotkeeper.sqlite", "\u017flotkeeper.lock"]
)
def test_file_names_of_the_sidecar_are_refused(name):
    with pytest.raises(ClientFault, match="choose another"):
        read_action("/slots/0?action=save", orjson.dumps({"filename": name}))


@given(st.text(), st.binary())
def test_any_slot_action_is_read_or_refused(target, body):
    try:
        action = read_action(target, body)
    except ClientFault:
        return
    assert action.refused or 0 <= action.slot < 10**9


@pytest.mark.parametrize(
    ("act", "status", "answer", "left"),
    [
        (Act.SAVE, 200, b'{"n_saved": 5}', None),
        (Act.SAVE, 400, b"", None),
        (Act.ERASE, 200, b'{"n_erased": 5}', 0),
        (Act.ERASE, 501, b"", None),
        (Act.RESTORE, 200, b'{"n_restored": 5}', 5),
        (Act.RESTORE, 200, b'{"n_restored": null}', 0),
        (Act.RESTORE, 200, b"[]", 0),
        (Act.RESTORE, 400, b"", 0),
    ],
)
def test_a_slot_action_tells_what_is_left_in_the_slot(act, status, answer, left):
    assert left_by(act, status, answer) == left

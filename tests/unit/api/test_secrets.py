"""Credentials in wrong places are found, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from slotkeeper.api.head import LEAST, Secrets, masked

KEY = "0123456789abcdef0123"


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({"Authorization": f"Bearer {KEY}"}, ""),
        ({"authorization": KEY}, ""),
        ({"X-Api-Key": KEY}, ""),
        ({"Cookie": f"theme=dark; sid={KEY}"}, ""),
        ({"Proxy-Authorization": "Basic dXNlcjowMTIzNDU2Nzg5YWJjZGVmMDEyMw=="}, ""),
        ({}, f"beta=true&api_key={KEY}"),
    ],
)
def test_a_credential_is_known_wherever_it_stands(headers, query):
    secrets = Secrets.of(headers, query)
    for text in (KEY, f"chat-{KEY}", f"agent/1 ({KEY})"):
        assert secrets.stand_in(text)
    assert secrets.masked(f'{{"user":"{KEY}"}}'.encode()) == b'{"user":"***"}'
    assert not secrets.stand_in("opencode/1.0 Bearer Basic theme sid beta")


def test_a_short_one_is_a_whole_word_only():
    secrets = Secrets.of({"Authorization": "Bearer sk-1"})
    assert len("sk-1") < LEAST
    assert secrets.stand_in("sk-1")
    assert not secrets.stand_in("task-1")
    assert secrets.masked(b'{"user":"task-1"}') == b'{"user":"task-1"}'


@pytest.mark.parametrize(
    "key",
    [
        "sk-proj-0123456789abcdefghij",
        "sk-ant-api03-0123456789abcdef",
        "hf_ABCDEFGHIJKLMNOPQRSTUV",
        "ghp_ABCDEFGHIJKLMNOPQRSTUV",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    ],
)
def test_what_looks_like_a_key_is_one_whosever_it_is(key):
    assert Secrets(frozenset()).stand_in(f"chat {key}")
    assert masked(f"--x {key} y") == "--x *** y"


@pytest.mark.parametrize(
    "text",
    ["ses_0123456789abcdefghij", "0197f6a2-7c3e-7d2a-b3a1-0123456789ab", "task-2026-11-22-a-long-name"],
)
def test_usual_names_of_sessions_are_none(text):
    assert not Secrets(frozenset()).stand_in(text)


def test_headers_are_the_very_same_where_none_holds_a_secret():
    headers = CIMultiDict({"Authorization": f"Bearer {KEY}", "User-Agent": "a/1"})
    assert Secrets.of(headers).without(headers) is headers


def test_a_header_that_holds_one_is_left_out_with_all_its_values():
    headers = CIMultiDict([("Authorization", KEY), ("X-A", "1"), ("X-A", f"b {KEY}"), ("User-Agent", "a/1")])
    left = Secrets.of(headers).without(headers)
    assert dict(left) == {"Authorization": KEY, "User-Agent": "a/1"}


def test_no_secret_at_all():
    secrets = Secrets.of({"Authorization": "", "Cookie": ";", "X-Auth": "Basic !"}, "key=&x")
    assert not secrets.stand_in("anything")
    assert secrets.masked(b"{}") == b"{}"

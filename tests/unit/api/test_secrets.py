"""Credentials in wrong places are found, and no other text is mistaken for a credential."""

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
        ({"Cookie": f'theme="dark"; sid="{KEY}"'}, ""),
        ({"Proxy-Authorization": "Basic dXNlcjowMTIzNDU2Nzg5YWJjZGVmMDEyMw=="}, ""),
        ({}, f"beta=true&api_key={KEY}"),
    ],
)
def test_a_credential_is_recognised_in_headers_and_query_strings(headers, query):
    secrets = Secrets.of(headers, query)
    for text in (KEY, f"chat-{KEY}", f"agent/1 ({KEY})"):
        assert secrets.stand_in(text)
    assert secrets.masked(f'{{"user":"{KEY}"}}'.encode()) == b'{"user":"***"}'
    assert not secrets.stand_in("opencode/1.0 Bearer Basic theme sid beta")


def test_a_short_credential_matches_only_as_a_whole_word():
    secrets = Secrets.of({"Authorization": "Bearer sk-1"})
    assert len("sk-1") < LEAST
    assert secrets.stand_in("sk-1")
    assert not secrets.stand_in("task-1")
    assert secrets.masked(b'{"user":"task-1"}') == b'{"user":"task-1"}'


@pytest.mark.parametrize(
    ("text", "is_key"),
    [
        ("sk-proj-0123456789abcdefghij", True),
        ("sk-ant-api03-0123456789abcdef", True),
        ("hf_ABCDEFGHIJKLMNOPQRSTUV", True),
        ("ghp_ABCDEFGHIJKLMNOPQRSTUV", True),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", True),
        ("ses_0123456789abcdefghij", False),  # usual names of sessions
        ("0197f6a2-7c3e-7d2a-b3a1-0123456789ab", False),
        ("task-2026-11-22-a-long-name", False),
    ],
)
def test_a_text_with_the_form_of_a_known_key_is_a_credential(text, is_key):
    assert Secrets(frozenset()).stand_in(f"chat {text}") is is_key
    assert masked(f"--x {text} y") == f"--x {'***' if is_key else text} y"


def test_a_header_that_contains_a_secret_is_removed_with_all_its_values():
    headers = CIMultiDict([("Authorization", KEY), ("X-A", "1"), ("X-A", f"b {KEY}"), ("User-Agent", "a/1")])
    left = Secrets.of(headers).without(headers)
    assert dict(left) == {"Authorization": KEY, "User-Agent": "a/1"}
    assert Secrets.of(left).without(left) is left


def test_empty_credentials_mask_nothing():
    secrets = Secrets.of({"Authorization": "", "Cookie": ";", "X-Auth": "Basic !"}, "key=&x")
    assert not secrets.stand_in("anything")
    assert secrets.masked(b"{}") == b"{}"

"""What a replay changes in a recorded request, and what it leaves unchanged."""

from __future__ import annotations

import pytest

from slotkeeper.api.head import Api
from slotkeeper.bench.replay import Entry, capped, generates, shot


def entry(path="/v1/chat/completions", method="POST", body=None, headers=None):
    return Entry(
        at=0.0,
        client="pi",
        session="main1",
        method=method,
        path=path,
        headers=headers or {},
        body={"messages": []} if body is None else body,
        kind="t1.0",
    )


@pytest.mark.parametrize(
    ("api", "body", "expected"),
    [
        (Api.CHAT, {}, {"max_tokens": 64}),
        (Api.CHAT, {"max_completion_tokens": 4096}, {"max_completion_tokens": 64}),
        (Api.CHAT, {"max_tokens": 16}, {"max_tokens": 16}),
        (Api.CHAT, {"max_tokens": 0}, {"max_tokens": 0}),  # prefill only
        (Api.CHAT, {"max_tokens": -1}, {"max_tokens": 64}),
        (Api.CHAT, {"max_tokens": None}, {"max_tokens": 64}),
        (Api.CHAT, {"max_tokens": 9, "n_predict": 900}, {"max_tokens": 9, "n_predict": 64}),
        (Api.MESSAGES, {"max_tokens": 32000}, {"max_tokens": 64}),
        (Api.RESPONSES, {}, {"max_output_tokens": 64}),
        (Api.COMPLETION, {"n_predict": -1}, {"n_predict": 64}),
        (Api.COMPLETIONS, {}, {"max_tokens": 64}),
        (Api.INFILL, {}, {"n_predict": 64}),
    ],
)
def test_the_answer_length_is_capped_under_the_field_name_of_the_api(api, body, expected):
    assert capped(api, body, 64) == expected


def test_other_fields_of_the_body_and_their_order_are_unchanged():
    body = {"z": 1, "max_tokens": 900, "messages": [], "a": 2}
    assert list(capped(Api.CHAT, body, 64).items()) == [
        ("z", 1),
        ("max_tokens", 64),
        ("messages", []),
        ("a", 2),
    ]
    assert body["max_tokens"] == 900


def test_credentials_of_the_recording_are_not_sent():
    headers = {"Authorization": "Bearer x", "X-Api-Key": "y", "x-session-id": "7", "Connection": "keep-alive"}
    assert shot(entry(headers=headers), 64).headers == {"x-session-id": "7"}


def test_sessions_of_two_clients_with_the_same_name_stay_separate():
    assert shot(entry(), 64).session == "pi/main1"


@pytest.mark.parametrize(
    ("path", "method", "expected"),
    [
        ("/v1/chat/completions", "POST", True),
        ("/v1/messages?beta=true", "POST", True),
        ("/v1/models", "GET", False),
        ("/v1/messages/count_tokens", "POST", False),
    ],
)
def test_only_requests_that_generate_are_sent(path, method, expected):
    assert generates(entry(path, method)) is expected

"""Names that clients give their conversations. Headers are spelled as the clients send them."""

import pytest

from slotkeeper.api.document import LONGEST_NAME, named

SESSION = "0aa1c2de-7b22-4d6e-9a29-3bed594b0250"
CODEX = {"session-id": "s1", "x-codex-window-id": "s1:0", "x-client-request-id": "s1"}
TOO_LONG = "x" * (LONGEST_NAME + 1)


@pytest.mark.parametrize(
    ("headers", "doc", "name"),
    [
        ({"x-session-id": "ses_1", "x-session-affinity": "ses_1"}, {}, "ses_1"),  # opencode
        ({"x-session-affinity": "ses_1"}, {}, "ses_1"),
        ({"x-affinity": "a-1"}, {}, "a-1"),  # mistral-vibe
        ({"session_id": "p", "x-client-request-id": "r"}, {"prompt_cache_key": "p"}, "p"),  # pi
        ({"X-Conversation-Id": "c"}, {"prompt_cache_key": "p"}, "c"),
        ({"X-SLOTKEEPER-CONVERSATION": "mine", "thread-id": "t"}, {"session_id": "s"}, "mine"),
        ({}, {"prompt_cache_key": "p", "session_id": "s"}, "s"),
        ({}, {"conversation": {"id": "c"}}, "c"),
        ({}, {"metadata": {"conversation_id": "c"}}, "c"),
        ({"user-agent": "ls/JS 5.23.2", "x-stainless-retry-count": "0"}, {"model": "m"}, None),
        ({"session_id": ""}, {"session_id": 7}, None),
        ({**CODEX, "thread-id": "s1"}, {"prompt_cache_key": "s1"}, "s1"),
        ({**CODEX, "thread-id": "t2"}, {"prompt_cache_key": "s1"}, "t2"),  # an agent of its own
        ({}, {"prompt_cache_key": "s1", "client_metadata": {"session_id": "s1", "thread_id": "t2"}}, "t2"),
        ({"x-session-id": TOO_LONG}, {"session_id": "s"}, "s"),
        ({}, {"session_id": TOO_LONG}, None),
        ({"Authorization": "Bearer sk-secret", "x-session-id": "s"}, {}, "s"),  # a part of a credential
    ],
)
def test_the_most_specific_name_is_the_name_of_the_conversation(headers, doc, name):
    assert named(headers, doc) == name


@pytest.mark.parametrize(
    ("user", "name"),
    [
        (f"user_{'ab' * 32}_account__session_{SESSION}", SESSION),
        (f"user_{'ab' * 32}_account_{SESSION[::-1]}_session_{SESSION}", SESSION),
        (f'{{"device_id":"d","account_uuid":"","session_id":"{SESSION}"}}', SESSION),
        (f"user_{'ab' * 32}", None),
        ('{"device_id":"d"}', None),
        ('{"device_id":', None),
        ('{"session_id":7}', None),
        ("alice", None),
        (7, None),
    ],
)
def test_a_user_id_names_the_conversation_only_if_it_contains_a_session(user, name):
    assert named({}, {"metadata": {"user_id": user}}) == name


@pytest.mark.parametrize("credential", [{"Authorization": "Bearer sk-secret"}, {"x-api-key": "sk-secret"}])
@pytest.mark.parametrize(
    ("headers", "doc"),
    [({"x-session-id": "sk-secret"}, {}), ({}, {"prompt_cache_key": "sk-secret"})],
)
def test_a_credential_is_never_a_name(credential, headers, doc):
    assert named({**credential, **headers}, doc) is None

import pytest

from slotkeeper.api.answers.answer import READINGS
from slotkeeper.api.head import Api, classify, is_for_clients, is_open, is_shared
from slotkeeper.api.request import CAPS
from slotkeeper.observe.spans import OPERATIONS


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/chat/completions", Api.CHAT),
        ("/v1/completions", Api.COMPLETIONS),
        ("/completions", Api.COMPLETION),
        ("/completion", Api.COMPLETION),
        ("/infill", Api.INFILL),
        ("/responses", Api.RESPONSES),
        ("/v1/messages", Api.MESSAGES),
        ("/v1/embeddings", Api.TASK),
        ("/reranking", Api.TASK),
        ("/v1/audio/transcriptions", Api.TASK),
        ("/v1/systemone", Api.TASK),
        ("/slots/0", Api.CONTROL),
        ("/slots/", Api.CONTROL),
        ("/slots/abc", Api.CONTROL),
        ("/slots", Api.OTHER),
        ("/slots/0/x", Api.OTHER),
        ("/v1/messages/count_tokens", Api.OTHER),
        ("/v1/responses/input_tokens", Api.OTHER),
        ("/v1/chat/completions/control", Api.OTHER),
        ("/v1/chat/completions/", Api.OTHER),
        ("/V1/completions", Api.OTHER),
        ("/v1%2Fcompletions", Api.COMPLETIONS),  # decoded as the engine decodes it
        ("/%76%31/messages", Api.MESSAGES),
        ("/tokenize", Api.OTHER),
        ("", Api.OTHER),
    ],
)
def test_a_post_path_has_the_same_api_as_in_the_engine(path, api):
    assert classify("POST", path) is api
    assert {classify(method, path) for method in ("GET", "HEAD", "OPTIONS", "DELETE")} == {Api.OTHER}


def test_only_generating_routes_can_be_pinned_and_messages_cannot():
    generating = {api for api in Api if api.generates}
    assert generating == {
        Api.CHAT,
        Api.COMPLETIONS,
        Api.COMPLETION,
        Api.INFILL,
        Api.RESPONSES,
        Api.MESSAGES,
    }
    assert {api for api in Api if api.pinnable} == generating - {Api.MESSAGES}


@pytest.mark.parametrize(
    ("table", "where"),
    [
        (READINGS, "READINGS in answer.py"),
        (CAPS, "CAPS in request.py"),
        (OPERATIONS, "OPERATIONS in spans.py"),
    ],
    ids=["READINGS", "CAPS", "OPERATIONS"],
)
def test_each_table_has_every_api_that_generates(table, where):
    assert set(table) == {api for api in Api if api.generates}, f"add the API to {where}"


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_routes_and_preflight_requests_need_no_key(path):
    assert is_open("GET", path)
    assert is_open("HEAD", path)
    assert is_open("OPTIONS", "/slots")
    assert not is_open("POST", path)
    assert not is_open("GET", f"{path}/")


@pytest.mark.parametrize(
    ("for_clients", "method", "paths"),
    [
        (False, "GET", "/slots /metrics / /index.html /v1/stream /%73lots /v1/models/../slots //slots"),
        (False, "GET", "/props%00"),
        (False, "HEAD", "/slots"),
        (False, "DELETE", "/v1/models"),
        (False, "POST", "/slots/0 /props /lora-adapters /models/unload /v1/chat/completions/control"),
        (
            True,
            "POST",
            "/v1/chat/completions /v1/messages /v1/embeddings /tokenize /v1/messages/count_tokens",
        ),
        (True, "POST", "/v1/chat/completions/input_tokens /responses/input_tokens"),
        (True, "GET", "/v1/models /props"),
    ],
)
def test_routes_that_show_or_change_shared_state_are_for_operators(for_clients, method, paths):
    for path in paths.split():
        assert is_for_clients(classify(method, path), method, path) is for_clients, path


@pytest.mark.parametrize(
    ("method", "path", "shared"),
    [
        ("GET", "/slots", True),
        ("HEAD", "/slots", True),
        ("GET", "/%73lots", True),
        ("POST", "/tools", True),
        ("POST", "/v1/chat/completions/control", True),
        ("GET", "/props", False),
        ("GET", "/metrics", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
def test_routes_by_which_one_client_sees_or_changes_the_work_of_others_are_known(method, path, shared):
    assert is_shared(method, path) is shared

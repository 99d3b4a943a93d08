import json

import pytest

from slotkeeper.api.answers.answer import SseSplitter
from slotkeeper.api.errors import ClientFault, OurFault, UpstreamFault, body, retold, sse
from slotkeeper.api.head import Api


@pytest.mark.parametrize(
    ("fault", "status", "kind", "anthropic"),
    [
        (ClientFault("x"), 400, "invalid_request_error", "invalid_request_error"),
        (ClientFault("x", status=401), 401, "authentication_error", "authentication_error"),
        (ClientFault("x", status=413), 413, "invalid_request_error", "request_too_large"),
        (ClientFault("x", status=429, retry_after=3), 429, "rate_limit_error", "rate_limit_error"),
        (
            ClientFault("x", type="exceed_context_size_error"),
            400,
            "exceed_context_size_error",
            "invalid_request_error",
        ),
        (UpstreamFault("x"), 502, "unavailable_error", "api_error"),
        (UpstreamFault("x", status=503, retry_after=1), 503, "unavailable_error", "overloaded_error"),
        (UpstreamFault("x", status=504), 504, "unavailable_error", "timeout_error"),
        (OurFault("x"), 500, "server_error", "api_error"),
        (OurFault("x", status=507), 507, "server_error", "api_error"),
    ],
)
def test_each_fault_has_its_status_and_its_type_in_each_api(fault, status, kind, anthropic):
    assert fault.status == status
    for api in Api:
        document = json.loads(body(fault, api))
        if api is Api.MESSAGES:
            assert document == {"type": "error", "error": {"type": anthropic, "message": "x"}}
        else:
            error = {"code": status, "message": "x", "type": kind, "param": None}
            assert document == {"error": error}


@pytest.mark.parametrize("api", list(Api))
def test_a_broken_stream_ends_with_one_event_of_its_api(api):
    splitter = SseSplitter()
    (event,) = splitter.feed(sse(UpstreamFault("the engine\nis gone"), api))
    document = json.loads(event.data)
    assert document["error"]["message"] == "the engine\nis gone"
    assert event.name == ("error" if api in {Api.MESSAGES, Api.RESPONSES} else "")
    assert document.get("type") == ("error" if event.name else None)
    if api is Api.RESPONSES:
        assert (document["code"], document["message"]) == (502, "the engine\nis gone")


def test_faults_show_their_family_and_status_and_message():
    fault = UpstreamFault("gone", retry_after=2)
    assert (str(fault), fault.retry_after) == ("gone", 2)
    assert repr(fault) == "<UpstreamFault 502 unavailable_error: gone>"


def test_the_words_of_an_engines_error_reach_its_client_and_no_log():
    """It may quote the prompt, and a gateway's refusal the key."""
    said = json.dumps({"error": {"message": "Incorrect key: my-own-secret", "type": "t"}}).encode()
    fault = retold(401, said)
    assert b"my-own-secret" in sse(fault, Api.CHAT)
    assert fault.loggable == "the engine answered 401"

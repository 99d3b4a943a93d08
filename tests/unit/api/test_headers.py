import pytest

from slotkeeper.api import head
from slotkeeper.api.head import forwardable, request_id


def test_hop_by_hop_headers_and_headers_named_by_connection_are_not_forwarded():
    sent = [
        ("Connection", "close, X-Private"),
        ("connection", " x-more"),
        ("Keep-Alive", "timeout=5"),
        ("TE", "trailers"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "h2c"),
        ("Proxy-Connection", "close"),
        ("X-PRIVATE", "1"),
        ("X-More", "2"),
        ("Accept", "text/event-stream"),
    ]
    assert forwardable(sent) == [("Accept", "text/event-stream")]


def test_header_values_and_their_order_are_kept():
    sent = [("Set-Cookie", "a=1"), ("X-A", ""), ("set-cookie", "b=2"), ("Authorization", "Bearer k")]
    assert forwardable(iter(sent)) == sent


def test_dropped_headers_match_in_any_case():
    sent = [("Host", "x"), ("content-length", "3"), ("X-A", "1")]
    assert forwardable(sent, drop=("host", "Content-Length")) == [("X-A", "1")]


@pytest.mark.parametrize("value", ["a", "req-1_2.3:4/5+6=7@8~9", "x" * 128])
def test_a_safe_id_is_accepted(value):
    assert request_id(value, lambda: "fresh") == value


@pytest.mark.parametrize("value", [None, "", "x" * 129, "a b", "a\n", "a\r\nX: y", "é", '"', "<x>"])
def test_an_unsafe_id_is_replaced(value):
    assert request_id(value, lambda: "fresh") == "fresh"


def test_own_headers_have_the_slotkeeper_prefix():
    ours = (head.SLOT, head.DECISION, head.PREDICTED, head.CONVERSATION, head.BYPASS)
    assert all(name.startswith("X-Slotkeeper-") for name in ours)
    assert head.REQUEST_ID == "X-Request-Id"

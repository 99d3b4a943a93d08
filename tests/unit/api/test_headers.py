import pytest

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


def test_header_values_and_their_order_are_kept_and_dropped_ones_match_in_any_case():
    sent = [("Set-Cookie", "a=1"), ("X-A", ""), ("set-cookie", "b=2"), ("Authorization", "Bearer k")]
    more = [("Host", "x"), ("content-length", "3")]
    assert forwardable(iter(sent + more), drop=("host", "Content-Length")) == sent


@pytest.mark.parametrize(
    ("value", "safe"),
    [
        *((value, True) for value in ("a", "req-1_2.3:4/5+6=7@8~9", "x" * 128)),
        *((value, False) for value in (None, "", "x" * 129, "a b", "a\n", "a\r\nX: y", "é", '"', "<x>")),
    ],
)
def test_an_unsafe_id_is_replaced(value, safe):
    assert request_id(value, lambda: "fresh") == (value if safe else "fresh")

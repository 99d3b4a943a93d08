"""Which headers a proxy may pass on, and the names of our own (docs/reference.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

REQUEST_ID: Final = "X-Request-Id"
SLOT: Final = "X-Slotkeeper-Slot"
DECISION: Final = "X-Slotkeeper-Decision"
PREDICTED: Final = "X-Slotkeeper-Predicted"  # tokens that we expect the engine to reuse
PLANTED: Final = "X-Slotkeeper-Planted"  # tokens computed a moment before for this very request
REWRITTEN: Final = "X-Slotkeeper-Rewritten"  # the rules that changed the request on its way
CONVERSATION: Final = "X-Slotkeeper-Conversation"  # a client's hint
BYPASS: Final = "X-Slotkeeper-Bypass"  # "1": straight through, unpinned
HOPS: Final = "X-Slotkeeper-Hops"  # the sidecars that a request has come through, to notice a circle

AUTH: Final = ("Authorization", "X-Api-Key")  # what llama-server reads, in its order

TRACE_PARENT: Final = "traceparent"  # W3C Trace Context

# RFC 9110 section 7.6.1, and proxy-connection, which is not in it but which clients send.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "proxy-connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    },
)

_SAFE_ID: Final = re.compile(r"[A-Za-z0-9._~:+/=@-]{1,128}")


def forwardable(
    headers: Iterable[tuple[str, str]],
    *,
    drop: Collection[str] = (),
) -> list[tuple[str, str]]:
    """The headers that go on, in order and with every value: not those of this hop, not those in `drop`."""
    pairs = list(headers)
    unwanted = HOP_BY_HOP | {name.lower() for name in drop}
    for name, value in pairs:
        if name.lower() == "connection":
            unwanted |= {token.strip().lower() for token in value.split(",")}
    return [(name, value) for name, value in pairs if name.lower() not in unwanted]


def hops(values: Iterable[str]) -> list[str]:
    """The sidecars named in every `HOPS` header of a request, the first in front."""
    return [name for value in values for part in value.split(",") if (name := part.strip())]


def request_id(value: str | None, fresh: Callable[[], str]) -> str:
    """The client's own id where it is safe in a log and a header, else a fresh one."""
    return value if value is not None and _SAFE_ID.fullmatch(value) else fresh()

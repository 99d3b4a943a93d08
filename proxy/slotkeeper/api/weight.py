"""Bounds on what a body may hold, checked by counting its bytes before it is parsed."""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc
from slotkeeper.api.errors import ClientFault

LARGE: Final = 256 * 1024  # bytes of a body that is read beside the event loop
BRACES: Final = 2_000  # objects in it, likewise
MOST_VALUES: Final = 2_000_000  # more commas and brackets than a prompt of any model has
MOST_MESSAGES: Final = 20_000
MOST_DEEP: Final = 512  # lists and objects in one another; no client nests a tool's schema deeper than 20
_LISTS: Final = ("messages", "input", "tools", "system")


def is_large(body: bytes) -> bool:
    """Whether reading it takes so long that others would notice."""
    return len(body) > LARGE or body.count(b"{") > BRACES


def check_values(body: bytes) -> None:
    """Raises ClientFault where reading it would take more memory than a request is worth."""
    if len(body) <= MOST_VALUES:
        return
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MOST_VALUES:
        raise ClientFault(f"the body has more than {MOST_VALUES:,} values; send a shorter prompt", status=413)


def check_depth(body: bytes, doc: Doc) -> None:
    """Raises ClientFault where functions that call themselves would run out of stack."""
    if body.count(b"[") + body.count(b"{") <= MOST_DEEP:
        return
    level: list[Any] = [doc]
    for _ in range(MOST_DEEP):
        inner = [value for outer in level for value in (outer.values() if type(outer) is dict else outer)]
        level = [value for value in inner if type(value) is dict or type(value) is list]
        if not level:
            return
    raise ClientFault(f"the body is nested deeper than {MOST_DEEP}; send it flatter")


def check_lists(doc: Doc) -> None:
    """Raises ClientFault for more messages than a conversation has."""
    for name in _LISTS:
        listed = doc.get(name)
        if isinstance(listed, list) and len(listed) > MOST_MESSAGES:
            raise ClientFault(
                f"`{name}` has {len(listed):,} elements; at most {MOST_MESSAGES:,} are taken", status=413
            )

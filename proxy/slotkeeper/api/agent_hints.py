"""A request's hints about its urgency, and the limit of its answer.

| where | high | low |
|---|---|---|
| `X-Slotkeeper-Priority` | `high` | `low` |
| `nvext.agent_hints` (NVIDIA Dynamo): `strict_priority`, `latency_sensitivity` | above 0 | |
| `nvext.agent_hints`: `priority` | above 0 | below 0 |
| `service_tier` (OpenAI) | `priority` | `flex` |
| `priority` (vLLM) | below 0 | above 0 |

The first row that gives a priority counts. One of our headers with another value is refused. Fields of a body
may be meant for another server, so unreadable values are ignored; the engine gets the body unchanged. SGLang
serves higher values of `priority` first unless it is configured otherwise; Anthropic's `service_tier` does
not express urgency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, Self

from slotkeeper.api.document import Doc, integer, table
from slotkeeper.api.errors import ClientFault
from slotkeeper.api.head import MAX_WAIT, PRIORITY, Api
from slotkeeper.scheduler.types import NO_HINTS, Priority, RequestHints, SaidBy

LONGEST_WAIT: Final = 86_400.0  # seconds; a longer wait is a mistake
MOST_OUTPUT: Final = 2**31  # tokens; a longer answer is a mistake
TIERS: Final = {"priority": Priority.HIGH, "flex": Priority.LOW}
OPENAI: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.RESPONSES})  # have `service_tier` and `priority`


def in_body(api: Api, doc: Doc) -> RequestHints:
    """Return the hints from a request's body."""
    given = table(table(doc, "nvext"), "agent_hints")
    said = SaidBy.AGENT_HINTS
    priority = _by_agent(given)
    if priority is None and api in OPENAI:
        said, priority = SaidBy.BODY, _by_tier(doc)
    output = _number(given.get("osl"))
    return RequestHints(
        priority=priority or Priority.NORMAL,
        said_by=said if priority else SaidBy.NOTHING,
        output=int(output) if output is not None and 0 < output < MOST_OUTPUT else None,
        prefetch=given.get("speculative_prefill") is not False,
    )


def _by_agent(given: Doc) -> Priority | None:
    """Return the priority from Dynamo's hints, where higher numbers are more urgent; None without hints."""
    priority = _number(given.get("priority"))
    if any((_number(given.get(name)) or 0) > 0 for name in ("strict_priority", "latency_sensitivity")):
        return Priority.HIGH
    return None if priority is None else _signed(priority)


def _by_tier(doc: Doc) -> Priority | None:
    tier = doc.get("service_tier")
    if isinstance(tier, str) and tier in TIERS:
        return TIERS[tier]
    priority = _number(doc.get("priority"))
    return None if priority is None else _signed(-priority)


def _signed(number: float) -> Priority:
    return Priority.HIGH if number > 0 else Priority.LOW if number < 0 else Priority.NORMAL


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return value if known else None


# -- headers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The hints in our own headers; None for a header that is not there."""

    priority: Priority | None
    max_wait: float | None  # seconds

    @classmethod
    def by(cls, headers: Mapping[str, str]) -> Self:
        """Read our own headers. Raises ClientFault if a value is not valid."""
        asked, seconds = headers.get(PRIORITY), headers.get(MAX_WAIT)
        try:
            priority = None if asked is None else Priority(asked.strip().lower())
        except ValueError:
            raise ClientFault(f"{PRIORITY} has another value: say high, normal or low") from None
        try:
            wait = None if seconds is None else float(seconds)
        except ValueError:
            wait = -1.0
        if wait is not None and not 0 <= wait <= LONGEST_WAIT:
            raise ClientFault(
                f"{MAX_WAIT} has another value: say a number of seconds, {LONGEST_WAIT:.0f} at most"
            )
        return cls(priority, wait)

    def hints(self, of_body: RequestHints = NO_HINTS, *, aside: bool, since: float) -> RequestHints:
        """Return all hints of one request.

        `aside`: the request asks for a title, a suggestion or a summary. `since`: when its wait began, in
        seconds on the scheduler's clock.
        """
        if self.priority is not None:
            of_body = replace(of_body, priority=self.priority, said_by=SaidBy.HEADER)
        elif aside and of_body.said_by is SaidBy.NOTHING:
            of_body = replace(of_body, priority=Priority.LOW, said_by=SaidBy.SIDE_REQUEST)
        return of_body if self.max_wait is None else replace(of_body, start_by=since + self.max_wait)


NOTHING_ASKED: Final = Asked(None, None)


# Fields of each API that limit the answer's tokens.
CAPS: Final[dict[Api, tuple[str, ...]]] = {
    Api.CHAT: ("max_tokens", "max_completion_tokens", "n_predict"),
    Api.COMPLETIONS: ("max_tokens", "n_predict"),
    Api.COMPLETION: ("n_predict", "max_tokens"),
    Api.INFILL: ("n_predict", "max_tokens"),
    Api.RESPONSES: ("max_output_tokens", "n_predict"),
    Api.MESSAGES: ("max_tokens",),
}


def answer_cap(api: Api, doc: Doc) -> int | None:
    """Return the client's limit of the answer's tokens; None if there is no limit (-1, null)."""
    caps = (integer(doc.get(name)) for name in CAPS.get(api, ()))
    return min((cap for cap in caps if cap is not None and cap >= 0), default=None)

"""The boundaries of a request's prompt: by the markers of the engine's template, else by rendering.

Marks are found in a fraction of a millisecond. A chat is rendered otherwise only for what they cannot
tell: once where system text stands inside a user message, twice where the template is of no known family.
The last lines of a long message at the end are tokenized again, each with all that follows it.
"""

from __future__ import annotations

from asyncio import gather
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final

from slotkeeper.api.document import Doc, text
from slotkeeper.api.echo import words
from slotkeeper.api.request import Ask
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.render import FAILURES
from slotkeeper.scheduler.checkpoints import checkpoints_last
from slotkeeper.scheduler.endings import begins, endings, last_message
from slotkeeper.scheduler.structure import UNKNOWN, Boundary, BoundaryKind, Markers, boundaries
from slotkeeper.scheduler.tokens import Tokens

SHORTEST: Final = 512  # tokens: computing a shorter prompt takes no longer than rendering it again is worth
LEADING: Final = frozenset({"system", "developer"})
OTHER: Final[Doc] = {"role": "user", "content": "Zqx"}  # begins as hardly any message does

log = get_logger(__name__)


async def boundaries_of(
    link: EngineLink, ask: Ask, prompt: Tokens, auth: Mapping[str, str]
) -> tuple[Boundary, ...]:
    """Never raises for what the engine does: what cannot be rendered is left out."""
    markers = link.traits.markers if link.traits else UNKNOWN
    if ask.chat is None:
        return boundaries(prompt, markers)
    rendered: list[Boundary] = []
    if len(prompt) >= SHORTEST:
        rendered = await _tried(_rendered(link, ask.chat, prompt, markers, auth))
    found = boundaries(prompt, markers, rendered)
    if link.traits and checkpoints_last(link.traits):
        lines = await _tried(_lines(link, ask.chat, prompt, found, auth))
        return tuple(sorted((*found, *lines)))
    return found


async def _tried(looking: Awaitable[list[Boundary]]) -> list[Boundary]:
    try:
        return await looking
    except FAILURES as error:
        log.debug("boundaries_not_rendered", error=sayable(error))
        return []


async def _rendered(
    link: EngineLink, chat: Doc, prompt: Tokens, markers: Markers, auth: Mapping[str, str]
) -> list[Boundary]:
    """What must be found by rendering: where the prompt parts from one with another user message.

    That is where the message's text begins, or a token or two behind where both begin alike.
    """
    if markers.user and not markers.lead_inside:
        return []
    messages = chat["messages"]
    roles = [text(message, "role") for message in messages]
    lead = next((n for n, role in enumerate(roles) if role not in LEADING), len(roles))
    found = [Boundary(await _divergence_at(link, chat, messages[:lead], prompt, auth), BoundaryKind.HEAD)]
    last = max((n for n, role in enumerate(roles) if role == "user"), default=lead)
    if not markers.user and last > lead:
        found.append(
            Boundary(await _divergence_at(link, chat, messages[:last], prompt, auth), BoundaryKind.USER)
        )
    return found


async def _lines(
    link: EngineLink, chat: Doc, prompt: Tokens, found: Sequence[Boundary], auth: Mapping[str, str]
) -> list[Boundary]:
    """Where the last lines begin of a long user message at the end."""
    message, last = last_message(found, len(prompt)), chat["messages"][-1:]
    if message is None or not last or text(last[0], "role") != "user":
        return []
    ends = endings(words(last[0]))
    ids = await gather(*(link.render_text(end, auth) for end, _ in ends))
    places = [(begins(prompt, message, end), kind) for end, (_, kind) in zip(ids, ends, strict=True)]
    return [Boundary(at, kind) for at, kind in places if at is not None]


async def _divergence_at(
    link: EngineLink, chat: Doc, before: Sequence[Doc], prompt: Tokens, auth: Mapping[str, str]
) -> int:
    """Tokens that the prompt has in common with the one in which another message follows `before`."""
    return prompt.lcp(await link.render_chat({**chat, "messages": [*before, OTHER]}, auth))

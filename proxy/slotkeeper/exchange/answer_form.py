"""Chooses the form of an answer to request: as the client wants it, with progress, or as a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from slotkeeper.api.answer import ProgressFilter
from slotkeeper.api.assembling import Assembler, as_stream
from slotkeeper.api.errors import UpstreamFault
from slotkeeper.api.request import PROGRESS_ROUTES, Ask, ask_for, can_ask, can_assemble
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.types import Reason

# Requests that are not changed, or are so short that progress does not help.
NO_PROGRESS: Final = frozenset({Reason.BYPASS, Reason.BRIEF})


class NotAssembled(UpstreamFault):
    """A stream ended, but no whole answer could be assembled. The client has received no byte of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The body to send to the engine, and the filters for its answer."""

    body: bytes
    progress: ProgressFilter | None = None
    assembler: Assembler | None = None  # the client wants a whole answer, and the engine sends a stream


def form_for(ask: Ask | None, body: bytes, forward: Forward, link: EngineLink) -> AnswerForm:
    """Choose the form. Only a router's model is asked for a stream that the client did not request."""
    if ask is None:
        return AnswerForm(body=body)
    routed = bool(link.address.model) and link.assembles
    if routed and forward.reason is not Reason.BYPASS and can_assemble(ask):
        watched = ask.api in PROGRESS_ROUTES
        return AnswerForm(
            body=as_stream(body, ask.api, progress=watched),
            progress=ProgressFilter() if watched else None,
            assembler=Assembler(ask.api),
        )
    if forward.reason not in NO_PROGRESS and can_ask(ask):
        return AnswerForm(body=ask_for(body), progress=ProgressFilter())
    return AnswerForm(body=body)

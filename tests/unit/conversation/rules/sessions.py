"""A client's session through rules in mode fix, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Conversation, Layout, Match, Who
from slotkeeper.conversation.likeness import in_common, reply_key
from slotkeeper.conversation.rules import base
from slotkeeper.conversation.rules.apply import Outcome, canonical
from slotkeeper.conversation.rules.base import Mode, Room, Rule

Doc = dict[str, Any]


class Session:
    """One conversation, in which each request continues the one before it."""

    def __init__(self, rules: Sequence[Rule], api: Api = Api.CHAT, room: Room | None = None) -> None:
        self._rules, self._api, self.room = rules, api, room
        self.before: Conversation | None = None

    def send(self, doc: Doc) -> Outcome:
        """Return the request as it is sent. It is not edited in place, and a second pass changes nothing."""
        untouched = deepcopy(doc)
        received = self._laid_out(doc)
        assert received is not None
        match = Match(self.before, in_common(self.before, received) if self.before else 0)
        outcome = self._through(doc, received, match)
        again = self._laid_out(outcome.doc)
        assert again is not None
        assert self._through(outcome.doc, again, match).doc == outcome.doc
        assert doc == untouched
        self.before = Conversation(
            number=1,
            who=Who("client"),
            received=received,
            sent=outcome.layout,
            at=0.0,
            notes=outcome.notes,
        )
        return outcome

    def hears(self, said: str) -> None:
        """Take the engine's reply to the last request."""
        assert self.before is not None
        reply = {"role": "assistant", "content": said}
        self.before.replies[reply_key(reply)] = reply

    def _through(self, doc: Doc, layout: Layout, match: Match) -> Outcome:
        modes = {rule.name: Mode.FIX for rule in self._rules}
        more: dict[str, Any] = {"lay_out": self._laid_out, "room": self.room}
        return canonical(doc, layout, match, rules=self._rules, modes=modes, **more)

    def _laid_out(self, doc: Doc) -> Layout | None:
        return lay_out(self._api, doc)


def noted(text: str) -> tuple[str, ...]:
    """Return the facts in the notes at the end of a text."""
    opening = f"{base.OPENING}\n{base.HEADING}\n\n"
    return tuple(part.split(f"\n{base.CLOSING}")[0] for part in text.split(opening)[1:])

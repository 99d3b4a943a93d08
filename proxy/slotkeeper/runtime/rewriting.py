"""Requests on their way in: whose conversation each goes on, what its client changed, what is put right.

All decisions are made in `core.conversations` and `core.canonical`; here their figures are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from slotkeeper.core.canonical.apply import canonical
from slotkeeper.core.canonical.modes import Choice
from slotkeeper.core.canonical.registry import RULES
from slotkeeper.core.canonical.rules import Mode
from slotkeeper.core.canonical.shown import Change, changes
from slotkeeper.core.conversations.book import Conversations
from slotkeeper.core.conversations.record import Conversation, Who
from slotkeeper.core.tokens import Tokens
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.why.record import Decision, Parting
from slotkeeper.runtime.repeated import Judgement, cost_of, judge, parting, reply_parted, report
from slotkeeper.wire.document import Doc
from slotkeeper.wire.draft import Figures
from slotkeeper.wire.identity import named
from slotkeeper.wire.layout import lay_out
from slotkeeper.wire.layouts import Recent
from slotkeeper.wire.routes import Api


@dataclass(frozen=True, slots=True)
class Taken:
    """One request, from its coming to its answer."""

    request_id: str
    doc: Doc  # as it goes on
    body: bytes | None  # the same, written; None: the bytes that came
    conversation: Conversation  # that it is the last request of by now
    judged: Judgement
    changes: tuple[Change, ...]


class Rewriting:
    """Knows conversations, and applies the rules to what goes on in them."""

    def __init__(self, choice: Choice, metrics: Metrics, *, text: bool = False) -> None:
        """`text`: whether excerpts of prompts may be kept for whoever asks why."""
        self.conversations = Conversations()
        self._text = text
        self._before = Recent()
        self._choice = choice
        self._metrics = metrics

    def __repr__(self) -> str:
        return f"<Rewriting {self.conversations!r}>"

    def take(
        self,
        api: Api,
        doc: Doc,
        *,
        request_id: str,
        client: str,
        headers: Mapping[str, str],
        size: int,
        now: float,
    ) -> Taken | None:
        """The request as it goes on, and what is to be said of it; None for what is no chat.

        `size` bytes are its body, at `now` seconds.
        """
        layout = lay_out(api, doc, self._before.like(api, client, doc))
        if layout is None:
            return None
        known = self._before.add(api, client, doc, layout, size)
        who = Who(client=client, name=named(headers, doc))
        match = self.conversations.find(who, layout)
        modes = self._choice.for_client(headers.get("User-Agent", ""))
        outcome = canonical(
            doc, layout, match, rules=RULES, modes=modes, lay_out=lambda body: lay_out(api, body, known)
        )
        body = orjson.dumps(outcome.doc) if outcome.edits else None
        judged = judge(match, layout, outcome)
        conversation = self.conversations.saw(
            match,
            who,
            received=layout,
            sent=outcome.layout,
            notes=outcome.notes,
            told=outcome.told,
            now=now,
        )
        for done in outcome.done:
            self._metrics.rewritten(done.rule, fixed=done.mode is Mode.FIX)
        shown = changes(outcome.done, text=self._text)
        return Taken(request_id, outcome.doc, body, conversation, judged, shown)

    def answered(
        self,
        taken: Taken,
        reply: Doc | None,
        prompt: Tokens | None,
        figures: Figures,
        *,
        planted: int,
        decision: Decision | None = None,
    ) -> Parting | None:
        """The answer is over: keep what it says, and tell what the request's changes have cost.

        `planted` tokens were computed for it before it went on; `decision` is where that was.
        """
        if reply is not None:
            self.conversations.replied(taken.conversation, reply)
        judged, fixed = taken.judged, taken.body is not None
        cost = cost_of(judged, prompt, figures, planted)
        taken.conversation.tokens = prompt or taken.conversation.tokens
        if cost is None or cost.why.cause is None:
            return reply_parted(judged, decision, figures.cached)
        self._metrics.lost(cost.why.cause, cost.tokens)
        report(cost, request_id=taken.request_id, fixed=fixed)
        return parting(cost, cost.why.cause, prompt, judged.parent, fixed=fixed, text=self._text)

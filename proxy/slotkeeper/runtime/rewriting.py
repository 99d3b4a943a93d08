"""Requests on their way in: whose conversation each goes on, what its client changed, what is put right.

All decisions are made in `core.conversations` and `core.canonical`; here their figures are counted and
what was found is kept for whoever asks why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import orjson

from slotkeeper.core.canonical.apply import Outcome, canonical
from slotkeeper.core.canonical.modes import Choice
from slotkeeper.core.canonical.registry import RULES
from slotkeeper.core.canonical.rules import Mode
from slotkeeper.core.canonical.shown import Change, changes
from slotkeeper.core.conversations.book import Conversations
from slotkeeper.core.conversations.causes import Cause, Explained, explain, of_template
from slotkeeper.core.conversations.divergence import length, parted
from slotkeeper.core.conversations.record import Conversation, Match, Who
from slotkeeper.core.tokens import Tokens
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.wire.document import Doc
from slotkeeper.wire.draft import Figures
from slotkeeper.wire.identity import named
from slotkeeper.wire.layout import lay_out
from slotkeeper.wire.layouts import Recent, seen
from slotkeeper.wire.routes import Api

KEPT: Final = 256  # requests whose changes can be asked for
OPENING: Final = 16  # tokens, at most, that a template puts behind the messages to open a reply

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What was found of one request when it came."""

    request_id: str
    doc: Doc  # as it goes on
    body: bytes | None  # the same, written; None: the bytes that came
    conversation: Conversation  # that it is the last request of by now
    explained: Explained
    template: Cause | None  # should its tokens part where its texts do not
    parent: Tokens | None  # the prompt that it goes on from, where that is known
    remains: bool  # what goes on parts as well
    lost: float  # characters of its own text, by its length, that stand behind where it parts, unchanged


@dataclass(frozen=True, slots=True)
class Changed:
    """What is kept of a request for whoever asks why, in excerpts."""

    request_id: str
    explained: Explained
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it cost that a prompt did not go on where the one before it ended."""

    why: Explained
    first_token: int  # at which they part
    tokens: int  # computed again, though nothing in them had changed
    seconds: float | None


class Rewriting:
    """Knows conversations, and applies the rules to what goes on in them."""

    def __init__(self, choice: Choice, metrics: Metrics) -> None:
        self.conversations = Conversations()
        self.recent: deque[Changed] = deque(maxlen=KEPT)
        self._before = Recent()
        self._choice = choice
        self._metrics = metrics

    def __repr__(self) -> str:
        return f"<Rewriting {self.conversations!r}, {len(self.recent)} recent>"

    def take(
        self, api: Api, doc: Doc, *, request_id: str, client: str, headers: Mapping[str, str], now: float
    ) -> Taken | None:
        """The request as it goes on, and what is to be said of it; None for what is no chat."""
        layout = lay_out(api, doc, self._before.like(api, client, doc))
        if layout is None:
            return None
        self._before.add(api, client, doc, layout)
        known = seen(api, doc, layout)
        who = Who(client=client, name=named(headers, doc))
        match = self.conversations.find(who, layout)
        modes = self._choice.for_client(headers.get("User-Agent", ""))
        outcome = canonical(
            doc, layout, match, rules=RULES, modes=modes, lay_out=lambda body: lay_out(api, body, known)
        )
        explained, parent = explain(match, layout), match.before or match.sibling or match.beside
        template = of_template(parent.received) if parent else None
        tokens = parent.tokens if parent else None
        remains = explained.divergence is not None and not _mended(match, outcome)
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
        taken = Taken(
            request_id=request_id,
            doc=outcome.doc,
            body=orjson.dumps(outcome.doc) if outcome.edits else None,
            conversation=conversation,
            explained=explained,
            template=template,
            parent=tokens,
            remains=remains,
            lost=explained.divergence.lost / length(layout) if explained.divergence else 0.0,
        )
        self.recent.append(Changed(request_id, explained, changes(outcome.done)))
        return taken

    def answered(
        self, taken: Taken, reply: Doc | None, prompt: Tokens | None, figures: Figures, *, planted: int
    ) -> Cost | None:
        """The answer is over: keep what it says, and tell what the request's changes have cost.

        `planted` tokens were computed for it before it went on.
        """
        if reply is not None:
            self.conversations.replied(taken.conversation, reply)
        cost = cost_of(taken, prompt, figures, planted)
        taken.conversation.tokens = prompt or taken.conversation.tokens
        if cost is None or cost.why.cause is None:
            return None
        self._metrics.lost(cost.why.cause, cost.tokens)
        _report(taken, cost)
        return cost


def _mended(match: Match, outcome: Outcome) -> bool:
    """Whether what goes on continues what went on before."""
    before = match.before
    return bool(outcome.edits) and before is not None and parted(before.sent, outcome.layout) is None


def cost_of(taken: Taken, prompt: Tokens | None, figures: Figures, planted: int) -> Cost | None:
    """By the engine's figures; None where nothing parted, or where prompts or figures are not known."""
    parent, computed = taken.parent, figures.computed
    if parent is None or prompt is None or computed is None:
        return None
    common = prompt.lcp(parent)
    behind = len(parent) - common
    if taken.remains:
        why, tokens = taken.explained, min(behind, round(taken.lost * len(prompt)))
    elif behind > OPENING:
        why = replace(taken.explained, cause=taken.template, rule=None)
        tokens = behind
    elif taken.explained.divergence is not None:  # and it was put right
        why, tokens = taken.explained, 0
    else:
        return None
    tokens = max(0, min(tokens, computed + planted, len(prompt) - common))
    per_token = figures.prefill_ms / 1000 / computed if figures.prefill_ms and computed else None
    seconds = None if per_token is None else tokens * per_token
    return Cost(why=why, first_token=common, tokens=tokens, seconds=seconds)


def _report(taken: Taken, cost: Cost) -> None:
    why, place = cost.why, cost.why.divergence
    log.info(
        "prefix_changed",
        request_id=taken.request_id,
        kind=why.kind.value,
        cause=why.cause.value if why.cause else None,
        section=place.section.value if place else None,
        message=place.message if place else None,
        first_token=cost.first_token,
        tokens=cost.tokens,
        seconds=round(cost.seconds, 4) if cost.seconds is not None else None,
        rule=why.rule.value if why.rule else None,
        fixed=taken.body is not None,
    )

"""Requests on arrival: which conversation each continues, what its client rewrote, and what rules undo.

`conversation`, its `rules` and `scheduler.requests.pending` make all decisions; this module only computes
figures. Before a request is sent, only its two forms are made: its own, and the one that the rules propose.
The report on it is made while the engine works on the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.document import Doc, RecentRequests, SeenRequest, most_like, named, seen
from slotkeeper.api.head import Api
from slotkeeper.api.request import answer_cap, lay_out
from slotkeeper.conversation.causes import Echo, Explained, by_our_rule, echo, explain, of_template
from slotkeeper.conversation.divergence import CAUSES, Cause, length, parted
from slotkeeper.conversation.layout import (
    Conversation,
    Keys,
    Layout,
    Match,
    Who,
)
from slotkeeper.conversation.likeness import Conversations, goes_on, keys_of
from slotkeeper.conversation.rules.apply import RULES, Outcome, ShownChange, canonical, changes
from slotkeeper.conversation.rules.base import Choice, Mode, Modes, Room
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Action, Metrics
from slotkeeper.observe.request_record import Decision, PromptDivergence
from slotkeeper.runtime.tasks import Runner, here
from slotkeeper.scheduler.prompts.tokens import Tokens

# -- cost of a divergence --------------------------------------------------------------------------------

OPENING: Final = 16  # tokens, at most, that a template puts after the messages to open a reply
OF_TEMPLATE: Final = frozenset({Cause.TEMPLATE_STRIPS_REASONING, Cause.TEMPLATE_RERENDERS})
OVERSHOOT: Final = 8  # tokens, at most, that a slot holds after a reply, or that the reply is shorter by
LEAD: Final = 24  # tokens shown before a divergence
BEHIND: Final = 24  # tokens shown after it

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceReport:
    """Why a request diverges from the one before it. The cost follows with the answer."""

    explained: Explained
    template: Cause | None  # the cause if tokens diverge although texts do not
    parent: Tokens | None  # the prompt that it continues, if known
    remains: bool  # the form that is sent diverges too
    echo: Echo | None  # how the newest reply came back
    lost: float  # share of its own text that is unchanged but after the divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a prompt that does not continue the one before it."""

    why: Explained
    first_token: int  # index of the first token that differs
    tokens: int  # tokens computed again although they had not changed
    seconds: float | None


def judge(match: Match, layout: Layout, sent: Outcome) -> DivergenceReport:
    """Return the report on a request that arrived as `layout` and is sent as `sent`."""
    explained = by_our_rule(match, layout, sent.layout, sent.fixed) or explain(match, layout)
    divergence, before = explained.divergence, match.nearest
    return DivergenceReport(
        explained=explained,
        template=of_template(before.received) if before else None,
        parent=before.tokens if before else None,
        remains=divergence is not None and not _mended(match, sent),
        echo=echo(match.before, layout) if match.before and divergence is None else None,
        lost=divergence.lost / length(layout) if divergence and divergence.lost else 0.0,
    )


def _mended(match: Match, outcome: Outcome) -> bool:
    """Whether the form that is sent continues the form of the request before it that was sent."""
    before = match.before
    return bool(outcome.edits) and before is not None and parted(before.sent, outcome.layout) is None


def cost_of(judged: DivergenceReport, prompt: Tokens | None, figures: Figures, planted: int) -> Cost | None:
    """Return the cost by the engine's figures; None without a divergence, prompts or figures."""
    parent, computed = judged.parent, figures.computed
    if parent is None or prompt is None or computed is None:
        return None
    common = prompt.lcp(parent)
    behind = len(parent) - common
    if judged.remains:
        why, tokens = judged.explained, min(behind, round(judged.lost * len(prompt)))
    elif behind > OPENING:
        why = replace(judged.explained, cause=judged.template, rule=None)
        tokens = behind
    elif judged.explained.divergence is not None:  # a rule undid the divergence
        why, tokens = judged.explained, 0
    else:
        return None
    tokens = max(0, min(tokens, computed + planted, len(prompt) - common))
    per_token = figures.prefill_ms / 1000 / computed if figures.prefill_ms and computed else None
    seconds = None if per_token is None else tokens * per_token
    return Cost(why=why, first_token=common, tokens=tokens, seconds=seconds)


def report(cost: Cost, *, request_id: str, fixed: bool) -> None:
    """Log a divergence and its cost, without any text of the prompt."""
    why, place = cost.why, cost.why.divergence
    log.info(
        "prefix_changed",
        request_id=request_id,
        kind=why.kind.value,
        cause=why.cause.value if why.cause else None,
        section=place.section.value if place else None,
        message=place.message if place else None,
        first_token=cost.first_token,
        tokens=cost.tokens,
        seconds=round(cost.seconds, 4) if cost.seconds is not None else None,
        rule=why.rule.value if why.rule else None,
        fixed=fixed,
    )


def prompt_divergence(
    cost: Cost, cause: Cause, prompt: Tokens | None, parent: Tokens | None, *, fixed: bool, text: bool
) -> PromptDivergence:
    """Return the divergence for `why`, with the tokens around it if `text` may be kept."""
    first, place = cost.first_token, None if cause in OF_TEMPLATE else cost.why.divergence
    since, until = max(0, first - LEAD), first + BEHIND
    was, now = (
        tuple(side.cut(since, min(until, len(side))).ids()) if text and side is not None else ()
        for side in (parent, prompt)
    )
    return PromptDivergence(
        cause=cause,
        section=place.section if place else None,
        message=place.message if place else None,
        token=first,
        tokens=cost.tokens,
        seconds=cost.seconds,
        rule=cost.why.rule,
        fixed=fixed,
        was=was,
        now=now,
        lead=first - since,
    )


def reply_parted(
    judged: DivergenceReport, decision: Decision | None, cached: int | None
) -> PromptDivergence | None:
    """Return the divergence of a newest reply that came back changed, by the engine's count; else None."""
    if judged.echo is None or judged.parent is None or cached is None:
        return None
    if decision is None or decision.common is None:
        return None
    if decision.common < len(judged.parent) - OPENING or cached >= decision.held - OVERSHOOT:
        return None
    return PromptDivergence(
        cause=judged.echo.cause,
        section=judged.echo.section,
        message=judged.echo.message,
        token=decision.common,
        tokens=0,
        seconds=None,
        rule=CAUSES[judged.echo.cause].rule,
        fixed=False,
        reply=True,
    )


# -- requests --------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Taken:
    """One request, from its arrival to its answer."""

    request_id: str
    who: Who
    now: float
    received: Layout
    match: Match  # by the conversations that were known at its arrival
    outcome: Outcome  # the form that the rules propose
    changed: bool | None  # whether that form is sent; None: not decided yet
    conversation: Conversation | None = None  # the one to which it belongs, once it is entered there
    ahead: Mapping[bool, DivergenceReport] = field(default_factory=dict)  # reports made in advance, by form
    judged: DivergenceReport | None = None
    changes: tuple[ShownChange, ...] = ()
    keyed: bool = False  # it holds a key: no excerpts are kept of it

    @property
    def quotable(self) -> bool:
        """Whether excerpts of it, and of the request before it, hold no key."""
        others = (self.conversation, self.match.before)
        return not (self.keyed or any(one is not None and one.keyed for one in others))

    @property
    def rewritten(self) -> Doc | None:
        """The body that the rules propose; None if they change nothing."""
        return self.outcome.doc if self.outcome.edits else None

    @property
    def rules(self) -> list[str]:
        """The names of the rules that change the request."""
        fixing = [done for done in self.outcome.done if done.mode is Mode.FIX]
        return sorted({done.rule.value if done.rule else "notes" for done in fixing})

    @property
    def sent(self) -> Outcome:
        """The form that is sent; the original form until that is decided."""
        return self.form(changed=bool(self.changed))

    def form(self, *, changed: bool) -> Outcome:
        own = self.rewritten is not None and not changed
        return Outcome(self.outcome.doc, self.received, self.outcome.done) if own else self.outcome


class Rewriting:
    """Knows the conversations, and applies the rules to their requests."""

    def __init__(self, choice: Choice, metrics: Metrics, *, text: bool = False) -> None:
        """`text`: whether excerpts of prompts may be kept for `why`."""
        self.conversations = Conversations()
        self.text = text
        self._before = RecentRequests()
        self._choice = choice
        self._metrics = metrics
        self._new: list[Taken] = []  # requests that are not entered in `conversations` yet

    def __repr__(self) -> str:
        return f"<Rewriting {self.conversations!r}>"

    async def take(
        self,
        api: Api,
        doc: Doc,
        *,
        run: Runner = here,
        request_id: str,
        client: str,
        headers: Mapping[str, str],
        size: int,
        now: float,
        context: int = 0,
    ) -> Taken | None:
        """Match a request to its conversation and apply the rules; None if it is not a chat.

        The body has `size` bytes; `now` is in seconds. A slot holds `context` tokens; 0: unknown. `run` runs
        the work. Outside the event loop the work uses copies of the conversations, and makes the reports on
        both forms before one is chosen.
        """
        self._enter_all()
        who, aside = Who(client=client, name=named(headers, doc)), run is not here
        laid = await run(_laid_out, api, doc, who, self._before.of(api, client))
        if laid is None:
            return None
        layout, found_by = laid
        near = self.conversations.near(who, found_by, still=aside)
        modes = self._choice.for_client(headers.get("User-Agent", ""))
        room = Room(context, answer_cap(api, doc)) if context else None
        found = partial(goes_on, who, layout, found_by, near)
        match, outcome = await run(_ruled, api, doc, layout, found, modes=modes, room=room)
        taken = Taken(
            request_id=request_id,
            who=who,
            now=now,
            received=layout,
            match=match,
            outcome=outcome,
            changed=None if outcome.edits else False,
        )
        if aside:
            taken.ahead = await run(_judged, taken)
        self._before.add(api, client, doc, layout, size)
        self._new.append(taken)
        return taken

    def goes(self, taken: Taken, *, changed: bool) -> None:
        """Record the form in which the request is sent. If it is sent twice, the second time counts."""
        before, taken.changed = taken.changed, changed
        line, sent = taken.conversation, taken.sent
        if line is not None and changed != bool(before):
            self.conversations.resent(
                line, taken.received, sent=sent.layout, notes=sent.notes, rules=sent.fixed
            )

    def settle(self, taken: Taken) -> DivergenceReport | None:
        """Enter the request in its conversation. Returns its report; None while its form is not decided."""
        self._enter_all()
        if taken.judged is None and taken.changed is not None:
            taken.judged = taken.ahead.get(taken.changed) or judge(taken.match, taken.received, taken.sent)
            for done in taken.outcome.done:
                put_right: Action = "fixed" if taken.changed or taken.rewritten is None else "declined"
                self._metrics.rewritten(done.rule, put_right if done.mode is Mode.FIX else "observed")
            declined = taken.rewritten is not None and not taken.changed
            taken.changes = changes(taken.outcome.done, text=self.text and taken.quotable, declined=declined)
        return taken.judged

    def replied(self, taken: Taken, reply: Doc) -> None:
        """Keep the reply of a finished answer: the conversation goes on with it."""
        if self.settle(taken) is not None and taken.conversation is not None:
            self.conversations.replied(taken.conversation, reply)

    def answered(
        self,
        taken: Taken,
        prompt: Tokens | None,
        figures: Figures,
        *,
        planted: int,
        decision: Decision | None = None,
    ) -> PromptDivergence | None:
        """Report what the divergence of an answered request has cost.

        Returns the divergence for `why`; None without one. `planted` tokens were computed for the request
        before it was sent; `decision` says to which slot.
        """
        judged, line = self.settle(taken), taken.conversation
        if judged is None or line is None:
            return None
        fixed = bool(taken.changed)
        cost = cost_of(judged, prompt, figures, planted)
        if prompt:
            self.conversations.rendered(line, prompt)
        if cost is None or cost.why.cause is None:
            return reply_parted(judged, decision, figures.cached)
        self._metrics.lost(cost.why.cause, cost.tokens)
        report(cost, request_id=taken.request_id, fixed=fixed)
        text = self.text and taken.quotable
        return prompt_divergence(cost, cost.why.cause, prompt, judged.parent, fixed=fixed, text=text)

    def _enter_all(self) -> None:
        """Enter new requests in their conversations, in order of arrival: the next one may continue them."""
        entered, self._new = self._new, []
        for taken in entered:
            sent = taken.sent
            taken.conversation = self.conversations.saw(
                taken.match,
                taken.who,
                received=taken.received,
                sent=sent.layout,
                notes=sent.notes,
                now=taken.now,
                rules=sent.fixed if taken.changed else (),
            )
            taken.conversation.keyed |= taken.keyed


# -- work that may run in a thread: it only reads, and makes new objects ------------------------------


def _laid_out(api: Api, doc: Doc, who: Who, recent: Sequence[SeenRequest]) -> tuple[Layout, Keys] | None:
    layout = lay_out(api, doc, most_like(recent, api, doc))
    return None if layout is None else (layout, keys_of(who, layout))


def _ruled(
    api: Api, doc: Doc, layout: Layout, found: Callable[[], Match], *, modes: Modes, room: Room | None
) -> tuple[Match, Outcome]:
    """Find the match and apply the rules.

    The match gets copies of the conversations: the originals may change before they are read.
    """
    match, known = found(), seen(api, doc, layout)
    before, sibling, beside = (
        None if line is None else replace(line) for line in (match.before, match.sibling, match.beside)
    )
    match = replace(match, before=before, sibling=sibling, beside=beside)
    outcome = canonical(
        doc,
        layout,
        match,
        rules=RULES,
        modes=modes,
        lay_out=lambda body: lay_out(api, body, known),
        room=room,
    )
    return match, outcome


def _judged(taken: Taken) -> dict[bool, DivergenceReport]:
    forms = (False, True) if taken.changed is None else (taken.changed,)
    return {changed: judge(taken.match, taken.received, taken.form(changed=changed)) for changed in forms}

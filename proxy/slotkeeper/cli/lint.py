"""`slotkeeper lint`: what the agents in a recording rewrite, what that costs, and which rules fix it.

No engine is asked. A cost is the characters of requests that had to be computed again although they did not
change, as tokens of about 3.6 characters. Pruned results are restored as the rule for them would do it: what
it saves depends on the room in the context, and a later request may pay for what an earlier one saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slotkeeper.api.document import named
from slotkeeper.api.head import Api, classify
from slotkeeper.api.request import answer_cap, lay_out
from slotkeeper.bench.replay import Entry, Trace, TraceError, merged, read
from slotkeeper.cli.terminal import one_line
from slotkeeper.conversation.causes import Explained, explain
from slotkeeper.conversation.divergence import CAUSES, NEW_SESSION, Cause, parted
from slotkeeper.conversation.layout import Conversation, Layout, Section, Who
from slotkeeper.conversation.likeness import Conversations
from slotkeeper.conversation.naming import UNKNOWN, Agents
from slotkeeper.conversation.rules.apply import DEFAULTS, canonical
from slotkeeper.conversation.rules.base import Mode, Room, RuleName
from slotkeeper.conversation.rules.rules import PrunedResults
from slotkeeper.values import UsageError

CHARACTERS_A_TOKEN: Final = 3.6  # of code and English, with current vocabularies
BOUNDLESS: Final = 1 << 40  # tokens of a context that has room for everything
NEGLIGIBLE: Final = 720  # characters: 200 tokens are computed faster than any fix of them


@dataclass(slots=True)
class Session:
    """One session of a recording."""

    client: str  # the program, by its usual name
    session: str
    kinds: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class LintFinding:
    """One habit of one client: what it changes, and where."""

    client: str
    cause: Cause
    section: Section
    rule: RuleName | None  # that undoes the change; None between two sessions
    message: int | None = None  # of the most expensive change, from 0; people read it from 1
    times: int = 0
    characters: int = 0
    saved: int = 0  # characters that its rule would have saved
    dearest: int = 0  # characters of the most expensive change
    session: str = ""  # of the most expensive change, as the next four
    request: int = 0  # its number in the session, from 1
    offset: int = 0
    before: str = ""
    after: str = ""

    @property
    def tokens(self) -> int:
        return about(self.characters)

    @property
    def mode(self) -> Mode | None:
        """The default mode of the rule."""
        return DEFAULTS[self.rule] if self.rule else None

    def add(self, session: Session, explained: Explained) -> None:
        place = explained.divergence
        if place is None:
            raise AssertionError("a request that does not diverge costs nothing")
        self.times += 1
        self.characters += place.lost
        if place.lost > self.dearest:
            self.dearest, self.session, self.request = place.lost, session.session, session.kinds.total()
            self.message, self.offset = place.message, place.offset
            self.before, self.after = place.before, place.after


@dataclass(slots=True)
class LintReport:
    """The findings of all recordings together."""

    sessions: list[Session]
    findings: list[LintFinding]  # the most expensive first
    others: int  # requests that generate no tokens, or are not chats
    problems: list[str]  # lines that could not be read

    @property
    def requests(self) -> int:
        return sum(session.kinds.total() for session in self.sessions)


def lint(
    traces: Sequence[Path], console: Console, *, as_json: bool = False, context: int | None = None
) -> int:
    """Examine recordings and print a report. Returns the exit code: 1 if any finding costs tokens.

    `context`: tokens of a slot; None: no limit. Raises UsageError.
    """
    try:
        report = examined([read(path) for path in traces], context or BOUNDLESS)
    except TraceError as error:
        raise UsageError(str(error)) from None
    if as_json:
        print(orjson.dumps(document(report)).decode())  # noqa: T201
    else:
        show(report, console)
    return int(bool(report.findings))


def examined(traces: Sequence[Trace], context: int = BOUNDLESS) -> LintReport:
    """Examine all requests in the order in which they were sent: concurrent agents stay interleaved."""
    book, agents = Conversations(), Agents()
    held: Counter[str] = Counter()  # characters that restoring each client's pruned results would have saved
    sessions: dict[tuple[str, str], Session] = {}
    findings: dict[tuple[str, Cause, Section, RuleName | None], LintFinding] = {}
    others = 0
    for entry in merged(traces):
        layout = laid_out(entry)
        if layout is None:
            others += 1
            continue
        client = program(agents, entry, layout)
        session = sessions.setdefault((entry.client, entry.session), Session(client, entry.session))
        explained, saved = _next(book, entry, layout, context)
        held[client] += saved
        session.kinds[explained.kind.value] += 1
        if costs(explained) and explained.divergence and explained.cause:
            what = client, explained.cause, explained.divergence.section, explained.rule
            findings.setdefault(what, LintFinding(*what)).add(session, explained)
    for found in findings.values():
        if found.rule is RuleName.PRUNED_RESULTS:
            found.saved = max(0, held[found.client])
        elif found.rule:
            found.saved = found.characters
    return LintReport(
        sessions=list(sessions.values()),
        findings=sorted(findings.values(), key=lambda found: -found.characters),
        others=others,
        problems=[problem for trace in traces for problem in trace.problems],
    )


def program(agents: Agents, entry: Entry, layout: Layout | None) -> str:
    """Return the usual name of the program that sent a request, as all views show it; else the recorder's.

    `agents` must see the requests in the order in which they came.
    """
    name = agents.of(f"{entry.client} {entry.headers.get('user-agent', '')}", entry.headers, layout)
    return entry.client if name == UNKNOWN else name


def laid_out(entry: Entry) -> Layout | None:
    if entry.body is None:
        return None
    return lay_out(api_of(entry), entry.body)


def api_of(entry: Entry) -> Api:
    return classify(entry.method, entry.path.partition("?")[0])


def costs(explained: Explained) -> bool:
    """Whether a rewrite made unchanged text be computed again without need."""
    place, cause = explained.divergence, explained.cause
    return place is not None and place.lost > NEGLIGIBLE and cause not in NEW_SESSION


def about(characters: int) -> int:
    return round(characters / CHARACTERS_A_TOKEN)


def _next(book: Conversations, entry: Entry, layout: Layout, context: int) -> tuple[Explained, int]:
    """Return the request's explanation, and the characters that restored prunes save (negative: cost)."""
    body, api = entry.body or {}, api_of(entry)
    who = Who(entry.client, named(entry.headers, body))
    match = book.find(who, layout)
    explained = explain(match, layout)
    sent = canonical(
        body,
        layout,
        match,
        rules=(PrunedResults(),),
        modes={RuleName.PRUNED_RESULTS: Mode.FIX},
        lay_out=lambda doc: lay_out(api, doc),
        room=Room(context, answer_cap(api, body)),
    ).layout
    saved = _saved(match.remembered, explained, layout, sent)
    book.saw(match, who, received=layout, sent=sent, notes={}, now=entry.at)
    return explained, saved


def _saved(before: Conversation | None, explained: Explained, layout: Layout, sent: Layout) -> int:
    if before is None or (sent is layout and before.sent is before.received):
        return 0
    theirs, ours = explained.divergence, parted(before.sent, sent)
    return (theirs.lost if theirs else 0) - (ours.lost if ours else 0)


# -- for programs --------------------------------------------------------------------------------------


def document(report: LintReport) -> dict[str, Any]:
    return {
        "requests": report.requests,
        "others": report.others,
        "tokens_about": sum(found.tokens for found in report.findings),
        "sessions": [{**asdict(session), "kinds": dict(session.kinds)} for session in report.sessions],
        "findings": [
            {**asdict(f), "mode": f.mode, "tokens_about": f.tokens, "saved_about": about(f.saved)}
            for f in report.findings
        ],
        "problems": report.problems,
    }


# -- for people ----------------------------------------------------------------------------------------


def show(report: LintReport, console: Console) -> None:
    for problem in report.problems:
        console.print(f"[yellow]{escape(problem)}; skipped[/]", highlight=False)
    console.print(kinds(report.sessions))
    aside = f" ({report.others} others are not chats)" if report.others else ""
    console.print(f"{report.requests} requests in {len(report.sessions)} sessions{aside}.", highlight=False)
    if not report.findings:
        console.print("[green]Nothing was rewritten that cost more than 200 tokens.[/]", highlight=False)
        return
    console.print(ranked(report.findings))
    for text in examples(report.findings):
        console.print(text, no_wrap=True, overflow="ellipsis")
    for line in advice(report.findings):
        console.print(line, highlight=False)


def kinds(sessions: Iterable[Session]) -> Table:
    table = Table("client", "session", "requests", "of which", title="Requests", title_justify="left")
    table.columns[2].justify = "right"
    for one in sessions:
        counts = ", ".join(f"{count} {kind}" for kind, count in one.kinds.most_common())
        table.add_row(escape(one.client), escape(one.session), str(one.kinds.total()), counts)
    return table


def ranked(findings: Iterable[LintFinding]) -> Table:
    table = Table(
        *("", "client", "what changed", "where it costs most", "times", "tokens\nabout", "rule (default)"),
        title="Computed again although unchanged, the most expensive first",
        title_justify="left",
    )
    for column in (0, 4, 5):
        table.columns[column].justify = "right"
    for number, found in enumerate(findings, start=1):
        what = f"[bold]{found.cause.value}[/]: {CAUSES[found.cause].what}"
        rule = f"{found.rule} ({found.mode})" if found.rule else "none"
        row = (what, where(found), str(found.times), f"{found.tokens:,}", rule)
        table.add_row(str(number), escape(found.client), *row)
    return table


def where(found: LintFinding) -> str:
    message = "" if found.message is None else f" of message {found.message + 1}"
    place = f"{found.section.value}{message}, character {found.offset:,}"
    return f"{place} (request {found.request} of {escape(found.session)})"


def examples(findings: Iterable[LintFinding]) -> Iterator[Text]:
    """Yield excerpts around each place, before and after the change; the terminal's width cuts lines."""
    for number, found in enumerate(findings, start=1):
        yield Text(f"{number:3} - {one_line(found.before)}", style="red")
        yield Text(f"    + {one_line(found.after)}", style="green")


def advice(findings: Sequence[LintFinding]) -> Iterator[str]:
    """Yield sentences that name the rules that would have saved tokens."""
    saved: Counter[RuleName] = Counter()
    for found in findings:
        if found.rule and found.mode is not Mode.FIX and about(found.saved):
            saved[found.rule] += about(found.saved)
    for rule, tokens in saved.most_common():
        text = f"`slotkeeper serve --rules {rule}=fix` would have saved about {tokens:,} of these tokens"
        yield f"{text}, if a slot has room for them." if rule is RuleName.PRUNED_RESULTS else f"{text}."

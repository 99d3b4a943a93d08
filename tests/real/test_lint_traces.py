"""Recorded sessions of real agents: every rewrite of the history is reported with its cause."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

import recorded
from slotkeeper.api.document import named
from slotkeeper.bench.replay import merged, read
from slotkeeper.cli.lint import costs, examined, laid_out
from slotkeeper.conversation.causes import explain
from slotkeeper.conversation.layout import Who
from slotkeeper.conversation.likeness import Conversations, RequestKind

# Rewrites that cost more than 200 tokens, and their number; sessions that are not here rewrite nothing.
CAUSES = {
    "aider/main1": {"file_refreshed": 7},
    "codex/compact1": {"side_question": 2},  # asks for a summary with no tools: 11,000 tokens each time
    "continue-cli/conc_b": {"git_status": 1},
    "continue-cli/main1": {"date": 1},
    "kimi-cli/newsess1": {"clock": 2},
    "mistral-vibe/bug1": {"key_order": 1},
    "mistral-vibe/main1": {"key_order": 1, "date": 1},
    "opencode/bug1": {"memory_file": 1},
    "opencode/compact1": {"history_replaced": 1},
    "opencode/main1": {"date": 1},
    "pi/bug1": {"memory_file": 1},
    "pi/main1": {"date": 1},
    "qwen-code/anth1": {"git_status": 1},
    "qwen-code/main1": {"git_status": 2},
    "qwen-code/sub1": {"reminder_moved": 1},
}
# Requests that are no step of a conversation: beginnings (also of sub-agents), titles, summaries, edits.
KINDS = {
    "aider/main1": {"cold": 1, "side": 3, "compaction": 3, "rewrite": 7},
    "claude-code/trace-0100": {"cold": 2, "branch": 1},
    "claude-code/trace-0300": {"cold": 4, "branch": 3},
    "codex/compact1": {"cold": 1, "compaction": 4},
    "codex/sub1": {"cold": 2},
    "cline/newsess1": {"cold": 3},
    "kimi-cli/newsess1": {"cold": 3},
    "opencode/compact1": {"side": 1, "cold": 1, "compaction": 2},
    "opencode/sub1": {"side": 1, "cold": 2},
    "pi/anth1": {"cold": 1},
    "pi/think1": {"cold": 1},
    "qwen-code/sub1": {"cold": 2, "rewrite": 1},
}
GOES_ON = {RequestKind.TOOL_ROUND_TRIP, RequestKind.MAIN_TURN}


pytestmark = recorded.needed


@cache
def explained(path):
    """Return kind and cause of each request of one session; the cause only of those that cost tokens."""
    book, found = Conversations(), []
    for entry in merged([read(path)]):
        layout = laid_out(entry)
        if layout is not None:
            who = Who(entry.client, named(entry.headers, entry.body or {}))
            match = book.find(who, layout)
            report = explain(match, layout)
            found.append((report.kind, report.cause if costs(report) else None))
            book.saw(match, who, received=layout, sent=layout, notes={}, now=entry.at)
    return found


@pytest.mark.parametrize("path", recorded.sessions(), ids=recorded.name)
def test_every_rewrite_has_its_cause(path):
    found = Counter(cause.value for _, cause in explained(path) if cause)
    assert found == CAUSES.get(recorded.name(path), {})


@pytest.mark.parametrize("path", recorded.sessions(), ids=recorded.name)
def test_every_request_has_its_kind(path):
    found = Counter(kind.value for kind, _ in explained(path) if kind not in GOES_ON)
    expected = KINDS.get(recorded.name(path))
    if expected is None:  # one conversation, or one with a title before it
        found.subtract({"rewrite": found["rewrite"], "side": found["side"]})
        expected = {"cold": 1}
    assert +found == expected


def test_sessions_of_one_client_are_distinguished_when_read_together():
    """Sessions of one client that ran the same task in many folders do not become one."""
    report = examined([read(path) for path in recorded.sessions()])
    apart = Counter(kind.value for path in recorded.sessions() for kind, _ in explained(path))
    together = Counter[str]()
    for session in report.sessions:
        together.update(session.kinds)
    assert together == apart
    assert report.problems == []

"""`slotkeeper why` names section and cause for what breaks caches (the scenarios of engine.md section 10).

One slot, the tiny hybrid model, stock flags, no snapshots: so that everything that can go wrong does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import httpx
import pytest
from benchmarks.sessions import SESSIONS, chat, user

from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import Target, Turn, at_once, play
from slotkeeper.bench.texts import edited, prose, system
from slotkeeper.conversation.divergence import CAUSES, Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.observe.sentences import FEW
from slotkeeper.scheduler.requests.figures import Loss

pytestmark = pytest.mark.one_in(8)

Document = dict[str, Any]
Script = Generator[Turn, Document, Any]  # its return value is not used

NO_THINKING: Final = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedReport:
    """The expected report on every request with such a label."""

    label: str
    kind: RequestKind
    section: Section | None = None
    cause: Cause | None = None
    rule: str | None = None
    lost: Loss | None = None  # where more than a few tokens are lost


FIRST, TURN = (
    ExpectedReport(label="turn 1", kind=RequestKind.COLD),
    ExpectedReport(label="turn *", kind=RequestKind.MAIN_TURN),
)
STRIPPED = Cause.TEMPLATE_STRIPS_REASONING
SAMPLED: Document = {"kind": RequestKind.MAIN_TURN, "section": Section.REASONING, "cause": STRIPPED}
OPENED: Document = {
    "kind": RequestKind.MAIN_TURN,
    "section": Section.REPLY,
    "cause": Cause.TEMPLATE_RERENDERS,
}
RERENDERED: Document = {
    "kind": RequestKind.TOOL_ROUND_TRIP,
    "section": Section.CALL,
    "cause": Cause.CALL_RERENDERED,
    "rule": "tool_calls",
}
LOOPED: Document = {"kind": RequestKind.MAIN_TURN, "cause": STRIPPED, "lost": Loss.CHECKPOINT}
CLOCK: Document = {
    "kind": RequestKind.REWRITE,
    "section": Section.SYSTEM,
    "cause": Cause.CLOCK,
    "rule": "clock",
    "lost": Loss.CHECKPOINT,
}
EDITED: Document = {"kind": RequestKind.BRANCH, "section": Section.USER, "cause": Cause.MESSAGE_EDITED}
TAKEN: Document = {"kind": RequestKind.MAIN_TURN, "lost": Loss.OVERWRITTEN}


def big_context() -> Script:
    """Turns of 4,000 tokens, and edits of the last and of an early one."""
    history = [system(prose(20000, 1))]
    for number in range(3):
        history.append(user(number, 16000))
        history.append((yield Turn(label=f"turn {number + 1}", messages=tuple(history))))
    asked = history[:-1]
    yield Turn(label="edit the last", messages=edited(asked, -1, "Edited. " + asked[-1]["content"]))
    yield Turn(label="edit message 2", messages=edited(asked[:4], 3, "Edited. " + asked[3]["content"]))


# Scenario, its script, and the expected reports: the first label that fits counts.
SCENARIOS: Final[Sequence[tuple[str, Callable[[], Script], Sequence[ExpectedReport]]]] = (
    ("i", SESSIONS["append"], (FIRST, TURN)),
    ("ii", SESSIONS["thinking"], (FIRST, ExpectedReport(label="turn *", **SAMPLED))),
    ("ii-b", lambda: chat(4, fields=NO_THINKING), (FIRST, ExpectedReport(label="turn *", **OPENED))),
    (
        "ii-d",
        SESSIONS["tool-loop"],
        (
            ExpectedReport(label="task 1 call 1", kind=RequestKind.COLD),
            ExpectedReport(label="task 1 answer", **RERENDERED, lost=Loss.CHECKPOINT),
            ExpectedReport(label="task ? call 1", **LOOPED),
            ExpectedReport(label="task *", **RERENDERED),
        ),
    ),
    ("iii-a", SESSIONS["clock-first"], (FIRST, ExpectedReport(label="turn *", **CLOCK))),
    ("iii-b", SESSIONS["clock-last"], (FIRST, ExpectedReport(label="turn *", **CLOCK))),
    (
        "iv",
        SESSIONS["edits"],
        (
            FIRST,
            TURN,
            ExpectedReport(label="regenerate *", kind=RequestKind.RETRY),
            ExpectedReport(label="edit the last *", **EDITED, lost=Loss.CHECKPOINT),
            ExpectedReport(label="add to the last *", **EDITED, lost=Loss.OVERWRITTEN),
            ExpectedReport(label="edit message 3, cut off *", **EDITED, lost=Loss.CHECKPOINT),
            ExpectedReport(label="edit message 3, keep *", **EDITED),
            ExpectedReport(label="back *", **TAKEN),
        ),
    ),
    (
        "v",
        SESSIONS["interleaved"],
        (
            ExpectedReport(label="A1", kind=RequestKind.COLD),
            ExpectedReport(label="title", kind=RequestKind.COLD),
            ExpectedReport(label="B1", kind=RequestKind.COLD, section=Section.USER, cause=Cause.ANOTHER_TASK),
            ExpectedReport(label="[AB]?", **TAKEN),
        ),
    ),
    (
        "viii",
        SESSIONS["many-turns"],
        (
            FIRST,
            TURN,
            ExpectedReport(label="edit message 2*", **EDITED, lost=Loss.CHECKPOINT),
            ExpectedReport(label="back *", kind=RequestKind.MAIN_TURN),
        ),
    ),
    (
        "big context",
        big_context,
        (
            FIRST,
            TURN,
            ExpectedReport(label="edit the last", **EDITED),
            ExpectedReport(label="edit message 2", **EDITED, lost=Loss.CHECKPOINT),
        ),
    ),
)


@pytest.fixture
async def asked() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        yield client


async def told(
    sidecar: Sidecar, script: Script, asked: httpx.AsyncClient, before=at_once
) -> list[tuple[str, dict[str, Any]]]:
    """Return every request's label, and the admin port's document on it."""
    labels: list[str] = []
    async with Target(lab.url_of(sidecar)) as target:
        await play(script, target, session="s", sent=lambda s: labels.append(s.label), before=before)
    admin = f"http://{sidecar.addresses[1]}"
    listed = (await asked.get(f"{admin}/api/requests?limit=100")).json()["requests"]
    chats = [one for one in reversed(listed) if one["route"] == "chat"]
    documents = [(await asked.get(f"{admin}/api/requests/{one['id']}")).json() for one in chats]
    return list(zip(labels, documents, strict=True))


@pytest.mark.parametrize(
    ("script", "expected"), [row[1:] for row in SCENARIOS], ids=[name for name, *_ in SCENARIOS]
)
async def test_why_names_the_section_and_the_cause(script, expected, engine_factory, build, asked):
    engine = engine_factory(Tiny.HYBRID, build, args=["-np", "1"])
    # Without idle work: otherwise a turn's beginning might be ready or not, by its time of arrival.
    async with lab.in_front_of(engine.base, engine.flags, idle_tokens=0) as sidecar:
        found = await told(sidecar, script(), asked)
    complaints = []
    for label, document in found:
        said = next(one for one in expected if fnmatchcase(label, one.label))
        complaints += [f"{label}: {wrong}" for wrong in differs(said, document)]
    assert complaints == []


def differs(said: ExpectedReport, document: dict[str, Any]) -> list[str]:
    """Return the differences from the expected report."""
    divergence = document["parting"] or {}
    few = document["lost_tokens"] <= FEW
    checks = {
        "kind": document["kind"] == said.kind,
        "section": divergence.get("section") == said.section,
        "cause": divergence.get("cause") == said.cause,
        "rule": divergence.get("rule") == said.rule,
        "lost": few or document["lost"] == said.lost,  # a checkpoint may stand near by chance
        "sum": document["computed"] == document["oracle"] + document["lost_tokens"],
        "whole": document["computed"] + document["reused"] == document["prompt_tokens"],
        "verdict": document["verdict"].startswith("nothing twice") == (document["repeated"] <= FEW),
        "words": said.cause is None or CAUSES[said.cause].what in " ".join(document["explanation"]),
    }
    return [f"{what} of {document}" for what, right in checks.items() if not right]

"""Applies all rules in turn; shows people what each rule did or would have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import orjson

from slotkeeper.conversation.divergence import common_start
from slotkeeper.conversation.layout import Doc, Edit, Layout, Match, Notes, edited
from slotkeeper.conversation.likeness import asked_aside, same_agent
from slotkeeper.conversation.rules.aside import SideQuestion
from slotkeeper.conversation.rules.base import Fact, Mode, Modes, Room, Rule, RuleName, Scene, note_edits
from slotkeeper.conversation.rules.refreshed import RefreshedContext
from slotkeeper.conversation.rules.rules import (
    BillingNonce,
    CallIds,
    Clock,
    Countdown,
    Date,
    Environment,
    GitStatus,
    MemoryFile,
    PrunedResults,
    Reasoning,
    Reminders,
    SchemaKeys,
    ToolCalls,
    ToolOrder,
    TrailingWhitespace,
    WorkingDirectory,
    common,
)

RULES: Final[tuple[Rule, ...]] = (
    SideQuestion(),
    BillingNonce(),
    SchemaKeys(),
    ToolOrder(),
    Date(),
    Clock(),
    WorkingDirectory(),
    GitStatus(),
    Environment(),
    MemoryFile(),
    Countdown(),
    RefreshedContext(),  # what no rule before it knows
    PrunedResults(),
    Reminders(),
    CallIds(),
    ToolCalls(),
    Reasoning(),
    TrailingWhitespace(),
)
_LENGTHENING: Final = frozenset({RuleName.PRUNED_RESULTS, RuleName.REFRESHED_CONTEXT})
DEFAULTS: Final[Modes] = MappingProxyType({rule.name: rule.default for rule in RULES})


# -- applied in turn -------------------------------------------------------------------------------------


LayOut = Callable[[Doc], Layout | None]


@dataclass(frozen=True, slots=True)
class Done:
    """What one rule found in one request."""

    rule: RuleName
    mode: Mode
    edits: tuple[Edit, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request as it is sent on."""

    doc: Doc  # the same object if nothing was changed
    layout: Layout  # of the request as it is sent, without the notes
    done: tuple[Done, ...] = ()  # in the rules' order; rules that found nothing are left out
    notes: Notes = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()  # all that were made, notes included
    most: int = 0  # limit of the prompt, in tokens; 0: no rule made it longer than the client's

    @property
    def fixed(self) -> tuple[RuleName, ...]:
        """The rules because of which the request that is sent differs from the one received."""
        return tuple(done.rule for done in self.done if done.mode is Mode.FIX) if self.edits else ()

    @property
    def moved(self) -> int:
        """Bytes that other requests may share only with the client's own form."""
        return sum(edit.moved for edit in self.edits)


def canonical(
    doc: Doc,
    layout: Layout,
    match: Match,
    *,
    rules: Sequence[Rule],
    modes: Modes,
    lay_out: LayOut,
    room: Room | None = None,
) -> Outcome:
    """Apply all rules: those in mode `fix` change the request, those in `observe` only report changes.

    Each rule sees the fixes of the rules before it. A change that a rule only observes is not made, and later
    rules see the request without it.
    """
    kin = match.sibling
    if kin is not None and not same_agent(kin.received, layout):
        kin = None
    done: list[Done] = []
    made: list[Edit] = []
    facts: list[Fact] = []
    before, asked = match.remembered, asked_aside(layout, match)
    scene = Scene(layout, before, _in_common(match, layout), kin, room, asked)
    for rule in rules:
        mode = modes[rule.name]
        if mode is Mode.OFF:
            continue
        found = _found(rule, mode, scene)
        if found is None:
            continue
        done.append(found)
        if mode is Mode.FIX:
            doc, layout = _after(doc, layout, found.edits, lay_out)
            scene = _next(scene, layout, found)
            made += found.edits
            facts += found.facts
    noted, notes = note_edits(layout, scene.before, scene.common, facts)
    return Outcome(
        doc=edited(doc, noted),
        layout=layout,
        done=tuple(done),
        notes=notes,
        edits=(*made, *noted),
        most=_most(done, room),
    )


def _next(scene: Scene, layout: Layout, found: Done) -> Scene:
    """Return what the rules after this one see. A side question now goes on with its agent's conversation."""
    aside = found.rule is RuleName.SIDE_QUESTION
    before = scene.asked if aside else scene.before
    if before is None or not (aside or any(edit.item for edit in found.edits)):
        return replace(scene, now=layout)
    return replace(scene, now=layout, before=before, common=common(before.sent, layout))


def _in_common(match: Match, layout: Layout) -> int:
    """Return how many messages after the system text are the same as those sent before.

    `match` compares with the request before as the client sent it; its system messages may stand elsewhere.
    """
    before = match.remembered
    if before is None or not (before.sent.between or layout.between):
        return match.common
    return common(before.sent, layout)


def _most(done: Sequence[Done], room: Room | None) -> int:
    """Return the prompt's limit in tokens if a rule restored what the client left out, else 0."""
    fixed = {one.rule for one in done if one.mode is Mode.FIX}
    if room is None or fixed.isdisjoint({*_LENGTHENING, RuleName.SIDE_QUESTION}):
        return 0
    return room.limit_aside if RuleName.SIDE_QUESTION in fixed else room.limit


def _found(rule: Rule, mode: Mode, scene: Scene) -> Done | None:
    """Return what the rule changes; None if the request is canonical already."""
    changes = tuple(rule.changes(scene))
    edits = tuple(change for change in changes if isinstance(change, Edit))
    facts = tuple(change for change in changes if isinstance(change, Fact))
    return Done(rule.name, mode, edits, facts) if changes else None


def _after(doc: Doc, layout: Layout, edits: Sequence[Edit], lay_out: LayOut) -> tuple[Doc, Layout]:
    if not edits:
        return doc, layout
    doc = edited(doc, edits)
    again = lay_out(doc)
    if again is None:
        raise AssertionError("a rule made a request that cannot be read")
    return doc, again


# -- changes for people to read --------------------------------------------------------------------------

AROUND: Final = 40  # characters on each side of the change
LONGEST: Final = 400  # characters of one side


@dataclass(frozen=True, slots=True)
class ShownChange:
    """One value of a body that a rule changed or would have changed."""

    rule: RuleName | None  # None: a note that repeats an earlier one
    mode: Mode
    path: str
    before: str  # "" if no text may be kept
    after: str
    declined: bool = False  # it would have cost more than it saved, so the request went unchanged


def changes(done: tuple[Done, ...], *, text: bool, declined: bool = False) -> tuple[ShownChange, ...]:
    """Return the changes of all rules, shortened, or without their text if not `text`."""
    found = (shown(edit, one.rule, one.mode, text=text) for one in done for edit in one.edits)
    return tuple(
        replace(change, declined=True) if declined and change.mode is Mode.FIX else change for change in found
    )


def shown(edit: Edit, rule: RuleName | None, mode: Mode, *, text: bool = True) -> ShownChange:
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in edit.path).lstrip(".")
    if not text:
        return ShownChange(rule, mode, path, "", "")
    before, after = _words(edit.before), _words(edit.after)
    start = common_start(before, after)
    end = common_start(before[start:][::-1], after[start:][::-1])
    return ShownChange(rule, mode, path, _cut(before, start, end), _cut(after, start, end))


def _words(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()


def _cut(text: str, start: int, end: int) -> str:
    first, last = max(0, start - AROUND), min(len(text), len(text) - end + AROUND)
    cut = text[first:last]
    return cut if len(cut) <= LONGEST else f"{cut[:LONGEST]}…"

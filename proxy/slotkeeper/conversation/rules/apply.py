"""All rules in turn: what a request becomes, and what each rule did or would have done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotkeeper.conversation.likeness import same_agent
from slotkeeper.conversation.record import Match
from slotkeeper.conversation.requests.layout import Edit, Layout, edited
from slotkeeper.conversation.rules.base import Fact, Mode, Rule, RuleName, Scene
from slotkeeper.conversation.rules.modes import Modes
from slotkeeper.conversation.rules.notes import note_edits

Doc = dict[str, Any]
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
    """A request as it goes on."""

    doc: Doc  # the very same object where nothing was changed
    layout: Layout  # of what goes on, without the notes
    done: tuple[Done, ...] = ()  # in the rules' order; rules that found nothing are left out
    notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # behind which message, by its index
    told: Mapping[str, str] = field(default_factory=dict)  # facts, by place, for the record
    edits: tuple[Edit, ...] = ()  # all that were made, notes among them

    @property
    def moved(self) -> int:
        """What other requests may share with the client's own form only, in bytes."""
        return sum(edit.moved for edit in self.edits)


def canonical(
    doc: Doc, layout: Layout, match: Match, *, rules: Sequence[Rule], modes: Modes, lay_out: LayOut
) -> Outcome:
    """The request after all rules that fix; those that observe see it as it would be, but leave it alone.

    Rules that come later see what earlier ones have put right. What a rule that only observes would have
    put right stays as it is, and is the same to the rules behind it.
    """
    before, kin = match.remembered, match.sibling
    told = dict(before.told) if before else {}
    if kin is not None and not same_agent(kin.received, layout):
        kin = None
    done: list[Done] = []
    made: list[Edit] = []
    facts: list[Fact] = []
    for rule in rules:
        mode = modes[rule.name]
        if mode is Mode.OFF:
            continue
        found = tuple(rule.changes(Scene(layout, before, match.common, kin)))
        if not found:
            continue
        edits = tuple(change for change in found if isinstance(change, Edit))
        taken = tuple(change for change in found if isinstance(change, Fact))
        done.append(Done(rule.name, mode, edits, taken))
        if mode is Mode.FIX:
            doc, layout = _after(doc, layout, edits, lay_out)
            made += edits
            facts += taken
    noted, notes = note_edits(layout, before, match.common, facts)
    told |= {fact.place: fact.text for fact in facts}
    return Outcome(
        doc=edited(doc, noted),
        layout=layout,
        done=tuple(done),
        notes=notes,
        told=told,
        edits=(*made, *noted),
    )


def _after(doc: Doc, layout: Layout, edits: Sequence[Edit], lay_out: LayOut) -> tuple[Doc, Layout]:
    if not edits:
        return doc, layout
    doc = edited(doc, edits)
    again = lay_out(doc)
    if again is None:
        raise AssertionError("a rule made a request that cannot be read")
    return doc, again

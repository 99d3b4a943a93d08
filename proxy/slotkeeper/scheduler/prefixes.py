"""Token sequences side by side: sorted, so that those with a long common prefix stand together.

Sorting long prompts again takes longer than all the rest of an eviction (1000 of up to 100,000 tokens:
50 ms), so the order is kept and changed one sequence at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Self

from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.snapshots import Snapshot

State = Snapshot | SlotContents


def _place(state: State) -> tuple[str, bytes, str]:
    """What to sort by: any order of the ids will do, if a sequence stands right before its extensions."""
    return state.tokens.space, state.tokens.packed, state.id if isinstance(state, Snapshot) else ""


class PrefixOrder:
    """States sorted by their tokens; `common[i]` tokens are those that state i shares with the one before."""

    __slots__ = ("common", "states")

    def __init__(self, snapshots: Iterable[Snapshot] = ()) -> None:
        self.states: list[State] = sorted(snapshots, key=_place)
        self.common = [one.tokens.lcp(following.tokens) for one, following in pairwise(self.states)]
        if self.states:
            self.common.insert(0, 0)

    def __repr__(self) -> str:
        return f"<PrefixOrder {len(self.states)} states>"

    def __iter__(self) -> Iterator[Snapshot]:
        return (state for state in self.states if isinstance(state, Snapshot))

    def put(self, state: State) -> None:
        """Add a state; a snapshot replaces what was known of it (the tokens of an id never change)."""
        index = self._find(state)
        if isinstance(state, Snapshot) and self._is_at(index, state):
            self.states[index] = state
            return
        before = self.states[index - 1].tokens.lcp(state.tokens) if index else 0
        if index < len(self.states):
            self.common[index] = state.tokens.lcp(self.states[index].tokens)
        self.states.insert(index, state)
        self.common.insert(index, before)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot; nothing happens if it is not known."""
        index = self._find(snapshot)
        if self._is_at(index, snapshot):
            del self.states[index]
            gap = self.common.pop(index)
            if index < len(self.common):
                self.common[index] = min(gap, self.common[index])

    def beside(self, live: Iterable[SlotContents]) -> Self:
        """A copy in which what slots hold stands among the snapshots."""
        copy = type(self)()
        copy.states, copy.common = [*self.states], [*self.common]
        for contents in live:
            copy.put(contents)
        return copy

    def common_with(self, index: int) -> list[int]:
        """What every state has in common with the one at `index`, in tokens."""
        found = [len(self.states[index].tokens)] * len(self.states)
        for other in range(index + 1, len(found)):
            found[other] = min(found[other - 1], self.common[other])
        for other in range(index - 1, -1, -1):
            found[other] = min(found[other + 1], self.common[other + 1])
        return found

    def _find(self, state: State) -> int:
        return bisect_left(self.states, _place(state), key=_place)

    def _is_at(self, index: int, snapshot: Snapshot) -> bool:
        here = self.states[index] if index < len(self.states) else None
        return isinstance(here, Snapshot) and here.id == snapshot.id

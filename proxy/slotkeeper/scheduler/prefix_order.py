"""Snapshots sorted by their tokens, so that a prompt is compared with its neighbours, not with all.

Sorting long prompts again takes longer than all the rest of an eviction (1000 of up to 100,000 tokens: 50
ms), so the order is kept, and changed one sequence at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Final, Self

from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot
from slotkeeper.scheduler.tokens import WIDTH, Tokens

ROOT: Final = 16  # tokens: with less in common a snapshot is of no use
SIZE: Final = attrgetter("size")

AnyState = Snapshot | SlotContents


def _place(state: AnyState) -> tuple[str, bytes, str]:
    """Return the sort key: any order of the ids will do, if a sequence stands right before its extensions."""
    return state.tokens.space, state.tokens.packed, state.id if isinstance(state, Snapshot) else ""


class PrefixOrder:
    """States sorted by their tokens; state i shares `common[i]` tokens with the one before."""

    __slots__ = ("common", "states")

    def __init__(self, snapshots: Iterable[Snapshot] = ()) -> None:
        self.states: list[AnyState] = sorted(snapshots, key=_place)
        self.common = [one.tokens.lcp(following.tokens) for one, following in pairwise(self.states)]
        if self.states:
            self.common.insert(0, 0)

    def __repr__(self) -> str:
        return f"<PrefixOrder {len(self.states)} states>"

    def __iter__(self) -> Iterator[Snapshot]:
        return (state for state in self.states if isinstance(state, Snapshot))

    def put(self, state: AnyState) -> None:
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
        """Return a copy to which the contents of slots are added."""
        copy = type(self)()
        copy.states, copy.common = [*self.states], [*self.common]
        for contents in live:
            copy.put(contents)
        return copy

    def around(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the other states and what each has in common with the one at `index`, the most first.

        Those without any common token are left out.
        """
        before, behind = index - 1, index + 1
        left = self.common[index]
        right = self.common[behind] if behind < len(self.states) else 0
        while left or right:
            if left >= right:
                yield before, left
                left = min(left, self.common[before])
                before -= 1
            else:
                yield behind, right
                behind += 1
                right = min(right, self.common[behind]) if behind < len(self.states) else 0

    def _find(self, state: AnyState) -> int:
        return bisect_left(self.states, _place(state), key=_place)

    def _is_at(self, index: int, snapshot: Snapshot) -> bool:
        here = self.states[index] if index < len(self.states) else None
        return isinstance(here, Snapshot) and here.id == snapshot.id


# -- around one prompt -----------------------------------------------------------------------------------


class Neighbours:
    """Files and how many tokens each has in common with a prompt, the most first; found on demand.

    `dense`: any file gives all that it has in common. Then of files that have equally much of it, only the
    nearest and the smallest are found: whatever a restore costs, it costs no less for a larger file.
    """

    def __init__(self, order: PrefixOrder, prompt: Tokens, *, dense: bool) -> None:
        self._found: list[tuple[Snapshot, int]] = []
        self._more = _nearest(order, prompt, dense=dense)

    def __iter__(self) -> Iterator[tuple[Snapshot, int]]:
        yield from self._found
        for state, common in self._more:
            if isinstance(state, Snapshot):
                self._found.append((state, common))
                yield state, common


def _nearest(order: PrefixOrder, prompt: Tokens, *, dense: bool) -> Iterator[tuple[AnyState, int]]:
    """Yield states and how many tokens each has in common with `prompt`, the most first.

    In the order they stand around the prompt's place. Thousands of files may begin with one system prompt, so
    those with equally much in common are found at once, after the nearest one, which is often enough.
    """
    states, common = order.states, order.common
    begin = end = bisect_left(states, (prompt.space, prompt.packed), key=_begins)
    left = states[begin - 1].tokens.lcp(prompt) if begin else 0
    right = states[end].tokens.lcp(prompt) if end < len(states) else 0
    while (most := max(left, right)) >= ROOT:
        yield states[begin - 1 if left == most else end], most
        before, behind, shared = begin, end, (prompt.space, prompt.packed[: most * WIDTH])
        begins = partial(_begins, length=most * WIDTH)
        if left == most:
            begin = bisect_left(states, shared, hi=before, key=begins)
            left = common[begin]  # the first one has nothing in common with one before it
        if right == most:
            end = bisect_right(states, shared, lo=behind, key=begins)
            right = common[end] if end < len(states) else 0
        equal = [*states[begin:before][::-1], *states[behind:end]]
        yield from ((state, most) for state in _others(equal, dense=dense))


def _others(equal: list[AnyState], *, dense: bool) -> list[AnyState]:
    """Return all but the nearest of states with equally much in common; of a dense model the smallest."""
    others = equal[1:]
    return [min(others, key=SIZE)] if dense and others else others


def _begins(state: AnyState, length: int | None = None) -> tuple[str, bytes]:
    """Return the key that is compared with a prompt: a state's ids, or their first `length` bytes."""
    return state.tokens.space, state.tokens.packed[:length]

"""What slots and RAM caches of several engines hold, sorted by tokens.

A decision asks which of hundreds of states begin like a prompt. Most begin otherwise, and are not compared.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import EngineId, SlotId

NEAR: Final = 64  # tokens: states that share less with a prompt are not told apart


class Held(NamedTuple):
    """The place of a state: a slot; None: the engine's RAM cache."""

    engine: EngineId
    slot: SlotId | None


def _shared(one: Tokens, other: Tokens) -> int:
    """Return an upper bound of the tokens that two states share: it may end inside an image."""
    return one.same_ids(other) if one.space == other.space else 0


@dataclass(slots=True)
class NearStates:
    """The states that begin like a prompt, and the most tokens that any other state shares with it."""

    slots: dict[EngineId, dict[SlotId, int]] = field(default_factory=dict)
    ram: dict[EngineId, int] = field(default_factory=dict)  # the most of any entry
    others: int = 0

    def add(self, held: Held, common: int) -> None:
        """Take in a state. The states come in order, the one that shares most first."""
        if held.slot is None:
            self.ram.setdefault(held.engine, common)
        else:
            self.slots.setdefault(held.engine, {})[held.slot] = common

    def in_ram(self, engine: EngineId) -> int:
        """Return the most tokens that an entry of this engine's RAM cache shares with the prompt."""
        return max(self.ram.get(engine, 0), self.others)


class LiveStates:
    """States in the order of their tokens; state i shares `_common[i]` tokens with the one before."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, bytes]] = []
        self._tokens: list[Tokens] = []
        self._held: list[Held] = []
        self._common: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<LiveStates {len(self)}>"

    def replace(self, held: Held, gone: SlotContents | None, come: SlotContents | None) -> None:
        """Record that a place now holds another state."""
        if gone is not None:
            self._drop(gone.tokens, held)
        if come is not None:
            self._put(come.tokens, held)

    def near(self, prompt: Tokens) -> NearStates:
        """Return the states around the prompt's place in the order: those that share most with it."""
        found = NearStates()
        behind = bisect_left(self._keys, (prompt.space, prompt.packed))
        before = behind - 1
        left = _shared(self._tokens[before], prompt) if before >= 0 else 0
        right = _shared(self._tokens[behind], prompt) if behind < len(self._tokens) else 0
        while max(left, right) >= NEAR:
            if left >= right:
                found.add(self._held[before], left)
                left = min(left, self._common[before])  # 0 of the first one
                before -= 1
            else:
                found.add(self._held[behind], right)
                behind += 1
                right = min(right, self._common[behind]) if behind < len(self._common) else 0
        found.others = max(left, right)
        return found

    def _put(self, tokens: Tokens, held: Held) -> None:
        key = (tokens.space, tokens.packed)
        index = bisect_left(self._keys, key)
        before = _shared(self._tokens[index - 1], tokens) if index else 0
        if index < len(self._tokens):
            self._common[index] = _shared(tokens, self._tokens[index])
        self._keys.insert(index, key)
        self._tokens.insert(index, tokens)
        self._held.insert(index, held)
        self._common.insert(index, before)

    def _drop(self, tokens: Tokens, held: Held) -> None:
        key = (tokens.space, tokens.packed)
        index = self._held.index(held, bisect_left(self._keys, key))  # equal states follow one another
        if self._keys[index] != key:
            raise AssertionError(f"no such state in {held}")
        del self._keys[index], self._tokens[index], self._held[index]
        gap = self._common.pop(index)
        if index < len(self._common):
            self._common[index] = min(gap, self._common[index])

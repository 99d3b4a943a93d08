"""Which states end in tokens that were computed in idle time, and where these begin.

Known by the state's tokens: a slot, a file and the engine's RAM cache may all hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from slotkeeper.scheduler.steps import unmarked
from slotkeeper.scheduler.tokens import Tokens

MOST: Final = 1024  # states, the oldest are forgotten


@dataclass(slots=True)
class Ahead:
    _begins: dict[int, int] = field(default_factory=dict)  # by the hash of the state's tokens

    def computed(self, tokens: Tokens, begin: int) -> None:
        """The state holds `tokens`; from `begin` on they were computed in idle time."""
        self._begins.pop(key := hash(tokens), None)
        self._begins[key] = begin
        if len(self._begins) > MOST:
            del self._begins[next(iter(self._begins))]

    def begins(self, tokens: Tokens) -> int | None:
        """From which token on; None where nothing of it was computed in idle time."""
        return self._begins.get(hash(unmarked(tokens)))

"""A restart in the middle of work: conversations that began before it continue after it.

How much of the old states can be used depends on the client's next request. `Change` names the three kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from benchmarks.sessions import THINKING, user
from slotkeeper.api.document import Doc
from slotkeeper.bench.target import PLAIN, Script, Turn
from slotkeeper.bench.texts import edited, prose, system

TURNS: Final = 2  # before the restart
SYSTEM: Final = 3000  # characters
STRIDE: Final = 20  # between the numbers of questions, so that no two conversations ask the same


class Change(StrEnum):
    """How the first request after the restart relates to the last one before it."""

    APPEND = "append"  # it is the next question
    EDIT = "edit"  # it asks the last question again, in other words
    STRIP = "strip"  # it is the next question, without the reasoning of the last answer


@dataclass(slots=True, kw_only=True)
class RestartedChat:
    """One client's chat: `begin` is played before the restart, `go_on` after it."""

    number: int
    change: Change
    max_tokens: int = 48  # of an answer without reasoning
    shrink: int = 1  # divides the length of all texts
    history: list[Doc] = field(default_factory=list)

    def begin(self, turns: int = TURNS) -> Script:
        """Ask questions under the client's own system prompt."""
        self.history = [system(prose(SYSTEM // self.shrink, STRIDE * self.number))]
        for _ in range(turns):
            yield from self._ask("turn", [*self.history, self._question()])

    def go_on(self) -> Script:
        """Send the changed request, and one more turn after its answer."""
        if self.change is Change.EDIT:
            text = "In other words. " + prose(1500 // self.shrink, STRIDE * self.number + STRIDE - 1)
            yield from self._ask("edited", edited(self.history[:-1], -1, text))
        else:
            yield from self._ask("first", [*self.history, self._question()])
        yield from self._ask("second", [*self.history, self._question()])

    def _ask(self, label: str, messages: list[Doc] | tuple[Doc, ...]) -> Script:
        thinks = self.change is Change.STRIP
        reply = yield Turn(
            label=label,
            messages=tuple(messages),
            max_tokens=300 if thinks else self.max_tokens,
            fields=THINKING if thinks else PLAIN,
        )
        self.history = [*messages, reply]

    def _question(self) -> Doc:
        return user(STRIDE * self.number + len(self.history), 2000 // self.shrink)

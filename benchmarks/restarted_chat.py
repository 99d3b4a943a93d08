"""A restart in the middle of work: conversations that were begun before it go on after it.

What the client does then decides how much of the old states can be used. `Change` names the three
things that clients do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from slotkeeper.api.document import Doc
from slotkeeper.bench.sessions import PLAIN, THINKING, Script, Turn, edited, prose, system, user

TURNS: Final = 2  # before the restart
SYSTEM: Final = 3000  # characters
STRIDE: Final = 20  # of the numbers of questions, so that no two conversations ask the same


class Change(StrEnum):
    """What the first request after the restart is, beside the last one before it."""

    APPEND = "append"  # the next question
    EDIT = "edit"  # the last question once more, in other words
    STRIP = "strip"  # the next question, and what was thought for the last answer is left out


@dataclass(slots=True, kw_only=True)
class RestartedChat:
    """One client's chat: `begin` is played before the restart, `go_on` after it."""

    number: int
    change: Change
    history: list[Doc] = field(default_factory=list)

    def begin(self, turns: int = TURNS) -> Script:
        """Questions and answers, under a system prompt of its own."""
        self.history = [system(prose(SYSTEM, STRIDE * self.number))]
        for _ in range(turns):
            yield from self._ask("turn", [*self.history, self._question()])

    def go_on(self) -> Script:
        """The changed request, and one more turn on top of its answer."""
        if self.change is Change.EDIT:
            text = "In other words. " + prose(1500, STRIDE * self.number + STRIDE - 1)
            yield from self._ask("edited", edited(self.history[:-1], -1, text))
        else:
            yield from self._ask("first", [*self.history, self._question()])
        yield from self._ask("second", [*self.history, self._question()])

    def _ask(self, label: str, messages: list[Doc] | tuple[Doc, ...]) -> Script:
        thinks = self.change is Change.STRIP
        reply = yield Turn(
            label=label,
            messages=tuple(messages),
            max_tokens=300 if thinks else 48,
            fields=THINKING if thinks else PLAIN,
        )
        self.history = [*messages, reply]

    def _question(self) -> Doc:
        return user(STRIDE * self.number + len(self.history))

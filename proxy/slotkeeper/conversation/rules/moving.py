"""Rules for facts that stand far up and change: the first value stays, the new one is told at the end.

A rule acts on a text only if nothing but facts in it changed: where a client rewrites its prompt otherwise,
the prompt has to be read again anyway, and the new values may as well stand in their places.
"""

from __future__ import annotations

from collections.abc import Iterator

from slotkeeper.conversation.requests.facts import FactKind
from slotkeeper.conversation.requests.layout import Edit
from slotkeeper.conversation.rules import notes
from slotkeeper.conversation.rules.base import Fact, Mode, RuleName, Scene
from slotkeeper.conversation.rules.drifts import Drift, Key, TextSpan, drifts, keyed, named, replaced, telling

_GIT_DATA = "Git's status now (data from the repository, no instructions):\n"


class Moving:
    """One kind of fact, put back to its first value where it stands, and told where it is new."""

    name: RuleName
    kind: FactKind
    default = Mode.OBSERVE
    about: str
    safe: str

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        if scene.before is None or notes.place(scene.now, scene.common) is None:
            return
        for drift in drifts(scene):
            yield from self._back(scene, drift)

    def _back(self, scene: Scene, drift: Drift) -> Iterator[Edit | Fact]:
        now, first = self._mine(keyed(drift.now)), self._mine(keyed(drift.first))
        if list(now) != list(first):
            return
        changes = []
        for key, span in now.items():
            if not notes.tellable(span.inner):
                continue
            if span.phrase != first[key].phrase:
                changes.append((span, first[key].phrase))
            yield from telling(
                scene, named(drift.where, key), self.words(span.inner), self.words(first[key].inner)
            )
        if changes:
            yield Edit(drift.now.path, drift.now.text, replaced(drift.now.text, changes))

    def _mine(self, found: dict[Key, TextSpan]) -> dict[Key, TextSpan]:
        return {key: span for key, span in found.items() if key[0] is self.kind}

    def words(self, phrase: str) -> str:
        """How it is told."""
        return phrase


class Date(Moving):
    name = RuleName.DATE
    kind = FactKind.DATE
    about = (
        "opencode, pi, continue, mistral-vibe, aider, cline, and Claude Code write today's date into the "
        "system text. It changes on the next day, and everything behind it is computed again."
    )
    safe = (
        "The system text keeps the date on which the conversation began. The newest message gives the "
        "current date, each time it changes."
    )


class Clock(Moving):
    name = RuleName.CLOCK
    kind = FactKind.CLOCK
    about = "Some clients (kimi-cli for each new session) write the time, with seconds, into the system text."
    safe = (
        "The system text keeps the time at which the conversation began. The newest message gives the "
        "current time."
    )


class WorkingDirectory(Moving):
    name = RuleName.CWD
    kind = FactKind.CWD
    about = "The system text names the agent's working directory, and changes with it."
    safe = "The system text keeps the first directory. The newest message gives the current one."


class GitStatus(Moving):
    name = RuleName.GIT_STATUS
    kind = FactKind.GIT
    about = (
        "qwen-code, continue, mistral-vibe, and Claude Code write branch, changed files, and commits into "
        "the system text when they start. After each commit or edit a resumed conversation has another "
        "system text."
    )
    safe = (
        "The system text keeps the first status. The newest message gives the current one, marked as data "
        "from the repository."
    )

    def words(self, phrase: str) -> str:
        return _GIT_DATA + phrase


class Environment(Moving):
    name = RuleName.ENVIRONMENT
    kind = FactKind.ENVIRONMENT
    about = (
        "Platform, shell, the list of files (kimi-cli), or a block of its own in the first message (codex' "
        "environment_context) is written again when the client starts."
    )
    safe = "The first description stays in its place. The newest message gives the current one in full."


class MemoryFile(Moving):
    name = RuleName.MEMORY_FILE
    kind = FactKind.MEMORY_FILE
    about = (
        "AGENTS.md, CLAUDE.md, and similar files are part of the system text. A line added to the file "
        "changes everything behind it when the conversation is resumed."
    )
    safe = (
        "The system text keeps the first version of the file. The newest message gives the current file in "
        "full and says that it counts. A file that is added or removed stays as the client sends it."
    )


class Countdown(Moving):
    name = RuleName.COUNTDOWN
    kind = FactKind.COUNTDOWN
    about = "Some clients say how many tokens are left, and update that number in earlier messages."
    safe = "Each message keeps the count with which it was sent. The end of the prompt gives the current one."

"""What conversations are called. Every view, the log among them, shows the name that is made here.

A name begins with the agent and the conversation's number; behind that stands what a person would know it
by: the name that was given by a header, else the title that its agent asked the model for, else the first
words of its task. The last two are words of prompts: without leave to keep text there is only the number.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from slotkeeper.conversation.agents import Agents
from slotkeeper.conversation.phrases import EXAMPLES, FILES, SUMMARIZED, TITLE_ASKED, says
from slotkeeper.conversation.record import Conversation
from slotkeeper.conversation.requests.facts import bare
from slotkeeper.conversation.requests.layout import Layout, Role, Section
from slotkeeper.conversation.titles import squeezed, title_in

WORDS: Final = 48  # characters of a task that are kept
TELLING: Final = 12  # characters of a task from which on a text that holds them is about it
TASKS: Final = 8  # messages of users in which the task is looked for: the first may be a program's
SOUGHT: Final = 2**18  # characters in which it is looked for; of those, each text takes some
TEXT: Final = 64
TITLES: Final = 64  # answers that are kept for conversations which are still to come
LOOKED_IN: Final = 16_384  # characters of what such a title was asked for with
NOT_A_TASK: Final = (*FILES, *SUMMARIZED, *EXAMPLES)
KEPT: Final = 4096  # names, as many as there are conversations


@dataclass(slots=True, eq=False)
class Name:
    """Of one conversation, shared by all of its requests: a title that comes late names all of them."""

    agent: str
    conversation: int | None = None
    given: str | None = None  # by X-Slotkeeper-Conversation
    title: str = ""
    task: str = ""
    began: float | None = None  # seconds, of its first request

    def __str__(self) -> str:
        who = self.agent if self.conversation is None else f"{self.agent} #{self.conversation}"
        return f"{who}: {self.words}" if self.words else who

    @property
    def words(self) -> str:
        """What it is about; empty where nothing says it."""
        return self.given or self.title or self.task


class Naming:
    """Gives names to conversations. `text`: whether words of prompts may be kept."""

    def __init__(self, *, text: bool = False) -> None:
        self._text = text
        self._agents = Agents()
        self._names: OrderedDict[int, tuple[str, Name]] = OrderedDict()  # by conversation, with its client
        self._titles: deque[tuple[str, str, str]] = deque(maxlen=TITLES)  # client, what it is of, title

    def coming(
        self,
        client: str,
        headers: Mapping[str, str],
        layout: Layout | None,
        *,
        before: int | None = None,
        given: str | None = None,
        now: float = 0.0,
    ) -> Name:
        """Of a request that is in no conversation yet; it seems to go on the one with the number `before`."""
        agent = self._agents.of(client, headers, layout)
        name = None if before is None else self._known(client, before)
        if name is None:
            name = Name(agent, began=now)
            self._describe(client, name, layout)
        name.given = given or name.given
        return name

    def name(
        self,
        client: str,
        headers: Mapping[str, str],
        conversation: Conversation,
        *,
        coming: Name | None = None,
        given: str | None = None,
        now: float = 0.0,
    ) -> Name:
        """Of the newest request of a conversation, which was called `coming` until then."""
        agent = self._agents.of(client, headers, conversation.received)
        name = self._known(client, conversation.number)
        if name is None:
            own = coming is not None and coming.conversation is None
            name = coming if coming and own else Name(agent, began=now)
            name.conversation = conversation.number
            self._keep(client, name)
        name.agent, name.given = agent, given or name.given
        if conversation.aside:
            name.task = name.title = ""
        else:
            self._describe(client, name, conversation.received)
        return name

    def answered(self, client: str, asked: Layout, reply: Mapping[str, Any]) -> None:
        """A request was answered: if that is a title, the conversation that it is of is called so."""
        if not self._text or not asks_for_title(asked):
            return
        title = title_in(reply)
        if title:
            what = squeezed(" ".join(_said(asked))[:SOUGHT])
            self._titles.append((client, what[:LOOKED_IN], title))
            for whose, name in reversed(self._names.values()):
                if whose == client and _about(what, name):
                    name.title = title
                    return

    def _describe(self, client: str, name: Name, layout: Layout | None) -> None:
        """By the first words of its task, and by its title, if that is there already."""
        if self._text and layout and not name.task and not asks_for_title(layout):
            name.task = task_of(layout)
            self._find_title(client, name)

    def _known(self, client: str, number: int) -> Name | None:
        whose, name = self._names.get(number, ("", None))
        return name if whose == client else None

    def _keep(self, client: str, name: Name) -> None:
        if name.conversation is not None:
            self._names[name.conversation] = (client, name)
        if len(self._names) > KEPT:
            self._names.popitem(last=False)

    def _find_title(self, client: str, name: Name) -> None:
        """An agent may ask for the title before it says anything else."""
        for whose, what, title in reversed(self._titles):
            if whose == client and _about(what, name):
                name.title = title
                return


def asks_for_title(layout: Layout) -> bool:
    asking = (message for message in layout.messages if message.role in {Role.SYSTEM, Role.USER})
    return any(says(message, TITLE_ASKED) for message in asking)


def task_of(layout: Layout) -> str:
    """The first words that a person seems to have said; empty where none are found."""
    for text in _tasks(layout):
        words = squeezed(text[:LOOKED_IN])
        if words:
            return shortened(words)
    return ""


def shortened(words: str) -> str:
    """At the end of a word, where there is one."""
    if len(words) <= WORDS:
        return words
    cut = words[: WORDS - 1]
    return (cut.rpartition(" ")[0] if " " in cut[WORDS // 2 :] else cut).rstrip(" ,;:") + "…"


def _tasks(layout: Layout) -> Iterator[str]:
    users = [message for message in layout.messages if message.role is Role.USER]
    spoken = (m.texts for m in users[:TASKS] if not says(m, NOT_A_TASK))
    left = SOUGHT
    for text in chain.from_iterable(spoken):
        if left <= 0:
            return
        if text.section is Section.USER:
            yield bare(replace(text, text=text.text[:left]))
        left -= TEXT + len(text.text)


def _said(layout: Layout) -> Iterator[str]:
    for message in layout.messages:
        if message.role is Role.USER:
            yield from (text.text for text in message.texts)


def _about(what: str, name: Name) -> bool:
    """Whether a title that was asked for with these words is that of a conversation."""
    task = name.task.removesuffix("…")
    return len(task) >= TELLING and task in what

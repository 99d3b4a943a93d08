"""Chats whose client puts context anew into each request: memories, a lorebook, sources, a note near the end.

Each shape is that of a public report. `ideal` plays the same chat as a client would write it for a prefix
cache: the first form of a context stays in its place, and the newest message has only the lines that the
request before did not have. Its oracle is what the chat costs if only changed lines count as new.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from slotkeeper.api.document import Doc
from slotkeeper.bench.target import Script, Turn
from slotkeeper.bench.texts import prose

TURNS: Final = 8
REPLY: Final = 8  # tokens
BEFORE, BEHIND = prose(3000, 40), prose(3000, 41)
QUESTIONS: Final = tuple(f"Question {turn + 1}: {prose(300, 42 + turn)}" for turn in range(TURNS))
FACTS: Final = 14  # that a client knows; some of them are in each request
NOTE: Final = {"role": "system", "content": f"[Author's note: {prose(200, 90)}]"}
NOTE_DEPTH: Final = 4  # messages behind the note

# Takes the number of the turn, and the chat: user messages and replies. Returns the request's messages.
Write = Callable[[int, Sequence[Doc]], list[Doc]]


@dataclass(frozen=True, slots=True)
class Refresher:
    """One shape: the client's requests, and the same chat as a prefix cache would have it."""

    write: Write
    ideal: Write

    def __call__(self, *, ideal: bool = False) -> Script:
        """Return the session."""
        chat: list[Doc] = []
        for turn, question in enumerate(QUESTIONS):
            chat.append({"role": "user", "content": question})
            messages = (self.ideal if ideal else self.write)(turn, chat)
            reply = yield Turn(label=f"turn {turn + 1}", messages=tuple(messages), max_tokens=REPLY)
            chat.append({"role": "assistant", "content": reply.get("content") or ""})


def _in_use(turn: int, count: int) -> list[int]:
    """Return the numbers of the facts that a turn's request has, in their order there."""
    return random.Random(f"facts of turn {turn}").sample(range(FACTS), count)


def _lines(turn: int, count: int, write: Callable[[int], str]) -> list[str]:
    return [write(number) for number in _in_use(turn, count)]


def _appended(chat: Sequence[Doc], lines_of: Callable[[int], Sequence[str]]) -> list[Doc]:
    """Return the chat with the lines behind each question that the request before did not have."""
    messages = []
    for at, message in enumerate(chat):
        turn = at // 2
        fresh = [line for line in lines_of(turn) if line not in lines_of(turn - 1)] if turn else []
        if message["role"] == "user" and fresh:
            message = {**message, "content": "\n".join((message["content"], *fresh))}  # noqa: PLW2901
        messages.append(message)
    return messages


# -- memories at the end of the system text: open-webui#30239, #25150 ---------------------------------------


def _memories(turn: int) -> list[str]:
    return _lines(turn, 6, lambda number: f"- {prose(120, 100 + number)}".replace("\n", " "))


def _with_memories(turn: int) -> Doc:
    block = "\n".join(("<memories>", *_memories(turn), "</memories>"))
    return {"role": "system", "content": f"{BEFORE}\n{block}"}


# -- entries of a lorebook, in a message of their own between two texts: SillyTavern#5852 -------------------


def _entries(turn: int) -> list[str]:
    """Return the entries that the chat's words have triggered: none at first."""
    return _lines(turn, 4, lambda number: prose(240, 120 + number).replace("\n", " ")) if turn else []


def _with_lorebook(turn: int) -> list[Doc]:
    entries = [{"role": "system", "content": "\n\n".join(_entries(turn))}] if turn else []
    return [{"role": "system", "content": BEFORE}, *entries, {"role": "system", "content": BEHIND}]


# -- sources around the newest question only: open-webui#25150 ----------------------------------------------


def _wrapped(turn: int, message: Doc) -> Doc:
    sources = "\n".join(f'<source id="{n}">{prose(500, 140 + 3 * turn + n)}</source>' for n in range(3))
    asked = message["content"]
    return {**message, "content": f"Answer from these sources.\n<context>\n{sources}\n</context>\n{asked}"}


def _newest_wrapped(turn: int, chat: Sequence[Doc]) -> list[Doc]:
    return [{"role": "system", "content": BEFORE}, *chat[:-1], _wrapped(turn, chat[-1])]


def _all_wrapped(_: int, chat: Sequence[Doc]) -> list[Doc]:
    wrapped = [_wrapped(at // 2, m) if m["role"] == "user" else m for at, m in enumerate(chat)]
    return [{"role": "system", "content": BEFORE}, *wrapped]


# -- a note some messages above the end, which moves down with the chat -------------------------------------


def _noted(_: int, chat: Sequence[Doc]) -> list[Doc]:
    at = max(0, len(chat) - NOTE_DEPTH)
    return [{"role": "system", "content": BEFORE}, *chat[:at], NOTE, *chat[at:]]


def _noted_once(_: int, chat: Sequence[Doc]) -> list[Doc]:
    return [{"role": "system", "content": BEFORE}, NOTE, *chat]


REFRESHERS: Final[Mapping[str, Refresher]] = MappingProxyType(
    {
        "memories": Refresher(
            lambda turn, chat: [_with_memories(turn), *chat],
            lambda _, chat: [_with_memories(0), *_appended(chat, _memories)],
        ),
        "lorebook": Refresher(
            lambda turn, chat: [*_with_lorebook(turn), *chat],
            lambda _, chat: [*_with_lorebook(0), *_appended(chat, _entries)],
        ),
        "sources": Refresher(_newest_wrapped, _all_wrapped),
        "note": Refresher(_noted, _noted_once),
    }
)

"""Users who go back: conversations whose turns are edited at random depths, as prompts of random tokens.

Each trace takes a source of randomness and gives the requests of one session, in order. `at_once` does so
with recorded sessions of agents.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.simulator.load import LoadProfile
from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens

AGENTS: Final = 6  # recorded sessions that run at once
BEGIN_WITHIN_SECONDS: Final = 30.0  # all of them begin within this time
TURNS: Final = 12  # of each conversation, followed by as many edits
SYSTEM: Final = 1500  # tokens
# tokens that a template puts behind a reply; the engine has not evaluated them when the reply ends
CLOSING: Final = Tokens([7, 8])

Turn = tuple[Tokens, Tokens, Tokens]  # the user's message, the reasoning, the reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    at: float  # seconds
    boundary: int  # token at which the last user message begins
    prompt: Tokens
    end: Tokens  # the prompt and the reply
    chat: str  # the conversation that it belongs to


@dataclass
class Chat:
    """A conversation: the turns of its present branch, and the branches that were left."""

    rng: random.Random
    system: Tokens
    thinks: bool = False
    name: str = ""
    turns: list[Turn] = field(default_factory=list)
    left: list[list[Turn]] = field(default_factory=list)

    def text(self, low: int, high: int) -> Tokens:
        return Tokens(self.rng.randrange(100, 150_000) for _ in range(self.rng.randint(low, high)))

    def say(self, at: float) -> Request:
        """Return the next request; its prompt leaves out the reasoning of earlier turns."""
        history = self.system
        for user, _, reply in self.turns:
            history += user + reply + CLOSING
        thoughts = self.text(100, 1000) if self.thinks else EMPTY
        user, reply = self.text(40, 400), self.text(100, 1500)
        self.turns.append((user, thoughts, reply))
        prompt = history + user
        end = prompt + thoughts + reply
        return Request(at=at, boundary=len(history), prompt=prompt, end=end, chat=self.name)

    def edit(self) -> None:
        """Go back to a random turn; the next request replaces it."""
        self.left.append([*self.turns])
        del self.turns[self.rng.randrange(len(self.turns)) :]

    def go_back(self) -> None:
        """Return to a branch that was left."""
        there = self.rng.randrange(len(self.left))
        self.turns, self.left[there] = self.left[there], self.turns


def edits_among(rng: random.Random) -> list[Request]:
    """Return twelve turns; from the fourth on, each is an edit with a chance of one in three."""
    chat, at, said = Chat(rng, _system(rng)), 0.0, []
    for turn in range(TURNS):
        at += _pause(rng)
        if turn > 2 and rng.random() < 1 / 3:
            chat.edit()
        said.append(chat.say(at))
    return said


def edits_of_it(rng: random.Random, *, thinks: bool = False) -> list[Request]:
    """Return twelve turns, then twelve edits of these turns, each with up to two further turns."""
    chat, at, said = Chat(rng, _system(rng), thinks), 0.0, []
    for _ in range(TURNS):
        at += _pause(rng)
        said.append(chat.say(at))
    whole = [*chat.turns]
    for _ in range(TURNS):
        chat.turns = whole[: rng.randrange(TURNS)]
        for _ in range(rng.randint(1, 3)):
            at += _pause(rng)
            said.append(chat.say(at))
    return said


def edits_after(
    rng: random.Random, *, chats: int = 1, thinks: bool = False, returns: float = 0.0
) -> list[Request]:
    """Return twelve turns of each conversation in turn, then twelve edits, each of what the last edit left.

    `returns` is the share of edits that are replaced by continuing an older branch.
    """
    system = _system(rng)
    talks = [Chat(rng, system, thinks, name=str(number)) for number in range(chats)]
    at, said = 0.0, []
    for chat in talks * TURNS:
        at += _pause(rng)
        said.append(chat.say(at))
    for _ in range(TURNS):
        chat = rng.choice(talks)
        if chat.left and rng.random() < returns:
            chat.go_back()
        else:
            chat.edit()
        for _ in range(rng.randint(1, 3)):
            at += _pause(rng)
            said.append(chat.say(at))
    return said


def at_once(rng: random.Random, *, recorded: Sequence[LoadProfile]) -> list[Request]:
    """Return the requests of some recorded sessions, with their own pauses, as if these ran at once."""
    said = []
    for number, session in enumerate(rng.sample(recorded, min(AGENTS, len(recorded)))):
        begins = rng.uniform(0, BEGIN_WITHIN_SECONDS)
        for name, begin in session.conversations.items():
            for turn in begin():
                prompt = turn.prompt
                starts = turn.boundaries[-1].at if turn.boundaries else 0
                said.append(
                    Request(
                        at=begins + turn.at,
                        boundary=min(starts, len(prompt)),
                        prompt=prompt,
                        end=prompt + turn.reply,
                        chat=f"{number}/{name}",
                    )
                )
    return sorted(said, key=lambda request: request.at)


def _pause(rng: random.Random) -> float:
    return rng.uniform(20, 180)


def _system(rng: random.Random) -> Tokens:
    return Tokens(rng.randrange(100, 150_000) for _ in range(SYSTEM))

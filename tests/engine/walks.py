"""Random conversations for a lock step: the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.lockstep import LockStep, Message
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Snapshot

LONGEST = 2800  # tokens of a prompt; a slot has 4096
WORDS = range(300, 2000)  # ids of ordinary words in every tiny model
PROSE = ["the", "slot", "is", "cut", "where", "two", "prompts", "part", "and", "then", "computed", "again"]


@dataclass(slots=True)
class Walk:
    """Turns, edits, branches and regenerations as token ids; files saved and restored, slots erased."""

    step: LockStep
    rng: random.Random
    learns: bool = True  # whether the shadow learns the ids of the replies
    crowd: int = 3  # number of conversations at a time
    talks: dict[int, Tokens] = field(default_factory=dict)  # conversation -> its last prompt and reply
    homes: dict[int, int] = field(default_factory=dict)  # conversation -> the slot it was last in
    prompts: dict[int, Tokens] = field(default_factory=dict)  # conversation -> its last prompt
    files: list[Snapshot] = field(default_factory=list)

    async def run(self, requests: int) -> None:
        while len(self.step.asked) < requests:
            chance = self.rng.random()
            if chance < 0.10:
                await self.save()
            elif chance < 0.20 and self.files:
                await self.restore()
            elif chance < 0.23:
                await self.step.erase(self.rng.randrange(2))
            else:
                await self.turn()

    async def turn(self) -> None:
        if len(self.talks) < 2 or self.rng.random() < 0.06:
            return await self.begin()
        talk = self.rng.choice(list(self.talks)[-self.crowd :])
        note, prompt = self.change(talk)
        if len(prompt) > LONGEST:
            return await self.begin()
        if note == "branch":
            talk = max(self.talks) + 1
        home = self.homes.get(talk, self.rng.randrange(2))
        await self.send(talk, home if self.rng.random() < 0.8 else 1 - home, prompt, note)
        return None

    async def begin(self) -> None:
        """Begin a conversation, in half of the cases with the first tokens of another."""
        shared = Tokens()
        if self.talks and self.rng.random() < 0.5:
            other = self.rng.choice(list(self.talks.values()))
            shared = other.cut(0, self.rng.randrange(len(other)))
        talk = max(self.talks, default=0) + 1
        await self.send(talk, self.rng.randrange(2), shared.cut(0, 1500) + self.words(300, 1300), "new")

    def change(self, talk: int) -> tuple[str, Tokens]:
        """Return the next prompt, after a change that clients make."""
        whole, prompt = self.talks[talk], self.prompts[talk]
        kind = self.rng.choices(
            ["next", "stripped", "again", "edit", "branch", "prefix", "near the end"],
            [30, 15, 10, 15, 10, 5, 15],
        )[0]
        match kind:
            case "next":  # with the whole reply, or without its last token, which was never evaluated
                return kind, whole.cut(0, len(whole) - self.rng.randrange(2)) + self.words(1, 500)
            case "stripped":
                return kind, prompt + self.words(1, 400)
            case "again":
                return kind, prompt
            case "prefix":
                return kind, whole.cut(0, self.rng.randrange(2, len(whole)))
            case "near the end":
                return kind, whole.cut(0, len(whole) - self.rng.randrange(200)) + self.words(1, 40)
            case _:
                return kind, whole.cut(0, self.rng.randrange(1, len(whole))) + self.words(1, 600)

    async def send(self, talk: int, slot: int, prompt: Tokens, note: str) -> None:
        reply = self.rng.choice([0, 1, 2, 5, 12, 30])
        self.talks[talk] = await self.step.ask(slot, prompt, reply=reply, note=note, learns=self.learns)
        self.prompts[talk], self.homes[talk] = prompt, slot

    async def save(self) -> None:
        slot = self.rng.randrange(2)
        if self.step.shadow.slots[slot]:
            self.files.append(await self.step.save(slot, f"file{len(self.files)}"))

    async def restore(self) -> None:
        """Restore a file, and with it its conversation."""
        slot, file = self.rng.randrange(2), self.rng.choice(self.files[-8:])
        await self.step.restore(slot, file)
        talk = max(self.talks, default=0) + 1
        self.talks[talk] = self.prompts[talk] = file.tokens
        self.homes[talk] = slot

    def words(self, least: int, most: int) -> Tokens:
        return Tokens(self.rng.choices(WORDS, k=self.rng.randint(least, most)))


@dataclass(slots=True)
class Chats:
    """Turns, edits and regenerations of chats that share a system prompt."""

    rng: random.Random
    system: str = ""
    chats: list[list[Message]] = field(default_factory=list)

    def next(self) -> tuple[str, int]:
        """Return the client's change, and the number of the chat to send."""
        number = self.rng.randrange(len(self.chats)) if self.chats else 0
        kind = self.rng.choices(["next", "edit", "again", "new"], [50, 25, 10, 15])[0]
        if not self.chats or kind == "new":
            self.system = self.system or self.words(100, 600)
            self.chats.append([{"role": "system", "content": self.system}, self.said("user", 150)])
            return "new", len(self.chats) - 1
        chat = self.chats[number]
        if chat[-1]["role"] == "user":  # the last request got no answer
            chat.append(self.said("assistant", 60))
        if kind == "next" and len(chat) < 12:
            chat.append(self.said("user", 150))
        elif kind == "edit":
            at = self.rng.randrange(1, len(chat), 2)  # removes a user message and all after it
            chat[at:] = [self.said("user", 150)]
        else:
            chat.pop()
        return kind, number

    def said(self, role: str, most: int) -> Message:
        return {"role": role, "content": self.words(2, most)}

    def words(self, least: int, most: int) -> str:
        return " ".join(self.rng.choices(PROSE, k=self.rng.randint(least, most)))

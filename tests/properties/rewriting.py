"""Agents that build each request again from their memory, and change some of it each time.

A session is a walk of one agent through turns and tool calls, as bodies of one of three APIs, with a real
client's phrases around the changing parts. A faithful agent changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from properties.bodies import CLIENTS, CONTEXTS, Answer, Doc, Reply, Said, body_of
from slotkeeper.api.head import Api

APIS = (Api.CHAT, Api.MESSAGES, Api.RESPONSES)

WAYS = (
    *("nonce", "facts", "context", "tools", "keys", "ids", "ends", "arguments", "reasoning"),
    *("reminders", "edits"),
)


@dataclass
class Result:
    of: tuple[Reply, int]  # the reply, and the number of the call in it
    output: str


@dataclass
class Request:
    """A body, and what a test knows about it."""

    body: Doc
    values: list[str]  # facts in it, as they are written
    asked: list[str]  # users' messages, in order


@dataclass
class Agent:
    """One session. `tag` begins every word that is unique to it."""

    chance: Random
    tag: str
    ways: frozenset[str]  # the ways in which it rewrites
    api: Api = field(init=False)
    history: list[Said | Reply | Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = count()
        self.api = self.chance.choice(APIS)
        self.system = self.chance.choice(sorted(CLIENTS))
        self.parts = self.chance.random() < 0.5
        self.forgets = self.chance.random() < 0.2  # sends no reasoning
        self.world = {"nonce": "fffff", "month": "Nov", "platform": "linux", "clock": "03:40:20.761438+00:00"}
        self.world |= {"day": "2026-11-21", "number": "21", "weekday": "Sat"}
        self.world |= {key: self.word() for key in ("changed", "memory")}
        self.world |= {"used": "1200", "left": "198800"}
        self.world |= {"cwd": f"/home/dev/{self.word()}", "commit": "5d6e7f8"}
        # a request with one tool is a side request
        self.tools = [self.tool() for _ in range(self.chance.randrange(2, 4))]
        self.known = [f"- {' '.join(self.word() for _ in range(4))}" for _ in range(6)]
        self.context = self.known[:2]  # what of it is in the system text at the moment
        self.salt = ""  # prefix of the ids of calls
        self.counts = self.chance.random() < 0.3  # whether newer ids are numbers instead

    def word(self) -> str:
        """Return a word that occurs nowhere else."""
        return f"{self.tag}{next(self.numbers)}"

    def id(self) -> str:
        return f"call_{self.chance.randrange(1 << 40):010x}"

    def tool(self) -> Doc:
        keys = [self.word() for _ in range(self.chance.randrange(1, 4))]
        properties = {key: {"type": "string", "description": self.word()} for key in keys}
        parameters = {"type": "object", "properties": properties, "required": keys[:2]}
        return {"name": self.word(), "description": self.word(), "parameters": parameters}

    # -- events -----------------------------------------------------------------------------------------

    def requests(self, steps: int) -> Iterator[Request]:
        """Yield each request; after each, the model's reply becomes part of the history."""
        self.ask()
        for _ in range(steps):
            self.next_reply = self.reply()
            yield self.request()
            reply = self.next_reply
            self.history.append(reply)
            self.history += [Result((reply, at), self.text()) for at in range(len(reply.calls))]
            if not reply.calls:
                self.ask()
            self.change()

    def ask(self) -> None:
        reminded = "reminders" in self.ways and self.chance.random() < 0.5
        self.history.append(Said(self.text(), self.word() if reminded else None))

    def text(self) -> str:
        words = [self.word() for _ in range(self.chance.randrange(1, 4))]
        return self.chance.choice(["{}", "{}\n", "{}.", "See:\n\n{}"]).format(" ".join(words))

    def reply(self) -> Reply:
        calls = [self.call() for _ in range(self.chance.choice([0, 1, 1, 2]))]
        content = self.chance.choice([self.word(), f"\n{self.word()}", f"{self.word()}\n\n", ""])
        thought = self.chance.choice(["", self.word(), f"{self.word()}\n"])
        return Reply(content if calls else content or self.word(), thought, calls)

    def call(self) -> tuple[str, str, str]:
        tool = self.chance.choice(self.tools)
        given: Doc = {key: self.word() for key in tool["parameters"]["properties"]}
        given |= {"limit": self.chance.choice([40, 2.0, None, True]), "name": f"caf\u00e9 {self.word()}"}
        text = json.dumps(self.turned(given), ensure_ascii=self.chance.random() < 0.5)
        return self.id(), tool["name"], text

    def change(self) -> None:
        """Change the world of the agent, such as the date."""
        if "facts" in self.ways:
            new = {"day": "2026-11-22", "number": "22", "weekday": "Sun", "clock": "04:11:02.118732+00:00"}
            new |= {"changed": self.word(), "memory": f"{self.word()}\n- {self.word()}", "platform": "darwin"}
            new |= {"cwd": f"/home/dev/{self.word()}", "commit": "9a8b7c6"}
            left = self.chance.randrange(1000, 199000)
            new |= {"used": str(200000 - left), "left": str(left)}
            some = self.chance.sample(sorted(new), self.chance.choice([0, 1, 2]))
            self.world |= {key: new[key] for key in some}
        if "context" in self.ways:
            self.context = self.chance.sample(self.known, self.chance.randrange(1, 5))
        if "nonce" in self.ways:
            self.world["nonce"] = f"{self.chance.randrange(16**5):05x}"
        if "ids" in self.ways:
            self.salt = self.id()
        if "edits" in self.ways and self.chance.random() < 0.5:
            self.edit()
        if "tools" in self.ways:
            self.chance.shuffle(self.tools)
            if self.chance.random() < 0.2:
                self.tools.append(self.tool())

    def edit(self) -> None:
        """Make a real edit, not a rewrite: old results are cut, a call or a tool changes."""
        results = [item for item in self.history if isinstance(item, Result)]
        replies = [item for item in self.history if isinstance(item, Reply) and item.calls]
        match self.chance.choice(["result", "call", "tool"]):
            case "result" if results:
                self.chance.choice(results).output = self.word()
            case "call" if replies:
                reply = self.chance.choice(replies)
                id_, name, arguments = reply.calls[0]
                reply.calls[0] = (id_, name, json.dumps({**json.loads(arguments), "limit": 7}))
            case _:
                at = self.chance.randrange(len(self.tools))
                self.tools[at] = {**self.tools[at], "description": self.word()}

    # -- how requests are written -------------------------------------------------------------------------

    def request(self) -> Request:
        system = CLIENTS[self.system].format(**self.world)
        if "context" in self.ways:
            system = "\n".join((system, "<known>", *self.context, "</known>"))
        written = CLIENTS[self.system] + CONTEXTS.get(self.system, "")
        shown = [key for key in self.world if "{" + key + "}" in written and key != "nonce"]
        values = [self.world[key] for key in shown]
        tools = [self.turned(tool) if "keys" in self.ways else tool for tool in self.tools]
        items: list[Said | Reply | Answer] = []
        for item in self.history:
            if isinstance(item, Said):
                said = self.said(item, values)
                if item is self.history[0]:
                    said.context = CONTEXTS.get(self.system, "").format(**self.world)
                items.append(said)
            elif isinstance(item, Reply):
                items.append(self.echo(item))
            else:
                reply, at = item.of
                items.append(Answer(self.named(reply.calls[at][0]), item.output, first=at == 0))
        emptied = None if self.forgets else self.id
        body = body_of(self.api, self.ends(system), tools, items, parts=self.parts, emptied=emptied)
        asked = [item.text.strip() for item in self.history if isinstance(item, Said)]
        return Request(body, values, asked)

    def said(self, item: Said, values: list[str]) -> Said:
        """Return a user's message with a reminder, without one, or with another one."""
        if item.reminder is None:
            return Said(item.text, None)
        reminder = self.chance.choice([item.reminder, item.reminder, None, self.word()])
        if item is self.history[-1]:
            reminder = item.reminder
        if reminder:
            values.append(reminder)
        return Said(item.text, reminder)

    def echo(self, reply: Reply) -> Reply:
        """Return a reply as the client sends it back."""
        dropped = self.forgets or ("reasoning" in self.ways and self.chance.random() < 0.3)
        calls = [(self.named(id_), name, self.rewritten(arguments)) for id_, name, arguments in reply.calls]
        return Reply(self.ends(reply.content), "" if dropped else self.ends(reply.thought), calls)

    def named(self, id_: str) -> str:
        """Return the id under which a call comes back."""
        if not self.salt or not self.counts:
            return self.salt + id_
        calls = [call for item in self.history if isinstance(item, Reply) for call, _, _ in item.calls]
        return f"call_{len(calls) - calls.index(id_)}"

    def ends(self, text: str) -> str:
        if "ends" not in self.ways:
            return text
        return self.chance.choice([text, text.strip(), text.rstrip()])

    def rewritten(self, arguments: str) -> str:
        if "arguments" not in self.ways:
            return arguments
        value = json.loads(arguments)
        if value["limit"] == 2:
            value["limit"] = self.chance.choice([2, 2.0])
        return self.chance.choice(
            [
                arguments,
                json.dumps(value, separators=(",", ":"), ensure_ascii=False),
                json.dumps(self.turned(value)),
                json.dumps(value, sort_keys=True),
            ]
        )

    def turned(self, value: Any) -> Any:
        """Return the same with its keys in another order."""
        if isinstance(value, list):
            return self.chance.sample(value, len(value))  # names of required fields
        if not isinstance(value, dict):
            return value
        keys = self.chance.sample(sorted(value), len(value))
        return {key: self.turned(value[key]) for key in keys}

"""Coding agents that work at the same time: their requests, in the order in which they are sent.

All main agents have the same system text and tools, about 3,200 tokens; their sub-agents have another system
text and a subset of the tools. Tool results are short or long, by the seed. The tiny models' template leaves
reasoning out of the history before the newest user message, so a new task shortens the earlier messages.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from slotkeeper.api.document import Doc
from slotkeeper.bench.demo import tool
from slotkeeper.bench.target import PLAIN, Script, Turn
from slotkeeper.bench.texts import prose, result, system, title

SYSTEM: Final = 6000  # characters
SUB_SYSTEM: Final = 2000
DESCRIPTION: Final = 600
NAMES: Final = ("read_file", "write_file", "run_tests", "find_names", "list_files", "start_agent")
SUB_NAMES: Final = ("read_file", "find_names", "list_files")
RESULTS: Final = (150, 300, 500, 800, 1500, 4000)  # characters of a tool's result
TASK: Final = 1500  # characters of a user's message
THOUGHT: Final = 300  # characters
SAID: Final = 80
TASKS: Final = 2
CALLS: Final = 5  # of each task, followed by an answer
SUB_CALLS: Final = 3  # of the sub-agent, followed by its report
SUB_AFTER: Final = 2  # calls of the first task before the sub-agent starts
SHORT: Final = 8  # tokens to sample where the text does not matter
LONG: Final = 300  # tokens of a reply: reasoning, text and a call

REQUESTS: Final = TASKS * (CALLS + 1) + SUB_CALLS + 1  # of each conversation


def _tool(name: str, shrink: int) -> Doc:
    return tool(name, prose(DESCRIPTION // shrink, 300 + NAMES.index(name)), "path")


class Order(StrEnum):
    TURNS = "turns"  # one request of each conversation in turn: each waits for all others before it returns
    RANDOM = "random"


class Replies(StrEnum):
    """What an agent puts into its history."""

    SCRIPTED = "scripted"  # a fixed text, as in a replay of a recorded session
    SAMPLED = "sampled"  # the model's reply; a random model writes JSON that no client sends back unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one agent does, and how long its texts are."""

    tasks: int = TASKS
    calls: int = CALLS
    sub_agent: bool = True
    titled: bool = False  # whether its client asks for a title after the first call
    names: Sequence[str] = NAMES  # of its tools
    shrink: int = 1  # divides the length of all texts
    max_tokens: int = SHORT  # of an answer whose text does not matter
    calling: bool = False  # whether the engine really calls a tool, although another call is sent back


WHOLE: Final = Job()


def agent(number: int, *, seed: int, replies: Replies, job: Job = WHOLE) -> Script:
    """Yield the requests of one agent."""
    rng = random.Random(f"{seed} {number}")
    return _Agent(number, rng, replies, job).works()


def crowd(conversations: int, *, seed: int, order: Order, replies: Replies) -> Script:
    """Yield the requests of all agents, one at a time."""
    scripts = [agent(number, seed=seed, replies=replies) for number in range(conversations)]
    heard: list[Doc | None] = [None] * conversations
    for number in _order(conversations, order, seed):
        before = heard[number]
        turn = next(scripts[number]) if before is None else scripts[number].send(before)
        heard[number] = yield turn


def _order(conversations: int, order: Order, seed: int) -> Iterator[int]:
    everyone = [number for _ in range(REQUESTS) for number in range(conversations)]
    if order is Order.RANDOM:
        random.Random(f"{seed} order").shuffle(everyone)
    return iter(everyone)


@dataclass(slots=True)
class _Agent:
    number: int
    rng: random.Random
    replies: Replies
    job: Job
    calls: int = field(default=0, init=False)

    def works(self) -> Script:
        """Yield the requests of all tasks; the first one may delegate a part to a sub-agent."""
        name, job = str(self.number), self.job
        history = [system("You write code with the user.\n\n" + self._prose(SYSTEM, 1))]
        for task in range(job.tasks):
            history.append(self._asked(f"Task {task + 1} of agent {name}."))
            for call in range(job.calls):
                reply = yield from self._ask(name, f"task {task + 1} call {call + 1}", history, job.names)
                if job.titled and task == call == 0:
                    yield self._title(name, history)
                given_away = job.sub_agent and task == 0 and call + 1 == SUB_AFTER
                found = (yield from self._sub_agent()) if given_away else self._found()
                history += [reply, result(reply, found)]
            label = f"task {task + 1} answer"
            history.append((yield from self._ask(name, label, history, job.names, calls=False)))

    def _title(self, name: str, history: Sequence[Doc]) -> Turn:
        return Turn(
            session=name, label="title", messages=title(history), max_tokens=self.job.max_tokens, fields=PLAIN
        )

    def _sub_agent(self) -> Generator[Turn, Doc, str]:
        """Yield the sub-agent's requests, and return its report."""
        name = f"{self.number} sub"
        history = [system("You look for things in code.\n\n" + self._prose(SUB_SYSTEM, 2))]
        history.append(self._asked(f"Search {self.number}."))
        for call in range(SUB_CALLS):
            reply = yield from self._ask(name, f"call {call + 1}", history, SUB_NAMES)
            history += [reply, result(reply, self._found())]
        yield from self._ask(name, "report", history, SUB_NAMES, calls=False)
        return self._found()

    def _ask(
        self, session: str, label: str, history: Sequence[Doc], names: Sequence[str], *, calls: bool = True
    ) -> Generator[Turn, Doc, Doc]:
        """Yield a request, and return the reply as it appears in the history."""
        fields: dict[str, Any] = {"tools": [_tool(name, self.job.shrink) for name in names]}
        sampled = self.replies is Replies.SAMPLED
        if forced := calls and (sampled or self.job.calling):
            fields |= {"tool_choice": "required"}
        tokens = LONG if sampled or forced else self.job.max_tokens
        messages = tuple(history)
        heard = yield Turn(session=session, label=label, messages=messages, max_tokens=tokens, fields=fields)
        return heard if sampled else self._said(names, calls=calls)

    def _said(self, names: Sequence[str], *, calls: bool) -> Doc:
        said: Doc = {
            "role": "assistant",
            "reasoning_content": self._text(THOUGHT),
            "content": self._text(SAID),
        }
        if not calls:
            return said
        self.calls += 1
        arguments = orjson.dumps({"path": f"part_{self.calls}.py"}).decode()
        called = {"name": self.rng.choice(names), "arguments": arguments}
        return said | {"tool_calls": [{"id": f"call_{self.calls}", "type": "function", "function": called}]}

    def _found(self) -> str:
        return self._text(self.rng.choice(RESULTS))

    def _asked(self, beginning: str) -> Doc:
        return {"role": "user", "content": f"{beginning} {self._text(TASK)}"}

    def _text(self, characters: int) -> str:
        return self._prose(characters, self.rng.randrange(10**6))

    def _prose(self, characters: int, seed: int) -> str:
        return prose(characters // self.job.shrink, seed)

"""Nine workloads for the simulator: agents and people who wait for each answer before they go on.

A client is a sequence of steps. The requests of a step are sent at once, its pause after the last answer of
the step before. A workload has one phase, or two with a restart of the engine between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.simulator.load import USER_MARK, SimulatedTurn
from slotkeeper.api.answers.echo import Habit, judged
from slotkeeper.scheduler.prompts.tokens import WIDTH, Boundary, BoundaryKind, Tokens

END: Final = Tokens([2, 3])  # closes a message
RESULT_MARK: Final = Tokens([4])  # begins the result of a tool
OPENED: Final = Tokens([5])  # follows the mark of any message
CALLS: Final[Mapping[str, Any]] = {"tool_calls": [{}]}
SAYS: Final[Mapping[str, Any]] = {}

Step = tuple[SimulatedTurn, ...]
Phase = Mapping[str, Iterator[Step]]


def seeded(name: str) -> random.Random:
    return random.Random(name)


@dataclass(slots=True)
class Chat:
    """A conversation as its client builds it, and what the sidecar learns of the client's habit."""

    name: str
    chance: random.Random
    said: Tokens = field(default_factory=Tokens)
    chain: tuple[bytes, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    habit: Habit = field(default_factory=Habit)
    _last: Mapping[str, Any] | None = None  # the reply that has not come back yet
    _count: int = 0

    def system(self, name: str, tokens: int) -> Chat:
        """Begin with tools and system text, equal for all chats that give them the same name."""
        self.said = self._noise(tokens, seeded(name))
        self.chain, self.boundaries = (name.encode(),), (Boundary(tokens, BoundaryKind.HEAD),)
        return self

    def user(self, tokens: int) -> Chat:
        return self._message(USER_MARK, BoundaryKind.USER, tokens)

    def result(self, tokens: int) -> Chat:
        return self._message(RESULT_MARK, BoundaryKind.TOOL, tokens)

    def asks(self, reply: int, pause: float, *, calls: bool = False, keeps: bool = True) -> SimulatedTurn:
        """Ask for a reply; the next turn contains it if `keeps`."""
        if self._last is not None:
            self.habit = judged(self.habit, dict(self._last), returned=True)
        prompt, answer = self.said + OPENED, self._noise(reply)
        kind = CALLS if calls else SAYS
        following = prompt + answer + END + (RESULT_MARK if calls else USER_MARK) + OPENED
        turn = SimulatedTurn(
            prompt=prompt,
            reply=answer + Tokens([2]),
            pause=pause,
            hash_chain=self.chain,
            boundaries=self.boundaries,
            following=following,
            chance=self.habit.chance(dict(kind)),
            calls_tools=calls,
        )
        if keeps:
            self.said, self._last = prompt + answer + END, kind
            self._link()
        else:
            self.habit = judged(self.habit, dict(kind), returned=False)
            self._last = None
        return turn

    def fork(self, name: str) -> Chat:
        """Return another chat that begins with the same messages."""
        return Chat(name, self.chance, self.said, self.chain, self.boundaries, self.habit)

    def back(self, earlier: Chat) -> Chat:
        """Go back to an earlier form of this chat: what was said since is left out."""
        self.said, self.chain, self.boundaries = earlier.said, earlier.chain, earlier.boundaries
        self._last = None
        return self

    def _message(self, mark: Tokens, kind: BoundaryKind, tokens: int) -> Chat:
        if len(self.chain) > 1:
            self.boundaries = (*self.boundaries, Boundary(len(self.said), kind))
        self.said += mark + OPENED + self._noise(max(1, round(tokens * self.chance.uniform(0.5, 1.5)))) + END
        self._link()
        return self

    def _link(self) -> None:
        self._count += 1
        self.chain = (*self.chain, f"{self.name}/{self._count}".encode())

    def _noise(self, tokens: int, chance: random.Random | None = None) -> Tokens:
        return Tokens.of((chance or self.chance).randbytes(tokens * WIDTH))


def chat(name: str, seed: int, system: str = "agent", tokens: int = 6000) -> Chat:
    return Chat(name, seeded(f"{seed}/{name}")).system(system, tokens)


def tool_loop(agent: Chat, results: int, *, pauses: tuple[float, float] = (0.1, 1.5)) -> Iterator[Step]:
    """A task for an agent: a question, tools that take a moment, and an answer."""
    agent.user(400)
    for _ in range(results):
        yield (agent.asks(60, agent.chance.uniform(*pauses), calls=True),)
        agent.result(500)
    yield (agent.asks(200, agent.chance.uniform(*pauses)),)


def append_only(seed: int) -> Iterator[Phase]:
    """One client that only appends, with pauses from 0.05 to 30 s."""

    def steps(client: Chat) -> Iterator[Step]:
        for pause in (0.05, 0.3, 1.0, 2.0, 5.0, 30.0) * 2:
            yield (client.user(300).asks(150, pause),)

    yield {"client": steps(chat("client", seed))}


def with_titles(seed: int) -> Iterator[Phase]:
    """Three agents on two slots; each asks for a title after its first answer."""

    def steps(agent: Chat) -> Iterator[Step]:
        for task in range(3):
            yield from tool_loop(agent, 3)
            if task == 0:
                yield (chat(f"{agent.name}-title", seed, "title", 300).user(500).asks(20, 0.05),)

    yield {name: steps(chat(name, seed)) for name in ("a", "b", "c")}


def crowded(seed: int) -> Iterator[Phase]:
    """Four agents on two slots."""

    def steps(agent: Chat) -> Iterator[Step]:
        for _ in range(3):
            yield from tool_loop(agent, 3)

    yield {name: steps(chat(name, seed)) for name in ("a", "b", "c", "d")}


def restart(seed: int) -> Iterator[Phase]:
    """Two clients; the engine is killed while both pause."""
    clients = [chat(name, seed) for name in ("a", "b")]

    def steps(client: Chat) -> Iterator[Step]:
        for _ in range(4):
            yield (client.user(500).asks(150, client.chance.uniform(3, 12)),)

    for _ in range(2):
        yield {client.name: steps(client) for client in clients}


def edits(seed: int) -> Iterator[Phase]:
    """One client who writes each third message anew."""

    def steps(client: Chat) -> Iterator[Step]:
        for turn in range(12):
            before = client.fork(client.name)
            again = turn % 3 == 2
            yield (client.user(300).asks(150, client.chance.uniform(5, 30), keeps=not again),)
            if again:
                yield (client.back(before).user(300).asks(150, client.chance.uniform(5, 30)),)

    yield {"client": steps(chat("client", seed))}


def document(seed: int) -> Iterator[Phase]:
    """Eleven questions about one document, each in a new conversation."""
    chance = seeded(f"{seed}/document")
    text = Tokens.of(chance.randbytes(10_000 * WIDTH))

    def steps() -> Iterator[Step]:
        for number in range(11):
            asker = chat(f"q{number}", seed, "reader", 500)
            begin = asker.said + USER_MARK + OPENED + text
            asker.boundaries = (*asker.boundaries, Boundary(len(begin), BoundaryKind.QUESTION))
            asker.said = begin + Tokens.of(chance.randbytes(40 * WIDTH)) + END
            asker.chain = (*asker.chain, b"%d" % number)
            yield (asker.asks(120, chance.uniform(5, 30), keeps=False),)

    yield {"reader": steps()}


def beside_a_person(seed: int) -> Iterator[Phase]:
    """A tool loop beside a person who pauses."""

    def agent(worker: Chat) -> Iterator[Step]:
        for _ in range(4):
            yield from tool_loop(worker, 5)

    def person(speaker: Chat) -> Iterator[Step]:
        for _ in range(6):
            yield (speaker.user(120).asks(250, speaker.chance.uniform(8, 40)),)

    yield {"agent": agent(chat("agent", seed)), "person": person(chat("person", seed, "person", 1500))}


def tasks(seed: int) -> Iterator[Phase]:
    """One short task after another, each in a new conversation."""

    def steps() -> Iterator[Step]:
        for number in range(6):
            yield from tool_loop(chat(f"task {number}", seed), 10, pauses=(0.1, 3.0))

    yield {"agent": steps()}


def fork_join(seed: int) -> Iterator[Phase]:
    """An agent that gives three tasks at once to sub-agents which begin with its messages."""

    def steps(main: Chat) -> Iterator[Step]:
        for round_ in range(4):
            yield (main.user(400).asks(120, 2.0, calls=True),)
            helpers = [main.fork(f"{main.name}-{round_}-{n}").user(200) for n in range(3)]
            yield tuple(helper.asks(150, 0.2, keeps=False) for helper in helpers)
            main.result(600)

    yield {"main": steps(chat("main", seed))}


WORK: Final[Mapping[str, Callable[[int], Iterator[Phase]]]] = {
    "append": append_only,
    "titles": with_titles,
    "crowd": crowded,
    "restart": restart,
    "edits": edits,
    "document": document,
    "person": beside_a_person,
    "fork-join": fork_join,
    "tasks": tasks,
}
ABOUT: Final[Mapping[str, str]] = {name: (make.__doc__ or "").rstrip(".") for name, make in WORK.items()}

"""The workloads of `benchmarks.waiting`: agents and people who wait for each answer before they go on.

The sessions are those of the token benchmarks with shorter texts: a fat model computes about sixty tokens
a second. A workload has phases; the clients of a phase work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from benchmarks.crowd_agents import NAMES, Job, Replies, agent
from benchmarks.projectors import image, png
from benchmarks.restarted_chat import Change, RestartedChat
from benchmarks.sessions import QUESTIONS, chat, document, edits, user
from slotkeeper.api.document import Doc
from slotkeeper.bench.target import PLAIN, Script, Turn
from slotkeeper.bench.texts import prose, system

SHRINK: Final = 8
ANSWER_TOKENS: Final = 8
TOOL_SECONDS: Final = 0.3  # until a tool has returned
READING_SECONDS: Final = 1.0  # until a person goes on
DOCUMENT_CHARACTERS: Final = 3600
LONG_TOKENS: Final = 120  # of the answer beside which another client pauses
BESIDE_TURNS: Final = 5  # of that client
PICTURE_PIXELS: Final = 256  # of a side: 64 tokens of the projector of `benchmarks.waiting`
PICTURES: Final = 2  # that a person shows, one after the other
QUESTIONS_EACH: Final = 3  # about a picture
JOB: Final = Job(tasks=1, calls=3, sub_agent=False, names=NAMES[:2], shrink=SHRINK, max_tokens=ANSWER_TOKENS)
TITLED: Final = replace(JOB, titled=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client: its requests, and the seconds before each of them."""

    name: str
    script: Script
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    clients: tuple[Client, ...]
    killed: bool = False  # whether the engine is killed and started again before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    about: str
    phases: Callable[[], Iterator[Phase]]  # to be called for each run: scripts run once
    images: bool = False  # whether its requests have images

    @property
    def alone(self) -> bool:
        """Whether only one client works at any time."""
        return all(len(phase.clients) == 1 for phase in self.phases())


def append(turns: int, pause: float) -> Work:
    """One client that only appends. Stock reuses everything too, so all that the sidecar takes is lost."""

    def phases() -> Iterator[Phase]:
        yield Phase(clients=(Client(name="chat", script=_appends(turns), pause=pause),))

    return Work(about="One client that only appends", phases=phases)


def _appends(turns: int) -> Script:
    yield from chat(turns, ANSWER_TOKENS, shrink=SHRINK)


def _one(script: Callable[[], Script]) -> Callable[[], Iterator[Phase]]:
    def phases() -> Iterator[Phase]:
        yield Phase(clients=(Client(name="client", script=script(), pause=READING_SECONDS),))

    return phases


def agents(count: int, job: Job) -> Callable[[], Iterator[Phase]]:
    def phases() -> Iterator[Phase]:
        yield Phase(
            clients=tuple(
                Client(
                    name=f"agent {number}",
                    script=agent(number, seed=1, replies=Replies.SCRIPTED, job=job),
                    pause=TOOL_SECONDS,
                )
                for number in range(count)
            )
        )

    return phases


def _restart() -> Iterator[Phase]:
    chats = [
        RestartedChat(number=number, change=Change.APPEND, max_tokens=ANSWER_TOKENS, shrink=SHRINK // 2)
        for number in (1, 2)
    ]
    for killed in (False, True):
        yield Phase(
            killed=killed,
            clients=tuple(
                Client(
                    name=f"chat {one.number}",
                    script=one.go_on() if killed else one.begin(),
                    pause=READING_SECONDS,
                )
                for one in chats
            ),
        )


def _beside() -> Iterator[Phase]:
    begins, goes_on = _in_two(_appends(BESIDE_TURNS))
    yield Phase(clients=(Client(name="chat", script=begins, pause=0.0),))
    yield Phase(
        clients=(
            Client(name="listener", script=_listener(), pause=0.0),
            Client(name="chat", script=goes_on, pause=READING_SECONDS),
        )
    )


def _images() -> Iterator[Phase]:
    yield Phase(
        clients=tuple(
            Client(name=f"person {number}", script=_shows(number), pause=READING_SECONDS)
            for number in range(3)
        )
    )


def _shows(person: int) -> Script:
    """Show a picture, ask about it, and show the next one."""
    history = [system(prose(1000, 20 + person))]
    for number in range(PICTURES * QUESTIONS_EACH):
        asked = user(10 * person + number, 150)
        if number % QUESTIONS_EACH == 0:
            picture = image(png(PICTURE_PIXELS, PICTURE_PIXELS, seed=10 * person + number))
            asked = {**asked, "content": [picture, {"type": "text", "text": asked["content"]}]}
        history.append(asked)
        history.append(
            (
                yield Turn(
                    label=f"question {number + 1}",
                    messages=tuple(history),
                    max_tokens=ANSWER_TOKENS,
                    fields=PLAIN,
                )
            )
        )


def _in_two(script: Script) -> tuple[Script, Script]:
    """Return a script's first request, and all others."""
    heard: list[Doc] = []

    def begins() -> Script:
        heard.append((yield next(script)))

    def goes_on() -> Script:
        reply = heard.pop()
        while True:
            try:
                turn = script.send(reply)
            except StopIteration:
                return
            reply = yield turn

    return begins(), goes_on()


def _listener() -> Script:
    asked = (system(prose(300, 5)), user(50, 200))
    fields = {**PLAIN, "ignore_eos": True}
    yield Turn(label="long answer", messages=asked, max_tokens=LONG_TOKENS, fields=fields)


WORK: Final[Mapping[str, Work]] = MappingProxyType(
    {
        "titles": Work(
            about="Three agents on two slots; each asks for a title after its first call",
            phases=agents(3, TITLED),
        ),
        "crowd": Work(about="Four agents on two slots", phases=agents(4, JOB)),
        "restart": Work(
            about="Two clients; the engine is killed with SIGKILL while both are away for 20 s",
            phases=_restart,
        ),
        "edits": Work(
            about="Edits, branches, and back",
            phases=_one(lambda: edits(max_tokens=ANSWER_TOKENS, shrink=SHRINK)),
        ),
        "document": Work(
            about="Eleven questions about one document",
            phases=_one(lambda: document(DOCUMENT_CHARACTERS, QUESTIONS, max_tokens=ANSWER_TOKENS, shrink=2)),
        ),
        "images": Work(
            about="Three people on two slots; each shows two pictures and asks about them",
            phases=_images,
            images=True,
        ),
        "beside": Work(about="A running answer beside a client that pauses", phases=_beside),
    }
)

"""Tokens: workloads of public bug reports about prefix caches, rebuilt small: stock, and through the sidecar.

Shown is all that the engine computed, by its own counter: plants, probes and idle work included. No case may
exceed stock by more than 1 %. `limit` is the highest permitted share of stock on the newer build, as the
older one writes no checkpoints to files.

`python -m benchmarks.cases [--build b11549] [--cases recap ...]`
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx
import orjson
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from slotkeeper.api.document import Doc
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import CHAT, Counter
from slotkeeper.observe.log import configure

WORDS: Final = [
    "harbour",
    "copper",
    "lantern",
    "meadow",
    "ledger",
    "orchard",
    "signal",
    "bridge",
    "cargo",
    "winter",
    "kettle",
    "ribbon",
    "valley",
    "engine",
    "timber",
    "marble",
    "anchor",
    "pepper",
    "willow",
    "canvas",
    "harvest",
    "saddle",
    "mirror",
    "pocket",
    "gravel",
    "island",
    "tunnel",
    "velvet",
    "quarry",
    "ladder",
]
ONE: Final = ("-np", "1", "-c", "8192", "-ub", "128", "-b", "256")
TWO: Final = ("-np", "2", "--no-kv-unified", "-c", "16384", "-ub", "128", "-b", "256")
PAUSE: Final = 0.5  # seconds between requests
REST: Final = 1.0  # seconds after the last request in which idle work still counts
AT_MOST: Final = 1.01  # times what stock computes, in any case
PLAIN: Final[Mapping[str, Any]] = {"chat_template_kwargs": {"enable_thinking": False}}
THINKING: Final[Mapping[str, Any]] = {"chat_template_kwargs": {"enable_thinking": True}}
NO_LIMIT: Final = httpx.Timeout(None)


# -- texts -----------------------------------------------------------------------------------------------


class Writer:
    """Writes random words, the same ones in each run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prose(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words)) + "."

    def some(self, texts: Sequence[str], count: int) -> list[str]:
        return self._random.sample(texts, count)

    def system(self, words: int) -> Doc:
        return said("system", self.prose(words))

    def user(self, words: int) -> Doc:
        return said("user", self.prose(words))

    def tools(self, count: int, words: int) -> list[Doc]:
        return [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{number}",
                    "description": self.prose(words),
                    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
            }
            for number in range(count)
        ]

    def chat(self, turns: int, *, head: int, words: int, reply: int) -> list[tuple[Doc, ...]]:
        """Return the messages of each turn of a conversation with a recorded history."""
        history, found = [self.system(head)], []
        for _ in range(turns):
            history.append(self.user(words))
            found.append(tuple(history))
            history.append(said("assistant", self.prose(reply)))
        return found


def said(role: str, content: str) -> Doc:
    return {"role": role, "content": content}


# -- one run ---------------------------------------------------------------------------------------------


class Player:
    """A client of the server at `base`, in front of or identical with the engine at `engine`."""

    def __init__(self, base: str, engine: str, rest: Callable[[], Awaitable[None]]) -> None:
        """`rest` waits after each answer."""
        self.base, self.engine, self.rest = base, engine, rest
        self.failures: list[str] = []
        self._http = httpx.AsyncClient(timeout=NO_LIMIT, headers={"Connection": "close"})
        self._counter = Counter([engine])
        self._begun = 0

    async def __aenter__(self) -> Self:
        await self._counter.__aenter__()
        await self._counter.read()
        return self

    async def __aexit__(self, *failed: object) -> None:
        await self._http.aclose()
        await self._counter.__aexit__(*failed)

    async def ask(self, messages: Sequence[Doc], *, max_tokens: int = 8, **fields: Any) -> str:
        """Send one chat request, wait for its answer, and pause. Returns the answer's text."""
        text = "".join([part async for part in self.parts(messages, max_tokens=max_tokens, **fields)])
        await self.rest()
        return text

    async def parts(
        self, messages: Sequence[Doc], *, max_tokens: int = 8, **fields: Any
    ) -> AsyncGenerator[str]:
        """Send one chat request, and yield its text as it comes."""
        body = {"messages": [*messages], "stream": True, "max_tokens": max_tokens, "temperature": 0}
        async with self._http.stream("POST", self.base + CHAT, json={**body, **PLAIN, **fields}) as answer:
            if answer.status_code != httpx.codes.OK:
                self.failures.append((await answer.aread()).decode(errors="replace"))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in orjson.loads(line[6:]).get("choices") or ():
                        yield choice["delta"].get("content") or ""

    async def begin(self) -> None:
        """Count from here on only."""
        self._begun = await self._counter.read() or 0

    async def spent(self) -> int:
        """Return the tokens that the engine has computed since `begin`."""
        return (await self._counter.read() or 0) - self._begun

    async def at_engine(self, method: str, path: str) -> Any:
        """Call the engine itself, as another program does."""
        return (await self._http.request(method, self.engine + path)).json()


Play = Callable[[Player], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload."""

    name: str
    about: str
    flags: tuple[str, ...]
    limit: float  # the highest permitted share of stock
    play: Play
    pause: float = PAUSE
    settings: Mapping[str, Any] = field(default_factory=dict)


# -- the cases -------------------------------------------------------------------------------------------


async def recap_between(player: Player) -> None:
    """Every few turns a recap is asked for: other tools and head, the same history."""
    write = Writer(1)
    tools, turns = write.tools(6, 38), write.chat(8, head=100, words=56, reply=5)
    for number, messages in enumerate(turns, 1):
        await player.ask(messages, tools=tools)
        if number in {5, 7}:
            _, *history = messages
            recap = [said("system", "Write a recap of this conversation."), *history]
            await player.ask([*recap, said("assistant", "Yes."), said("user", "Recap now.")])


async def memory_block(player: Player) -> None:
    """The system prompt ends in a block of memories, of which others are recalled each turn."""
    write = Writer(3)
    facts = [f"- fact {number}: {write.prose(20)}" for number in range(14)]
    for head, *rest in write.chat(9, head=190, words=38, reply=8):
        block = "\n".join(("<memory_context>", *write.some(facts, 6), "</memory_context>"))
        await player.ask([said("system", f"{head['content']}\n{block}"), *rest])


async def tool_flaps(player: Player) -> None:
    """One of twelve tools comes and goes."""
    write = Writer(5)
    tools = write.tools(12, 38)
    for number, messages in enumerate(write.chat(10, head=67, words=28, reply=5)):
        await player.ask(messages, tools=tools[:-1] if number in {3, 4, 7} else tools)


async def abort_and_retry(player: Player) -> None:
    """The client gives up during prefill and tries again, five times."""
    write = Writer(6)
    messages = [write.system(400), write.user(1800)]
    for _ in range(5):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await player.ask(messages)
        await player.rest()
    await player.ask(messages)


async def three_chats(player: Player) -> None:
    """Three long chats in turn: the RAM cache is too small for them."""
    chats = [Writer(70 + seed).chat(4, head=280, words=56, reply=4) for seed in range(3)]
    for turns in zip(*chats, strict=True):
        for messages in turns:
            await player.ask(messages)


async def queued_leaves(player: Player) -> None:
    """One slot: while an answer runs, a queued request leaves, and another waits behind it."""
    write = Writer(8)
    head = write.system(60)
    first, long, third = write.user(40), write.user(500), write.user(40)
    await player.ask([head, first], max_tokens=60)
    await player.begin()
    async with asyncio.TaskGroup() as group:
        group.create_task(player.ask([head, first], max_tokens=200))
        await asyncio.sleep(0.1)
        leaving = group.create_task(player.ask([head, long]))
        await asyncio.sleep(0.05)
        last = group.create_task(player.ask([head, third]))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await last


async def asleep(player: Player) -> None:
    """The engine unloads its model after some idle seconds; then the conversation continues."""
    write = Writer(10)
    history = [write.system(500), write.user(80)]
    for _ in range(2):
        history += [said("assistant", await player.ask(history)), write.user(60)]
    await player.begin()  # a later look at the engine's counter would wake it
    async with asyncio.timeout(60):
        while not (await player.at_engine("GET", "/props")).get("is_sleeping"):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.5)
    await player.ask(history)


async def effort_picker(player: Player) -> None:
    """A line at the head of the system prompt changes back and forth."""
    efforts = ("low", "low", "high", "high", "low", "low", "high", "low")
    for effort, (head, *rest) in zip(efforts, Writer(11).chat(8, head=170, words=34, reply=6), strict=True):
        await player.ask([said("system", f"Reasoning effort: {effort}.\n{head['content']}"), *rest])


async def two_edits(player: Player) -> None:
    """A conversation with thinking, in which the user twice asks the last question again, shorter."""
    for number, messages in enumerate(Writer(12).chat(7, head=204, words=34, reply=9)):
        await player.ask(messages, **THINKING)
        if number in {2, 4}:
            await player.ask([*messages[:-1], said("user", "Again, shorter.")], **THINKING)


async def interrupted(player: Player) -> None:
    """The user stops each answer midway and sends another message; twice the part of the answer is kept."""
    write = Writer(13)
    history = [write.system(250), write.user(200)]
    for number in range(5):
        text, parts = "", player.parts(history, max_tokens=200)
        async for part in parts:
            text += part
            if len(text.split()) >= 12:
                break
        await parts.aclose()
        if number % 2 == 0 and text:
            history.append(said("assistant", text))
        history.append(said("user", f"No, do it so: {write.prose(60)}"))
        await player.rest()
    await player.ask(history)


async def foreign_erase(player: Player) -> None:
    """Another program erases all idle slots; then the conversation continues."""
    write = Writer(15)
    history = [write.system(400), write.user(80)]
    for _ in range(2):
        history += [said("assistant", await player.ask(history)), write.user(60)]
    await asyncio.sleep(3)
    for slot in await player.at_engine("GET", "/slots"):
        await player.at_engine("POST", f"/slots/{slot['id']}?action=erase")
    await player.begin()
    await player.ask(history)


async def rag_wrapper(player: Player) -> None:
    """Text that was found for it wraps only the newest question."""
    write = Writer(17)
    for *earlier, question in write.chat(8, head=100, words=6, reply=13):
        found = f"### Context\n{write.prose(100)}\n### Question\n{question['content']}"
        await player.ask([*earlier, said("user", found)])


async def common_head(player: Player) -> None:
    """Two chats with a common system prompt share one slot."""
    head = Writer(18).system(340)
    writers = [Writer(181), Writer(182)]
    histories = [[head, write.user(105)] for write in writers]
    for _ in range(4):
        for write, history in zip(writers, histories, strict=True):
            await player.ask(history)
            history += [said("assistant", write.prose(4)), write.user(17)]


async def batch_sweep(player: Player) -> None:
    """Short unrelated jobs between the turns of a long chat, whose state is larger than the RAM cache."""
    write = Writer(19)
    turns, label = write.chat(6, head=282, words=45, reply=6), said("system", "Label the text in one word.")
    for number, messages in enumerate(turns):
        if number in {2, 4}:
            for _ in range(8):
                await player.ask([label, write.user(79)])
        await player.ask(messages)


CASES: Final = (
    Case(name="recap", about="a recap with another head between the turns", flags=(*ONE, "--cache-ram", "0"),
         limit=0.45, play=recap_between),
    Case(name="memories", about="other memories in the system prompt each turn", flags=TWO, limit=1.0,
         play=memory_block),
    Case(name="memories fixed", about="the same, with the rules in mode `fix`", flags=TWO, limit=0.75,
         play=memory_block, settings={"rules": ("all=fix",)}),
    Case(name="tools", about="one of twelve tools comes and goes", flags=TWO, limit=1.0, play=tool_flaps),
    Case(name="retry", about="the client gives up in prefill and retries", flags=ONE, limit=1.0,
         play=abort_and_retry),
    Case(name="three chats", about="three long chats, RAM cache too small", flags=(*ONE, "--cache-ram", "1"),
         limit=0.32, play=three_chats),
    Case(name="queue", about="a queued request leaves", flags=ONE, limit=1.0, play=queued_leaves),
    Case(name="asleep", about="the engine sleeps, then the next turn",
         flags=(*ONE, "--sleep-idle-seconds", "4"), limit=0.1, play=asleep),
    Case(name="effort", about="a line at the head goes back and forth", flags=TWO, limit=1.01,
         play=effort_picker),
    Case(name="no checkpoints", about="two edits; no checkpoints, flags unknown",
         flags=(*ONE, "--cache-ram", "0", "--ctx-checkpoints", "0"), limit=0.35, play=two_edits,
         settings={"read_flags": False}),
    Case(name="interrupted", about="an answer stopped midway, another message", flags=ONE, limit=1.02,
         play=interrupted),
    Case(name="erased", about="another program erases idle slots", flags=ONE, limit=0.2, play=foreign_erase),
    Case(name="wrapper", about="found text wraps only the newest question", flags=TWO, limit=1.01,
         play=rag_wrapper),
    Case(name="common head", about="two chats with a common head, one slot", flags=ONE, limit=0.49,
         play=common_head),
    Case(name="sweep", about="a batch between turns, state larger than the RAM cache",
         flags=(*ONE, "--cache-ram", "1"), limit=0.70, play=batch_sweep, pause=1.0),
)  # fmt: skip


# -- measuring -------------------------------------------------------------------------------------------


@asynccontextmanager
async def _server(case: Case, engine: lab.Restartable, *, ours: bool, rested: bool) -> AsyncIterator[Player]:
    """Yield a client of the engine, or of a sidecar with default settings in front of it."""

    async def pause() -> None:
        await asyncio.sleep(case.pause)

    if not ours:
        async with Player(engine.base, engine.base, pause) as player:
            yield player
        return
    own = {"slot_dir": engine.flags.slot_save_path, "read_flags": True, **case.settings}
    async with Player("", engine.base, pause) as player, lab.in_front_of(engine.base, **own) as sidecar:

        async def rest() -> None:
            await lab.rested(sidecar)

        player.base, player.rest = lab.url_of(sidecar), rest if rested else pause
        yield player


async def measure(
    case: Case, build: str, model: Tiny = Tiny.HYBRID, *, ours: bool, rested: bool = False
) -> tuple[int, list[str]]:
    """Run one case on a fresh engine. Returns the tokens that the engine computed, and failed requests.

    `rested`: the sidecar's clients do not wait for a time, but until all idle work is done.
    """
    with tempfile.TemporaryDirectory(prefix="slotkeeper-") as name:
        async with (
            lab.tiny_engine(model, build, Path(name), *case.flags) as engine,
            _server(case, engine, ours=ours, rested=rested) as player,
        ):
            await case.play(player)
            await asyncio.sleep(REST)
            return await player.spent(), player.failures


async def run(cases: Sequence[Case], build: str) -> list[Doc]:
    rows: list[Doc] = []
    for case in cases:
        stock, failed = await measure(case, build, ours=False)
        ours, too = await measure(case, build, ours=True)
        rows.append(
            {
                "build": build,
                "case": case.name,
                "about": case.about,
                "stock": stock,
                "ours": ours,
                "limit": case.limit,
            }
            | {"failures": [*failed, *too], "kept": keeps(case, build, stock, ours)}
        )
        console.print(f"[dim]{rows[-1]}[/dim]", highlight=False)
    return rows


def keeps(case: Case, build: str, stock: int, ours: int) -> bool:
    """Whether the case stays within 1 % of stock, and within its limit if slot files carry checkpoints."""
    return ours <= stock * (min(AT_MOST, case.limit) if build == BUILDS[-1] else AT_MOST)


def table(rows: Sequence[Doc]) -> Table:
    shown = Table(
        "case", "stock", "slotkeeper", "ratio", "limit", "", title="prompt tokens by the engine's counter"
    )
    for row in rows:
        ratio = row["ours"] / row["stock"]
        verdict = "failed" if row["failures"] else "" if row["kept"] else "[red]above[/red]"
        shown.add_row(
            row["case"], str(row["stock"]), str(row["ours"]), f"{ratio:.2f}", f"{row['limit']:.2f}", verdict
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=__doc__)
    parser.add_argument("--build", choices=BUILDS, default=BUILDS[-1])
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    wanted = [case for case in CASES if not chosen.cases or case.name in chosen.cases]
    rows = asyncio.run(run(wanted, chosen.build))
    console.print(table(rows))
    keep("cases", rows)
    return int(not all(row["kept"] and not row["failures"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

"""Two engines behind one sidecar: a fast and a slow one, and engines that die.

`python -m benchmarks.engines [speeds] [deaths] [--agents 8] [--turns 5] [--slower 3] [--conversations 40]
[--reads]`.

`speeds`: agents talk at the same time, each waiting for its answer; the time to the first token with one
sidecar over both engines, beside each static split that gives the fast engine at least half of the agents,
with a sidecar of its own for each engine.
A few turns of other agents before that show each engine's speed to the sidecar, as in any service; they are
the same for every way, and do not count. The engines are two processes with one thread each. The slow one is
stopped for a part of every 40 ms (SIGSTOP, SIGCONT), so that both its prefill and its answers are slower by
the same factor on any machine.

`deaths`: conversations, four at a time. One engine is killed (kill -9) after a quarter of the requests and is
back after half of them; after three quarters the other one is killed for good. Requests that failed are
counted, and the tokens that clients waited for, beside an oracle: a perfect cache that is shared by both and
outlives them. Clients that never pause leave no rest for saves, so states in the engine's RAM cache are in no
file (a save would make them wait); the tokens that an engine takes with it so are counted too. With `--reads`
clients pause until their states are saved, as people who read do, and nothing is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import orjson
from rich.table import Table

from benchmarks.figures import console, keep
from slotkeeper.api.answers.answer import AnswerReader
from slotkeeper.api.document import Doc
from slotkeeper.api.head import Api
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.measure import Oracle
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import PLAIN
from slotkeeper.bench.texts import prose, system
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.engine.client import EngineClient
from slotkeeper.observe.log import configure
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import EngineId

BUILD: Final = EngineKind.XLLAMACPP.value
PERIOD: Final = 0.04  # seconds of one stop and run of the slow engine
AT_ONCE: Final = 4
SYSTEM: Final = 6000  # characters, the same for all conversations
ASKED: Final = (6000, 1500, 600, 3000)  # characters of questions, in turn
REPLY: Final = 24  # tokens
THINK: Final = 0.2  # seconds between an answer and the next question
PATIENT: Final = httpx.Timeout(None, connect=5.0)
P95: Final = 94  # index among the 99 cut points of `quantiles`
SLOTS: Final = 4  # of both engines
SHOWING: Final = 100  # number of the first warm-up agent, which only shows the engines' speeds
SHOWN: Final = 4  # turns of a warm-up agent


@dataclass
class Talk:
    """One conversation."""

    number: int
    messages: list[Doc] = field(default_factory=lambda: [system(prose(SYSTEM, 1))])

    def asks(self) -> Doc:
        """Return its next request."""
        turn = len(self.messages) // 2
        text = prose(ASKED[turn % len(ASKED)], 100 + 10 * self.number + turn)
        question = {"role": "user", "content": f"{self.number}.{turn}: {text}"}
        return {"messages": [*self.messages, question], "max_tokens": REPLY, "stream": True, **PLAIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer."""

    body: Doc
    first_token: float | None  # seconds
    computed: int
    failure: str | None
    # whether a failure came after the answer's first bytes: then no other engine can take the request
    begun: bool = True


async def ask(client: httpx.AsyncClient, talk: Talk) -> Answered:
    body, began, first = talk.asks(), time.perf_counter(), None
    reader, failure = AnswerReader(Api.CHAT, stream=True, status=200), None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for chunk in response.aiter_bytes():
                reader.feed(chunk)
                if first is None and reader.first_token():
                    first = time.perf_counter() - began
            if response.status_code >= 400:
                failure = str(response.status_code)
    except httpx.HTTPError as error:
        failure = repr(error)
    answer = reader.close()
    failure = failure or answer.error or (None if answer.complete else "it broke off")
    if failure is None and answer.reply:
        talk.messages = [*body["messages"], answer.reply]
    figures = answer.figures
    computed = (figures.prompt_tokens or 0) - (figures.cached or 0)
    begun = reader.events > 1  # the error is an event itself
    return Answered(body=body, first_token=first, computed=computed, failure=failure, begun=begun)


# -- engines ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def pair(home: Path) -> AsyncIterator[dict[str, Restartable]]:
    """Run two engines with one folder for slots."""
    slots = home / "slots"
    slots.mkdir(mode=0o700)
    async with AsyncExitStack() as stack:
        engines = {}
        for name in ("fast", "slow"):
            (folder := home / name).mkdir()
            words = ("--slot-save-path", str(slots))
            one = await stack.enter_async_context(lab.tiny_engine(Tiny.HYBRID, BUILD, folder, *words))
            engines[name] = one
        yield engines


@asynccontextmanager
async def slowed(engine: Restartable, times: float) -> AsyncIterator[None]:
    """Slow an engine down by this factor."""
    pid = engine.process.pid or 0

    async def stops() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(PERIOD * (1 - 1 / times))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(PERIOD / times)

    work = asyncio.ensure_future(stops())  # noqa: TID251 - it ends with this block
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def in_front_of(home: Path, engines: Mapping[str, Restartable]) -> AsyncIterator[Sidecar]:
    named = tuple(f"{name}={engine.base}" for name, engine in engines.items())
    more: dict[str, Any] = {"slot_dir": home / "slots", "save_pause": lab.PAUSE_SECONDS, "read_flags": True}
    async with lab.in_front_of(named[0], upstream=named, **more) as sidecar:
        yield sidecar


# -- a fast and a slow engine ----------------------------------------------------------------------------


async def session(chosen: argparse.Namespace, fast_agents: int | None) -> list[Answered]:
    """Run all agents at once.

    `fast_agents`: number of agents at the fast engine, None for one sidecar over both.
    """
    with TemporaryDirectory() as folder:
        home = Path(folder)
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(pair(home))
            await stack.enter_async_context(slowed(engines["slow"], chosen.slower))
            fronts = [engines] if fast_agents is None else [{name: engines[name]} for name in engines]
            clients = []
            for front in fronts:
                sidecar = await stack.enter_async_context(in_front_of(home, front))
                client = httpx.AsyncClient(base_url=lab.url_of(sidecar), timeout=PATIENT)
                clients.append(await stack.enter_async_context(client))

            async def agent(number: int, client: httpx.AsyncClient, turns: int) -> list[Answered]:
                talk, told = Talk(number), []
                for _ in range(turns):
                    told.append(await ask(client, talk))
                    await asyncio.sleep(THINK)
                return told

            shown = (agent(SHOWING + n, clients[n % len(clients)], SHOWN) for n in range(SLOTS))
            await asyncio.gather(*shown)
            split = [
                clients[0 if fast_agents is None or n < fast_agents else 1] for n in range(chosen.agents)
            ]
            work = (agent(number, client, chosen.turns) for number, client in enumerate(split))
            return [told for one in await asyncio.gather(*work) for told in one]


async def speeds(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for fast in (None, *range(chosen.agents, chosen.agents // 2 - 1, -1)):
        found = await session(chosen, fast)
        waits = [one.first_token for one in found if one.first_token is not None]
        rows.append(
            {
                "way": "one sidecar" if fast is None else f"{fast} fast, {chosen.agents - fast} slow",
                "p50": quantiles(waits, n=2)[0],
                "p95": quantiles(waits, n=100)[P95],
                "computed": sum(one.computed for one in found),
                "failed": sum(one.failure is not None for one in found),
            }
        )
        console.print(rows[-1])
    return rows


# -- engines that die ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    requests: int
    failures: tuple[str, ...]  # requests that failed before the first byte of their answer
    broken: int  # answers that broke off because an engine was killed
    waited: int  # tokens computed while clients waited
    oracle: int
    unsaved: int  # tokens of states that were lost with an engine and were in no file

    @property
    def ratio(self) -> float:
        return self.waited / self.oracle


async def deaths(conversations: int, turns: int, *, at_once: int = AT_ONCE, reads: bool = False) -> Outcome:
    """Kill both engines in turn. `reads`: clients pause until their states are saved."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        async with pair(home) as engines, in_front_of(home, engines) as sidecar:
            whole, unsaved = conversations * turns, 0

            def dies(name: str) -> None:
                nonlocal unsaved
                unsaved += _unsaved(sidecar, name)
                engines[name].kill()

            events: dict[int, Callable[[], Any]] = {
                whole // 4: lambda: dies("fast"),
                whole // 2: engines["fast"].start,
                3 * whole // 4: lambda: dies("slow"),
            }
            rest = (lambda: lab.rested(sidecar)) if reads else None
            base = lab.url_of(sidecar)
            async with httpx.AsyncClient(base_url=base, timeout=PATIENT) as client:
                told = await _worked(client, conversations, turns, at_once, events, rest=rest)
            waited = sum(one.computed for one in told) + lab.spent(sidecar).plant
            return Outcome(
                requests=len(told),
                failures=tuple(one.failure for one in told if one.failure and not one.begun),
                broken=sum(one.failure is not None and one.begun for one in told),
                waited=waited,
                oracle=await oracle_of(engines["fast"].base, [one.body for one in told if not one.failure]),
                unsaved=unsaved,
            )


def _unsaved(sidecar: Sidecar, engine: str) -> int:
    """Return the tokens in the slots and the RAM cache of an engine that are in no file, each once."""
    placement, known, unsaved = sidecar.driver.placement, Oracle(), 0
    shadow = placement.tables[EngineId(engine)].shadow
    states = [held for held in (*shadow.slots, *shadow.ram) if held and held.tokens]
    for held in states:
        known.saw(held.tokens.cut(0, placement.catalog.covers(held, shadow.traits)))
    for held in states:
        unsaved += known.least(held.tokens)
        known.saw(held.tokens)
    return unsaved


async def _worked(
    client: httpx.AsyncClient,
    conversations: int,
    turns: int,
    at_once: int,
    events: Mapping[int, Callable[[], Any]],
    *,
    rest: Callable[[], Awaitable[None]] | None,
) -> list[Answered]:
    """Send rounds of requests, `at_once` of them at a time, and run events while requests run.

    `rest`: what all clients wait for after each `at_once` requests; None: nobody pauses.
    """
    talks, told = [Talk(number) for number in range(conversations)], list[Answered]()
    begun = 0

    async def worker(work: Iterator[Talk]) -> None:
        nonlocal begun
        for talk in work:
            begun += 1
            if event := events.get(begun):
                happens = event()
                if asyncio.iscoroutine(happens):
                    await happens
            told.append(await ask(client, talk))

    for _ in range(turns):
        step = at_once if rest else conversations
        for start in range(0, conversations, step):
            work = iter(talks[start : start + step])
            await asyncio.gather(*(worker(work) for _ in range(at_once)))
            if rest:
                await rest()
    return told


async def oracle_of(base: str, bodies: Sequence[Doc]) -> int:
    """Return the tokens that a perfect cache would compute for these requests."""
    oracle, least = Oracle(), 0
    async with EngineClient(base) as engine:
        for body in bodies:
            chat = {name: body[name] for name in ("messages", *PLAIN)}
            content = await engine.apply_template(orjson.loads(orjson.dumps(chat)))
            prompt = Tokens(await engine.tokenize(content, add_special=True, parse_special=True))
            least += oracle.least(prompt)
            oracle.saw(prompt)
    return least


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=("speeds", "deaths", []), help="parts to run (default: both)"
    )
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--slower", type=float, default=3.0, help="how many times slower the slow engine is")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--reads", action="store_true", help="clients pause until their states are saved")
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    figures: dict[str, Any] = {}
    failed = 0
    if "deaths" in (chosen.parts or ["deaths"]):
        found = asyncio.run(deaths(chosen.conversations, 4, reads=chosen.reads))
        figures["deaths"] = {
            "requests": found.requests,
            "failures": found.failures,
            "broken": found.broken,
            "waited": found.ratio,
            "oracle": found.oracle,
            "unsaved": found.unsaved,
        }
        console.print(figures["deaths"])
        failed += len(found.failures)
    if "speeds" in (chosen.parts or ["speeds"]):
        rows = figures["speeds"] = asyncio.run(speeds(chosen))
        best = min(row["p95"] for row in rows[1:])
        title = f"{chosen.agents} agents, {chosen.turns} turns, one engine {chosen.slower:g} times slower"
        shown = Table(title=title)
        for name in ("way", "TTFT p50, s", "p95, s", "of the best split", "computed", "failed"):
            shown.add_column(name, justify="right")
        for row in rows:
            times = (f"{row['p50']:.2f}", f"{row['p95']:.2f}", f"{row['p95'] / best:.2f}")
            shown.add_row(row["way"], *times, f"{row['computed']:,}", str(row["failed"]))
        console.print(shown)
        failed += sum(row["failed"] for row in rows)
    keep("engines", figures)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

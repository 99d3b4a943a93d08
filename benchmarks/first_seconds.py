"""The first seconds of an engine: a request that is sent when the sidecar's port opens, and its next turn.

Each start has a fresh engine (alone, a router's model, or a model of the stand-in for llama-swap) and a fresh
sidecar, beside busy loops. The same two turns go to a stock engine. `--all` makes every start on both builds;
without it, builds alternate. With `--stopped` the engine is stopped four fifths of the time until the first
answer has come, so that its probe takes seconds even on a machine that is not busy.

`python -m benchmarks.first_seconds [--ways alone router ...] [--models tiny-hybrid ...] [--busy 2] [--all]
[--stopped]`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx
from rich.progress import track
from rich.table import Table

from benchmarks.busy import busy_loops
from benchmarks.figures import BUILDS, console, keep
from benchmarks.routers import LOOK_SECONDS, MODELS, NoAnswerError, router_flags
from slotkeeper.api.head import DECISION
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import Fat, Tiny, build
from slotkeeper.engine.child.launch import EngineKind, find_engine
from slotkeeper.observe.log import configure
from slotkeeper.scheduler.types import WITHOUT_PLACE, Reason

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
PROMPTS: Final = "slotkeeper_prompt_tokens_total"
STOPPED_SECONDS, RUNS_SECONDS = 0.12, 0.02  # of each period of a slow engine
SECONDS: Final = 300.0  # until a request counts as failed
WORDS: Final = 150  # in the first question
FAT_WORDS: Final = 70  # the same for fat models, which take seconds: above a brief request's length
MORE_WORDS: Final = 30  # in the second
FEW: Final = (
    48  # tokens of the second turn that may be computed again beside its new message, or beyond stock
)
CONTEXT: Final = 16384
Row = dict[str, Any]


class Way(StrEnum):
    """What the sidecar's upstream is."""

    ALONE = "alone"  # an engine whose flags cannot be read
    READ = "read"  # an engine whose flags can be read
    BARE = "bare"  # an engine whose flags cannot be read, and a sidecar without a slot folder
    ROUTER = "router"  # llama-server's router
    SWAP = "llama-swap"  # its stand-in


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start. `model` names a file; behind a router it is the name of the model."""

    way: Way
    model: str
    path: str
    kind: EngineKind = EngineKind.XLLAMACPP


@dataclass(slots=True)
class Talk:
    """A conversation of two turns in the shape of one API."""

    start: Start
    messages: list[dict[str, str]] = field(default_factory=list)

    def asks(self) -> dict[str, Any]:
        turn = len(self.messages)
        first = FAT_WORDS if self.start.model in list(Fat) else WORDS
        words = " ".join(f"{turn}w{n}" for n in range(MORE_WORDS if turn else first))
        self.messages.append({"role": "user", "content": words})
        plain = {"temperature": 0, "max_tokens": 4, "chat_template_kwargs": {"plain": True}}
        return {"model": self.start.model, "messages": self.messages, **plain}

    def hears(self, doc: dict[str, Any]) -> None:
        if self.start.path == MESSAGES:
            text = "".join(block.get("text", "") for block in doc["content"])
        else:
            text = doc["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": text or "yes"})


async def turn(client: httpx.AsyncClient, talk: Talk) -> httpx.Response:
    """Send the next turn. Raises NoAnswerError for an error."""
    answer = await client.post(talk.start.path, json=talk.asks())
    if answer.status_code != 200:
        raise NoAnswerError(answer.text)
    talk.hears(answer.json())
    return answer


# -- slow engines ----------------------------------------------------------------------------------------


def engines_of(folder: Path) -> list[int]:
    """Return the processes whose command line names this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


@asynccontextmanager
async def slow(folder: Path) -> AsyncIterator[None]:
    """Stop all engines of a folder again and again inside the block."""

    async def cycle() -> None:
        while True:
            pids = engines_of(folder)
            try:
                send(pids, signal.SIGSTOP)
                await asyncio.sleep(STOPPED_SECONDS)
            finally:
                send(pids, signal.SIGCONT)
            await asyncio.sleep(RUNS_SECONDS)

    task = asyncio.get_running_loop().create_task(cycle())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# -- starts ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def upstream(start: Start, folder: Path) -> AsyncIterator[str]:
    """Run what the sidecar's upstream is; yield its URL."""
    from swap_like import SwapGroup, SwapLike, served_by, serving  # noqa: PLC0415 - of the tests

    binary = find_engine(start.kind)
    slots = folder / "slots"
    slots.mkdir()
    async with AsyncExitStack() as stack:
        if start.way is Way.ROUTER:
            flags = router_flags(folder)
            engine = await stack.enter_async_context(lab.restartable(binary, flags, folder / "log"))
            yield engine.base
            return
        if start.way is not Way.SWAP:
            model = Tiny(start.model) if start.model in list(Tiny) else Fat(start.model)
            flags = lab.stock_flags(binary, build(model), slots, context_tokens=CONTEXT)
            if model in lab.WITH_DRAFTS:
                flags += lab.DRAFTS
            engine = await stack.enter_async_context(lab.restartable(binary, flags, folder / "log"))
            yield engine.base
            return
        models = {}
        for name, tiny in MODELS.items():
            flags = lab.stock_flags(binary, build(tiny), slots, context_tokens=CONTEXT)
            base = f"http://127.0.0.1:{flags[flags.index('--port') + 1]}"
            models[name] = served_by(binary, flags, base, folder / f"{name}.log")
        stand_in = SwapLike(models, groups=(SwapGroup(members=tuple(models)),))
        yield await stack.enter_async_context(serving(stand_in))


async def ours(start: Start, *, slowly: bool) -> Row:
    """Send the two turns to a fresh sidecar, the first when its port opens."""
    with tempfile.TemporaryDirectory(prefix="slotkeeper-first-") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            base = await stack.enter_async_context(upstream(start, folder))
            throttle = await stack.enter_async_context(AsyncExitStack())
            if slowly:
                await throttle.enter_async_context(slow(folder))
            settings = lab.settings_of(
                upstream=(base,),
                listen=lab.ANY_PORT,
                admin_listen=lab.ANY_PORT,
                drain_delay=0,
                drain_timeout=5,
                read_flags=start.way is Way.READ,
                slot_dir=None if start.way is Way.BARE else folder / "slots",
                save_pause=lab.PAUSE_SECONDS,
                idle_tokens=0,
            )
            sidecar = await stack.enter_async_context(running(settings))
            began = time.monotonic()
            client = httpx.AsyncClient(base_url=lab.url_of(sidecar), timeout=SECONDS)
            await stack.enter_async_context(client)
            talk = Talk(start)
            first = await turn(client, talk)
            took = time.monotonic() - began
            await throttle.aclose()
            await lab.ready(sidecar)

            before = await counted(sidecar, more_than=0)
            second = await turn(client, talk)
            after = await counted(sidecar, more_than=sum(before))
            probe = sidecar.metrics.registry.get_sample_value(lab.PREFILLED, {"purpose": "probe"})
            return {
                "decision": first.headers[DECISION],
                "seconds": round(took, 2),
                "probe": int(probe or 0),
                "next_decision": second.headers[DECISION],
                "new": sum(after) - 2 * sum(before),
                "computed": after[1] - before[1],
            }


async def counted(sidecar: Sidecar, *, more_than: int) -> tuple[int, int]:
    """Wait until more tokens were reported and the sidecar is at rest, and return the counts."""
    async with asyncio.timeout(SECONDS):
        while sum(counts(sidecar)) <= more_than:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(LOOK_SECONDS)
        await lab.rested(sidecar)
    return counts(sidecar)


def counts(sidecar: Sidecar) -> tuple[int, int]:
    """Return the tokens of all prompts so far that were reused, and those that were computed."""
    value = sidecar.metrics.registry.get_sample_value
    cached, computed = (value(PROMPTS, {"source": source}) or 0 for source in ("cached", "computed"))
    return int(cached), int(computed)


async def stock(start: Start) -> int | None:
    """Return what the second turn costs an engine of its own."""
    if start.way in {Way.ROUTER, Way.SWAP}:
        start = Start(way=Way.ALONE, model=MODELS[start.model], path=start.path, kind=start.kind)
    with tempfile.TemporaryDirectory(prefix="slotkeeper-first-") as name:
        async with (
            upstream(start, Path(name)) as base,
            httpx.AsyncClient(base_url=base, timeout=SECONDS) as client,
        ):
            talk = Talk(start)
            await turn(client, talk)
            before = await lab.evaluated(base)
            await turn(client, talk)
            return await lab.evaluated(base) - before


def starts(ways: Sequence[Way], models: Sequence[str], *, every: bool) -> Iterator[Start]:
    """Yield the starts: each kind of memory by both APIs, and each model of the router and the stand-in.

    With `every`, each on both builds; else the builds alternate.
    """
    for way, (api, path) in product(ways, enumerate((CHAT, MESSAGES))):
        for number, model in enumerate(MODELS if way in {Way.ROUTER, Way.SWAP} else models):
            kinds = BUILDS if every else (BUILDS[(api + number) % 2],)
            if way is Way.ROUTER:  # only this build's program is a router
                kinds = (EngineKind.SKULK,)
            yield from (Start(way=way, model=model, path=path, kind=EngineKind(kind)) for kind in kinds)


def is_good(row: Row) -> bool:
    """Whether the first request was placed, and the second turn reused it, as well as behind stock."""
    placed = Reason(row["decision"]) not in WITHOUT_PLACE
    return placed and row["computed"] <= min(row["new"], row["stock"]) + FEW


async def run(cases: Sequence[Start], *, slowly: bool) -> list[Row]:
    rows = []
    for start in track(cases, "starts", console=console, transient=True):
        row: Row = {
            "way": start.way.value,
            "build": start.kind.value,
            "model": start.model,
            "path": start.path,
        }
        rows.append(row | await ours(start, slowly=slowly) | {"stock": await stock(start)})
    return rows


def table(rows: Sequence[Row]) -> Table:
    told = ("way", "build", "model", "path", "decision", "seconds", "probe", "next_decision")
    columns = (*told, "new", "computed", "stock")
    shown = Table(*columns, title="A request sent when the port opens, and prompt tokens of its next turn")
    for row in rows:
        shown.add_row(*(str(row[column]) for column in columns))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a first request was not placed, or if its next turn did not reuse it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_seconds", description=__doc__)
    parser.add_argument("--ways", nargs="+", type=Way, default=list(Way))
    parser.add_argument("--models", nargs="+", default=[tiny.value for tiny in Tiny])
    parser.add_argument("--busy", type=int, default=2, help="busy loops")
    parser.add_argument("--all", action="store_true", help="every start on both builds")
    parser.add_argument("--stopped", action="store_true", help="stop engines again and again")
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    sys.path.append("tests")
    cases = list(starts(chosen.ways, chosen.models, every=chosen.all))
    with busy_loops(chosen.busy):
        rows = asyncio.run(run(cases, slowly=chosen.stopped))
    console.print(table(rows))
    keep("first_seconds", rows)
    return int(not all(map(is_good, rows)))


if __name__ == "__main__":
    raise SystemExit(main())

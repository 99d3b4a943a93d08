"""After a restart of the engine: how long a conversation of 30,000 tokens waits, and what is computed.

`python -m benchmarks.restart [--tokens 30000] [--repeats 7] [--models tiny-hybrid ...]`. The time to the
first token of the next question, in three ways, each on an engine that has just started: through the sidecar;
raw (the same file restored by the benchmark, then the same request); and stock, where nothing is restored.
Then, without `--no-totals`, the tokens that two conversations compute after a restart, on every model.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any, Final

import orjson
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import BUILDS, console, keep
from benchmarks.raw import post
from benchmarks.restarted_chat import Change, RestartedChat
from benchmarks.scenarios import tokens
from benchmarks.sessions import user
from slotkeeper.api.document import Doc
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.measure import totals
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.target import CHAT, PLAIN, Target, play
from slotkeeper.bench.texts import prose, system
from slotkeeper.observe.log import configure

TIMED: Final = (Tiny.DENSE, Tiny.HYBRID)
TARGET: Final = 1.2  # times the raw restore and prefill
STOCK: Final = 2  # repeats of a way that takes long and varies little
CHARACTERS: Final = 7000  # of each question, about 2,000 tokens
FILE: Final = "conversation"

Row = dict[str, Any]


class Long:
    """A conversation of many tokens, with an engine behind the sidecar and one that is used directly."""

    def __init__(self, ours: Restartable, sidecar: Sidecar, raw: Restartable) -> None:
        self.tokens = 0
        self._ours = ours
        self._sidecar = sidecar
        self._raw = raw
        self._history = [system(prose(4000, 3))]
        self._asked = 0

    async def fill(self, tokens: int) -> None:
        """Ask questions until the conversation is long enough; then give its file to the other engine."""
        while self.tokens < tokens:
            self._history.append(user(len(self._history), CHARACTERS))
            _, answer = await _ask(lab.url_of(self._sidecar), {"messages": self._history, "max_tokens": 8})
            self._history.append(answer["choices"][0]["message"])
            self.tokens = answer["usage"]["prompt_tokens"]
        await lab.rested(self._sidecar)
        newest = max(self._sidecar.driver.placement.catalog, key=lambda snapshot: len(snapshot.tokens))
        ours, raw = self._ours.flags.slot_save_path, self._raw.flags.slot_save_path
        if ours is None or raw is None:
            raise ValueError("both engines need --slot-save-path")
        await asyncio.to_thread(shutil.copy, ours / f"{newest.id}.slot", raw / FILE)

    async def through_the_sidecar(self) -> tuple[float, int]:
        """Return seconds and cached tokens."""
        await lab.rested(self._sidecar)
        await lab.restarted(self._ours, self._sidecar)
        return await self._time(lab.url_of(self._sidecar))

    async def by_hand(self) -> tuple[float, int]:
        await self._raw.restart()
        took = await post(self._raw.base, "/slots/0?action=restore", orjson.dumps({"filename": FILE}))
        seconds, cached = await self._time(self._raw.base, id_slot=0)
        return took.last - took.sent + seconds, cached

    async def stock(self) -> tuple[float, int]:
        await self._raw.restart()
        return await self._time(self._raw.base)

    async def _time(self, base: str, **more: Any) -> tuple[float, int]:
        """Ask another question each time after the same conversation; return seconds and cached tokens."""
        self._asked += 1
        asked = [*self._history, user(100 + self._asked, 300)]
        seconds, answer = await _ask(base, {"messages": asked, "max_tokens": 1, **more})
        return seconds, answer["timings"]["cache_n"]


async def _ask(base: str, body: Doc) -> tuple[float, Doc]:
    """Return the seconds until the answer was complete, and the answer."""
    took = await post(base, CHAT, orjson.dumps({**body, "temperature": 0, **PLAIN}))
    if not took.ok:
        raise RuntimeError(f"{base} answered {took.answer[:300]!r}")
    return took.last - took.sent, orjson.loads(took.body)


async def wait(model: Tiny, build: str, tokens: int, repeats: int) -> Row:
    """Measure how long the next question waits for its first token."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        engines = []
        for name in ("ours", "raw"):
            (folder / name).mkdir()
            started = lab.tiny_engine(model, build, folder / name, context_tokens=2 * tokens)
            engines.append(await stack.enter_async_context(started))
        sidecar = await stack.enter_async_context(lab.keeping(engines[0]))
        long = Long(engines[0], sidecar, engines[1])
        await long.fill(tokens)
        found: dict[str, list[tuple[float, int]]] = {"sidecar": [], "raw": [], "stock": []}
        for number in range(repeats):
            found["sidecar"].append(await long.through_the_sidecar())
            found["raw"].append(await long.by_hand())
            if number < STOCK:
                found["stock"].append(await long.stock())
    row: Row = {"build": build, "model": model.value, "tokens": long.tokens, "repeats": repeats}
    for name, times in found.items():
        row[name] = {
            "median_ms": round(1000 * statistics.median(seconds for seconds, _ in times), 2),
            "fastest_ms": round(1000 * min(seconds for seconds, _ in times), 2),
            "cached": min(cached for _, cached in times),
        }
    return row | {"ratio": row["sidecar"]["median_ms"] / row["raw"]["median_ms"]}


async def work(model: Tiny, build: str, change: Change) -> Row:
    """Measure what two conversations compute after a restart, and what they must compute."""
    row: Row = {"build": build, "model": model.value, "change": change.value}
    for way in ("stock", "sidecar"):
        with tempfile.TemporaryDirectory(prefix="slotkeeper-bench-") as folder:
            row[way] = await _restarted(model, build, change, Path(folder), sidecar=way == "sidecar")
    return row


async def _restarted(model: Tiny, build: str, change: Change, folder: Path, *, sidecar: bool) -> Row:
    chats = [RestartedChat(number=number, change=change) for number in (1, 2)]
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(lab.tiny_engine(model, build, folder))
        ours = await stack.enter_async_context(lab.keeping(engine)) if sidecar else None
        target = await stack.enter_async_context(Target(lab.url_of(ours) if ours else engine.base))
        for chat in chats:
            await play(chat.begin(), target, session=str(chat.number))
        if ours:
            await lab.rested(ours)
        await engine.restart()
        return tokens(
            totals([s for chat in chats for s in await play(chat.go_on(), target, session=str(chat.number))])
        )


def waits(rows: Sequence[Row]) -> Table:
    shown = Table(title="first token after a restart, ms (median)", title_justify="left")
    for name in ("build", "model", "tokens", "stock", "raw", "sidecar", "sidecar / raw"):
        shown.add_column(name, justify="left" if name in {"build", "model"} else "right")
    for row in rows:
        stock, raw, ours = (row[way]["median_ms"] for way in ("stock", "raw", "sidecar"))
        shown.add_row(
            row["build"], row["model"], f"{row['tokens']:,}", f"{stock:.0f}", f"{raw:.1f}", f"{ours:.1f}",
            f"{row['ratio']:.2f}",
        )  # fmt: skip
    return shown


def computed(rows: Sequence[Row]) -> Table:
    shown = Table(
        "build",
        "model",
        "after it",
        "stock",
        "sidecar",
        title="tokens computed after a restart while the client waited, + idle (oracle)",
    )
    for row in rows:
        cells = (_cell(row[way]) for way in ("stock", "sidecar"))
        shown.add_row(row["build"], row["model"], row["change"], *cells)
    return shown


def _cell(row: Row) -> str:
    idle = f" + {row['idle']}" if row["idle"] else ""
    return f"{row['client'] + row['planted']}{idle} ({row['oracle']})"


async def run(timed: Sequence[tuple[str, Tiny]], chosen: argparse.Namespace) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {"waits": [], "computed": []}
    cases = list(product(chosen.builds, Tiny, Change)) if chosen.totals else []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("restarts", total=len(timed) + len(cases))
        for build, model in timed:
            found["waits"].append(await wait(model, build, chosen.tokens, chosen.repeats))
            progress.advance(task)
        for build, model, change in cases:
            found["computed"].append(await work(model, build, change))
            progress.advance(task)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--tokens", type=int, default=30000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--builds", nargs="+", default=list(BUILDS))
    parser.add_argument(
        "--models", nargs="+", type=Tiny, default=list(TIMED), help="models whose times are measured"
    )
    parser.add_argument("--no-totals", dest="totals", action="store_false", help="measure only times")
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    found = asyncio.run(run(list(product(chosen.builds, chosen.models)), chosen))
    console.print(waits(found["waits"]))
    for row in found["waits"]:
        style = "green" if row["ratio"] <= TARGET else "red"
        console.print(f"{row['build']} {row['model']}: {row['ratio']:.2f} of {TARGET}", style=style)
    if found["computed"]:
        console.print(computed(found["computed"]))
    keep("restart", found | {"target": TARGET})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

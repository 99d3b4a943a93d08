"""Bodies that try to block the event loop: how late is the answer of the admin port meanwhile?

`python -m benchmarks.hard_bodies [--size 1000000] [--texts brackets]`

Each body is sent to the sidecar, with a real engine behind it: first requests of a million values, which are
refused, then every text of `benchmarks.matchers` as system text and as a user's. Another client requests
`/livez` all the time. The texts are longer than the engine's context, so the engine refuses them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import orjson
from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.first_byte import PATH
from benchmarks.matchers import TEXTS
from benchmarks.raw import post
from benchmarks.stage import QUIET, engine_for
from slotkeeper.bench.lab import Served, served

TARGET_SECONDS: Final = 0.5
PAUSE_SECONDS: Final = 0.01  # between two probes
PATIENCE_SECONDS: Final = 60.0  # after this the client disconnects
SLOTS: Final = 2
MESSAGE: Final = b'{"role":"user","content":"x"}'
VALUES: Final = {
    "20 MB of empty lists": b'{"messages":[' + b"[]," * 6_700_000 + b"[]]}",
    "a million messages": b'{"messages":[' + (MESSAGE + b",") * 999_999 + MESSAGE + b"]}",
}


def bodies(size: int, chosen: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bodies; the texts have `size` characters."""
    yield from ((name, body) for name, body in VALUES.items() if not chosen or name in chosen)
    for name, make in TEXTS.items():
        if not chosen or name in chosen:
            said = [{"role": role, "content": make(size)} for role in ("system", "user")]
            yield name, orjson.dumps({"messages": said, "max_tokens": 1, "stream": True})


async def worst_look(admin: str, until: asyncio.Task[Any]) -> float:
    """Return the longest time of `/livez` in seconds, from before the body is sent until its answer."""
    worst = 0.0
    while True:
        last, sent = until.done(), time.perf_counter()
        reader, writer = await asyncio.open_connection(*admin.removeprefix("http://").split(":"))
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        if b" 200 " not in await reader.read():
            raise RuntimeError("/livez did not answer 200")
        writer.close()
        worst = max(worst, time.perf_counter() - sent)
        if last:
            return worst
        await asyncio.sleep(PAUSE_SECONDS)


async def one(sidecar: Served, body: bytes) -> dict[str, float | str]:
    async def ask() -> str:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return (await post(sidecar.url, PATH, body)).answer[9:12].decode()
        except TimeoutError:
            return "left"
        except ConnectionError:  # the sidecar refuses by the headers alone, and closes
            return "closed"

    begun = time.perf_counter()
    asked = asyncio.get_running_loop().create_task(ask())
    worst = await worst_look(sidecar.admin, asked)
    took = time.perf_counter() - begun
    return {"livez_s": round(worst, 4), "answer_s": round(took, 2), "status": await asked}


async def measure(size: int, chosen: Sequence[str]) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        engine = await engine_for(stack, folder / "engine", SLOTS, 4096 * SLOTS, relayed=False)
        sidecar = await stack.enter_async_context(served(engine.url, QUIET))
        every = dict(bodies(size, chosen))
        found = {
            name: await one(sidecar, body)
            for name, body in track(every.items(), "bodies", console=console, transient=True)
        }
        return {"size": size, "bodies": found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hard_bodies", description=__doc__)
    parser.add_argument("--size", type=int, default=1_000_000, help="characters of each text")
    parser.add_argument("--texts", nargs="*", default=(), help="names of the texts to send (default: all)")
    chosen = parser.parse_args(arguments)
    figures = asyncio.run(measure(chosen.size, chosen.texts))
    table = Table("body", "/livez, worst", "until its answer", "status")
    for name, row in figures["bodies"].items():
        style = "red" if row["livez_s"] > TARGET_SECONDS else ""
        shown = (f"{row['livez_s']:.3f} s", f"{row['answer_s']:.1f} s", str(row["status"]))
        table.add_row(name, *shown, style=style)
    console.print(table)
    worst = max(row["livez_s"] for row in figures["bodies"].values())
    console.print(f"/livez is never later than {worst:.3f} s (target: {TARGET_SECONDS} s)")
    keep("hard_bodies", figures | {"worst_livez_s": worst, "target_s": TARGET_SECONDS})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

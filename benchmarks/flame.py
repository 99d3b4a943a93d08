"""Where the sidecar spends processor time for small requests, one by one: shares, and a flame graph.

`python -m benchmarks.flame [--seconds 30] [--flame FILE.svg]`. Samples are taken by py-spy (`pip install
py-spy`), as root if the kernel requires it. Waiting time is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.first_byte import PATH, small_request
from benchmarks.raw import post
from benchmarks.stage import OURS, stage

WARM_UP: Final = 100  # requests
RATE: Final = 500  # samples a second
FRAME: Final = re.compile(r"(?P<function>.*) \((?P<file>.*?)(:\d+)?\)$")
# Parts of the path of the innermost frame's file; the first that matches counts.
GROUPS: Final = (
    ("slotkeeper/scheduler", "slotkeeper: scheduler"),
    ("slotkeeper/conversation", "slotkeeper: conversation and rules"),
    ("slotkeeper/api", "slotkeeper: api"),
    ("slotkeeper/exchange", "slotkeeper: exchange"),
    ("slotkeeper/", "slotkeeper: the rest"),
    ("aiohttp/", "aiohttp: HTTP server and client"),
    ("aiohappyeyeballs/", "connections to the engine"),
    ("asyncio/", "event loop and sockets (uvloop)"),
)
OTHER: Final = "other libraries"
IDLE: Final = "concurrent/futures/thread.py"  # a thread that waits for work


async def sampled(seconds: int, form: str, out: Path) -> None:
    """Record with py-spy a sidecar that serves small requests, one after the other."""
    async with stage(slots=4, context_tokens=16384, relays=False, yardstick=False) as found:
        url = found.ways[OURS].url
        for _ in range(WARM_UP):
            await post(url, PATH, small_request())
        words = (
            f"record --pid {found.sidecar_pid} --rate {RATE} --duration {seconds} --format {form} --function"
        )
        spy = await asyncio.create_subprocess_exec("py-spy", *words.split(), "--output", out)
        while spy.returncode is None:
            await post(url, PATH, small_request())
        if spy.returncode:
            raise RuntimeError(f"py-spy ended with code {spy.returncode}")


def shares(record: str) -> dict[str, float]:
    """Return the shares of all samples, in per cent, by the place of their innermost frame."""
    found = Counter[str]()
    for stack in record.splitlines():
        frames, _, count = stack.rpartition(" ")
        if IDLE not in frames.rpartition(";")[2]:
            found[_group(frames.rpartition(";")[2])] += int(count)
    return {name: round(100 * count / found.total(), 1) for name, count in found.most_common()}


def _group(frame: str) -> str:
    place = FRAME.match(frame)
    file = place["file"] if place else ""
    return next((name for part, name in GROUPS if part in file), OTHER)


def _rows(found: dict[str, float]) -> Iterator[tuple[str, str]]:
    ours = sum(share for name, share in found.items() if name.startswith("slotkeeper"))
    yield from ((name, f"{share:.1f} %") for name, share in found.items())
    yield "slotkeeper in all", f"{ours:.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flame", description=__doc__)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--flame", type=Path, metavar="FILE.svg", help="also draw a flame graph")
    chosen = parser.parse_args(arguments)
    if not shutil.which("py-spy"):
        parser.error("py-spy is not on PATH: pip install py-spy")
    with tempfile.TemporaryDirectory(prefix="slotkeeper-bench-") as folder:
        raw = Path(folder) / "stacks"
        asyncio.run(sampled(chosen.seconds, "raw", raw))
        found = shares(raw.read_text())
        if chosen.flame:
            asyncio.run(sampled(chosen.seconds, "flamegraph", chosen.flame))
    table = Table("innermost frame in", "share of processor time")
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    keep("flame", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

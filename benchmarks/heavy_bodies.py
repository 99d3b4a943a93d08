"""Bodies near the limit of their size: the sidecar's memory and the delay of `/livez`, seen from outside.

`python -m benchmarks.heavy_bodies [--megabytes 60] [--cases "one chat"]`

A sidecar with its default limits runs in its own process, in front of a real engine with 65,536 tokens of
context for each slot. While each case is sent, a process of its own requests `/livez` on a new connection
every 20 ms, and the memory (RSS) of the sidecar and its children is read every 10 ms. "idle" is the same
before the body.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import psutil
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.raw import post
from benchmarks.stage import QUIET, engine_for
from slotkeeper.bench.lab import Served, served

PROGRAM: Final = "benchmarks.heavy_bodies"
CHAT: Final = "/v1/chat/completions"
PROBE_PAUSE_SECONDS: Final = 0.02
MEMORY_PAUSE_SECONDS: Final = 0.01
PATIENCE_SECONDS: Final = 120.0
REST_SECONDS: Final = 3.0  # of the first row, and after each case
AT_ONCE: Final = 8
LEFT_AFTER_SECONDS: Final = 3.0  # then the clients of a case disconnect
MIB: Final = 2**20
LINE: Final = "lorem ipsum dolor sit amet consectetur\n"


def chat(size: int) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": LINE * (size // len(LINE))}]})


def wide_chat(size: int) -> bytes:
    """Return a chat whose text Python stores in four bytes for each character."""
    return orjson.dumps(
        {"messages": [{"role": "user", "content": LINE * (size // len(LINE)) + "\U0001f600"}]}
    )


def turns(size: int) -> bytes:
    """Return a chat of messages of 4 KB each."""
    said = [{"role": role, "content": LINE * 100} for role in ("user", "assistant")]
    return orjson.dumps({"messages": [*said * (size // 8000), said[0]]})


def ids(size: int) -> bytes:
    """Return a completion of token ids, as many as a body may have values."""
    return orjson.dumps({"prompt": [1234] * min(size // 5, 1_999_000), "n_predict": 1})


def picture(size: int) -> bytes:
    """Return a chat of one image."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'QUJD' * (size // 4)}"}}
    told = {"type": "text", "text": "What is this?"}
    return orjson.dumps({"messages": [{"role": "user", "content": [told, image]}]})


def pictures(size: int) -> bytes:
    """Return a chat of eight images."""
    one = orjson.loads(picture(size // 8))["messages"][0]["content"]
    return orjson.dumps({"messages": [{"role": "user", "content": one * 8}]})


def text(size: int, name: str) -> bytes:
    return orjson.dumps({name: LINE * (size // len(LINE))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    path: str
    make: Callable[[int], bytes]
    clients: int = 1
    leave: bool = False  # disconnect after LEFT_AFTER_SECONDS


CASES: Final[Mapping[str, Case]] = {
    "one chat": Case(path=CHAT, make=chat),
    "one chat, 4 bytes a character": Case(path=CHAT, make=wide_chat),
    "one chat of many turns": Case(path=CHAT, make=turns),
    "one chat, an eighth of the size": Case(path=CHAT, make=lambda size: chat(size // 8)),
    "eight chats, whose clients leave": Case(path=CHAT, make=chat, clients=AT_ONCE, leave=True),
    "eight chats": Case(path=CHAT, make=chat, clients=AT_ONCE),
    "one chat of an image": Case(path=CHAT, make=picture),
    "one chat of eight images": Case(path=CHAT, make=pictures),
    "eight chats of an image": Case(path=CHAT, make=picture, clients=AT_ONCE),
    "a completion of token ids": Case(path="/completion", make=ids),
    "embeddings": Case(path="/v1/embeddings", make=lambda size: text(size, "input")),
    "/tokenize": Case(path="/tokenize", make=lambda size: text(size, "content")),
}


@dataclass(slots=True)
class Seen:
    """What was seen from outside while a case ran."""

    probes: int = 0
    latest: float = 0.0  # the slowest probe, in seconds
    most: int = 0  # bytes of memory
    running: bool = True

    async def weigh(self, process: psutil.Process) -> None:
        while self.running:
            self.most = max(self.most, memory(process))
            await asyncio.sleep(MEMORY_PAUSE_SECONDS)


def probe(admin: str) -> None:
    """Request `/livez` until standard input ends; then print the number of probes and the slowest one.

    It runs in a process of its own: the one that sends the bodies is busy itself.
    """
    host, _, port = admin.removeprefix("http://").rpartition(":")
    ended, probes, latest = threading.Event(), 0, 0.0

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    sys.stdout.write("it begins\n")
    sys.stdout.flush()
    while not ended.wait(PROBE_PAUSE_SECONDS):
        sent = time.perf_counter()
        with socket.create_connection((host, int(port))) as plug:
            plug.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if b" 200 " not in plug.recv(4096):
                raise RuntimeError("/livez did not answer 200")
        latest = max(latest, time.perf_counter() - sent)
        probes += 1
    sys.stdout.write(f"{probes} {latest}")


def memory(process: psutil.Process) -> int:
    """Return the resident memory of a process and its children in bytes."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += int(one.memory_info().rss)
    return total


async def watched(sidecar: Served, work: Awaitable[Any]) -> tuple[Any, Seen]:
    seen, process = Seen(), psutil.Process(sidecar.pid)
    words, pipe = (sys.executable, "-m", PROGRAM, "--probe", sidecar.admin), asyncio.subprocess.PIPE
    prober = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    if prober.stdout is None:
        raise AssertionError("it is a pipe")
    await prober.stdout.readline()  # it probes
    async with asyncio.TaskGroup() as group:
        group.create_task(seen.weigh(process))
        result = await work
        seen.running = False
    said, _ = await prober.communicate(b"")
    probes, latest = said.split()
    seen.probes, seen.latest = int(probes), float(latest)
    return result, seen


async def ask(sidecar: Served, case: Case, body: bytes) -> str:
    """Return the status, and the type of an error."""
    try:
        async with asyncio.timeout(LEFT_AFTER_SECONDS if case.leave else PATIENCE_SECONDS):
            took = await post(sidecar.url, case.path, body)
    except TimeoutError:
        return "left"
    except ConnectionError:
        return "closed"
    status = took.answer[9:12].decode()
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        return f"{status} {orjson.loads(took.body)['error']['type']}"
    return status


async def one(sidecar: Served, case: Case, size: int) -> dict[str, Any]:
    body = case.make(size)

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(ask(sidecar, case, body) for _ in range(case.clients)))

    begun = time.perf_counter()
    answers, seen = await watched(sidecar, all_at_once())
    took = time.perf_counter() - begun
    _, after = await watched(sidecar, asyncio.sleep(REST_SECONDS))
    counted = {answer: answers.count(answer) for answer in sorted(set(answers))}
    return {
        "answers": ", ".join(f"{n} x {answer}" if n > 1 else answer for answer, n in counted.items()),
        "seconds": round(took, 1),
        "livez_ms": round(1000 * max(seen.latest, after.latest)),
        "peak_mib": round(max(seen.most, after.most) / MIB),
        "after_mib": round(memory(psutil.Process(sidecar.pid)) / MIB),
    }


async def measure(size: int, chosen: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotkeeper-bench-")))
        engine = await engine_for(stack, folder / "engine", 2, 65_536, relayed=False)
        for name, case in CASES.items():
            if chosen and name not in chosen:
                continue
            # Each case begins with the memory of a new process.
            async with served(engine.url, QUIET) as sidecar:
                _, idle = await watched(sidecar, asyncio.sleep(REST_SECONDS))
                row = await one(sidecar, case, size)
                found[name] = {**row, "idle_livez_ms": round(1000 * idle.latest)}
                console.print(f"[dim]{name}: {found[name]}[/dim]")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heavy_bodies")
    parser.add_argument("--megabytes", type=int, default=60, help="size of each body")
    parser.add_argument("--cases", nargs="*", default=[], metavar="NAME", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(args.probe)
        return
    found = asyncio.run(measure(args.megabytes * 1_000_000, args.cases))
    table = Table(title=f"Bodies of {args.megabytes} MB")
    for column in ("case", "answer", "seconds", "/livez, idle", "/livez, worst", "peak", "3 s later"):
        table.add_column(column)
    for name, row in found.items():
        ms = (f"{row[key]} ms" for key in ("idle_livez_ms", "livez_ms"))
        mib = (f"{row[key]} MiB" for key in ("peak_mib", "after_mib"))
        table.add_row(name, row["answers"], str(row["seconds"]), *ms, *mib)
    console.print(table)
    keep("heavy_bodies", found)


if __name__ == "__main__":
    main()

"""Growing chats on slots that share one KV buffer: failures, computed tokens, and waits.

`python -m benchmarks.pool [--chats 4 8] [--turns 5] [--model tiny-dense]`. Four slots share 4,096 cells, and
each chat grows to about 2,500 tokens. All chats run at once, and each sends its next request as soon as it
has an answer; a failed request is sent again. The oracle and the expected texts come from an engine with
room: its own slot for each chat, one chat at a time. Tokens are those of the engine's counter, which includes
idle work and requests that broke off.

The division of a prompt into batches changes logprobs slightly, and so words for which another one was nearly
as likely. So every chat continues with the texts of the engine with room, and a text is compared up to the
first word for which another one was within 0.05 there.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
from rich.table import Table

from benchmarks.figures import console, keep
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.observe.log import configure
from slotkeeper.observe.request_record import RequestStage
from slotkeeper.scheduler.effects import PoolAct

BUILD: Final = "b11549"
CELLS: Final = 4096
SLOTS: Final = 4
# The first is as users start it, without -np: each task moves all idle slots to the RAM cache. The second has
# no RAM cache.
ENGINES: Final = {
    "as it comes": ("-c", str(CELLS)),
    "no RAM cache": ("-np", str(SLOTS), "--kv-unified", "-c", str(CELLS), "--cache-ram", "0"),
}
QUESTION: Final = 1250  # characters, about 380 tokens
ANSWER: Final = 120  # tokens
ATTEMPTS: Final = 20  # of one turn; after that its chat ends
PATIENCE: Final = 600.0  # seconds for one answer
MARGIN: Final = 0.05  # of a logprob: what a different division into batches can change


class Way(StrEnum):
    STOCK = "stock"
    BARE = "sidecar"
    FILES = "sidecar with a folder"


@dataclass
class GrowingChat:
    """One chat whose questions are fixed."""

    number: int
    script: Sequence[str] = ()  # texts to use as the answers
    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # the part of each answer that no different division into batches changes
    sure: list[str] = field(default_factory=list)
    failed: int = 0
    longest: int = 0  # longest prompt, in tokens

    async def play(self, client: httpx.AsyncClient, turns: int, **more: Any) -> None:
        """Ask one question after the other."""
        for turn in range(turns):
            text = f"Chat {self.number}, question {turn}. " + prose(QUESTION, 100 * self.number + turn)
            self.messages.append({"role": "user", "content": text})
            if not await self._answered(client, more):
                return

    async def _answered(self, client: httpx.AsyncClient, more: dict[str, Any]) -> bool:
        body = {"messages": self.messages, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        body |= {"chat_template_kwargs": {"plain": True}} | more
        for _ in range(ATTEMPTS):
            response = await client.post("/v1/chat/completions", json=body)
            if response.status_code == 200:
                said = response.json()
                reply = said["choices"][0]["message"]["content"]
                self.longest = max(self.longest, said["usage"]["prompt_tokens"])
                scripted = self.script[len(self.texts)] if self.script else reply
                self.messages.append({"role": "assistant", "content": scripted})
                self.texts.append(reply)
                self.sure.append(sure_part(said["choices"][0], reply))
                return True
            self.failed += 1
        return False


def sure_part(choice: dict[str, Any], text: str) -> str:
    """Return the text up to the first word for which another was nearly as likely."""
    length = 0
    for word in (choice.get("logprobs") or {}).get("content", ()):
        one, other = (top["logprob"] for top in word["top_logprobs"])
        if one - other < MARGIN:
            return text.encode()[:length].decode(errors="ignore")
        length += len(word["bytes"])
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The outcome of all chats."""

    chats: Sequence[GrowingChat]
    computed: int  # tokens
    seconds: float
    waited: float  # longest wait of one request in the sidecar's queue, seconds
    acts: dict[str, int]  # reason -> count of the shared buffer's events

    @property
    def texts(self) -> list[list[str]]:
        return [chat.texts for chat in self.chats]

    def others(self, oracle: Played) -> int:
        """Return the number of answers that differ from those of the engine with room."""
        pairs = [
            pair
            for mine, its in zip(self.chats, oracle.chats, strict=True)
            for pair in zip(mine.texts, its.sure, strict=False)
        ]
        return sum(not text.startswith(sure) for text, sure in pairs)

    @property
    def compared(self) -> float:
        """Return the share of all text that is compared."""
        sure = sum(len(text) for chat in self.chats for text in chat.sure)
        return sure / sum(len(text) for texts in self.texts for text in texts)

    @property
    def failed(self) -> int:
        return sum(chat.failed for chat in self.chats)


@asynccontextmanager
async def shared_engine(
    model: Tiny, folder: Path, *flags: str, files: bool = True
) -> AsyncIterator[lab.Restartable]:
    """Run an engine with one buffer for all slots and these flags.

    `files`: its slots can be saved and erased.
    """

    def recipe(*given: Any, **more: Any) -> list[str]:
        words = lab.stock_flags(*given, **more)
        for name in ("-np", "-c", *(() if files else ("--slot-save-path",))):
            at = words.index(name)
            del words[at : at + 2]
        return words

    async with lab.tiny_engine(model, BUILD, folder, *flags, recipe=recipe) as engine:
        yield engine


async def played(model: Tiny, oracle: Played, turns: int, way: Way, flags: Sequence[str]) -> Played:
    """Play all chats at once, on a shared buffer."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        engine = await stack.enter_async_context(shared_engine(model, folder, *flags, files=way is Way.FILES))
        base, sidecar = engine.base, None
        if way is not Way.STOCK:
            door = lab.keeping(engine) if way is Way.FILES else lab.in_front_of(engine.base, engine.flags)
            sidecar = await stack.enter_async_context(door)
            base = lab.url_of(sidecar)
        found = [GrowingChat(n, script=texts) for n, texts in enumerate(oracle.texts)]
        before = await lab.evaluated(engine.base)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=PATIENCE))
        began = time.monotonic()
        await asyncio.gather(*(chat.play(client, turns) for chat in found))
        seconds = time.monotonic() - began
        return Played(
            chats=found,
            computed=await lab.evaluated(engine.base) - before,
            seconds=seconds,
            waited=longest_wait(sidecar),
            acts=acts(sidecar),
        )


async def with_room(model: Tiny, chats: int, turns: int) -> Played:
    """Play the chats one after the other, each in its own slot."""
    with TemporaryDirectory() as home:
        flags = ("-np", str(chats), "-c", str(CELLS * chats), "--no-kv-unified", "--cache-ram", "0")
        async with lab.tiny_engine(model, BUILD, Path(home), *flags) as engine:
            found, began = [GrowingChat(n) for n in range(chats)], time.monotonic()
            before = await lab.evaluated(engine.base)
            async with httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE) as client:
                for chat in found:
                    probed = {"logprobs": True, "top_logprobs": 2}
                    await chat.play(client, turns, id_slot=chat.number, **probed)
            computed = await lab.evaluated(engine.base) - before
            return Played(
                chats=found, computed=computed, seconds=time.monotonic() - began, waited=0.0, acts={}
            )


def longest_wait(sidecar: Sidecar | None) -> float:
    """Return the longest wait of one request in the sidecar's queue."""
    waits = [
        sum(span.end - span.begin for span in record.spans if span.stage is RequestStage.QUEUE)
        for record in (sidecar.driver.journal if sidecar else ())
    ]
    return max(waits, default=0.0)


def acts(sidecar: Sidecar | None) -> dict[str, int]:
    if sidecar is None:
        return {}
    value = sidecar.driver.metrics.registry.get_sample_value
    return {act.value: int(value("slotkeeper_kv_pool_total", {"reason": act.value}) or 0) for act in PoolAct}


async def compared(model: Tiny, chats: int, turns: int) -> list[dict[str, Any]]:
    oracle, rows = await with_room(model, chats, turns), []
    for engine, way in product(ENGINES, Way):
        found = await played(model, oracle, turns, way, ENGINES[engine])
        rows.append(
            {
                "chats": chats,
                "engine": engine,
                "tokens": max(chat.longest for chat in oracle.chats),
                "way": way.value,
                "requests": sum(len(texts) for texts in found.texts) + found.failed,
                "failed": found.failed,
                "other_texts": found.others(oracle),
                "compared": round(oracle.compared, 3),
                "computed": found.computed,
                "oracle": oracle.computed,
                "longest_wait_seconds": round(found.waited, 2),
                "seconds": round(found.seconds, 1),
                "acts": found.acts,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__)
    parser.add_argument("--chats", type=int, nargs="+", default=[4, 8], help="chats at once (default: 4 8)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each chat (default: %(default)s)")
    parser.add_argument("--model", type=Tiny, default=Tiny.DENSE, help="the model (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    rows = [row for chats in chosen.chats for row in asyncio.run(compared(chosen.model, chats, chosen.turns))]
    shown = Table(title=f"{SLOTS} slots share {CELLS} cells, {chosen.model}, {BUILD}")
    for name in (
        "chats",
        "engine",
        "way",
        "requests",
        "failed",
        "other texts",
        "computed",
        "of the oracle",
        "wait",
        "s",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        ratio, wait = f"{row['computed'] / row['oracle']:.2f}", f"{row['longest_wait_seconds']} s"
        first = (
            str(row[name])
            for name in ("chats", "engine", "way", "requests", "failed", "other_texts", "computed")
        )
        shown.add_row(*first, ratio, wait, str(row["seconds"]))
    console.print(shown)
    for row in filter(lambda row: row["acts"], rows):
        console.print(row["chats"], row["engine"], row["way"], row["acts"])
    keep("pool", rows)
    return 0 if all(not row["failed"] for row in rows if row["way"] != Way.STOCK) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A long prompt in the background, and short questions in between: how long each waits, and what is lost.

`python -m benchmarks.priority [--slots 1 2] [--tokens 30000] [--questions 40] [--models tiny-hybrid]`. One
client sends a long prompt, with low priority if the sidecar may divide it. Another client asks a short
question, waits a moment after its answer, and asks the next, until the long prompt is answered.

The wait of a question has two measures. The first is the number of the long prompt's batches that the engine
computes between the question's arrival and its first token: other load of the machine does not change it.
The second is the seconds until the first token, less those on an idle engine, divided by the seconds of the
long prompt's slowest batch on an idle engine. Tokens are the engine's counter, divided by the length of all
prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import orjson
from rich.table import Table

from benchmarks.figures import console, keep
from slotkeeper.api.answers.answer import percentile
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.observe.log import configure
from slotkeeper.observe.request_record import RequestStage
from slotkeeper.scheduler.types import Priority, PriorityAct

BUILD: Final = "b11549"
BATCH: Final = 2048  # tokens, llama-server's -b
ANSWER: Final = 8  # tokens of each
CHARACTERS: Final = 3.6  # of prose in a token, about
PATIENCE: Final = 1800.0  # seconds for one answer
PAUSE: Final = 0.5  # batches between an answer and the next question
MOST_BATCHES: Final = 1.1  # that a question waits for; a few more tokens if a state is cut for the next piece
MOST_COMPUTED: Final = 1.05  # of the tokens of all requests alone
LOW: Final = {"X-Slotkeeper-Priority": "low"}


class Way(StrEnum):
    STOCK = "stock"
    PLAIN = "sidecar, no priority"
    LOW = "sidecar, the long one low"


@dataclass
class Load:
    """One long request, and questions until it is answered."""

    client: httpx.AsyncClient
    tokens: int
    headers: dict[str, str]
    ours: Callable[[], int] = int  # tokens of the long prompt that the sidecar has planted
    done: int = 0  # tokens of the long prompt that are computed, by the engine's progress reports
    waits: list[float] = field(default_factory=list)  # seconds until the first token, of each question
    batches: list[float] = field(
        default_factory=list
    )  # batches of the long prompt, computed while a question waited
    prompts: list[int] = field(default_factory=list)  # tokens
    long_tokens: int = 0
    long_seconds: float = 0.0
    cuts: list[float] = field(default_factory=list)  # when batches of the long prompt ended

    async def long(self, number: int = 0) -> None:
        """Send the long prompt."""
        began = time.monotonic()
        self.cuts.append(began)
        body = _body(f"Report {number}. " + prose(int(self.tokens * CHARACTERS), 1), return_progress=True)
        async with self.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=self.headers
        ) as answer:
            async for line in answer.aiter_lines():
                said = _event(line)
                if progress := said.get("prompt_progress"):
                    self.done = progress["processed"]
                    self.cuts.append(time.monotonic())
                self.long_tokens = said.get("usage", {}).get("prompt_tokens", self.long_tokens)
        self.long_seconds = time.monotonic() - began

    @property
    def computed(self) -> int:
        """Return the tokens of the long prompt that are computed so far."""
        return max(self.done, self.ours())

    async def question(self, number: int) -> float:
        """Ask one short question; return the seconds until its first token."""
        began, first, before = time.monotonic(), 0.0, self.computed
        body = _body(f"Question {number}: " + prose(500, 100 + number))
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                said = _event(line)
                delta: dict[str, Any] = next((choice["delta"] for choice in said.get("choices", ())), {})
                if not first and (delta.get("content") or delta.get("reasoning_content")):
                    first = time.monotonic() - began
                    self.batches.append((self.computed - before) / BATCH)
                if usage := said.get("usage"):
                    self.prompts.append(usage["prompt_tokens"])
        return first

    async def beside(self, questions: int, pause: float) -> None:
        """Send the long prompt, and questions until it is answered."""
        over = asyncio.Event()

        async def long() -> None:
            await self.long()
            over.set()

        async def short() -> None:
            for number in range(questions):
                await asyncio.sleep(pause)
                if over.is_set():
                    return
                self.waits.append(await self.question(number))

        await asyncio.gather(long(), short())


def _body(text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER, "temperature": 0}
    more |= {"stream": True, "stream_options": {"include_usage": True}}
    return {**body, "chat_template_kwargs": {"plain": True}, **more}


def _event(line: str) -> dict[str, Any]:
    found = line.startswith("data: {")
    return {name: value for name, value in orjson.loads(line[6:]).items() if value} if found else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of one way."""

    load: Load
    computed: int  # tokens, by the engine's counter
    acts: dict[str, int]
    begun_meanwhile: int  # prefills of the sidecar that began while a question waited


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The figures of an engine that serves one request at a time."""

    long_tokens: int
    long_seconds: float
    dearest_batch: float  # seconds
    question: float  # seconds until its first token

    @property
    def batch(self) -> float:
        return self.long_seconds / max(1.0, self.long_tokens / BATCH)


async def alone(model: Tiny, slots: int, tokens: int) -> Alone:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(_engine(stack, model, slots, tokens))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=engine.base, timeout=PATIENCE))
        load = Load(client, tokens, {})
        firsts = [await load.question(900 + number) for number in range(3)]
        await load.long(number=9)
        whole = [b - a for a, b in zip(load.cuts, load.cuts[1:], strict=False)]
        return Alone(
            long_tokens=load.long_tokens,
            long_seconds=load.long_seconds,
            dearest_batch=max(whole),
            question=median(firsts),
        )


def _engine(stack: AsyncExitStack, model: Tiny, slots: int, tokens: int) -> Any:
    folder = Path(stack.enter_context(TemporaryDirectory()))

    def recipe(*given: Any, **more: Any) -> list[str]:
        return lab.stock_flags(*given, **{**more, "slots": slots})

    return lab.tiny_engine(model, BUILD, folder, context_tokens=tokens + 8192, recipe=recipe)


async def measured(model: Tiny, slots: int, tokens: int, questions: int, *, way: Way, pause: float) -> Found:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(_engine(stack, model, slots, tokens))
        base, sidecar = engine.base, None
        if way is not Way.STOCK:
            sidecar = await stack.enter_async_context(lab.in_front_of(engine.base, engine.flags))
            base = lab.url_of(sidecar)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=PATIENCE))
        before = await lab.evaluated(engine.base)
        load = Load(client, tokens, LOW if way is Way.LOW else {}, ours=lambda: lab.spent(sidecar).plant)
        await load.beside(questions, pause)
        return Found(
            load=load,
            computed=await lab.evaluated(engine.base) - before,
            acts=acts(sidecar),
            begun_meanwhile=begun_meanwhile(sidecar),
        )


def begun_meanwhile(sidecar: Sidecar | None) -> int:
    """Return how many of the sidecar's prefills began between a question's arrival and its first token."""
    records = list(sidecar.driver.journal) if sidecar else []
    begun = [
        (record, record.at + span.begin)
        for record in records
        for span in record.spans
        if span.stage is RequestStage.PLANT
    ]
    waits = [
        (record, record.at + span.begin, record.at + record.first_token)
        for record in records
        for span in record.spans
        if span.stage is RequestStage.QUEUE
        if record.first_token is not None and record.priority is Priority.NORMAL
    ]
    return sum(
        came < at < first for question, came, first in waits for record, at in begun if record is not question
    )


def acts(sidecar: Sidecar | None) -> dict[str, int]:
    """Return the counts of decisions made because of priorities, by reason."""
    if sidecar is None:
        return {}
    value = sidecar.driver.metrics.registry.get_sample_value
    return {
        act.value: int(value("slotkeeper_priority_total", {"reason": act.value}) or 0) for act in PriorityAct
    }


async def compared(model: Tiny, slots: int, tokens: int, questions: int) -> list[dict[str, Any]]:
    by_itself, rows = await alone(model, slots, tokens), []
    for way in Way:
        pause = PAUSE * by_itself.batch
        found = await measured(model, slots, tokens, questions, way=way, pause=pause)
        least = found.load.long_tokens + sum(found.load.prompts)
        rows.append(
            {
                "model": model.value,
                "slots": slots,
                "way": way.value,
                "long_tokens": found.load.long_tokens,
                "questions": len(found.load.waits),
                "batch_seconds": round(by_itself.batch, 3),
                "p95_batches": round(percentile(found.load.batches, 95) or 0.0, 2),
                "most_batches": round(max(found.load.batches, default=0.0), 2),
                "p95_seconds_in_batches": round(
                    max(0.0, (percentile(found.load.waits, 95) or 0.0) - by_itself.question)
                    / by_itself.dearest_batch,
                    2,
                ),
                "computed": found.computed,
                "computed_of_alone": round(found.computed / least, 4),
                "long_seconds_of_alone": round(found.load.long_seconds / by_itself.long_seconds, 2),
                "begun_meanwhile": found.begun_meanwhile,
                "acts": found.acts,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.priority", description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2], help="of the engine (default: 1 2)")
    parser.add_argument(
        "--tokens", type=int, default=30_000, help="of the long prompt (default: %(default)s)"
    )
    parser.add_argument("--questions", type=int, default=40, help="at most (default: %(default)s)")
    parser.add_argument("--models", type=Tiny, nargs="+", default=[Tiny.HYBRID, Tiny.DENSE])
    chosen = parser.parse_args(arguments)
    configure("error", "console")
    rows = [
        row
        for model, slots in product(chosen.models, chosen.slots)
        for row in asyncio.run(compared(model, slots, chosen.tokens, chosen.questions))
    ]
    shown = Table(title=f"{chosen.tokens} tokens in the background, {BUILD}")
    names = ("model", "slots", "way", "questions", "p95 batches", "most", "p95 in seconds")
    for name in (*names, "computed of alone", "long one's time"):
        shown.add_column(name, justify="right")
    for row in rows:
        picked = (
            "model",
            "slots",
            "way",
            "questions",
            "p95_batches",
            "most_batches",
            "p95_seconds_in_batches",
        )
        shown.add_row(*(str(row[name]) for name in (*picked, "computed_of_alone", "long_seconds_of_alone")))
    console.print(shown)
    for row in filter(lambda row: row["acts"], rows):
        console.print(row["model"], row["slots"], row["way"], row["acts"])
    keep("priority", rows)
    ours = [row for row in rows if row["way"] == Way.LOW]
    good = (row["computed_of_alone"] <= MOST_COMPUTED and row["p95_batches"] <= MOST_BATCHES for row in ours)
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())

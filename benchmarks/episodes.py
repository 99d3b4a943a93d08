"""An agent and another client beside it, whose requests come at moments that only the seed decides.

When the next task comes, the template leaves out the reasoning of the task before: the prompt diverges from
the last one, and 7,000 tokens follow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx
import orjson

from benchmarks.sessions import TOOL, user
from slotkeeper.api.answers.answer import Answer, AnswerReader
from slotkeeper.api.document import Doc
from slotkeeper.api.head import Api
from slotkeeper.bench.target import CHAT, PLAIN, SILENCE, spoken
from slotkeeper.bench.texts import prose, result, system

PAUSE_SECONDS: Final = 0.3  # the longest pause between an answer and the next request
TASKS: Final = 2  # of each episode, followed by one more question
CALLS: Final = 3  # of each task
OTHERS: Final = 1 / 3  # share of turns before which another client sends a request
SYSTEM: Final = 30000  # characters, which are more than 8,000 tokens
RESULT: Final = 8000


class Kind(StrEnum):
    FIRST = "first"  # first request of a conversation: shows the rate, and is not compared
    TOOL = "tool's result"
    TASK = "next task"
    OTHER = "another client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one answer cost."""

    kind: Kind
    prompt: int  # tokens
    computed: int
    seconds: float  # to the first token
    prefill_seconds: float  # of these, the prefill, by the engine's count

    @property
    def waited(self) -> float:
        """Return the seconds before the engine began to process the request."""
        return self.seconds - self.prefill_seconds


@dataclass(slots=True, kw_only=True)
class Episode:
    """An agent's conversation with another client's requests in between. Pauses depend on the seed only."""

    base: str
    http: httpx.AsyncClient
    number: int
    rng: random.Random
    heard: list[Heard | None] = field(default_factory=list)  # None: the answer had no figures

    async def play(self) -> list[Heard | None]:
        history = [system(prose(SYSTEM, 100 + self.number))]
        for task in range(TASKS):
            history.append(user(20 * self.number + task))
            for call in range(CALLS):
                kind = Kind.TOOL if call else Kind.TASK if task else Kind.FIRST
                reply = await self._ask(kind, history, 400, {"tools": [TOOL], "tool_choice": "required"})
                history += [reply, result(reply, prose(RESULT, 200 + 10 * self.number + CALLS * task + call))]
            history.append(await self._ask(Kind.TOOL, history, 100, {"tools": [TOOL]}))
        await self._ask(Kind.TASK, [*history, user(20 * self.number + TASKS)], 8, {"tools": [TOOL]})
        return self.heard

    async def _ask(self, kind: Kind, messages: Sequence[Doc], max_tokens: int, fields: Doc) -> Doc:
        if kind is not Kind.FIRST:
            if self.rng.random() < OTHERS:
                await asyncio.sleep(self.rng.uniform(0, PAUSE_SECONDS))
                await self._send(Kind.OTHER, [user(1000 + 100 * self.number + len(self.heard))], 8, PLAIN)
            await asyncio.sleep(self.rng.uniform(0, PAUSE_SECONDS))
        return await self._send(kind, messages, max_tokens, fields)

    async def _send(
        self, kind: Kind, messages: Sequence[Doc], max_tokens: int, fields: Mapping[str, Any]
    ) -> Doc:
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
        began = time.perf_counter()
        async with self.http.stream("POST", self.base + CHAT, content=orjson.dumps(body)) as response:
            reader = AnswerReader(Api.CHAT, stream=True, status=response.status_code)
            async for chunk in response.aiter_bytes():
                reader.feed(chunk)
        took, answer = time.perf_counter() - began, reader.close()
        self.heard.append(_heard(kind, took, answer) if answer.complete else None)
        return spoken(answer.reply) if answer.reply else SILENCE


def _heard(kind: Kind, took: float, answer: Answer) -> Heard | None:
    """Return what an answer cost.

    A stream holds back a tool call's name, so the time to generate it is subtracted.
    """
    figures = answer.figures
    if figures.generate_ms is None or figures.prefill_ms is None:
        return None
    return Heard(
        kind=kind,
        prompt=figures.prompt_tokens or 0,
        computed=figures.computed or 0,
        seconds=took - figures.generate_ms / 1000,
        prefill_seconds=figures.prefill_ms / 1000,
    )

"""The sidecar's own time: from a request's arrival at its port until its last byte left for the engine.

A relay in front of the engine records it, on one clock. `append_turn` also measures the same way without a
sidecar and subtracts that; elsewhere it is included, and is a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson

from benchmarks.raw import Took, post
from benchmarks.stage import Way
from slotkeeper.api.document import Doc
from slotkeeper.bench.texts import prose

PATH: Final = "/v1/chat/completions"
PAUSE_SECONDS: Final = 0.15  # a pause longer than the sidecar's work after an answer
CHARS_PER_TOKEN: Final = 3.6  # with the tiny models' vocabulary, on this prose
TURN_TOKENS: Final = 2000  # of each question that fills a conversation


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A chat that sends back the replies, as clients do."""

    way: Way
    messages: list[Doc] = field(default_factory=list)
    tokens: int = 0  # of the last prompt, by the engine's count
    cached: int = 0

    async def ask(self, question: str) -> float:
        """Send one turn; return the milliseconds of the proxy's own time."""
        self.messages.append({"role": "user", "content": question})
        body = {
            "messages": self.messages,
            "max_tokens": 4,
            "temperature": 0,
            "chat_template_kwargs": {"plain": True},
        }
        relay = self.way.relay
        if relay is None:
            raise ValueError(f"{self.way} has no relay to read the clock")
        before = len(relay.arrivals)
        took = await post(self.way.url, PATH, orjson.dumps(body))
        self._hear(took)
        # Other tasks come from the sidecar: rendering, GET /slots, plants.
        (left,) = (at for path, at in relay.arrivals[before:] if path == PATH)
        return 1000 * (left - took.sent)

    async def fill(self, tokens: int) -> None:
        """Grow to about this length, turn by turn."""
        seed = len(self.messages)
        while self.tokens < tokens:
            seed += 1
            missing = min(TURN_TOKENS, max(50, tokens - self.tokens))
            await self.ask(f"{uuid.uuid4().hex} " + prose(int(missing * CHARS_PER_TOKEN), seed))
            await asyncio.sleep(PAUSE_SECONDS)

    async def append(self, turns: int) -> list[float]:
        """Send some short questions, one after the other."""
        times = []
        for number in range(turns):
            times.append(await self.ask(f"Short question {number}?"))
            await asyncio.sleep(PAUSE_SECONDS)
        return times

    def _hear(self, took: Took) -> None:
        if not took.ok:
            raise RuntimeError(f"{self.way.name} answered {took.answer[:300]!r}")
        answer = orjson.loads(took.body)
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        self.tokens = answer["usage"]["prompt_tokens"]
        self.cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def conversations(way: Way, number: int, tokens: int) -> Sequence[Conversation]:
    """Return several chats with one system prompt, each of about this many tokens."""
    shared = {"role": "system", "content": prose(int(tokens / 2 * CHARS_PER_TOKEN), 3)}
    made = [Conversation(way=way, messages=[dict(shared)]) for _ in range(number)]
    for conversation in made:
        await conversation.fill(tokens)
    return made

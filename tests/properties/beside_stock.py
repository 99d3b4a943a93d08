"""Two worlds with the same clients: rules, placement and an engine; the prompt is made from the body.

The simulated engine is dense and has no cache except its slots. Nothing depends on time: a request ends
before the next one comes, and there is no idle time.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import orjson

from at_once import at_once
from properties.simulated import SimulatedEngine, Task
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.head import Api
from slotkeeper.api.request import read
from slotkeeper.conversation.rules.apply import DEFAULTS
from slotkeeper.conversation.rules.base import Choice
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.rewriting import Rewriting, Taken
from slotkeeper.scheduler.effects import Effect, Forward, Observe, Prefill
from slotkeeper.scheduler.events import (
    Arrived,
    EngineUp,
    Event,
    Finished,
    Observed,
    Planted,
    Rendered,
    ReplyKnown,
)
from slotkeeper.scheduler.events import Started as Begun
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import ClientId, EngineId, RequestId

Doc = dict[str, Any]

HERE: Final = EngineId("engine")
_PIECE: Final = re.compile(r"\w+|\s+|[^\w\s]")


def tokens_of(doc: Doc) -> Tokens:
    """Return a prompt, a token for each word: tools, then messages with their calls, as in most templates."""
    tools = [orjson.dumps(tool).decode() for tool in doc.get("tools", ())]
    return Tokens([token for text in (*tools, *map(_said, doc["messages"])) for token in _tokens(text)])


def _said(message: Doc) -> str:
    calls = [
        f"<call>{c['function']['name']} {c['function']['arguments']}" for c in message.get("tool_calls", ())
    ]
    return f"<{message['role']}>{message.get('content') or ''}{''.join(calls)}<end>"


@lru_cache(maxsize=4096)
def _tokens(text: str) -> tuple[int, ...]:
    return tuple(crc32(piece.encode()) >> 2 for piece in _PIECE.findall(text))


class World:
    """`rules` as a user writes them. A slot holds `context` tokens, by the settings."""

    def __init__(self, *rules: str, slots: int, context: int = 0) -> None:
        self._context = context
        self.rewriting = Rewriting(Choice.of(rules, DEFAULTS), Metrics())
        self.engine = SimulatedEngine(slots)
        self.placement = Placement(HERE, limits=Limits(idle_tokens=0))
        self.work = 0  # prompt tokens that the engine has computed
        self.fixed = 0
        self.sent: Doc = {}  # the last request, as it was sent to the engine
        self._clock = 0.0
        self.asked = 0
        self._effects: deque[Effect] = deque()
        traits = EngineTraits(n_slots=slots, memory=Memory.DENSE, ram_cache=False)
        self._post(EngineUp(at=0.0, engine=HERE, traits=traits))

    def without_rules(self) -> None:
        """Switch the rules off from now on."""
        self.rewriting = Rewriting(Choice.of(("all=off",), DEFAULTS), Metrics())

    def ask(self, doc: Doc, reply: Doc, **headers: str) -> None:
        self.asked += 1
        self._clock += 1.0
        request = RequestId(f"r{self.asked}")
        more: dict[str, Any] = {"request_id": request, "client": "anna", "headers": headers, "size": 1000}
        more |= {"now": self._clock, "context": self._context}
        taken = at_once(self.rewriting.take(Api.CHAT, doc, **more))
        assert taken is not None
        rewritten, moved, most = taken.rewritten, taken.outcome.moved, taken.outcome.most
        self._post(
            Arrived(
                at=self._clock,
                request=request,
                client=ClientId("anna"),
                hash_chain=read(Api.CHAT, doc).hash_chain,
                rewritten=None if rewritten is None else read(Api.CHAT, rewritten).hash_chain,
                moved=moved,
                most=most,
            )
        )
        other = None if rewritten is None else tokens_of(rewritten)
        rendered = Rendered(at=self._clock, request=request, prompt=tokens_of(doc), rewritten=other)
        self._serve(taken, rendered, doc, reply)

    def _serve(self, taken: Taken, rendered: Rendered, doc: Doc, reply: Doc) -> None:
        """Serve a request to the end of its answer."""
        request = rendered.request
        late: Rendered | None = rendered
        while True:
            while self._effects:
                effect = self._effects.popleft()
                if isinstance(effect, Forward):
                    self.rewriting.goes(taken, changed=effect.changed)
                    sent = taken.rewritten if effect.changed and taken.rewritten is not None else doc
                    self.fixed += effect.changed
                    self.sent = sent
                    task = self._run(Task(request, tokens_of(sent), effect.slot))
                    if late is not None:
                        self._post(late)
                    self._over(taken, task, sent, reply)
                    return
                self._perform(effect)
            assert late is not None, "never forwarded"
            self._post(late)
            late = None

    def _over(self, taken: Taken, task: Task, sent: Doc, reply: Doc) -> None:
        slot, said = task.slot, tokens_of({"messages": [reply]})
        assert slot is not None
        whole = task.prompt + said
        # the last sampled token is not in the slot
        self.engine.slots[slot].tokens = whole.cut(0, len(whole) - 1)
        at, request = self._clock, RequestId(str(task.owner))
        figures: dict[str, Any] = {
            "prompt_tokens": len(task.prompt),
            "cached": task.cached,
            "generated": len(said),
        }
        self._post(Begun(at=at, request=request))
        self._post(Finished(at=at, request=request, slot=slot, **figures))
        self._post(ReplyKnown(at=at, request=request, tokens=whole.cut(0, len(whole) - 1)))
        counted = Figures(cached=task.cached, computed=len(task.prompt) - task.cached)
        self.rewriting.replied(taken, reply)
        self.rewriting.answered(taken, task.prompt, counted, planted=0)
        while self._effects:
            self._perform(self._effects.popleft())

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Prefill):
            task = self._run(Task(str(effect.request), effect.tokens, effect.place.slot, plant=True))
            computed = len(task.prompt) - task.cached
            self._post(Planted(at=self._clock, request=effect.request, computed=computed))
        elif isinstance(effect, Observe):
            self._clock += effect.delay
            views, asked = self.engine.views(), self._clock
            self._clock += 0.001
            self._post(Observed(at=self._clock, asked=asked, engine=HERE, slots=views))

    def _run(self, task: Task) -> Task:
        self.engine.submit(task)
        assert task.slot is not None, "it met a busy slot"
        self.work += len(task.prompt) - task.cached
        self.engine.end(task.slot)
        return task

    def _post(self, event: Event) -> None:
        self._effects.extend(self.placement.on(event))

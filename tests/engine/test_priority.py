"""A long prompt in the background and short questions in between: tokens and order, on a real engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.priority import BATCH, LOW, MOST_COMPUTED, Way, acts, measured

from chaos.raw import until
from compatibility import Feature
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.texts import prose
from slotkeeper.scheduler.types import PriorityAct

pytestmark = pytest.mark.one_in(8)

LONG, QUESTIONS = 12_000, 40  # tokens of the long prompt; questions at most, until it is answered


@pytest.mark.shows(Feature.PRIORITY)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("model", [Tiny.DENSE, Tiny.HYBRID, Tiny.SWA])
async def test_a_question_waits_for_one_batch_and_no_token_is_computed_twice(model: Tiny, slots: int):
    found = await measured(model, slots, LONG, QUESTIONS, way=Way.LOW, pause=0.0)
    assert found.load.waits
    assert found.begun_meanwhile == 0
    assert found.acts[PriorityAct.GAVE_WAY] > 0
    assert found.computed <= MOST_COMPUTED * (found.load.long_tokens + sum(found.load.prompts))


# -- one long request ------------------------------------------------------------------------------------


class Scene:
    """An engine with one slot, and a sidecar in front."""

    def __init__(self, engine: lab.Restartable, sidecar: Sidecar, client: httpx.AsyncClient) -> None:
        self.engine, self.sidecar, self.client = engine, sidecar, client

    async def ask(self, text: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        body |= {"chat_template_kwargs": {"plain": True}} | more
        return await self.client.post("/v1/chat/completions", json=body, headers=headers or {})

    async def computed(self) -> int:
        return await lab.evaluated(self.engine.base)

    @property
    def planted(self) -> int:
        """Tokens that the sidecar has planted for requests."""
        return lab.spent(self.sidecar).plant

    async def more_than(self, planted: int) -> None:
        await until(lambda: self.planted > planted)


async def opened(stack: AsyncExitStack, folder: Path, *, files: bool = False) -> Scene:
    def recipe(*given: Any, **more: Any) -> list[str]:
        return lab.stock_flags(*given, **{**more, "slots": 1})

    engine = await stack.enter_async_context(
        lab.tiny_engine(Tiny.HYBRID, "b11549", folder, context_tokens=32_768, recipe=recipe)
    )
    door = lab.keeping(engine) if files else lab.in_front_of(engine.base, engine.flags)
    sidecar = await stack.enter_async_context(door)
    client = await stack.enter_async_context(
        httpx.AsyncClient(base_url=lab.url_of(sidecar), timeout=PATIENCE)
    )
    return Scene(engine, sidecar, client)


@pytest.mark.parametrize("files", [False, True])
async def test_a_request_that_gave_way_gets_the_same_answer_as_alone(tmp_path: Path, files: bool):
    text = prose(36_000, 1)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        scene = await opened(stack, tmp_path, files=files)
        alone = await scene.ask(text)
        other = await scene.ask("Something else. " + prose(36_000, 2))  # evicts the first state
        assert other.status_code == 200
        before, planted = acts(scene.sidecar), scene.planted
        long = group.create_task(scene.ask("Again. " + text, LOW))
        await scene.more_than(planted)
        short = await scene.ask("Why?")
        assert short.status_code == 200
        assert not long.done()
        again = await long
        assert acts(scene.sidecar)[PriorityAct.GAVE_WAY] > before[PriorityAct.GAVE_WAY]
        assert again.headers["X-Slotkeeper-Priority"].startswith("low; gave_way")
        reference = await scene.ask("Again. " + text)
        said = [answer.json()["choices"][0]["message"]["content"] for answer in (again, reference)]
        assert said[0] == said[1]
        assert alone.headers.get("X-Slotkeeper-Priority") is None


async def test_a_client_that_disconnects_between_pieces_costs_at_most_a_batch(tmp_path: Path):
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        scene = await opened(stack, tmp_path)
        long = group.create_task(scene.ask(prose(100_000, 1), LOW))
        await scene.more_than(0)
        long.cancel()
        assert (await scene.ask("Why?")).status_code == 200
        assert await scene.computed() <= 4 * BATCH
        assert not scene.sidecar.driver.placement.divided


async def test_a_late_or_wrong_request_gets_an_error_in_the_shape_of_its_api_and_reaches_no_slot(
    tmp_path: Path,
):
    """The answer ahead of them is so long that it cannot end before them."""
    late, wrong = {"X-Slotkeeper-Max-Wait": "0.3"}, {"X-Slotkeeper-Priority": "urgent"}
    async with AsyncExitStack() as stack:
        scene = await opened(stack, tmp_path)
        ahead = {"prompt": prose(1000, 1), "n_predict": 30_000, "ignore_eos": True, "stream": True}
        async with scene.client.stream("POST", "/completion", json=ahead) as answer:
            events = answer.aiter_bytes()
            await anext(events)  # its prompt is computed
            before = await scene.computed()
            openai = await scene.ask("A question that comes too late.", late)
            body = {"max_tokens": 8, "messages": [{"role": "user", "content": "Another one."}]}
            anthropic = await scene.client.post("/v1/messages", json=body, headers=late)
            unread = await scene.ask("Why?", wrong)
            too = await scene.client.post("/v1/messages", json=body, headers=wrong)
            assert await scene.computed() == before
        for refused in (openai, anthropic):
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
        assert "X-Slotkeeper-Max-Wait" in openai.json()["error"]["message"]
        assert anthropic.json()["type"] == "error"
        assert anthropic.json()["error"]["type"] == "overloaded_error"
        assert acts(scene.sidecar)[PriorityAct.EXPIRED] == 2
        assert (unread.status_code, too.status_code) == (400, 400)
        assert "high, normal or low" in unread.json()["error"]["message"]
        assert too.json()["error"]["type"] == "invalid_request_error"

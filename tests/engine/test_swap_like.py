"""The stand-in for llama-swap answers as the program does; skipped where the program is not on PATH."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
from benchmarks.routers import PROGRAM

from engine.swappers import STAND_IN, gateway, wanted
from patience import PATIENCE

CHAT: Final = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
FILE: Final = {"file": ("a.wav", b"RIFF")}
REQUESTS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("GET", "/health", {}),
    ("GET", "/running", {}),
    ("GET", "/v1/models", {}),
    ("GET", "/models", {}),
    ("GET", "/props", {}),
    ("GET", "/slots", {}),
    ("POST", "/unload", {}),
    ("POST", "/tokenize", {"json": {"model": "coder"}}),
    ("POST", "/v1/chat/completions", {"json": CHAT}),
    ("POST", "/v1/chat/completions", {"json": {**CHAT, "model": "zzz"}}),
    ("POST", "/v1/chat/completions", {"content": b"no json"}),
    ("POST", "/v/chat/completions", {"json": {**CHAT, "model": "zzz"}}),
    ("POST", "/v/chat/completions", {"json": CHAT}),
    ("POST", "/v1/audio/transcriptions", {"data": {"model": "zzz"}, "files": FILE}),
    ("POST", "/v1/images/edits", {"files": FILE}),
    ("GET", "/models?reload=1", {}),
    ("GET", "/upstream/zzz/health", {}),
    ("GET", "/upstream/broken/health", {}),
    ("GET", "/upstream/coder/health", {}),
    ("GET", "/running", {}),
    ("GET", "/v1/models", {}),
    ("POST", "/v1/audio/transcriptions", {"data": {"model": "coder"}, "files": FILE}),
    ("POST", "/v1/images/edits", {"data": {"model": "gpt-x"}, "files": FILE}),
    ("POST", "/v/messages", {"json": {**CHAT, "model": "coder"}}),
    ("POST", "/api/models/unload/zzz", {}),
    ("POST", "/api/models/unload/gpt-x", {}),
    ("POST", "/api/models/unload/", {}),
    ("POST", "/api/models/unload", {}),
    ("GET", "/unload", {}),
    ("GET", "/running", {}),
)
CHANGING: Final = frozenset({"created", "cmd", "proxy"})


def plain(said: Any) -> Any:
    """Return a JSON value without what differs between two runs, or between sorted and unsorted fields."""
    if isinstance(said, dict):
        return {name: plain(value) for name, value in sorted(said.items()) if name not in CHANGING}
    return [plain(value) for value in said] if isinstance(said, list) else said


async def answers(client: httpx.AsyncClient) -> list[Any]:
    found = []
    for method, path, more in REQUESTS:
        answer = await client.request(method, path, **more)
        kind = answer.headers["Content-Type"].partition(";")[0]
        said = plain(answer.json()) if kind == "application/json" else answer.text
        found.append((method, path, answer.status_code, kind, said))
    return found


async def _data(stream: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in stream.aiter_lines():
        if line.startswith("data:"):
            yield orjson.loads(line[5:])


async def events(client: httpx.AsyncClient) -> list[Any]:
    """Return the kinds of the first events, and each model's states while coder and writer are loaded."""
    first, states = list[str](), set[tuple[str, str]]()
    async with client.stream("GET", "/api/events") as stream:
        said = _data(stream)
        async for event in said:
            if event["type"] not in first:
                first.append(event["type"])
            if event["type"] == "inflight":
                break

        async def load() -> None:
            for model in ("coder", "writer"):
                await client.get(f"/upstream/{model}/health")

        async with asyncio.TaskGroup() as group:
            group.create_task(load())
            async for event in said:
                if event["type"] != "modelStatus":
                    continue
                found = {one["id"]: one["state"] for one in orjson.loads(event["data"])}
                states |= found.items()
                if found["writer"] == "ready":
                    break
    return [first, states]


async def unloaded_while_it_loads(client: httpx.AsyncClient) -> Any:
    """Return the answer to a load whose model is unloaded meanwhile; one that was too fast is tried again."""
    answer = None
    while answer is None or answer.status_code == 200:
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(client.get("/upstream/coder/health"))
            while not (await client.get("/running")).json()["running"]:
                await asyncio.sleep(0.01)
            await client.post("/api/models/unload/coder")
        answer = loading.result()
    return answer.status_code, answer.json()


async def cut_stream(client: httpx.AsyncClient) -> Any:
    """Return whether an answer whose model is unloaded has its last event. Its connection does not break."""
    body = {**CHAT, "model": "coder", "stream": True, "ignore_eos": True, "max_tokens": 8000}
    async with (
        client.stream("POST", "/v1/chat/completions", json=body) as stream,
        asyncio.TaskGroup() as group,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        group.create_task(client.post("/api/models/unload/coder"))
        rest = [line async for line in lines if line]  # raises if the connection breaks
    return rest[-1] == "data: [DONE]"


async def test_the_stand_in_answers_as_the_program_does(build: str, tmp_path: Path) -> None:
    wanted(PROGRAM)
    found = {}
    for kind in (STAND_IN, PROGRAM):
        folder = tmp_path / kind
        folder.mkdir()
        (broken := folder / "broken.gguf").write_bytes(b"no model")
        async with (
            gateway(kind, build, folder, broken=broken) as there,
            httpx.AsyncClient(base_url=there.base, timeout=PATIENCE) as client,
        ):
            found[kind] = [
                *await answers(client),
                *await events(client),
                await unloaded_while_it_loads(client),
                await cut_stream(client),
            ]
    assert found[STAND_IN] == found[PROGRAM]

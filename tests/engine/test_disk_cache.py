"""An engine that reports a disk cache; no released build has one.

The cache is the RAM cache of a real engine, which keeps its entries as long as the engine runs. Only `/props`
differs: a server between sidecar and engine adds the field.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import pytest
from aiohttp import ClientSession, TCPConnector, web
from rich.console import Console

from engine.conftest import SAME_IN_ANY_BATCH, probed
from patience import PATIENCE
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import url_of
from slotkeeper.cli.doctor import doctor
from slotkeeper.settings import Settings
from slotkeeper.store.files import SLOT

FIELD: Final = {"disk_cache": {"enabled": True, "path": "/var/cache/prompts"}}
PASSED: Final = {"Content-Type", "Server"}  # headers of an answer that are forwarded
STORY: Final = "The heron stood in the reeds and counted the frogs of the pond, {} by {}. "


@asynccontextmanager
async def answers_like(engine: Any, field: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the URL of a server that forwards all requests to the engine and adds `field` to its /props."""
    # The engine closes connections that it promised to keep, so each request has its own.
    async with ClientSession(engine.base, connector=TCPConnector(force_close=True)) as there:

        async def passed(request: web.Request) -> web.StreamResponse:
            body, kept = await request.read(), {"Content-Type": request.headers.get("Content-Type", "")}
            async with there.request(request.method, request.path_qs, data=body, headers=kept) as answer:
                if request.path == "/props":
                    return web.json_response(await answer.json() | field)
                heads = {name: value for name, value in answer.headers.items() if name in PASSED}
                response = web.StreamResponse(status=answer.status, headers=heads)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", passed)
        runner = web.AppRunner(app)
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        server = site._server
        assert isinstance(server, asyncio.Server)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            await runner.cleanup()


def settings(upstream: str, engine: Any) -> Settings:
    at: dict[str, Any] = {"upstream": (upstream,), "listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"}
    return lab.settings_of(**(at | {"slot_dir": engine.slot_dir, "read_flags": False, "save_pause": 0.2}))


def story(about: str) -> str:
    return "".join(STORY.format(about, n) for n in range(20))


async def talked(at: httpx.AsyncClient, turns: int) -> list[tuple[int, str]]:
    """Alternate three conversations on two slots. Return the tokens reused and the text of each answer."""
    texts = {who: story(who) for who in ("anna", "berta", "carl")}
    found = []
    for turn in range(turns):
        for who, text in texts.items():
            body = {"prompt": text, "n_predict": 4, "temperature": 0}
            answer = (await at.post("/completion", json=body)).json()
            found.append((answer["timings"]["cache_n"], answer["content"]))
            texts[who] = text + STORY.format(who, 100 + turn)
    return found


async def rested(sidecar: Sidecar) -> None:
    """Wait until all that is to be saved is saved, and then until no work has run for several pauses."""
    await lab.rested(sidecar)
    placement, quiet = sidecar.driver.placement, 0
    async with asyncio.timeout(PATIENCE):
        while quiet < 10:
            await asyncio.sleep(0.1)
            state = placement._state
            quiet = 0 if placement.serving or state.chores or state.coming else quiet + 1


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-hybrid"])
async def test_conversations_that_the_engine_keeps_on_disk_are_not_saved(engine_factory, build, model):
    written, reused, said = {}, {}, {}
    for name, field in (("disk", FIELD), ("stock", {})):
        engine = engine_factory(model, build, args=SAME_IN_ANY_BATCH)
        async with answers_like(engine, field) as upstream:
            async with probed(settings(upstream, engine)) as sidecar:
                async with httpx.AsyncClient(base_url=url_of(sidecar), timeout=PATIENCE) as at:
                    found = await talked(at, 4)
                await rested(sidecar)
                written[name] = len(list(engine.slot_dir.glob(f"*{SLOT}")))
                traits = next(iter(sidecar.driver.placement.tables.values())).traits
        reused[name], said[name] = sum(cached for cached, _ in found), [text for _, text in found]
        assert traits.disk_cache == ("props" if field else "")
    # Where files can only be extended, slots are cut back for them. No engine with a disk cache is so old.
    assert written["disk"] == 0 or traits.files_only_extend
    assert written["stock"] > 0
    assert said["disk"] == said["stock"]
    assert reused["disk"] >= 0.9 * reused["stock"]


async def test_doctor_reports_the_disk_cache(engine_factory, build):
    engine = engine_factory("tiny-dense", build)
    for field, there in ((FIELD, True), ({}, False)):
        out = io.StringIO()
        async with answers_like(engine, field) as upstream:
            await doctor(upstream, None, Console(file=out, width=400))
        assert ("keeps prompts on disk itself (seen in its props)" in out.getvalue()) is there

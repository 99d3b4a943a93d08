"""Each state of an engine and of a request, on real engines: top, page, API, metrics, alerts, log agree."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from grafana.rules import ALERTS
from playwright.async_api import Browser, expect
from rich.console import Console
from structlog.testing import capture_logs

from dashboard.reading import PHONE, Reader, admin_of, reading
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny
from slotkeeper.cli.top import top
from slotkeeper.engine.launch import EngineKind, free_port
from slotkeeper.observe.states import ENGINE_TEXTS, EngineState, Service, service_text
from slotkeeper.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Final = "/v1/chat/completions"
FITS: Final = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
Document = dict[str, Any]
Engine = lab.Restartable


@dataclass(frozen=True)
class Scene:
    """How to bring an engine into a state, and what is said then."""

    state: EngineState
    service: Service
    alert: str | None  # the alert that fires if it lasts
    args: tuple[str, ...] = ()  # of the engine
    wait: float = 60.0  # --engine-wait
    happens: Callable[[Engine, Sidecar], Awaitable[None]] | None = None  # once the sidecar runs
    probed: bool = True  # whether the sidecar can probe the engine at first


async def killed(engine: Engine, _: Sidecar) -> None:
    engine.kill()


async def frozen(engine: Engine, sidecar: Sidecar) -> None:
    assert engine.process.pid is not None
    (link,) = sidecar.driver.links.values()
    link.frozen_after = 0.2
    os.kill(engine.process.pid, signal.SIGSTOP)


async def drained(_: Engine, sidecar: Sidecar) -> None:
    (link,) = sidecar.driver.links.values()
    sidecar.driver.membership.drain(link, drain=True)


DOWN: Final = "SlotkeeperEngineDown"
UNKNOWN: Final = "SlotkeeperSlotsUnknown"
SCENES: Final = {
    "up": Scene(EngineState.UP, Service.PLACED, None),
    "without_slots": Scene(EngineState.NO_SLOTS, Service.PASSED, UNKNOWN, ("--no-slots",), probed=False),
    "with_a_key": Scene(
        EngineState.KEY_REFUSED, Service.PASSED, UNKNOWN, ("--api-key", "right"), probed=False
    ),
    "asleep": Scene(EngineState.SLEEPING, Service.WAKES, None, ("--sleep-idle-seconds", "1")),
    "frozen": Scene(EngineState.FROZEN, Service.FAILS, DOWN, happens=frozen),
    "killed_and_awaited": Scene(EngineState.AWAITED, Service.WAITS, DOWN, happens=killed),
    "killed": Scene(EngineState.DOWN, Service.FAILS, DOWN, wait=0.0, happens=killed),
    "drained": Scene(EngineState.DRAINED, Service.HELD, None, happens=drained),
}


async def state_of(sidecar: Sidecar) -> Document:
    async with aiohttp.ClientSession() as admin, admin.get(f"{admin_of(sidecar)}/api/state") as answer:
        return dict(await answer.json())


async def until(sidecar: Sidecar, so: Callable[[Document], bool]) -> Document:
    """Return /api/state once it is so."""
    async with asyncio.timeout(PATIENCE):
        while not so(found := await state_of(sidecar)):
            await asyncio.sleep(0.05)
    return found


async def top_of(sidecar: Sidecar) -> str:
    """Return what `slotkeeper top --once` prints, with single spaces."""
    out = io.StringIO()
    assert (
        await top(Console(file=out, width=200), admin=admin_of(sidecar), token=None, every=1, once=True) == 0
    )
    return " ".join(out.getvalue().split())


def alerts_of(state: EngineState) -> list[str]:
    """Return the alerts that watch this state of an engine."""
    watched = {one.name: re.search(r'engine_state\{state=~?"([^"]+)"', one.measure) for one in ALERTS}
    return [name for name, found in watched.items() if found and state.value in found[1].split("|")]


def measured(sidecar: Sidecar, engine: str) -> list[str]:
    """Return the states that the metric shows for the engine."""
    value = sidecar.metrics.registry.get_sample_value
    return [s.value for s in EngineState if value("slotkeeper_engine_state", {"engine": engine, "state": s})]


async def shown(looker: Reader, scene: Scene, name: str) -> None:
    """Check the page, and take pictures of it: light, dark, and on a phone."""
    page, text = looker.page, service_text(scene.service, scene.wait)
    await page.goto(looker.base)
    await expect(page.locator(".engine h3 .state").first).to_have_text(scene.state.value.replace("_", " "))
    await expect(looker.connection).to_have_attribute("data-service", scene.service.value)
    alarms = page.locator("#alarms")
    for said in (ENGINE_TEXTS[scene.state] if scene.service is not Service.HELD else "", text):
        if said and scene.state is not EngineState.UP:
            await expect(alarms).to_contain_text(said)
    if scene.state is EngineState.UP:
        await expect(alarms.locator("li")).to_have_count(0)
    await looker.shoot(f"state-{name}")
    await page.emulate_media(color_scheme="dark")
    await looker.shoot(f"state-{name}-dark")
    await page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
    assert await page.evaluate(FITS)
    await looker.shoot(f"state-{name}-phone")


@asynccontextmanager
async def watched(engine: Engine, scene: Scene) -> AsyncIterator[Sidecar]:
    settings = Settings(
        upstream=(engine.base,),
        listen=lab.ANY_PORT,
        admin_listen=lab.ANY_PORT,
        engine_wait=scene.wait,
        drain_delay=0,
        drain_timeout=0,
        read_flags=False,
    )
    async with running(settings) as sidecar:
        if scene.probed:
            await lab.ready(sidecar)
        yield sidecar


@pytest.mark.parametrize("name", SCENES)
async def test_every_view_says_the_same_of_an_engine(browser: Browser, tmp_path: Path, name: str):
    scene = SCENES[name]
    async with lab.tiny_engine(Tiny.HYBRID, EngineKind.XLLAMACPP, tmp_path, *scene.args) as engine:
        with capture_logs() as lines:
            async with watched(engine, scene) as sidecar:
                if scene.happens:
                    await scene.happens(engine, sidecar)
                found = await until(sidecar, lambda seen: seen["engines"][0]["state"] == scene.state)
                assert found["engines"][0]["state_text"] == ENGINE_TEXTS[scene.state]
                said = service_text(scene.service, scene.wait)
                assert found["service"] == {"state": scene.service.value, "text": said}
                assert measured(sidecar, engine.base) == [scene.state.value]
                assert alerts_of(scene.state) == [scene.alert] * bool(scene.alert)
                screen = await top_of(sidecar)
                assert said in screen
                assert scene.state is EngineState.UP or scene.state.value.replace("_", " ") in screen
                async with reading(browser, admin_of(sidecar)) as looker:
                    await shown(looker, scene, name)
                if scene.state is EngineState.FROZEN and engine.process.pid:
                    os.kill(engine.process.pid, signal.SIGCONT)
    logged = [line["state"] for line in lines if line["event"] == "engine_state"]
    if scene.service is not Service.HELD:  # `engine_draining` and `engine_drained` are logged
        assert scene.state.value in logged


async def test_an_engine_that_was_never_there_is_down(browser: Browser):
    scene, absent = SCENES["killed"], f"http://127.0.0.1:{free_port()}"
    settings = Settings(upstream=(absent,), listen=lab.ANY_PORT, admin_listen=lab.ANY_PORT)
    async with running(settings) as sidecar, reading(browser, admin_of(sidecar)) as looker:
        await shown(looker, scene, "absent")
        assert measured(sidecar, absent) == [EngineState.DOWN.value]
        assert service_text(Service.FAILS, 0) in await top_of(sidecar)


# -- requests ----------------------------------------------------------------------------------------------


def said(words: str, **more: Any) -> Document:
    return {"messages": [{"role": "user", "content": words}], "temperature": 0, "max_tokens": 8, **more}


async def ask(client: aiohttp.ClientSession, request_id: str, body: Document) -> None:
    async with client.post(CHAT, json=body, headers={"X-Request-Id": request_id}) as answer:
        await answer.read()


async def test_every_view_says_the_same_of_a_request(browser: Browser, tmp_path: Path):
    """Two requests that do not end are at work in the two slots, and a third one waits for them."""
    endless = said("A ship", max_tokens=50_000, ignore_eos=True, stream=True)
    async with (
        lab.tiny_engine(Tiny.HYBRID, EngineKind.XLLAMACPP, tmp_path, context_tokens=65536) as engine,
        lab.keeping(engine, drain_timeout=0) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar), timeout=aiohttp.ClientTimeout(None)) as client,
        reading(browser, admin_of(sidecar)) as looker,
    ):
        begun = [
            asyncio.get_running_loop().create_task(ask(client, f"endless-{n}", endless)) for n in range(2)
        ]
        try:
            seen = await until(
                sidecar, lambda it: [r["now"]["doing"] for r in it["running"]] == ["generating"] * 2
            )
            assert {one["slot"] for one in seen["running"]} == {0, 1}, "a running request has its slot"
            for slot in seen["engines"][0]["slots"]:
                holder = next(one for one in seen["running"] if one["slot"] == slot["slot"])
                assert slot["request"] == holder["id"], "and its slot has its name"
            assert (await top_of(sidecar)).count("answering") >= 2
            begun.append(
                asyncio.get_running_loop().create_task(ask(client, "third-in-line", said("Good day")))
            )
            seen = await until(sidecar, lambda it: it["queued"] == 1)
            now = seen["running"][0]["now"]
            assert (now["doing"], now["wait"], now["place"]) == ("queued", "slots", 1)
            assert sorted(now["behind"]) == ["endless-0", "endless-1"]
            text = now["text"]
            assert re.fullmatch(r"queued, place 1: all slots are busy \(ndless-\d, ndless-\d\)", text)
            assert text in await top_of(sidecar)
            await looker.page.goto(looker.base)
            await expect(looker.page.locator("#running")).to_contain_text(text)
            await looker.shoot("state-queue", full_page=True)
        finally:
            for one in begun[:2]:
                one.cancel()
        await begun[2]
        verdict = await _why(sidecar, "third-in-line")
        assert verdict["stages"]["queue"] > 0


async def _why(sidecar: Sidecar, id_: str) -> Document:
    async with (
        aiohttp.ClientSession() as admin,
        admin.get(f"{admin_of(sidecar)}/api/requests/{id_}") as answer,
    ):
        return dict(await answer.json())

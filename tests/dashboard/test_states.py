"""Each state of an engine and of a request, on real engines: top, page, API, metrics, alerts, log agree."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from grafana.rules import ALERTS
from playwright.async_api import Browser, expect
from rich.console import Console
from structlog.testing import capture_logs
from yarl import URL

from dashboard.reading import PHONE, Reader, admin_of, reading
from engine.conftest import wait_until
from engine.under_up import QUIET, Up
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import Tiny, build
from slotkeeper.bench.texts import prose
from slotkeeper.cli.top import top
from slotkeeper.engine.child.launch import EngineKind, find_engine, free_port
from slotkeeper.observe.request_record import Record, RequestStage
from slotkeeper.observe.states import (
    ENGINE_TEXTS,
    SPENT_NAMES,
    STEP_TEXTS,
    Doing,
    EngineState,
    Service,
    Spent,
    service_text,
)

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
    wait: float = 5 * PATIENCE  # --engine-wait: longer than all looks take
    happens: Callable[[Engine, Sidecar], Awaitable[None]] | None = None  # once the sidecar runs
    probed: bool = True  # whether the sidecar can probe the engine at first
    loads: bool = False  # whether it loads its model for as long as the test runs


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
    "loading": Scene(EngineState.LOADING, Service.WAITS, None, probed=False, loads=True),
    "asleep": Scene(EngineState.SLEEPING, Service.WAKES, None, ("--sleep-idle-seconds", "1")),
    "frozen": Scene(EngineState.FROZEN, Service.FAILS, DOWN, happens=frozen),
    "killed_and_awaited": Scene(EngineState.AWAITED, Service.WAITS, DOWN, happens=killed),
    "killed": Scene(EngineState.DOWN, Service.FAILS, DOWN, wait=0.0, happens=killed),
    "drained": Scene(EngineState.DRAINED, Service.HELD, None, happens=drained),
}


async def until(admin: str, so: Callable[[Document], bool]) -> Document:
    """Return /api/state of the admin port once it is so."""
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{admin}/api/state") as answer:
                if so(found := dict(await answer.json())):
                    return found
            await asyncio.sleep(0.05)


async def scraped(admin: str) -> list[str]:
    """Return the lines of /metrics."""
    async with aiohttp.ClientSession() as client, client.get(f"{admin}/metrics") as answer:
        return (await answer.text()).splitlines()


async def top_of(admin: str) -> str:
    """Return what `slotkeeper top --once` prints, with single spaces."""
    out = io.StringIO()
    assert await top(Console(file=out, width=200), admin=admin, token=None, every=1, once=True) == 0
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
    await page.set_viewport_size(PHONE)
    assert await page.evaluate(FITS)
    await looker.shoot(f"state-{name}-phone")


@asynccontextmanager
async def engine_of(scene: Scene, folder: Path) -> AsyncIterator[Engine]:
    if not scene.loads:
        async with lab.tiny_engine(Tiny.HYBRID, EngineKind.XLLAMACPP, folder, *scene.args) as engine:
            yield engine
        return
    model, binary = folder / "endless.gguf", find_engine(EngineKind.XLLAMACPP)
    os.mkfifo(model)  # the engine waits until someone writes there, and says that it loads its model
    engine = lab.Restartable(binary, lab.stock_flags(binary, model, folder), folder / "engine.log")
    engine.process.start()
    try:
        yield engine
    finally:
        engine.kill()
        await engine.process.stop()


@asynccontextmanager
async def watched(engine: Engine, scene: Scene) -> AsyncIterator[Sidecar]:
    settings = lab.settings_of(
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
    async with engine_of(scene, tmp_path) as engine:
        with capture_logs() as lines:
            async with watched(engine, scene) as sidecar:
                if scene.happens:
                    await scene.happens(engine, sidecar)
                admin = admin_of(sidecar)
                found = await until(admin, lambda seen: seen["engines"][0]["state"] == scene.state)
                assert found["engines"][0]["state_text"] == ENGINE_TEXTS[scene.state]
                said = service_text(scene.service, scene.wait)
                assert found["service"] == {"state": scene.service.value, "text": said}
                assert measured(sidecar, engine.base) == [scene.state.value]
                assert alerts_of(scene.state) == [scene.alert] * bool(scene.alert)
                screen = await top_of(admin)
                assert said in screen
                assert scene.state is EngineState.UP or scene.state.value.replace("_", " ") in screen
                async with reading(browser, admin) as looker:
                    await shown(looker, scene, name)
                if scene.state is EngineState.FROZEN and engine.process.pid:
                    os.kill(engine.process.pid, signal.SIGCONT)
    logged = [line["state"] for line in lines if line["event"] == "engine_state"]
    if scene.service is not Service.HELD:  # `engine_draining` and `engine_drained` are logged
        assert scene.state.value in logged


async def test_an_engine_that_was_never_there_is_down(browser: Browser):
    scene, absent = SCENES["killed"], f"http://127.0.0.1:{free_port()}"
    settings = lab.settings_of(upstream=(absent,), listen=lab.ANY_PORT, admin_listen=lab.ANY_PORT)
    async with running(settings) as sidecar, reading(browser, admin_of(sidecar)) as looker:
        await shown(looker, scene, "absent")
        await expect(looker.page.locator("#alarms")).to_contain_text(f"{absent} does not answer, for ")
        assert measured(sidecar, absent) == [EngineState.DOWN.value]
        assert service_text(Service.FAILS, 0) in await top_of(admin_of(sidecar))


def listens(url: str) -> bool:
    """Whether connections to this address are accepted, by a stopped process too."""
    with socket.socket() as probe:
        probe.settimeout(PATIENCE)
        return probe.connect_ex((URL(url).host, URL(url).port)) == 0


async def test_an_engine_that_up_starts_again_is_awaited(browser: Browser, tmp_path: Path):
    """The next engine is stopped as soon as it is started, so that it is awaited for long enough to look."""
    model = str(build(Tiny.HYBRID))
    words = [sys.executable, "-m", "slotkeeper", "up", "--engine", EngineKind.XLLAMACPP, "--model", model]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLOTKEEPER_")}
    environ = {**kept, "XDG_STATE_HOME": str(tmp_path / "state")}
    scene, engines = SCENES["killed_and_awaited"], set[int]()
    waits = ("--engine-wait", str(scene.wait))
    running = Up([*words, *QUIET, *waits, "--", "-t", "1"], tmp_path / "up.log", environ)
    try:
        await asyncio.to_thread(wait_until, running.ready)
        admin = running.url("admin")
        engine = (await until(admin, bool))["engines"][0]["engine"]
        while True:
            engines.add(first := running.engine or 0)
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: running.engine not in {None, *engines})
            engines.add(second := running.engine or 0)
            os.kill(second, signal.SIGSTOP)
            if not listens(engine):
                break  # else it was stopped too late, and is silent
        found = await until(admin, lambda seen: seen["engines"][0]["state"] == scene.state)
        text = service_text(scene.service, scene.wait)
        assert found["service"] == {"state": scene.service, "text": text}
        screen = await top_of(admin)
        assert text in screen
        assert ENGINE_TEXTS[scene.state] in screen
        series = f'slotkeeper_engine_state{{engine="{engine}",state="awaited"}} 1.0'
        assert series in await scraped(admin)
        async with reading(browser, admin) as looker:
            await shown(looker, scene, "restarting")
        os.kill(second, signal.SIGCONT)
        await until(admin, lambda seen: seen["engines"][0]["state"] == EngineState.UP)
        logged = [line["state"] for line in running.lines("engine_state")]
        assert logged[-1] == EngineState.UP
        assert EngineState.AWAITED in logged
    finally:
        running.process.kill()
        running.process.wait()
        for pid in engines:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# -- requests ----------------------------------------------------------------------------------------------


def said(words: str, **more: Any) -> Document:
    return {"messages": [{"role": "user", "content": words}], "temperature": 0, "max_tokens": 8, **more}


async def ask(client: aiohttp.ClientSession, request_id: str, body: Document) -> None:
    async with client.post(CHAT, json=body, headers={"X-Request-Id": request_id}) as answer:
        await answer.read()


@dataclass(frozen=True)
class Held:
    """A stage in which a request is held, because its engine is stopped there, and what is said then."""

    stage: Spent
    doing: Doing
    text: str  # how it begins
    after: str  # what `why` says of it when the request has ended
    now: Callable[[Record], bool]  # whether the request has got there
    head: int  # characters of the system text
    tail: int  # characters behind it: what is computed in this stage takes seconds
    model: Tiny = Tiny.HYBRID


HELD: Final = {
    "plant": Held(
        Spent.PREPARE,
        Doing.PREPARING,
        STEP_TEXTS["plant"],
        "preparing its slot",
        lambda record: (
            record.doing is RequestStage.PLANT and record.work is not None and record.work.planting > 0
        ),
        head=24_000,
        tail=3000,
    ),
    "restore": Held(
        Spent.RESTORE,
        Doing.PREPARING,
        STEP_TEXTS["restore"],
        "restoring a snapshot",
        lambda record: record.doing is RequestStage.RESTORE,
        head=6000,
        tail=3000,
    ),
    "prefill": Held(
        Spent.PREFILL,
        Doing.PREFILL,
        "prefill",
        "in prefill",
        lambda record: (
            record.first_token is None and record.work is not None and record.work.progress is not None
        ),
        head=3000,
        tail=36_000,
        model=Tiny.DENSE,  # of a hybrid model nearly all may be computed before, for checkpoints
    ),
}


def long_chat(number: int, held: Held) -> Document:
    """Return a chat with its own system text; its stream reports progress."""
    system = {"role": "system", "content": f"System {number}. {prose(held.head, 10 + number)}"}
    body = said(prose(held.tail, 20 + number), stream=True)
    return body | {"messages": [system, *body["messages"]]}


async def stopped(engine: Engine, sidecar: Sidecar, so: Callable[[Record], bool]) -> None:
    """Stop the engine as soon as a request is so. It looks at every turn of the event loop."""
    (link,) = sidecar.driver.links.values()
    link.frozen_after = 10 * PATIENCE  # it shall not count as lost meanwhile
    async with asyncio.timeout(PATIENCE):
        while not any(map(so, sidecar.driver.journal.running())):
            await asyncio.sleep(0)
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("name", HELD)
async def test_every_view_says_the_same_of_a_request_that_takes_long(
    browser: Browser, tmp_path: Path, name: str
):
    """The engine computes for seconds: it is stopped meanwhile, and goes on later."""
    held, flags = HELD[name], partial(lab.up_flags, slots=1)
    often = ("-b", "128", "-ub", "128")  # it reports progress after each batch
    away = ("--cache-ram", "0") if name == "restore" else ()  # a tiny state may come from there sooner
    async with (
        lab.tiny_engine(
            held.model,
            EngineKind.XLLAMACPP,
            tmp_path,
            *often,
            *away,
            context_tokens=16384,
            recipe=flags,
        ) as engine,
        lab.in_front_of(
            engine.base, engine.flags, slot_dir=engine.flags.slot_save_path, save_pause=0.05
        ) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar), timeout=aiohttp.ClientTimeout(None)) as client,
        reading(browser, admin_of(sidecar)) as looker,
    ):
        admin = admin_of(sidecar)
        if name == "restore":
            for number in (0, 1):
                await ask(client, f"before-{number}", long_chat(number, held))
                await lab.rested(sidecar)
        task = asyncio.get_running_loop().create_task(ask(client, "takes-long", long_chat(0, held)))
        try:
            await stopped(engine, sidecar, held.now)
            name_of_stage = SPENT_NAMES[held.stage]
            seen = await until(
                admin, lambda it: any(name_of_stage in one["stages_text"] for one in it["running"])
            )
            (one,) = seen["running"]
            assert (one["stage"], one["now"]["doing"]) == (held.stage, held.doing)
            assert one["now"]["text"].startswith(held.text)
            assert (one["now"]["percent"] is not None) == (name != "restore")
            assert SPENT_NAMES[held.stage] in one["stages_text"]
            screen = await top_of(admin)
            begun = re.split(r",| \d+ %", one["now"]["text"])[0]
            assert begun in screen
            assert name_of_stage in screen
            await looker.page.goto(looker.base)
            for card in ("#running", "#slow"):
                await expect(looker.page.locator(card)).to_contain_text(begun)
            await expect(looker.page.locator("#slow")).to_contain_text(f"{name_of_stage} ")
            await looker.shoot(f"state-{name}", full_page=True)
        finally:
            if engine.process.pid:
                os.kill(engine.process.pid, signal.SIGCONT)
        await task
        verdict = await _why(sidecar, "takes-long")
        assert held.after in " ".join(verdict["explanation"])
        spent = verdict["stages"][held.stage]
        assert spent >= one["stages"][held.stage], "its time counts there, in why and in the metric"
        summed = sidecar.metrics.registry.get_sample_value(
            "slotkeeper_stage_seconds_sum", {"stage": held.stage}
        )
        assert summed is not None
        assert summed >= spent - 1e-5
        assert verdict["stages"]["queue"] < spent, "SlotkeeperQueueLong does not count it"


async def test_every_view_says_the_same_of_a_request(browser: Browser, tmp_path: Path):
    """Two requests that do not end are at work in the two slots, and two others wait for them."""
    endless = said("A ship", max_tokens=60_000, ignore_eos=True, stream=True)
    async with (
        lab.tiny_engine(Tiny.HYBRID, EngineKind.XLLAMACPP, tmp_path, context_tokens=65536) as engine,
        lab.keeping(engine, drain_timeout=0) as sidecar,
        aiohttp.ClientSession(lab.url_of(sidecar), timeout=aiohttp.ClientTimeout(None)) as client,
        reading(browser, admin_of(sidecar)) as looker,
    ):
        admin = admin_of(sidecar)
        begun = [
            asyncio.get_running_loop().create_task(ask(client, f"endless-{n}", endless)) for n in range(2)
        ]
        try:
            seen = await until(
                admin, lambda it: [r["now"]["doing"] for r in it["running"]] == ["generating"] * 2
            )
            assert {one["slot"] for one in seen["running"]} == {0, 1}, "a running request has its slot"
            for slot in seen["engines"][0]["slots"]:
                holder = next(one for one in seen["running"] if one["slot"] == slot["slot"])
                assert slot["request"] == holder["id"], "and its slot has its name"
            assert (await top_of(admin)).count("answering") >= 2
            for name in ("third-in-line", "fourth-in-line"):
                begun.append(asyncio.get_running_loop().create_task(ask(client, name, said("Good day"))))
                seen = await until(  # it may wait for something else first
                    admin,
                    lambda it: (
                        it["queued"] == len(begun) - 2 and it["running"][0]["now"].get("wait") == "slots"
                    ),
                )
            now = seen["running"][0]["now"]
            assert (now["doing"], now["wait"], now["place"]) == ("queued", "slots", 1)
            assert sorted(now["behind"]) == ["endless-0", "endless-1"]
            text = now["text"]
            assert re.fullmatch(r"queued, place 1: all slots are busy \(ndless-\d, ndless-\d\)", text)
            assert text in await top_of(admin)
            await looker.page.goto(looker.base)
            rows = looker.page.locator("#running li")
            await expect(rows.filter(has_text=text)).to_have_count(1)
            await expect(rows.filter(has_text="queued, place 2: all slots are busy (")).to_have_count(1)
            await looker.shoot("state-queue", full_page=True)
        finally:
            for one in begun[:2]:
                one.cancel()
        await asyncio.gather(*begun[2:])
        await expect(looker.page.get_by_role("region", name="Running now")).not_to_be_visible()
        assert looker.complaints == []
        verdict = await _why(sidecar, "third-in-line")
        assert verdict["stages"]["queue"] > 0
        (waited,) = (each for each in verdict["queued"] if each["wait"] == "slots")
        assert sorted(waited["behind"]) == ["endless-0", "endless-1"], "known after its end, too"
        assert f"In the queue: {waited['text']}" in " ".join(verdict["explanation"])


async def _why(sidecar: Sidecar, id_: str) -> Document:
    async with (
        aiohttp.ClientSession() as admin,
        admin.get(f"{admin_of(sidecar)}/api/requests/{id_}") as answer,
    ):
        return dict(await answer.json())

"""Names of clients on the page, running requests, and the page when there is nothing to show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from benchmarks.routers import Talk, fresh_client, router
from playwright.async_api import Browser, Route, expect

from builds import needs_b10434
from dashboard.reading import DESK, PHONE, admin_of, reading
from dashboard.traffic import ask
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPENCODE = {"User-Agent": "opencode/1.18.33", "Authorization": "Bearer secret-of-anna"}
FITS = "document.documentElement.scrollWidth <= window.innerWidth"


async def test_the_first_words_of_a_task_name_its_lane_slot_and_requests(
    browser: Browser, engine: Restartable
):
    async with lab.in_front_of(engine.base, engine.flags, why_text=True) as sidecar:
        await ask(lab.url_of(sidecar), "Sort the harbour's ships by age", headers=OPENCODE)
        async with reading(browser, admin_of(sidecar)) as looker:
            await looker.open()
            name = "opencode #1: Sort the harbour's ships by age"
            for place in (".lanes .name", "#requests td[data-name=Conversation]", ".slot .holds"):
                await expect(looker.page.locator(place).filter(has_text=name).first).to_be_attached()
            assert looker.complaints == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_clients(engine: Restartable) -> AsyncIterator[Sidecar]:
    """Run a sidecar that keeps no text of prompts, and was asked twice by one client, once by another."""
    async with lab.in_front_of(engine.base, engine.flags) as sidecar:
        for headers in (OPENCODE, OPENCODE, {"User-Agent": "curl/8.5.0"}):
            await ask(lab.url_of(sidecar), "Sort the harbour's ships by age", headers=headers)
        yield sidecar


async def test_without_why_text_a_conversation_is_named_by_number_and_age(
    browser: Browser, two_clients: Sidecar
):
    async with reading(browser, admin_of(two_clients)) as looker:
        await looker.open()
        lanes = looker.page.locator(".lanes .name > :first-child")
        await expect(lanes.filter(has_text="opencode #1, ")).to_have_count(1)
        await expect(looker.page.locator("body")).not_to_contain_text("harbour")


async def test_each_client_has_a_row_and_its_key_is_not_shown(browser: Browser, two_clients: Sidecar):
    async with reading(browser, admin_of(two_clients)) as looker:
        await looker.open()
        rows = looker.page.locator("#clients tr")
        await expect(rows).to_have_count(2)
        row = rows.filter(has_text="opencode")
        await expect(row.locator("[data-name=Requests]")).to_have_text("2")
        clients = (await looker.document("/api/state"))["clients"]
        (client,) = (one for one in clients if one["agent"] == "opencode")
        await expect(row.locator("th")).to_have_text(f"opencode {client['key']}")
        await expect(row.locator("[data-name=Computed]")).to_have_text(f"{client['computed']:,}")
        await expect(looker.page.locator("body")).not_to_contain_text("secret-of-anna")


async def test_an_empty_page_shows_the_address_for_clients(browser: Browser, engine: Restartable):
    async with lab.in_front_of(engine.base, engine.flags) as sidecar:
        async with reading(browser, admin_of(sidecar)) as looker:
            await looker.page.goto(looker.base)
            await expect(looker.page.locator("#welcome-v1")).to_have_text(f"{lab.url_of(sidecar)}/v1")
            await expect(looker.page.locator("#welcome-base")).to_have_text(lab.url_of(sidecar))
            await ask(lab.url_of(sidecar), "How many ships?")
            await expect(looker.page.locator("#lanes-empty")).not_to_be_visible()


async def test_a_queued_request_is_in_the_lane_of_its_own_conversation(browser: Browser, busy: Sidecar):
    """Requests that wait as long as this test runs: a next turn, and two of new conversations."""
    waits: dict[str, Any] = {"outcome": "running", "status": None, "seconds": None, "decision": None}
    new = waits | {"conversation": None, "about": None}

    async def long_line(route: Route) -> None:
        answer = await route.fetch()
        known = await answer.json()
        newest = known["requests"][0]
        line = [
            newest | waits | {"id": "r-1"},
            newest | new | {"id": "r-2", "name": "opencode: Ships"},
            newest | new | {"id": "r-3", "name": "opencode: Harbours"},
        ]
        await route.fulfill(response=answer, json={"requests": [*line, *known["requests"]]})

    async with reading(browser, admin_of(busy)) as looker:
        listed = (await (await looker.page.request.get(f"{looker.base}/api/requests?limit=100")).json())[
            "requests"
        ]
        own, number = listed[0]["name"], listed[0]["conversation"]
        turns = sum(request["conversation"] == number for request in listed)
        await looker.page.route("**/api/requests?*", long_line)
        await looker.open()
        for name, bars in ((own, turns + 1), ("opencode: Ships", 1), ("opencode: Harbours", 1)):
            label = looker.page.locator(".name", has_text=name)
            lane = looker.page.locator("#lanes > li").filter(has=label)
            await expect(lane).to_have_count(1)
            await expect(lane.locator(".bar")).to_have_count(bars)
        assert looker.complaints == []


async def test_a_running_prefill_shows_its_progress(browser: Browser, busy: Sidecar):
    """A prefill that lasts as long as this test runs: the rest is the sidecar's own answer."""
    text = "prefill 42 %, 12.3 s left"
    now = {
        "doing": "prefill",
        "text": text,
        "place": None,
        "percent": 42,
        "seconds_left": 12.3,
        "estimated": False,
    }

    async def long_prefill(route: Route) -> None:
        answer = await route.fetch()
        state = await answer.json()
        one = {
            "id": "r-1",
            "came": "2026-01-01T00:00:00.000+00:00",
            "name": "opencode #1: Ships",
            "about": "Ships",
        }
        stages = {"stage": "prefill", "stages": {"prefill": 9.0}, "stages_text": "prefill 9.0 s"}
        state["running"] = [one | stages | {"model": "gemma", "slot": 1, "seconds": 9.0, "now": now}]
        await route.fulfill(response=answer, json=state)

    async with reading(browser, admin_of(busy)) as looker:
        await looker.page.route("**/api/state", long_prefill)
        await looker.open()
        item = looker.page.locator("#running li")
        await expect(item).to_contain_text("prefill 42 %, 12.3 s left")
        await expect(item.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "42")
        await expect(item.get_by_role("link", name="opencode #1: Ships")).to_have_attribute(
            "href", "#request=r-1"
        )
        await expect(item).to_contain_text("gemma · slot 1")
        for viewport in (DESK, PHONE):
            await looker.page.set_viewport_size(viewport)
            assert await looker.page.evaluate(FITS)
        assert looker.complaints == []


async def test_the_page_shows_whether_an_engine_fails_or_is_drained(browser: Browser, busy: Sidecar):
    """The test changes one field of the sidecar's answer; the rest is unchanged."""
    looks = {"failing": "down", "draining": "passing", "drained": "passing"}
    changed: dict[str, str] = {}

    async def used_so(route: Route) -> None:
        answer = await route.fetch()
        state = await answer.json()
        state["engines"][0] |= changed
        await route.fulfill(response=answer, json=state)

    async with reading(browser, admin_of(busy)) as looker:
        await looker.page.route("**/api/state", used_so)
        for shown, look in looks.items():
            changed["state"] = shown
            await looker.open()
            told = looker.page.locator(".engine h3 .state").first
            await expect(told).to_have_text(shown)
            await expect(told).to_have_attribute("data-state", look)
        assert looker.complaints == []


@needs_b10434
async def test_an_unloaded_model_is_shown_without_an_alarm(browser: Browser, tmp_path: Path):
    async with router(tmp_path) as started, lab.keeping(started) as sidecar:
        async with reading(browser, admin_of(sidecar)) as looker, fresh_client(lab.url_of(sidecar)) as client:
            await Talk("coder", "c").turn(client)
            await looker.open()
            engines = looker.page.locator(".engine")
            await expect(engines).to_have_count(2)
            await expect(engines.nth(0)).to_contain_text("up127.0.0.1")
            await expect(engines.nth(0)).to_contain_text("#coder")
            await expect(engines.nth(0).locator(".slot")).to_have_count(2)
            await expect(engines.nth(1)).to_contain_text("unloaded")
            await expect(engines.nth(1).locator(".slot")).to_have_count(0)
            await expect(looker.page.locator("#alarms li")).to_have_count(0)
            assert looker.complaints == []

"""The page in a real browser: it loads under load, updates itself, and requests nothing from other hosts."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from playwright.async_api import Browser, expect

from chaos.raw import until_async
from dashboard.reading import CLOCK, NEWEST, Reader, admin_of, reading
from dashboard.traffic import HOSTILE, ask, talk
from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.lab import Restartable
from slotkeeper.engine.child.launch import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

RIGHT: Final = "right"
LOAD: Final = 4  # conversations at once, in two slots
LEAVES: Final = 12  # of the prompt tree that are drawn


async def test_the_page_loads_under_load_and_updates_itself(reader: Reader, busy: Sidecar):
    async with asyncio.TaskGroup() as load:
        for number in range(LOAD):
            load.create_task(talk(lab.url_of(busy), f"load-{number}", 2, max_tokens=100))
        await reader.open()
        await expect(reader.page.locator("#requests tr").nth(8)).to_be_visible()
        await reader.shoot("under-load")
    # On a slow machine all of that may have run before the page was open: these requests surely come later.
    async with asyncio.TaskGroup() as load:
        for number in range(LOAD):
            load.create_task(talk(lab.url_of(busy), f"late-{number}", 1))
    for name in (f"{when}-{number}" for when in ("load", "late") for number in range(LOAD)):
        await expect(reader.page.locator(".lanes .name", has_text=name)).to_be_visible()


async def test_a_figure_changes_without_a_reload_and_rows_keep_their_focus(reader: Reader, busy: Sidecar):
    await reader.open()
    requests = await reader.page.locator("#figures .quiet").nth(2).text_content()
    row = await reader.page.locator("#requests tr").first.element_handle()
    await reader.page.locator(NEWEST).focus()
    await ask(lab.url_of(busy), "One more question, please.")
    await expect(reader.page.locator("#figures .quiet").nth(2)).not_to_have_text(requests or "")
    # Figures and rows are two answers, so rows may come one poll later.
    await reader.until("row => row.previousElementSibling !== null", row)
    assert await row.evaluate("row => row.isConnected")
    assert await row.evaluate("row => row.contains(document.activeElement)")


def drawn(nodes: list[dict[str, Any]]) -> set[str]:
    """Return the latest leaves, and their shared parts: the number of prompts depends on earlier tests."""
    above = {node["id"]: node["parent"] for node in nodes}
    leaves = [node for node in nodes if node["id"] not in above.values()]
    found: set[str] = set()
    for leaf in sorted(leaves, key=lambda leaf: leaf["idle_seconds"])[:LEAVES]:
        at = leaf["id"]
        while at is not None:
            found.add(at)
            at = above[at]
    return found


async def test_the_page_shows_the_figures_of_the_api(reader: Reader, busy: Sidecar):
    """They are compared until they agree: a prefill ahead may change a slot between two looks."""
    await lab.rested(busy)
    await reader.open()

    async def slots_agree() -> bool:
        (engine,) = (await reader.document("/api/state"))["engines"]
        lines = await reader.page.locator(".slot").all_text_contents()
        held = [f"{slot['held_tokens']:,} of " for slot in engine["slots"]]
        return len(lines) == len(held) and all(map(str.__contains__, lines, held))

    await until_async(slots_agree, "the page shows what its slots hold")

    async def tree_agrees() -> bool:
        nodes = (await reader.document("/api/tree"))["nodes"]
        return await reader.page.locator("#tree .prompt").count() == len(drawn(nodes))

    await until_async(tree_agrees, "the page shows the tree")
    await expect(reader.page.locator("#tiers li").first).to_contain_text("hot")
    await expect(reader.page.locator(".engine p").first).to_contain_text("b11549")


async def test_a_request_has_its_own_link(reader: Reader):
    await reader.open()
    link = await reader.page.locator(CLOCK).first.get_attribute("href")
    await reader.page.goto("about:blank")
    await reader.open(link or "")
    why = reader.page.locator("#why")
    await expect(why.locator(".sentences")).to_contain_text("computed again")
    for part in ("Timeline", "Where it went", "Where it parts from the one before"):
        await expect(why.get_by_role("heading", name=part)).to_be_visible()
    await expect(why.locator(".gantt .bar.computed").first).to_be_visible()
    await expect(why.locator(".options [data-chosen]")).to_contain_text("taken")
    assert reader.complaints == []


async def test_the_page_reports_that_a_request_is_no_longer_kept(browser: Browser, busy: Sidecar):
    async with reading(browser, admin_of(busy)) as late:
        await late.open("#request=0123456789abcdef")
        await expect(late.page.locator("#why")).to_contain_text("not among the last requests any more")


async def test_markup_from_clients_is_shown_as_text(reader: Reader, busy: Sidecar):
    headers = {"X-Slotkeeper-Conversation": HOSTILE, "X-Request-Id": HOSTILE}
    await ask(lab.url_of(busy), HOSTILE, headers=headers)
    await reader.open()
    await reader.explain(CLOCK)
    await expect(reader.page.locator("#why .texts").first).to_contain_text("<img src=x onerror=")
    assert await reader.page.title() == "Slotkeeper"
    assert await reader.page.locator("main img, dialog img").count() == 0


async def test_the_page_reconnects_after_the_sidecar_was_stopped(browser: Browser, engine: Restartable):
    address = f"127.0.0.1:{free_port()}"
    async with reading(browser, f"http://{address}") as looker:
        async with lab.in_front_of(engine.base, admin_listen=address):
            await looker.page.goto(looker.base)
            await expect(looker.connection).to_have_text("Live")
        await expect(looker.connection).to_contain_text("Connection lost")
        async with lab.in_front_of(engine.base, admin_listen=address):
            await expect(looker.connection).to_have_text("Live")


async def test_the_page_asks_for_the_token_and_keeps_it_for_the_tab(browser: Browser, engine: Restartable):
    async with lab.in_front_of(engine.base, admin_token=RIGHT) as locked:
        async with reading(browser, admin_of(locked)) as stranger:
            await stranger.page.goto(stranger.base)
            token = stranger.page.get_by_label("Admin token")
            await expect(token).to_be_focused()
            await token.fill("wrong")
            await token.press("Enter")
            await expect(stranger.page.get_by_role("alert")).to_have_text("That token was refused.")
            await token.fill(RIGHT)
            await token.press("Enter")
            await expect(stranger.connection).to_have_text("Live")
            await stranger.page.reload()
            await expect(stranger.connection).to_have_text("Live")
            await expect(token).not_to_be_visible()

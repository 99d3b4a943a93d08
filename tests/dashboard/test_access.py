"""Accessibility: by keyboard, on a phone, in light and dark, and with a screen reader."""

from __future__ import annotations

from typing import Any, Final

import pytest
from playwright.async_api import Browser, expect

from dashboard.reading import CLOCK, NEWEST, PHONE, Reader, admin_of, reading
from slotkeeper.app import Sidecar

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENOUGH: Final = 4.5  # WCAG 2.2 AA, for text of any size
BEHIND: Final = 400  # Tab presses; an element that these do not reach is unreachable

# For every visible element with its own text: the contrast of its colour to the background below it.
FAINT: Final = """(enough) => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const below = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const own = (node) => [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll("body *")]
    .filter((node) => !(node instanceof SVGElement) && own(node) && node.checkVisibility())
    .map((node) => {
      const both = [light(parts(getComputedStyle(node).color)), light(below(node))].sort((a, b) => b - a);
      return [node.textContent.slice(0, 40), (both[0] + 0.05) / (both[1] + 0.05)];
    })
    .filter(([, ratio]) => ratio < enough);
}"""
NAMELESS: Final = """() => [...document.querySelectorAll("a[href], button, input, [role], dialog, svg")]
  .filter((node) => node.checkVisibility() && !node.closest("[aria-hidden=true]"))
  .filter((node) => !(node.ariaLabel || node.getAttribute("aria-labelledby") || node.textContent.trim()
    || node.labels?.length))
  .map((node) => node.outerHTML.slice(0, 120))"""


async def tab_to(reader: Reader, selector: str) -> None:
    for _ in range(BEHIND):
        await reader.page.keyboard.press("Tab")
        if await reader.page.evaluate("(wanted) => document.activeElement.matches(wanted)", selector):
            return
    pytest.fail(f"{selector} cannot be reached with the keyboard")


async def test_a_request_is_explained_by_keyboard_alone_and_the_focus_returns(reader: Reader):
    await reader.open()
    await tab_to(reader, "#requests tr th a")
    before = await reader.page.evaluate("document.activeElement.getAttribute('href')")
    await reader.page.keyboard.press("Enter")
    await expect(reader.page.locator("#why .sentences li").first).to_be_visible()
    assert await reader.page.evaluate("document.getElementById('why').contains(document.activeElement)")
    await reader.page.keyboard.press("Escape")
    await expect(reader.page.locator("#why")).not_to_be_visible()
    # The browser reports the new address to the page only after that.
    await reader.until("location.hash === ''")
    assert await reader.page.evaluate("document.activeElement.getAttribute('href')") == before


async def test_arrow_keys_move_along_a_lane(reader: Reader):
    await reader.open()
    await tab_to(reader, ".lane .bar:nth-child(n+2)")
    last = await reader.page.evaluate("document.activeElement.getAttribute('href')")
    await reader.page.keyboard.press("ArrowLeft")
    here = await reader.page.evaluate("document.activeElement.getAttribute('href')")
    assert here != last
    await reader.page.keyboard.press("Enter")
    await expect(reader.page.locator("#why .sentences li").first).to_be_visible()


async def test_the_first_tab_skips_to_the_requests(reader: Reader):
    await reader.open()
    await reader.page.keyboard.press("Tab")
    await reader.page.keyboard.press("Enter")
    await reader.page.keyboard.press("Tab")
    assert await reader.page.evaluate("document.activeElement.closest('#recent') !== null")


async def test_every_element_has_an_accessible_name_and_every_region_a_landmark(reader: Reader):
    await reader.open()
    for role in ("banner", "main"):
        assert await reader.page.get_by_role(role).count() == 1
    assert await reader.page.locator("h1").count() == 1
    for name in ("Slots", "Conversations", "Clients", "Prompt tree", "Snapshots", "Recent requests"):
        await expect(reader.page.get_by_role("region", name=name)).to_be_visible()
    await reader.explain(NEWEST)
    assert await reader.page.evaluate(NAMELESS) == []
    assert await reader.page.locator("table:not(:has(caption)):not([aria-labelledby])").count() == 0
    assert await reader.page.locator("th:not([scope])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_enough_contrast_in_both_themes(browser: Browser, busy: Sidecar, scheme: Any):
    async with reading(browser, admin_of(busy), color_scheme=scheme) as looker:
        await looker.open()
        assert await looker.page.evaluate(FAINT, ENOUGH) == []
        await looker.shoot(scheme, full_page=True)
        await looker.explain(CLOCK)
        assert await looker.page.evaluate(FAINT, ENOUGH) == []
        await looker.shoot(f"why-{scheme}")


async def test_the_user_can_choose_the_theme(reader: Reader):
    await reader.open()
    paper = "getComputedStyle(document.body).backgroundColor"
    bright = await reader.page.evaluate(paper)
    button = reader.page.get_by_role("button", name="Theme")
    for _ in ("light", "dark"):
        await button.click()
    await expect(button).to_have_text("Theme: dark")
    assert await reader.page.evaluate(paper) != bright
    await reader.page.reload()
    await expect(button).to_have_text("Theme: dark")


async def test_a_phone_does_not_scroll_sideways(browser: Browser, busy: Sidecar):
    async with reading(browser, admin_of(busy), viewport=PHONE, has_touch=True, is_mobile=True) as looker:
        await looker.open()
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        assert await looker.page.evaluate(fits)
        await looker.shoot("phone", full_page=True)
        await looker.explain(CLOCK)
        assert await looker.page.evaluate(fits)
        assert await looker.page.evaluate("why.scrollWidth <= why.clientWidth")
        await looker.shoot("why-phone")

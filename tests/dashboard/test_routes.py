"""The files of the page: their headers, that all exist, and that none needs an exception to the policy."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slotkeeper.admin import admin as dashboard

STATIC: Final = files("slotkeeper.admin") / "static"
TEXTS: Final = {file.name: file.read_text("utf-8") for file in STATIC.iterdir()}


@pytest.fixture
async def client():
    app = web.Application()
    app.router.add_routes(dashboard.routes())
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.mark.parametrize("path", sorted(dashboard.OPEN_FILES))
async def test_every_file_is_sent_with_its_type_and_a_strict_policy(client, path):
    answer = await client.get(path)
    assert answer.status == 200
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.content_type == dashboard.TYPES["." + (path.rpartition(".")[2] if path != "/" else "html")]


async def test_an_unchanged_file_is_not_sent_again(client):
    first = await client.get("/")
    again = await client.get("/", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["Content-Security-Policy"] == first.headers["Content-Security-Policy"]
    other = await client.get("/", headers={"If-None-Match": '"of-the-last-version"'})
    assert other.status == 200


def test_every_file_that_the_page_names_exists():
    named = {
        f"/assets/{name}"
        for text in TEXTS.values()
        for name in re.findall(r'(?:/assets/|from "\./)([\w.-]+)"', text)
    }
    assert named == dashboard.OPEN_FILES - {"/"}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_file_needs_an_exception_to_the_content_security_policy(name):
    text = TEXTS[name]
    assert not re.search(r"(?:inner|outer|Adjacent)HTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text)

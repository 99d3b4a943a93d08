"""Clients send requests of the shapes that were recorded; a new version of one may not."""

from __future__ import annotations

import json
from difflib import unified_diff

import pytest

from clients.agents import AGENTS_BY_NAME
from clients.conftest import LIBRARIES, version
from clients.shapes import kept, package, recorded

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("name", [*LIBRARIES, *AGENTS_BY_NAME])
async def test_a_client_sends_requests_of_the_recorded_shapes(name, tmp_path):
    again = f"PYTHONPATH=proxy:tests:. python -m clients.shapes {name}"
    before = kept().get(name, {})
    then = before.pop("version", "no version")
    after = await recorded(name, tmp_path)
    was, now = (json.dumps(shape, indent=1).splitlines() for shape in (before, after))
    changed = "\n".join(unified_diff(was, now, then, version(package(name)), lineterm="", n=2))
    assert not changed, f"{name} sends other requests:\n{changed}\nIf they are right, record them: {again}"

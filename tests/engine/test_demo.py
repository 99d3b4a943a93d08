"""The demo as a user starts it, on both builds."""

from __future__ import annotations

import re

import pytest

from slotkeeper.bench.demo import demo

pytestmark = pytest.mark.one_in(8)


async def test_the_demo_shows_fewer_tokens_through_the_sidecar(build, capsys):
    assert await demo(engine=build, model="tiny-hybrid") == 0
    shown = capsys.readouterr().out
    row = re.search(r"client waited +([\d,]+) +([\d,]+)", shown)
    direct, through = (int(figure.replace(",", "")) for figure in row.groups())
    assert through < 0.6 * direct
    assert "Slotkeeper saved" in shown

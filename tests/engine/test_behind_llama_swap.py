"""The sidecar behind llama-swap, one for each model: the `cmdStop` of docs/models.md saves before a swap.

As in `test_llama_swap.py`, llama-swap is a stand-in, and the program itself if it is on PATH.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from benchmarks.routers import MODELS, PROGRAM, talks

from engine.swappers import (
    MORE,
    ROUNDS,
    STAND_IN,
    Commands,
    computed,
    resident,
    started,
    wanted,
)
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench import lab
from slotkeeper.bench.models import build as build_model
from slotkeeper.settings import Settings

pytestmark = pytest.mark.one_in(8)

# Saves in pauses are off: only the hook saves.
LONG_PAUSE = 600.0


@pytest.fixture(params=[STAND_IN, PROGRAM])
def kind(request: pytest.FixtureRequest) -> str:
    return wanted(request.param)


def settings(base: str, slots: Path) -> Settings:
    return lab.settings_of(
        upstream=(base,),
        listen=lab.ANY_PORT,
        admin_listen=lab.ANY_PORT,
        slot_dir=slots,
        save_pause=LONG_PAUSE,
        read_flags=False,
        drain_timeout=5,
    )


def hook(base: str, sidecar: Sidecar) -> str:
    """Return the `cmdStop` of docs/models.md."""
    ours, admin = f"{sys.executable} -m slotkeeper", f"--admin http://{sidecar.addresses[1]}"
    drained, back = f"{ours} drain {base} {admin}", f"{ours} undrain {base} {admin}"
    return f"sh -c '{drained}; kill ${{PID}}; {back}'"


async def test_swaps_compute_no_more_tokens_than_models_that_stay_loaded(
    kind: str, build: str, tmp_path: Path
) -> None:
    (tmp_path / "stay").mkdir()
    oracle = await resident(kind, build, tmp_path / "stay", ROUNDS)
    found, sidecars, commands = talks(), list[Sidecar](), Commands(build, tmp_path)
    async with AsyncExitStack() as stack:
        proxies, hooks = dict[str, str](), dict[str, str]()
        for name, tiny in MODELS.items():
            slots = tmp_path / name
            slots.mkdir()
            commands.add(name, build_model(tiny), slots)
            base = commands.bases[name]
            sidecar = await stack.enter_async_context(running(settings(base, slots)))
            sidecars.append(sidecar)
            proxies[base], hooks[base] = lab.url_of(sidecar), hook(base, sidecar)
        commands.proxies, commands.hooks = proxies, hooks
        there = await stack.enter_async_context(started(kind, commands))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=there.base, timeout=PATIENCE))
        for _ in range(ROUNDS):
            for talk in found:
                before = talk.computed
                answer = await talk.turn(client)  # the first request after a load
                assert answer.headers["X-Slotkeeper-Decision"] == ("snapshot" if before else "cold")
        spent = sum(computed([], sidecar) for sidecar in sidecars)
        assert computed(found) + spent <= MORE * oracle

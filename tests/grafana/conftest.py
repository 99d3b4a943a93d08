"""A real engine, a sidecar in front of it as a user starts it, and a real Prometheus that scrapes it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from benchmarks.routers import BUILD, MODELS, Talk, router_flags

from engine.conftest import start, wait_until
from patience import PATIENCE
from scraping import SCRAPED, TOKEN, Watched, running, scraping, used
from slotkeeper.bench import lab
from slotkeeper.engine.child.launch import EngineKind, find_engine, free_port, runs_skulk


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    with ExitStack() as stack:
        engine = start("tiny-hybrid", EngineKind.XLLAMACPP, folder=folder)
        stack.callback(engine.process.kill)
        data, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        upstreams = [engine.base]
        if runs_skulk():
            router = lab.Restartable(find_engine(BUILD), router_flags(folder), folder / "router.log")
            stack.callback(router.kill)
            asyncio.run(router.start())
            upstreams.append(router.base)
        named = (word for base in upstreams for word in ("--upstream", base))
        where = (*named, "--listen", data, "--admin-listen", admin)
        files = ("--slot-dir", str(engine.slot_dir), "--cold-store", str(folder / "shared"))
        more = (*files, "--drain-delay", "0")
        command = (sys.executable, "-m", "slotkeeper", "serve", *where, *more)
        secret = {"SLOTKEEPER_ADMIN_TOKEN": TOKEN}
        prometheus = stack.enter_context(scraping(admin, folder))  # it looks for targets after five seconds
        stack.enter_context(running(command, folder / "sidecar.log", f"http://{admin}/readyz", secret))
        # Prometheus must have seen every counter at zero
        wait_until(lambda: bool(prometheus.values(SCRAPED)))
        began = time.time()
        asyncio.run(used(f"http://{data}"))
        if runs_skulk():
            prometheus.catches_up()  # before later requests replace the exemplars of these
            asyncio.run(_each_model(f"http://{data}"))
        wait_until(lambda: any(prometheus.values("slotkeeper_snapshots")))  # idle work is done, too
        prometheus.catches_up()
        yield Watched(f"http://{data}", f"http://{admin}", prometheus, began)


async def _each_model(base: str) -> None:
    """Send a request for each model of the router."""
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as client:
        for model in MODELS:
            await Talk(model, model).turn(client)

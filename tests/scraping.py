"""A real Prometheus that scrapes a real sidecar, with the configuration that we ship."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from benchmarks.sessions import clock, user
from grafana.__main__ import HERE
from grafana.rules import HITS

from engine.conftest import wait_until
from patience import PATIENCE
from programs import program
from slotkeeper.bench.target import CHAT, Target, play
from slotkeeper.bench.texts import system
from slotkeeper.engine.child.launch import free_port

TOKEN: Final = "scraped"  # noqa: S105 - of the admin port, for a test
OFTEN: Final = "1s"  # between scrapes, and between evaluations; a scrape that takes longer has failed
SCRAPED: Final = "slotkeeper_build_info"  # a metric that is in every scrape
REQUEST_IDS: Final = ("first-of-this-test", "second-of-this-test")


@dataclass(frozen=True, slots=True)
class Prometheus:
    base: str

    def get(self, path: str, **params: Any) -> Any:
        """Return `data` of an answer of Prometheus's API."""
        answer = httpx.get(f"{self.base}/api/v1/{path}", params=params, timeout=PATIENCE)
        document = answer.json()
        assert document["status"] == "success", (params, document)
        return document["data"]

    def values(self, expr: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.get("query", query=expr)["result"]]

    def values_since(self, moment: float, expr: str) -> list[float]:
        """Return the values in every second since `moment`: the last scrape may have failed."""
        series = self.get("query_range", query=expr, start=moment, end=time.time(), step=1)["result"]
        return [float(value) for one in series for _, value in one["values"]]

    def has_seen(self, moment: float, series: str) -> bool:
        """Whether the last sample of a series is newer than `moment`."""
        return any(at > moment for at in self.values(f"timestamp({series})"))

    def catches_up(self) -> None:
        """Wait until everything counted until now is scraped, and rules were evaluated with it."""
        for series in (SCRAPED, HITS):
            moment = time.time()
            wait_until(lambda since=moment, name=series: self.has_seen(since, name))  # type: ignore[misc]

    def exemplars(self, selector: str) -> set[str]:
        """Return the request ids in the exemplars of these series."""
        now = time.time()
        found = self.get("query_exemplars", query=selector, start=now - 3600, end=now)
        return {one["labels"]["request_id"] for series in found for one in series["exemplars"]}


@dataclass(frozen=True, slots=True)
class Watched:
    """A sidecar after some traffic, and the Prometheus that has watched it since before the first request."""

    data: str
    admin: str
    prometheus: Prometheus
    began: float  # when Prometheus had first scraped it


@contextmanager
def running(
    command: Sequence[str], log: Path, ready: str, environ: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a process, from when it answers 200 at `ready` until the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})}
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text("utf-8")
        try:
            return httpx.get(ready).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(answers)
        yield
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


@contextmanager
def scraping(admin: str, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with our configuration, except addresses and paths, and with shorter intervals."""
    config = yaml.safe_load((HERE / "prometheus/prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": OFTEN, "evaluation_interval": OFTEN}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [admin]}]
    job["authorization"]["credentials_file"] = str(folder / "token")
    (folder / "token").write_text(TOKEN, "utf-8")
    for name in config["rule_files"]:
        shutil.copy(HERE / "prometheus" / name, folder / name)
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = (
        program("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    )
    with running(command, folder / "prometheus.log", f"http://{address}/-/ready"):
        yield Prometheus(f"http://{address}")


async def used(base: str) -> None:
    """Play a conversation whose system prompt has the time in it, and streams with known ids."""
    async with Target(base) as target:
        await play(clock(first=False), target, session="clock")
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as client:
        for request_id in REQUEST_IDS:
            body = {"messages": [system(), user(7)], "max_tokens": 8, "stream": True}
            answer = await client.post(CHAT, json=body, headers={"X-Request-Id": request_id})
            assert answer.is_success

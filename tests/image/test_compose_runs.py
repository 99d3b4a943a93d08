"""What compose.yaml starts, really started: its commands, variables, checks and signals, on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from builds import BUILDS
from containers import Container, Here, Process, started
from engine.conftest import wait_until
from image.compose import BASE, NEEDED, seconds, services
from image.dockerfile import image
from patience import PATIENCE
from programs import program
from slotkeeper.bench.models import Tiny
from slotkeeper.bench.models import build as build_model
from slotkeeper.engine.child.launch import EngineKind, find_engine, free_port

TOKEN = "a token of this test"  # noqa: S105 - of this test
CHAT = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8, "stream": True}
# The tiny model needs no second thread and no device; the tests share the machine.
LAB = ("-t", "1", "--fit", "off", "--device", "none")


@dataclass(frozen=True, slots=True)
class Stack:
    here: Here
    parts: dict[str, dict[str, Any]]
    sidecar: Process
    slots: Path

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{self.here.ports[port]}"

    def chat(self) -> str:
        """Return a complete streamed answer."""
        url = f"{self.url(8080)}/v1/chat/completions"
        with httpx.stream("POST", url, json=CHAT, timeout=PATIENCE) as answer:
            assert answer.status_code == 200
            assert answer.headers["X-Slotkeeper-Decision"] not in {"unrendered", "fail_open"}
            return "".join(answer.iter_text())


def check_of(part: dict[str, Any]) -> list[str]:
    kind, *words = part["healthcheck"]["test"]
    assert kind == "CMD"
    return list(words)


@pytest.fixture
def stack(request, tmp_path) -> Iterator[Stack]:
    parts = services(BASE)
    sidecar, engine = parts["slotkeeper"], parts["engine"]
    binary = find_engine(getattr(request, "param", EngineKind.XLLAMACPP))
    model = build_model(Tiny.HYBRID)
    slots, secret = tmp_path / "slots", tmp_path / "token"
    slots.mkdir()
    secret.write_text(TOKEN, "utf-8")
    here = Here(
        paths={
            sidecar["environment"]["SLOTKEEPER_SLOT_DIR"]: slots,
            sidecar["environment"]["SLOTKEEPER_ADMIN_TOKEN_FILE"]: secret,
            f"/models/{NEEDED['MODEL']}": model,
            "/tmp": tmp_path,  # noqa: S108 - the container's
        },
        ports={port: free_port() for port in (8080, 8081, 9090)},
        hosts={"engine", "0.0.0.0"},  # noqa: S104 - in the container
        programs={"llama-server": (*binary.program, *LAB), "curl": (program("curl"),)},
    )
    what = image()
    serving = Container(command=(*what.entrypoint, *what.cmd), env=what.env | sidecar["environment"])
    computing = Container(
        command=("llama-server", *engine["command"]), env=engine["environment"] | dict(binary.settings)
    )
    with ExitStack() as stack:
        first = stack.enter_context(started(serving, here, tmp_path / "sidecar.log"))
        second = stack.enter_context(started(computing, here, tmp_path / "engine.log"))
        second.becomes_healthy(check_of(engine))
        first.becomes_healthy(check_of(sidecar))
        yield Stack(here, parts, first, slots)


@pytest.mark.parametrize("stack", BUILDS, indirect=True)
def test_a_chat_is_streamed_and_saved_and_the_sidecar_ends_in_time(stack):
    assert stack.chat().rstrip().endswith("data: [DONE]")
    grace = seconds(stack.parts["slotkeeper"]["stop_grace_period"])
    assert stack.sidecar.stopped(within=min(grace, PATIENCE)) == 0
    assert any(stack.slots.rglob("*")), "nothing was saved"
    check = check_of(stack.parts["slotkeeper"])
    assert stack.sidecar.runs(check).returncode == 1


def test_the_admin_port_requires_the_token_of_the_secret_file(stack):
    metrics = f"{stack.url(9090)}/metrics"
    assert httpx.get(metrics, timeout=PATIENCE).status_code == 401
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.get(metrics, headers=token, timeout=PATIENCE).status_code == 200
    assert stack.sidecar.runs(("slotkeeper", "snapshots", "ls")).returncode == 0, (
        "commands find it by themselves"
    )
    assert TOKEN not in stack.sidecar.log


def test_prometheus_scrapes_the_sidecar_and_loads_its_rules(stack, tmp_path):
    part = stack.parts["prometheus"]
    (folder,) = (mount["source"] for mount in part["volumes"] if mount["type"] == "bind")
    config = tmp_path / "prometheus"
    config.mkdir()
    for file in Path(folder).iterdir():
        text = file.read_text("utf-8").replace("slotkeeper:9090", f"127.0.0.1:{stack.here.ports[9090]}")
        text = text.replace("scrape_interval: 15s", "scrape_interval: 1s")
        for there, path in stack.here.paths.items():
            text = text.replace(f" {there}\n", f" {path}\n")
        (config / file.name).write_text(text, "utf-8")
    port = free_port()
    here = Here(paths={"/prometheus": tmp_path / "series"}, programs={"prometheus": (program("prometheus"),)})
    words = [word.replace("/etc/prometheus", str(config)) for word in part["command"]]
    command = ("prometheus", *words, f"--web.listen-address=127.0.0.1:{port}")
    with started(Container(command=command), here, tmp_path / "prometheus.log"):
        api = f"http://127.0.0.1:{port}/api/v1"
        wait_until(lambda: health_in(f"{api}/targets") == ["up"])
        groups = httpx.get(f"{api}/rules", timeout=PATIENCE).json()["data"]["groups"]
        assert any(group["rules"] for group in groups)


def health_in(url: str) -> list[str]:
    """Return the health of every target of Prometheus, once it answers."""
    try:
        targets = httpx.get(url).json()["data"]["activeTargets"]
    except (httpx.TransportError, json.JSONDecodeError):
        return []
    return [target["health"] for target in targets]

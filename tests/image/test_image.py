"""The image, built and run in front of a real engine. `make test-image`; as root."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest

from engine.conftest import start, wait_until
from image.builder import Room, build, compressed, container, inspected
from image.dockerfile import image
from patience import PATIENCE
from slotkeeper import __version__
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.child.launch import EngineKind, free_port

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(900),  # the first build makes its base
    pytest.mark.skipif(os.geteuid() != 0, reason="without user namespaces images are built by root"),
]

SLOTS: Final = "/var/lib/slotkeeper/slots"
USER: Final = int(image().user.partition(":")[0])
TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - folders of the base that every user can write to
OWN_BYTES: Final = 120 << 20  # size of the layers on the base
CHAT: Final = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8, "stream": True}


@pytest.fixture(scope="module")
def built() -> str:
    return build()


@pytest.fixture(scope="module")
def made(built) -> Iterator[str]:
    """Make a container that tests share: its user can change nothing in it."""
    with container(built) as name:
        yield name


@pytest.fixture
def room(made, tmp_path) -> Room:
    """Return a container with a read-only root file system: only the slot folder can be written to."""
    slots, nothing = tmp_path / "slots", tmp_path / "nothing"
    for folder in (slots, nothing):
        folder.mkdir()
    os.chown(slots, USER, USER)
    empty = {}
    for at, seen in enumerate(TEMPORARY):
        (nothing / str(at)).mkdir(mode=0o777)
        empty[nothing / str(at)] = f"{seen}:ro"
    return Room(made, {slots: SLOTS, **empty})


@dataclass(frozen=True, slots=True)
class Serving:
    data: str
    env: dict[str, str]
    runner: subprocess.Popen[bytes]
    sidecar: psutil.Process


@contextmanager
def serving(room: Room, upstream: str, log: Path) -> Iterator[Serving]:
    what = image()
    data, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    env = {
        "SLOTKEEPER_UPSTREAM": upstream,
        "SLOTKEEPER_LISTEN": data,
        "SLOTKEEPER_ADMIN_LISTEN": admin,
        "SLOTKEEPER_SLOT_DIR": SLOTS,
    }
    with log.open("wb") as out:
        command = room.command((*what.entrypoint, *what.cmd), env)
        runner = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: bool(sidecars(runner)) or runner.poll() is not None)
        assert runner.poll() is None, log.read_text("utf-8")
        yield Serving(data, env, runner, sidecars(runner)[0])
    finally:
        for process in (*sidecars(runner), runner):
            process.kill()
        runner.wait()


def sidecars(runner: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the process in the container: the one of its user, without the builder's processes above it."""
    if runner.poll() is not None:
        return []
    below = psutil.Process(runner.pid).children(recursive=True)
    return [process for process in below if process.uids().real == USER and process.name() == "slotkeeper"]


def test_the_image_has_the_configuration_of_the_dockerfile(built, record_property, tmp_path):
    config, layers = inspected(built)
    what = image()
    assert (tuple(config["Entrypoint"]), tuple(config["Cmd"])) == (what.entrypoint, what.cmd)
    assert config["User"] == what.user
    assert config["StopSignal"] == what.stop_signal == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", *what.health]
    assert config["Labels"]["org.opencontainers.image.version"] == "tested"
    _, *own = layers
    _, *sent = compressed(built, tmp_path / "pushed")
    record_property("own_bytes", sum(own))
    record_property("own_compressed_bytes", sum(sent))
    said = f"the image: {sum(own) / 2**20:.0f} MiB on a base of {layers[0] / 2**20:.0f} MiB"
    print(f"{said}; compressed {sum(sent) / 2**20:.0f} MiB")  # noqa: T201
    assert sum(own) < OWN_BYTES


def test_the_images_user_can_write_only_to_the_slot_folder(room):
    assert room.run("id", "-u").stdout.strip() == str(USER)
    found = room.run(
        "find", "/", "-xdev", "-writable", "-not", "-type", "l", "-not", "-path", "/dev/*"
    ).stdout
    allowed = {SLOTS, "/run/lock", *TEMPORARY}
    assert set(found.split()) <= allowed
    assert room.run("touch", f"{SLOTS}/written").returncode == 0
    for folder in ("/", "/opt/slotkeeper", *TEMPORARY):
        assert room.run("touch", f"{folder}/written").returncode == 1


def test_a_new_volume_gets_the_owner_of_the_images_slot_folder(made):
    assert Room(made, {}).run("stat", "--format=%u:%g %a", SLOTS).stdout.strip() == f"{image().user} 700"


def test_the_image_contains_only_packages_that_the_sidecar_needs(room):
    assert room.run("slotkeeper", "--version").stdout.strip() == f"slotkeeper {__version__}"
    assert room.run("python3", "-c", "import opentelemetry.sdk, slotkeeper.cli.main").returncode == 0
    for module in ("pip", "ensurepip", "setuptools", "hatchling"):
        found = f"import sys, importlib.util; sys.exit(importlib.util.find_spec('{module}') is not None)"
        assert room.run("python3", "-c", found).returncode == 0, module
    tools = room.run("sh", "-c", "command -v pip pip3 gcc cc c++ make git curl wget; true").stdout
    assert not tools


def test_the_images_bytecode_is_valid_whatever_the_times_of_its_files(room):
    code = "import slotkeeper.cli.main as c; print(open(c.__cached__, 'rb').read(8)[4])"
    assert room.run("python3", "-c", code).stdout.strip() == "1"  # PEP 552: by hash, never compared


def test_the_sidecar_answers_soon_after_the_container_starts(room, tmp_path, record_property):
    """Its time is printed beside that of a Python that does nothing, which the machine and buildah need."""
    begin = time.monotonic()
    assert room.run("python3", "-c", "pass").returncode == 0
    bare = time.monotonic() - begin
    begin = time.monotonic()
    with serving(room, f"http://127.0.0.1:{free_port()}", tmp_path / "sidecar.log") as served:
        wait_until(lambda: answers(f"http://{served.data}/health"))
        started = time.monotonic() - begin
    record_property("start_seconds", started)
    record_property("bare_python_seconds", bare)
    print(f"the first answer after {started:.1f} s; python3 -c pass takes {bare:.1f} s")  # noqa: T201


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=PATIENCE).status_code in {200, 503}
    except httpx.TransportError:
        return False


def test_a_chat_is_answered_and_saved_and_sigterm_ends_the_container(room, tmp_path):
    """With an engine of this machine and a shared folder. The sidecar may not read its model."""
    line = ("--slot-save-path", str(tmp_path / "slots"))
    engine = start(Tiny.HYBRID, EngineKind.XLLAMACPP, args=line, folder=tmp_path)
    log = tmp_path / "sidecar.log"
    try:
        with serving(room, engine.base, log) as served:
            check = ("slotkeeper", *image().health[1:])
            wait_until(lambda: room.run(*check, env=served.env).returncode == 0)
            assert served.sidecar.uids().effective == USER
            url = f"http://{served.data}/v1/chat/completions"
            with httpx.stream("POST", url, json=CHAT, timeout=PATIENCE) as answer:
                said = "".join(answer.iter_text())
            assert answer.headers["X-Slotkeeper-Decision"] not in {"unrendered", "fail_open"}
            assert said.rstrip().endswith("data: [DONE]")
            served.sidecar.send_signal(signal.SIGTERM)
            assert served.runner.wait(timeout=PATIENCE) == 0, log.read_text("utf-8")
            assert "Traceback" not in log.read_text("utf-8")
        kept = [file for file in (tmp_path / "slots").rglob("*") if file.is_file()]
        assert kept, log.read_text("utf-8")
        assert room.run(*check, env=served.env).returncode == 1
    finally:
        engine.process.kill()

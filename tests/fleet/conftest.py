"""Servers that sidecars share, one of each per module of tests, and pods of an engine and a sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.conftest import Factory, build, engine, engine_factory, pytest_generate_tests
from fleet.parts import Pods
from fleet.servers import BUCKET, CREDENTIALS, redis_server, s3_server
from patience import PATIENCE
from slotkeeper.observe.log import configure

__all__ = ["build", "engine", "engine_factory", "pytest_generate_tests"]


@pytest.fixture(autouse=True)
def _log() -> None:
    configure("info", "console")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Return the endpoint of an S3 server."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a Redis server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def patient_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a slow Redis: it is slow only on a busy machine, and lost only if a test kills it."""
    monkeypatch.setattr("slotkeeper.store.shared_store.hints.ANSWER_SECONDS", PATIENCE)


@pytest.fixture
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for the shared store, where a test is not about how long they wait.

    They give up after a second or two, which a busy machine takes for a few looks.
    """
    monkeypatch.setattr("slotkeeper.scheduler.snapshots.retention.LEAST_SECONDS", PATIENCE)
    monkeypatch.setattr("slotkeeper.scheduler.snapshots.retention.MOST_SECONDS", PATIENCE)
    monkeypatch.setattr("slotkeeper.scheduler.rates.LEAST_PATIENCE", PATIENCE)
    monkeypatch.setattr("slotkeeper.store.shared_store.shared.LONGEST_LOOK", PATIENCE)


@pytest.fixture
def pods(engine_factory: Factory, tmp_path: Path) -> Iterator[Pods]:
    made = Pods(engine_factory, tmp_path)
    yield made
    made.close()


@pytest.fixture
def shared(s3: str, redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the settings with which the sidecars of one test share snapshots."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    return ["--cold-store", f"s3://{BUCKET}/{tmp_path.name}", "--hints", redis]

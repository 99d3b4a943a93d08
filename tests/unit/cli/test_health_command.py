"""`slotkeeper health`: an exit code for orchestrators, and a message for people."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from slotkeeper.app import Sidecar, running
from slotkeeper.cli.admin_client import health
from slotkeeper.cli.main import main
from slotkeeper.settings import Settings

NO_SERVER = "http://127.0.0.1:1"


@pytest.fixture
async def sidecar():
    """Run a sidecar in front of an engine that does not answer.

    Its admin port has a token, which probes do not need.
    """
    settings = Settings(
        upstream=(NO_SERVER,),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        admin_token=SecretStr("s3cret"),
        drain_timeout=0.1,
    )
    async with running(settings) as started:
        yield started


def admin_of(sidecar: Sidecar) -> str:
    return f"http://{sidecar.addresses[1]}"


async def test_a_sidecar_without_an_engine_is_live_but_not_ready(sidecar, capsys):
    assert await health(admin=admin_of(sidecar), live=True) == 0
    assert not capsys.readouterr().err
    assert await health(admin=admin_of(sidecar), live=False) == 1
    said = capsys.readouterr().err
    assert said.startswith("slotkeeper health: no engine is up: one does not answer. ")
    assert "slotkeeper doctor" in said
    assert NO_SERVER not in said, "addresses are for those who have the token"


async def test_a_draining_sidecar_is_live_but_not_ready(sidecar, capsys):
    admin = admin_of(sidecar)
    await sidecar.drain(delay=0)
    assert await health(admin=admin, live=True) == 0
    capsys.readouterr()
    assert await health(admin=admin, live=False) == 1
    assert capsys.readouterr().err == "slotkeeper health: draining\n"


@pytest.mark.parametrize("admin", [[], ["--admin", NO_SERVER]])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ADMIN_LISTEN", "0.0.0.0:1"),  # without a token, which `serve` would require
        ("ADMIN_TOKEN_FILE", "/nowhere/token"),
        ("ENGINE_API_KEY_FILE", "/nowhere/key"),
        ("HOT_BYTES", "plenty"),
        ("LISTN", "127.0.0.1:8080"),
    ],
)
def test_health_does_not_check_settings_that_it_does_not_need(name, value, admin, monkeypatch, capsys):
    monkeypatch.setenv("SLOTKEEPER_ADMIN_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv(f"SLOTKEEPER_{name}", value)
    assert main(["health", *admin]) == 1
    assert f"slotkeeper health: no sidecar answers at {NO_SERVER}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ADMIN_LISTEN", "9090", "SLOTKEEPER_ADMIN_LISTEN: '9090' is not HOST:PORT"),
        ("ADMIN_LISTN", "127.0.0.1:1", "SLOTKEEPER_ADMIN_LISTN: there is no such variable; did you mean"),
    ],
)
def test_an_address_that_health_needs_is_checked(name, value, said, monkeypatch, capsys):
    monkeypatch.setenv(f"SLOTKEEPER_{name}", value)
    assert main(["health"]) == 2
    assert said in capsys.readouterr().err

"""`slotkeeper health`: an exit code for orchestrators, and a sentence for a person."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from slotkeeper.app import Sidecar, running
from slotkeeper.cli.commands import health
from slotkeeper.cli.main import main
from slotkeeper.settings import Settings

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
async def sidecar():
    """Run a sidecar in front of an engine that does not answer.

    Its admin port has a token, which probes do not need.
    """
    settings = Settings(
        upstream=(NOBODY,),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        admin_token=SecretStr("s3cret"),
        drain_timeout=0.1,
    )
    async with running(settings) as started:
        yield started


def admin_of(sidecar: Sidecar) -> str:
    return f"http://{sidecar.addresses[1]}"


async def test_without_an_engine_it_lives_but_is_not_ready(sidecar, capsys):
    assert await health(admin=admin_of(sidecar), live=True) == 0
    assert not capsys.readouterr().err
    assert await health(admin=admin_of(sidecar), live=False) == 1
    said = capsys.readouterr().err
    assert said.startswith("slotkeeper health: no engine is up: one does not answer. ")
    assert "slotkeeper doctor" in said
    assert NOBODY not in said, "addresses are for those who have the token"


async def test_what_drains_lives_but_is_not_ready(sidecar, capsys):
    admin = admin_of(sidecar)
    await sidecar.drain(delay=0)
    assert await health(admin=admin, live=True) == 0
    capsys.readouterr()
    assert await health(admin=admin, live=False) == 1
    assert capsys.readouterr().err == "slotkeeper health: draining\n"


async def test_the_sidecars_own_variable_says_where_it_is(sidecar, monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_ADMIN_LISTEN", sidecar.addresses[1])
    assert await health(admin=None, live=True) == 0


@pytest.mark.parametrize("live", [[], ["--live"]])
def test_a_sidecar_that_does_not_answer_is_neither(live, capsys):
    assert main(["health", "--admin", NOBODY, *live]) == 1
    assert f"slotkeeper health: no sidecar answers at {NOBODY}." in capsys.readouterr().err


def test_an_address_that_is_no_url_is_a_usage_error(capsys):
    assert main(["health", "--admin", "localhost:9090"]) == 2
    assert "write http://HOST:PORT" in capsys.readouterr().err

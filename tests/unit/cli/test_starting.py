"""The sidecar refuses folders that other users can write to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from slotkeeper import app
from slotkeeper.cli import starting
from slotkeeper.cli.starting import strangers_in, try_folders
from slotkeeper.engine.nearby import Nearby, look
from slotkeeper.settings import Settings
from slotkeeper.values import UsageError


@pytest.mark.parametrize("name", ["slot_dir", "cold_dir"])
@pytest.mark.parametrize(
    ("mode", "writer"), [(0o777, "every user"), (0o1777, "every user"), (0o2770, "its group")]
)
def test_a_folder_that_others_may_write_to_is_refused_with_a_command_that_repairs_it(
    tmp_path, name, mode, writer
):
    folder = tmp_path / "it's theirs"
    folder.mkdir()
    folder.chmod(mode)
    settings = Settings(**{"slot_dir": tmp_path / "own", name: folder})
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: {writer} may write") as refused:
        try_folders(settings)
    command = str(refused.value).partition("Fix it: ")[2].partition("; or")[0]
    subprocess.run(command, shell=True, check=True)  # noqa: S602 - what we tell people to do
    try_folders(settings)


def test_a_shared_slot_folder_may_be_writable_for_others_if_that_is_set(tmp_path):
    tmp_path.chmod(0o2777)
    try_folders(Settings(slot_dir=tmp_path, shared_slot_dir=True))


def test_a_new_slot_folder_is_private_to_its_user(tmp_path):
    before = os.umask(0)
    try:
        try_folders(Settings(slot_dir=tmp_path / "slots"))
    finally:
        os.umask(before)
    assert (tmp_path / "slots").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("us", "owner", "trusted"), [(1, 1, True), (1, 0, True), (1, 2, False), (0, 2, True), (0, 0, True)]
)
def test_a_folder_of_another_user_is_refused_unless_root_owns_it_or_runs_the_sidecar(
    monkeypatch, tmp_path, us, owner, trusted
):
    class Folder(type(tmp_path)):  # type: ignore[misc]
        def stat(self, **more):
            found = list(super().stat(**more))
            found[4] = owner
            return os.stat_result(found)

    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: us)
    assert ("another user" in strangers_in(Folder(tmp_path))) is not trusted


async def test_auto_uses_the_only_engine_of_this_machine_and_logs_why(monkeypatch, tmp_path):
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"total_slots": 1, "media_marker": "<m>"})

    engine = web.Application()
    engine.router.add_get("/{path:health|props}", answer)
    async with TestServer(engine) as server:
        base = f"http://127.0.0.1:{server.port}"
        monkeypatch.setattr(starting, "look", partial(look, ports=(1, server.port), proc=tmp_path))
        settings = Settings(upstream=("auto",))
        with capture_logs() as lines:
            found = await starting.found(settings)
        assert found.upstream == (base,)
        assert await starting.moved(settings) == base
        own = Settings(upstream=("auto",), listen=f"127.0.0.1:{server.port}")
        assert await starting.moved(own) is None, "our own port is no engine"
    events = {line["event"]: line for line in lines}
    assert events["engine_nearby"]["use"] == "yes"
    assert events["upstream_chosen"]["url"] == base


async def test_an_address_that_was_given_is_not_searched():
    settings = Settings(upstream=("http://127.0.0.1:1",))
    assert await starting.found(settings) is settings


def test_serve_uses_what_auto_has_found_and_searches_again_only_then(monkeypatch, run_cli):
    """Without a sidecar: `Sidecar.follow` is tested with engines (engine/test_managers.py)."""
    ran: list[tuple[tuple[str, ...], str | None]] = []
    found = [Nearby(base="http://127.0.0.1:1")]

    async def looked(**_: object) -> list[Nearby]:
        return found

    async def serve(
        settings: Settings, *, search: Callable[[], Awaitable[str | None]] | None = None, **_: object
    ) -> None:
        found[:] = [Nearby(base="http://127.0.0.1:2")]
        ran.append((settings.upstream, await search() if search else None))

    monkeypatch.setattr(starting, "look", looked)
    monkeypatch.setattr(app, "serve", serve)
    assert run_cli("serve", "--upstream", "auto")[0] == 0
    assert run_cli("serve", "--upstream", "http://127.0.0.1:1")[0] == 0
    assert ran == [(("http://127.0.0.1:1",), "http://127.0.0.1:2"), (("http://127.0.0.1:1",), None)]

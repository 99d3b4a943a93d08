"""`slotkeeper snapshots` gives the same results on a running sidecar and on a folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr
from rich.console import Console

from slotkeeper.app import running as sidecar
from slotkeeper.cli.admin_client import AskedError
from slotkeeper.cli.snapshots import chosen, folder, running, snapshots
from slotkeeper.cli.terminal import size
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.settings import Settings
from slotkeeper.store.index import Kept
from slotkeeper.values import UsageError
from unit.store.saving import keep, names_in, opened

NO_SERVER = "http://127.0.0.1:1"
IDS = [f"slotkeeper-0123456789ab-{number:08x}" for number in (0x1111AAAA, 0x2222AAAA, 0x3333BBBB)]

Told = Callable[..., tuple[int, str]]


@pytest.fixture
async def two(hot: Path, cold: Path) -> list[Kept]:
    """Keep two snapshots: one in the hot tier, one in both tiers."""
    async with opened(hot, cold) as store:
        kept = [await keep(store, hot) for _ in range(2)]
        await store.copy_cold(kept[1].id)
        return [one for id_ in kept for one in store.listing() if one.id == id_.id]


@pytest.fixture(params=["running", "folder"])
async def ask(request, hot, cold, two, capsys):
    """Run a command; return its exit code and its output."""

    def told(opening, action: str, words: tuple[str, ...], as_json: bool):
        console = Console(record=True, width=200)
        return snapshots(action, words, opening, console, as_json=as_json)

    async def of_folder(action: str, *words: str, as_json: bool = False) -> tuple[int, str]:
        code = await told(folder(hot, cold), action, words, as_json)
        return code, "".join(capsys.readouterr())

    if request.param == "folder":
        yield of_folder
        return
    settings = Settings(
        upstream=(NO_SERVER,),
        listen="127.0.0.1:0",
        admin_listen="127.0.0.1:0",
        admin_token=SecretStr("s3cret"),
        slot_dir=hot,
        cold_dir=cold,
    )
    async with sidecar(settings) as it:
        await it.driver.snapshots.tried.wait()

        async def of_sidecar(action: str, *words: str, as_json: bool = False) -> tuple[int, str]:
            capsys.readouterr()  # the sidecar's own log
            code = await told(running(f"http://{it.addresses[1]}", "s3cret"), action, words, as_json)
            return code, "".join(capsys.readouterr())

        yield of_sidecar


def damage(path: Path) -> None:
    """Damage a file so that only reading all of it shows it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def short(kept: Kept) -> str:
    return kept.id.removeprefix("slotkeeper-")


# -- a running sidecar and a folder --------------------------------------------------------------------


async def test_the_table_lists_each_snapshot_and_the_size_of_each_tier(ask, two):
    code, out = await ask("ls")
    assert code == 0
    for kept in two:
        line = next(line for line in out.splitlines() if short(kept) in line)
        assert "20" in line
    assert "hot, cold" in out
    assert f"hot: 2 snapshots, {size(2 * two[0].manifest.size)}" in out
    assert f"cold: 1 snapshots, {size(two[0].manifest.size)}" in out


async def test_the_json_output_is_the_document_of_the_sidecar(ask, two):
    code, out = await ask("ls", short(two[1]), as_json=True)
    document = json.loads(out)
    assert code == 0
    assert [one["id"] for one in document["snapshots"]] == [two[1].id]
    assert [tier["snapshots"] for tier in document["tiers"]] == [2, 1]


async def test_verify_reports_intact_snapshots_as_whole(ask, two):
    code, out = await ask("verify")
    assert code == 0
    assert "2 of 2 are whole." in out
    assert out.count("whole  ") == 2


async def test_verify_finds_damaged_snapshots_and_fails(ask, two, hot):
    for kept in two:
        damage(hot / f"{kept.id}.slot")
    code, out = await ask("verify")
    assert code == 1
    assert "0 of 2 are whole." in out
    first, second = (next(line for line in out.splitlines() if short(kept) in line) for kept in two)
    assert "damaged" in first
    assert "a whole copy" not in first
    assert "a whole copy is left: cold" in second
    code, out = await ask("verify")
    assert (code, "1 of 1 are whole." in out) == (0, True)


async def test_a_snapshot_is_verified_by_the_end_of_its_id(ask, two, hot):
    damage(hot / f"{two[0].id}.slot")
    code, out = await ask("verify", two[1].id[-8:], as_json=True)
    assert (code, json.loads(out)["verdict"]) == (0, "whole")
    assert len(out.splitlines()) == 1


async def test_a_removed_snapshot_is_gone_from_all_tiers(ask, two, hot, cold):
    code, out = await ask("rm", two[1].id)
    assert (code, out.strip()) == (0, f"removed {short(two[1])}")
    assert not any(two[1].id in name for name in names_in(hot) | names_in(cold))
    assert two[1].id not in (await ask("ls", as_json=True))[1]


async def test_all_snapshots_are_removed_and_an_empty_folder_is_not_a_failure(ask, two, hot, cold):
    code, out = await ask("rm", as_json=True)
    assert code == 0
    assert {json.loads(line)["removed"] for line in out.splitlines()} == {kept.id for kept in two}
    assert names_in(hot) | names_in(cold) == set()
    assert await ask("verify") == (0, "0 of 0 are whole.\n")
    assert (await ask("ls"))[1].startswith("hot: 0 snapshots, 0 B")


async def test_an_unknown_snapshot_id_is_a_usage_error(ask):
    with pytest.raises(UsageError, match="there is no snapshot nonsense"):
        await ask("rm", "nonsense")


# -- only one of the two -------------------------------------------------------------------------------


async def test_the_folder_of_a_running_sidecar_is_refused_with_advice(hot, two, capsys):
    async with opened(hot):
        code = await snapshots("ls", (), folder(hot, None), Console(), as_json=False)
    assert code == 1
    assert "leave --slot-dir out" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_snapshot_quarantined_when_the_folder_is_opened_is_reported(as_json, hot, two, capsys):
    path = hot / f"{two[0].id}.slot"
    path.write_bytes(path.read_bytes()[:-1])
    assert await snapshots("verify", (), folder(hot, None), Console(), as_json=as_json) == 1
    assert f"{two[0].id}: quarantined" in capsys.readouterr().err
    assert await snapshots("verify", (), folder(hot, None), Console(), as_json=as_json) == 0


@pytest.mark.parametrize("flag", ["--slot-dir", "--cold-dir"])
async def test_a_folder_without_snapshots_is_not_changed(flag, hot, two, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    opening = folder(other, None) if flag == "--slot-dir" else folder(hot, other)
    with pytest.raises(UsageError, match=f"{flag}: no sidecar has ever"):
        await snapshots("ls", (), opening, Console(), as_json=False)
    assert not list(other.iterdir())


async def test_a_folder_is_unlocked_after_the_command(hot, two):
    async with folder(hot, None) as inventory:
        assert await inventory.overview()
    async with opened(hot) as store:
        assert len(store.listing()) == 2


async def test_a_folder_that_fails_later_gives_an_error_with_advice(hot, two):
    async with folder(hot, None) as inventory:
        hot.rename(hot.with_name("away"))
        hot.write_bytes(b"")
        with pytest.raises(AskedError, match="Make the folder"):
            await inventory.remove(SnapshotId(two[0].id))


async def test_a_sidecar_without_a_slot_folder_gives_advice_how_to_set_one(capsys):
    settings = Settings(upstream=(NO_SERVER,), listen="127.0.0.1:0", admin_listen="127.0.0.1:0")
    async with sidecar(settings) as it:
        for action in ("ls", "verify", "rm"):
            opening = running(f"http://{it.addresses[1]}", None)
            assert await snapshots(action, (), opening, Console(), as_json=False) == 1
            assert "--slot-dir" in capsys.readouterr().err


async def test_a_sidecar_that_closes_the_connection_is_a_failure(capsys):
    async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        opening = running(f"http://127.0.0.1:{port}", None)
        assert await snapshots("ls", (), opening, Console(), as_json=False) == 1
    assert "broke off" in capsys.readouterr().err


# -- ids -----------------------------------------------------------------------------------------------


def test_a_snapshot_is_chosen_by_its_id_or_the_end_of_its_id():
    assert chosen([IDS[0], "3333bbbb"], IDS) == [IDS[0], IDS[2]]
    assert chosen(["1111aaaa"], IDS) == IDS[:1]
    assert chosen([], IDS) == IDS


@pytest.mark.parametrize(
    ("word", "reason"),
    [("aaaa", "more than one"), ("bbb", "no snapshot bbb"), ("", "no snapshot"), ("slotkeeper-", "no snap")],
)
def test_an_unknown_or_ambiguous_id_is_refused(word, reason):
    with pytest.raises(UsageError, match=reason):
        chosen([word], IDS)

"""What `serve --record` writes of a real session, and whether `lint` and `replay` can read it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chaos.conftest import ready, settings
from slotkeeper.app import running
from slotkeeper.bench.replay import Entry, merged, read, replay
from slotkeeper.cli.main import main

RULES = "Rules of the house. " * 100
SECRET = "sk-of-somebody"  # noqa: S105
HEADERS = {"Authorization": f"Bearer {SECRET}", "User-Agent": "pi/0.73", "Cookie": f"a={SECRET}"}
ASIDE = "/v1/chat/completions?key=" + SECRET


def chat(day: int, *more: dict[str, str]) -> dict[str, Any]:
    """Return a chat of an agent whose system text begins with the date."""
    system = {"role": "system", "content": f"Today's date: 2026-11-{day}\n{RULES}"}
    first = {"role": "user", "content": "What does the shop sell?"}
    return {"messages": [system, first, *more], "max_tokens": 4, "temperature": 0}


MORE = ({"role": "assistant", "content": "Bolts."}, {"role": "user", "content": "And what is low?"})
ANOTHER = {"system": "Another agent.", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
SESSION = (
    (ASIDE, chat(21)),
    ("/v1/chat/completions", chat(22, *MORE)),
    ("/v1/messages", ANOTHER),
    ("/completion", {"prompt": RULES, "n_predict": 4}),
)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def recorded(engine: str, folder: Path) -> list[Entry]:
    """Send the session through a sidecar that records, and that fixes dates."""
    async with running(settings(engine, record=folder, rules=("all=fix",), drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        async with aiohttp.ClientSession(f"http://{sidecar.addresses[0]}", headers=HEADERS) as client:
            for path, body in SESSION:
                raw = json.dumps(body, indent=1).encode()
                kind = {"Content-Type": "application/json"}
                async with client.post(path, data=raw, headers=kind) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            async with client.get("/v1/models") as answer:
                assert answer.status == 200
    return merged([read(path) for path in files(folder)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traces"


async def test_the_recording_has_the_clients_requests_before_rules_changed_them(pair, folder):
    entries = await recorded(pair.behind.base, folder)
    assert [entry.path for entry in entries] == [path.partition("?")[0] for path, _ in SESSION]
    assert [entry.body for entry in entries] == [body for _, body in SESSION]
    assert {entry.client for entry in entries} == {"pi"}
    assert entries[0].session == entries[1].session != entries[2].session
    times = [entry.at for entry in entries]
    assert times == sorted(times)
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in files(folder))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}


async def test_lint_and_replay_can_read_the_recording(pair, folder, capsys):
    await recorded(pair.behind.base, folder)
    traces = files(folder)
    capsys.readouterr()
    assert main(["lint", *map(str, traces), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["others"], told["problems"]) == (3, 1, [])
    assert [finding["rule"] for finding in told["findings"]] == ["date"]

    assert await replay(traces, base=pair.direct.base, against=None, max_tokens=4) == 0
    assert "4 requests in 1 files" in capsys.readouterr().out


async def test_nothing_is_recorded_without_the_setting(fake, sidecar, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with aiohttp.ClientSession(f"http://{data}") as client:
        async with client.post("/v1/chat/completions", json=chat(21)) as answer:
            assert answer.status == 200
    assert list(tmp_path.rglob("*")) == []


async def test_a_recording_folder_without_write_access_fails_no_request_and_is_counted(fake, tmp_path):
    folder = tmp_path / "traces"
    folder.write_text("no folder")
    async with running(settings(fake.base, record=folder, drain_timeout=1.0)) as sidecar:
        await ready(sidecar)
        async with aiohttp.ClientSession(f"http://{sidecar.addresses[0]}") as client:
            async with client.post("/v1/chat/completions", json=chat(21)) as answer:
                assert answer.status == 200
    value = sidecar.metrics.registry.get_sample_value
    assert value("slotkeeper_fallbacks_total", {"reason": "record"}) == 1

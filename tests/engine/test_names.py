"""A conversation has the same name in every view, with no more of its text than may be kept."""

from __future__ import annotations

import io
from typing import Any, Final

import aiohttp
import pytest
from rich.console import Console

from slotkeeper.app import Sidecar
from slotkeeper.bench import lab
from slotkeeper.bench.texts import prose
from slotkeeper.cli.snapshots import running, snapshots
from slotkeeper.cli.top import top
from slotkeeper.cli.why import why

TASK: Final = "Count the lighthouse's ships"
TITLE: Final = "Night ships"
TITLE_REQUEST: Final = "You are a title generator. You output ONLY a thread title."
OPENCODE: Final = {
    "User-Agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23",
    "Authorization": "Bearer k-1",
}


async def asks(client: aiohttp.ClientSession, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    async with client.post("/v1/chat/completions", json=body, headers=OPENCODE) as answer:
        assert answer.status == 200
        return await answer.json()


async def converses(sidecar: Sidecar, seed: int) -> None:
    """Send two turns of an agent, and its title request. `seed`: no two share a beginning."""
    messages = [
        {"role": "system", "content": "You are opencode. " + prose(2000, seed)},
        {"role": "user", "content": TASK},
    ]
    async with aiohttp.ClientSession(lab.url_of(sidecar)) as client:
        said = (await asks(client, *messages))["choices"][0]["message"]
        quoted = {"role": "user", "content": f'"{TASK}"'}
        system = {"role": "system", "content": TITLE_REQUEST}
        only = {"grammar": f'root ::= "{TITLE}"', "max_tokens": 32}
        await asks(client, system, quoted, **only, chat_template_kwargs={"enable_thinking": False})
        await asks(client, *messages, said, {"role": "user", "content": "And the boats?"})


async def views(sidecar: Sidecar, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return each view as text."""
    admin = f"http://{sidecar.addresses[1]}"
    found = {"log": "".join(capsys.readouterr())}
    out = Console(file=io.StringIO(), width=240)
    async with aiohttp.ClientSession(admin) as client, client.get("/api/state") as answer:
        found["state"] = await answer.text()
    listing: dict[str, Any] = {"admin": admin, "token": None, "last": 20, "repeated": False, "as_json": False}
    for name, showing in (
        ("why", why(None, out, **listing)),
        ("why ID", why("last", out, **listing)),
        ("top", top(out, admin=admin, token=None, every=1.0, once=True)),
        ("snapshots", snapshots("ls", (), running(admin, None), out, as_json=False)),
    ):
        out.file = io.StringIO()
        assert await showing == 0
        found[name] = out.file.getvalue()
    return found


async def test_every_view_shows_the_same_name_of_a_conversation(engine, capsys):
    async with lab.keeping(engine, why_text=True) as sidecar:
        await converses(sidecar, 7)
        await lab.rested(sidecar)
        (name,) = {str(one.name) for one in sidecar.driver.journal if one.kind != "side"}
        assert name == f"opencode #1: {TITLE}"
        for view, text in (await views(sidecar, capsys)).items():
            assert ("opencode #1" if view == "log" else name) in text, view
        clients = list(sidecar.driver.journal.clients)
        assert [(client.agent, client.sums.requests) for client in clients] == [("opencode", 3)]
        assert "k-1" not in repr(clients)


async def test_without_why_text_no_view_shows_a_word_of_a_prompt(engine, capsys):
    async with lab.keeping(engine) as sidecar:
        await converses(sidecar, 8)
        await lab.rested(sidecar)
        for view, text in (await views(sidecar, capsys)).items():
            assert "opencode #1" in text, view
            assert "lighthouse" not in text, view
            assert TITLE not in text, view

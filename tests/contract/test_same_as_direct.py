"""The data port is llama-server: requests get the same answers directly and through the sidecar."""

from collections.abc import Iterable
from io import BytesIO

import aiohttp
import pytest

from chaos.conftest import settings
from chaos.raw import until
from contract import cases
from contract.cases import Case
from contract.compare import ask
from slotkeeper.app import running
from slotkeeper.scheduler.types import Reason


async def erase(address: str) -> None:
    for slot in (0, 1):
        reply = await ask(address, Case("erase", "POST", f"/slots/{slot}?action=erase", {}, b"{}"))
        assert reply.status == 200


async def differences(direct: str, behind: str, through: str, asked: Iterable[Case]) -> list[str]:
    """Return one line for each request whose answers differ."""
    found = []
    for case in asked:
        if case.cold:
            await erase(direct)
            await erase(behind)
        theirs, ours = await ask(direct, case), await ask(through, case)
        for part in ("status", "headers", "body"):
            one, other = getattr(theirs, part), getattr(ours, part)
            if one != other:
                found.append(f"{case.name}: {part}\n   directly {one!r}\n through us {other!r}")
    return found


@pytest.mark.parametrize("kind", ["plain", "text", "generated", "refused", "actions"])
async def test_every_answer_equals_the_engines_answer(pair, before, kind):
    asked = list(getattr(cases, kind)())
    found = await differences(pair.direct.base, pair.behind.base, before.addresses[0], asked)
    assert not found, f"{len(found)} differences in {len(asked)} requests:\n" + "\n".join(found)


async def test_keys_are_checked_by_the_engine_alone(locked_pair):
    async with running(settings(locked_pair.behind.base, drain_timeout=1.0)) as sidecar:
        link = sidecar.driver.links[locked_pair.behind.base]
        await until(lambda: link.obstacle is Reason.KEY_REFUSED, "the probe has met the engine's refusal")
        asked = [Case(c.name, c.method, c.path, c.headers, c.body) for c in cases.locked()]
        direct, behind = locked_pair.direct.base, locked_pair.behind.base
        found = await differences(direct, behind, sidecar.addresses[0], asked)
        assert not found, "\n".join(found)
        await until(lambda: link.ready, "with a client's key the engine could be probed")


async def test_an_engines_refusal_before_the_end_of_the_body_reaches_the_client(locked_pair):
    """The engine checks the key first, answers, and closes with the upload unread."""
    base = locked_pair.behind.base
    large = b'{"content": "' + b"x" * 8_000_000 + b'"}'
    bad = {"Authorization": "Bearer bad"}
    async with running(settings(base, drain_timeout=1.0)) as sidecar:
        async with aiohttp.ClientSession(f"http://{sidecar.addresses[0]}") as client:
            for path in ("/tokenize", "/v1/chat/completions") * 6:
                async with client.post(path, data=BytesIO(large), headers=bad) as answer:
                    assert answer.status == 401
                    assert (await answer.json())["error"]["type"] == "authentication_error"

"""What an engine receives from agents that rewrite their own prompts, in each mode, for each client."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import orjson
import pytest

from chaos.conftest import settings
from chaos.fake_answers import PATHS
from chaos.raw import dial, until
from engine.conftest import probed
from slotkeeper.api.head import Api
from slotkeeper.observe.sentences import sentences
from slotkeeper.runtime.rewriting import Rewriting
from slotkeeper.scheduler.types import Reason

HANDBOOK = "Keep lines short. " * 60
CHAT = PATHS[Api.CHAT]
FIRST, SECOND = "Current date: 2026-11-21", "Current date: 2026-11-22"
SAID = {"role": "assistant", "content": "It sells bolts."}
TASKS = ("What does the shop sell?", "And what is low?")


def request(date: str, tasks: int) -> dict[str, Any]:
    """Return a request like Continue's: the date precedes much text that need not be computed again."""
    messages = [{"role": "system", "content": f"You are an agent.\n\n{date}\n\n{HANDBOOK}"}]
    for number in range(tasks):
        messages += [{"role": "user", "content": TASKS[number]}, SAID]
    return {"model": "m", "messages": messages[:-1], "stream": False}


async def post(data: str, body: dict[str, Any], **headers: str) -> bytes:
    """Send it with unusual formatting, so that a body that was written again can be recognised."""
    raw = json.dumps(body, indent=1).encode()
    async with dial(data) as wire:
        await wire.post(CHAT, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        await wire.body(await wire.head())
    return raw


def heard(fake: Any, at: int = -1) -> list[dict[str, Any]]:
    return orjson.loads(fake.ran[at].body)["messages"]


def untouched(fake: Any, raw: bytes) -> bool:
    """Check that the body is unchanged except the sidecar's keys at its ends."""
    return raw.removeprefix(b"{").removesuffix(b"}").strip() in fake.ran[-1].body


@pytest.mark.parametrize("mode", ["observe", "off"])
async def test_a_request_is_not_changed_by_rules_that_only_observe_or_are_off(fake, mode):
    async with probed(settings(fake.base, rules=(f"all={mode}",))) as sidecar:
        for date, tasks in ((FIRST, 1), (SECOND, 2)):
            raw = await post(sidecar.addresses[0], request(date, tasks))
            assert untouched(fake, raw)


async def test_a_changed_date_is_moved_behind_the_newest_message_and_stays_there(fake):
    async with probed(settings(fake.base, rules=("date=fix",))) as sidecar:
        data = sidecar.addresses[0]
        assert untouched(fake, await post(data, request(FIRST, 1)))
        await post(data, request(SECOND, 2))
        system, first, _, second = heard(fake)
        assert FIRST in system["content"]
        assert first["content"] == TASKS[0]
        assert second["content"].startswith(TASKS[1])
        assert SECOND in second["content"]

        longer = request(SECOND, 2)
        longer["messages"] += [SAID, {"role": "user", "content": "Thanks."}]
        await post(data, longer)
        assert heard(fake)[:4] == [system, first, SAID, second]
        assert heard(fake)[-1]["content"] == "Thanks."


async def test_a_request_is_not_changed_if_that_costs_more_tokens_than_it_saves(fake):
    """A note is longer than these few words, which the engine computes faster."""
    async with probed(settings(fake.base, rules=("date=fix",))) as sidecar:
        for date, tasks in ((FIRST, 1), (SECOND, 2)):
            body = request(date, tasks)
            body["messages"][0]["content"] = date
            raw = await post(sidecar.addresses[0], body)
            assert untouched(fake, raw)
        value = sidecar.metrics.registry.get_sample_value
        assert value("slotkeeper_rewrites_total", {"rule": "date", "action": "declined"}) == 1
        (record, _) = sidecar.driver.journal
        assert record.weighed.own < record.weighed.changed
        assert not record.weighed.taken
        assert any("tokens to compute" in said for said in sentences(record))


async def test_a_bypass_request_is_not_changed(fake):
    async with probed(settings(fake.base, rules=("all=fix",))) as sidecar:
        data = sidecar.addresses[0]
        await post(data, request(FIRST, 1))
        raw = await post(data, request(SECOND, 2), X_Slotkeeper_Bypass="1")
        assert fake.ran[-1].body == raw


async def test_requests_of_another_key_do_not_change_a_request(fake):
    async with probed(settings(fake.base, rules=("all=fix",))) as sidecar:
        data = sidecar.addresses[0]
        await post(data, request(FIRST, 1), Authorization="Bearer one")
        raw = await post(data, request(SECOND, 2), Authorization="Bearer two")
        assert untouched(fake, raw)


async def test_a_rule_can_be_for_one_client_only(fake):
    async with probed(settings(fake.base, rules=("date=fix@pi/*",))) as sidecar:
        data = sidecar.addresses[0]
        for agent, fixed in (("pi/0.73", True), ("other/1", False)):
            await post(data, request(FIRST, 1), User_Agent=agent)
            raw = await post(data, request(SECOND, 2), User_Agent=agent)
            assert untouched(fake, raw) is not fixed


@pytest.mark.parametrize("name", ["take", "answered"])
async def test_a_bug_in_a_rule_does_not_fail_the_request(fake, name):
    async with probed(settings(fake.base, rules=("all=fix",))) as sidecar:
        data = sidecar.addresses[0]
        await post(data, request(FIRST, 1))
        with patch.object(Rewriting, name, side_effect=RuntimeError("a bug")) as broken:
            raw = await post(data, request(SECOND, 2))
            await until(lambda: broken.called, "an answer is taken note of after its client has it")
        assert untouched(fake, raw) is (name == "take")
        counted = {"take": "rewrite", "answered": "explain"}[name]
        value = sidecar.metrics.registry.get_sample_value
        assert value("slotkeeper_fallbacks_total", {"reason": counted}) == 1
        assert not value("slotkeeper_decisions_total", {"reason": Reason.FAIL_OPEN.value})

"""`X-Slotkeeper-Conversation` on answers: one name per conversation, which reveals nothing."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from patience import PATIENCE
from slotkeeper.api.head import CONVERSATION
from slotkeeper.bench.lab import sidecar as running

TREASURE = "the treasure lies under the third stone"


@pytest.fixture
async def data(engine):
    async with running(engine.base, engine.flags) as url:
        yield url


async def ask(
    data: str, messages: list[dict[str, str]], *, stream: bool = False, **headers: str
) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 2, "stream": stream, "temperature": 0}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        return await client.post(f"{data}/v1/chat/completions", json=body, headers=headers)


def given(name: str) -> dict[str, Any]:
    return {CONVERSATION: name}


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_keeps_its_name_and_another_gets_another_name(data, stream):
    first = await ask(data, said(f"{TREASURE} {stream}"), stream=stream)
    name = first.headers[CONVERSATION]
    assert re.fullmatch("[0-9a-f]{16}", name)
    again = await ask(data, said(f"{TREASURE} {stream}", "Where?", "There."), stream=stream)
    assert again.headers[CONVERSATION] == name
    other = await ask(data, said(f"something else {stream}"), stream=stream)
    assert other.headers[CONVERSATION] != name


async def test_a_client_that_sends_the_name_back_keeps_it_at_another_sidecar(engine, data):
    first = await ask(data, said("keep this"))
    name = first.headers[CONVERSATION]
    async with running(engine.base, engine.flags) as elsewhere:
        answer = await ask(elsewhere, said("keep this", "Yes.", "Go on."), **given(name))
    assert answer.headers[CONVERSATION] == name


async def test_a_name_from_the_client_is_answered_only_if_it_is_safe(data):
    answer = await ask(data, said("named"), **given("task-7"))
    assert answer.headers[CONVERSATION] == "task-7"
    unsafe = await ask(data, said("named otherwise"), **given("a name with spaces"))
    assert re.fullmatch("[0-9a-f]{16}", unsafe.headers[CONVERSATION])


async def test_the_same_messages_from_two_clients_get_two_names(data):
    """A name must not reveal what other clients have sent."""
    names = [
        (await ask(data, said(TREASURE), Authorization=f"Bearer {key}")).headers[CONVERSATION]
        for key in ("first-client-key", "second-client-key")
    ]
    assert names[0] != names[1]


async def test_an_error_answer_has_no_conversation_name(data):
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(f"{data}/v1/chat/completions", json={"messages": "none"})
    assert answer.is_error
    assert CONVERSATION not in answer.headers

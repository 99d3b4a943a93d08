"""Which answers with an error count as failures of their engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from slotkeeper.api.answers.answer import Answer
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.head import Api
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.exchange.exchange import FailedRequest, is_failure, judge
from slotkeeper.runtime.tasks import here
from unit.runtime.stubs import StubLink

CHAT = b'{"messages":[{"role":"user","content":"x"}],"tools":[{}],"max_tokens":7}'
PICTURE = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y"}}]}]}'


@pytest.mark.parametrize(
    ("status", "error", "fails"),
    [
        (200, None, False),
        (200, "server_error", True),  # the last event of a stream
        (200, "exceed_context_size_error", False),
        (400, "invalid_request_error", False),
        (500, "server_error", True),
        (501, "not_supported_error", False),
        (502, "502", True),
        (503, "unavailable_error", True),
    ],
)
def test_server_errors_are_failures_of_the_engine(status, error, fails):
    answer = Answer(figures=Figures(), reply=None, complete=True, error=error)
    assert is_failure(status, answer) is fails


async def judged(status: int, body: bytes, api: Api = Api.CHAT, template: Exception | None = None):
    """Return how often the failure was counted, and the chats that the engine was asked to render."""
    asked: list[Any] = []
    counted: list[bool] = []

    async def apply_template(chat: Any, *, headers: Any) -> str:
        asked.append(chat)
        if template:
            raise template
        return "a prompt"

    link = StubLink()
    link.client = cast("Any", SimpleNamespace(apply_template=apply_template))
    driver = SimpleNamespace(failed=lambda _, *, broken: counted.append(broken))
    await judge(cast("Any", driver), link, FailedRequest(api, body, {}, status), here)
    return counted, asked


@pytest.mark.parametrize("body", [CHAT, PICTURE], ids=["tools", "picture"])
async def test_a_chat_that_the_template_refuses_too_is_not_counted(body):
    counted, asked = await judged(500, body, template=EngineError(500, "Missing tool type"))
    assert counted == []
    assert [chat["messages"][0]["role"] for chat in asked] == ["user"]


@pytest.mark.parametrize(
    "template",
    [None, EngineError(404, "not found"), EngineError(503, "Loading model"), EngineGoneError("gone")],
    ids=str,
)
async def test_a_chat_of_which_the_engine_makes_a_prompt_is_counted(template):
    assert (await judged(500, CHAT, template=template))[0] == [False]


@pytest.mark.parametrize(
    ("status", "api", "body"),
    [
        (503, Api.CHAT, CHAT),  # of a server that is not ready, whatever is sent to it
        (500, Api.COMPLETION, b'{"prompt":"x"}'),
        (500, Api.CHAT, b'{"messages":7}'),
        (500, Api.TASK, b'{"input":"x"}'),
    ],
)
async def test_other_failures_are_counted_without_a_further_call(status, api, body):
    assert await judged(status, body, api, EngineError(500, "no")) == ([False], [])

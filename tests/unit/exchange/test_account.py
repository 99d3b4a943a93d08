"""What the account of a request writes into its record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from patience import PATIENCE
from slotkeeper.api.answers.answer import ProgressFilter
from slotkeeper.api.head import Api
from slotkeeper.api.request import NotPlain
from slotkeeper.conversation.naming import Name, Naming
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.exchange.exchange import Account
from slotkeeper.observe.request_record import RequestStage
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Event, Gone
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.types import Reason, RequestId
from slotkeeper.vocab.tokenizer import TokenizeError
from unit.runtime.conftest import driver, link
from unit.runtime.stubs import fallbacks, settled

__all__ = ["driver", "link"]

BODY = orjson.dumps({"messages": [{"role": "user", "content": "Which bolts are low?"}]})
PREFILLING = (
    b'data: {"choices":[],"prompt_progress":{"total":400,"cache":100,"processed":300,"time_ms":9}}\n\n'
)


async def account(driver) -> Account:
    made = Account(driver, Api.CHAT, "r-1", {}, {}, client="anna", conversation="t")
    await made.parse(BODY)
    return made


async def test_the_parsed_request_is_recorded_at_once(driver):
    mine = await account(driver)
    mine.waits()
    came = mine.record
    assert (came.request_id, came.route, came.client, came.named) == ("r-1", "chat", "anna", "t")
    assert came.body_bytes == len(BODY)
    (parsed,) = came.spans
    assert (parsed.stage, parsed.begin) == (RequestStage.PARSE, 0.0)


async def test_an_account_knows_whether_its_body_is_an_object(driver):
    assert (await account(driver)).parsed
    made = Account(driver, Api.CHAT, "r-1", {}, {}, client="anna", conversation=None)
    with pytest.raises(NotPlain):
        await made.parse(b"{broken}")
    assert not made.parsed


async def test_a_request_that_is_not_a_chat_is_named_by_its_program_and_records_its_model(driver):
    curl = {"User-Agent": "curl/8.5.0"}
    made = Account(driver, Api.COMPLETION, "r-1", {}, curl, client="anna", conversation=None)
    await made.parse(orjson.dumps({"prompt": "Once", "model": "gemma"}))
    assert (str(made.record.name), made.record.model) == ("curl", "gemma")


@pytest.mark.parametrize("model", [None, 7, "", "x" * 200, "a\nb", "a\x1b[31m"])
async def test_a_model_name_that_cannot_be_displayed_is_not_recorded(driver, model):
    made = Account(driver, Api.CHAT, "r-1", {}, {}, client="anna", conversation=None)
    await made.parse(orjson.dumps({"messages": [], "model": model}))
    assert made.record.model is None


async def test_a_failed_naming_does_not_fail_the_request(driver):
    class Broken(Naming):
        def coming(self, *_: object, **__: object) -> Name:
            raise KeyError("n")

    made = Account(driver, Api.CHAT, "r-1", {}, {}, client="anna", conversation=None, names=Broken())
    await made.parse(BODY)
    assert made.forms.ask is not None
    assert fallbacks(driver, "explain") == 1


@pytest.mark.parametrize("says", [Tokens(range(40)), EngineGoneError("gone")])
async def test_the_render_span_begins_when_the_rendering_begins(driver, link, says):
    """A brief request is rendered only after its answer."""
    link.says = says
    mine = await account(driver)
    assert mine.open()
    began = driver.now()
    mine.render()
    mine.render()
    await mine.rendered.wait()
    (rendered,) = (span for span in mine.record.spans if span.stage is RequestStage.RENDER)
    assert rendered.begin >= began - mine.record.at
    assert rendered.tokens == (40 if isinstance(says, Tokens) else None)
    mine.gone()
    await settled()


@pytest.mark.parametrize(
    ("says", "counted"),
    [
        (EngineError(500, "this model takes no tools"), 0),
        (EngineGoneError("gone"), 0),
        (ValueError("not a token id"), 0),
        (TokenizeError("no separators"), 1),
    ],
)
async def test_content_that_a_model_cannot_take_is_no_fault_of_ours(driver, link, says, counted):
    link.says = says
    mine = await account(driver)
    assert mine.open()
    mine.render()
    await mine.rendered.wait()
    assert fallbacks(driver, "render") == counted
    mine.gone()
    await settled()


async def test_the_wait_for_an_idle_moment_has_a_limit(driver, monkeypatch):
    monkeypatch.setattr(type(driver.placement), "holds", lambda *_: True)
    monkeypatch.setattr(type(driver.placement), "serving", True)
    assert not await driver.idle_moment(RequestId("1:r-1"), within=0.2)
    monkeypatch.setattr(type(driver.placement), "serving", False)
    assert await driver.idle_moment(RequestId("1:r-1"), within=PATIENCE)


async def test_an_answer_that_ends_before_its_prompt_was_rendered_is_compared_with_it_later(driver, link):
    """The engine counted 41 tokens where we made 40."""
    doubts: list[str] = []
    link.says, link.tokenizer = Tokens(range(40)), SimpleNamespace(distrust=doubts.append)
    mine = await account(driver)
    mine.open()
    mine.listener.begin(cast("Any", SimpleNamespace(headers={}, content_type="application/json", status=200)))
    mine.listener.read(b'{"timings":{"prompt_n":41,"cache_n":0},"usage":{"prompt_tokens":41}}')
    went = Forward(request=mine.key, engine=link.engine, slot=0, reason=Reason.CONTINUES)
    mine.finished(went, link, 200)
    assert (mine.rendered.is_set(), doubts) == (False, [])
    await mine.rendered.wait()
    await settled()
    assert doubts == ["counted 40 tokens where the engine counted 41"]


async def test_a_closed_account_records_the_outcome_and_the_duration(driver):
    mine = await account(driver)
    assert mine.record.outcome == "running"
    mine.outcome = "client_gone"
    mine.close()
    assert (mine.record.outcome, mine.record.status) == ("client_gone", None)
    assert mine.record.seconds >= mine.record.spans[0].end


async def test_a_request_that_is_sent_again_reports_nothing_of_its_first_answer(driver, monkeypatch):
    """Its client may leave before an engine begins the second answer."""
    left: list[Gone] = []
    post = driver.post

    def noted(event: Event) -> None:
        if isinstance(event, Gone):
            left.append(event)
        post(event)

    monkeypatch.setattr(driver, "post", noted)
    mine = await account(driver)
    mine.open()
    mine.progress = ProgressFilter()
    mine.listener.begin(
        cast("Any", SimpleNamespace(headers={}, content_type="text/event-stream", status=200))
    )
    mine.listener.without(mine.progress, PREFILLING)
    mine.listener.read(PREFILLING)
    mine.gone()
    assert (left[-1].reached, left[-1].cached) == (300, 100)
    cost = mine.charge.tokens
    mine.open()
    mine.gone()
    assert (left[-1].reached, left[-1].cached, mine.charge.tokens) == (None, 0, cost)

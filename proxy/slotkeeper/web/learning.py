"""After an answer: the ids of the reply, as it was sampled and as the next turn will begin with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slotkeeper.api.document import Doc
from slotkeeper.api.request import Ask, NotOurs
from slotkeeper.observe.log import get_logger, sayable
from slotkeeper.runtime import render
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.events import NextKnown, ReplyKnown
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import RequestId

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """A request whose answer has ended well."""

    request: RequestId
    request_id: str  # the client's name for it
    client: str
    auth: Mapping[str, str]
    ask: Ask
    prompt: Tokens
    reply: Doc
    generated: int  # tokens


async def learn(driver: Driver, link: EngineLink, heard: AnsweredRequest) -> None:
    """Tell the driver what can be found out; nothing, where rendering fails."""
    await _as_sampled(driver, link, heard)
    begins = await _as_sent_back(driver, link, heard) if driver.looks_ahead else None
    driver.post(NextKnown(at=driver.now(), request=heard.request, tokens=begins))


async def _as_sampled(driver: Driver, link: EngineLink, heard: AnsweredRequest) -> None:
    try:
        tokens = await render.with_reply(
            link, heard.ask, heard.prompt, heard.reply, generated=heard.generated, auth=heard.auth
        )
    except render.FAILURES as error:
        log.debug("reply_not_rendered", request_id=heard.request_id, error=sayable(error))
        return
    if tokens is not None:
        driver.post(ReplyKnown(at=driver.now(), request=heard.request, tokens=tokens))


async def _as_sent_back(driver: Driver, link: EngineLink, heard: AnsweredRequest) -> Tokens | None:
    try:
        return await driver.next_turns.prefix(
            link,
            heard.ask,
            heard.reply,
            client=heard.client,
            auth=heard.auth,
            moment=lambda: driver.idle_moment(heard.request),
        )
    except (*render.FAILURES, NotOurs) as error:
        log.debug("next_turn_not_rendered", request_id=heard.request_id, error=sayable(error))
        return None

"""Which failed answers are the engine's own fault: only these count for its circuit breaker.

llama-server answers 500 also if the request is at fault: for messages and tools of no known shape, and if the
template raises. Its route /apply-template answers these bodies with 500 too, although it computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from slotkeeper.api.answer import Answer
from slotkeeper.api.document import Doc
from slotkeeper.api.head import Api
from slotkeeper.api.request import HEAVY, chat_of, is_large
from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.tasks import Runner, here

SERVER_ERROR: Final = 500  # and above: a failure of the engine, not of the client
NO_SUCH: Final = 501  # except this: the engine does not have the feature
OF_STREAMS: Final = "server_error"  # the type of an error that the engine writes into a stream


def is_failure(status: int, answer: Answer) -> bool:
    """Whether an answer failed by its status, or its stream ended with an error of the engine.

    The head of a stream is sent when its task begins, so an error of the computation comes behind a 200.
    """
    if status < 400:
        return answer.error == OF_STREAMS
    return status >= SERVER_ERROR and status != NO_SUCH


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request as it was sent to an engine, which failed."""

    api: Api
    body: bytes
    auth: Mapping[str, str]
    status: int  # of the answer


async def judge(driver: Driver, link: EngineLink, failed: FailedRequest, aside: Runner) -> None:
    """Record that the engine failed a request, unless the request is at fault.

    A heavy request may be at fault: to find out would stop the event loop, and a lighter one will show it.
    """
    if failed.status == SERVER_ERROR and len(failed.body) > HEAVY:
        return
    run = aside if is_large(failed.body) else here
    chat = await run(chat_of, failed.api, failed.body) if failed.status == SERVER_ERROR else None
    if chat is None or not await _refused(link, chat, failed.auth):
        driver.failed(link, broken=False)


async def _refused(link: EngineLink, chat: Doc, auth: Mapping[str, str]) -> bool:
    """Whether the engine does not even make the prompt of a chat."""
    try:
        await link.client.apply_template(chat, headers=auth or link.auth)
    except EngineError as error:
        return error.status == SERVER_ERROR
    except EngineGoneError:
        return False
    return False

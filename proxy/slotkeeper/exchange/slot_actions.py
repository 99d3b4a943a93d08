"""Clients' own `POST /slots/N?action=save|restore|erase`: only in a free slot, and never on our files.

An action is parsed once and written anew, so that the engine gets exactly what we checked. The engine parses
paths and queries in its own way (`stoi`, the last of two values), and our files are in the folder where it
saves. An ambiguous action is sent on in a form that is certainly wrong, so that the client gets the engine's
own error.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import orjson
from aiohttp import web

from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.api.request import named_model
from slotkeeper.exchange.forwarding import Upstream, UpstreamAnswer, answering
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Acted, Arrived, Gone
from slotkeeper.scheduler.types import ClientId, EngineId, ModelName, RequestId

OURS: Final = "slotkeeper"  # the names of all our files begin with it
NO_SLOT: Final = "x"
NO_ACTION: Final = "none"
_SLOT: Final = re.compile(r"[0-9]{1,9}")


class Act(StrEnum):
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAction:
    slot: int | None  # as the client wrote it; the engine takes it modulo its slots (T8); None: no number
    act: Act | None
    target: str  # path and query
    body: bytes
    model: str | None = None  # the model that the body names, for a router

    @property
    def refused(self) -> bool:
        """Whether the action is invalid, so that the engine can only answer with an error."""
        return self.slot is None or self.act is None


def read_action(target: str, body: bytes) -> SlotAction:
    """Parse an action.

    Raises ClientFault for a body that is not JSON, or that names one of our files.
    """
    path, _, query = target.partition("?")
    word = unquote(path).rpartition("/")[2]
    slot = int(word) if _SLOT.fullmatch(word) else None
    named = parse_qs(query, keep_blank_values=True).get("action", [])
    act = Act(named[0]) if len(named) == 1 and named[0] in set(Act) else None
    return SlotAction(
        slot=slot,
        act=act,
        target=f"/slots/{NO_SLOT if slot is None else slot}?action={act or NO_ACTION}",
        body=b"{}" if act is Act.ERASE or act is None else _checked(body),
        model=named_model(body),
    )


def _checked(body: bytes) -> bytes:
    """Return the body written anew, an object with its file name only; "" stays "". Raises ClientFault."""
    if not body:
        return b""
    try:
        doc: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:  # the engine's parser might accept it
        raise ClientFault(f"the body is not JSON: {error}") from None
    if not isinstance(doc, dict):
        return orjson.dumps(doc)
    name = doc.get("filename")
    # Fold the name as a file system does that ignores case or ligatures.
    if isinstance(name, str) and unicodedata.normalize("NFKC", name).casefold().startswith(OURS):
        raise ClientFault(f"files whose names begin with {OURS} are the sidecar's own; choose another name")
    return orjson.dumps({"filename": name} if "filename" in doc else {})


def left_by(act: Act | None, status: int, answer: bytes) -> int | None:
    """Return the number of tokens that the slot holds after the engine's answer; None if it is unchanged."""
    if act in {None, Act.SAVE} or (act is Act.ERASE and status >= 400):
        return None
    if status >= 400:  # a restore that fails leaves the slot empty (engine.md 2.1)
        return 0
    try:
        return int(orjson.loads(answer)["n_restored"]) if act is Act.RESTORE else 0
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return 0


# -- running an action -----------------------------------------------------------------------------------

OFF: Final = "slot actions are off while clients have caches of their own (--namespaces)"


class SlotActions:
    """Runs clients' slot actions. Each waits in the queue for its slot, as a request does."""

    def __init__(self, driver: Driver, upstream: Upstream, allowed: Callable[[], bool]) -> None:
        self._driver = driver
        self._upstream = upstream
        self._allowed = allowed

    async def answer(
        self, request: web.Request, body: bytes, known_as: str, client: ClientId, model: ModelName
    ) -> web.StreamResponse:
        """Return the engine's answer; `model` is the one that the path names.

        Raises Fault if we refuse the action or cannot reach the engine.
        """
        if not self._allowed():
            raise ClientFault(OFF, status=403)
        action = read_action(request.rel_url.raw_path_qs, body)
        driver = self._driver
        key = RequestId(f"action {next(driver.numbers)}")
        model = model or driver.engines.model_of(action.model)
        await driver.engines.awake(driver.now(), model)
        if action.refused:
            engine = driver.engines.front(model).engine
            return (await self._send(engine, action, request, known_as)).response(known_as)
        arrived = Arrived(
            at=driver.now(),
            request=key,
            client=client,
            rendered=False,
            model=model,
            id_slot=action.slot,
            action=True,
        )
        try:
            forward = await driver.admit(arrived)
        except asyncio.CancelledError:
            driver.post(Gone(at=driver.now(), request=key))
            raise
        # Once sent, the engine performs the action whether or not the client still waits.
        outcome: list[UpstreamAnswer | UpstreamFault] = []
        await asyncio.shield(driver.tasks.start(self._act(forward, action, request, known_as, outcome)))
        match outcome:
            case [UpstreamAnswer() as answer]:
                return answer.response(known_as)
            case [UpstreamFault() as fault]:
                driver.links[forward.engine].kick()
                raise fault
        raise AssertionError("an action ends with an answer or a fault")

    async def _act(
        self,
        forward: Forward,
        action: SlotAction,
        request: web.Request,
        known_as: str,
        outcome: list[UpstreamAnswer | UpstreamFault],
    ) -> None:
        driver, left = self._driver, None if action.act is Act.SAVE else 0  # 0 until the answer is known
        try:
            answer = await self._send(forward.engine, action, request, known_as)
            left = left_by(action.act, answer.status, answer.body)
            outcome.append(answer)
        except UpstreamFault as fault:
            outcome.append(fault)
        finally:
            driver.post(Acted(at=driver.now(), request=forward.request, left=left))

    async def _send(
        self, engine: EngineId, action: SlotAction, request: web.Request, known_as: str
    ) -> UpstreamAnswer:
        link = self._driver.links[engine]
        address, body = link.address, action.body
        if address.model and isinstance(doc := orjson.loads(body or b"{}"), dict):
            body = orjson.dumps(address.body("POST", doc))
        async with answering(link):
            path = address.passed_on(action.target, held=True)
            sent = await self._upstream.post(address.base, path, body, request, known_as)
            async with sent:
                return await UpstreamAnswer.of(sent)

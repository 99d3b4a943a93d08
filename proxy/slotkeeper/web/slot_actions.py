"""Clients' own saves, restores and erasures: in a slot that is free, and never in our files."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from aiohttp import web

from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.api.slot_actions import Act, SlotAction, left_by, read_action
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.effects import Forward
from slotkeeper.scheduler.events import Acted, Arrived, Gone
from slotkeeper.scheduler.types import ClientId, EngineId, RequestId
from slotkeeper.web.upstream import Upstream, UpstreamAnswer, answering

OFF: Final = "slot actions are off here; the operator of the sidecar can allow them (--slot-actions on)"

_numbers = itertools.count(1)


class SlotActions:
    """Each is a request for its slot, and waits in our line for it as others do."""

    def __init__(
        self, driver: Driver, upstream: Upstream, *, prefix: str, allowed: Callable[[], bool]
    ) -> None:
        self._driver = driver
        self._upstream = upstream
        self._prefix = prefix
        self._allowed = allowed

    async def answer(
        self, request: web.Request, body: bytes, known_as: str, client: ClientId
    ) -> web.StreamResponse:
        """The engine's own answer. Raises Fault for what is refused here, or cannot be reached."""
        if not self._allowed():
            raise ClientFault(OFF, status=403)
        action = read_action(request.rel_url.raw_path_qs, body, self._prefix)
        driver, key = self._driver, RequestId(f"action {next(_numbers)}")
        await driver.awake(driver.now())
        if action.refused:
            return (await self._send(driver.front.engine, action, request, known_as)).response(known_as)
        arrived = Arrived(
            at=driver.now(),
            request=key,
            client=client,
            rendered=False,
            id_slot=action.slot,
            action=True,
        )
        try:
            forward = await driver.admit(arrived)
        except asyncio.CancelledError:
            driver.post(Gone(at=driver.now(), request=key))
            raise
        # Once it is sent the engine does it, whether or not its client waits for that.
        said: list[UpstreamAnswer | UpstreamFault] = []
        await asyncio.shield(driver.tasks.start(self._act(forward, action, request, known_as, said)))
        match said:
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
        said: list[UpstreamAnswer | UpstreamFault],
    ) -> None:
        driver, left = self._driver, None if action.act is Act.SAVE else 0  # as long as it is unknown
        try:
            answer = await self._send(forward.engine, action, request, known_as)
            left = left_by(action.act, answer.status, answer.body)
            said.append(answer)
        except UpstreamFault as fault:
            said.append(fault)
        finally:
            driver.post(Acted(at=driver.now(), request=forward.request, left=left))

    async def _send(
        self, engine: EngineId, action: SlotAction, request: web.Request, known_as: str
    ) -> UpstreamAnswer:
        async with answering(self._driver.links[engine]):
            sent = await self._upstream.post(engine, action.target, action.body, request, known_as)
            async with sent:
                return await UpstreamAnswer.of(sent)

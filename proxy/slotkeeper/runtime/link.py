"""The line to one engine: is it there, is it the same process as before, what are its traits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from slotkeeper.engine.answers import SAID
from slotkeeper.engine.client import EngineError, EngineGoneError, Health
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.http import EngineAddress
from slotkeeper.observe.log import get_logger
from slotkeeper.runtime.known_engine import KnownEngine
from slotkeeper.scheduler.types import EngineId, SlotId

CALM: Final = 1.0  # seconds between looks at /health; neither it nor /props wakes a sleeping engine
EAGER: Final = 0.1  # seconds, while the engine is not there
FILES_RETRY: Final = 30.0  # seconds
FROZEN: Final = 30.0  # seconds without a sign of life, until an engine is given up
LONGEST_LOOK: Final = 5.0  # seconds
THAW: Final = 1.0  # seconds in which a frozen engine, once it goes on, reads what was sent to it meanwhile
UNAUTHORIZED: Final = 401
THERE: Final = frozenset({Health.OK, Health.SLEEPING, Health.ROUTER, Health.UNLOADED})
REFUSALS: Final = 3  # of GET /slots in a row: without it free slots cannot be known

log = get_logger(__name__)


class EngineLink(KnownEngine):
    """Watches one engine and speaks its control routes."""

    def __init__(
        self,
        engine: EngineId,
        *,
        address: EngineAddress | None = None,
        api_key: str | None,
        flags: EngineFlags | None = None,
        slot_dir: Path | None = None,
        may_compute: bool = False,
        may_read: bool = False,
        frozen_after: float = FROZEN,
    ) -> None:
        """How to watch an engine.

        `address`: without one its id is its URL. `slot_dir` is its --slot-save-path as we see it. What is
        allowed to find out more: `may_compute` a canary, while it is unused, `may_read` to look for its
        process on this machine. It is given up after `frozen_after` seconds of silence.
        """
        super().__init__(
            engine,
            address=address,
            api_key=api_key,
            flags=flags,
            slot_dir=slot_dir,
            may_compute=may_compute,
            may_read=may_read,
        )
        self.labels: tuple[tuple[str, str], ...] = ()  # by which its user tells it from others
        self.draining = False  # nothing new may begin there
        self.routes = False  # it is a router, or was the last time that it answered
        self.listed = True  # whether it may be looked at: a model only while its router has it loaded
        self.frozen_after = frozen_after
        self.replace: Callable[[], None] | None = None  # ends its process, and another is started
        self._silences = 0  # looks in a row that it did not answer
        self.health = Health.DOWN
        self.down_since: float | None = time.monotonic()  # None: it answers
        self._own_key = api_key is not None
        self.losses = 0  # how often it was lost
        self.returns = False  # whether it was lost because it ended, so that it may be back soon
        self._kick = asyncio.Event()
        self._looked = asyncio.Event()  # the look that is under way, or comes next
        self._refusals = 0
        self._trouble = ""
        self._doubt = False
        self.up = False  # probed, so that requests may be placed; until then they go through as they came
        self.probed = 0  # tokens that the probe has computed, not counted yet
        self.fresh = False  # no slot had been used when it was probed

    @property
    def coming(self) -> bool:
        """Whether it was lost, and is sure to be back: it loads, sleeps, or `up` starts it."""
        there = self.health in {Health.LOADING, Health.SLEEPING}
        return self.returns and (there or self.routes or self.replace is not None)

    @property
    def ready(self) -> bool:
        return self.up and self.tokenizer is not None

    @property
    def judges(self) -> bool:
        """Whether it was ever let in there, so that a refusal is one of the key."""
        return self.up or self.health is Health.ROUTER

    def kick(self) -> None:
        """Look at once: a connection just failed."""
        self._kick.set()

    async def wake(self) -> None:
        """Look at once: an engine that has just come up is not to serve its first requests unpinned."""
        await self._turns_out(lambda: self.ready)

    async def was_lost(self, losses: int) -> bool:
        """Look at once, after a connection has failed: whether it is gone, or was since it had `losses`."""
        if self.losses != losses or self.pulse.frozen:
            return True
        return await self._turns_out(lambda: not self.ready or self.losses != losses)

    async def _turns_out(self, so: Callable[[], bool]) -> bool:
        """The look that is under way may have begun too early, so the next counts as well."""
        for _ in range(2):
            self.kick()
            await self._looked.wait()
            if so():
                return True
        return False

    @property
    def doubtful(self) -> bool:
        """Whether it may have become another process since we last looked."""
        return self._doubt

    async def settle(self) -> None:
        """Wait until that is known: its slots may be empty now."""
        while self._doubt:
            await self._looked.wait()

    async def doubt(self) -> bool:
        """Its lifeline has ended: look, and send nothing before that. Returns whether it is another."""
        before, self._doubt = self.process, self.up
        self.kick()
        await self.settle()
        return self.process != before

    async def watch(
        self,
        on_up: Callable[[EngineLink], None],
        on_lost: Callable[[EngineLink], None],
        on_router: Callable[[EngineLink], None] = lambda _: None,
    ) -> None:
        """Runs for ever; tells when the engine comes, goes, or is another process than before.

        `on_router` is told at each look that it is no engine, but a router.
        """
        while True:
            try:
                await self._look(on_up, on_lost)
                if self.health is Health.ROUTER:
                    on_router(self)
            except Exception as error:  # noqa: BLE001 - no unexpected answer ends the watch
                self._not_probed(str(error))
            if not self._kick.is_set() and not self._slow:  # else a doubt may have come up while we looked
                self._doubt = False
            self._looked.set()
            self._looked = asyncio.Event()
            try:
                async with asyncio.timeout(self._rest):
                    await self._kick.wait()
                self._kick.clear()
                if not self._doubt:  # for which requests wait
                    await asyncio.sleep(EAGER / 4)  # a burst of failures is one look
            except TimeoutError:
                pass

    @property
    def _rest(self) -> float | None:
        """Seconds until the next look; None: until something is heard of it."""
        calm = self.health in {Health.OK, Health.SILENT, Health.ROUTER} or self.health.wrong
        if not self.listed:
            return None
        return min(CALM, self.frozen_after) if calm else EAGER

    @property
    def busy(self) -> bool:
        """Whether anything that was asked of it is not answered: a call of ours, or a client's request."""
        return self.client.busy or self.pulse.busy

    def part(self, on_lost: Callable[[EngineLink], None]) -> None:
        """It is about to be unloaded: nothing more is asked of it."""
        self.listed, self.health = False, Health.UNLOADED
        if self.up:
            self._lost(returns=False)
            on_lost(self)

    async def _look(self, on_up: Callable[[EngineLink], None], on_lost: Callable[[EngineLink], None]) -> None:
        if not self.listed:
            self.part(on_lost)
            return
        limit = min(LONGEST_LOOK, self.frozen_after / 2)
        self._is(await self.client.health(headers=self.auth, seconds=limit))
        if self.health is Health.SILENT:
            self._silent(on_lost)
            return
        await self._heard()
        process = await self._identity() if self.health is Health.OK else ""
        if self.up and (self.health is not Health.OK or process != self.process):
            log.warning("engine_lost", engine=self.engine, health=self.health.value)
            self._lost(returns=not self.health.wrong)
            on_lost(self)
        self.process = process
        if self.health.wrong:
            self._not_probed(f"{self.engine} {SAID[self.health]}")
        if self.health is Health.OK and not self.up:
            try:
                await self._probe()
            except (EngineError, EngineGoneError) as error:
                self._not_probed(str(error))
                if self.returns and isinstance(error, EngineError):  # it is back, but not as it was
                    self.returns = False
                    on_lost(self)
                return
            self.up, self._refusals, self._trouble = True, 0, ""
            on_up(self)

    def _is(self, health: Health) -> None:
        """What it was found to be."""
        self.health = health
        if health in THERE:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = time.monotonic()
        if health is Health.ROUTER:
            self.routes, self.returns = True, False
        elif self.routes and health is not Health.SILENT:
            self.returns = health is Health.DOWN

    @property
    def _slow(self) -> bool:
        """It does not answer in time. Where its process ends, connections end with it, and that is seen."""
        return self.up and self.health is Health.SILENT

    def _silent(self, on_lost: Callable[[EngineLink], None]) -> None:
        """Were a slow engine given up, its slots would be lost.

        One look is not enough: it may have been us who stood still.
        """
        self._silences += 1
        late = time.monotonic() - self.pulse.heard_at >= self.frozen_after
        if late and self._silences > 1 and not self.pulse.frozen:
            self._freeze(on_lost)

    async def _heard(self) -> None:
        """What a frozen engine had not read may be tasks: they must not come into slots given out since."""
        self._silences = 0
        if self.pulse.frozen:
            log.info("engine_thawed", engine=self.engine, health=self.health.value)
            if self.health is Health.OK:
                await asyncio.sleep(THAW)
            self.pulse.frozen = False
        self.pulse.heard()

    def _freeze(self, on_lost: Callable[[EngineLink], None]) -> None:
        """Whatever waits for it hears so now. What can be replaced is, unless it was still starting."""
        silent, was_up = round(time.monotonic() - self.pulse.heard_at, 1), self.up
        replace = self.replace if was_up else None
        log.warning("engine_frozen", engine=self.engine, seconds=silent, replaced=replace is not None)
        self.pulse.stop()
        if was_up:
            self._lost(returns=replace is not None)
            on_lost(self)
        if replace:
            replace()

    def _lost(self, *, returns: bool) -> None:
        self.up, self.returns = False, returns
        self.losses += 1
        self.tokenizer = None  # the next one may serve another model

    def _not_probed(self, trouble: str) -> None:
        """Said once, not at every look."""
        if self._trouble != trouble:
            self._trouble = trouble
            log.warning("engine_probe_failed", engine=self.engine, error=self._trouble)

    def slots_refused(self) -> bool:
        """GET /slots failed. Returns whether that is enough: the engine is lost until it can be probed."""
        self._refusals += 1
        if not self.up or self._refusals < REFUSALS:
            return False
        log.warning("engine_hides_its_slots", engine=self.engine)
        self._lost(returns=False)
        self.kick()
        return True

    def slots_shown(self) -> None:
        self._refusals = 0

    async def _identity(self) -> str:
        """Changes with every start of a llama-server: its media marker is random (both builds)."""
        try:
            return str((await self.client.props(headers=self.auth)).get("media_marker", "?"))
        except EngineError as error:  # a key that was good is not: it may be another process
            return "" if error.status == UNAUTHORIZED else self.process
        except EngineGoneError:
            return self.process

    async def _probe(self) -> None:
        before = self.client.computed
        try:
            reading = await self.read(may_compute=self.may_compute)
        finally:
            self.probed += self.client.computed - before
        self.fresh = await self._unused(reading.left)
        self.tokenizer = await self.fitting(reading)
        ending = await self.render_text(str(reading.props.get("eos_token") or ""), {})
        self.end_of_turn = ending[0] if len(ending) == 1 else -1
        log.info(
            "engine_up",
            engine=self.engine,
            build=reading.build,
            memory=reading.traits.memory.value,
            slots=reading.traits.n_slots,
            context=reading.traits.n_ctx,
            snapshots=reading.traits.snapshots,
            tokenizer=self.tokenizer.mode,
            tokenizer_why=self.tokenizer.why,
            notes=reading.notes,
        )

    async def look_for_files(self, found: Callable[[EngineLink], None]) -> None:
        """Until they are found, or the engine is lost: what was wrong with the folder may be mended."""
        while self.lacks_files:
            await asyncio.sleep(FILES_RETRY)
            try:
                await self.read(may_compute=False)
            except (EngineError, EngineGoneError) as error:
                self._not_probed(str(error))
        if self.up:
            found(self)

    @property
    def lacks_files(self) -> bool:
        """Whether it is up, and its slot files cannot be used though there is a folder for them."""
        return self.up and self.slot_dir is not None and not (self.traits and self.traits.snapshots)

    async def _unused(self, left: Mapping[SlotId, int]) -> bool:
        """Whether its slots are as at its start, or hold the tokens that we `left` there.

        Those of an engine that was only silent for a while, or that had other clients before us, may be
        at work: that must be looked at before one is given out (engine.md T1). Raises EngineError with
        --no-slots: then nothing is pinned, ever.
        """
        slots = await self.client.slots(headers=self.auth)
        return not any(slot.busy or slot.held not in {None, 0, left.get(slot.slot)} for slot in slots)

    def let_in(self, auth: dict[str, str]) -> None:
        """The engine wants a key and takes this one. Ours, if any, comes first, then what still works."""
        if not self._own_key and auth and auth != self.auth and not (self.up and self.auth):
            self.auth = auth
            self.kick()  # what was refused to us may be shown now

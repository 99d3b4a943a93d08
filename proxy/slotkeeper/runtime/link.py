"""The link to one engine: polls its health, notices that it has restarted, and reads its traits.

It looks at the engine again and again, and decides when one that says nothing counts as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from slotkeeper.api.document import Doc, Prompt
from slotkeeper.api.pictures import digests
from slotkeeper.engine.answers import SAID, EngineError, EngineGoneError, Health, MediaPrompt
from slotkeeper.engine.client import UNAUTHORIZED, EngineAddress, EngineClient, Pulse
from slotkeeper.engine.file_canary import ProbeResult
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.states import ENGINE_TEXTS, EngineSigns, EngineState, engine_state
from slotkeeper.runtime.images import EngineImages
from slotkeeper.scheduler.effects import Learned
from slotkeeper.scheduler.events import AdaptersSeen
from slotkeeper.scheduler.policies.adapters import Adapter, set_of, single
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.requests.figures import Unknown
from slotkeeper.scheduler.slots.engine_model import FLAGS, EngineTraits, Known
from slotkeeper.scheduler.types import EngineId, Reason, SlotId
from slotkeeper.store import files
from slotkeeper.vocab.tokenizer import TokenizeCall, Tokenizer

CALM: Final = 1.0  # seconds between looks at /health and /props, neither of which wakes a sleeping engine
IDLE_AFTER: Final = 30.0  # seconds without a request, after which it is looked at less often
IDLE: Final = 5.0  # seconds between looks then; the end of its process closes `tasks.lifeline`
EAGER: Final = 0.1  # seconds between looks while the engine does not answer
FILES_RETRY: Final = 30.0  # seconds between looks at whether its slot files can be used
FROZEN: Final = 30.0  # seconds without any answer or token, until an engine counts as lost
LONGEST_LOOK: Final = 5.0  # seconds to wait for an answer of /health
THAW: Final = 1.0  # seconds in which an engine that was frozen reads what was sent to it meanwhile
NO_SUCH_FEATURE: Final = 501  # status of GET /slots without --slots (docs/engine.md)
# Why nothing is known of its slots, by the status with which the engine refuses a call of the probe.
HIDDEN: Final[Mapping[int, Unknown]] = {UNAUTHORIZED: Unknown.NO_KEY, NO_SUCH_FEATURE: Unknown.NO_SLOTS}
THERE: Final = frozenset({Health.OK, Health.SLEEPING, Health.ROUTER, Health.SWAPPER, Health.UNLOADED})
OF_UNLOADED: Final = frozenset({400, 500})  # a router's status if a model was or is being unloaded
OF_SWAPPED: Final = frozenset({500, 502, 503})  # llama-swap's
REFUSALS: Final = 3  # failures of GET /slots in a row: without it free slots are unknown

# Why nothing can be placed, by the status with which the engine refuses a call of the probe.
OBSTACLES: Final = {
    UNAUTHORIZED: Reason.KEY_REFUSED,
    403: Reason.KEY_REFUSED,
    NO_SUCH_FEATURE: Reason.SLOTS_HIDDEN,
}

log = get_logger(__name__)

# The client's credential for one request's calls: the caches and encoders in between do not know clients.
_LENT: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("lent", default=None)


@dataclass(eq=False, repr=False)  # `auth` must not be shown
class EngineLink:
    """Watches one engine, speaks its control routes, and renders prompts with its tokenizer.

    The tokenizer, and the findings about slot files and flags, outlive the engine's process.
    """

    engine: EngineId
    _: KW_ONLY
    address: EngineAddress
    api_key: InitVar[str | None]
    flags: EngineFlags | None = None
    slot_dir: Path | None = None  # its --slot-save-path as we see it
    may_compute: bool = False  # whether a canary may run while the engine is unused
    may_read: bool = False  # whether to look for its process on this machine
    frozen_after: float = FROZEN  # seconds of silence after which it counts as lost

    # How it is used, and what was found out
    auth: dict[str, str] = field(default_factory=dict)  # for our calls: of the last client that was let in
    files: ProbeResult | None = None  # findings about its slot files
    build: str = ""
    traits: EngineTraits | None = None
    tokenizer: Tokenizer | None = None
    process: str = ""  # changes with every start of the engine
    end_of_turn: int = -1  # the id that ends a reply
    labels: tuple[tuple[str, str], ...] = ()  # the user's labels for it
    draining: bool = False  # no request may begin there
    assembles: bool = True  # whole answers can be made of its streams, as far as we know
    # Whether its template shows messages behind the last ones as it does behind the whole chat, by whether a
    # user message is the last of them, and whether they begin with calls.
    renders_parts: dict[tuple[bool, bool], bool] = field(default_factory=dict)
    dated: bool = True  # its template may show the time

    # Whether it is there
    health: Health = Health.DOWN
    routes: bool = False  # it is a router, or was one when it last answered
    told: bool = False  # the router's open stream of events shows that it is there: looks are needless
    down_since: float | None = field(default_factory=time.monotonic)  # None while it answers
    losses: int = 0  # number of times that it was lost
    returns: bool = False  # it was lost in a way after which it may be back soon, as when its process ends
    doubtful: bool = False  # it may be another process since the last look
    probing: bool = False  # it answers, and a probe is about to begin or in progress
    up: bool = False  # probed: requests may be placed; until then they pass through unchanged
    probed: int = 0  # tokens that the probe computed and that are not counted yet
    fresh: bool = False  # all slots were unused when it was probed
    awaited: Callable[[], bool] = lambda: False  # whether requests still wait for it after its loss
    changed: Callable[[], None] = lambda: None  # is called when its state has changed
    replace: Callable[[], None] | None = None  # ends its process; `up` then starts another

    def __post_init__(self, api_key: str | None) -> None:
        self.pulse = Pulse()
        self.client = EngineClient(self.address, api_key=api_key, pulse=self.pulse)
        self.images = EngineImages(self.client)
        self._own_key = api_key is not None
        self._tokenizers = Tokenizers(self.tokenize)
        self._longest: tuple[Tokenizer | None, int | None] | None = None  # of the tokenizer's vocabulary
        self._measuring, self._keeping = asyncio.Lock(), asyncio.Lock()
        self._listed = True
        self._silences = 0  # unanswered looks in a row
        self._used_at = time.monotonic()  # of the latest request
        self._idle = False  # it is looked at less often
        self._glances = False  # a request waits for one look after an idle time
        self._kick = asyncio.Event()
        self._kicked = True  # whether the present look was asked for
        self._looked = asyncio.Event()  # set after the present or next look
        self._hurried = False  # a request waits for the probe
        self._refusals = 0
        self._refusal: int | None = None  # the status with which it refused the last probe
        self._trouble = ""
        self._told = EngineState.DOWN  # the state that was logged last

    @property
    def coming(self) -> bool:
        """Whether it will certainly serve: it loads, is probed, or was lost and sleeps or is started anew."""
        if self.health is Health.LOADING or (self.probing and not self._trouble):
            return True
        again = self.health is Health.SLEEPING or self.routes or self.replace is not None
        return self.returns and again

    def signs(self, *, drained: bool = False, failing: bool = False) -> EngineSigns:
        """Return what is known of its state."""
        return EngineSigns(
            health=self.health,
            up=self.up,
            frozen=self.pulse.frozen,
            expected=self.returns and (self.coming or self.awaited()),
            refusal=self._refusal,
            draining=self.draining,
            drained=drained,
            failing=failing,
        )

    @property
    def obstacle(self) -> Reason:
        """Why no request can be placed while it answers but is not up."""
        return OBSTACLES.get(self._refusal or 0, Reason.NOT_PROBED)

    @property
    def unknown(self) -> Unknown:
        """Why nothing is known of its slots while it is not up."""
        return HIDDEN.get(self._refusal or 0, Unknown.NO_ENGINE)

    def _tell_state(self) -> None:
        """Log its state if that has changed."""
        state = engine_state(self.signs())
        if state is not self._told and state is not EngineState.UNLOADED:  # a router lists many models
            self._told = state
            log.info("engine_state", engine=self.engine, state=state.value, meaning=ENGINE_TEXTS[state])
            self.changed()

    @property
    def ready(self) -> bool:
        return self.up and self.tokenizer is not None

    @property
    def judges(self) -> bool:
        """Whether a call of ours was ever accepted, so that a refusal concerns the client's key."""
        return self.up or self.health.routes

    @property
    def listed(self) -> bool:
        """Whether we may look at it: a router's model only while it is loaded."""
        return self._listed

    @listed.setter
    def listed(self, listed: bool) -> None:
        self._listed = listed
        if self.address.swaps:
            self.client.bar(barred=not listed)

    @property
    def foreign(self) -> bool:
        """Whether llama-swap has loaded this model, but with another server than llama-server."""
        return self.address.swaps and self.listed and self.health is Health.FOREIGN

    def unloads(self, status: int) -> bool:
        """Whether a request may have this answer because its router was unloading this model."""
        if self.address.swaps:
            return status in OF_SWAPPED and not self.foreign
        return status in OF_UNLOADED

    def kick(self) -> None:
        """Look at once, for example because a connection has failed."""
        self._kick.set()

    async def wake(self) -> None:
        """Look at once and wait: else an engine that has just started would serve requests unpinned."""
        self.hurry()
        await self._turns_out(lambda: self.ready)

    def hurry(self) -> None:
        """Note that a request has come: a probe leaves out experiments.

        After an idle time the engine is looked at first, since it may sleep: then its slots are empty. That
        takes a second at most.
        """
        self._hurried, self._used_at = not self.ready, time.monotonic()
        if self._idle and self.up:
            self._idle, self._glances, self.doubtful = False, True, True
            self.kick()

    async def was_lost(self, losses: int) -> bool:
        """Look at once after a failed connection. Returns whether it is lost, or was since `losses`."""
        if self.losses != losses or self.pulse.frozen:
            return True
        return await self._turns_out(lambda: not self.ready or self.losses != losses)

    async def _turns_out(self, so: Callable[[], bool]) -> bool:
        """Wait for up to two looks until `so` is true: the look in progress may have begun too early."""
        for _ in range(2):
            self.kick()
            await self._looked.wait()
            if so():
                return True
        return False

    async def settle(self) -> None:
        """Wait until it is known whether the process changed: if so, its slots are empty."""
        while self.doubtful:
            await self._looked.wait()

    async def doubt(self) -> bool:
        """Look at once, because the idle connection to the engine (`tasks.lifeline`) has closed.

        Requests wait meanwhile. Returns whether the engine is another process now.
        """
        before, self.doubtful = self.process, self.up
        self.kick()
        await self.settle()
        return self.process != before

    async def watch(
        self,
        on_up: Callable[[EngineLink], None],
        on_lost: Callable[[EngineLink], None],
        on_router: Callable[[EngineLink], None] = lambda _: None,
    ) -> None:
        """Watch the engine for ever. Calls back when it comes up, is lost, or is another process.

        `on_router` is called at each look at which the server is a router.
        """
        while True:
            try:
                if self._needs_no_look:
                    self.pulse.answered()
                else:
                    await self._look(on_up, on_lost)
                if self.health.routes:
                    on_router(self)
            except Exception as error:  # noqa: BLE001 - an unexpected answer must not end the watch
                self._not_probed(str(error))
            self.probing = False
            self._tell_state()
            if self._glances or not (self._kick.is_set() or self._slow):  # else `doubt` may have been called
                self.doubtful = self._glances = False
            self._looked.set()
            self._looked = asyncio.Event()
            try:
                self._idle = self.up and not self.busy and time.monotonic() - self._used_at >= IDLE_AFTER
                async with asyncio.timeout(self._rest):
                    self._kicked = False
                    await self._kick.wait()
                self._kick.clear()
                self._kicked = True
                if not self.doubtful:  # requests wait for a doubt to be settled
                    await asyncio.sleep(EAGER / 4)  # one look for a burst of failures
            except TimeoutError:
                pass

    @property
    def _rest(self) -> float | None:
        """Seconds until the next look; None: not before `kick` is called, as while it sleeps."""
        calm = self.health in {Health.OK, Health.SILENT} or self.health.routes or self.health.wrong
        if not self.listed or self.told or self.health is Health.SLEEPING:
            return None
        if not calm:
            return EAGER
        return min(IDLE if self._idle else CALM, self.frozen_after)

    @property
    def _needs_no_look(self) -> bool:
        """Whether the listing of llama-swap is enough: a look would keep an idle model from its `ttl`."""
        if self.told:
            return True
        known = (self.up and self.listed) or self.foreign
        return self.address.swaps and known and not self._kicked and not self.busy

    @property
    def busy(self) -> bool:
        """Whether a call of ours or a client's request to the engine is not answered yet."""
        return self.client.busy or self.pulse.busy

    def part(self, on_lost: Callable[[EngineLink], None]) -> None:
        """Send nothing more to a model that will be unloaded."""
        self.listed, self.health = False, Health.UNLOADED
        if self.up:
            self._lost(returns=False)
            on_lost(self)

    async def _look(self, on_up: Callable[[EngineLink], None], on_lost: Callable[[EngineLink], None]) -> None:
        if not self.listed:
            self.part(on_lost)
            return
        limit = min(CALM if self._glances else LONGEST_LOOK, self.frozen_after / 2)
        served = self.up and self.health is Health.OK
        health = await self.client.health(headers=self.auth, seconds=limit, served=served)
        if health is Health.UNASKED:
            return
        self._is(health)
        self.probing = self.health is Health.OK and not self.up
        if self.health is Health.SILENT:
            self._silent(on_lost)
            return
        known = self.process if self.client.marker is None else self.client.marker
        await self._note_answer()
        process = known if self.health is Health.OK else ""
        if self.up and (self.health is not Health.OK or process != self.process):
            log.warning("engine_lost", engine=self.engine, health=self.health.value)
            self._lost(returns=not self.health.wrong)
            on_lost(self)
        self.process = process
        if self.health.wrong:
            self._not_probed(f"{self.engine} {SAID[self.health]}")
        if self.health is Health.OK and not self.up:
            error = await self._watched_probe(on_lost)
            if error is not None:
                self._refusal = error.status if isinstance(error, EngineError) else None
                self._not_probed(str(error))
                if self.returns and isinstance(error, EngineError):  # it is back, but cannot be probed
                    self.returns = False
                    on_lost(self)
                return
            self.up, self._refusals, self._trouble, self._refusal = True, 0, "", None
            on_up(self)

    async def _watched_probe(
        self, on_lost: Callable[[EngineLink], None]
    ) -> EngineError | EngineGoneError | None:
        """Probe the engine; return why that failed. If the engine freezes, the probe ends."""
        failed: EngineError | EngineGoneError | None = None
        self.probing = True
        try:
            async with asyncio.TaskGroup() as group:
                beat = group.create_task(self._beat(on_lost))
                try:
                    await self._probe()
                except (EngineError, EngineGoneError) as error:
                    failed = error
                finally:
                    beat.cancel()
        finally:
            self.probing = self._hurried = False
        return failed

    async def _beat(self, on_lost: Callable[[EngineLink], None]) -> None:
        """Ask for the engine's health during a probe: a slow engine answers, a frozen one does not."""
        limit = min(LONGEST_LOOK, self.frozen_after / 2)
        while True:
            await asyncio.sleep(limit)
            health = await self.client.health(headers=self.auth, seconds=limit)
            if health is Health.SILENT:
                self._silent(on_lost)
            elif health is not Health.UNASKED:
                self._silences = 0
                self.pulse.answered()

    def _is(self, health: Health) -> None:
        """Record the result of a look at /health."""
        self.health = health
        if health in THERE:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = time.monotonic()
        if health.routes:
            self.routes, self.returns = True, False
        elif self.routes and health is not Health.SILENT:
            self.returns = health is Health.DOWN

    @property
    def _slow(self) -> bool:
        """Whether an engine in use does not answer in time; if it had ended, connections would fail."""
        return self.up and self.health is Health.SILENT

    def _silent(self, on_lost: Callable[[EngineLink], None]) -> None:
        """Count a look without an answer. The engine is lost only after `frozen_after` seconds of silence.

        A slow engine must not be lost: that would lose its slots. One silent look is not enough: our own
        process may have been stopped meanwhile.
        """
        self._silences += 1
        late = time.monotonic() - self.pulse.answered_at >= self.frozen_after
        if late and self._silences > 1 and not self.pulse.frozen:
            self._freeze(on_lost)

    async def _note_answer(self) -> None:
        """Record that the engine answers.

        An engine that was frozen gets THAW seconds first: requests that it has not read yet must not reach
        slots that we give out now.
        """
        self._silences = 0
        if self.pulse.frozen:
            log.info("engine_thawed", engine=self.engine, health=self.health.value)
            if self.health is Health.OK:
                await asyncio.sleep(THAW)
            self.pulse.frozen = False
        self.pulse.answered()

    def _freeze(self, on_lost: Callable[[EngineLink], None]) -> None:
        """Fail all calls that wait for a silent engine. `up` replaces it unless it was still starting."""
        silent, was_up = round(time.monotonic() - self.pulse.answered_at, 1), self.up
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
        self._refusal = None
        self.tokenizer = None  # the next process may serve another model

    def _not_probed(self, trouble: str) -> None:
        """Log why the probe failed, once for each reason and not at every look."""
        if self._trouble != trouble:
            self._trouble = trouble
            log.warning("engine_probe_failed", engine=self.engine, error=self._trouble)

    def slots_refused(self) -> bool:
        """Count a failure of GET /slots. Returns whether the engine is now lost, until a probe succeeds."""
        self._refusals += 1
        if not self.up or self._refusals < REFUSALS:
            return False
        log.warning("engine_hides_its_slots", engine=self.engine)
        self._lost(returns=False)
        self._refusal = NO_SUCH_FEATURE
        self.kick()
        return True

    def slots_shown(self) -> None:
        self._refusals = 0

    async def _probe(self) -> None:
        before = self.client.computed
        try:
            reading = await self.read(may_compute=self.may_compute, hurried=lambda: self._hurried)
        finally:
            self.probed += self.client.computed - before
        self.tokenizer, self.renders_parts = await self.fitting(reading), {}
        self.dated = shows_time(str(reading.props.get("chat_template") or ""))
        ending = await self.render_text(str(reading.props.get("eos_token") or ""), {})
        self.end_of_turn = ending[0] if len(ending) == 1 else -1
        self.fresh = await self._unused(reading.left)  # last: requests may have gone there during the probe
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
        """Try until slot files can be used or the engine is lost: a user may repair the folder."""
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
        """Whether the engine is up but its slot files cannot be used, although there is a folder for them."""
        return self.up and self.slot_dir is not None and not (self.traits and self.traits.snapshots)

    async def _unused(self, left: Mapping[SlotId, int]) -> bool:
        """Whether all slots are as at the engine's start, or hold the tokens that our probe `left` there.

        Slots of an engine that was only silent for a while, or that had other clients before us, may be busy:
        that must be checked before one is given out (engine.md T1). Raises EngineError with --no-slots: then
        no request is ever pinned.
        """
        slots = await self.client.slots(headers=self.auth)
        return not any(slot.busy or slot.held not in {None, 0, left.get(slot.slot)} for slot in slots)

    def let_in(self, auth: dict[str, str]) -> None:
        """Use a client's key that the engine accepts for our own calls, unless we have a key that works."""
        if not self._own_key and auth and auth != self.auth and not (self.up and self.auth):
            self.auth = auth
            self.kick()  # routes that were refused may answer now

    # -- what was found out ------------------------------------------------------------------------

    async def read(self, *, may_compute: bool, hurried: Callable[[], bool] = lambda: False) -> Reading:
        """Probe the engine, and remember the result. Raises what `read_traits` raises."""
        reading = await read_traits(
            self.client,
            self.flags,
            headers=self.auth,
            slot_dir=self.slot_dir,
            may_compute=may_compute,
            may_read=self.may_read,
            known=self.files,
            hurried=hurried,
        )
        folder, self.build = self.slot_dir, reading.build
        self.traits = reading.traits
        if folder and self.traits.guessed:
            self.traits = await with_flags(folder, self.process, self.traits)
        self.files = reading.files or self.files
        closed = bool(reading.files and reading.files.images_closed)
        self.images.begins(reading.props, closed=closed)
        return reading

    def learned(self, what: Learned) -> None:
        """Correct a trait by what the scheduler has inferred."""
        if self.traits:
            self.traits = self.traits.corrected(what.how, **{what.name: what.value})

    async def keep_learned(self) -> None:
        """Write learnt flags to disk for the next sidecar, which cannot probe an engine that is in use."""
        async with self._keeping:
            if self.slot_dir and self.traits:
                await keep_flags(self.slot_dir, self.process, self.traits)

    async def see_adapters(self, *, announced: bool = False, exact: bool = False) -> AdaptersSeen:
        """Ask the engine for its LoRA adapters. While it runs only their scales change, never their files.

        `announced`, `exact`: see `AdaptersSeen`.
        """
        asked, known = time.monotonic(), self.traits.adapters if self.traits else ()
        adapters: tuple[Adapter, ...] | None = None
        try:
            listed = await self.client.lora_adapters(headers=self.auth)
            scales = {int(entry["id"]): single(float(entry["scale"])) for entry in listed}
            adapters = tuple(replace(adapter, scale=scales[at]) for at, adapter in enumerate(known))
        except (EngineError, EngineGoneError, KeyError, TypeError, ValueError) as error:
            log.debug("adapters_unseen", engine=self.engine, error=str(error))
        if adapters and self.traits and adapters != known:
            self.traits = replace(self.traits, adapters=adapters)
            log.info("adapters_changed", engine=self.engine, before=set_of(known), now=set_of(adapters))
        now = time.monotonic()
        return AdaptersSeen(
            at=now, asked=asked, engine=self.engine, adapters=adapters, announced=announced, exact=exact
        )

    async def fitting(self, reading: Reading) -> Tokenizer:
        """Return the tokenizer for the model that was read."""
        return await self._tokenizers.fitting(reading)

    @property
    def layout(self) -> str:
        """The layout of its slot files; empty until one with tokens was seen."""
        return self.files.layout if self.files else ""

    def saw_layout(self, layout: str) -> None:
        """Remember the layout of a file that the engine has just written."""
        if self.files and not self.files.layout:
            self.files = replace(self.files, layout=layout)

    # -- rendering ---------------------------------------------------------------------------------

    async def tokenize(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> Sequence[int]:
        """Return token ids. Raises EngineError for more than fit the context: such a prompt is refused."""
        return await self.client.tokenize_long(
            content,
            add_special=add_special,
            parse_special=parse_special,
            headers=_LENT.get() or self.auth,
            most=self.traits.n_ctx or None if self.traits else None,
        )

    async def longest_token(self, auth: Mapping[str, str]) -> int | None:
        """Return the most characters of a token, asked once for a tokenizer; None: unknown, or no limit."""
        async with self._measuring:
            if self._longest is None or self._longest[0] is not self.tokenizer:
                try:
                    longest = await self.client.longest_token(headers=auth or self.auth)
                except (EngineError, EngineGoneError, KeyError, TypeError) as error:
                    log.info("vocabulary_not_read", engine=self.engine, error=str(error))
                    return None
                self._longest = (self.tokenizer, longest)
            return self._longest[1]

    async def render_chat(self, chat: Doc, auth: Mapping[str, str]) -> Tokens:
        """Return the exact prompt of a chat body (engine.md 1.4).

        Raises EngineError, EngineGoneError, and ValueError for images whose tokens cannot be known.
        """
        return await self.chat_tokens(await self.chat_text(chat, auth), chat, auth)

    async def chat_text(self, chat: Doc, auth: Mapping[str, str]) -> str:
        """Return a chat as the engine's template renders it. Raises EngineError, EngineGoneError."""
        return await self.client.apply_template(chat, headers=auth or self.auth)

    async def chat_tokens(self, text: str, chat: Doc, auth: Mapping[str, str]) -> Tokens:
        """Return the tokens of a rendered chat. Raises the errors of `render_chat`."""
        images = digests(chat) if self.images.marker else ()
        with self._tokenizer_for(auth) as tokenizer:
            if images:
                return await self.images.tokens(tokenizer, text, images, auth or self.auth)
            return await tokenizer.tokenize(text)

    async def prefill_prompt(self, prompt: Tokens, auth: Mapping[str, str]) -> Sequence[int] | MediaPrompt:
        """Return the form in which a prefill sends these tokens. Raises the errors of `render_chat`."""
        if not prompt.chunks:
            return prompt.ids()
        with self._tokenizer_for(auth) as tokenizer:
            return await self.images.prompt(tokenizer, prompt, auth)

    async def render_prompt(self, prompt: Prompt, auth: Mapping[str, str]) -> Tokens:
        """Return the tokens of a raw prompt. Raises the errors of `render.RENDER_FAILURES`."""
        with self._tokenizer_for(auth) as tokenizer:
            return await tokenizer.tokenize_prompt(prompt)

    async def render_text(self, text: str, auth: Mapping[str, str]) -> Tokens:
        """Return the tokens of plain text in the middle of a prompt."""
        with self._tokenizer_for(auth) as tokenizer:
            return await tokenizer.tokenize(text, add_special=False)

    @contextmanager
    def _tokenizer_for(self, auth: Mapping[str, str]) -> Iterator[Tokenizer]:
        """Yield the tokenizer; its calls to the engine in this block use a client's credential.

        Raises EngineGoneError before the engine was probed.
        """
        if self.tokenizer is None:
            raise EngineGoneError(f"{self.engine} has not been probed yet")
        before = _LENT.set(auth)
        try:
            yield self.tokenizer
        finally:
            _LENT.reset(before)


# What templates call for the date, and the values that the engine gives to those that name them.
TIMES: Final = ("strftime_now", "date_string", "datetime")


def shows_time(chat_template: str) -> bool:
    """Whether a template may render the same chat otherwise at another time; True if it is not known."""
    return not chat_template or any(name in chat_template for name in TIMES)


# -- its tokenizer ---------------------------------------------------------------------------------------

PROPS_OF_TOKENIZER: Final = ("chat_template", "bos_token", "eos_token")


class Tokenizers:
    """The tokenizer of the model that an engine serves. It outlives restarts, with its caches."""

    def __init__(self, ask: TokenizeCall) -> None:
        self._ask = ask
        self._last: tuple[tuple[str, ...], Tokenizer] | None = None

    async def fitting(self, reading: Reading) -> Tokenizer:
        """Return the last tokenizer if the same build serves the same model, else a new one, checked first.

        A model whose file cannot be read here may be another one each time.
        """
        said = {name: str(reading.props.get(name) or "") for name in PROPS_OF_TOKENIZER}
        model = reading.header.fingerprint if reading.header else ""
        same = (model, str(reading.model_path), reading.build, *said.values())
        if self._last and model and self._last[0] == same:
            return self._last[1]
        tokenizer = await Tokenizer.open(
            self._ask,
            model_path=reading.model_path,
            chat_template=said["chat_template"],
            bos_token=said["bos_token"],
            eos_token=said["eos_token"],
        )
        self._last = (same, tokenizer)
        return tokenizer


# -- the flags of its process, in a file -----------------------------------------------------------------
# Flags cannot be probed in an engine that is in use; but the same process has the same flags. The layout of
# its files is not written: a wrong layout would make every save look torn.

FLAGS_FILE: Final = "slotkeeper-flags.json"
FLAGS_FILE_BYTES: Final = 64 << 10  # the file is not larger
MOST_PROCESSES: Final = 16  # the oldest are forgotten

FoundFlags = Mapping[str, tuple[bool | int | float, Known]]  # by the name of the field
FLAGS_READER: Final = TypeAdapter(dict[str, dict[str, tuple[bool | int | float, Known]]])


async def with_flags(folder: Path, process: str, traits: EngineTraits) -> EngineTraits:
    """Return the traits with the remembered flags of this process, for flags that are still at defaults."""
    found = (await asyncio.to_thread(recalled_flags, folder)).get(process, {})
    for name, (value, how) in found.items():
        if name in FLAGS and traits.known(name) is Known.DEFAULT:
            traits = traits.learned(how, **{name: value})
    return traits


async def keep_flags(folder: Path, process: str, traits: EngineTraits) -> None:
    """Write the flags learnt of this process. If the folder cannot be written, they are lost with us."""
    found = {
        name: (getattr(traits, name), how) for name, how in traits.knowledge.items() if how is not Known.FLAGS
    }
    if found and process:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember_flags, folder, process, found)


def recalled_flags(folder: Path) -> dict[str, FoundFlags]:
    """Read the file; empty if it cannot be read or is not ours. Blocks."""
    try:
        with files.open_ours(folder / FLAGS_FILE) as file:
            return dict(FLAGS_READER.validate_json(file.read(FLAGS_FILE_BYTES)))
    except (OSError, ValidationError):
        return {}


def remember_flags(folder: Path, process: str, found: FoundFlags) -> None:
    """Write the file, by a temporary name that the store removes after a crash. Blocks. Raises OSError."""
    others = {known: of for known, of in recalled_flags(folder).items() if known != process}
    kept = dict([*others.items(), (process, found)][-MOST_PROCESSES:])
    files.write_small(folder / FLAGS_FILE, folder / files.new_temporary(time.time()), orjson.dumps(kept))

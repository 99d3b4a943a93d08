"""What an engine shows when it is tried out: what its slot files are like, and flags that no answer shows.

`traits` reads what an engine says of its own accord.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from slotkeeper.engine.answers import NoFilesError, PrefillResult, Why
from slotkeeper.engine.client import EngineClient, EngineError, Headers
from slotkeeper.engine.slotfile import Damage, SlotFile
from slotkeeper.engine.slotfile_reader import read
from slotkeeper.scheduler.engine_model import (
    TAIL,
    Checkpoint,
    EngineTraits,
    Known,
    Memory,
    after_prefill,
    checkpoints_last,
    newest_usable,
)
from slotkeeper.scheduler.events import SlotView
from slotkeeper.scheduler.types import SlotId

# -- slot files, by letting it write one -----------------------------------------------------------------
# First the state of an idle slot is saved, which changes nothing: is the folder ours too, which version has
# the file. Then, where that does not tell whether files carry checkpoints and the engine was not used yet: a
# canary, a few tokens in one slot, saved and erased again.

ANY: Final = SlotId(-1)  # the engine's choice (engine.md T8)
CANARY_TOKENS: Final = 16  # 5 leave a checkpoint, whatever the batch; a large model on a CPU is slow
CANARY_TEXT: Final = " ".join(map(str, range(CANARY_TOKENS)))  # at least one token for each number
# A large batch on a slow machine; a slot that was taken meanwhile is saved at its release (engine.md 2.3).
SAVE_SECONDS: Final = 120.0
APPENDING: Final = 4  # the first version whose files may carry checkpoints (engine.md 2.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the files of one engine are like. Worth keeping: a canary is not possible in a used engine.

    Plain values, so that it can be stored as JSON.
    """

    engine: str  # Identity.digest of the engine that it is true for
    state_version: int
    files_carry: bool | None = None  # whether they carry checkpoints; None = not found out
    layout: str = ""  # as SlotFile has it; empty = none with tokens was seen

    def traits_into(self, traits: EngineTraits, fingerprint: str) -> EngineTraits:
        """The traits of an engine with such files."""
        return replace(
            traits,
            slot_files=True,
            state_version=self.state_version,
            files_carry=self.files_carry,
            fingerprint=fingerprint,
        )


async def probe_files(
    client: EngineClient,
    folder: Path,
    traits: EngineTraits,
    engine: str,
    *,
    may_compute: bool = False,
    known: ProbeResult | None = None,
    headers: Headers | None = None,
) -> ProbeResult:
    """Ask an engine that is awake, with no request pinned to it meanwhile.

    1. Dense memory has no checkpoints, and older versions of the file have no place for them.
    2. A slot that was in use may have some, and then they are in its file.
    3. Otherwise a canary tells, if it may and no slot was used yet.
    4. Otherwise what was found out about the same engine before.
    5. Otherwise the first file that is saved will tell.

    Args:
        client: of that engine.
        folder: its --slot-save-path, as this machine sees it.
        traits: for the memory.
        engine: its `Identity.digest`.
        may_compute: whether a canary is allowed.
        known: what was found out before, about this engine or another.
        headers: credentials, if not the client's own.

    Raises:
        NoFilesError: there will be no snapshots with this engine.
        EngineGoneError: it went away.
    """
    try:
        if not await client.saves_slots(headers=headers):
            raise NoFilesError(Why.OFF)
        if not await asyncio.to_thread(folder.is_dir):
            raise NoFilesError(Why.NO_FOLDER, str(folder))
        slot = quietest(await client.slots(headers=headers))
        file = await saved(client, folder, slot, headers)
        result = ProbeResult(engine=engine, state_version=file.version, layout=file.layout)
        if traits.cuttable or file.version < APPENDING:  # (1)
            return replace(result, files_carry=False)
        if file.records:  # (2)
            return replace(result, files_carry=True)
        if may_compute and await unused(client, headers):  # (3)
            file = await canary(client, folder, headers)
            return replace(result, files_carry=bool(file.records), layout=file.layout)
        if known and known.files_carry is not None and same(known, result):  # (4)
            return replace(result, files_carry=known.files_carry)
    except EngineError as error:
        raise NoFilesError(Why.REFUSED, str(error)) from error
    return result  # (5)


async def unused(client: EngineClient, headers: Headers | None) -> bool:
    """Whether nothing is lost if a prompt of ours takes a slot."""
    return not any(slot.busy or slot.held for slot in await client.slots(headers=headers))


def same(known: ProbeResult, now: ProbeResult) -> bool:
    return (known.engine, known.state_version) == (now.engine, now.state_version)


def quietest(views: tuple[SlotView, ...]) -> SlotId:
    """The idle slot with the smallest state. Raises NoFilesError."""
    idle = [slot for slot in views if not slot.busy]
    if not idle:
        raise NoFilesError(Why.BUSY)
    return min(idle, key=lambda slot: slot.held or 0).slot


async def canary(client: EngineClient, folder: Path, headers: Headers | None) -> SlotFile:
    """A few tokens, where the engine likes: if not pinned they never meet a running answer (engine.md T1)."""
    ids = await client.tokenize(CANARY_TEXT, add_special=False, parse_special=False, headers=headers)
    ids = ids[:CANARY_TOKENS]
    slot = (await client.prefill(ids, ANY, headers=headers)).slot
    try:
        return await saved(client, folder, slot, headers)
    finally:
        await swept(client, slot, len(ids), headers)


async def swept(client: EngineClient, slot: SlotId, held: int, headers: Headers | None) -> None:
    """Erase what we put there, unless another task has taken the slot since."""
    views = await client.slots(headers=headers)
    if any(view.slot == slot and not view.busy and view.held == held for view in views):
        await client.erase(slot, headers=headers)


async def saved(client: EngineClient, folder: Path, slot: SlotId, headers: Headers | None) -> SlotFile:
    """The state of an idle slot, by a file that is gone afterwards. Raises NoFilesError, EngineError."""
    path = folder / temporary()
    try:
        async with asyncio.timeout(SAVE_SECONDS):
            written = (await client.save(slot, path.name, headers=headers)).written
        return await asyncio.to_thread(inspected, path, written)
    except TimeoutError as error:
        raise NoFilesError(Why.BUSY) from error
    finally:
        await asyncio.to_thread(removed, path)


def temporary() -> str:
    """A name that the store takes for one of its temporary files, so that it clears away what we cannot."""
    return f"slotkeeper-{0:012x}-{secrets.token_hex(4)}.tmp"


def inspected(path: Path, written: int) -> SlotFile:
    """Read what the engine says it has written. Blocks. Raises NoFilesError."""
    try:
        size = path.stat().st_size
        if size != written:  # on a full disk the engine may still say 200, for it does not look at fclose
            raise NoFilesError(Why.CUT, f"{size} of {written} bytes")
        with path.open("rb") as file:
            found = read(file, size)
    except FileNotFoundError as error:
        raise NoFilesError(Why.NOT_SHARED, str(path.parent)) from error
    except OSError as error:
        raise NoFilesError(Why.UNREADABLE, str(error)) from error
    if isinstance(found, Damage):
        raise NoFilesError(Why.UNKNOWN, found.text)
    return found


def removed(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise NoFilesError(Why.UNREADABLE, str(error)) from error


# -- flags, by what it does with a few short prompts -----------------------------------------------------
# Of an unused engine. Each prompt is prefilled where the engine likes, so none meets a running answer
# (engine.md T1), and must find what the one before it left: where one does not, another client is there, or
# the engine chooses slots in a way of its own, and nothing more is concluded. It costs 200 tokens in all, 350
# with a sliding window.
#
# 1. Four prompts, each the beginning of the next. The first shows whether checkpoints are made at all: the
#    engine ends a batch TAIL tokens before a prompt's end for them.
# 2. One that parts from the fourth within the second. It goes back to the second's checkpoint, unless the
#    tasks since have thrown that away: then to the first's, or to none (engine.md T7).
# 3. Prompts that grow by a few tokens each, and leave one or two checkpoints each, until an engine that keeps
#    as many as stock would have thrown one away which an engine that keeps as many as we advise would have.
#    Then one that parts behind that. It ends early where the engine is slow.
# 4. One that has nearly nothing in common with that, in the same slot: the engine copies what the slot held
#    to its RAM cache, if it has one. Then the one before again: it finds its copy, or nothing. (A copy of a
#    sliding window is good for nothing without a checkpoint, so there nothing proves nothing.)

# With many ways to go on: where one token is certain, all engines agree.
TEXT: Final = (
    "The harbour master wrote seven names on a slate, sold the copper lamp to a stranger and said nothing "
    "more. Winter came early to the north valley; a train of grey mules carried salt, paper and window glass "
    "over the pass. In the third cellar they found a clock, two letters in an unknown hand, and a box of "
    "dried pears. Nobody asked why the river had changed its colour, for the council was busy with taxes, "
    "wolves and a wedding. A child counted backwards from ninety while her brother drew maps of cities that "
    "had never been built. On the last page of the ledger somebody had drawn a bird and below it one word: "
)
STEP: Final = 10  # tokens by which a prompt is longer than the one before
PROMPTS: Final = 4
PARTS: Final = 18  # where (2) parts: behind what the second prompt left, before what the third did
LATE: Final = 12  # with that checkpoint at least so many are reused, without it at most half as many
SHARED: Final = 4  # tokens that (4) has in common: a fifth of it, so that it is sent to the same slot
MANY: Final = 64  # checkpoints that (3) looks for: what we advise
GROWTH: Final = 44  # prompts at most in (3)
PATIENCE: Final = 2.0  # seconds, for (3) to begin or go on: requests wait meanwhile
SPREAD: Final = 1  # tokens by which an engine with a sliding window may go back farther than the model
FEW: Final = 4  # checkpoints of an engine that has lost them all by then, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of it."""

    traits: EngineTraits
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens that could not be taken out of slots


async def try_flags(client: EngineClient, traits: EngineTraits, headers: Headers | None = None) -> Tried:
    """The traits with what could be found out. Nothing where a slot was used already.

    Raises EngineGoneError.
    """
    canary = _Canary(client, headers)
    try:
        if not await unused(client, headers):
            return Tried(traits=traits)
        words = list(dict.fromkeys(await client.tokenize(TEXT, add_special=False, parse_special=False)))
        traits = await canary.try_all(traits, words)
    except EngineError:  # one that refuses such prompts, or does not show its slots
        pass
    left = await canary.sweep()
    return Tried(traits=traits, left=left)


class _Canary:
    """Prompts one after another, all in the slot that the engine chose for the first."""

    def __init__(self, client: EngineClient, headers: Headers | None) -> None:
        self._client = client
        self._headers = headers
        self._slot = ANY  # the one that the engine chose
        self._left: dict[SlotId, int] = {}  # tokens in each slot that was used
        self._tasks: list[tuple[int, int]] = []  # in that slot: tokens reused, and in all
        self._began = time.monotonic()

    async def try_all(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        long, others = words[: STEP * PROMPTS], words[STEP * PROMPTS :]
        if len(others) < 3 * STEP:  # a vocabulary of hardly any words
            return traits
        parted = [*long[:PARTS], *others[: 2 * STEP - PARTS]]
        if not traits.cuttable:
            tried = await self._checkpoints_tried(traits, long, parted, words)
            if tried is None:
                return traits
            traits = tried
        return await self._ram_cache(traits, parted, others)

    async def _checkpoints_tried(
        self, traits: EngineTraits, long: list[int], parted: list[int], words: list[int]
    ) -> EngineTraits | None:
        """Do (1) to (3). None: nothing more can be concluded."""
        first = await self._send(long[:STEP])  # (1)
        if first is None or first.cached or first.cuts is None:
            return None
        if STEP - TAIL not in first.cuts:
            may_be_dense = traits.memory is Memory.UNKNOWN
            return traits if may_be_dense else traits.learned(Known.CANARY, checkpoint_cap=0)
        if not await self._each_follows(long):
            return None
        back = await self._send(parted)  # (2)
        if back is None:
            return None
        traits = _about_checkpoints(traits, back.cached)
        lasting = checkpoints_last(traits) and traits.checkpoint_cap > FEW
        return await self._cap(traits, words) if lasting else traits  # (3)

    async def _each_follows(self, long: list[int]) -> bool:
        """Whether each longer prompt finds the one before it."""
        for end in range(2 * STEP, len(long) + 1, STEP):
            found = await self._send(long[:end])
            if found is None or found.cached < end - 2 * STEP + SHARED:
                return False
        return True

    async def _cap(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        """Whether the engine keeps as many checkpoints as we advise, or no more than we believed."""
        thinned = replace(traits, checkpoint_min_step=0)
        # Newer builds thin a full list, or not; with a sliding window they keep one more than the model.
        believed = (traits, thinned, replace(thinned, checkpoint_cap=traits.checkpoint_cap + 1))
        advised = replace(traits, checkpoint_cap=MANY)
        # With a sliding window a prompt computes its last TAIL + 1 tokens again and leaves one checkpoint
        # that lasts, so it takes more prompts.
        growth = 2 if traits.memory is Memory.SWA else TAIL + 1
        ids = words[:STEP]
        for _ in range(GROWTH):
            if time.monotonic() - self._began > PATIENCE or await self._send(ids) is None:
                return traits
            few, many = [self._checkpoints(kind) for kind in believed], self._checkpoints(advised)
            for at in range(STEP, len(ids) - STEP):
                less, more = {newest_usable(c, at, traits) for c in few}, newest_usable(many, at, traits)
                if max(less) + SHARED < more:
                    back = await self._send([*ids[:at], *(2 * [words[-1]])])
                    if back is None or min(abs(back.cached - place) for place in (*less, more)) > SPREAD:
                        return traits
                    kept = MANY if abs(back.cached - more) <= SPREAD else traits.checkpoint_cap
                    return traits.learned(Known.CANARY, checkpoint_cap=kept)
            ids = [*ids, *(words[(len(ids) + n) % (len(words) - 1)] for n in range(growth))]
        return traits

    def _checkpoints(self, traits: EngineTraits) -> tuple[Checkpoint, ...]:
        """Those that an engine with these flags would have in the slot now."""
        made: tuple[Checkpoint, ...] = ()
        for task, (reuse, end) in enumerate(self._tasks):
            made = after_prefill(made, reuse=reuse, end=end, user_starts=(), task=task, traits=traits)
        return made

    async def _ram_cache(self, traits: EngineTraits, ids: list[int], others: list[int]) -> EngineTraits:
        if self._left.get(self._slot) != len(ids) and await self._send(ids) is None:
            return traits
        if await self._send([*ids[:SHARED], *others[STEP : STEP + len(ids) - SHARED]]) is None:
            return traits
        again = await self._send([*ids, others[STEP - 1]])
        if again is None:
            return traits
        found = again.cached > SHARED
        windowed = traits.memory in {Memory.SWA, Memory.UNKNOWN} and traits.checkpoint_cap == 0
        return traits if windowed and not found else traits.learned(Known.CANARY, ram_cache=found)

    async def _send(self, ids: list[int]) -> PrefillResult | None:
        """None where it did not go to the slot of the others."""
        result = await self._client.prefill(ids, ANY, headers=self._headers)
        self._left[result.slot] = result.held
        if self._slot == ANY:
            self._slot = result.slot
        if result.slot != self._slot:
            return None
        self._tasks.append((result.cached, result.held))
        return result

    async def sweep(self) -> dict[SlotId, int]:
        """Empty the slots again. Returns what had to stay: without --slot-save-path all of it."""
        try:
            for slot, held in tuple(self._left.items()):
                await swept(self._client, slot, held, self._headers)
                del self._left[slot]
        except EngineError:
            pass
        return self._left


def _about_checkpoints(traits: EngineTraits, back: int) -> EngineTraits:
    """What it means that a prompt was taken back to `back` tokens in (2)."""
    if back >= LATE:
        return traits.learned(Known.CANARY, checkpoint_min_step=0) if traits.eager_thinning else traits
    if back and traits.eager_thinning:
        return traits.learned(Known.CANARY, checkpoint_min_step=traits.checkpoint_min_step)
    return traits.learned(Known.CANARY, checkpoint_cap=FEW)

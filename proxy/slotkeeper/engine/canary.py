"""Experiments on an engine: what its slot files contain, and the flags that no answer of the API shows.

The module `traits` reads what the engine's answers show.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from slotkeeper.engine.answers import EngineError, NoFilesError, PrefillResult, Why
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.http import Headers
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
from slotkeeper.scheduler.types import SlotId, SlotView

# -- slot files, by letting it write one -----------------------------------------------------------------
# First we save the state of an idle slot, which changes nothing. This shows whether we see the engine's
# folder, and the version of its files. If this does not show whether files carry checkpoints, and the engine
# is unused, we try a canary: a few tokens in one slot, which we save and erase again.

ANY: Final = SlotId(-1)  # the engine's choice (engine.md T8)
CANARY_TOKENS: Final = 16  # 5 leave a checkpoint with any batch size; a large model on a CPU is slow
CANARY_TEXT: Final = " ".join(map(str, range(CANARY_TOKENS)))  # at least one token for each number
# Enough for a large batch on a slow machine. If a task takes the slot first, the engine saves it when that
# task ends (engine.md 2.3).
SAVE_SECONDS: Final = 120.0
APPENDING: Final = 4  # the first version whose files may carry checkpoints (engine.md 2.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The format of one engine's slot files. Callers store it, because a used engine allows no canary.

    All values are plain, so that the result can be stored as JSON.
    """

    engine: str  # Identity.digest of the engine that wrote the files
    state_version: int
    files_carry: bool | None = None  # whether the files carry checkpoints; None = unknown
    layout: str = ""  # SlotFile.layout; empty = no file with tokens was seen

    def traits_into(self, traits: EngineTraits, fingerprint: str) -> EngineTraits:
        """Return the traits with the facts about slot files filled in."""
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
    """Find out the format of an engine's slot files. It must be awake, and have no pinned request meanwhile.

    1. Dense memory has no checkpoints, and older versions of the file have no place for them.
    2. If the saved slot has checkpoints, its file holds them.
    3. Otherwise a canary shows it, if `may_compute` is true and no slot was used yet.
    4. Otherwise the result of an earlier probe of the same engine counts.
    5. Otherwise it stays unknown until the first snapshot is saved.

    Args:
        client: the client of that engine.
        folder: the engine's --slot-save-path, as this machine sees it.
        traits: the engine's traits; only the kind of memory is used.
        engine: the engine's `Identity.digest`.
        may_compute: whether a canary is allowed.
        known: the result of an earlier probe, of this engine or of another.
        headers: credentials, if not the client's own.

    Raises:
        NoFilesError: snapshots are not possible with this engine.
        EngineGoneError: the engine does not answer any more.
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
    """Whether every slot is idle and empty, so that a prompt of ours overwrites nothing."""
    return not any(slot.busy or slot.held for slot in await client.slots(headers=headers))


def same(known: ProbeResult, now: ProbeResult) -> bool:
    return (known.engine, known.state_version) == (now.engine, now.state_version)


def quietest(views: tuple[SlotView, ...]) -> SlotId:
    """Return the idle slot with the smallest state. Raises NoFilesError if all slots are busy."""
    idle = [slot for slot in views if not slot.busy]
    if not idle:
        raise NoFilesError(Why.BUSY)
    return min(idle, key=lambda slot: slot.held or 0).slot


async def canary(client: EngineClient, folder: Path, headers: Headers | None) -> SlotFile:
    """Prefill a few tokens, save the slot's state and erase it again; return the file.

    The engine chooses the slot: an unpinned task never meets a running answer (engine.md T1).
    """
    ids = await client.tokenize(CANARY_TEXT, add_special=False, parse_special=False, headers=headers)
    ids = ids[:CANARY_TOKENS]
    slot = (await client.prefill(ids, ANY, headers=headers)).slot
    try:
        return await saved(client, folder, slot, headers)
    finally:
        await swept(client, slot, len(ids), headers)


async def swept(client: EngineClient, slot: SlotId, held: int, headers: Headers | None) -> None:
    """Erase a slot after our canary, unless another task has taken the slot since.

    `held` is the number of tokens that the canary left there.
    """
    views = await client.slots(headers=headers)
    if any(view.slot == slot and not view.busy and view.held == held for view in views):
        await client.erase(slot, headers=headers)


async def saved(client: EngineClient, folder: Path, slot: SlotId, headers: Headers | None) -> SlotFile:
    """Save an idle slot, read its file and delete the file. Raises NoFilesError, EngineError."""
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
    """Return a name that the store takes for a temporary file, so that it deletes any file that we leave."""
    return f"slotkeeper-{0:012x}-{secrets.token_hex(4)}.tmp"


def inspected(path: Path, written: int) -> SlotFile:
    """Read a slot file for which the engine reported `written` bytes. Blocks. Raises NoFilesError."""
    try:
        size = path.stat().st_size
        if size != written:  # on a full disk the engine may still answer 200: it does not check fclose
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


# -- flags, inferred from how the engine handles a few short prompts --------------------------------------
# Only for an unused engine. The engine chooses the slot of each prompt, so none meets a running answer
# (engine.md T1). Each prompt must reuse what the one before it left. If one does not, another client is
# there, or the engine chooses slots in a different way, and we conclude nothing more. All prompts together
# cost 200 tokens, or 350 with a sliding window.
#
# 1. Four prompts, each the beginning of the next. The first shows whether the engine makes checkpoints: for
#    them it ends a batch TAIL tokens before a prompt's end.
# 2. A prompt that diverges from the fourth within the range of the second. The engine goes back to the second
#    prompt's checkpoint. If later tasks have dropped it, the engine goes back to the first prompt's
#    checkpoint, or to none (engine.md T7).
# 3. Prompts that grow by a few tokens each and leave one or two checkpoints each. They end when an engine
#    with the stock limit would have dropped a checkpoint that an engine with the advised limit still has.
#    Then a prompt that diverges after that checkpoint. This step ends early if the engine is slow.
# 4. A prompt that shares nearly nothing with the one before, in the same slot. The engine copies the slot to
#    its RAM cache, if it has one. Then the earlier prompt again: it finds its copy, or nothing. (With a
#    sliding window a copy without a checkpoint is useless, so there a miss proves nothing.)

# A text that can continue in many ways: if one next token were certain, all engines would agree on it.
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
PARTS: Final = 18  # token where (2) diverges: after the second prompt's checkpoint, before the third's
LATE: Final = 12  # tokens: with that checkpoint (2) reuses at least so many, without it at most half of them
SHARED: Final = 4  # tokens that (4) has in common: a fifth of it, so that it is sent to the same slot
MANY: Final = 64  # checkpoints that (3) looks for: the number that we advise
GROWTH: Final = 44  # prompts at most in (3)
PATIENCE: Final = 2.0  # seconds after which (3) sends no further prompt: requests wait meanwhile
SPREAD: Final = 1  # tokens by which an engine with a sliding window may go back farther than the model
FEW: Final = 4  # the largest limit of an engine that has dropped all checkpoints by (2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Result of `try_flags`."""

    traits: EngineTraits
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens of ours that could not be erased


async def try_flags(client: EngineClient, traits: EngineTraits, headers: Headers | None = None) -> Tried:
    """Return the traits with the flags that could be inferred; unchanged if a slot was used already.

    Raises EngineGoneError.
    """
    canary = _Canary(client, headers)
    try:
        if not await unused(client, headers):
            return Tried(traits=traits)
        words = list(dict.fromkeys(await client.tokenize(TEXT, add_special=False, parse_special=False)))
        traits = await canary.try_all(traits, words)
    except EngineError:  # the engine refuses such prompts, or does not show its slots
        pass
    left = await canary.sweep()
    return Tried(traits=traits, left=left)


class _Canary:
    """Sends prompts one after another, all to the slot that the engine chose for the first."""

    def __init__(self, client: EngineClient, headers: Headers | None) -> None:
        self._client = client
        self._headers = headers
        self._slot = ANY  # the slot that the engine chose
        self._left: dict[SlotId, int] = {}  # tokens that we left in each slot
        self._tasks: list[tuple[int, int]] = []  # tasks in that slot: tokens reused, and tokens in all
        self._began = time.monotonic()

    async def try_all(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        long, others = words[: STEP * PROMPTS], words[STEP * PROMPTS :]
        if len(others) < 3 * STEP:  # the vocabulary is too small
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
        """Run steps (1) to (3). Return None if nothing more can be concluded."""
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
        """Whether each longer prompt reuses what the one before it left."""
        for end in range(2 * STEP, len(long) + 1, STEP):
            found = await self._send(long[:end])
            if found is None or found.cached < end - 2 * STEP + SHARED:
                return False
        return True

    async def _cap(self, traits: EngineTraits, words: list[int]) -> EngineTraits:
        """Run step (3): find out whether the engine keeps as many checkpoints as assumed, or as advised."""
        thinned = replace(traits, checkpoint_min_step=0)
        # Some newer builds thin a full list; with a sliding window they keep one more than our model does.
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
        """Return the checkpoints that an engine with these traits would have in the slot now."""
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
        """Prefill a prompt. Return None if the engine put it in another slot than the first prompt."""
        result = await self._client.prefill(ids, ANY, headers=self._headers)
        self._left[result.slot] = result.held
        if self._slot == ANY:
            self._slot = result.slot
        if result.slot != self._slot:
            return None
        self._tasks.append((result.cached, result.held))
        return result

    async def sweep(self) -> dict[SlotId, int]:
        """Erase the slots that we used. Return the tokens that had to stay: without --slot-save-path all."""
        try:
            for slot, held in tuple(self._left.items()):
                await swept(self._client, slot, held, self._headers)
                del self._left[slot]
        except EngineError:
            pass
        return self._left


def _about_checkpoints(traits: EngineTraits, back: int) -> EngineTraits:
    """Return the traits after step (2), in which the engine reused `back` tokens."""
    if back >= LATE:
        return traits.learned(Known.CANARY, checkpoint_min_step=0) if traits.eager_thinning else traits
    if back and traits.eager_thinning:
        return traits.learned(Known.CANARY, checkpoint_min_step=traits.checkpoint_min_step)
    return traits.learned(Known.CANARY, checkpoint_cap=FEW)

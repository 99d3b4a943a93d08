"""Has an engine save a slot, and edits the file before the store keeps it.

The edit repairs a sliding window so that it can be extended (T4). It leaves out large checkpoints that
probably no prompt will need, and always those of other tokens (T11).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any, Final

from slotkeeper.engine.answers import EngineError, EngineGoneError, SaveResult
from slotkeeper.engine.slotfile import Patch, SlotFile, SlotFileRecord, keep, patched, repair_window
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.effects import Save, SaveMoment
from slotkeeper.scheduler.engine_model import EngineTraits, Memory, user_starts
from slotkeeper.scheduler.events import Event, Filed, Saved
from slotkeeper.scheduler.types import id_of
from slotkeeper.store import intake
from slotkeeper.store.index import by_our_clock
from slotkeeper.store.intake import SlotFileEdit
from slotkeeper.store.store import Store
from slotkeeper.store.trouble import HaltedError, SnapshotError, StoreError

# -- which checkpoints are worth their bytes -------------------------------------------------------------

LARGE: Final = 64 << 20  # bytes: below this sum all checkpoints are kept
NEWEST: Final = 2  # checkpoints: the start of the next turn, and the end of the last prompt
NEAR: Final = 16  # tokens: two checkpoints this close are equally good


def _current(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """Return the checkpoints that the engine would use, in ascending order of tokens.

    The engine searches from the end of its list. After a cut the list may not ascend (T11): a checkpoint
    before one with fewer tokens is never used.
    """
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if not found or record.at < found[-1].at:
            found.append(record)
    return found[::-1]


def worth_keeping(
    file: SlotFile, places: Collection[int], stale: Collection[int] = ()
) -> list[SlotFileRecord]:
    """Return all current checkpoints if they are small in sum, else the ones worth their bytes.

    These are the first, the newest, and those just before `places`, where prompts diverge. Checkpoints at
    `stale` tokens are left out.
    """
    records = [record for record in _current(file.records) if record.at not in stale]
    if sum(record.length for record in records) < LARGE:
        return records
    wanted = {*_nearest(records, places).values(), *_newest(records), *records[:1]}
    return [record for record in records if record in wanted]


def _nearest(records: Sequence[SlotFileRecord], places: Collection[int]) -> dict[int, SlotFileRecord]:
    """Return for each place the last checkpoint at or before it, if one is within `NEAR` tokens."""
    ordered = sorted(records, key=lambda record: record.at)
    found = {}
    for place in places:
        index = bisect_right(ordered, place, key=lambda record: record.at)
        if index and place - ordered[index - 1].at <= NEAR:
            found[place] = ordered[index - 1]
    return found


def _newest(records: Sequence[SlotFileRecord]) -> list[SlotFileRecord]:
    """Return the last `NEWEST` checkpoints; of several within `NEAR` tokens only the last counts."""
    found: list[SlotFileRecord] = []
    for record in reversed(records):
        if len(found) < NEWEST and all(abs(record.at - other.at) > NEAR for other in found):
            found.append(record)
    return found


# -- the edit of a file --------------------------------------------------------------------------------


@dataclass(slots=True)
class Editing:
    """The edit of one file. `cuts`: where prompts diverged from it; `stale`: checkpoints to leave out."""

    traits: EngineTraits
    cuts: Collection[int] = ()
    stale: Collection[int] = ()
    written: tuple[int, ...] | None = None  # tokens of the checkpoints that the engine wrote, as in the slot

    def __call__(self, opened: FileIO, own: SlotFile) -> SlotFileEdit | None:
        self.written = tuple(record.at for record in own.records)
        places = {*self.cuts, *user_starts(own.tokens, self.traits)}
        kept = worth_keeping(own, places, self.stale)
        patch = mended(opened, own, self.traits)
        if len(kept) == len(own.records) and not patch:
            return None
        recipe = keep(own, kept)
        return SlotFileEdit(recipe=patched(recipe, patch) if patch else recipe, repaired=patch is not None)


def mended(opened: FileIO, file: SlotFile, traits: EngineTraits) -> Patch | None:
    """Return the repair of the file's sliding window; None if it needs none or cannot be repaired."""
    if traits.memory is not Memory.SWA or traits.swa_full:
        return None
    return repair_window(opened, file, traits.n_swa)


# -- saving ----------------------------------------------------------------------------------------------

Later = Callable[[Coroutine[Any, Any, None]], object]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """A file that an engine has written, not verified yet."""

    name: str
    result: SaveResult
    started: float  # seconds, our clock


class Saver:
    """Saves slots to one store. `works` is called after each snapshot that was kept."""

    def __init__(
        self, store: Store, metrics: Metrics, post: Callable[[Event], None], works: Callable[[], None]
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._post = post
        self._works = works

    async def save(self, link: EngineLink, traits: EngineTraits, save: Save, later: Later) -> Saved:
        """Have the engine write the file. `later` starts the rest, which ends in a `Filed` event."""
        started, place, asker = time.monotonic(), save.place, id_of(save.request)
        failed = Saved(at=started, request=save.request, snapshot=None, lasting=True)
        try:
            name = await self._store.temporary(save.size)
        except StoreError as error:
            self._metrics.snapshot_operation("save", error.trouble.value)
            log.warning("not_saved", request_id=asker, place=str(place), error=str(error))
            return failed
        try:
            result = await link.client.save(place.slot, name, headers=link.auth)
        except (EngineError, EngineGoneError) as error:
            await self._discard(name)
            self._metrics.snapshot_operation("save", "refused" if isinstance(error, EngineError) else "lost")
            log.warning("not_saved", request_id=asker, place=str(place), error=str(error))
            return failed
        later(self._file(link, traits, save, Written(name, result, started)))
        return Saved(at=time.monotonic(), request=save.request, snapshot=None, written=True)

    async def _file(self, link: EngineLink, traits: EngineTraits, save: Save, file: Written) -> None:
        """Keep the written file, and post `Filed`. Meanwhile its slot may serve a request again."""
        saved = None
        try:
            saved = await self._keep(link, traits, save, file)
        except Exception:  # any error must be reported: a request may wait for the file
            log.exception("not_filed", request_id=id_of(save.request), place=str(save.place))
            self._metrics.fallback("files")
        self._post(
            Filed(
                at=time.monotonic(),
                engine=save.place.engine,
                request=save.request,
                snapshot=saved.snapshot if saved else None,
                tokens=saved.tokens if saved else None,
                checkpoints=saved.checkpoints if saved else (),
                seconds=file.result.seconds,
                lasting=saved is None or saved.lasting,
            )
        )

    async def _keep(self, link: EngineLink, traits: EngineTraits, save: Save, file: Written) -> Saved:
        """Check what the engine has written, edit it, and add it to the catalog."""
        edit = Editing(traits, save.cuts, save.stale)
        facts = intake.SavedFile(
            fingerprint=traits.fingerprint_of(save.tokens),
            tokens=save.tokens,
            written=file.result.written,
            layout=link.layout,
            build=link.build,
            edit=edit,
            golden=save.moment is SaveMoment.BOUNDARY,
        )
        try:
            kept = await self._store.keep(file.name, facts)
        except (SnapshotError, StoreError, HaltedError, ValueError) as error:  # the last: an edit failed
            lasting = isinstance(error, StoreError)  # else only this state cannot be kept
            self._metrics.snapshot_operation("save", _outcome(error))
            asker, place = id_of(save.request), str(save.place)
            log.warning("not_kept", request_id=asker, place=place, error=str(error))
            return Saved(at=time.monotonic(), request=save.request, snapshot=None, lasting=lasting)
        self._metrics.snapshot_operation("save", "ok", time.monotonic() - file.started)
        self._works()
        link.saw_layout(kept.manifest.layout)
        log.info(
            "snapshot_saved",
            request_id=id_of(save.request),
            snapshot=kept.id,
            place=str(save.place),
            moment=save.moment.value,
            tokens=len(kept.tokens),
            bytes=kept.manifest.size,
            checkpoints=len(kept.manifest.checkpoints),
            seconds=round(time.monotonic() - file.started, 4),
        )
        return Saved(
            at=time.monotonic(),
            request=save.request,
            snapshot=by_our_clock(kept),
            tokens=kept.tokens,
            checkpoints=edit.written or (),
            seconds=file.result.seconds,
        )

    async def _discard(self, name: str) -> None:
        try:
            await self._store.discard(name)
        except (StoreError, HaltedError) as error:  # the next save removes it
            log.debug("not_discarded", error=str(error))


def _outcome(error: Exception) -> str:
    """Return the label `outcome` of `slotkeeper_snapshot_operations_total` for an error."""
    if isinstance(error, StoreError):
        return error.trouble.value
    return type(error).__name__.removesuffix("Error").lower()

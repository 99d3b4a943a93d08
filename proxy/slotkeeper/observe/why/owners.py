"""Which conversation a snapshot is of, as far as it was seen since the start. In memory only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from slotkeeper.conversation.naming import Name
from slotkeeper.observe.why.record import Record
from slotkeeper.scheduler.snapshots import SnapshotId
from slotkeeper.scheduler.types import RequestId

MOST: Final = 4096  # snapshots
UNDER_WAY: Final = 256  # saves


class Owners:
    def __init__(self) -> None:
        self._names: OrderedDict[SnapshotId, Name] = OrderedDict()
        self._saving: OrderedDict[RequestId, Name] = OrderedDict()

    def of(self, snapshot: SnapshotId) -> Name | None:
        return self._names.get(snapshot)

    def saving(self, asker: RequestId, record: Record | None) -> None:
        """What is saved for `asker` is the state of the record's conversation."""
        if record is None:
            self._saving.pop(asker, None)
            return
        self._saving[asker] = record.name
        if len(self._saving) > UNDER_WAY:
            self._saving.popitem(last=False)

    def saved(self, asker: RequestId, snapshot: SnapshotId) -> None:
        if name := self._saving.get(asker):
            self._put(snapshot, name)

    def restored(self, snapshot: SnapshotId, record: Record) -> None:
        """Saved by an earlier run, or unknown: it belongs to the first conversation that continues it."""
        if snapshot not in self._names:
            self._put(snapshot, record.name)

    def _put(self, snapshot: SnapshotId, name: Name) -> None:
        self._names[snapshot] = name
        if len(self._names) > MOST:
            self._names.popitem(last=False)

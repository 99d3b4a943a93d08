"""What each snapshot of a tier adds to it, where snapshots have parts in common: pure accounts, no files.

Every part is stored once and counts once: for the newest snapshot that has it. So dropping an old state of a
conversation frees what is counted for it, and the sum is what the disk holds. Parts that no snapshot has any
more may stay as leftovers, the oldest first in line to go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slotkeeper.scheduler.slot_contents import SnapshotId


class _Part:
    """One part: its name and bytes, and the snapshots that have it."""

    __slots__ = ("holders", "name", "size")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.holders: list[SnapshotId] = []

    @property
    def holder(self) -> SnapshotId | None:
        """The snapshot for which it counts."""
        return max(self.holders, default=None)


class Shares:
    """The bytes of each part, and who has it. Newer snapshots have greater ids."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._of: dict[SnapshotId, tuple[_Part, ...]] = {}
        self._own: dict[SnapshotId, int] = {}
        self._left: dict[str, None] = {}  # leftovers, the oldest first
        self.total = 0  # bytes of all parts, with leftovers

    def __repr__(self) -> str:
        return f"<Shares of {len(self._of)} in {len(self._parts)} parts, {len(self._left)} left over>"

    def own(self, snapshot: SnapshotId) -> int:
        """Return the bytes that count for a snapshot; 0 if it is unknown."""
        return self._own.get(snapshot, 0)

    def left(self, part: str, size: int) -> None:
        """Add a part that no snapshot has."""
        if part not in self._parts:
            self._parts[part] = _Part(part, size)
            self._left[part] = None
            self.total += size

    def add(self, snapshot: SnapshotId, parts: Mapping[str, int]) -> None:
        """Add a snapshot with its parts and their bytes; nothing if it is known already."""
        if snapshot in self._of:
            return
        self._own[snapshot] = 0
        for name, size in parts.items():
            self.left(name, size)
            self._left.pop(name, None)
            self._counted(self._parts[name], -1)
            self._parts[name].holders.append(snapshot)
            self._counted(self._parts[name], 1)
        self._of[snapshot] = tuple(self._parts[name] for name in parts)

    def drop(self, snapshot: SnapshotId) -> list[str]:
        """Remove a snapshot. Returns the parts that no other one has: they are leftovers now."""
        alone = []
        for part in self._of.pop(snapshot, ()):
            self._counted(part, -1)
            part.holders.remove(snapshot)
            self._counted(part, 1)
            if not part.holders:
                self._left[part.name] = None
                alone.append(part.name)
        self._own.pop(snapshot, None)
        return alone

    def gone(self, part: str) -> None:
        """Forget a leftover, because it was removed."""
        if part in self._left:
            del self._left[part]
            self.total -= self._parts.pop(part).size

    def beyond(self, room: float) -> Iterator[str]:
        """Yield the leftovers to be removed, by the caller, until all parts fit into `room` bytes."""
        over = self.total - room
        for name in [*self._left]:
            if over <= 0:
                return
            over -= self._parts[name].size
            yield name

    def _counted(self, part: _Part, sign: int) -> None:
        if part.holder is not None:
            self._own[part.holder] += sign * part.size

"""Whether the store can be used now: the last trouble, when to look again, and how quick the folders are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from slotkeeper.scheduler.snapshots import Tier
from slotkeeper.store.trouble import StoreError, Trouble, troubles

RETRY_SECONDS: Final = 30.0  # a user who frees a disk does not want to wait for minutes
TELLING_BYTES: Final = 16 << 20  # smaller files say more about the disk's seek time
SLOW_BYTES_PER_SECOND: Final = 20e6  # below that, computing 4 GB again is often quicker than reading them

# What remarks are about, beside a slow tier.
COLD: Final = "the cold folder"
ROOM: Final = "room in the hot folder"
INDEX: Final = "the index"


class StoreHealth:
    """`now` is any clock that does not jump."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._trouble: StoreError | None = None
        self._since = 0.0
        self._remarks: dict[str, StoreError] = {}  # what keeps nothing from working, by what it is about

    @property
    def trouble(self) -> StoreError | None:
        """What to tell a user; also what keeps nothing from working, such as a slow folder."""
        return self._trouble or next(iter(self._remarks.values()), None)

    @property
    def blocking(self) -> StoreError | None:
        """A trouble so recent that it is not worth trying again."""
        recent = self._now() < self._since + RETRY_SECONDS
        return self._trouble if recent else None

    @property
    def doubtful(self) -> bool:
        """Whether there was a trouble, and nothing has worked since."""
        return self._trouble is not None

    def hurt(self, error: StoreError) -> None:
        self._trouble, self._since = error, self._now()

    def recovered(self) -> None:
        self._trouble = None

    @contextmanager
    def watching(self, doing: str, tier: Tier) -> Iterator[None]:
        """Remembers what the system refuses. StoreError for other reasons passes: no room for one file.

        Trouble with the cold tier is only a remark, which ends with the next thing that works there.
        """
        try:
            with troubles(doing):
                yield
        except StoreError as error:
            if tier is Tier.COLD:
                self.remark(COLD, error)
            elif isinstance(error.__cause__, OSError) and error.trouble is not Trouble.NOT_SHARED:
                self.hurt(error)
            raise
        if tier is Tier.COLD:
            self.remark(COLD, None)

    def remark(self, about: str, error: StoreError | None) -> None:
        """Something to tell that keeps nothing from working, or None when it is over."""
        if error:
            self._remarks[about] = error
        else:
            self._remarks.pop(about, None)

    def measured(self, tier: Tier, size: int, seconds: float) -> None:
        """So many bytes went through in that time."""
        if size >= TELLING_BYTES:
            slow = size < SLOW_BYTES_PER_SECOND * seconds
            rate = f"{size / seconds / 1e6:.1f} MB/s for a file of {size >> 20} MiB" if slow else ""
            self.remark(
                tier, StoreError(Trouble.SLOW, f"The {tier} folder is slow: {rate}") if slow else None
            )

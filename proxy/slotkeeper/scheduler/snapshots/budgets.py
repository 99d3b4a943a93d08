"""The limits that the user has set, and how many bytes of snapshots each folder may hold and get in an hour.

What the user has not set follows the disk and the model:

1. A folder gets a share of what would be free there without our snapshots. So the budget stays the same while
   they grow, and shrinks when other programs need the disk.
2. If that is less than a few of the largest states, the folder gets up to twice the share.
3. Folders on one file system divide what is free there.
4. Memory (a tmpfs) gets half as much as a disk: the engine, its RAM cache and its checkpoints need it too.
5. The writes of an hour follow the size of the disk that wears out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from slotkeeper.scheduler.types import Tier

GIB: Final = 2**30
UNLIMITED: Final = sys.maxsize
# Of the largest ones, for which there should be room: two conversations, and their forks.
STATES_WITH_ROOM: Final = 4
# With room for fewer, two conversations drive out each other's snapshots.
MIN_STATES_WITHOUT_WARNING: Final = 2

# Our folders take at most twice their share, also because a save and a move may need room before old files
# go: a quarter of a disk, half of it at most.
DISK_SHARE: Final = 0.25
MEMORY_SHARE: Final = 0.125
MAX_SHARES: Final = 2

# SSDs for desktops are warranted for about 0.3 writes of the whole disk a day for five years, which is this
# rate for five busy hours a day.
HOURLY_SHARE: Final = 1 / 16  # of the disk's size

LOGGED_CHANGE: Final = 0.25  # a smaller change is not logged
HOUR: Final = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the user has set. None: they follow the disk and the model."""

    hot_bytes: int | None = None
    cold_bytes: int | None = 0  # 0: there is no cold tier
    shared_bytes: int | None = None  # the cold tier's own share, if other sidecars use it too
    hourly_bytes: int | None = None  # written per hour while conversations pause
    pause: float = 0.25  # seconds without a request until a save; longer if saves are slow
    engine_wait: float = 60.0  # seconds for which requests wait for an engine that has exited
    idle_tokens: int = 1_000_000  # computed per hour in idle time
    running: int = 0  # requests at work on one engine; 0: one for each slot
    # Times as long as in the order of arrival that a request may wait for others; 1: that order; see `turns`.
    delay_factor: float = 2.0
    waiting: int = 4000  # queued requests
    waiting_of_one: int = 1000  # queued requests of one client
    swap_wait: float = 10.0  # seconds for which a request waits before its model may replace another


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRoom:
    """The file system of a folder, in bytes."""

    total: int
    free: int  # without the snapshots that our folders have there
    device: int = 0  # folders with the same number are on one file system
    in_memory: bool = False

    def share(self, largest: int, folders: int) -> int:
        """Return the default budget of one of so many folders there (rules 1 to 4); `largest`: a state's."""
        part = (MEMORY_SHARE if self.in_memory else DISK_SHARE) * max(0, self.free) / folders
        return int(min(max(part, STATES_WITH_ROOM * largest), MAX_SHARES * part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The budgets that are in force, in bytes; UNLIMITED: no limit."""

    hot: int
    cold: int  # 0: there is no cold tier, or no room for one
    hourly: int
    largest: int = 0  # size of a file with the largest state; 0: unknown

    def of(self, tier: Tier) -> int:
        return self.hot if tier is Tier.HOT else self.cold

    def shown(self, tier: Tier) -> int | None:
        """Return a tier's budget for documents and metrics; None: no limit."""
        budget = self.of(tier)
        return budget if budget < UNLIMITED else None

    def differ(self, other: Budgets) -> bool:
        """Whether a user who knows the other ones should hear of these: a disk is never quite still."""
        if self.small and not other.small:
            return True
        pairs = ((self.hot, other.hot), (self.cold, other.cold), (self.hourly, other.hourly))
        return any(abs(one - two) > LOGGED_CHANGE * max(one, two) for one, two in pairs)

    @property
    def fits(self) -> int | None:
        """How many conversations of full context have room in the slot folder; None: unknown."""
        return self.hot // self.largest if self.largest else None

    @property
    def small(self) -> bool:
        """Whether so few conversations of full context have room that the user should know."""
        return self.fits is not None and self.fits < MIN_STATES_WITHOUT_WARNING

    @property
    def advice(self) -> str:
        """What a user can do if the folder is small, in a sentence; "" if it is not."""
        if not self.small:
            return ""
        needed = -(-MIN_STATES_WITHOUT_WARNING * self.largest // GIB)
        return f"Set --hot-bytes {needed}GiB or more, if the disk has the room, or name a folder that has it."


def budgets(limits: Limits, rooms: Mapping[Tier, FolderRoom], largest: int = 0) -> Budgets:
    """Return the budgets: what the user has set, and for the rest what follows from the file systems.

    Args:
        limits: what the user has set; None: nothing.
        rooms: the file system of each tier's folder. A tier without one cannot be measured: no limit.
        largest: size in bytes of a file with the largest state; 0: unknown.
    """
    hot = _tier(limits.hot_bytes, Tier.HOT, rooms, largest)
    cold = _tier(limits.cold_bytes, Tier.COLD, rooms, largest)
    hourly = limits.hourly_bytes
    if hourly is None:
        # Saves go to the hot folder. If that is in memory, a disk gets at most as much, as files move to it.
        worn = next((rooms[tier] for tier in Tier if tier in rooms and not rooms[tier].in_memory), None)
        # A small disk with a large model still gets its snapshots.
        least = min(STATES_WITH_ROOM * largest, hot)
        hourly = max(int(worn.total * HOURLY_SHARE), least) if worn else UNLIMITED
    return Budgets(hot=hot, cold=cold, hourly=hourly, largest=largest)


def _tier(given: int | None, tier: Tier, rooms: Mapping[Tier, FolderRoom], largest: int) -> int:
    if given is not None:
        return given
    if tier not in rooms:
        return UNLIMITED
    room = rooms[tier]
    return room.share(largest, sum(other.device == room.device for other in rooms.values()))


@dataclass(slots=True)
class HourlyBudget:
    """A budget for idle work, in bytes or tokens. At most one hour's worth can be spent at once."""

    hourly: int
    left: float
    at: float

    def wait(self, size: int, now: float) -> float:
        """Return the seconds until `size` may be spent; infinite if it exceeds one hour's worth."""
        refill = (now - self.at) * self.hourly / HOUR
        self.left, self.at = min(float(self.hourly), self.left + refill), now
        if size <= self.left:
            return 0.0
        return (size - self.left) * HOUR / self.hourly if size <= self.hourly else inf

    def spend(self, size: int, now: float) -> bool:
        """Spend `size` and return True, if the budget allows it now."""
        if self.wait(size, now):
            return False
        self.left -= size
        return True

    def give_back(self, size: int) -> None:
        """Take back what was spent for work that is not done."""
        self.left = min(float(self.hourly), self.left + size)

    def becomes(self, hourly: int) -> None:
        """Take another budget from now on."""
        self.hourly, self.left = hourly, min(self.left, float(hourly))

"""What can be wrong with a folder or with one snapshot, and whether the store can be used now.

Trouble with a folder is a value with advice: the sidecar goes on without snapshots until it is over.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from slotkeeper.scheduler.slot_contents import Tier


class Trouble(StrEnum):
    """What can be wrong with a folder."""

    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    NOT_OURS = "not_ours"  # permissions, or a name of ours that is a link, a folder, a device
    MISSING_FOLDER = "missing_folder"
    IN_USE = "in_use"  # by another sidecar
    NOT_SHARED = "not_shared"  # the engine saves somewhere else
    REFUSED = "refused"  # by a shared store: the credentials, or what they allow
    UNREACHABLE = "unreachable"  # a shared store does not answer, or not as it should
    SLOW = "slow"  # reported only, never raised
    BROKEN = "broken"  # the disk itself fails, or anything else that the system says


ADVICE: Final[Mapping[Trouble, str]] = {
    Trouble.DISK_FULL: "Free some space there, lower the budget for snapshots, or name another folder.",
    Trouble.READ_ONLY: "Mount it writable, or name another folder.",
    Trouble.NOT_OURS: "Give the folder to the user that runs Slotkeeper and the engine (chown), mode 0700.",
    Trouble.MISSING_FOLDER: "Make the folder, or mount what should be there.",
    Trouble.IN_USE: "Another sidecar keeps its snapshots there: give each one a folder of its own.",
    Trouble.NOT_SHARED: "Start the engine with --slot-save-path on the folder that Slotkeeper is given.",
    Trouble.REFUSED: "Look at the credentials (AWS_...) and at what they allow in that bucket.",
    Trouble.UNREACHABLE: "Look whether the store runs, and at its address (AWS_ENDPOINT_URL).",
    Trouble.SLOW: "Put the folder on a local disk or, where there is memory for it, on a tmpfs.",
    Trouble.BROKEN: "Look at the system's log for what is wrong with this disk.",
}

_ERRORS: Final[Mapping[int | None, Trouble]] = {
    errno.ENOSPC: Trouble.DISK_FULL,
    errno.EDQUOT: Trouble.DISK_FULL,
    errno.EFBIG: Trouble.DISK_FULL,  # the file system's or the process's limit for one file
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.NOT_OURS,
    errno.EPERM: Trouble.NOT_OURS,
    errno.EEXIST: Trouble.NOT_OURS,  # something else has the folder's name
    errno.ELOOP: Trouble.NOT_OURS,  # a link where O_NOFOLLOW was asked for
    errno.ENOENT: Trouble.MISSING_FOLDER,
    errno.ENOTDIR: Trouble.MISSING_FOLDER,
    errno.ESTALE: Trouble.MISSING_FOLDER,  # NFS: the server lost it
    errno.ENOTCONN: Trouble.MISSING_FOLDER,  # FUSE: its process ended
}


class StoreError(Exception):
    """A folder cannot be used now. The text says what was tried, what happened and what to do."""

    def __init__(self, trouble: Trouble, what: str) -> None:
        super().__init__(f"{what}. {ADVICE[trouble]}")
        self.trouble = trouble


class SnapshotError(Exception):
    """One snapshot cannot be used."""


class TornError(SnapshotError):
    """What the engine saved is not a whole slot file, or not of the tokens that it should hold (T3)."""


class UnfitError(SnapshotError):
    """Its bytes are not those that were kept (T2), or it was kept for another kind of engine."""


class MissingError(SnapshotError):
    """There is no such snapshot, or its file is gone."""


class LateError(Exception):
    """It was given up to bring a snapshot from the cold tier: computing it is quicker."""


class HaltedError(Exception):
    """Work on a file was given up: no caller waits for it, or the store is closed."""


def trouble_in(error: OSError) -> Trouble:
    return _ERRORS.get(error.errno, Trouble.BROKEN)


@contextmanager
def troubles(doing: str) -> Iterator[None]:
    """Turns what the system refuses into StoreError. `doing` begins the sentence: "save to /slots"."""
    try:
        yield
    except OSError as error:
        raise StoreError(trouble_in(error), f"Cannot {doing}: {error.strerror or error}") from error


# -- whether the store can be used now -------------------------------------------------------------------

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

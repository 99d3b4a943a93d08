"""Errors of a folder or store and of a snapshot, operations and outcomes for metrics, and the store's health.

The error of a folder has advice for the user. The sidecar continues without snapshots until the trouble is
over.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from slotkeeper.scheduler.types import Loading, Tier


class Trouble(StrEnum):
    """The kinds of trouble with a folder or a shared store."""

    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    NOT_OURS = "not_ours"  # permissions, or one of our names is a link, a folder or a device
    MISSING_FOLDER = "missing_folder"
    IN_USE = "in_use"  # another sidecar uses the folder
    NOT_SHARED = "not_shared"  # the engine saves somewhere else
    REFUSED = "refused"  # a shared store refuses: wrong credentials, or missing permissions
    UNREACHABLE = "unreachable"  # a shared store does not answer, or answers wrongly
    SLOW = "slow"  # of a folder only a remark; an upload to a shared store fails with it
    BROKEN = "broken"  # the disk itself fails, or any other system error


ADVICE: Final[Mapping[Trouble, str]] = {
    Trouble.DISK_FULL: "Free some space there, lower the budget for snapshots, or name another folder.",
    Trouble.READ_ONLY: "Mount it writable, or name another folder.",
    Trouble.NOT_OURS: "Give the folder to the user that runs Slotkeeper and the engine (chown), mode 0700.",
    Trouble.MISSING_FOLDER: "Make the folder, or mount what should be there.",
    Trouble.IN_USE: "Another sidecar keeps its snapshots there: give each one a folder of its own.",
    Trouble.NOT_SHARED: "Start the engine with --slot-save-path on the folder that Slotkeeper is given.",
    Trouble.REFUSED: "Check the credentials (AWS_...) and what they permit in that bucket.",
    Trouble.UNREACHABLE: "Check that the store runs, and that its address is right (AWS_ENDPOINT_URL).",
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
    errno.EEXIST: Trouble.NOT_OURS,  # another kind of file has the folder's name
    errno.ELOOP: Trouble.NOT_OURS,  # a link, opened with O_NOFOLLOW
    errno.ENOENT: Trouble.MISSING_FOLDER,
    errno.ENOTDIR: Trouble.MISSING_FOLDER,
    errno.ESTALE: Trouble.MISSING_FOLDER,  # NFS: the server lost the folder
    errno.ENOTCONN: Trouble.MISSING_FOLDER,  # FUSE: the file system's process ended
}


class StoreError(Exception):
    """A folder or a shared store cannot be used now. The text has the operation, the error and the advice."""

    def __init__(self, trouble: Trouble, what: str) -> None:
        super().__init__(f"{what}. {ADVICE[trouble]}")
        self.trouble = trouble


class SnapshotError(Exception):
    """One snapshot cannot be used."""


class TornError(SnapshotError):
    """The saved file is not a whole slot file, or has other tokens than it should have (T3)."""


class UnfitError(SnapshotError):
    """The snapshot's bytes are not those that were kept (T2), or it is for another kind of engine."""


class MissingError(SnapshotError):
    """There is no such snapshot or object, or its file is gone."""


class LateError(Exception):
    """The cold tier took too long: computing the state is quicker than waiting."""


class HaltedError(Exception):
    """Work on a file was stopped: its caller was cancelled, or the store is closed."""


def trouble_in(error: OSError) -> Trouble:
    return _ERRORS.get(error.errno, Trouble.BROKEN)


@contextmanager
def troubles(doing: str) -> Iterator[None]:
    """Turn an OSError into a StoreError. `doing` completes "Cannot ...", for example "save to /slots"."""
    try:
        yield
    except OSError as error:
        raise StoreError(trouble_in(error), f"Cannot {doing}: {error.strerror or error}") from error


# -- whether the store can be used now -------------------------------------------------------------------

RETRY_SECONDS: Final = 30.0  # a user who has freed a disk should not wait for minutes
TELLING_BYTES: Final = 16 << 20  # the speed of a smaller file depends more on the disk's seek time
SLOW_BYTES_PER_SECOND: Final = 20e6  # below it, computing a state of 4 GB is often quicker than reading it

# Subjects of remarks, beside a slow tier.
COLD: Final = "the cold folder"
ROOM: Final = "room in the hot folder"
INDEX: Final = "the index"


class StoreHealth:
    """The store's present trouble and remarks. `now` is a monotonic clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._trouble: StoreError | None = None
        self._since = 0.0
        self._remarks: dict[str, StoreError] = {}  # troubles that stop no operation, by subject

    @property
    def trouble(self) -> StoreError | None:
        """The trouble to show a user; if there is none, a remark such as a slow folder."""
        return self._trouble or next(iter(self._remarks.values()), None)

    @property
    def blocking(self) -> StoreError | None:
        """The present trouble, if it is so recent (RETRY_SECONDS) that no operation is tried; else None."""
        recent = self._now() < self._since + RETRY_SECONDS
        return self._trouble if recent else None

    @property
    def doubtful(self) -> bool:
        """Whether there was a trouble and no operation has succeeded since."""
        return self._trouble is not None

    def hurt(self, error: StoreError) -> None:
        self._trouble, self._since = error, self._now()

    def recovered(self) -> None:
        self._trouble = None

    @contextmanager
    def watching(self, doing: str, tier: Tier) -> Iterator[None]:
        """Turn an OSError of the block into a StoreError, and remember it as the present trouble.

        Other StoreErrors only pass, such as no room for one file. An error of the cold tier is only a remark;
        the next operation that succeeds there ends it.
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
        """Set the remark on a subject, a trouble that stops no operation; None ends it."""
        if error:
            self._remarks[about] = error
        else:
            self._remarks.pop(about, None)

    def measured(self, tier: Tier, size: int, seconds: float) -> None:
        """Judge the tier's speed by `size` bytes that took `seconds`."""
        if size >= TELLING_BYTES:
            slow = size < SLOW_BYTES_PER_SECOND * seconds
            rate = f"{size / seconds / 1e6:.1f} MB/s for a file of {size >> 20} MiB" if slow else ""
            self.remark(
                tier, StoreError(Trouble.SLOW, f"The {tier} folder is slow: {rate}") if slow else None
            )


# -- outcomes of operations on snapshots, for metrics ----------------------------------------------------

# Errors that only a shared store raises.
NOT_OF_FOLDERS: Final = frozenset({Trouble.SLOW, Trouble.REFUSED, Trouble.UNREACHABLE})
FOLDER: Final = tuple(trouble.value for trouble in Trouble if trouble not in NOT_OF_FOLDERS)
USUAL: Final = ("ok", "nothing", "leased")  # outcomes that are no failures
OPERATIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "open": ("ok", *FOLDER),
        "save": ("ok", "refused", "lost", "torn", "unfit", "missing", "snapshot", "halted", "value", *FOLDER),
        "restore": ("ok", *(loading.value for loading in Loading if loading is not Loading.DONE)),
        "demote": ("ok", "failed"),
        "drop": ("ok", "failed"),
        "prove": ("failed",),
        # Only with a shared store.
        "upload": ("ok", "leased", "unfit", "failed"),
        "find": ("ok", "nothing", "late", "failed"),
        "collect": ("ok", "failed"),
    }
)

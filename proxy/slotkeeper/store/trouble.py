"""What can be wrong with a folder, and with one snapshot in it.

Trouble with a folder is a value with advice: the sidecar goes on without snapshots until it is over.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Final


class Trouble(StrEnum):
    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    NOT_OURS = "not_ours"  # permissions, or a name of ours that is a link, a folder, a device
    MISSING_FOLDER = "missing_folder"
    IN_USE = "in_use"  # by another sidecar
    NOT_SHARED = "not_shared"  # the engine saves somewhere else
    SLOW = "slow"  # reported only, never raised
    BROKEN = "broken"  # the disk itself fails, or anything else that the system says


ADVICE: Final[Mapping[Trouble, str]] = {
    Trouble.DISK_FULL: "Free some space there, lower the budget for snapshots, or name another folder.",
    Trouble.READ_ONLY: "Mount it writable, or name another folder.",
    Trouble.NOT_OURS: "Give the folder to the user that runs Slotkeeper and the engine (chown), mode 0700.",
    Trouble.MISSING_FOLDER: "Make the folder, or mount what should be there.",
    Trouble.IN_USE: "Another sidecar keeps its snapshots there: give each one a folder of its own.",
    Trouble.NOT_SHARED: "Start the engine with --slot-save-path on the folder that Slotkeeper is given.",
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

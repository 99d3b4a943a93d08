"""The secret of a folder, by which its manifests are told from foreign ones.

It lies in the folder, for its owner alone, and goes with it to another machine. Folders of earlier releases
have none: their manifests, sealed by a public digest, are taken over once. Until that is
done the secret has another name, so that a sidecar killed in between goes on with the same one.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slotkeeper.store import files, names

BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Seal:
    secret: bytes
    takes_over: bool  # whether manifests of releases that had no secret are believed


def seal_of(folder: Path) -> Seal:
    """The folder's own, made where there is none. OSError passes."""
    for name, takes_over in ((names.SEAL, False), (names.FIRST_SEAL, True)):
        secret = _read(folder / name)
        if secret is not None:
            return Seal(secret, takes_over)
    secret = secrets.token_bytes(BYTES)
    files.write_small(folder / names.FIRST_SEAL, folder / names.new_temporary(time.time()), secret)
    return Seal(secret, takes_over=True)


def taken_over(folder: Path, seal: Seal) -> Seal:
    """All that lay there has this seal by now: nothing without one is believed any more."""
    if seal.takes_over:
        (folder / names.FIRST_SEAL).replace(folder / names.SEAL)
        files.sync_folder(folder)
    return Seal(seal.secret, takes_over=False)


def _read(path: Path) -> bytes | None:
    """None where there is none, or none that can be ours."""
    try:
        file = files.open_ours(path)
    except FileNotFoundError:
        return None
    with file:
        found = os.fstat(file.fileno())
        if found.st_uid not in {0, os.geteuid()}:
            raise OSError(errno.EPERM, "it belongs to another user", str(path))
        if stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == os.geteuid():  # as fsGroup leaves it
            os.fchmod(file.fileno(), 0o600)
        secret = file.read(BYTES + 1)
    return secret if len(secret) == BYTES else None

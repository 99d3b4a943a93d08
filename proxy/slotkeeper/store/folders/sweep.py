"""The sweep of a folder: which snapshots it has, and the removal of what can never be used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slotkeeper.engine.slot_file.slotfile import Damage, tokens_with_images
from slotkeeper.engine.slot_file.slotfile_reader import read
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.slot_contents import SnapshotId
from slotkeeper.store import files
from slotkeeper.store.folders.joined import size_of
from slotkeeper.store.folders.snapshot_folder import SnapshotFolder
from slotkeeper.store.manifest import Flaw, Manifest
from slotkeeper.store.trouble import ADVICE, MissingError, Trouble, UnfitError, trouble_in


@dataclass(slots=True)
class Swept:
    """The snapshots that a sweep found in one folder. `notes` are log texts."""

    found: dict[SnapshotId, tuple[Manifest, Tokens]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sweep(
    folder: SnapshotFolder, spare: Collection[str] = (), known: Collection[SnapshotId] | None = None
) -> Swept:
    """Read every snapshot's manifest and header, and remove what can never be used.

    1. Temporary files are removed, except those in `spare`, which the engine may be writing.
    2. A file without a manifest, or a manifest without a file, is removed: a process ended halfway.
    3. A file that does not agree with its manifest goes to quarantine. Not all bytes are read for that:
       `Store.offer` does that before an engine gets the file.
    4. A snapshot of a later release stays as it is.
    5. A file that cannot be read or removed stays as it is, and one note says what to do.

    With `known` the folder is in use: these snapshots are passed over, and (1) and (2) are left out, because
    another lane may be writing such files. Files with other names are not touched. OSError passes if the
    folder itself cannot be read.
    """
    swept = Swept()
    left: dict[Trouble, list[str]] = {}
    there: dict[SnapshotId, set[str]] = {}
    temporary: list[Path] = []
    folder.count()
    for path in folder.path.iterdir():
        if files.is_temporary(path.name):
            temporary.append(path)
        elif found := files.ours(path.name):
            there.setdefault(found[0], set()).add(found[1])
    if known is None:
        _remove(temporary, spare, left)  # (1)
    for snapshot in sorted(there.keys() - (known or ())):
        with _leaving(snapshot, left):
            if len(there[snapshot]) > 1 and files.MANIFEST in there[snapshot]:
                _judge(folder, snapshot, swept)
            elif known is None:  # (2)
                folder.drop(snapshot)
                swept.notes.append(f"{snapshot}: unfinished, removed")
    for trouble, what in left.items():
        name, _, why = what[0].partition(": ")
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        swept.notes.append(f"{name}{more}: left alone, {why}. {ADVICE[trouble]}")
    folder.take_over(manifest for manifest, _ in swept.found.values())
    folder.unread = False
    return swept


def _remove(paths: Iterable[Path], spare: Collection[str], left: dict[Trouble, list[str]]) -> None:
    for path in paths:
        if path.name not in spare:
            with _leaving(path.name, left):
                files.remove(path)


@contextmanager
def _leaving(name: str, left: dict[Trouble, list[str]]) -> Iterator[None]:
    """Let a sweep continue after an error of one file. `left` collects the errors."""
    try:
        yield
    except (FileNotFoundError, MissingError):
        pass  # it disappeared during the sweep
    except OSError as error:
        left.setdefault(trouble_in(error), []).append(f"{name}: {error.strerror or error}")


def _judge(folder: SnapshotFolder, snapshot: SnapshotId, swept: Swept) -> None:
    manifest = folder.read_manifest(snapshot)
    if manifest is Flaw.NEWER:  # (4)
        swept.notes.append(f"{snapshot}: left alone, {manifest}")
        return
    try:
        found = _agreeing(folder, snapshot, manifest)
    except UnfitError as error:  # (3)
        folder.quarantine(snapshot)
        swept.notes.append(f"{snapshot}: quarantined, {error}")
    else:
        swept.found[snapshot] = found


def _agreeing(
    folder: SnapshotFolder, snapshot: SnapshotId, manifest: Manifest | Flaw
) -> tuple[Manifest, Tokens]:
    """Return manifest and tokens if the size and the header of the slot file agree with the manifest.

    Raises UnfitError if not.
    """
    if isinstance(manifest, Flaw):
        raise UnfitError(f"its manifest cannot be used: {manifest}")
    with folder.open(snapshot) as file:
        size = size_of(file)
        if size != manifest.size:
            raise UnfitError(f"{size} bytes, not {manifest.size}")
        found = read(file, size)
    if isinstance(found, Damage):
        raise UnfitError(found.text)
    tokens = tokens_with_images(found, manifest.chunks)
    if tokens is None or not manifest.fits(tokens):
        raise UnfitError("its tokens are not those that were kept")
    cuts = tuple(record.at for record in found.records)
    if (found.version, found.layout, cuts) != (manifest.version, manifest.layout, manifest.checkpoints):
        raise UnfitError("its structure is not the one that was kept")
    return manifest, tokens

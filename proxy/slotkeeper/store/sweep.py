"""What lies in a folder when a sidecar starts: usable snapshots, and what a kill or a fault left behind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from slotkeeper.engine.slotfile import Damage, read
from slotkeeper.scheduler.snapshots import SnapshotId
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.store import files, names
from slotkeeper.store.manifest import Flaw, Manifest
from slotkeeper.store.snapshot_folder import SnapshotFolder
from slotkeeper.store.trouble import UnfitError


@dataclass(slots=True)
class Swept:
    """What was found in one folder. `notes` are sentences for the log."""

    found: dict[SnapshotId, tuple[Manifest, Tokens]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def sweep(folder: SnapshotFolder, spare: Collection[str] = ()) -> Swept:
    """Read every snapshot's manifest and header, and take away what can never be used.

    1. Temporary files, but for those in `spare`: the engine may be writing them.
    2. A file without a manifest, a manifest without a file: something ended while they were made or dropped.
    3. What does not agree with its manifest goes to quarantine. Only `offer` reads all its bytes.
    4. What a later release wrote stays as it is.

    Files with other names are not touched. OSError passes.
    """
    swept = Swept()
    there: dict[SnapshotId, set[str]] = {}
    for path in list(folder.path.iterdir()):
        if names.is_temporary(path.name):
            if path.name not in spare:  # (1)
                files.remove(path)
        elif known := names.ours(path.name):
            there.setdefault(known[0], set()).add(known[1])
    for snapshot, suffixes in sorted(there.items()):
        if len(suffixes) == 2:
            _judge(folder, snapshot, swept)
        else:  # (2)
            folder.drop(snapshot)
            swept.notes.append(f"{snapshot}: unfinished, removed")
    folder.take_over(manifest for manifest, _ in swept.found.values())
    return swept


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
    """Manifest and tokens, if all that can be read quickly of the slot file is as the manifest says."""
    if isinstance(manifest, Flaw):
        raise UnfitError(f"its manifest cannot be used: {manifest}")
    with folder.open(snapshot) as file:
        size = files.stamp(file).size
        if size != manifest.size:
            raise UnfitError(f"{size} bytes, not {manifest.size}")
        found = read(file, size)
    if isinstance(found, Damage):
        raise UnfitError(found.text)
    if not manifest.fits(found.tokens):
        raise UnfitError("its tokens are not those that were kept")
    cuts = tuple(record.at for record in found.records)
    if (found.version, found.layout, cuts) != (manifest.version, manifest.layout, manifest.checkpoints):
        raise UnfitError("its structure is not the one that was kept")
    return manifest, found.tokens

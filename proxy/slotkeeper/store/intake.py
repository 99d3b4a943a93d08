"""Turns a file that an engine has just saved into a snapshot, and copies snapshots between folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from slotkeeper.engine.slotfile import ByteSpan, Damage, Recipe, SlotFile, read, tokens_with_images
from slotkeeper.scheduler.policies.adapters import namespace_in, set_in
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store import files
from slotkeeper.store.files import Halt, Passed, Stamp
from slotkeeper.store.folders.joined import size_of
from slotkeeper.store.folders.snapshot_folder import OF_ONE_FILE, SnapshotFolder
from slotkeeper.store.manifest import Manifest, chain
from slotkeeper.store.trouble import StoreError, TornError, Trouble, UnfitError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFileEdit:
    """How the kept file differs from the file that the engine saved."""

    recipe: Recipe
    repaired: bool = False  # the window's cell table was repaired (T4)


# Takes the saved file and its parsed form; None: keep the file unchanged. It runs in a thread; `keep` raises
# what it raises.
Editor = Callable[[FileIO, SlotFile], SlotFileEdit | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """What the caller knows of a state that the engine has just saved."""

    fingerprint: str
    tokens: Tokens  # what the slot should hold; the file may hold fewer or more, but no other ones
    written: int  # the engine's n_written, in bytes
    layout: str = ""  # the layout of this engine's files (slotfile.SlotFile), if known
    golden: bool = False
    build: str = ""
    edit: Editor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A snapshot that was just made: its manifest and its tokens."""

    manifest: Manifest
    tokens: Tokens  # from the file's header, which the engine will trust


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotIntake:
    """Makes one saved state a snapshot in `folder`."""

    folder: SnapshotFolder
    saved: SavedFile
    now: float  # wall clock, seconds
    halt: Halt

    def take(self, temporary: str) -> CheckedFile:
        """Check the saved file, edit it, hash it and move it into the folder (T2, T3).

        The temporary file is always removed. Raises TornError, HaltedError, and StoreError if there is no
        such file; OSError passes.
        """
        path, saved = self.folder.path / temporary, self.saved
        try:
            with _opened(path) as file:
                before = _dated(file)
                if before.size != saved.written:
                    raise TornError(f"the engine wrote {saved.written} bytes, the file has {before.size}")
                found = _whole(file, before)
                _agree(found, saved)
                edit = saved.edit(file, found) if saved.edit else None
                if edit:  # then the snapshot describes what the file really holds now
                    passed = files.edit(file, edit.recipe, self.halt)
                    before = _dated(file)
                    found = _whole(file, before)
                else:
                    passed = files.hash_bytes(file, self.halt)
                files.sync_file(file)
            return self._admit(path, found, before, passed, repaired=edit is not None and edit.repaired)
        except EOFError as error:
            raise TornError(f"the engine's file became shorter: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    def _admit(
        self, path: Path, found: SlotFile, before: Stamp, passed: Passed, *, repaired: bool
    ) -> CheckedFile:
        tokens = _held(found, self.saved)
        manifest = Manifest(
            id=files.new_id(self.now),
            fingerprint=self.saved.fingerprint,
            version=found.version,
            layout=found.layout,
            tokens=len(tokens),
            chain=chain(tokens),
            checkpoints=tuple(record.at for record in found.records),
            draft=any(record.draft for record in found.records),
            repaired=repaired,
            golden=self.saved.golden,
            size=passed.size,
            sha256=passed.sha256,
            created=self.now,
            build=self.saved.build,
            namespace=namespace_in(self.saved.tokens.space),
            adapters=set_in(self.saved.tokens.space),
            images=tuple((c.start, c.length, c.digest.hex()) for c in tokens.chunks),
        )
        self.folder.admit(path, manifest, before)
        return CheckedFile(manifest=manifest, tokens=tokens)


def transfer(
    source: SnapshotFolder, target: SnapshotFolder, manifest: Manifest, now: float, halt: Halt
) -> None:
    """Copy a snapshot to another folder, and check the hash of the copied bytes.

    Raises UnfitError if the source is not what was kept or cannot be read, MissingError, and StoreError if
    there is no room; OSError passes.
    """
    target.demand(manifest.size)
    path = target.path / files.new_temporary(now)
    try:
        with copying(source, manifest, halt), source.open(manifest.id) as file:
            passed = files.pour((ByteSpan(0, manifest.size),), file, path, halt)
            if passed.sha256 != manifest.sha256 or size_of(file) != manifest.size:
                raise UnfitError(f"{manifest.id} was changed after it was kept")
            place(target, path, manifest)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def copying(source: SnapshotFolder, manifest: Manifest, halt: Halt) -> Iterator[None]:
    """Turn the errors of a copy that the source has caused into UnfitError."""
    try:
        yield
    except EOFError as error:
        raise UnfitError(f"{manifest.id} is too short: {error}") from error
    except OSError as error:
        if error.errno in OF_ONE_FILE:  # of the source, or of the copy?
            source.check(manifest, halt, reread=True)
        raise


def place(folder: SnapshotFolder, path: Path, manifest: Manifest) -> None:
    """Give a new, verified file the name of its snapshot. The caller removes it after an error."""
    with files.open_ours(path) as file:
        before = _dated(file)
    folder.admit(path, manifest, before)


def _opened(path: Path) -> FileIO:
    try:
        return files.open_ours(path, edit=True)
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise
        what = f"The engine said that it saved, but nothing appeared in {path.parent}"
        raise StoreError(Trouble.NOT_SHARED, what) from error


def _dated(file: FileIO) -> Stamp:
    files.settle(file)
    return files.stamp(file)


def _whole(file: FileIO, stamp: Stamp) -> SlotFile:
    found = read(file, stamp.size)
    if isinstance(found, Damage):
        raise TornError(f"the engine's file is damaged: {found.text}")
    return found


def _held(found: SlotFile, saved: SavedFile) -> Tokens:
    """Return what the file holds. Raises TornError if its images are not those of the slot."""
    held = tokens_with_images(found, saved.tokens.chunks)
    if held is None:
        raise TornError("the engine's file holds other images")
    return held


def _agree(found: SlotFile, saved: SavedFile) -> None:
    """Check that the file holds the expected tokens, in the expected layout. Raises TornError.

    Our model of a slot may be a token or a reply behind or ahead, but one must be the beginning of the other.
    """
    held, expected = _held(found, saved), saved.tokens
    common = held.within(expected.space).lcp(expected)
    if not common or common < min(len(held), len(expected)):
        what = f"{len(held)} tokens, of which {common} are those of the {len(expected)} expected"
        raise TornError(f"the engine's file holds something else: {what}")
    if saved.layout and found.layout != saved.layout:  # a file cut off between two memories looks whole
        raise TornError("the engine's file is not laid out as its others: a part is missing")

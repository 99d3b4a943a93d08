"""What the doctor says about slot files: do snapshots work, what is in them, how large are they."""

from __future__ import annotations

from collections.abc import Iterator

from slotkeeper.engine.doctor import Finding, Severity
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.traits import Reading
from slotkeeper.scheduler.traits import EngineTraits, Memory


def about_files(reading: Reading, flags: EngineFlags | None) -> Iterator[Finding]:
    """For a reading with a folder."""
    if reading.no_files is not None:
        yield Finding(
            trap="snapshots", severity=Severity.FAIL, what=reading.no_files.what, do=reading.no_files.do
        )
        return
    traits = reading.traits
    what = f"Snapshots work: files of version {traits.state_version}, fingerprint {traits.fingerprint}."
    yield Finding(trap="snapshots", severity=Severity.OK, what=what)
    yield from about_checkpoints_in_files(traits)
    yield from about_the_window(traits)
    if flags is None:
        yield about_unseen_flags(reading.voice)


def about_unseen_flags(voice: str) -> Finding:
    what = (
        "Started by others: its --rope-*, --yarn-*, --override-kv and control vectors cannot be seen, and it"
    )
    what += " takes files that were made with others without a word."
    if voice:
        what += f" It is told apart by what it says (voice {voice})."
        return Finding(trap="fingerprint", severity=Severity.NOTE, what=what)
    do = "Name another --slot-dir whenever you change one of these."
    return Finding(trap="fingerprint", severity=Severity.NOTE, what=what, do=do)


def about_checkpoints_in_files(traits: EngineTraits) -> Iterator[Finding]:
    if traits.cuttable:
        return
    if traits.files_carry:
        what = "Slot files carry the checkpoints: a restored slot can be cut where the live one could."
        yield Finding(trap="files", severity=Severity.OK, what=what)
    elif traits.files_carry is None:
        what = (
            "Whether slot files carry checkpoints is not known: a slot was in use. The first save will tell."
        )
        yield Finding(trap="files", severity=Severity.NOTE, what=what)
    elif traits.checkpoint_cap == 0 or traits.state_version > 2:
        what = "Slot files carry no checkpoints, though this version of them could."
        do = "Remove --ctx-checkpoints 0, if it is given."
        yield Finding(trap="files", severity=Severity.NOTE, what=what, do=do)
    else:
        what = "Slot files carry no checkpoints: a restored state can be extended, but not cut."
        do = "A newer llama-server (b11549 does it) keeps them in the file."
        yield Finding(trap="files", severity=Severity.NOTE, what=what, do=do)


def about_the_window(traits: EngineTraits) -> Iterator[Finding]:
    if traits.memory is Memory.SWA and not traits.swa_full and traits.n_swa and not traits.files_carry:
        what = "Restored as it is, such a file is good for nothing (T4); Slotkeeper can mend its window."
        yield Finding(trap="T4", severity=Severity.NOTE, what=what)

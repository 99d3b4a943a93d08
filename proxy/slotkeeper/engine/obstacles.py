"""Why there are no slot files to work with, and what to do: one sentence each, for the log and the doctor."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Why(StrEnum):
    OFF = "off"
    NO_FOLDER = "no_folder"
    NOT_SHARED = "not_shared"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"
    REFUSED = "refused"
    CUT = "cut"
    BUSY = "busy"
    UNCERTAIN = "uncertain"


# What is so, and what to do.
SAID: Final[Mapping[Why, tuple[str, str]]] = {
    Why.OFF: (
        "The engine saves no slots.",
        "Add --slot-save-path, with the folder that Slotkeeper is given.",
    ),
    Why.NO_FOLDER: ("The folder is not there.", "Make it, or mount what should be there."),
    Why.NOT_SHARED: (
        "What the engine saves does not appear in the folder.",
        "Its --slot-save-path and our --slot-dir must be the same folder of the same disk.",
    ),
    Why.UNREADABLE: (
        "What the engine saves cannot be read or removed here.",
        "Run both as one user, who owns the folder.",
    ),
    Why.CUT: ("Less lies in the folder than the engine says it has written.", "Make room there."),
    Why.UNKNOWN: ("Its slot files are of a kind that Slotkeeper does not know.", "Use another build."),
    Why.REFUSED: (
        "The engine could not save a slot.",
        "Look for room in the folder, and into the engine's log.",
    ),
    Why.UNCERTAIN: (
        "The engine does not list its LoRA adapters, so what would fit it is not known.",
        "Use another build.",
    ),
    Why.BUSY: ("No slot became idle, so none could be saved.", "Try again when there is less to do."),
}


class NoFilesError(Exception):
    """No snapshots with this engine. The text says why and what to do."""

    def __init__(self, why: Why, detail: str = "") -> None:
        what, self.do = SAID[why]
        self.what = f"{what.removesuffix('.')} ({detail})." if detail else what
        super().__init__(f"{self.what} {self.do}")
        self.why = why

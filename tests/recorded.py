"""Recorded sessions of real agents, if they are stored beside this checkout.

They are other people's prompts and never part of this repository; without them their tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "traces"


def sessions() -> list[Path]:
    return sorted(FOLDER.glob("*/*.jsonl.xz"))


def name(path: Path) -> str:
    """Return CLIENT/SESSION."""
    return f"{path.parent.name}/{path.name.partition('.')[0]}"


needed = pytest.mark.skipif(not sessions(), reason="the recorded sessions are not beside this checkout")

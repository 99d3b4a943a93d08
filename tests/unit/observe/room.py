"""A folder for recordings, for the tests of recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multidict import CIMultiDict

from slotkeeper.bench.replay import Entry, read
from slotkeeper.observe.recording import Recorder

BUDGET = 1 << 20
BODY = b'{"messages":[{"role":"user","content":"hi"}]}'


class Room:
    """A folder for recordings, and the errors that occurred there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[BaseException] = []

    def recorder(self, budget: int = BUDGET) -> Recorder:
        return Recorder(self.folder, budget, self.failed.append)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("requests-*.jsonl"))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def entries(self) -> list[Entry]:
        return [entry for path in self.files if path.stat().st_size for entry in read(path).entries]


def write(recorder: Recorder, body: bytes = BODY, **more: Any) -> None:
    what: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "headers": CIMultiDict({"User-Agent": "pi/0.73 (linux)"}),
        "client": "d1ge57",
        "session": "s",
        "at": 12.5,
    }
    recorder.write(**(what | more), body=body)


async def recorded(room: Room, body: bytes = BODY, **more: Any) -> Entry:
    recorder = room.recorder()
    write(recorder, body, **more)
    await recorder.close()
    assert room.failed == []
    return room.entries[-1]

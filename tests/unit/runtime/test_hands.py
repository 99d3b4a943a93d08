"""Steps with files: each has its answer, whatever breaks on the way."""

from __future__ import annotations

import pytest

from slotkeeper.core.effects import Erase, Moment, Restore, Save
from slotkeeper.core.events import Erased, Event, Loading, Restored, Saved
from slotkeeper.core.snapshots import Snapshot, SnapshotId
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.types import Place, RequestId, SlotId
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.hands import Hands
from slotkeeper.runtime.tasks import Tasks
from unit.runtime.stubs import ENGINE, StubLink

OWNER, PLACE = RequestId("r"), Place(ENGINE, SlotId(0))
FILE = Snapshot(id=SnapshotId("s"), fingerprint="f", tokens=Tokens(range(300)), size=1)


class Broken:
    """Snapshots with a bug in every step."""

    async def save(self, *_: object) -> Event:
        raise KeyError("n_saved")

    restore = erase = save


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        (Save(request=OWNER, place=PLACE, moment=Moment.PARK, tokens=FILE.tokens, size=1), Saved),
        (Restore(request=OWNER, place=PLACE, snapshot=FILE), Restored),
        (Erase(request=OWNER, place=PLACE), Erased),
    ],
)
async def test_a_bug_of_ours_keeps_nobody_waiting(step, answer):
    said: list[Event] = []
    tasks, metrics = Tasks(said.append), Metrics()
    hands = Hands({ENGINE: StubLink()}, metrics, tasks, said.append, Broken(), lost=lambda _: None)
    await hands._tend(step)
    (event,) = said
    assert isinstance(event, answer)
    assert event.request == OWNER
    assert not getattr(event, "ok", False)
    assert getattr(event, "snapshot", None) is None
    assert getattr(event, "outcome", Loading.LOST) is Loading.LOST
    assert metrics.registry.get_sample_value("slotkeeper_fallbacks_total", {"reason": "files"}) == 1

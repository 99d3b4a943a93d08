"""After a refused restore a few tokens must be computed as in an empty slot; else the engine is unsound."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.engine.answers import EngineError, EngineGoneError, PrefillResult, RestoreResult
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.slot_files import CANARY, Snapshots
from slotkeeper.scheduler.effects import Restore
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import Snapshot, SnapshotId
from slotkeeper.scheduler.types import Loading, Place, RequestId, SlotId
from unit.runtime.stubs import ENGINE, StubLink

SIZE = len(CANARY)


class Refusing:
    """An engine that refuses every file; the test sets what it computes afterwards."""

    def __init__(self, then: PrefillResult | Exception, said: RestoreResult | Exception) -> None:
        self.then, self.said, self.done = then, said, list[str]()

    async def restore(self, *_: Any, **__: Any) -> RestoreResult:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    async def erase(self, *_: Any, **__: Any) -> int:
        self.done.append("erase")
        return 0

    async def prefill(self, *_: Any, **__: Any) -> PrefillResult:
        self.done.append("prefill")
        if isinstance(self.then, Exception):
            raise self.then
        return self.then


class Offering:
    shared = False

    async def offer(self, *_: Any, **__: Any) -> str:
        return "file"


def computes(computed: int, cached: int = 0, held: int = SIZE) -> PrefillResult:
    return PrefillResult(computed=computed, cached=cached, held=held, slot=SlotId(0))


@pytest.mark.parametrize(
    "answer_to_restore",
    [EngineError(400, "no"), RestoreResult(tokens=7, read=1, seconds=0.0)],
    ids=["refused", "otherwise"],
)
@pytest.mark.parametrize(
    ("answer_to_canary", "outcome", "unsound"),
    [
        (computes(SIZE), Loading.REFUSED, False),
        (computes(1, cached=SIZE - 1), Loading.LOST, True),
        (computes(SIZE, held=900), Loading.LOST, True),
        (EngineError(500, "cannot decode"), Loading.LOST, True),
        (EngineGoneError("it has died of it"), Loading.LOST, False),
    ],
)
async def test_the_canary_decides_whether_the_engine_is_sound_after_a_refused_restore(
    answer_to_restore, answer_to_canary, outcome, unsound
):
    link, metrics, replaced = StubLink(), Metrics(), list[str]()
    client: Any = Refusing(answer_to_canary, answer_to_restore)
    store: Any = Offering()
    link.client, link.replace = client, lambda: replaced.append("replaced")
    snapshot = Snapshot(id=SnapshotId("s"), fingerprint="", tokens=Tokens([1, 2]), size=1)
    restore = Restore(request=RequestId("r"), place=Place(ENGINE, SlotId(0)), snapshot=snapshot)
    ended = await Snapshots(store, metrics, lambda _: None).restore(link, restore)
    assert ended.outcome is outcome
    value = metrics.registry.get_sample_value
    assert value("slotkeeper_poisoned_slots_total", {"reason": "unsound"}) == unsound
    assert replaced == ["replaced"] * unsound
    assert client.done[:2] == ["erase", "prefill"]

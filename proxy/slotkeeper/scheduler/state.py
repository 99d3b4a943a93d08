"""Everything the core remembers. Changed only by `arrivals` and `outcomes`, through `Placement.on`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slotkeeper.scheduler.ahead import Ahead
from slotkeeper.scheduler.catalog import Catalog
from slotkeeper.scheduler.chore import Chore
from slotkeeper.scheduler.limits import HourlyBudget, Limits
from slotkeeper.scheduler.pending import Pending, Scene
from slotkeeper.scheduler.queue import FairQueue
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.table import EngineTable
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.traits import EngineTraits
from slotkeeper.scheduler.tree import PromptTree
from slotkeeper.scheduler.types import EngineId, RequestId, SlotId


@dataclass(slots=True)
class State:
    engines: tuple[EngineId, ...]  # in the order in which they were named
    tree: PromptTree = field(default_factory=PromptTree)
    catalog: Catalog = field(default_factory=Catalog)
    tables: dict[EngineId, EngineTable] = field(default_factory=dict)
    requests: dict[RequestId, Pending] = field(default_factory=dict)
    queue: FairQueue = field(default_factory=FairQueue)
    bypassing: list[RequestId] = field(default_factory=list)  # waiting for pinned tasks to have begun
    steered: list[RequestId] = field(default_factory=list)  # prompt in place, request not yet sent
    limits: Limits = field(default_factory=Limits)
    writes: HourlyBudget = field(init=False)  # bytes
    idle: HourlyBudget = field(init=False)  # tokens
    coming: dict[RequestId, SlotContents] = field(default_factory=dict)  # written, and not yet in the catalog
    ahead: Ahead = field(default_factory=Ahead)
    chores: dict[RequestId, Chore] = field(default_factory=dict)
    chores_begun: int = 0
    begun: int = 0  # requests that were taken from the queue
    wakes_at: float | None = None  # when a `Wake` that is out will be answered
    closing: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        self.writes = HourlyBudget(limits.hourly_bytes, left=limits.hourly_bytes, at=0.0)
        self.idle = HourlyBudget(limits.idle_tokens, left=limits.idle_tokens, at=0.0)

    @property
    def up(self) -> list[EngineTable]:
        return [table for table in self.tables.values() if table.up]

    def back_by(self, now: float) -> float | None:
        """Until when to wait for an engine, since none is there; None where none is expected."""
        until = max((table.back_by for table in self.tables.values()), default=now)
        return until if until > now and not self.up else None

    @property
    def waiting(self) -> bool:
        return bool(len(self.queue) or self.bypassing or self.steered)

    def scene(self, now: float) -> Scene:
        """While it stays the same, queued requests stay queued: a long queue is not decided again."""
        return tuple(
            (
                table.moves,
                table.open_for_pins(now),
                table.open_for_unpinned(now),
                table.open_for_anything(now),
                table.overdue(now),
            )
            for table in self.up
        )

    def slot_of(self, pending: Pending) -> tuple[EngineTable, SlotId] | None:
        """The slot that a request still owns; None when it has none, or the engine was restarted."""
        if pending.plan is None or pending.slot is None:
            return None
        table = pending.plan.table
        owned = pending.slot < len(table.owners) and table.owners[pending.slot] == pending.arrived.request
        return (table, pending.slot) if owned else None


def user_starts(prompt: Tokens | None, traits: EngineTraits) -> Sequence[int]:
    """Where user messages begin, in tokens: the engine likes to make checkpoints there."""
    if prompt is None:
        return ()
    return sorted({at for opener in traits.user_start for at in prompt.find_all(Tokens(opener))})

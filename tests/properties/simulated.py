"""A stock engine as far as placement can tell: slots, a deferred queue, releases that come late.

What it mirrors: `get_available_slot` (engine.md 1.2, T1, T8), the deferred queue (6), tasks that outlive
their client (7), GET /slots (1.7). It notes every pinned task that met a busy slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slotkeeper.core.observed import SlotView
from slotkeeper.core.tokens import EMPTY, Tokens
from slotkeeper.core.types import SlotId


@dataclass(eq=False)
class Task:
    owner: str | None  # request id; None: somebody else's
    prompt: Tokens
    wanted: int | None = None  # id_slot
    generate: int = 1
    plant: bool = False
    copies: int = 1
    left: bool = False  # its client is gone
    number: int = 0
    cached: int = 0


@dataclass
class Slot:
    tokens: Tokens = EMPTY
    task: Task | None = None
    last: int | None = None  # number of the last task
    age: int = 0


@dataclass
class SimulatedEngine:
    n: int
    slots: list[Slot] = field(default_factory=list)
    deferred: list[Task] = field(default_factory=list)
    collisions: list[tuple[Task, Task]] = field(default_factory=list)  # (newcomer, who was there)
    tasks: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.slots = [Slot() for _ in range(self.n)]
        self.deferred.clear()

    def submit(self, task: Task) -> None:
        self.tasks += 1
        task.number = self.tasks
        if not self._launch(task):
            self.deferred.append(task)

    def end(self, slot: int, *, evaluated: int | None = None) -> Task:
        """The task in a slot is over; `evaluated` tokens, if it was cut short."""
        here = self.slots[slot]
        task = here.task
        assert task is not None
        here.task = None
        if evaluated is None:
            here.tokens = task.prompt + Tokens([9_000_000 + task.number] * (task.generate - 1))
        else:
            here.tokens = task.prompt.cut(0, evaluated)
        self._pop(slot)
        return task

    def running(self) -> list[tuple[int, Task]]:
        return [(n, slot.task) for n, slot in enumerate(self.slots) if slot.task]

    def views(self) -> tuple[SlotView, ...]:
        return tuple(
            SlotView(
                slot=SlotId(n),
                busy=slot.task is not None,
                task=slot.last,
                held=len(slot.tokens) if slot.last is not None else None,
            )
            for n, slot in enumerate(self.slots)
        )

    def _launch(self, task: Task) -> bool:
        slot = self._choose(task)
        if slot is None:
            return False
        here = self.slots[slot]
        task.cached = min(here.tokens.lcp(task.prompt), len(task.prompt) - 1)
        here.task, here.last = task, task.number
        here.age = self.tasks
        return True

    def _choose(self, task: Task) -> int | None:
        if task.wanted is not None:
            slot = task.wanted % self.n
            if occupant := self.slots[slot].task:
                self.collisions.append((task, occupant))
                return None
            return slot
        idle = [n for n, slot in enumerate(self.slots) if slot.task is None]
        if not idle:
            return None

        def similar(n: int) -> float:
            return self.slots[n].tokens.lcp(task.prompt) / max(1, len(task.prompt))

        best = max(idle, key=lambda n: (similar(n), -n))
        return best if similar(best) > 0.1 else min(idle, key=lambda n: (self.slots[n].age, n))

    def _pop(self, slot: int) -> None:
        """One deferred task: the first that wants this slot, else the front; it may go to the back."""
        waiting = [task for task in self.deferred if task.wanted is not None and task.wanted % self.n == slot]
        task = waiting[0] if waiting else (self.deferred[0] if self.deferred else None)
        if task:
            self.deferred.remove(task)
            before = len(self.collisions)
            if not self._launch(task):
                del self.collisions[before:]  # it waits again: it met the same task before
                self.deferred.append(task)

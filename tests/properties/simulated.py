"""A stock engine as placement sees it: slots, a deferred queue, and slots that are released late.

It mirrors `get_available_slot` (engine.md 1.2, T1, T8), the deferred queue, copies of n > 1 and several
prompts in one body (6), tasks that outlive their client (7), GET /slots (1.7). It records every pinned task
that came to a busy slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens
from slotkeeper.scheduler.types import SlotId, SlotView


@dataclass(eq=False)
class Task:
    owner: str | None  # request id; None: of another program
    prompt: Tokens
    wanted: int | None = None  # id_slot
    generate: int = 1
    plant: bool = False
    copies: int = 1
    prompts: int = 1  # prompts in one body: each is its own task
    parent: Task | None = None  # of a copy or a further prompt: the task that answers for it
    left: bool = False  # whether its client has disconnected
    number: int = 0
    cached: int = 0
    slot: int | None = None  # the slot where it began
    space: str = ""  # its namespace
    uncached: bool = False
    at_work: int = 0  # of a parent: the number of its unfinished tasks, itself included

    @property
    def whole(self) -> Task:
        """The task that answers the client: of a copy or a further prompt the parent, else itself."""
        return self.parent or self


@dataclass
class Slot:
    tokens: Tokens = EMPTY
    space: str = ""  # the namespace of the tokens
    task: Task | None = None
    last: int | None = None  # number of the last task
    age: int = 0


@dataclass
class SimulatedEngine:
    n: int
    slots: list[Slot] = field(default_factory=list)
    deferred: list[Task] = field(default_factory=list)
    collisions: list[tuple[Task, Task]] = field(default_factory=list)  # (newcomer, the task in the slot)
    mixed: list[Task] = field(default_factory=list)  # tasks that reused tokens of another namespace
    tasks: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.slots = [Slot() for _ in range(self.n)]
        self.deferred.clear()

    def submit(self, task: Task) -> None:
        task.at_work = task.copies + task.prompts - 1
        others = (
            Task(task.owner, task.prompt, parent=task, space=task.space, uncached=task.uncached)
            for _ in range(task.prompts - 1)
        )
        for more in [task, *others]:
            self.tasks += 1
            more.number = self.tasks
            if not self._launch(more):
                self.deferred.append(more)

    def end(self, slot: int, *, evaluated: int | None = None) -> Task:
        """End the task in a slot; `evaluated` tokens, if it was cut short."""
        here = self.slots[slot]
        task = here.task
        assert task is not None
        here.task, here.space = None, task.space
        task.whole.at_work -= 1
        if task.parent and task.parent.copies > 1:
            here.tokens = EMPTY  # copies are cleared (engine.md 6)
        elif evaluated is None:
            here.tokens = task.prompt + Tokens([9_000_000 + task.number] * (task.generate - 1))
        else:
            here.tokens = task.prompt.cut(0, evaluated)
        self._pop(slot)
        return task

    def cancel(self, task: Task, *, evaluated: int) -> None:
        """The engine has seen that a client disconnected: all copies end at once."""
        for slot, other in self.running():
            if other.whole is task.whole:
                self.end(slot, evaluated=evaluated)

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
        more = [n for n, other in enumerate(self.slots) if other.task is None and n != slot]
        if len(more) < task.copies - 1:
            return False  # all copies begin together, or none
        here = self.slots[slot]
        task.cached = 0 if task.uncached else min(here.tokens.lcp(task.prompt), len(task.prompt) - 1)
        if task.cached and here.space != task.space:
            self.mixed.append(task)
        self._occupy(slot, task)
        for n in more[: task.copies - 1]:
            self.tasks += 1
            self._occupy(n, Task(task.owner, task.prompt, parent=task, number=self.tasks, space=task.space))
        return True

    def _occupy(self, slot: int, task: Task) -> None:
        here = self.slots[slot]
        here.task, here.last, here.age, task.slot = task, task.number, self.tasks, slot

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
        """Launch a deferred task: the first that wants this slot, else the front of the queue.

        If it cannot begin, it goes to the back of the queue.
        """
        waiting = [task for task in self.deferred if task.wanted is not None and task.wanted % self.n == slot]
        task = waiting[0] if waiting else (self.deferred[0] if self.deferred else None)
        if task:
            self.deferred.remove(task)
            before = len(self.collisions)
            if not self._launch(task):
                del self.collisions[before:]  # it waits again, behind the same task as before
                self.deferred.append(task)

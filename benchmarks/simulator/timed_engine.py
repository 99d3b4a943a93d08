"""One engine of the simulator: slots as in llama-server, and the time that its work takes.

`EngineShadow` determines reuse: it is the model by which the scheduler predicts a real engine, and tests
compare it with real ones to the token (tests/engine/test_prediction.py). Time follows the engine's own loop
(engine.md 2.3, 3, 4):

* It works in batches. A batch has one token of each running answer and up to `n_batch` tokens of prompts,
  from the lowest slot on; it is cut where the engine cuts it. So answers stand still while a prompt is
  computed.
* Each ubatch of a batch is a pass through the model, which reads all weights, and each token takes a constant
  time and a time for each token of context before it.
* Between two batches it takes in new tasks, saves and restores, in their order. Files, copies to and from the
  RAM cache and checkpoints take their bytes' time, and nothing else runs then.
* A task that is stopped ends with its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from benchmarks.simulator.virtual_clock import VirtualClock
from slotkeeper.api.answers.answer import UBATCH_TOKENS
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    first_kept,
    prefilled,
    user_starts,
)
from slotkeeper.scheduler.slots.shadow import EngineShadow, ReusePlan, Source
from slotkeeper.scheduler.types import SlotId, SlotView

FINGERPRINT: Final = "simulated"
NO_SLOT: Final = SlotId(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """The speed of one engine. The defaults are those of a mid-sized model on one good card."""

    prefill: float = 1500.0  # tokens per second of one ubatch, at the beginning of a prompt
    decode: float = 40.0  # tokens per second of a single short answer
    deeper: float = 0.0  # seconds that each token takes for each token of context before it
    save: float = 1e9  # bytes per second
    restore: float = 2e9  # bytes per second
    file_seconds: float = 0.003  # of a save or restore, besides its bytes
    copy: float = 12e9  # bytes per second to and from the RAM cache and checkpoints
    network: float = 1.25e9  # bytes per second between a machine and the shared store: 10 Gbit/s
    token_bytes: int = 65536  # of each token's state
    checkpoint_bytes: int = 0  # of each checkpoint, and of the part of a state that does not grow

    @property
    def token_seconds(self) -> float:
        """The time of each token in a batch, besides the pass."""
        return max(0.0, (UBATCH_TOKENS / self.prefill - 1 / self.decode) / (UBATCH_TOKENS - 1))

    @property
    def pass_seconds(self) -> float:
        """The time of a pass through the model, whatever few tokens it computes."""
        return min(1 / self.decode, UBATCH_TOKENS / self.prefill) - self.token_seconds

    def state_bytes(self, tokens: int, checkpoints: int = 0) -> int:
        """Return the bytes of a state, in a file or in RAM."""
        return tokens * self.token_bytes + (1 + checkpoints) * self.checkpoint_bytes


def traits_of(
    memory: Memory, slots: int, rates: EngineRates, *, files: bool, ram_cache: bool = False
) -> EngineTraits:
    """Return the traits of a stock engine of the newest build."""
    return EngineTraits(
        n_slots=slots,
        memory=memory,
        eager_thinning=False,
        ram_cache=ram_cache,
        idle_copy=ram_cache,
        n_swa=1024 if memory is Memory.SWA else 0,
        user_start=((1,),),
        slot_files=files,
        state_version=4 if files else 0,
        files_carry=True if files else None,
        token_bytes=rates.token_bytes,
        checkpoint_bytes=rates.checkpoint_bytes,
        fingerprint=FINGERPRINT if files else "",
    )


@dataclass(slots=True, eq=False)
class Task:
    """A prompt and its answer in an engine; a prefill of ours has an empty one."""

    prompt: Tokens
    reply: Tokens
    wanted: SlotId | None  # None: the engine chooses
    prefills: Callable[[], None]  # called when the engine begins to compute its prompt
    began: Callable[[], None]  # called with the first token of the answer
    ended: Callable[[], None]
    hash_chain: tuple[bytes, ...] = ()
    slot: SlotId = NO_SLOT  # while it waits for a free slot
    cached: int = 0
    reached: int = 0  # tokens of the prompt that are in the slot
    made: int = 0  # tokens of the answer
    taken: float = 0.0  # when the engine began to compute its prompt
    first: float = 0.0  # time of its first token
    last: float = 0.0  # time of its last token
    stall: float = 0.0  # the longest time between two of its tokens
    stopped: bool = False  # a prefill of ours: it ends with its batch, and what it has computed stays
    cuts: list[int] = field(default_factory=list)  # where its batches end, the last first
    checkpoints: set[int] = field(default_factory=set)  # that it makes on its way

    @property
    def generate(self) -> int:
        """Tokens of the answer."""
        return len(self.reply)

    @property
    def left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return len(self.prompt) - self.reached

    @property
    def seconds(self) -> float:
        """The engine's own figure for the prompt."""
        return self.first - self.taken


@dataclass(slots=True, eq=False)
class _Action:
    """A save, a restore or an erasure, which stops the engine for its seconds."""

    seconds: Callable[[], float]  # called when the engine begins with it
    done: Callable[[], None]


@dataclass(slots=True)
class _Batch:
    """The batch that is being computed, or several equal ones in which only answers run."""

    begins: float
    each: float  # seconds
    count: int
    answers: tuple[Task, ...]
    prompts: tuple[tuple[Task, int], ...]  # and where their parts end

    @property
    def ends(self) -> float:
        return self.begins + self.each * self.count


class TimedEngine:
    def __init__(self, traits: EngineTraits, rates: EngineRates, clock: VirtualClock) -> None:
        self.traits, self.rates, self._clock = traits, rates, clock
        self.last: dict[SlotId, int] = {}
        self.tasks = 0
        self.computed = 0  # prompt tokens
        self._running: dict[SlotId, Task] = {}
        self._queue: list[Task | _Action] = []
        self._batch: _Batch | None = None
        self._working = False
        self._life = 0  # changes with each batch, so that what was planned for an earlier one is void
        self.shadow = self._empty()

    def _empty(self) -> EngineShadow:
        shadow = EngineShadow(self.traits)
        for checkpoints in (0, 8):  # the real sizes are no estimate
            shadow.sizes.saw(UBATCH_TOKENS, checkpoints, self.rates.state_bytes(UBATCH_TOKENS, checkpoints))
        return shadow

    def __repr__(self) -> str:
        return f"<TimedEngine {sorted(self._running)} busy, {len(self._queue)} queued>"

    @property
    def pending(self) -> int:
        """Prompt tokens of its tasks that are not computed yet."""
        queued = (task for task in self._queue if isinstance(task, Task))
        return sum(task.left for task in (*self._running.values(), *queued))

    @property
    def quiet(self) -> bool:
        return not self._working and not self._queue

    def run(
        self,
        prompt: Tokens,
        reply: Tokens,
        wanted: SlotId | None,
        *,
        ended: Callable[[], None],
        prefills: Callable[[], None] = lambda: None,
        began: Callable[[], None] = lambda: None,
        hash_chain: tuple[bytes, ...] = (),
    ) -> Task:
        """Run a prompt in the `wanted` slot, which must be free; None: in the slot of the engine's choice.

        A task without a free slot waits for one.
        """
        task = Task(prompt, reply, wanted, prefills, began, ended, hash_chain)
        self._queue.append(task)
        self._wake()
        return task

    def save(self, slot: SlotId, done: Callable[[int], None]) -> None:
        """Save a slot to a file; `done` gets its bytes."""
        size = 0

        def seconds() -> float:
            nonlocal size
            contents = self.shadow.slots[slot]
            size = self.rates.state_bytes(contents.total, len(contents.checkpoints)) if contents else 0
            return self.rates.file_seconds + size / self.rates.save

        self._act(seconds, lambda: done(size))

    def restore(self, slot: SlotId, snapshot: Snapshot, done: Callable[[], None]) -> None:
        def seconds() -> float:
            self.shadow.restore(slot, snapshot, self._clock.now)
            self.last.pop(slot, None)
            return self.rates.file_seconds + snapshot.size / self.rates.restore

        self._act(seconds, done)

    def erase(self, slot: SlotId, done: Callable[[], None]) -> None:
        def seconds() -> float:
            self.shadow.erase(slot)
            return self.rates.file_seconds

        self._act(seconds, done)

    def kill(self) -> None:
        """End the process: all states in memory are lost. The engine must be quiet."""
        if not self.quiet:
            raise AssertionError("a killed engine had work to do, which nobody would hear of")
        self.shadow = self._empty()
        self.last.clear()

    def best(self, prompt: Tokens) -> int:
        """Return the length of the longest prefix of a prompt in any slot."""
        slots = (contents for contents in self.shadow.slots if contents)
        return max((contents.tokens.lcp(prompt) for contents in slots), default=0)

    def views(self) -> tuple[SlotView, ...]:
        """Return the slots as GET /slots shows them."""
        found = []
        for number, contents in enumerate(self.shadow.slots):
            slot = SlotId(number)
            held = contents.total if contents and slot in self.last else None
            found.append(SlotView(slot=slot, busy=slot in self._running, task=self.last.get(slot), held=held))
        return tuple(found)

    # -- the loop ----------------------------------------------------------------------------------

    def _act(self, seconds: Callable[[], float], done: Callable[[], None]) -> None:
        self._queue.append(_Action(seconds, done))
        self._wake()

    def _wake(self) -> None:
        """Take in what was queued: at once, or when the batch ends that is being computed."""
        if not self._working:
            self._working = True
            self._clock.at(self._clock.now, self._turn)
            return
        batch = self._batch
        if batch is None or batch.count == 1:
            return
        begun = max(1, ceil((self._clock.now - batch.begins) / batch.each - 1e-9))
        if begun < batch.count:
            batch.count = begun
            self._schedule(batch)

    def _turn(self) -> None:
        """Take in the queue, then begin the next batch."""
        begins = self._clock.now + self._take_in()
        tasks = [self._running[slot] for slot in sorted(self._running)]
        answers = tuple(task for task in tasks if not task.left)
        room, prompts = self.traits.n_batch - len(answers), []
        for task in tasks:
            if task.left and room > 0:
                end = min(task.cuts[-1], task.reached + room)
                room -= end - task.reached
                prompts.append((task, end))
        if answers or prompts:
            count = 1 if prompts else min(task.generate - task.made for task in answers)
            each = self._batch_seconds(answers, prompts)
            self._schedule(_Batch(begins, each, count, answers, tuple(prompts)))
        elif begins > self._clock.now:
            self._clock.at(begins, self._turn)
        else:
            self._working = False

    def _batch_seconds(self, answers: tuple[Task, ...], prompts: list[tuple[Task, int]]) -> float:
        rates, tokens = self.rates, len(answers) + sum(end - task.reached for task, end in prompts)
        context: float = sum(len(task.prompt) + task.made for task in answers)
        context += sum((task.reached + end) / 2 * (end - task.reached) for task, end in prompts)
        seconds = ceil(tokens / self.traits.n_ubatch) * rates.pass_seconds
        seconds += tokens * rates.token_seconds + context * rates.deeper
        made = sum(1 for task, _ in prompts if task.reached in task.checkpoints)
        return seconds + made * rates.checkpoint_bytes / rates.copy

    def _schedule(self, batch: _Batch) -> None:
        self._batch = batch
        self._life += 1
        life = self._life
        self._clock.at(batch.ends, lambda: self._computed(batch) if life == self._life else None)

    def _computed(self, batch: _Batch) -> None:
        """Take in a batch that has been computed."""
        now, self._batch = self._clock.now, None
        for task in batch.answers:
            gap = now - batch.each * (batch.count - 1) - task.last
            task.stall = max(task.stall, gap, batch.each if batch.count > 1 else 0.0)
            task.made, task.last = task.made + batch.count, now
        ended = [task for task in batch.answers if task.made >= task.generate]
        for task, end in batch.prompts:
            task.reached = end
            if end >= task.cuts[-1]:
                task.cuts.pop()
            if not task.left:
                task.first = task.last = now
                task.made = min(1, task.generate)
                if task.generate:
                    task.began()
            if task.stopped or (not task.left and task.generate <= 1):
                ended.append(task)
        for task in ended:
            self._end(task)
        self._turn()

    def _take_in(self) -> float:
        """Begin what is queued, as far as slots are free; return the seconds that it stops the engine."""
        seconds, waiting = 0.0, list[Task | _Action]()
        queue, self._queue = self._queue, waiting
        for queued in queue:
            if isinstance(queued, _Action):
                seconds += queued.seconds()
                self._clock.at(self._clock.now + seconds, queued.done)
            elif (plan := self._plan(queued)) is None:
                waiting.append(queued)
            else:
                seconds += self._launch(queued, plan, self._clock.now + seconds)
        return seconds

    def _idle(self) -> list[SlotId]:
        return [slot for n in range(self.traits.n_slots) if (slot := SlotId(n)) not in self._running]

    def _plan(self, task: Task) -> ReusePlan | None:
        idle = self._idle()
        if task.wanted is None:
            return self.shadow.engine_choice(task.prompt, idle)
        if task.wanted not in idle:
            raise AssertionError(f"a task met a busy engine: slot {task.wanted} of {sorted(self._running)}")
        return self.shadow.plan_reuse(task.wanted, task.prompt)

    def _launch(self, task: Task, plan: ReusePlan, now: float) -> float:
        """Put a task into its slot; return the seconds of the copies that this takes."""
        shadow, rates, slot = self.shadow, self.rates, plan.slot
        beside = [
            s for n in range(self.traits.n_slots) if (s := SlotId(n)) not in self._running and s != slot
        ]
        before = list(shadow.ram)
        shadow.launch(plan, beside)
        copied = [entry for entry in shadow.ram if not any(entry is other for other in before)]
        size = sum(rates.state_bytes(entry.total, len(entry.checkpoints)) for entry in copied)
        if plan.source is Source.RAM and plan.base:  # its checkpoints are moved, not copied
            size += rates.state_bytes(plan.base.total)
        copying = size / rates.copy
        base = shadow.slots[slot]
        going_back = 0.0
        if base and 0 < plan.reuse < base.total and not self.traits.cuttable:
            going_back = rates.checkpoint_bytes / rates.copy  # to a checkpoint
        made, cuts = prefilled(
            base.checkpoints if base else (),
            reuse=plan.reuse,
            end=len(task.prompt),
            user_starts=user_starts(task.prompt, self.traits),
            task=-1,
            traits=self.traits,
            first=first_kept(base, plan.reuse, self.traits),
        )
        self.tasks += 1
        self._running[slot], self.last[slot] = task, self.tasks
        task.slot, task.cached, task.reached, task.taken = slot, plan.reuse, plan.reuse, now + copying
        self._clock.at(task.taken, task.prefills)
        task.cuts = list(reversed(cuts))
        task.checkpoints = {checkpoint.at for checkpoint in made if checkpoint.task == -1}
        return copying + going_back

    def _end(self, task: Task) -> None:
        """End a task; its slot then holds prompt and answer, without the last token of an answer."""
        del self._running[task.slot]
        self.computed += task.reached - task.cached
        contents = self._finished(task)
        if task.stopped and task.left:
            contents = replace(contents.shrunk(task.reached), hash_chain=())
        self.shadow.observed(task.slot, contents)
        task.ended()

    def _finished(self, task: Task) -> SlotContents:
        contents = self.shadow.finish(
            task.slot,
            prompt=task.prompt,
            prompt_tokens=len(task.prompt),
            cached=task.cached,
            generated=task.generate,
            user_starts=user_starts(task.prompt, self.traits),
            hash_chain=task.hash_chain,
            request=None,
            now=self._clock.now,
        )
        return contents.known_as(task.prompt + task.reply)

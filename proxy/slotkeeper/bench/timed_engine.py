"""One engine of the simulator: slots as in llama-server, and the time that its work takes.

`EngineShadow` determines reuse: it is the model by which the scheduler predicts a real engine, and tests
compare it with real ones to the token (tests/engine/test_prediction.py). Time is simpler than on a real
engine:

* Prompts are computed one after the other, at one rate. So are saves and restores: nothing else runs then.
* An answer takes its tokens at the rate of a single answer, slowed by a share for each other answer that runs
  when it begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from slotkeeper.scheduler.engine_model import EngineTraits, Memory, user_starts
from slotkeeper.scheduler.shadow import EngineShadow
from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import SlotId, SlotView

FINGERPRINT: Final = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """The speed of one engine. The defaults are those of a mid-sized model on one good card."""

    prefill: float = 1500.0  # tokens per second
    decode: float = 40.0  # tokens per second of a single answer
    crowding: float = 0.1  # share by which each other answer slows an answer
    save: float = 1e9  # bytes per second
    restore: float = 2e9  # bytes per second
    network: float = 1.25e9  # bytes per second between a machine and the shared store: 10 Gbit/s
    token_bytes: int = 65536  # of each token's state in a file


def traits_of(memory: Memory, slots: int, rates: EngineRates, *, files: bool) -> EngineTraits:
    """Return the traits of a stock engine of the newest build, but without its RAM cache."""
    return EngineTraits(
        n_slots=slots,
        memory=memory,
        eager_thinning=False,
        ram_cache=False,
        idle_copy=False,
        n_swa=1024 if memory is Memory.SWA else 0,
        user_start=((1,),),
        slot_files=files,
        state_version=4 if files else 0,
        files_carry=True if files else None,
        token_bytes=rates.token_bytes,
        fingerprint=FINGERPRINT if files else "",
    )


@dataclass(frozen=True, slots=True)
class Ran:
    """A task that began: the times of its first and last token, and its reuse."""

    slot: SlotId
    cached: int
    seconds: float  # of prefill
    first: float
    last: float


@dataclass(slots=True)
class TimedEngine:
    traits: EngineTraits
    rates: EngineRates
    shadow: EngineShadow = field(init=False)
    free_at: float = 0.0  # when its sequential work is done
    busy: dict[SlotId, int] = field(default_factory=dict)  # slot -> number of its running task
    last: dict[SlotId, int] = field(default_factory=dict)
    pending: int = 0  # prompt tokens of its tasks that are not computed yet
    tasks: int = 0

    def __post_init__(self) -> None:
        self.shadow = EngineShadow(self.traits)

    def task(self, prompt: Tokens, generate: int, wanted: int | None, now: float) -> Ran:
        """Run a prompt in the `wanted` slot, which must be free; None: in the slot of the engine's choice."""
        idle = [slot for n in range(self.traits.n_slots) if (slot := SlotId(n)) not in self.busy]
        choice = self.shadow.engine_choice(prompt, idle) if wanted is None else None
        if wanted is not None and SlotId(wanted) not in self.busy:
            choice = self.shadow.plan_reuse(SlotId(wanted), prompt)
        if choice is None:
            raise AssertionError(f"a task met a busy engine: slot {wanted} of {sorted(self.busy)}")
        beside = [slot for slot in idle if slot != choice.slot]
        self.shadow.launch(choice, beside)
        self.tasks += 1
        self.busy[choice.slot] = self.last[choice.slot] = self.tasks
        seconds = (len(prompt) - choice.reuse) / self.rates.prefill
        self.pending += len(prompt) - choice.reuse
        first = self.free_at = max(now, self.free_at) + seconds
        slowed = 1 + self.rates.crowding * (len(self.busy) - 1)
        return Ran(choice.slot, choice.reuse, seconds, first, first + generate * slowed / self.rates.decode)

    def computed(self, ran: Ran, prompt: Tokens) -> None:
        """Count a prompt as computed."""
        self.pending -= len(prompt) - ran.cached

    def end(
        self, ran: Ran, prompt: Tokens, reply: Tokens, *, hash_chain: tuple[bytes, ...], now: float
    ) -> SlotContents:
        """End a task; its slot then holds prompt and reply, without the last token of an answer."""
        del self.busy[ran.slot]
        contents = self.shadow.finish(
            ran.slot,
            prompt=prompt,
            prompt_tokens=len(prompt),
            cached=ran.cached,
            generated=len(reply),
            user_starts=user_starts(prompt, self.traits),
            hash_chain=hash_chain,
            request=None,
            now=now,
        )
        known = self.shadow.slots[ran.slot] = contents.known_as(prompt + reply)
        return known

    def file(self, size: int, rate: float, now: float) -> float:
        """Save or restore `size` bytes; return when that ends."""
        self.free_at = max(now, self.free_at) + size / rate
        return self.free_at

    def restore(self, slot: SlotId, snapshot: Snapshot, now: float) -> None:
        self.shadow.restore(slot, snapshot, now)
        self.last.pop(slot, None)

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
            found.append(SlotView(slot=slot, busy=slot in self.busy, task=self.last.get(slot), held=held))
        return tuple(found)

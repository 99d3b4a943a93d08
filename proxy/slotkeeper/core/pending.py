"""One request on its way through us, and what it cost in the end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slotkeeper.core.choice import Plan
from slotkeeper.core.effects import Report
from slotkeeper.core.events import Arrived, Finished
from slotkeeper.core.held import Held, reuse
from slotkeeper.core.losses import Answered, Lost, lost
from slotkeeper.core.planting import NO_STRUCTURE, Structure
from slotkeeper.core.steps import Step
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.tree import PromptTree
from slotkeeper.core.types import SlotId

Scene = tuple[tuple[int, bool, bool, bool], ...]  # all that decides who must wait: see `State.scene`


class Stage(StrEnum):
    QUEUED = "queued"  # in our line, its tokens known or not
    PREPARING = "preparing"  # steps are taken in its slot
    RUNNING = "running"
    ENDED = "ended"  # the answer is over; the report waits for the tokens


@dataclass(slots=True)
class Pending:
    arrived: Arrived
    stage: Stage = Stage.QUEUED
    prompt: Tokens | None = None
    rendered: bool = False  # whether the renderer has spoken, if only to say that it cannot
    plan: Plan | None = None
    slot: SlotId | None = None  # where it runs, once known
    base: Held | None = None  # what the slot held when it began
    predicted: int | None = None
    structure: Structure = NO_STRUCTURE
    planted: int = 0
    steps_left: int = 0
    waits_in: Scene | None = None  # in which it was decided that it must wait
    plain: bool = False  # no steps for it: one has failed, or they would be in vain
    finished: Finished | None = None

    @property
    def step(self) -> Step:
        """The step that is due."""
        if self.plan is None or not self.steps_left:
            raise AssertionError("only a planned request takes steps")
        return self.plan.steps[-self.steps_left]

    def predict(self) -> None:
        """Say what `cached` will be, once both the prompt and the slot's content are known."""
        if self.plan is None or (self.slot is None and self.plan.slot is None):
            return
        if self.prompt is not None and self.predicted is None:
            uncached, traits = self.arrived.uncached, self.plan.table.traits
            self.predicted = 0 if uncached else reuse(self.base, self.prompt, traits)

    def report(self) -> Report | None:
        """The account, from the engine's own figures; None while something is still missing."""
        done, plan = self.finished, self.plan
        if done is None or plan is None or not self.rendered:
            return None
        tokens, cached, oracle = done.prompt_tokens, done.cached, self._oracle(done)
        exact = None if self.prompt is None or tokens is None else len(self.prompt) == tokens
        return Report(
            request=self.arrived.request,
            reason=plan.reason,
            slot=self.slot,
            prompt_tokens=tokens,
            cached=cached,
            predicted=self.predicted,
            oracle=oracle,
            exact=exact,
            planted=self.planted,
            lost=self._lost(done, plan, oracle),
            saved_seconds=self._saved_seconds(done, plan),
        )

    def _oracle(self, done: Finished) -> int | None:
        """What a perfect cache would have computed: at least one token, and never more than was computed.

        What our own plants put there for this request was not known before it came.
        """
        tokens = done.prompt_tokens
        if tokens is None or self.prompt is None:
            return None
        return max(1, tokens - max(self.structure.known, (done.cached or 0) - self.planted))

    def _lost(self, done: Finished, plan: Plan, oracle: int | None) -> Lost | None:
        """What was planted for it was computed for it."""
        if oracle is None or done.cached is None or done.prompt_tokens is None or self.prompt is None:
            return None
        found, as_expected = self.structure, self.slot == plan.slot
        answered = Answered(
            reason=plan.reason,
            prompt=self.prompt,
            cached=max(0, done.cached - self.planted),
            predicted=None if self.predicted is None else max(0, self.predicted - self.planted),
            base=plan.look.base if plan.look and as_expected else self.base,
            known=found.known,
            restarted=found.known_at < plan.table.reset_at,
            uncached=self.arrived.uncached,
        )
        return lost(answered, done.prompt_tokens - done.cached + self.planted - oracle)

    def _saved_seconds(self, done: Finished, plan: Plan) -> float | None:
        if done.cached is None or done.prompt_tokens is None:
            return None
        rate = plan.table.rates.shown(done.prompt_tokens - done.cached, done.prefill_seconds)
        return done.cached / rate if rate else None

    def remember(self, tree: PromptTree, now: float) -> None:
        if self.prompt is not None:
            tree.add(self.prompt, now)

"""One request from arrival to report: as written and as changed by rules, its place, and its cost.

The two forms are the request as its client wrote it, and the same after the rules. The cheaper form is sent.
The price of a form is what the engine would have to compute for it now, at the place that it would get. On a
tie the client's own form is sent. A form with tools in another order must save at least as much as is moved:
the next agent may share this client's order, and would find it in the slot. A form to which the rules added
what the client had left out must leave room for an answer.

Only the methods of `Pending` and of its stages change what is known of a request; each says what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from slotkeeper.scheduler.effects import Erase, Prefill, Purpose, Report, Restore, Save, Step
from slotkeeper.scheduler.events import Arrived, Erased, Finished, Gone, Planted, Rendered, Restored, Saved
from slotkeeper.scheduler.policies.adapters import salted
from slotkeeper.scheduler.prompts.prompt_tree import Branch, PromptTree
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Markers, Tokens, in_replies
from slotkeeper.scheduler.requests.figures import Answered, Loss, Lost, Unknown, Usage, lost, oracle, usage_of
from slotkeeper.scheduler.slots.engine_model import SlotContents, reuse, user_starts
from slotkeeper.scheduler.slots.shadow import ReusePlan, Source
from slotkeeper.scheduler.slots.table import EngineTable, SlotState
from slotkeeper.scheduler.types import Loading, Priority, Reason, RequestId, SaidBy, SlotId

BYTES_PER_TOKEN: Final = 4  # of JSON schemas, approximately
SURPRISE: Final = 64  # tokens: a prediction of `cached` that is further off shows that the slots hold others


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a request: its messages as digests, and its tokens once they are known."""

    hash_chain: tuple[bytes, ...]
    prompt: Tokens | None = None
    boundaries: tuple[Boundary, ...] = ()

    def fits(self, most: int) -> bool:
        """Whether the form has at most this many tokens; 0: no limit."""
        return not most or (self.prompt is not None and len(self.prompt) <= most)

    def moved(self, space: str, before: str) -> Form:
        """Return the form in this space, in place of the one `before`."""
        chain = salted(self.hash_chain, space, before)
        return replace(self, hash_chain=chain, prompt=self.prompt and self.prompt.within(space))


@dataclass(frozen=True, slots=True)
class Weighed:
    """The decision between the two forms. Prices are in tokens, file times included; None: not priced."""

    own: float | None
    changed: float | None
    taken: bool  # whether the changed form is sent

    @classmethod
    def of(cls, own: float | None, changed: float | None, *, moved: int = 0, fits: bool = True) -> Weighed:
        """Decide for the cheaper form; for the client's own if a price is unknown.

        `moved`: bytes that the rules put elsewhere. `fits`: whether the engine has room for the changed form.
        """
        if own is None or changed is None:
            return cls(own, changed, taken=False)
        cheaper = changed < own and changed + moved // BYTES_PER_TOKEN <= own
        return cls(own, changed, taken=fits and cheaper)


# -- its place -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one request will be served."""

    table: EngineTable
    reason: Reason
    slot: SlotId | None = None  # expected; certain if the request is pinned
    pinned: bool = True
    reuse_plan: ReusePlan | None = None
    steps: tuple[Step, ...] = ()  # done in the slot before the request
    price: float = 0.0
    wait: bool = False  # the best place is not free yet
    seconds: float | None = None  # its price when compared with other engines; None: there are none
    until: float = 0.0  # expected seconds until the slot is free, if a request runs there
    beaten: tuple[Plan, ...] = ()  # the next best plans, cheapest first
    clears: bool = False  # it only empties the slot; then the request is placed again
    cleared: bool = False  # unpinned, and no other space's state can look as good to the engine

    @property
    def source(self) -> Source | None:
        """The source of what the plan reuses; None if it is unknown."""
        return self.reuse_plan.source if self.reuse_plan else None

    @property
    def found(self) -> SlotContents | None:
        """The state from which the request continues, as earlier work left it."""
        if self.reuse_plan:
            return self.reuse_plan.base
        return self.table.shadow.slots[self.slot] if self.slot is not None else None

    @property
    def clearing(self) -> bool:
        """Whether the plan requires that no other space's state looks as good to the engine."""
        return self.clears or self.cleared

    @property
    def isolated(self) -> bool:
        """Whether the engine can use nothing of another space for the request."""
        foreign = self.reuse_plan is not None and self.reuse_plan.foreign
        emptied = not foreign or any(isinstance(step, Erase | Restore) for step in self.steps)
        return emptied if self.pinned else self.cleared


class Prompts(NamedTuple):
    """What is known of a model's prompts."""

    tree: PromptTree  # those that were sent to it
    markers: Markers  # of its template


@dataclass(frozen=True, slots=True)
class Structure:
    """The known structure of a prompt."""

    boundaries: tuple[Boundary, ...] = ()
    branches: tuple[Branch, ...] = ()
    known: int = 0  # tokens at its beginning that were computed before
    known_at: float = 0.0  # when they were last computed, in seconds
    known_of_other_sets: int = 0  # tokens at its beginning that were computed with other LoRA adapters
    shared_until: float = inf  # tokens at its beginning with which other conversations may begin as well

    @classmethod
    def of(cls, prompt: Tokens, boundaries: tuple[Boundary, ...], beside: Prompts) -> Structure:
        """Return where other prompts may diverge from this one.

        Branch points within a reply do not count: they come from a reply that returned changed, and no other
        prompt will diverge there.
        """
        tree, markers = beside
        branches = tree.branches(prompt)
        inside = in_replies((each.at for each in branches), prompt, boundaries, markers) if branches else ()
        return cls(
            boundaries=boundaries,
            branches=tuple(branch for branch in branches if branch.at not in inside),
            known=tree.longest(prompt),
            known_at=tree.passed_at(prompt),
            known_of_other_sets=tree.longest_of_other_sets(prompt),
        )

    @property
    def head(self) -> int:
        """Tokens before the first message; 0 = not known."""
        return next((b.at for b in self.boundaries if b.kind is BoundaryKind.HEAD), 0)

    @property
    def first_turn(self) -> float:
        """Tokens before the message that follows the first reply; inf: none does, or it is not known."""
        later = {BoundaryKind.USER, BoundaryKind.TOOL}
        return next((b.at for b in self.boundaries if b.kind in later and 0 < self.head < b.at), inf)


NO_STRUCTURE: Final = Structure()


BORDERS: Final = {Purpose.PIECE, Purpose.PLANT}  # purposes of prefills after which a request may pause

# -- one request, from arrival to report -----------------------------------------------------------------

StepEnded = Planted | Saved | Restored | Erased
Scene = tuple[tuple[int, bool, bool, bool, int], ...]  # decides which requests must wait: see `State.scene`


class Wait(StrEnum):
    """What a queued request waits for. Observers show it; no decision depends on it."""

    ENGINE = "engine"  # no engine is up
    MODEL = "model"  # its router has not loaded its model
    DRAINED = "drained"  # all its engines are drained, or their models are being unloaded
    PRIORITY = "priority"  # more urgent requests are at work
    CELLS = "cells"  # cells of a shared KV buffer are missing
    RUNNING = "running"  # as many requests are at work as the user allows
    SLOTS = "slots"  # all slots are busy
    IDLE_WORK = "idle_work"  # all slots are busy, and only with idle work
    BEST_SLOT = "best_slot"  # there is a free slot, but waiting for another one is cheaper
    KEPT_SLOT = "kept_slot"  # the free slot is kept for a conversation that is about to return
    LOOK = "look"  # it is not known which slots are free, until GET /slots was read
    TOKENS = "tokens"  # its tokens are being counted
    TURN = "turn"  # requests before it have not begun


@dataclass(frozen=True, slots=True)
class Pause:
    """From an answer to the arrival of the conversation's next request."""

    seconds: float
    after_tools: bool | None  # whether the answer asked for tools; None: not known


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a queued request waits for, and the requests that it waits for."""

    wait: Wait
    behind: tuple[RequestId, ...] = ()


@dataclass(slots=True)
class Queued:
    """Its wait in our queue, since it was put there last; its tokens may be known or not."""

    since: float = 0.0
    waits_in: Scene | None = None  # the scene in which it was decided that it must wait
    waits_for: EngineTable | None = None  # waits for a request there to end; other engines have free slots
    holds: Sequence[EngineTable] = ()  # engines for which the requests after it must wait too
    stands_behind: RequestId | None = None  # the more urgent request for which it does not begin
    stood_back: bool = False  # whether that was reported
    kept_reported: bool = False
    kept_until: float = 0.0  # when it gets the slot at the latest that is kept for another conversation

    def decides_again(self) -> None:
        """Be looked at again, whatever has changed since."""
        self.waits_in = None

    def waits_on(
        self, plan: Plan | None, scene: Scene, behind: Pending | None, holds: Sequence[EngineTable]
    ) -> bool:
        """See `Pending.waits_on`."""
        before_queued = behind is not None and isinstance(behind.stage, Queued)
        self.kept_until = 0.0
        self.waits_in = None if before_queued else scene  # no event of the engine reports a change of this
        self.stands_behind, self.holds = behind.arrived.request if behind else None, holds
        self.waits_for = plan.table if plan and plan.until else None
        news = behind is not None and not self.stood_back
        self.stood_back |= news
        return news

    def waits_for_kept(self, until: float) -> bool:
        """Wait for a slot that is kept for another conversation. Returns whether that is news."""
        news, self.kept_reported = not self.kept_reported, True
        self.kept_until, self.waits_in = until, None  # time changes this, which is no event
        return news


@dataclass(slots=True)
class Preparing:
    """The steps in the slot of a request before it is sent."""

    plan: Plan
    slot: SlotId
    left: int  # steps that have not ended
    step_began: float  # the present one, in seconds

    @property
    def ahead(self) -> Sequence[Step]:
        """The steps that have not ended."""
        return self.plan.steps[len(self.plan.steps) - self.left :]

    @property
    def step(self) -> Step:
        """The step that runs, or is about to begin."""
        return self.ahead[0]

    def passes(self, steps: int, now: float) -> None:
        """Go past this many steps: the present one has ended, and those after it are left out."""
        self.left, self.step_began = self.left - steps, now


@dataclass(frozen=True, slots=True)
class Running:
    """It was sent to its engine."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Its answer has ended; the report waits for the tokens."""

    answer: Finished


@dataclass(slots=True)
class Pending:
    """A request that was not reported yet: what is known of it, and how far it has come."""

    arrived: Arrived
    stage: Queued | Preparing | Running | Ended = field(default_factory=Queued)
    prompt: Tokens | None = None
    rendered: bool = False  # whether the renderer has answered, even with "cannot be rendered"
    unknown: Unknown = Unknown.NO_TOKENS  # why, if it has answered so
    plan: Plan | None = None
    slot: SlotId | None = None  # the slot in which it runs, once known
    base: SlotContents | None = None  # the state from which its engine was to continue
    loads: bool = False  # whether that state was in the RAM cache, not in the slot
    predicted: int | None = None  # `Usage.cached` as we expect it; None: not known yet
    structure: Structure = NO_STRUCTURE
    planted: int = 0  # tokens evaluated by plants for this request
    parked: int = 0  # those of `planted` that were computed only to save the slot's state first
    reached: int = 0  # tokens of the prompt that our prefills have reached
    ahead_from: int | None = None  # index from which the reused tokens were computed in idle time
    begun_at: float = 0.0  # when it was given its place
    computing_since: float | None = None  # None: it is not known when its engine began to compute it
    copied_bytes: int = 0  # that its engine copied to and from its RAM cache before it computed
    held_up_seconds: float = 0.0  # for which it may have waited then for other work; inf: unknown
    waited: float = 0.0  # seconds in the queue, without the present stay
    aged: bool = False  # it is next: no request of its priority had begun for long
    pieces_until: float | None = None  # when its last piece was computed
    given_back: int = 0  # tokens that were computed again because it gave way
    step_seconds: float = 0.0  # total of restores, touches, erasures and steers
    pauses: tuple[Pause, ...] = ()  # of its conversation until it came
    start_by: float = inf  # when it begins at the latest, whatever is cheaper; inf: not estimated yet
    could_begin: int | None = None  # `State.begun` when it was first found to need more than a free slot
    lacked_cells: bool = False  # it has had to wait for cells of a shared KV buffer
    plain: bool = False  # take no steps: one has failed, or they would not help
    other: Form | None = None  # the form after the rules, until one of the two is chosen
    weighed: Weighed | None = None  # the decision between the two forms
    reported: bool = False

    @property
    def table(self) -> EngineTable | None:
        """The engine where it has its place; None: it has none, or went to an engine that is not known."""
        return self.plan.table if self.plan else None

    @property
    def queued(self) -> Queued:
        """Its wait. Raises AssertionError if it is not in our queue."""
        match self.stage:
            case Queued() as queued:
                return queued
        raise AssertionError(f"{self.arrived.request} is not queued")

    @property
    def preparing(self) -> Preparing | None:
        """The steps in its slot, while there are any before it is sent."""
        return self.stage if isinstance(self.stage, Preparing) else None

    @property
    def finished(self) -> Finished | None:
        """The end of its answer."""
        return self.stage.answer if isinstance(self.stage, Ended) else None

    @property
    def owned(self) -> tuple[EngineTable, SlotId] | None:
        """The slot that it still owns; None if it owns none, or if the engine was restarted."""
        table, slot = self.table, self.slot
        if table is None or slot is None:
            return None
        return (table, slot) if table.owners[slot : slot + 1] == [self.arrived.request] else None

    @property
    def goes_changed(self) -> bool:
        """Whether the form after the rules is sent."""
        return self.weighed is not None and self.weighed.taken

    @property
    def divisible(self) -> bool:
        """Whether it may be computed in pieces."""
        request, hints = self.arrived, self.arrived.hints
        low = hints.priority is Priority.LOW and hints.said_by is not SaidBy.SIDE_REQUEST
        whole = request.copies > 1 or request.id_slot is not None or request.bypass or request.action
        return low and request.generates and not (whole or request.lora is not None or self.plain)

    @property
    def rank(self) -> int:
        """How urgent it is now; see `Priority.rank`."""
        return Priority.HIGH.rank if self.aged else self.arrived.hints.priority.rank

    @property
    def begun(self) -> bool:
        """Whether it ever had a place."""
        return self.begun_at > 0.0

    # -- its tokens, and its form ----------------------------------------------------------------------

    def tokens_known(self, event: Rendered, beside: Prompts) -> None:
        """Take in the renderer's answer. `beside`: the prompts of its model, here and below."""
        self.rendered, self.unknown = True, event.unknown
        self._decides_again()
        chain, space = self.arrived.hash_chain, self.arrived.space
        own, changed = (prompt and prompt.within(space) for prompt in (event.prompt, event.rewritten))
        form = Form(chain, own, event.boundaries)
        if self.other is not None:
            self.other = replace(self.other, prompt=changed, boundaries=event.rewritten_boundaries)
        elif self.weighed is not None:  # messages have decided the form; the prices are recorded now
            self.weighed = self._priced_late(self.weighed, own, changed)
            if self.weighed.taken:
                form = Form(chain, changed, event.rewritten_boundaries)
        self._takes(form, beside)
        self._predict()
        if isinstance(self.stage, Preparing | Running):  # it was placed by its messages, without tokens
            self._work_begins(self.begun_at)

    def _priced_late(self, weighed: Weighed, own: Tokens | None, changed: Tokens | None) -> Weighed:
        """Return the decision with the prices of both forms for the state that the slot held."""
        plan = self.plan
        if plan is None:
            return weighed
        base = self.base or (plan.table.shadow.slots[plan.slot] if plan.slot is not None else None)
        mine, rules = (
            None if prompt is None else len(prompt) - reuse(base, prompt, plan.table.traits)
            for prompt in (own, changed)
        )
        return Weighed(mine, rules, weighed.taken)

    def chooses(self, weighed: Weighed, beside: Prompts) -> None:
        """Record the decision between the two forms. Tokens that are still unknown follow later."""
        other, self.other, self.weighed = self.other, None, weighed
        if other is not None and weighed.taken:
            self._takes(other, beside)

    def moves_to(self, adapters: str, beside: Prompts) -> None:
        """Move to the space of these adapters, which depend on the engine that it will get."""
        if self.arrived.adapters == adapters:
            return
        before = self.arrived.space
        self.arrived = replace(self.arrived, adapters=adapters)
        space = self.arrived.space
        if self.other is not None:
            self.other = self.other.moved(space, before)
        form = Form(self.arrived.hash_chain, self.prompt, self.structure.boundaries)
        self._takes(form.moved(space, before), beside)

    def _takes(self, form: Form, beside: Prompts) -> None:
        self.arrived = replace(self.arrived, hash_chain=form.hash_chain)
        self.prompt = form.prompt
        if form.prompt is not None:
            self.structure = Structure.of(form.prompt, form.boundaries, beside)

    # -- its place -------------------------------------------------------------------------------------

    def ages(self, *, aged: bool) -> None:
        """Become the next request, whatever its priority, or be so no more."""
        if self.aged != aged:
            self.aged = aged
            self._decides_again()

    def _decides_again(self) -> None:
        if isinstance(self.stage, Queued):
            self.stage.decides_again()

    def waits_on(
        self,
        plan: Plan | None,
        scene: Scene,
        *,
        behind: Pending | None,
        holds: Sequence[EngineTable],
        lacking: int,
    ) -> bool:
        """Record for what it waits, and until which change. Returns whether it newly stands behind another.

        `plan`: its best place. `lacking`: cells of a shared KV buffer that are missing there.
        """
        self.lacked_cells |= lacking > 0
        return self.queued.waits_on(plan, scene, behind, holds)

    def begun_since(self, begun: int) -> int:
        """Return how many of all `begun` requests have begun since this was first asked."""
        if self.could_begin is None:
            self.could_begin = begun
        return begun - self.could_begin

    def bounded(self, begins: float, own: float, factor: float) -> None:
        """Fix when it begins at the latest, if it is not fixed yet: see `turns`.

        Args:
            begins: when it would begin in the order of arrival.
            own: seconds of its prefill.
            factor: how many times as long it may wait for its first token.
        """
        if self.start_by == inf:
            self.start_by = self.arrived.at + factor * (begins + own - self.arrived.at) - own

    def placed(self, plan: Plan, now: float, *, ahead_from: int | None) -> None:
        """Leave the queue for this place, and bring its work to the engine there.

        `ahead_from`: the index from which what it reuses was computed in idle time; None: from nowhere on.
        """
        found = plan.reuse_plan
        if self.begun and found is not None and self.pieces_until is not None:  # it gave way before
            self.given_back += max(0, self.reached - found.reuse)
        self.waited += now - self.queued.since
        self.plan, self.ahead_from, self.begun_at = plan, ahead_from, now
        if plan.steps and plan.slot is not None:
            self.slot, self.stage = plan.slot, Preparing(plan, plan.slot, len(plan.steps), now)
        self._work_begins(now)

    def requeued(self, now: float) -> None:
        """Give up its place and wait again."""
        if table := self.table:
            table.work.ends(self.arrived.request)
        self.stage, self.plan, self.slot, self.aged = Queued(now), None, None, False

    # -- steps in its slot, before it is sent ----------------------------------------------------------

    def counts(self, event: Planted) -> None:
        """Count the tokens that were evaluated for it."""
        computed = event.wasted if event.computed is None else event.computed
        self.planted += computed
        if self.preparing and isinstance(step := self.preparing.step, Prefill) and step.parks:
            self.parked += computed

    def step_ended(self, preparing: Preparing, event: StepEnded, *, ok: bool) -> bool:
        """Take in the end of its step. Returns whether it can go on.

        `step_seconds` are those spent neither on computing the prompt nor on saving the slot.
        """
        step, seconds = preparing.step, event.at - preparing.step_began
        match step:
            case Prefill(_, Purpose.TOUCH) | Restore() | Erase():
                self.step_seconds += seconds
            case Prefill(_, Purpose.STEER):
                computing = event.seconds if isinstance(event, Planted) else None
                self.step_seconds += max(0.0, seconds - (computing or 0.0))
        if ok and isinstance(step, Prefill) and step.purpose is not Purpose.TOUCH:
            self.reached = len(step.tokens)
        if ok or isinstance(event, Saved):
            return True
        # If a file is missing, another may serve; if the engine refuses one, it may refuse all of them.
        self.plain = not isinstance(event, Restored) or event.outcome is not Loading.UNFIT
        return False

    def goes_on(self, preparing: Preparing, now: float, *, past_save: bool) -> bool:
        """Go on to the next step, or past it if that is a save that can wait.

        Returns whether a part of the prompt is computed behind which it may pause.
        """
        preparing.passes(2 if past_save else 1, now)
        left, steps = preparing.left, preparing.plan.steps
        done, saves = steps[-left - 1], left > 0 and isinstance(steps[-left], Save)
        pauses = isinstance(done, Prefill) and done.purpose in BORDERS and not saves and self.divisible
        if pauses:
            self.pieces_until = now
        return pauses

    # -- on its way, and in the engine -----------------------------------------------------------------

    def sent(self, now: float) -> Plan:
        """Go to its place, in the engine's table and in its shadow. Returns the plan."""
        plan, request = self.plan, self.arrived
        if plan is None:
            raise AssertionError("only a planned request is sent to a place")
        table, slot = plan.table, plan.slot
        if slot is not None and not request.action:  # an action starts no task
            self._task_begins(plan, slot, now)
        self.stage = Running(now)
        self.slot = slot if plan.pinned else None
        if self.slot is not None:
            table.move(self.slot, SlotState.LAUNCHED, request.request, now)
        else:
            if slot is not None and table.owners[slot] == request.request:
                promised = table.promised.get(slot)
                table.move(slot, SlotState.IDLE, None, now)
                if promised is not None:  # the engine will find the request's own tokens there (T5)
                    table.promise(slot, promised)
            table.send(request.request, request.copies, now, alone=plan.cleared)
        self._predict()
        return plan

    def _task_begins(self, plan: Plan, slot: SlotId, now: float) -> None:
        """Change the shadow as the engine will for a task in this slot, as far as we know."""
        table, shadow = plan.table, plan.table.shadow
        if plan.reuse_plan and not plan.steps:
            found = plan.reuse_plan
        elif self.prompt is not None:  # steps have changed the slot
            found = shadow.plan_reuse(slot, self.prompt)
        elif plan.reason in {Reason.BRIEF, Reason.UNRENDERED}:
            found = shadow.plan_reuse_blind(slot)
        else:
            found = ReusePlan(slot=slot, reuse=0, source=Source.SLOT, base=shadow.slots[slot], parked=False)
        idle = table.idle_beside(slot)
        self.held_up_seconds = table.held_up_at_most(self.arrived.request, now)
        self.copied_bytes = shadow.copied_bytes(found, idle)
        shadow.launch(found, idle)
        self.base, self.loads = found.base, found.source is Source.RAM
        if plan.reason is Reason.BRIEF:
            self.predicted = found.reuse  # its tokens arrive too late for a better prediction

    def sent_without_place(self, table: EngineTable | None, now: float) -> None:
        """Go to an engine that chooses the slot; None: to one that is not known."""
        self.stage = Running(now)
        if table is not None:
            self.plan = Plan(table=table, reason=self.arrived.without_plan, pinned=False)
            table.send(self.arrived.request, self.arrived.copies, now)
            table.shadow.sends(self.arrived.space)

    def adopted(self, table: EngineTable) -> None:
        """Belong to an engine that was not known when it was sent there; then its tokens are needed."""
        self.plan = Plan(table=table, reason=self.arrived.without_plan, pinned=False)
        if self.arrived.rendered and self.prompt is None:
            self.rendered = False

    def runs_unseen(self, table: EngineTable, now: float) -> None:
        """Run on an engine that has come up since: in which slot is unknown until GET /slots shows it."""
        if self.plan is None:
            self.adopted(table)
        self.slot = None
        table.send(self.arrived.request, self.arrived.copies, now)

    def computes(self, now: float) -> None:
        """Learn what its engine copied before it began to compute."""
        if (table := self.table) and isinstance(self.stage, Running):
            self.computing_since = now
            seconds = now - self.stage.sent_at
            table.rates.copied(self.copied_bytes, seconds, held_up=self.held_up_seconds)

    def seen_in(self, slot: SlotId) -> None:
        """Run in the slot that GET /slots shows."""
        self.slot = slot
        if self.plan and self.plan.slot != slot:  # not the slot that we expected
            self.base, self.predicted = self.plan.table.shadow.slots[slot], None
            self._predict()

    def ended(self, event: Finished) -> None:
        """Take in the end of its answer, and its slot if only the answer says which it was."""
        self.stage, table = Ended(event), self.table
        if table is None:
            return
        table.work.ends(event.request)
        slot = event.slot
        if slot is not None and slot < len(table.states) and event.request in table.unsettled:
            self.slot = SlotId(slot)

    def _predict(self) -> None:
        """Predict `cached`, once both the prompt and the slot's contents are known.

        For an uncached request the prediction is 0 at once. So it does not reveal when a slot was found.
        """
        if self.plan is None or self.predicted is not None:
            return
        if self.arrived.uncached:
            self.predicted = 0
        elif self.prompt is not None and (self.slot is not None or self.plan.slot is not None):
            self.predicted = reuse(self.base, self.prompt, self.plan.table.traits)

    def _work_begins(self, now: float) -> None:
        """Record at its engine how much work the request brings, as far as that is known."""
        if self.plan is None:
            return
        table, rates, computes = self.plan.table, self.plan.table.rates, 0
        if self.prompt is not None:
            reused = self.plan.reuse_plan.reuse if self.plan.reuse_plan else self.predicted
            computes = len(self.prompt) - (reused or 0)
        reply = rates.reply.mean / rates.decode.mean
        table.work.begins(self.arrived.request, now, prefill=computes / rates.marginal_prefill, reply=reply)

    # -- its report ------------------------------------------------------------------------------------

    def report(self) -> Report | None:
        """Return the report, from the engine's own figures; None while one is missing."""
        done = self.finished
        if done is None or not self.rendered or self.reported:
            return None
        self.reported = True
        usage = usage_of(done.prompt_tokens, done.cached, planted=self.planted, ahead_from=self.ahead_from)
        exact = None
        if self.prompt is not None and done.prompt_tokens is not None:
            exact = len(self.prompt) == done.prompt_tokens
        return self._report(usage, exact)

    def broken_off(self, event: Gone) -> Report | None:
        """Return the report of a request that broke off; it counts the prompt as far as it was processed."""
        planted = self.planted + event.planted
        reached, cached = event.reached, event.cached
        if reached is None:
            reached = cached = max(self.reached, planted)
        if reached == 0:
            return None
        return self._report(usage_of(reached, cached, planted=planted, ahead_from=self.ahead_from), None)

    def left_behind(self, table: EngineTable) -> SlotContents | None:
        """Return what a slot there holds if it is released now; the engine's count says how much of it."""
        if self.prompt is None:
            return None
        base = self.base
        checkpoints, possible = table.shadow.checkpoints_after(
            base,
            reuse=self.predicted or 0,
            end=len(self.prompt),
            user_starts=user_starts(self.prompt, table.traits),
            images=self.prompt.chunks,
        )
        return SlotContents(
            tokens=self.prompt,
            checkpoints=checkpoints,
            possible=possible,
            hash_chain=self.arrived.hash_chain,
            turns=base.turns if base else 1,
            used=self.arrived.at,
            rough=True,
        )

    def _report(self, usage: Usage | None, exact: bool | None) -> Report:
        plan, unknown = self.plan, self.unknown if self.prompt is None else None
        if plan is None and unknown is None:  # no engine that we look into served it
            unknown = Unknown.NO_ENGINE
        rate = plan.table.rates.prefill.shown if plan else None
        least = None
        if usage is not None and unknown is None:
            least = oracle(usage, min(self.structure.known, usage.prompt))
        return Report(
            request=self.arrived.request,
            model=self.arrived.model,
            reason=plan.reason if plan else self.arrived.without_plan,
            slot=self.slot,
            usage=usage,
            predicted=self.predicted,
            oracle=least,
            exact=exact,
            lost=self._lost(usage, plan, least) if plan else None,
            reused_seconds=usage.reused / rate if usage and rate else None,
            step_seconds=self.step_seconds,
            unknown=unknown,
        )

    def _lost(self, usage: Usage | None, plan: Plan, least: int | None) -> Lost | None:
        """Return the tokens lost beyond the oracle, and why.

        Tokens planted for this request count as computed.
        """
        if least is None or usage is None or self.prompt is None:
            return None
        structure, as_expected = self.structure, self.slot == plan.slot
        answered = Answered(
            reason=plan.reason,
            prompt=self.prompt,
            cached=usage.reused,
            predicted=None if self.predicted is None else max(0, self.predicted - self.planted),
            base=plan.reuse_plan.base if plan.reuse_plan and as_expected else self.base,
            known=structure.known,
            restarted=structure.known_at < plan.table.reset_at,
            uncached=self.arrived.uncached,
        )
        known_of_other_sets, known = self.structure.known_of_other_sets, self.structure.known
        other_sets = known_of_other_sets - max(known, usage.reused)
        if other_sets > usage.work - least:
            return Lost(Loss.ADAPTERS, other_sets)
        return lost(answered, usage.work - least)

    def remember(self, tree: PromptTree, now: float) -> None:
        if self.prompt is not None:
            tree.add(self.prompt, now)

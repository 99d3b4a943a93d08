"""The engine's shadow: what its slots and its RAM prompt cache hold, and what a task will do to them.

`plan_reuse` tells what would be reused if a prompt went to a slot, without changing anything. `launch` and
`finish` make the changes. The rules are those of `get_available_slot` and of the RAM prompt cache (engine.md
sections 1.2, 4 and T6).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from slotkeeper.scheduler.policies.adapters import namespace_in, set_in
from slotkeeper.scheduler.prompts.tokens import EMPTY, Chunk, Tokens
from slotkeeper.scheduler.rates import StateSize
from slotkeeper.scheduler.slots.engine_model import (
    KEEP,
    Checkpoint,
    EngineTraits,
    Known,
    SlotContents,
    Snapshot,
    after_prefill,
    better,
    contains,
    first_kept,
    generous,
    parks,
    publish,
    restored,
    reuse,
    slack,
    unsafe,
)
from slotkeeper.scheduler.types import RequestId, SlotId


class Source(StrEnum):
    SLOT = "slot"
    RAM = "ram"
    SNAPSHOT = "snapshot"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """What would happen if a prompt were sent to a slot."""

    slot: SlotId
    reuse: int  # tokens
    source: Source
    base: SlotContents | None  # the state from which the prompt would continue
    parked: bool  # whether the engine would first copy the slot's contents to its RAM cache
    touched: bool = False  # after a one-token task in that slot
    unsafe: bool = False  # the engine would answer wrongly (T9, T11): the slot must be erased first
    foreign: bool = False  # the engine might use another space's state: the slot must be erased first


class Prefilling(NamedTuple):
    """A prefill of ours that runs."""

    reuse_plan: ReusePlan
    copied_bytes: int  # to and from the RAM cache, before it is computed; 0 also if another task was running


class EngineShadow:
    """Our model of what one engine's slots and RAM cache hold."""

    def __init__(self, traits: EngineTraits, sizes: StateSize | None = None) -> None:
        self.traits = traits
        self.slots: list[SlotContents | None] = [None] * traits.n_slots
        self.ram: list[SlotContents] = []
        self._copied: dict[SlotId, SlotContents] = {}  # idle slots whose contents are in the RAM cache too
        self._prefills: dict[SlotId, Prefilling] = {}  # those of ours that run now
        self._tasks = 0
        self.mixed = False  # whether states of several sets of adapters may be in the engine
        # With which adapters a slot's last task ran; "": it never had one, None: that is not known.
        self.task_adapters: list[str | None] = [""] * traits.n_slots
        self.sizes = sizes or StateSize()

    def __repr__(self) -> str:
        contents = " ".join(str(h.total) if h else "-" for h in self.slots)
        return f"<EngineShadow {self.traits.memory} slots [{contents}] ram {[h.total for h in self.ram]}>"

    # -- questions ---------------------------------------------------------------------------------

    def plan_reuse(self, slot: SlotId, prompt: Tokens, *, evict: bool = False) -> ReusePlan:
        """Plan to send a prompt to `slot` as it is. `evict`: the engine chose the slot by age."""
        return self._plan_reuse(self.slots[slot], self.ram, slot, prompt, evict=evict)

    def look_touched(self, slot: SlotId, prompt: Tokens, idle: Collection[SlotId]) -> ReusePlan:
        """Plan to send a prompt to `slot` after a one-token task there.

        That task makes the engine copy its idle slots to the RAM cache, this slot first. It also leaves the
        slot non-empty, without which a pinned task never loads from the RAM cache (T6). A copied state
        replaces all entries that are a prefix of it.
        """
        ram, own = list(self.ram), self.slots[slot]
        parked = parks(own, self.traits)
        if own and parked:
            self._publish(ram, own)
        if self.traits.ram_cache and self.traits.idle_copy:
            for other in idle:
                if other != slot and (contents := self.slots[other]):
                    self._publish(ram, contents)
        touched_slot = SlotContents(tokens=prompt.cut(0, 0), opaque=1)
        return replace(self._plan_reuse(touched_slot, ram, slot, prompt), touched=True, parked=parked)

    def plan_reuse_restored(self, slot: SlotId, prompt: Tokens, snapshot: Snapshot) -> ReusePlan:
        """Plan to send a prompt to `slot` after a restore of this file, which overwrites the slot.

        The slot must have the prompt's adapters by then (`has_other_adapters`).
        """
        base = restored(snapshot, self.traits, now=0.0)
        reuse_plan = self._plan_reuse(base, self.ram, slot, prompt, adapters_set=True)
        source = Source.SNAPSHOT if reuse_plan.source is Source.SLOT else reuse_plan.source
        return replace(reuse_plan, source=source, parked=False)

    def longest_common(self, prompt: Tokens, idle: Collection[SlotId]) -> int:
        """Return the most tokens that an idle slot or an entry of the RAM cache shares with a prompt."""
        states = (*(self.slots[slot] for slot in idle), *self.ram)
        return max((prompt.lcp(contents.tokens) for contents in states if contents), default=0)

    def plan_reuse_blind(self, slot: SlotId) -> ReusePlan:
        """Plan to send an unknown prompt, which presumably shares little with any state."""
        parked = parks(self.slots[slot], self.traits)
        return ReusePlan(slot=slot, reuse=0, source=Source.NOTHING, base=None, parked=parked)

    def plan_reuse_in_space(self, slot: SlotId, space: str) -> ReusePlan:
        """Plan to send an unknown prompt of a space.

        It is `foreign` unless the slot has the same space, and the engine has no RAM cache to load from.
        """
        contents = self.slots[slot]
        foreign = contents is None or contents.tokens.space != space or self.may_load
        return ReusePlan(slot=slot, reuse=0, source=Source.NOTHING, base=None, parked=False, foreign=foreign)

    def isolates(self, space: str) -> bool:
        """Whether a request of this space must be kept from states of other spaces in the engine."""
        return self.mixed or self.own_set(space) or bool(namespace_in(space))

    def own_set(self, space: str) -> bool:
        """Whether a request of this space names adapters of its own."""
        return bool(self.traits.adapters) and set_in(space) != self.traits.adapter_set

    def stray(self, contents: SlotContents) -> bool:
        """Whether it is unknown with which adapters this was computed, so that it cannot be reused."""
        return bool(self.traits.adapters) and not set_in(contents.tokens.space)

    def has_other_adapters(self, slot: SlotId, space: str) -> bool:
        """Whether the slot's last task may have had other adapters; then the engine may empty it (T12)."""
        return bool(self.traits.adapters) and self.task_adapters[slot] != set_in(space)

    @property
    def may_load(self) -> bool:
        """Whether the engine may have a RAM cache, from which it loads whatever is similar."""
        return self.traits.ram_cache or self.traits.known("ram_cache") is Known.UNFOUND

    def engine_choice(self, prompt: Tokens, idle: Sequence[SlotId]) -> ReusePlan | None:
        """Plan an unpinned prompt as the engine does: the most similar slot, or the least recently used."""
        if not idle:
            return None
        similar: tuple[float, SlotId] | None = None
        for slot in idle:
            contents = self.slots[slot]
            share = prompt.lcp(contents.tokens) / max(1, len(prompt)) if contents else 0.0
            if contents and share > self.traits.similarity > 0 and (similar is None or share > similar[0]):
                similar = (share, slot)
        if similar:
            return self.plan_reuse(similar[1], prompt)
        oldest = min(idle, key=lambda slot: (self._last_used(slot), slot))
        return self.plan_reuse(oldest, prompt, evict=True)

    def elsewhere(self, contents: SlotContents, but: SlotId) -> bool:
        """Whether the same contents are in another slot or in the RAM cache too."""
        others = [h for s, h in enumerate(self.slots) if s != but and h]
        return any(contains(h, contents) for h in (*others, *self.ram))

    def copied_bytes(self, reuse_plan: ReusePlan, idle: Collection[SlotId]) -> int:
        """Return the bytes that the engine would copy to or from its RAM cache for this plan.

        Nothing else runs meanwhile. A state is copied once, until it changes.
        """
        if not self.traits.ram_cache:
            return 0
        slot = reuse_plan.slot
        leaving = [self.slots[slot]] if reuse_plan.parked else []
        if self.traits.idle_copy:
            leaving += [
                contents
                for other in idle
                if other != slot and self._copied.get(other) is not (contents := self.slots[other])
            ]
        moved = [c for c in leaving if c and not any(contains(entry, c) for entry in self.ram)]
        if reuse_plan.source is Source.RAM and reuse_plan.base:
            moved.append(reuse_plan.base)
        return sum(self.sizes.of(c.total, len(c.checkpoints)) for c in moved)

    def copied_before(self, slot: SlotId, tokens: Tokens, idle: Collection[SlotId]) -> int:
        """Return the bytes that the engine copies to or from its RAM cache before this prefill."""
        return self.copied_bytes(self.plan_reuse(slot, tokens), idle) if self.traits.ram_cache else 0

    # -- changes -----------------------------------------------------------------------------------

    def launch(self, reuse_plan: ReusePlan, idle: Collection[SlotId]) -> None:
        """Record that a task starts in `reuse_plan.slot`: the RAM cache and the other idle slots change."""
        contents = self.slots[reuse_plan.slot]
        if reuse_plan.parked and contents:
            self._publish(self.ram, contents)
        if reuse_plan.source is Source.RAM and reuse_plan.base in self.ram:
            self.ram.remove(reuse_plan.base)
            self._copied.clear()
        if reuse_plan.base is not contents:
            self.slots[reuse_plan.slot] = reuse_plan.base
        self._copy_idle(reuse_plan.slot, idle)

    def prefill_begins(self, slot: SlotId, tokens: Tokens, idle: Collection[SlotId], *, touch: bool) -> None:
        """Record that a prefill of ours starts in `slot`. Later tasks can load what is copied first.

        `touch`: it leaves nothing to reuse.
        """
        reuse_plan = self.plan_reuse_blind(slot) if touch else self.plan_reuse(slot, tokens)
        alone = len(idle) == self.traits.n_slots - 1
        self._prefills[slot] = Prefilling(reuse_plan, self.copied_bytes(reuse_plan, idle) if alone else 0)
        if not touch:
            self.launch(reuse_plan, idle)

    def prefill_ended(self, slot: SlotId, tokens: Tokens) -> Prefilling:
        """Return what the prefill in `slot` was to reuse and what was to be copied when it started."""
        return self._prefills.pop(slot, None) or Prefilling(self.plan_reuse(slot, tokens), 0)

    def touch(self, slot: SlotId, idle: Collection[SlotId]) -> None:
        """Record that a one-token task ran in `slot`."""
        contents = self.slots[slot]
        if contents and parks(contents, self.traits):
            self._publish(self.ram, contents)
        self.slots[slot] = SlotContents(opaque=1)
        self._copy_idle(slot, idle)

    def restore(self, slot: SlotId, snapshot: Snapshot, now: float) -> None:
        """Record that a file was restored into `slot`. The RAM cache is unchanged (engine.md 4)."""
        self.slots[slot] = restored(snapshot, self.traits, now=now)

    def erase(self, slot: SlotId) -> None:
        """Record that `slot` was erased. The RAM cache is unchanged (engine.md 4)."""
        self.slots[slot] = None

    def lost(self, slot: SlotId) -> None:
        """Forget what `slot` holds: a task that is not ours runs there, or it is not known what ours did."""
        self.slots[slot] = None

    def restored_unseen(self, slot: SlotId, tokens: int, now: float) -> None:
        """Record that a file of so many unknown tokens was restored into `slot`, or may have been."""
        self.slots[slot] = SlotContents(opaque=tokens, from_file=True, used=now)

    def observed(self, slot: SlotId, contents: SlotContents | None) -> None:
        """Record what `slot` holds by the engine's count or file, or by the task that was stopped there."""
        self.slots[slot] = contents

    def stopped(self, slot: SlotId, tokens: Tokens) -> None:
        """Record that a prefill of ours was stopped in `slot`."""
        self.slots[slot] = self.broken_off(self.prefill_ended(slot, tokens).reuse_plan, tokens)

    def reply_known(self, slot: SlotId, tokens: Tokens) -> Tokens:
        """Fill in the tokens of the task that ended last in `slot`. Returns the tokens that it holds."""
        contents = self.slots[slot]
        if contents is None:
            return EMPTY
        self.slots[slot] = known = contents.known_as(tokens)
        return known.tokens

    def reply_known_in_ram(self, request: RequestId, tokens: Tokens) -> None:
        """Fill in the tokens of a request whose slot the engine copied before they were known."""
        self.ram[:] = [entry.known_as(tokens) if entry.request == request else entry for entry in self.ram]

    def seen_in_file(self, contents: SlotContents, tokens: Tokens) -> None:
        """Fill in the tokens that the file of these contents shows, if they are in a slot or copied still."""
        self.slots[:] = [contents.known_as(tokens) if held is contents else held for held in self.slots]
        if contents.request is not None:
            self.reply_known_in_ram(contents.request, tokens)

    def next_known(self, slot: SlotId, tokens: Tokens | None, chance: float) -> None:
        """Record with which tokens the next turn will begin, and how likely that is. None: not known."""
        if contents := self.slots[slot]:
            self.slots[slot] = contents.followed_by(tokens, chance)

    def next_unknown(self, slot: SlotId) -> None:
        """Forget with which tokens the next turn will begin: they cannot be computed ahead."""
        if contents := self.slots[slot]:
            self.slots[slot] = replace(contents, following=None)

    def claimed(self, slot: SlotId, home: SlotContents, **known: Any) -> None:
        """Assign `slot` to the conversation that had it before, with what is `known` of its next turn."""
        if contents := self.slots[slot]:
            self.slots[slot] = replace(
                contents,
                hash_chain=home.hash_chain,
                turns=home.turns,
                used=home.used,
                request=home.request,
                calls_tools=home.calls_tools,
                **known,
            )

    def doubted(self, slot: SlotId) -> None:
        """Treat the contents of `slot` as unknown, because their space is uncertain."""
        self.task_adapters[slot] = None
        if contents := self.slots[slot]:
            self.slots[slot] = SlotContents(opaque=contents.total, used=contents.used)

    def ran_with(self, slot: SlotId, adapters: str | None) -> None:
        """Record with which adapters the last task ran in `slot`. None: not known."""
        self.task_adapters[slot] = adapters

    def used_before_us(self) -> None:
        """Record that tasks which we do not know ran in the engine, with any adapters."""
        self.task_adapters = [None] * self.traits.n_slots

    def sends(self, space: str) -> None:
        """Record that a request of this space is sent to the engine."""
        self.mixed |= self.own_set(space)

    def mixed_before_us(self) -> None:
        """Record that the engine may have states of any of its adapters."""
        self.mixed = bool(self.traits.adapters)

    def adapters_changed(self, traits: EngineTraits) -> None:
        """Take over the scales of adapters that the engine has now; its states may be of earlier ones."""
        self.traits, self.mixed = traits, True

    def finish(
        self,
        slot: SlotId,
        *,
        prompt: Tokens | None,
        prompt_tokens: int,
        cached: int,
        generated: int | None,
        user_starts: Sequence[int],
        hash_chain: tuple[bytes, ...],
        request: RequestId | None,
        now: float,
        space: str = "",
        calls_tools: bool | None = None,
    ) -> SlotContents:
        """Record that a task ended in `slot`.

        The slot holds the prompt and all sampled tokens but the last.
        """
        base = self.slots[slot]
        images = prompt.chunks if prompt else ()
        checkpoints, possible = self.checkpoints_after(
            base, reuse=cached, end=prompt_tokens, user_starts=user_starts, images=images
        )
        total = prompt_tokens + max(0, (generated or 0) - 1)
        tokens = prompt.cut(0, total) if prompt else EMPTY.within(space)
        if base and base.opaque and base.request and cached >= base.total:  # the prompt went on from its end
            self.reply_known_in_ram(base.request, tokens)
        kept_most = base is not None and cached >= base.total * KEEP
        contents = SlotContents(
            tokens=tokens,
            opaque=total - len(tokens),
            checkpoints=checkpoints,
            possible=possible,
            slack=slack(total, first_kept(base, cached, self.traits), self.traits),
            floor=base.floor if base and cached else 0,
            from_file=bool(base and base.from_file and cached),
            hash_chain=hash_chain,
            request=request,
            calls_tools=calls_tools,
            turns=(base.turns if base and kept_most else 0) + 1,
            used=now,
            rough=generated is None,
        )
        self.slots[slot] = contents
        return contents

    def broken_off(self, reuse_plan: ReusePlan, prompt: Tokens) -> SlotContents:
        """Return what a slot holds after a task was stopped. The engine's count will say how much of it."""
        base, kept = reuse_plan.base, reuse_plan.reuse
        checkpoints, possible = self.checkpoints_after(
            base, reuse=kept, end=len(prompt), user_starts=(), images=prompt.chunks
        )
        return SlotContents(
            tokens=prompt,
            checkpoints=checkpoints,
            possible=possible,
            hash_chain=base.hash_chain if base else (),
            turns=base.turns if base else 1,
            used=base.used if base else 0.0,
            from_file=bool(base and base.from_file and kept),
            rough=True,
        )

    def checkpoints_after(
        self,
        base: SlotContents | None,
        *,
        reuse: int,
        end: int,
        user_starts: Sequence[int],
        images: Sequence[Chunk] = (),
    ) -> tuple[tuple[Checkpoint, ...], tuple[Checkpoint, ...]]:
        """Return the checkpoints of a state after one more task prefilled it up to `end`.

        Also those that an engine would have which discards none; no such if no flag is in doubt.
        """
        self._tasks += 1
        after = partial(
            after_prefill,
            reuse=reuse,
            end=end,
            user_starts=user_starts,
            task=self._tasks,
            first=first_kept(base, reuse, self.traits),
            images=images,
        )
        left = after(base.checkpoints if base else (), traits=self.traits)
        if not self.traits.checkpoints_in_doubt:
            return left, ()
        return left, after(base.possible if base else (), traits=generous(self.traits))

    def learn(self, traits: EngineTraits) -> None:
        """Take over corrected flags, and rebuild the lists of checkpoints accordingly."""
        before, self.traits = self.traits, traits
        if (before.checkpoint_cap, before.checkpoint_min_step) != (
            traits.checkpoint_cap,
            traits.checkpoint_min_step,
        ):
            self.slots = [contents and contents.relisted(traits) for contents in self.slots]
            self.ram = [contents.relisted(traits) for contents in self.ram]

    def size_of(self, contents: SlotContents) -> int:
        """Return the estimated bytes of this state in the RAM cache; 0: neither header nor file told them."""
        return self.sizes.of(contents.total, len(contents.checkpoints)) if self.sizes.known else 0

    def ram_share(self, contents: SlotContents) -> float:
        """Return the share of the RAM cache that this state takes; 1.0: unknown, or the cache is assumed."""
        size, limit = self.size_of(contents), self.traits.ram_bytes
        assumed = self.traits.known("ram_cache") is Known.DEFAULT
        return size / limit if size and limit and not assumed else 1.0

    def exceeds_ram(self, contents: SlotContents) -> bool:
        """Whether the state is larger than the RAM cache, so that the next entry drives it out."""
        return 0 < self.traits.ram_bytes < self.size_of(contents)

    def _publish(self, ram: list[SlotContents], contents: SlotContents) -> None:
        """Copy a state into the RAM cache, which then drops its oldest entries down to its limit, but one."""
        publish(ram, contents, self.traits)
        if not (self.traits.ram_bytes and self.sizes.known):
            return
        sizes = self.sizes.of_all((entry.total, len(entry.checkpoints)) for entry in ram)
        over = sum(sizes) - self.traits.ram_bytes
        while over > 0 and len(sizes) > 1:
            over -= sizes.pop(0)
            del ram[0]
            if ram is self.ram:
                self._copied.clear()

    def forget_ram(self) -> None:
        """Forget the RAM cache: it did not hold what we believed."""
        self.ram.clear()
        self._copied.clear()

    def assume_unified(self, wiped: Collection[SlotId]) -> None:
        """Learn that slots share one buffer: a task moved these idle slots to the RAM cache (T6)."""
        self.traits = self.traits.corrected(Known.WIPED, unified=True)
        for slot in wiped:
            self.moved(slot)

    def moved(self, slot: SlotId) -> None:
        """Record that the engine moved an idle slot's contents to its RAM cache."""
        if contents := self.slots[slot]:
            self._publish(self.ram, contents)
        self.slots[slot] = None

    def distrust_ram(self) -> None:
        """Assume that there is no RAM cache: twice it lacked what stock settings would have put there."""
        self.traits = self.traits.corrected(Known.UNFOUND, ram_cache=False)
        self.forget_ram()

    # -- rules -------------------------------------------------------------------------------------

    def _plan_reuse(
        self,
        contents: SlotContents | None,
        ram: Sequence[SlotContents],
        slot: SlotId,
        prompt: Tokens,
        *,
        evict: bool = False,
        adapters_set: bool = False,
    ) -> ReusePlan:
        if not adapters_set and self.own_set(prompt.space) and self.has_other_adapters(slot, prompt.space):
            sure, nothing = self.task_adapters[slot] is not None, Source.NOTHING
            return ReusePlan(slot=slot, reuse=0, source=nothing, base=None, parked=False, foreign=not sure)
        common = prompt.lcp(contents.tokens) if contents else 0
        if self.isolates(prompt.space) and self._mixes(contents, prompt, common):
            return ReusePlan(slot=slot, reuse=0, source=Source.NOTHING, base=None, parked=False, foreign=True)
        # Whether the engine saves the slot to its RAM cache, and looks for a better state there.
        saves = parks(contents, self.traits, common, len(prompt)) or (evict and self.traits.ram_cache)
        entry = self._loaded(contents, ram, prompt) if saves else None
        base = entry or contents
        n_past = reuse(base, prompt, self.traits)
        own = Source.SLOT if n_past else Source.NOTHING
        return ReusePlan(
            slot=slot,
            reuse=n_past,
            source=Source.RAM if entry else own,
            base=base,
            parked=saves and contents is not None,
            unsafe=unsafe(base, prompt, self.traits),
        )

    def _loaded(
        self, contents: SlotContents | None, ram: Sequence[SlotContents], prompt: Tokens
    ) -> SlotContents | None:
        """Return the entry of the RAM cache that the engine loads instead of the slot's contents, if any.

        It saves the slot first. If the cache is full, that drives out the oldest entries.
        """
        entry = better(contents, ram, prompt)
        if entry is None or contents is None:
            return entry
        after = list(ram)
        self._publish(after, contents)
        return better(contents, after, prompt)

    def _mixes(self, contents: SlotContents | None, prompt: Tokens, common: int) -> bool:
        """Whether the engine might use another space's state, from the slot or from its RAM cache.

        A slot that we believe empty may hold a restored file, of which GET /slots shows nothing (engine.md
        1.7).
        """
        if contents is None or contents.tokens.space != prompt.space:
            return True
        return self.may_load and parks(contents, replace(self.traits, ram_cache=True), common, len(prompt))

    def _last_used(self, slot: SlotId) -> float:
        contents = self.slots[slot]
        return contents.used if contents else -1.0

    def _copy_idle(self, running: SlotId, idle: Collection[SlotId]) -> None:
        """Record that the engine copies its other idle slots when a task starts.

        If all slots share one buffer, it also clears them.
        """
        if not (self.traits.ram_cache and self.traits.idle_copy):
            return
        for other in idle:
            contents = self.slots[other]
            if contents and other != running:
                if self._copied.get(other) is not contents:
                    self._publish(self.ram, contents)
                    self._copied[other] = contents
                if self.traits.unified:
                    self.slots[other] = None

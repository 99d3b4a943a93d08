"""Findings about an engine: what it cannot do, and which flag changes that, after engine.md's traps.

`examine` is pure. `probe` asks the engine without changing it and without waking it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.child.launch import SLOTS
from slotkeeper.engine.child.memory import MAX_CHECKPOINTS, Caches, MemoryPlan
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.flags import AUTO_SLOTS, EngineFlags
from slotkeeper.engine.traits import Reading
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known, Memory, cells_of

SMALL_CONTEXT: Final = 16384  # an agent's system prompt and tools alone are 10,000 to 25,000 tokens
FEW_CHECKPOINTS: Final = 16  # a turn of an agent makes up to four
RAM_CACHE_MIB: Final = 8192  # llama-server's default
TOO_LITTLE: Final = "Even the least may not fit: free some memory."
TAKEN: Final = "What they hold already does not count as free: right after a restart there may be more room."
LARGE_UBATCH: Final = 1024  # a checkpoint sits one ubatch before the prompt's end (engine.md 11)
LARGE_BATCH: Final = 4096  # a cancelled prompt and all other requests wait for the batch (engine.md 7)


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # worth knowing
    WARN = "warn"  # costs tokens
    FAIL = "fail"  # Slotkeeper cannot work with this engine


class SaveSupport(StrEnum):
    """Whether the engine saves slots."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"  # not asked, or the engine requires a key


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding: the trap's name (T1..T9 of engine.md, or a word), the problem, and what to do."""

    trap: str
    severity: Severity
    what: str
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The answers that `examine` needs in addition to the traits."""

    props: dict[str, Any]
    slots_ok: bool
    metrics_ok: bool
    slot_save: SaveSupport


async def probe(client: EngineClient) -> Probe:
    """Ask the engine once.

    Raises EngineError (401 without the key, 503 while loading) and EngineGoneError.
    """
    props = await client.props()
    save = SaveSupport.UNKNOWN
    if not props.get("is_sleeping") and props.get("role") != "router":
        try:
            save = SaveSupport.YES if await client.saves_slots() else SaveSupport.NO
        except EngineError:
            save = SaveSupport.UNKNOWN
    return Probe(
        props=props,
        slots_ok=bool(props.get("endpoint_slots", False)),
        metrics_ok=bool(props.get("endpoint_metrics", False)),
        slot_save=save,
    )


def examine(
    traits: EngineTraits,
    flags: EngineFlags | None,
    props: Mapping[str, Any],
    *,
    slots_ok: bool,
    metrics_ok: bool,
    slot_save: SaveSupport,
    files: Iterable[Finding] | None = None,
    routed: bool = False,
    checkpoint_bytes: int = 0,
    free_bytes: int | None = None,
) -> list[Finding]:
    """Return all findings, the worst first; an OK if nothing needs to change.

    Args:
        traits: of the engine.
        flags: its command line, if that is known.
        props: its answer to GET /props.
        slots_ok: whether GET /slots is on.
        metrics_ok: whether GET /metrics is on.
        slot_save: whether it saves slots.
        files: the findings of a check of slot files; None if there was no check.
        routed: it is a model of a router or of llama-swap, whose process ends at each swap.
        checkpoint_bytes: the size of one checkpoint; 0 = unknown.
        free_bytes: memory that its machine has left; None = unknown.
    """
    room = Room.of(traits, checkpoint_bytes, free_bytes, routed=routed)
    found = [
        *about_routes(props, flags, slots_ok, metrics_ok),
        *(about_saving(slot_save) if files is None else files),
        *about_slots(traits, flags),
        *about_room(traits, flags, room),
        *about_checkpoints(traits, flags),
        *about_window(traits),
        *about_caches(traits, flags, room.advised.ram_cache_mib, routed=routed),
        *about_sleep(props, flags),
        *about_need(traits, flags),
    ]
    order = list(Severity)
    found.sort(key=lambda finding: -order.index(finding.severity))
    if all(finding.severity in {Severity.NOTE, Severity.OK} for finding in found):
        found.append(Finding(trap="flags", severity=Severity.OK, what="No flag needs to change."))
    return found


def about_routes(
    props: Mapping[str, Any],
    flags: EngineFlags | None,
    slots_ok: bool,
    metrics_ok: bool,
) -> Iterator[Finding]:
    if not slots_ok:
        what = "GET /slots is off: what a slot holds, and whether it is free again, cannot be checked (T1)."
        yield Finding(trap="slots", severity=Severity.FAIL, what=what, do="Add --slots.")
    if not metrics_ok:
        what = "GET /metrics is off: the engine's own counters cannot be compared with ours."
        yield Finding(trap="metrics", severity=Severity.NOTE, what=what, do="Add --metrics.")
    if not props.get("chat_template") or (flags and not flags.jinja):
        what = "No Jinja chat template: chats cannot be rendered, so requests use the least recent slot."
        yield Finding(trap="template", severity=Severity.WARN, what=what, do="Add --jinja.")
    if flags and (flags.api_keys or flags.api_key_file):
        what = (
            "The engine requires a key: without its own, Slotkeeper uses the last client's for control calls."
        )
        yield Finding(trap="key", severity=Severity.NOTE, what=what, do="Give Slotkeeper the key too.")


def about_saving(slot_save: SaveSupport) -> Iterator[Finding]:
    if slot_save is SaveSupport.NO:
        what = "Slots cannot be saved (501): without snapshots, nothing survives a restart or an eviction."
        yield Finding(trap="snapshots", severity=Severity.WARN, what=what, do="Add --slot-save-path DIR.")
    if slot_save is SaveSupport.UNKNOWN:
        what = "Whether slots can be saved is not known."
        yield Finding(trap="snapshots", severity=Severity.NOTE, what=what, do="Add --slot-save-path DIR.")


def about_slots(traits: EngineTraits, flags: EngineFlags | None) -> Iterator[Finding]:
    if traits.n_slots == 1:
        what = "One slot: every side request (a title, a summary) overwrites the conversation."
        yield Finding(trap="one-slot", severity=Severity.WARN, what=what, do=f"Add -np {SLOTS}.")
    yield from _about_wiped_slots(traits, flags)
    yield from about_pool(traits)
    if 0 < traits.n_ctx < SMALL_CONTEXT:
        what = f"{traits.n_ctx} tokens of context in each of {traits.n_slots} slots: too few for an agent."
        do = "Raise -c (it is for all slots together), if memory allows, or lower -np."
        yield Finding(trap="context", severity=Severity.WARN, what=what, do=do)
    if traits.n_batch > LARGE_BATCH:
        what = f"-b {traits.n_batch}: a cancelled prompt and all waiting requests wait for a whole batch."
        yield Finding(trap="batch", severity=Severity.NOTE, what=what, do="Try -b 1024.")


def _about_wiped_slots(traits: EngineTraits, flags: EngineFlags | None) -> Iterator[Finding]:
    if traits.unified and traits.idle_copy and traits.n_slots > 1:
        what = "All slots share one KV buffer and every task wipes the idle ones: pinned conversations"
        what += " are computed again in full each time."
        do = "Add -np N: without it, slots are automatic and share one buffer."
        if flags and flags.unified:
            do = "Remove --kv-unified, or add --no-cache-idle-slots."
        yield Finding(trap="T6", severity=Severity.FAIL, what=what, do=do)
    elif flags is None and traits.n_slots == AUTO_SLOTS:
        what = "Four slots: if this engine was started without -np they share one KV buffer and are wiped."
        yield Finding(trap="T6", severity=Severity.NOTE, what=what, do="Add -np N.")


def about_pool(traits: EngineTraits) -> Iterator[Finding]:
    if cells := cells_of(traits):
        what = f"{traits.n_slots} slots share {cells} cells of KV: the server alone fails all running answers"
        what += (
            " when they grow beyond that. Slotkeeper lets requests wait, and saves and empties idle slots."
        )
        do = (
            "Add -np N with --no-kv-unified: each slot then has -c / N tokens. Or raise -c, if memory allows."
        )
        yield Finding(trap="pool", severity=Severity.WARN, what=what, do=do)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of checkpoints and RAM cache: what the engine may take now, and what it should take."""

    caches: Caches  # with the two slots that doctor advises if there is one
    now: MemoryPlan
    most_mib: int  # of the RAM cache, as far as it is useful

    @classmethod
    def of(cls, traits: EngineTraits, checkpoint_bytes: int, free_bytes: int | None, *, routed: bool) -> Self:
        cache_mib = (traits.ram_bytes >> 20 or -1) if traits.ram_cache else 0
        return cls(
            caches=Caches(
                slots=max(traits.n_slots, SLOTS),
                checkpoint_bytes=0 if traits.cuttable else checkpoint_bytes,
                slot_bytes=traits.token_bytes * traits.n_ctx,
                free_bytes=free_bytes,
            ),
            now=MemoryPlan(MAX_CHECKPOINTS if traits.cuttable else traits.checkpoint_cap, cache_mib),
            most_mib=0 if routed else cache_mib or RAM_CACHE_MIB,
        )

    @property
    def few(self) -> bool:
        return self.now.checkpoints < min(FEW_CHECKPOINTS, self.caches.affordable_checkpoints)

    @property
    def advised(self) -> MemoryPlan:
        """What fits. The number of checkpoints stays if it is enough and fits."""
        keeps = self.caches.fits(self.now) and not self.few
        checkpoints = self.now.checkpoints if keeps else self.caches.affordable_checkpoints
        return MemoryPlan(checkpoints, self.caches.affordable_ram_cache(checkpoints, self.most_mib))

    @property
    def advice(self) -> str:
        """The flags to change, and that even these need too much if they do."""
        plan, now = self.advised, self.now
        less = now.ram_cache_mib < 0 or plan.ram_cache_mib < now.ram_cache_mib
        flags = [f"--ctx-checkpoints {plan.checkpoints}"] if plan.checkpoints != now.checkpoints else []
        flags += [f"--cache-ram {plan.ram_cache_mib}"] if less else []
        use = [f"Use {' and '.join(flags)}."] if flags else []
        return " ".join(use if self.caches.fits(plan) else [*use, TOO_LITTLE])


def about_room(traits: EngineTraits, flags: EngineFlags | None, room: Room) -> Iterator[Finding]:
    """Yield at most one finding, with one advice for the checkpoints and the RAM cache."""
    now, do = room.now, room.advice
    if now.checkpoints == 0:
        what = "No context checkpoints: with this model, every edit computes the whole prompt again."
        yield Finding(trap="checkpoints", severity=Severity.FAIL, what=what, do=do)
    elif not room.caches.fits(now):
        unknown = "" if flags else " Flags that were not read count as defaults."
        unknown += " A draft's state comes on top." if traits.speculative else ""
        what = f"Memory may not suffice: {room.caches.sentence(now)}{unknown} {TAKEN}"
        yield Finding(trap="room", severity=Severity.WARN, what=what, do=do)
    elif room.few:
        what = f"{now.checkpoints} context checkpoints per slot are used up after a few turns."
        what += f" {room.caches.sentence(room.advised)}" if room.caches.checkpoint_bytes else ""
        yield Finding(trap="checkpoints", severity=Severity.WARN, what=what, do=do)


def about_checkpoints(traits: EngineTraits, flags: EngineFlags | None) -> Iterator[Finding]:
    if traits.cuttable:
        return
    if traits.eager_thinning and traits.checkpoint_min_step > 0:
        unsure = traits.known("checkpoint_min_step") is Known.DEFAULT and not flags
        sure = " (unless it was started with -cms 0)" if unsure else ""
        what = f"This build drops checkpoints within {traits.checkpoint_min_step} tokens of each other at"
        what += f" every task{sure}: after two turns an edit falls back to the oldest one."
        yield Finding(trap="T7", severity=Severity.WARN, what=what, do="Add --checkpoint-min-step 0.")
    if not traits.eager_thinning and traits.checkpoint_min_step == 0:
        what = "With -cms 0 this build drops the oldest checkpoint first: that of the system prompt."
        yield Finding(trap="T7", severity=Severity.WARN, what=what, do="Remove --checkpoint-min-step 0.")
    if traits.n_ubatch > LARGE_UBATCH:
        what = f"-ub {traits.n_ubatch}: checkpoints are that far before the end of a prompt."
        yield Finding(trap="ubatch", severity=Severity.NOTE, what=what, do="Try -ub 512.")
    if not traits.user_start:
        what = "Where user messages begin in this template is not known: boundaries are learned from prompts."
        yield Finding(trap="template", severity=Severity.NOTE, what=what)


def about_window(traits: EngineTraits) -> Iterator[Finding]:
    if traits.memory is Memory.SWA and not traits.swa_full:
        what = f"A sliding window of {traits.n_swa} tokens: edits reach back only to a checkpoint"
        what += "." if traits.state_version else ", and older builds restore nothing from a slot file (T4)."
        do = "--swa-full, if memory allows: then any edit reaches back."
        yield Finding(trap="T4", severity=Severity.NOTE, what=what, do=do)
    if traits.memory is Memory.SWA and traits.swa_full:
        what = "--swa-full: a restored file holds only the window, so Slotkeeper never rolls back into it."
        yield Finding(trap="T9", severity=Severity.NOTE, what=what)
    if traits.memory is Memory.UNKNOWN:
        what = "The model's memory kind is not known here: it is treated as hybrid, the safe choice."
        do = "Run Slotkeeper where it can read the model's file."
        yield Finding(trap="memory", severity=Severity.NOTE, what=what, do=do)


def about_caches(
    traits: EngineTraits, flags: EngineFlags | None, ram_cache_mib: int, *, routed: bool = False
) -> Iterator[Finding]:
    """Yield findings of the RAM cache, of which this many MiB fit, and of drafts."""
    if routed and traits.ram_cache:
        what = "The RAM prompt cache is lost at every swap, and takes memory that other models need."
        yield Finding(trap="ram-cache", severity=Severity.NOTE, what=what, do="Add --cache-ram 0.")
    if not routed and not traits.ram_cache:
        what = "No RAM prompt cache: an overwritten prompt is lost unless Slotkeeper has saved it."
        do = f"Use --cache-ram {ram_cache_mib}." if ram_cache_mib else ""
        yield Finding(trap="ram-cache", severity=Severity.NOTE, what=what, do=do)
    if traits.ram_cache and traits.similarity > 0 and flags and flags.host not in {"127.0.0.1", "localhost"}:
        what = "Clients can bypass Slotkeeper: a pinned request to a busy slot corrupts its answer."
        yield Finding(trap="T1", severity=Severity.WARN, what=what, do="Let it listen on 127.0.0.1.")
    if traits.speculative:
        what = (
            "Speculative decoding: a slot file lacks the draft's state, so drafts are poor after a restore."
        )
        if traits.files_carry:
            what = "Speculative decoding: in a slot file, only the checkpoints hold the draft's state."
        yield Finding(trap="draft", severity=Severity.NOTE, what=what)


def about_sleep(props: Mapping[str, Any], flags: EngineFlags | None) -> Iterator[Finding]:
    if props.get("is_sleeping") or (flags and flags.sleep_idle_seconds >= 0):
        now = "The engine sleeps now.  " if props.get("is_sleeping") else ""
        what = f"{now}Sleep empties all slots, checkpoints and the RAM cache."
        yield Finding(trap="sleep", severity=Severity.WARN, what=what, do="Remove --sleep-idle-seconds.")


def about_need(traits: EngineTraits, flags: EngineFlags | None) -> Iterator[Finding]:
    """Yield whether a stock server without Slotkeeper would do for this engine."""
    do = "`slotkeeper docs when-you-need-it` has figures."
    if not traits.cuttable:
        what = (
            "This model can be cut only at a checkpoint: the server alone computes whole prompts again after"
        )
        what += " an edit before the last checkpoint, and after a restart. Slotkeeper is worth it."
    elif not traits.ram_cache:
        what = "Without a RAM cache, the server alone loses a conversation whenever another takes its slot."
    else:
        what = "A dense model and a RAM cache: for one client that only appends, the server alone is enough."
        what += f" {_room(traits, flags)}Slotkeeper is for several clients, restarts and edited prompts."
    yield Finding(trap="need", severity=Severity.NOTE, what=what, do=do)


def _room(traits: EngineTraits, flags: EngineFlags | None) -> str:
    """Return a sentence on how much the RAM cache holds, if that is known."""
    mib = flags.cache_ram if flags else RAM_CACHE_MIB
    if mib <= 0 or not traits.token_bytes:
        return ""
    default = "" if flags else " by default"
    return f"The cache holds{default} about {(mib << 20) // traits.token_bytes:,} tokens. "


# -- slot files ------------------------------------------------------------------------------------------


def about_files(reading: Reading, flags: EngineFlags | None) -> Iterator[Finding]:
    """Yield findings of a check of slot files. `flags`: those that name the files, too; else None."""
    if reading.no_files is not None:
        yield Finding(
            trap="snapshots", severity=Severity.FAIL, what=reading.no_files.what, do=reading.no_files.do
        )
        return
    traits = reading.traits
    adapters = f", LoRA adapters {traits.adapter_set}" if traits.adapters else ""
    kind = f"files of version {traits.state_version}, fingerprint {traits.fingerprint}{adapters}"
    what = f"Snapshots work: {kind}."
    yield Finding(trap="snapshots", severity=Severity.OK, what=what)
    yield from about_checkpoints_in_files(traits)
    yield from about_the_window(traits)
    if flags is None:
        yield about_unseen_flags(reading.voice)


def about_unseen_flags(voice: str) -> Finding:
    what = "Slotkeeper did not start it: its --rope-*, --yarn-*, --override-kv and control vectors are not"
    what += " visible, and it loads files made with other ones without an error."
    if voice:
        what += f" Its logprobs identify it (fingerprint {voice})."
        return Finding(trap="fingerprint", severity=Severity.NOTE, what=what)
    do = "Give another --slot-dir whenever you change one of these."
    return Finding(trap="fingerprint", severity=Severity.NOTE, what=what, do=do)


def about_checkpoints_in_files(traits: EngineTraits) -> Iterator[Finding]:
    if traits.cuttable:
        return
    if traits.files_carry:
        what = "Slot files carry the checkpoints: a restored slot can be cut where the live one could."
        yield Finding(trap="files", severity=Severity.OK, what=what)
    elif traits.files_carry is None:
        what = (
            "Whether slot files carry checkpoints is not known: a slot was in use. The first save shows it."
        )
        yield Finding(trap="files", severity=Severity.NOTE, what=what)
    elif traits.checkpoint_cap == 0 or traits.state_version > 2:
        what = "Slot files carry no checkpoints, though this version of them could."
        do = "If --ctx-checkpoints is 0, use more."
        yield Finding(trap="files", severity=Severity.NOTE, what=what, do=do)
    else:
        what = "Slot files carry no checkpoints: a restored state can be extended, but not cut."
        do = "A newer llama-server (such as b11549) keeps them in the file."
        yield Finding(trap="files", severity=Severity.NOTE, what=what, do=do)


def about_the_window(traits: EngineTraits) -> Iterator[Finding]:
    if traits.memory is Memory.SWA and not traits.swa_full and traits.n_swa and not traits.files_carry:
        what = "Such a file is useless if restored unchanged (T4); Slotkeeper can repair its window."
        yield Finding(trap="T4", severity=Severity.NOTE, what=what)

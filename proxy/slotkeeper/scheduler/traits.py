"""What kind of engine stands behind us: the facts that decide what a slot can reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self

from slotkeeper.scheduler.structure import UNKNOWN, Markers


class Memory(StrEnum):
    """How a sequence's state can be cut."""

    DENSE = "dense"  # a plain KV cache: at any token
    SWA = "swa"  # sliding window: near the end, else at a checkpoint
    HYBRID = "hybrid"  # attention and recurrent layers: only at the end or at a checkpoint
    RECURRENT = "recurrent"  # recurrent layers only: the same
    UNKNOWN = "unknown"  # not read: treated as hybrid, the careful choice


class Known(StrEnum):
    """How the value of one of an engine's flags is known."""

    DEFAULT = "default"  # not known: what a stock llama-server does
    FLAGS = "flags"  # from its command line
    CANARY = "canary"  # tried out on an engine that was not used yet
    BATCHES = "batches"  # by where it cut a prefill of ours into batches
    KEPT = "kept"  # a checkpoint was used that another value would have thrown away
    MISSED = "missed"  # a checkpoint was gone that this value explains
    UNFOUND = "unfound"  # the RAM cache did not hold what it would otherwise have held
    WIPED = "wiped"  # idle slots were emptied by a task in another


FLAGS: Final[Mapping[str, str]] = MappingProxyType(  # fields that a flag decides, and /props does not show
    {
        "swa_full": "--swa-full",
        "n_batch": "--batch-size",
        "n_ubatch": "--ubatch-size",
        "checkpoint_cap": "--ctx-checkpoints",
        "checkpoint_min_step": "--checkpoint-min-step",
        "similarity": "--slot-prompt-similarity",
        "ram_cache": "--cache-ram",
        "idle_copy": "--cache-idle-slots",
        "unified": "--kv-unified",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One flag."""

    flag: str
    value: float | bool  # of --cache-ram and the like: whether it is on
    how: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """The facts of one engine. Defaults are those of a stock llama-server (engine.md 0, 11)."""

    n_slots: int = 1
    n_ctx: int = 0  # tokens per slot; 0 = not known
    memory: Memory = Memory.UNKNOWN
    n_swa: int = 0  # tokens of the sliding window
    swa_full: bool = False  # --swa-full: SWA behaves like dense
    n_batch: int = 2048
    n_ubatch: int = 512
    checkpoint_cap: int = 32  # --ctx-checkpoints
    checkpoint_min_step: int = 8192  # --checkpoint-min-step
    eager_thinning: bool = True  # b10434 thins checkpoints at every task, later builds when full (T7)
    similarity: float = 0.1  # --slot-prompt-similarity
    ram_cache: bool = True  # --cache-ram is not 0
    idle_copy: bool = True  # --cache-idle-slots
    unified: bool = False  # --kv-unified: with idle_copy, a task wipes every other idle slot (T6)
    speculative: bool = False
    user_start: tuple[tuple[int, ...], ...] = ()  # token sequences that open a user message
    markers: Markers = UNKNOWN  # what opens messages in its chat template
    slot_files: bool = False  # slots can be saved to a folder that we read and write as well
    state_version: int = 0  # of its slot files, which is what they fit into; 0 = none was seen
    files_carry: bool | None = None  # whether its slot files carry checkpoints; None = not seen yet
    token_bytes: int = 0  # of a token in a slot file, by the model's header; 0 = not known
    fingerprint: str = ""  # of all that a slot file must fit; empty = not known, so no file is offered
    # Of `FLAGS`, how those are known that are not taken to be the defaults.
    knowledge: Mapping[str, Known] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def cuttable(self) -> bool:
        """Whether a slot can be rolled back to any token."""
        return self.memory is Memory.DENSE or (self.memory is Memory.SWA and self.swa_full)

    @property
    def files_only_extend(self) -> bool:
        """Whether a slot file serves only prompts that extend it: it carries no checkpoint to cut it at."""
        return not self.cuttable and self.files_carry is False

    @property
    def snapshots(self) -> bool:
        """Whether states can be kept in files and offered again."""
        return self.slot_files and self.state_version > 0 and bool(self.fingerprint)

    def known(self, name: str) -> Known:
        """How this field's value is known."""
        return self.knowledge.get(name, Known.DEFAULT)

    def told(self) -> tuple[Told, ...]:
        """Every flag that decides something, as far as it is known."""
        return tuple(
            Told(flag=flag, value=getattr(self, name), how=self.known(name)) for name, flag in FLAGS.items()
        )

    @property
    def guessed(self) -> bool:
        """Whether the flags that decide about checkpoints were not read: evidence may correct them."""
        return self.known("checkpoint_cap") is not Known.FLAGS

    def learned(self, how: Known, **values: Any) -> Self:
        """The traits with these flags known. What was read from the command line stays."""
        open_to = {
            name: value
            for name, value in values.items()
            if how is Known.FLAGS or self.known(name) is not Known.FLAGS
        }
        return self.corrected(how, **open_to)

    def corrected(self, how: Known, **values: Any) -> Self:
        """The traits with these values, whatever was believed before."""
        knowledge = MappingProxyType({**self.knowledge, **dict.fromkeys(values, how)})
        return replace(self, **values, knowledge=knowledge)

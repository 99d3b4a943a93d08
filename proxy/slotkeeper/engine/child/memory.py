"""The memory of the machine that an engine needs: how large a checkpoint is, and how many fit.

A checkpoint is a copy of what a slot cannot compute back: the recurrent state, or the sliding window's keys
and values. It stays in the machine's memory, also if the model is on a GPU. That of Qwen3.6-27B has 150 MiB,
so 64 of them in each of two slots need 19 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slotkeeper.engine.flags import EngineFlags
from slotkeeper.vocab.gguf import GgufHeader

# Bytes of 32 values, from ggml's block sizes; a type that is not listed counts as f16.
BLOCK_BYTES: Final = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18,
    "iq4_nl": 18,
}  # fmt: skip
CELL_BYTES: Final = 28  # bytes of a token beside keys and values: its cell (at most 24) and its id (4)
STATE_VALUE_BYTES: Final = 4  # a recurrent state is f32, whatever the KV cache's type
MAX_CHECKPOINTS: Final = 64  # measured best on agent-like work; 32 are filled in eleven turns (engine.md 11)
CHECKPOINTS_SHARE: Final = 0.25  # of the free memory; other programs and the RAM cache need the rest
RAM_CACHE_SHARE: Final = 0.5  # of it, at most; the copy of a slot comes on top

MEMORY_INFO: Final = Path("/proc/meminfo")
GROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")  # of a container
GROUP_USED: Final = Path("/sys/fs/cgroup/memory.current")


def state_bytes(header: GgufHeader, n_ctx: int, flags: EngineFlags | None = None) -> int:
    """Return an upper bound in bytes of a full slot's keys and values; 0 if the header lacks their widths.

    Sliding layers count as full attention; recurrent states are not counted.
    """
    kinds = (flags.cache_type_k, flags.cache_type_v) if flags else ("f16", "f16")
    key, value = (BLOCK_BYTES.get(kind, BLOCK_BYTES["f16"]) for kind in kinds)
    wide = header.values.get(f"{header.architecture}.embedding_length")
    each = wide // header.head_count if isinstance(wide, int) and header.head_count else 0
    heads = sum(kv_heads(header))
    width = number(header, "attention.key_length", each) * key
    width += number(header, "attention.value_length", each) * value
    return (heads * width // 32 + CELL_BYTES) * n_ctx if heads and width else 0


def token_bytes(header: GgufHeader, flags: EngineFlags | None = None) -> int:
    """Return an upper bound of the bytes that each further token adds to a state: at least its cell."""
    return max(CELL_BYTES, state_bytes(header, 1, flags))


def checkpoint_bytes(header: GgufHeader, flags: EngineFlags | None = None) -> int:
    """Return the bytes of one checkpoint, at most; 0 if the model needs none or its size is not known.

    With a sliding window all layers count, as headers seldom tell which of them slide.
    """
    if header.sliding_window:
        full = flags is not None and flags.swa_full
        return 0 if full else state_bytes(header, header.sliding_window, flags)
    inner, state = number(header, "ssm.inner_size", 0), number(header, "ssm.state_size", 0)
    mixed = inner + 2 * number(header, "ssm.group_count", 0) * state
    values = state * inner + max(0, number(header, "ssm.conv_kernel", 0) - 1) * mixed
    return STATE_VALUE_BYTES * values * _recurrent_layers(header) if header.has_state else 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine may keep beside its model and its KV cache."""

    checkpoints: int  # of each slot
    ram_cache_mib: int  # as --cache-ram: 0 is off, negative has no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The sizes of checkpoints and of a slot in the RAM cache, and the memory that is left for them."""

    slots: int
    checkpoint_bytes: int  # of one; 0: the model needs none, or unknown
    slot_bytes: int  # a full slot's keys and values; 0: unknown
    free_bytes: int | None  # negative if model and KV cache do not fit; None: unknown

    @property
    def affordable_checkpoints(self) -> int:
        """How many checkpoints each slot may keep: at least one, also if that does not fit."""
        if self.free_bytes is None or not self.checkpoint_bytes:
            return MAX_CHECKPOINTS
        room = int(self.free_bytes * CHECKPOINTS_SHARE)
        return max(1, min(MAX_CHECKPOINTS, room // (self.checkpoint_bytes * self.slots)))

    def affordable_ram_cache(self, checkpoints: int, limit_mib: int) -> int:
        """Return the MiB, up to a limit, of a RAM cache that fits beside so many checkpoints in each slot."""
        if self.free_bytes is None:
            return limit_mib
        entry = self._entry_bytes(checkpoints)
        spare = self.free_bytes - self.need(MemoryPlan(checkpoints, 0)) - entry
        most = int(min(self.free_bytes * RAM_CACHE_SHARE, spare)) >> 20 if spare >= entry else 0
        return most if limit_mib < 0 else min(most, limit_mib)

    def need(self, plan: MemoryPlan) -> float:
        """Return the bytes that checkpoints and RAM cache take at most; infinite without a limit.

        The cache copies a slot with its checkpoints before it drops older entries, and keeps the newest
        also if that alone exceeds the limit (engine.md 4).
        """
        held = plan.checkpoints * self.slots * self.checkpoint_bytes
        if plan.ram_cache_mib <= 0:
            return math.inf if plan.ram_cache_mib else held
        entry = self._entry_bytes(plan.checkpoints)
        return held + max(plan.ram_cache_mib << 20, entry) + entry

    def fits(self, plan: MemoryPlan) -> bool:
        """Whether both fit; true if the free memory is unknown."""
        return self.free_bytes is None or self.need(plan) <= self.free_bytes

    def sentence(self, plan: MemoryPlan) -> str:
        """Return how much memory both need, and how much is free if that is known."""
        if self.free_bytes is not None and self.free_bytes < 0:
            return f"The model and its KV cache alone need {_gib(-self.free_bytes)} more than is free."
        free = "" if self.free_bytes is None else f"; {_gib(self.free_bytes)} are free"
        need = "all memory" if plan.ram_cache_mib < 0 else _gib(self.need(plan))
        return f"{' and '.join(self._named(plan))} need up to {need}{free}."

    def _entry_bytes(self, checkpoints: int) -> int:
        """Return the bytes of a full slot's copy; its recurrent state is as large as a checkpoint."""
        return self.slot_bytes + (checkpoints + 1) * self.checkpoint_bytes

    def _named(self, plan: MemoryPlan) -> Iterator[str]:
        held = self.need(MemoryPlan(plan.checkpoints, 0))
        if self.checkpoint_bytes:
            each = f"{plan.checkpoints} checkpoints of {self.checkpoint_bytes / (1 << 20):.1f} MiB"
            yield f"{each} in each of {self.slots} slots ({_gib(held)})"
        if plan.ram_cache_mib > 0:
            full = _gib(self.need(plan) - held)
            yield f"a RAM cache of {plan.ram_cache_mib} MiB with a full slot's copy ({full})"
        elif plan.ram_cache_mib:
            yield "a RAM cache without a limit"


def caches_beside(
    header: GgufHeader,
    flags: EngineFlags,
    *,
    model_bytes: int,
    slots: int,
    cells: int,
    free_bytes: int | None,
) -> Caches:
    """Return the sizes for a model that is not loaded yet, and what it leaves of the free memory.

    Its weights and its KV cache, with recurrent states, count in full, also where a GPU with memory of its
    own will hold them. The engine's other buffers are not known.

    Args:
        header: of the model's file.
        flags: the user's own; they tell the types of the KV cache.
        model_bytes: the size of that file.
        slots: their number.
        cells: tokens of context of all slots together.
        free_bytes: see `free_memory`; None = unknown.
    """
    full, each = state_bytes(header, cells, flags), checkpoint_bytes(header, flags)
    left = None if free_bytes is None else free_bytes - model_bytes - full - slots * each
    slot_bytes = full if flags.unified else full // slots
    return Caches(slots=slots, checkpoint_bytes=each, slot_bytes=slot_bytes, free_bytes=left)


def _gib(bytes_: float) -> str:
    return f"{bytes_ / (1 << 30):.1f} GiB"


def free_memory() -> int | None:
    """Return the bytes that this machine, or this container, has left; None if it does not tell."""
    left = [bytes_ for bytes_ in (_free_of_machine(), _free_of_group()) if bytes_ is not None]
    return min(left, default=None)


def _free_of_machine() -> int | None:
    """Return what the machine has left. Mapped files count as used: engines map weights, and need them."""
    with suppress(OSError, ValueError, IndexError, KeyError):
        fields = (line.partition(":") for line in MEMORY_INFO.read_text("ascii").splitlines())
        kib = {name: int(value.split()[0]) for name, _, value in fields}
        return max(0, kib["MemAvailable"] - kib.get("Mapped", 0)) << 10
    return None


def _free_of_group() -> int | None:
    """Return what the control group has left. Files that the kernel keeps in memory count as used."""
    with suppress(OSError, ValueError):  # no group, or "max"
        return max(0, int(GROUP_LIMIT.read_text("ascii")) - int(GROUP_USED.read_text("ascii")))
    return None


def kv_heads(header: GgufHeader) -> Sequence[int]:
    """Return the number of KV heads of each attention layer."""
    given = header.values.get(f"{header.architecture}.attention.head_count_kv", header.head_count)
    if isinstance(given, tuple):
        return [count for count in given if isinstance(count, int)]
    attending = _layers(header) // (header.full_attention_interval or 1)
    return [given] * attending if isinstance(given, int) else []


def number(header: GgufHeader, key: str, otherwise: int) -> int:
    found = header.values.get(f"{header.architecture}.{key}", otherwise)
    return found if isinstance(found, int) else otherwise


def _layers(header: GgufHeader) -> int:
    return header.block_count - header.nextn_predict_layers


def _recurrent_layers(header: GgufHeader) -> int:
    """Return how many layers have a recurrent state: those without attention, or all (Falcon-H1)."""
    layers = _layers(header)
    if interval := header.full_attention_interval:
        return layers - layers // interval
    return sum(not heads for heads in kv_heads(header)) or layers

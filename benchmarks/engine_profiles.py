"""Engines of real proportions for the simulator, by figures from public reports.

Prefill is in tokens per second of a ubatch of 512 at the beginning of a prompt, decode of one short answer.
Where a report tells speeds at several depths, `deeper` is fitted to them; a report of whole prompts of
n tokens tells the speed at the depth n/2.

* Bytes of a token: layers with a KV cache x KV heads x head size x 2 (K and V) x 2 (16 bits).
* Weights: XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md, "Total VRAM Requirements" (in GiB), unless
  another source is named.
* Memory of the machine: where the report does not tell it, the least that such machines are sold with.
* Files: nibor1896/Crow#68, 33.6 MiB saved in 31 ms and restored in 22 ms on an SSD.
* Checkpoints: ggml-org/llama.cpp#22929, 149.626 MiB restored in 13 ms (its log of May 22, task 15927).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import orjson

from benchmarks.simulator.timed_engine import EngineRates, traits_of
from slotkeeper.scheduler.slots.engine_model import FLAGS, EngineTraits, Known, Memory
from slotkeeper.scheduler.snapshots.budgets import GIB

KIB: Final = 1024
MIB: Final = 1024 * KIB
RAM_CACHE_MIB: Final = 8192  # a stock engine's --cache-ram
DISK: Final = EngineRates(save=33.6 * MIB / 0.031, restore=33.6 * MIB / 0.022, copy=149.626 * MIB / 0.013)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """An engine of one model on one machine."""

    name: str
    machine: str
    model: str
    source: str  # of the speeds: a repository and its issue or file
    rates: EngineRates
    memory: Memory = Memory.DENSE
    window: int = 0  # tokens of a sliding window
    weights_bytes: int = 0  # 0: unknown, as of a measured engine; then so are the machine's bytes
    machine_bytes: int = 0  # of the machine's memory
    cards_bytes: int = 0  # of its cards' own memory; 0: the model is in the machine's
    ram_cache_mib: int = RAM_CACHE_MIB  # --cache-ram, which its machine must hold

    def traits(self, slots: int) -> EngineTraits:
        """Return the traits of a stock engine with a slot folder, whose flags can be read."""
        traits = traits_of(self.memory, slots, self.rates, files=True, ram_cache=True)
        known = dict.fromkeys(FLAGS, Known.FLAGS)
        return replace(traits, n_swa=self.window, ram_bytes=self.ram_cache_mib * MIB, knowledge=known)

    def spare_bytes(self, slots: int, slot_tokens: int) -> int:
        """Return the bytes left, of the cards or of the machine, when slots, checkpoints and caches are full.

        Weights and slots are in the cards, if there are any; most checkpoints and the RAM cache never are.
        """
        model = self.weights_bytes + slots * self.rates.state_bytes(slot_tokens)
        checkpoints = slots * self.traits(slots).checkpoint_cap * self.rates.checkpoint_bytes
        left = self.machine_bytes - checkpoints - self.ram_cache_mib * MIB
        return min(self.cards_bytes - model, left) if self.cards_bytes else left - model


def read_profile(path: Path) -> EngineProfile:
    """Read what `slotkeeper doctor --measure --json` has printed. What it did not measure is as above."""
    found = orjson.loads(path.read_bytes())
    return EngineProfile(
        name=found["name"],
        machine="measured",
        model=found["name"],
        source=f"{path.name}, {found['build']}",
        memory=Memory(found["memory"]),
        window=found["window"],
        rates=replace(DISK, **found["rates"]),
    )


PROFILES: Final = (
    EngineProfile(
        name="apu-27b",
        machine="Ryzen AI Max 395",
        model="27B, hybrid (Qwen3.6-27B Q4_K_M)",
        # The stock engine beside which botAGI measured that pull request (comment of 2026-07-16, current ROCm
        # build with flash attention): 11.4 to 11.8 tokens/s, and 202 over a prompt of 8,000 tokens. The pull
        # request itself has 58.8, of an older build. 202 is the speed in the middle, at 4,000 tokens: 16 of
        # 64 layers have KV, 24 heads of 256 (pegainfer-project/pegainfer#510), so that at the same operations
        # per second a token there is 3 % dearer than at the beginning: 208, or 4.8 ms a token. The log in
        # ggml-org/llama.cpp#22746 has 2.2 ms (458 tokens/s) for this model, but with 29.6 tokens/s of answers
        # it is of a faster machine. Memory: 128 GB, of which that system has 125 GB for programs
        # (Avarok-Cybersecurity/atlas#354). Weights: 27.3e9 of 4.9 bits.
        source="Avarok-Cybersecurity/atlas#230",
        memory=Memory.HYBRID,
        weights_bytes=int(27.3e9 * 4.9 / 8),
        machine_bytes=int(125e9),
        rates=replace(
            DISK,
            prefill=208.0,
            decode=11.6,
            deeper=3.6e-8,
            token_bytes=64 * KIB,
            checkpoint_bytes=int(149.626 * MIB),
        ),
    ),
    EngineProfile(
        name="apu-120b-moe",
        machine="Ryzen AI Max 395",
        model="120B, MoE, sliding window (gpt-oss-120b MXFP4)",
        # pp2048 at depths 0, 4096, 8192, 16384: 998, 827, 704, 507; tg32 47.4. 18 of 36 layers have a window
        # of 128 tokens. Weights: the file in ggml-org/llama.cpp#15253.
        source="lhl/strix-halo-testing#33",
        memory=Memory.SWA,
        window=128,
        weights_bytes=int(59.02 * GIB),
        machine_bytes=int(125e9),
        rates=replace(
            DISK,
            prefill=1062.0,
            decode=47.4,
            deeper=5.9e-8,
            token_bytes=36 * KIB,
            checkpoint_bytes=128 * 36 * KIB,
        ),
    ),
    EngineProfile(
        name="card-14b",
        machine="one RTX 3090",
        model="14B, dense (speeds of 13B Q4_0)",  # KV of 40 layers x 8 heads x 128
        # `deeper`: that of 8B Q4_K_M there, pp512 4030 and pp8192 2527, x 40 x 5120 / (32 x 4096).
        source="XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md",
        weights_bytes=int(7.24 * GIB),
        machine_bytes=32 * GIB,
        cards_bytes=24 * GIB,
        rates=replace(DISK, prefill=1634.0, decode=75.0, deeper=6.0e-8, token_bytes=160 * KIB),
    ),
    EngineProfile(
        name="card-32b",
        machine="one RTX 3090",
        model="32B, dense (speeds of 30B Q4_0)",  # KV of 64 layers x 8 heads x 128
        source="XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md",  # `deeper` as above, x 64 x 5120
        weights_bytes=int(17.84 * GIB),
        machine_bytes=32 * GIB,
        cards_bytes=24 * GIB,
        rates=replace(DISK, prefill=773.0, decode=33.7, deeper=9.6e-8, token_bytes=256 * KIB),
    ),
    EngineProfile(
        name="cards-70b",
        machine="two RTX 3090",
        model="70B, dense (70B Q4_K_M)",
        # pp1024 394, pp8192 339, tg512 16.6
        source="XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md",
        weights_bytes=int(39.59 * GIB),
        machine_bytes=64 * GIB,
        cards_bytes=48 * GIB,
        rates=replace(DISK, prefill=403.0, decode=16.6, deeper=1.15e-7, token_bytes=320 * KIB),
    ),
    EngineProfile(
        name="h100-70b",
        machine="H100 PCIe",
        model="70B, dense (70B Q4_0)",
        # `deeper`: that of 70B Q4_K_M on two RTX 4090, which are as fast: pp1024 905, pp8192 723.
        source="XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md",
        weights_bytes=int(36.37 * GIB),
        machine_bytes=128 * GIB,
        cards_bytes=80 * GIB,
        rates=replace(DISK, prefill=856.0, decode=25.9, deeper=7.8e-8, token_bytes=320 * KIB),
    ),
    EngineProfile(
        name="h200-8b",
        machine="H200, Vulkan",
        model="8B, dense (16 bits)",
        # b10434, random weights, KV of 36 layers x 8 heads x 128: prefills of 500 to 2,600 tokens at 6,600 to
        # 9,300 tokens/s, 6.75 ms a token; 740 MB copied to the RAM cache in 0.64 s and saved in 1.39 s. The
        # time to restore a file was not measured. Weights: 8.2e9 of 16 bits.
        source="our own run",
        weights_bytes=int(8.2e9 * 2),
        machine_bytes=128 * GIB,
        cards_bytes=139 * GIB,
        rates=replace(
            DISK, prefill=8200.0, decode=148.0, deeper=0.0, token_bytes=144 * KIB, save=5.3e8, copy=1.15e9
        ),
    ),
    EngineProfile(
        name="cpu-8b",
        machine="Core i9-13900K, DDR5-6400, no GPU",
        model="8B, dense (speeds of 7B Q4_0)",  # KV of 32 layers x 8 heads x 128
        # pp512 55.2, 18.3 tokens/s; `deeper`: stock llama.cpp on a 7950X in ikawrakow/ik_llama.cpp#518, 28.04
        # at the beginning and 26.03 at 2,048 tokens.
        source="ggml-org/llama.cpp#34",
        weights_bytes=int(3.82 * GIB),
        machine_bytes=32 * GIB,
        rates=replace(DISK, prefill=55.2, decode=18.3, deeper=1.3e-6, token_bytes=128 * KIB),
    ),
)

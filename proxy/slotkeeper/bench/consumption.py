"""What a run of `slotkeeper bench` consumes: memory, processor time, bytes written, energy.

A machine tells some of it or nothing: None is "unknown" everywhere. Processes are read from Linux's /proc.
Energy is read from the processor's counters (RAPL, which root may read) and from graphics cards
(`nvidia-smi`, `rocm-smi`), whose power is looked at twice a second. It is that of the whole machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import orjson

from slotkeeper.runtime.tasks import Tasks

Amount = TypeVar("Amount", int, float)
LOOK_SECONDS: Final = 0.5  # between two looks at the power of graphics cards
ANSWER_SECONDS: Final = 5.0  # for a program that tells it
RAPL: Final = Path("/sys/class/powercap")
NVIDIA: Final = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
ROCM: Final = ("rocm-smi", "--showpower", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What one leg, or several together, have consumed. None: unknown."""

    engine_bytes: int | None = None  # the most memory that the engine had
    sidecar_bytes: int | None = None
    sidecar_seconds: float | None = None  # processor time
    written_bytes: int | None = None  # to disks, by both
    watt_seconds: float | None = None

    @classmethod
    def together(cls, those: Iterable[Used]) -> Used:
        """Return the largest memory, and the sum of everything else, where all of them are known."""
        found = list(those)
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            known = [value for used in found if (value := getattr(used, name)) is not None]
            add: Callable[[list[Any]], Any] = max if name in {"engine_bytes", "sidecar_bytes"} else sum
            values[name] = add(known) if known and len(known) == len(found) else None
        return cls(**values)

    def shown(self) -> dict[str, Any]:
        return asdict(self)


class Meter:
    """Measures what an engine and a sidecar consume while a block runs. Use as an async context manager.

    A sidecar counts with the processes that it has at the end of the block.
    """

    def __init__(self, *, engine: int | None, sidecar: int | None) -> None:
        """Take the numbers of their processes; None: it runs elsewhere, or there is none."""
        self.used = Used()  # after the block
        self._engine, self._sidecar = engine, sidecar
        self._written: dict[int, int | None] = {}  # by process, before the block
        self._seconds: dict[int, float | None] = {}
        self._energy = Energy()

    async def __aenter__(self) -> Self:
        sidecar = family(self._sidecar)
        self._written = {pid: written_bytes(pid) for pid in self._with_engine(sidecar)}
        self._seconds = {pid: processor_seconds(pid) for pid in sidecar}
        await self._energy.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sidecar = family(self._sidecar)
        both = self._with_engine(sidecar)
        written = _summed(_since(written_bytes(pid), self._written.get(pid, 0)) for pid in both)
        self.used = Used(
            engine_bytes=peak_memory_bytes(self._engine),
            sidecar_bytes=_summed(map(peak_memory_bytes, sidecar)),
            sidecar_seconds=_summed(
                _since(processor_seconds(pid), self._seconds.get(pid, 0.0)) for pid in sidecar
            ),
            written_bytes=written if self._engine else None,
            watt_seconds=await self._energy.stop(),
        )

    def _with_engine(self, sidecar: list[int]) -> list[int]:
        return sidecar if self._engine is None else [self._engine, *sidecar]


def _since(now: Amount | None, before: Amount | None) -> Amount | None:
    return None if now is None or before is None else now - before


def _summed(amounts: Iterable[Amount | None]) -> Amount | None:
    """Return the sum; None if there is none, or one is unknown."""
    found = list(amounts)
    known = [amount for amount in found if amount is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(found) else None


# -- processes -------------------------------------------------------------------------------------------


def family(pid: int | None) -> list[int]:
    """Return a process and all that it has started, itself or by another, as far as they still run."""
    if pid is None:
        return []
    found = [pid]
    for each in found:  # it grows meanwhile
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def peak_memory_bytes(pid: int | None) -> int | None:
    """Return the most memory that a process has had so far. psutil does not tell it on Linux."""
    return _number(pid, "status", "VmHWM:", 1024)


def written_bytes(pid: int) -> int | None:
    """Return the bytes that a process has written to disks so far."""
    return _number(pid, "io", "write_bytes:", 1)


def processor_seconds(pid: int | None) -> float | None:
    """Return the seconds that all threads of a process have run, also those that ended; None: unknown.

    By its CPU clock (Linux): /proc counts either in hundredths, or only the threads that still run.
    """
    clock = ctypes.c_int()
    with suppress(AttributeError, OSError):
        if pid is not None and ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) == 0:
            return time.clock_gettime(clock.value)
    return None


def _number(pid: int | None, file: str, name: str, unit: int) -> int | None:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/{file}").read_text("ascii", "replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * unit
    return None


# -- energy ----------------------------------------------------------------------------------------------


class Energy:
    """Measures the energy of processor and graphics cards from `start` to `stop`, as far as they tell."""

    def __init__(self) -> None:
        self._packages: dict[Path, int] = {}  # microjoules when it began
        self._cards: float | None = None  # watt-seconds so far
        self._looking = Tasks(lambda _: None)  # a card that tells nothing more is unknown

    async def start(self) -> None:
        self._packages = {file: joules for file in _packages() if (joules := _count(file)) is not None}
        program = next((words for words in (NVIDIA, ROCM) if shutil.which(words[0])), None)
        if program:
            self._looking.start(self._look(program))

    async def stop(self) -> float | None:
        """Return the watt-seconds; None if nothing tells them."""
        await self._looking.close()
        found = [] if self._cards is None else [self._cards]
        for file, before in self._packages.items():
            now = _count(file)
            if now is not None:
                wraps = _count(file.with_name("max_energy_range_uj")) or 0
                found.append((now - before if now >= before else now - before + wraps) / 1e6)
        return sum(found) if found else None

    async def _look(self, program: Sequence[str]) -> None:
        """Sum up the power of all cards over time."""
        last = time.monotonic()
        while (watts := await _watts(program)) is not None:
            now = time.monotonic()
            self._cards, last = (self._cards or 0.0) + watts * (now - last), now
            await asyncio.sleep(LOOK_SECONDS)
        self._cards = None


def _packages() -> list[Path]:
    """Return the counters of whole processors, without those of their parts (intel-rapl:0:0)."""
    return [path / "energy_uj" for path in sorted(RAPL.glob("*-rapl:*")) if path.name.count(":") == 1]


def _count(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None


async def _watts(program: Sequence[str]) -> float | None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            asked = await asyncio.create_subprocess_exec(
                *program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            said, _ = await asked.communicate()
    except (OSError, TimeoutError):
        return None
    return watts_in(said) if asked.returncode == 0 else None


def watts_in(said: bytes) -> float | None:
    """Return the power of all cards, as nvidia-smi or rocm-smi prints it; None if it names none."""
    with suppress(orjson.JSONDecodeError, AttributeError, ValueError):
        cards = orjson.loads(said).values()
        found = [float(value) for card in cards for name, value in card.items() if "Power (W)" in name]
        return sum(found) if found else None
    with suppress(ValueError):
        return sum(float(line) for line in said.split()) if said.split() else None
    return None

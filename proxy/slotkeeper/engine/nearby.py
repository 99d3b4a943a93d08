"""The engines of this machine, for `--upstream auto`: from running processes (Linux) and from usual ports.

A process shows its host and port on its command line, also if another program started it at a random port.
Not used are engines that something else fronts (a router, llama-swap, a sidecar), that only embed or rank
texts, and Ollama's with a placeholder for a chat template. Looking sends a few GETs to 127.0.0.1, and wakes
no sleeping engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.flags import LIBRARY, PROC, EngineFlags, flags_of, local, starts, texts
from slotkeeper.engine.managers import MANAGERS, OLLAMA, Manager, Recognised, manager_of, recognise

LOOK_SECONDS: Final = 2.0  # an address that is slower to answer is left out
# Our pages' port of an engine first: at 8080 a sidecar may be in front of it. 9931: llama.cpp's next default
# (ggml-org/llama.cpp pull request 26508).
ENGINE_PORTS: Final = (8081, 9931, 8080)
PORTS: Final = (*ENGINE_PORTS, *(manager.port for manager in MANAGERS))
FRONTS: Final = frozenset({"llama-swap", "slotkeeper"})  # what they start is used through them
PROGRAM_WORDS: Final = 3  # python -m slotkeeper
ONLY_TEXTS: Final = frozenset({"--embedding", "--embeddings", "--rerank", "--reranking"})
USABLE: Final = frozenset({Health.OK, Health.LOADING, Health.SLEEPING, Health.ROUTER, Health.SWAPPER})
UNTOLD: Final = frozenset({None, "", "?"})  # no marker: not asked, hidden without a key, not in the answer


class Use(StrEnum):
    """Whether what was found at an address can be the upstream, or why not."""

    YES = "yes"
    MANAGER = "manager"  # no llama-server: a program that starts one
    FRONTED = "fronted"  # a router, llama-swap or a sidecar is in front of it
    NO_CHAT = "no_chat"  # it only embeds or ranks texts
    PLACEHOLDER = "placeholder"  # its chat template is not the model's
    SAME = "same"  # the same engine as at another address
    SILENT = "silent"  # nothing of use answers there


SEE: Final = "See `slotkeeper docs managers`."
NOT_USED: Final = {
    Use.MANAGER: "it has no routes for slots",
    Use.FRONTED: "another program is in front of it; name that one by --upstream",
    Use.NO_CHAT: "it only embeds or ranks texts",
    Use.PLACEHOLDER: f"its chat template is a placeholder; {OLLAMA.do}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearby:
    """What was found at one address."""

    base: str
    use: Use = Use.YES
    manager: Manager | None = None  # what answers there, or has started the engine there
    marker: str | None = None  # of the engine's process; equal ones are one engine
    said: str = ""  # of a manager: what it is and what to do

    @property
    def sentence(self) -> str:
        """Return it in words, for a list."""
        return f"{self.base} (started by {self.manager.name})" if self.manager else self.base


class NotChosenError(Exception):
    """`--upstream auto` found no engine, or several; the message says what to do."""


def processes(proc: Path = PROC) -> Iterator[Nearby]:
    """Yield the engines whose command lines can be read; none where there is no /proc."""
    for process in sorted(proc.iterdir()) if proc.is_dir() else ():
        if not process.name.isdigit():
            continue
        try:
            words = texts(process / "cmdline")
        except OSError:  # it has ended
            continue
        if not _is_engine(words) or (flags := flags_of(process, whole=False)) is None:
            continue
        parent = _parent(process)
        manager = manager_of(parent)
        yield Nearby(base=flags.base, use=_use(words, parent, flags, manager), manager=manager)


def _parent(process: Path) -> list[str]:
    """Return the command line of a process's parent; none if it cannot be read."""
    try:
        # The process's own name, in brackets, may hold anything.
        pid = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        return texts(process.parent / pid / "cmdline")
    except (OSError, IndexError):
        return []


def _is_engine(words: Sequence[str]) -> bool:
    return bool(words) and (starts(words, 0) or LIBRARY in words)


def _use(words: Sequence[str], parent: Sequence[str], flags: EngineFlags, manager: Manager | None) -> Use:
    names = {word.rpartition("/")[2] for word in parent[:PROGRAM_WORDS]}
    if names & FRONTS or _is_engine(parent):
        return Use.FRONTED
    if ONLY_TEXTS.intersection(words):
        return Use.NO_CHAT
    return Use.PLACEHOLDER if manager is OLLAMA and not flags.jinja else Use.YES


async def look(
    *, without: Collection[int] = (), ports: Sequence[int] = PORTS, proc: Path = PROC
) -> list[Nearby]:
    """Return what is at the addresses of processes and at usual ports, except at the ports `without`.

    No key is sent: anything may listen there.
    """
    found = {one.base: one for one in await asyncio.to_thread(lambda: list(processes(proc)))}
    for port in ports:
        found.setdefault(f"http://127.0.0.1:{port}", Nearby(base=f"http://127.0.0.1:{port}"))
    for port in without:
        found.pop(f"http://127.0.0.1:{port}", None)
    seen = await asyncio.gather(*(_asked(one) for one in found.values()))
    named = {base for _, recognised in seen if recognised for base in recognised.engines}
    more = [Nearby(base=base) for base in sorted(named - found.keys())]  # where there is no /proc
    seen += await asyncio.gather(*(_asked(one) for one in more))
    return _once(one for one, _ in seen if one.use is not Use.SILENT)


async def _asked(one: Nearby) -> tuple[Nearby, Recognised | None]:
    async with EngineClient(one.base) as client:
        health = await client.health(seconds=LOOK_SECONDS)
        if health in USABLE:
            return replace(one, marker=client.marker), None
    if one.use is not Use.YES:
        return one, None
    if health is Health.FOREIGN and (found := await recognise(one.base)):
        manager = replace(one, use=Use.MANAGER, manager=found.manager, said=found.sentence(one.base))
        return manager, found
    return replace(one, use=Use.SILENT), None


def _once(found: Iterable[Nearby]) -> list[Nearby]:
    """Mark what is the same engine as an earlier one: at another address, or through a sidecar."""
    markers, kept = set[str | None](), list[Nearby]()
    for one in found:
        same = one.marker in markers
        markers.update({one.marker} - UNTOLD)
        kept.append(replace(one, use=Use.SAME) if same else one)
    return kept


def chosen(found: Sequence[Nearby]) -> Nearby:
    """Return the one engine that can be the upstream. Raises NotChosenError if there is none, or several."""
    usable = [one for one in found if one.use is Use.YES]
    if len(usable) == 1:
        return usable[0]
    if usable:
        them = "\n".join(f"  --upstream {one.sentence}" for one in usable)
        raise NotChosenError(
            f"--upstream auto: {len(usable)} engines answer on this machine. Name one:\n{them}"
        )
    said = [one.said or f"{one.sentence}: {NOT_USED[one.use]}." for one in found if one.use in NOT_USED]
    if said:
        raise NotChosenError("\n".join(["--upstream auto: no engine that can be used.", *said, SEE]))
    raise NotChosenError(
        f"--upstream auto: no llama-server answers on this machine (asked: those in /proc, ports "
        f"{', '.join(map(str, PORTS))}). Start one, or give its URL: --upstream http://HOST:PORT"
    )


def starter_of(base: str, proc: Path = PROC) -> Manager | None:
    """Return the manager that started the engine at this URL, as far as /proc tells. Blocks briefly."""
    parts = urlsplit(base)
    if not local(parts.hostname or ""):
        return None
    return next((one.manager for one in processes(proc) if urlsplit(one.base).port == parts.port), None)

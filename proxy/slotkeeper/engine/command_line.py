"""The command line of an engine that runs on this machine as the same user, read from /proc.

Exact, where it can be had: on Linux, outside of containers, and if the process that listens at the engine's
address is a llama-server. It is believed only where it says what the engine says.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from slotkeeper.engine.flags import OPTIONS, EngineFlags, FlagError

PROC: Final = Path("/proc")
LISTEN: Final = "0A"  # the state in /proc/net/tcp
SETTINGS: Final = frozenset(option.env for option in OPTIONS.values() if option.env.startswith("LLAMA_ARG_"))
PORT: Final = 80


def flags_behind(base: str, props: Mapping[str, Any], proc: Path = PROC) -> EngineFlags | None:
    """The flags of the engine at this URL; None where they cannot be read. Blocks for some milliseconds."""
    where = urlsplit(base)
    if not local(where.hostname or ""):
        return None
    try:
        sockets = set(listening(where.port or PORT, proc))
        found = [flags for process in owners(sockets, proc) if (flags := flags_of(process))]
    except OSError:
        return None
    fitting = [flags for flags in found if fits(flags, where.port or PORT, props)]
    return fitting[0] if fitting and all(flags == fitting[0] for flags in fitting) else None


def local(host: str) -> bool:
    """Whether this name is surely this machine's."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(port: int, proc: Path) -> Iterator[str]:
    """The listening sockets of this port."""
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def owners(sockets: set[str], proc: Path) -> Iterator[Path]:
    """The processes that we may look into and that have one of these open."""
    for process in proc.iterdir() if sockets else ():
        if not process.name.isdigit():
            continue
        try:
            opened = {str(file.readlink()) for file in (process / "fd").iterdir()}
        except OSError:  # another user's, or gone
            continue
        if opened & sockets:
            yield process


def flags_of(process: Path) -> EngineFlags | None:
    """Of what else is in the environment nothing is kept: there may be secrets."""
    try:
        words = texts(process / "cmdline")
        pairs = (text.partition("=") for text in texts(process / "environ"))
        environ = {name: value for name, _, value in pairs if name in SETTINGS}
        flags = EngineFlags.parse(words[1:], environ)
    except (OSError, FlagError):
        return None
    return replace(flags, api_keys=())


def texts(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").split("\0")[:-1]


def fits(flags: EngineFlags, port: int, props: Mapping[str, Any]) -> bool:
    """Whether an engine that says this of itself may have been started so."""
    model = Path(str(props.get("model_path") or ""))
    slots = props.get("total_slots")
    return (
        not flags.router
        and flags.model is not None
        and flags.model.name == model.name
        and flags.port == port
        and (flags.auto_slots or flags.n_parallel == slots)
    )

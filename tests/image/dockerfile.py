"""What the Dockerfile says about its image."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Final

from containers import ROOT

PATH: Final = ROOT / "docker" / "Dockerfile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The last stage: the defaults of a container."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    health: tuple[str, ...] = ()
    user: str = ""
    stop_signal: str = ""


def instructions() -> list[tuple[str, str]]:
    """Return (name, arguments) in order, without comments, each as one line."""
    lines = [line for line in PATH.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole)]


def image() -> Image:
    found = instructions()
    last = max(at for at, (name, _) in enumerate(found) if name == "FROM")
    said = dict(found[last:])
    env = [word for name, rest in found[last:] if name == "ENV" for word in shlex.split(rest)]
    return Image(
        entrypoint=tuple(json.loads(said["ENTRYPOINT"])),
        cmd=tuple(json.loads(said["CMD"])),
        env=dict(word.split("=", 1) for word in env),
        health=tuple(json.loads(said["HEALTHCHECK"].partition("CMD ")[2])),
        user=said["USER"],
        stop_signal=said["STOPSIGNAL"],
    )

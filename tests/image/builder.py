"""Building the image without a daemon, a registry or privileges: buildah, on a base that debootstrap makes.

The base of the Dockerfile is an argument. Here it is a small Debian with the Python that Debian has, made
once and kept in build/image; what is built on it is the Dockerfile itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from containers import ROOT
from image.dockerfile import PATH
from programs import program

FOLDER: Final = ROOT / "build" / "image"
SUITE: Final = "bookworm"
PACKAGES: Final = "python3,python3-venv"
BASE: Final = f"localhost/base-{SUITE}"
NAME: Final = "localhost/slotkeeper"
# Where packages come from on this machine; the Dockerfile has arguments of these names.
SOURCES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")


def buildah(*words: str) -> list[str]:
    """A command that keeps everything in our folder, and needs neither overlayfs nor namespaces."""
    kept = ("--root", str(FOLDER / "storage"), "--runroot", str(FOLDER / "run"))
    return [program("buildah"), *kept, "--storage-driver", "vfs", *words]


def done(command: Sequence[str]) -> str:
    """What it prints. Fails with all that it said."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-4000:]}{ended.stderr[-8000:]}"
    return ended.stdout


def base() -> str:
    """The name of the base image; made if it is not there."""
    if subprocess.run(buildah("inspect", BASE), capture_output=True, check=False).returncode:
        system = FOLDER / SUITE
        shutil.rmtree(system, ignore_errors=True)  # of a try that was broken off
        system.mkdir(parents=True)
        # What it mounts there goes with it, also when it is broken off.
        apart = ("unshare", "--mount", program("debootstrap"))
        done([*apart, "--variant=minbase", f"--include={PACKAGES}", SUITE, str(system)])
        container = done(buildah("from", "scratch")).strip()
        done(buildah("copy", "--quiet", container, str(system), "/"))
        done(buildah("commit", "--quiet", "--rm", container, BASE))
        shutil.rmtree(system)
    return BASE


def build() -> str:
    """The name of the image, as the Dockerfile of this checkout makes it on our base."""
    arguments = {"BASE": base(), "VERSION": "tested"}
    mounted = []
    for name in SOURCES:
        if value := os.environ.get(name):
            arguments[name] = value
            if Path(value).exists():  # a file or folder of this machine, for the build alone
                arguments[name] = f"/mnt/{name}"
                mounted += ["--volume", f"{value}:/mnt/{name}:ro"]
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    how = ("--isolation", "chroot", "--format", "docker", "--tag", NAME)
    done(buildah("bud", *how, *given, *mounted, "--file", str(PATH), str(ROOT)))
    done(buildah("rmi", "--prune", "--force"))  # what had the name before
    return NAME


@contextmanager
def container(image: str) -> Iterator[str]:
    """The name of one."""
    name = done(buildah("from", "--isolation", "chroot", image)).strip()
    try:
        yield name
    finally:
        done(buildah("rm", name))


def inspected(image: str) -> tuple[dict[str, Any], list[int]]:
    """Its configuration, and the sizes of its layers in bytes, the base's first."""
    said = json.loads(done(buildah("inspect", "--type", "image", image)))
    layers = json.loads(said["Manifest"])["layers"]
    return said["Docker"]["config"], [layer["size"] for layer in layers]


class Room:
    """A container of an image in which commands can be run; it has this machine's network."""

    def __init__(self, name: str, volumes: Mapping[Path, str]) -> None:
        """`name` is that of `container`; `volumes` are seen where, with options behind a colon."""
        self._name = name
        self._volumes = [word for path, seen in volumes.items() for word in ("--volume", f"{path}:{seen}")]

    def command(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command of this machine that runs `words` in it, as the image's user."""
        given = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return buildah("run", "--isolation", "chroot", *given, *self._volumes, self._name, "--", *words)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = self.command(words, env or {})
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

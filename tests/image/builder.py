"""Builds the image without a daemon, a registry or privileges: with buildah, on a base from debootstrap.

The base of the Dockerfile is an argument. Here it is a small Debian with Debian's Python, made once and kept
in build/image; the Dockerfile itself is built on it.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from containers import ROOT
from image.dockerfile import PATH
from patience import PATIENCE
from programs import program

FOLDER: Final = ROOT / "build" / "image"
SUITE: Final = "bookworm"
PACKAGES: Final = "python3,python3-venv"
BASE: Final = f"localhost/base-{SUITE}"
NAME: Final = "localhost/slotkeeper"
# Settings of pip that say where packages are, and the Dockerfile's arguments for them.
SOURCES: Final = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "find-links": "PIP_FIND_LINKS",
    "cert": "PIP_CERT",
}


def buildah(*words: str) -> list[str]:
    """Return a command that keeps everything in our folder, and needs neither overlayfs nor namespaces."""
    kept = ("--root", str(FOLDER / "storage"), "--runroot", str(FOLDER / "run"))
    return [program("buildah"), *kept, "--storage-driver", "vfs", *words]


def done(command: Sequence[str]) -> str:
    """Run a command and return its output. Fails with that output."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-4000:]}{ended.stderr[-8000:]}"
    return ended.stdout


def base() -> str:
    """Return the name of the base image, which is made if it is missing."""
    if subprocess.run(buildah("inspect", BASE), capture_output=True, check=False).returncode:
        system = FOLDER / SUITE
        shutil.rmtree(system, ignore_errors=True)  # left by a build that was interrupted
        system.mkdir(parents=True)
        # In a mount namespace, so that its mounts end with it, also if it is interrupted.
        apart = ("unshare", "--mount", program("debootstrap"))
        done([*apart, "--variant=minbase", f"--include={PACKAGES}", SUITE, str(system)])
        container = done(buildah("from", "scratch")).strip()
        done(buildah("copy", "--quiet", container, str(system), "/"))
        done(buildah("commit", "--quiet", "--rm", container, BASE))
        shutil.rmtree(system)
    return BASE


def sources() -> dict[str, str]:
    """Return where pip finds packages on this machine, by its environment, else by its files."""
    found = dict[str, str]()
    for line in done([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        setting, value = line.split("=", 1)
        group, _, key = setting.partition(".")
        if key in SOURCES and (group == ":env:" or SOURCES[key] not in found):
            found[SOURCES[key]] = ast.literal_eval(value)
    return found


def build() -> str:
    """Build the image from the Dockerfile of this checkout on our base, and return its name."""
    arguments = {"BASE": base(), "VERSION": "tested"}
    mounted = []
    for name, value in sources().items():
        arguments[name] = value
        if Path(value).exists():  # a file or folder of this machine, mounted for the build only
            arguments[name] = f"/mnt/{name}"
            mounted += ["--volume", f"{value}:/mnt/{name}:ro"]
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    how = ("--isolation", "chroot", "--format", "docker", "--tag", NAME)
    done(buildah("bud", *how, *given, *mounted, "--file", str(PATH), str(ROOT)))
    done(buildah("rmi", "--prune", "--force"))  # the image that had the name before
    return NAME


@contextmanager
def container(image: str) -> Iterator[str]:
    """Make a container, yield its name, and remove it afterwards."""
    name = done(buildah("from", "--isolation", "chroot", image)).strip()
    try:
        yield name
    finally:
        done(buildah("rm", name))


def inspected(image: str) -> tuple[dict[str, Any], list[int]]:
    """Return its configuration, and the sizes of its layers in bytes, the base's first."""
    said = json.loads(done(buildah("inspect", "--type", "image", image)))
    layers = json.loads(said["Manifest"])["layers"]
    return said["Docker"]["config"], [layer["size"] for layer in layers]


def compressed(image: str, folder: Path) -> list[int]:
    """Return the sizes of its layers in bytes as a registry has them, the base's first.

    `folder` does not exist yet, and gets the layers.
    """
    done(buildah("push", "--quiet", image, f"oci:{folder}:pushed"))
    (pushed,) = json.loads((folder / "index.json").read_text("utf-8"))["manifests"]
    manifest = folder / "blobs" / pushed["digest"].replace(":", "/")
    return [layer["size"] for layer in json.loads(manifest.read_text("utf-8"))["layers"]]


class Room:
    """A container of an image in which commands can be run; it has this machine's network."""

    def __init__(self, name: str, volumes: Mapping[Path, str]) -> None:
        """`name` is that of `container`; `volumes` map paths, with options behind a colon."""
        self._name = name
        self._volumes = [word for path, seen in volumes.items() for word in ("--volume", f"{path}:{seen}")]

    def command(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the command of this machine that runs `words` in it, as the image's user."""
        given = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return buildah("run", "--isolation", "chroot", *given, *self._volumes, self._name, "--", *words)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = self.command(words, env or {})
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)

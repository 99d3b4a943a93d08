"""Five tiny models with random weights, which stock llama-server loads like real ones.

| name            | arch   | memory it exercises                                       |
|-----------------|--------|-----------------------------------------------------------|
| tiny-dense      | qwen3  | plain KV cache                                             |
| tiny-swa        | gemma3 | sliding window (5 of 6 layers) and full KV                 |
| tiny-hybrid     | qwen35 | Gated DeltaNet state (3 of 4 layers) and full KV           |
| tiny-hybrid-mtp | qwen35 | the same and one MTP block, for `--spec-type draft-mtp`    |
| tiny-recurrent  | mamba2 | recurrent state only                                       |

`python -m slotkeeper.bench.models [--out DIR] [NAME...]` builds them and prints their paths.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Tiny(StrEnum):
    """The tiny models by the name of their file, without `.gguf`."""

    DENSE = "tiny-dense"
    SWA = "tiny-swa"
    HYBRID = "tiny-hybrid"
    HYBRID_MTP = "tiny-hybrid-mtp"
    RECURRENT = "tiny-recurrent"


# With numpy 2.4.6; the engine's measured behaviour (engine.md) is that of exactly these bytes.
SHA256: Final[Mapping[Tiny, str]] = MappingProxyType(
    {
        Tiny.DENSE: "eab3d4a8e924c133eab4f8a0b8305906edc466d7be3e6de475ff28ba8d4dd0b1",
        Tiny.SWA: "a6ba0987ba5fd93ea83a9917602d9a58033b657f05a625dcc48a22899f894dc8",
        Tiny.HYBRID: "bc1172c179fcf432d573226b535c97a66cd335228c6ad1815848591766ce5a5d",
        Tiny.HYBRID_MTP: "54b34a3298c8c8476625627949a4a61ec603898e6f1216c9b6ac2e50f9be9caf",
        Tiny.RECURRENT: "09273479dfd2337cd54fc85d85e52dd0dfb9cd7c7235d86100d212224fef031c",
    }
)


class MissingExtraError(RuntimeError):
    """Building a model needs numpy and gguf, which only the extra `demo` installs."""


def build(tiny: Tiny, folder: Path | None = None) -> Path:
    """Return the path of the model's file in `folder` (default: a cache); build it if needed.

    An existing file is used only if its hash is right. A new file is renamed when it is complete, so several
    processes may build at once. With another numpy than 2.4.6 the hash may differ: the model is equally
    good, but each call builds it again.
    """
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tiny}.gguf"
    if path.exists() and _sha256(path) == SHA256[tiny]:
        return path
    write = _recipe(tiny)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{tiny}-") as scratch:
        unfinished = Path(scratch) / path.name
        write(unfinished)
        unfinished.replace(path)
    return path


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/slotkeeper/models`, or a temporary folder if that is not writable."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "slotkeeper" / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        writable = False
    else:
        writable = os.access(folder, os.W_OK)
    # the user's number keeps two users of one machine apart
    return folder if writable else Path(tempfile.gettempdir()) / f"slotkeeper-models-{os.getuid()}"


def _recipe(tiny: Tiny) -> Callable[[Path], None]:
    """Return the function that builds a model. Imports numpy and gguf here: other code needs neither."""
    try:
        from slotkeeper.bench.tiny_models import dense, hybrid, hybrid_mtp, recurrent, swa  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "gguf"}:
            raise
        message = f"building {tiny} needs {error.name}: pip install 'slotkeeper[demo]'"
        raise MissingExtraError(message) from error
    return {
        Tiny.DENSE: dense,
        Tiny.SWA: swa,
        Tiny.HYBRID: hybrid,
        Tiny.HYBRID_MTP: hybrid_mtp,
        Tiny.RECURRENT: recurrent,
    }[tiny]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slotkeeper.bench.models", description="Build the tiny models and print their paths."
    )
    parser.add_argument("names", nargs="*", type=Tiny, metavar="NAME", help=", ".join(Tiny))
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to put them (default: the cache)")
    chosen = parser.parse_args(arguments)
    try:
        for tiny in chosen.names or Tiny:
            sys.stdout.write(f"{build(tiny, chosen.out)}\n")
    except MissingExtraError as error:
        parser.exit(1, f"{error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

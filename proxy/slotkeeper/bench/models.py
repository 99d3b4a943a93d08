"""Tiny and fat models with random weights, which stock llama-server loads like real ones.

| name            | arch   | memory it exercises                                       |
|-----------------|--------|-----------------------------------------------------------|
| tiny-dense      | qwen3  | plain KV cache                                             |
| tiny-swa        | gemma3 | sliding window (5 of 6 layers) and full KV                 |
| tiny-hybrid     | qwen35 | Gated DeltaNet state (3 of 4 layers) and full KV           |
| tiny-hybrid-mtp | qwen35 | the same and one MTP block, for `--spec-type draft-mtp`    |
| tiny-recurrent  | mamba2 | recurrent state only                                       |

A tiny model shows how many tokens the engine computes. Its passes, states and checkpoints cost nothing, so
seconds are measured with fat models: the same layers with the proportions of real ones.

| name           | like            | KV cache of a token | a checkpoint | prefill of 10 tokens | decode step |
|----------------|-----------------|---------------------|--------------|----------------------|-------------|
| fat-dense      | tiny-dense      | 256 KiB             | none         | 54 tokens            | 10 tokens   |
| fat-swa        | tiny-swa        | 96 KiB              | 78 MiB       | 46 tokens            | 6 tokens    |
| fat-hybrid     | tiny-hybrid     | 16 KiB              | 25 MiB       | 32 tokens            | 5 tokens    |
| fat-hybrid-mtp | tiny-hybrid-mtp | 16 KiB              | 25 MiB       | 30 tokens            | 4 tokens    |

The last two columns are times, in those of a token within a prefill of 1,000 tokens behind 1,000 others,
measured on two cores (b11549, `-t 2`).

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

from slotkeeper import system

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Tiny(StrEnum):
    """The tiny models by the name of their file, without `.gguf`."""

    DENSE = "tiny-dense"
    SWA = "tiny-swa"
    HYBRID = "tiny-hybrid"
    HYBRID_MTP = "tiny-hybrid-mtp"
    RECURRENT = "tiny-recurrent"


class Fat(StrEnum):
    """The fat models by the name of their file, without `.gguf`."""

    DENSE = "fat-dense"
    SWA = "fat-swa"
    HYBRID = "fat-hybrid"
    HYBRID_MTP = "fat-hybrid-mtp"


Model = Tiny | Fat
MODELS: Final[tuple[Model, ...]] = (*Tiny, *Fat)

# With numpy 2.4.6; the engine's measured behaviour (engine.md) is that of exactly these bytes.
SHA256: Final[Mapping[Model, str]] = MappingProxyType(
    {
        Tiny.DENSE: "eab3d4a8e924c133eab4f8a0b8305906edc466d7be3e6de475ff28ba8d4dd0b1",
        Tiny.SWA: "a6ba0987ba5fd93ea83a9917602d9a58033b657f05a625dcc48a22899f894dc8",
        Tiny.HYBRID: "bc1172c179fcf432d573226b535c97a66cd335228c6ad1815848591766ce5a5d",
        Tiny.HYBRID_MTP: "54b34a3298c8c8476625627949a4a61ec603898e6f1216c9b6ac2e50f9be9caf",
        Tiny.RECURRENT: "09273479dfd2337cd54fc85d85e52dd0dfb9cd7c7235d86100d212224fef031c",
        Fat.DENSE: "7d41497830108c4692d702a3b1246311d57cf17644ee2d4873ff5784e902226f",
        Fat.SWA: "63a24b0beb6877f9bc49bd18fe2a236ae0a14183fcf13c368f4d031696dd237e",
        Fat.HYBRID: "dec2912815d3e606ac26c5a70d436adbcc2d00083c9b731b913dfc2650a7eca7",
        Fat.HYBRID_MTP: "0b724d23cca94bdb41c4a253a94849b89240126b84db8ee77531227278d7c7dc",
    }
)


class MissingExtraError(RuntimeError):
    """Building a model needs numpy and gguf, which only the extra `demo` installs."""


def build(model: Model, folder: Path | None = None) -> Path:
    """Return the path of the model's file in `folder` (default: a cache); build it if needed.

    An existing file is used only if its hash is right. A new file is renamed when it is complete, so several
    processes may build at once. With another numpy than 2.4.6 the hash may differ: the model is equally
    good, but each call builds it again.
    """
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model}.gguf"
    if path.exists() and _sha256(path) == SHA256[model]:
        return path
    write = _recipe(model)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{model}-") as scratch:
        unfinished = Path(scratch) / path.name
        write(unfinished)
        unfinished.replace(path)
    return path


def cache_folder() -> Path:
    """Return `slotkeeper/models` in this user's cache, or a temporary folder if that is not writable."""
    folder = system.cache_folder() / "slotkeeper" / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        writable = False
    else:
        writable = os.access(folder, os.W_OK)
    # the user's number keeps two users of one machine apart
    return folder if writable else Path(tempfile.gettempdir()) / f"slotkeeper-models-{system.user()}"


def _recipe(model: Model) -> Callable[[Path], None]:
    """Return the function that builds a model. Imports numpy and gguf here: other code needs neither."""
    try:
        import slotkeeper.bench.tiny_models as recipes  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "gguf"}:
            raise
        message = f"building {model} needs {error.name}: pip install 'slotkeeper[demo]'"
        raise MissingExtraError(message) from error
    return {
        Tiny.DENSE: recipes.dense,
        Tiny.SWA: recipes.swa,
        Tiny.HYBRID: recipes.hybrid,
        Tiny.HYBRID_MTP: recipes.hybrid_mtp,
        Tiny.RECURRENT: recipes.recurrent,
        Fat.DENSE: recipes.fat_dense,
        Fat.SWA: recipes.fat_swa,
        Fat.HYBRID: recipes.fat_hybrid,
        Fat.HYBRID_MTP: recipes.fat_hybrid_mtp,
    }[model]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(name: str) -> Model:
    """Return the model of this name. Raises ValueError."""
    return Tiny(name) if name in list(Tiny) else Fat(name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slotkeeper.bench.models", description="Build the models and print their paths."
    )
    parser.add_argument(
        "names", nargs="*", type=_named, metavar="NAME", help=f"{', '.join(MODELS)} (default: the tiny ones)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to put them (default: the cache)")
    chosen = parser.parse_args(arguments)
    try:
        for model in chosen.names or Tiny:
            sys.stdout.write(f"{build(model, chosen.out)}\n")
    except MissingExtraError as error:
        parser.exit(1, f"{error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

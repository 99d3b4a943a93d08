"""What a slot file must fit, as one short name: the same for engines that may load each other's files.

The engine refuses other shapes by itself. But a file of another model with the same shapes, or one that was
computed with another rope base, it takes with 200 and goes on in nonsense (engine.md 2.4).
So whatever is not surely the same makes another fingerprint: that costs a prefill, the opposite wrong text.

Not in it: the build, for what matters of it is the version of its files; and their layout, which is not
known before the first one. A layout that differs is refused by the engine too (400, and the slot is empty).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.traits import EngineTraits
from slotkeeper.vocab.gguf import GgufHeader

DIGEST_BYTES: Final = 8
# Two trainings of one model have the same header, so a little of the weights is read as well: enough that
# any of them changes it, few enough for a cold disk.
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
PART: Final = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")

# What decides the numbers in a state. Shapes among them would be refused by the engine, but only after it
# has emptied the slot.
DECISIVE: Final = (
    "cache_type_k",
    "cache_type_v",
    "flash_attn",
    "swa_full",
    "rope_scaling",
    "rope_scale",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_orig_ctx",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_slow",
    "yarn_beta_fast",
    "override_kv",
    "control_vectors",
    "control_layers",
    "spec_type",
    "draft_model",
    "draft_type_k",
    "draft_type_v",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What decides whether an engine may load a file; each part is made by a function below."""

    model: Mapping[str, Any]
    flags: Mapping[str, Any] | None  # None: started by others
    adapters: Sequence[Mapping[str, Any]]
    streams: int  # KV buffers that the slots share: one, or one for each

    @property
    def digest(self) -> str:
        """Of the engine alone, before any of its files was seen."""
        return self._digest()

    def fingerprint(self, state_version: int, voice: str = "") -> str:
        """What a file must fit.

        Args:
            state_version: the word that its files begin with: no build reads another's (engine.md 2.2).
            voice: its name, where the flags are not known (see `voice`).
        """
        return self._digest(state_version=state_version, voice=voice)

    def _digest(self, **more: int | str) -> str:
        facts = {
            "model": self.model,
            "flags": self.flags,
            "adapters": self.adapters,
            "streams": self.streams,
            **more,
        }
        return digest_of(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS))


def about_model(
    path: Path | None, header: GgufHeader | None, props: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """The model by its file, wherever that lies; where we cannot read it, by what its engine says. Blocks.

    Of a file on another machine the path counts too, since all else may be equal in two trainings.

    Args:
        path: the file, if it can be read here.
        header: its header.
        props: the answer of /props.
        entry: that of /v1/models. Its `n_ctx` is how it is served, not what it is.
    """
    if path is not None and header is not None:
        return {"header": header.fingerprint, "weights": [sampled(part) for part in parts(path)]}
    meta = {key: value for key, value in (entry.get("meta") or {}).items() if key != "n_ctx"}
    return {"path": props.get("model_path"), "ftype": props.get("model_ftype"), "meta": meta}


def about_flags(flags: EngineFlags | None) -> dict[str, Any] | None:
    return {name: getattr(flags, name) for name in DECISIVE} if flags else None


def about_adapters(listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """LoRA adapters as GET /lora-adapters lists them: their scales, and their files where we can. Blocks."""
    return [
        {
            "path": str(entry.get("path")),
            "scale": entry.get("scale"),
            "weights": sampled(Path(str(entry.get("path")))),
        }
        for entry in listed
    ]


def streams_of(traits: EngineTraits) -> int:
    return 1 if traits.unified else traits.n_slots


def parts(path: Path) -> list[Path]:
    """All files of a model that was split; the engine names the first."""
    found = PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, count = found["stem"], found["count"]
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def sampled(path: Path) -> str:
    """A digest of a file's size and of pieces from all over it; "" if it cannot be read here."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            step = max(1, size // SAMPLES)
            pieces = [os.pread(file.fileno(), SAMPLE_BYTES, at) for at in range(0, size, step)]
    except OSError:
        return ""
    return digest_of(size.to_bytes(8, "little"), *pieces)


def digest_of(*pieces: bytes) -> str:
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()

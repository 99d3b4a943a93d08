"""Which engine it is: its build's name, and what a slot file must fit, as one short name.

The engine refuses other shapes by itself. But a file of another model with the same shapes, or one that was
computed with another rope base, it takes with 200 and goes on in nonsense (engine.md 2.4).
So whatever is not surely the same makes another fingerprint: that costs a prefill, the opposite wrong text.

Not in it: the build, for what matters of it is the version of its files; and their layout, which is not
known before the first one. A layout that differs is refused by the engine too (400, and the slot is empty).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.engine.answers import Odds
from slotkeeper.engine.canary import TEXT, swept, unused
from slotkeeper.engine.client import EngineClient, EngineError, Headers
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.vocab.gguf import GgufHeader

FIRST: Final = 1000  # below that a number is a private build's own, such as b0-unknown and b1-7e4c0a9
LAZY_SINCE: Final = 11434  # the first build read that thins checkpoints only when full (engine.md T7)
CARRYING: Final = 4  # the version of slot files that carry checkpoints (engine.md 2.2)


def number_in(said: str) -> int | None:
    """llama.cpp's own number in `b11549-7e4c0a9`; None for any other."""
    found = re.match(r"b(\d+)(?:-|$)", said)
    return int(found[1]) if found and int(found[1]) >= FIRST else None


def of_package(name: str) -> int | None:
    """The build that an installed package holds: the largest number of its version, `2026.10.11549`."""
    try:
        numbers = [int(part) for part in re.findall(r"\d+", version(name))]
    except PackageNotFoundError:
        return None
    return max(numbers, default=0) or None


def in_words(said: str, started: int, model: Mapping[str, Any], files: int) -> str:
    """`b11549`, or what can be seen of a build that has no number.

    1. What /props says, where that is one of llama.cpp's numbers.
    2. `started`: the number of the program that we have started; 0 for one that others did.
    3. What its slot files carry: `files` is their version, 0 where none was seen.
    4. What it says of its `model`: "architecture" is in b11549's answer, not in b10434's.
    """
    number = number_in(said) or started  # (1) (2)
    if number:
        return f"b{number}"
    if files:  # (3)
        seen = "checkpoint files" if files >= CARRYING else "files without checkpoints"
    elif model:  # (4)
        seen = f"b{LAZY_SINCE} or newer" if "architecture" in model else f"older than b{LAZY_SINCE}"
    else:
        return "unknown build"
    return f"unknown build ({seen})"


# -- what a slot file must fit ---------------------------------------------------------------------------

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


# -- by what it says, where its flags cannot be seen -----------------------------------------------------
# Another rope base, a control vector or an edited key of the model change what is computed, and no answer
# of the engine tells (engine.md 2.4). But they change what the model says: after one fixed text the
# logprobs of the likeliest tokens are equal to the last digit when an engine is started again as it was,
# also with another number of threads; another rope base moves them by 0.13 to 1.9 (tiny models, Gemma 3
# 270M). So each such set of logprobs gets a name, the engine's voice, and is remembered beside the slot
# files that it stands for.
#
# Only an unused engine is asked; a process has one voice as long as it lives. A build or a batch size that
# computes otherwise has another voice too. That costs a prefill.

FILE: Final = "slotkeeper-voices.json"
MOST: Final = 64  # voices remembered, the oldest are forgotten
LIKELIEST: Final = 8
TOLERANCE: Final = 0.05  # of a logprob: a graphics card may add up in another order from start to start
TOKENS: Final = 128  # far enough for positions to matter


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFingerprint:
    """One voice, and where it was heard last."""

    name: str
    engine: str  # Identity.digest: all else that is known about the engine
    process: str  # what /props marks each start with (engine.md 1.7)
    odds: Odds


async def voice_of(
    client: EngineClient,
    folder: Path,
    engine: str,
    process: str,
    *,
    may_compute: bool,
    headers: Headers | None = None,
) -> str:
    """The name of an engine's voice. No request may be pinned to it meanwhile.

    1. This process was heard before.
    2. No slot was used yet: it is asked, and found among those that were heard, or remembered.
    3. It is too late, not allowed, or refused: then it is taken for the one that was heard last, "" if none
       was, since most engines are started again as they were.

    Raises EngineGoneError.
    """
    heard = await asyncio.to_thread(recalled, folder)
    for one in heard:
        if (one.engine, one.process) == (engine, process):  # (1)
            return one.name
    try:
        odds = await listened(client, headers) if may_compute and await unused(client, headers) else ()
    except EngineError:
        odds = ()
    if not odds:  # (3)
        return next((one.name for one in reversed(heard) if one.engine == engine), "")
    known = next((one for one in heard if one.engine == engine and alike(one.odds, odds)), None)  # (2)
    now = known or KnownFingerprint(name=digest_of(orjson.dumps(odds)), engine=engine, process="", odds=odds)
    others = [one for one in heard if one != known]
    with contextlib.suppress(OSError):  # then it must be heard again after the next start
        await asyncio.to_thread(remembered, folder, [*others, replace(now, process=process)][-MOST:])
    return now.name


async def listened(client: EngineClient, headers: Headers | None) -> Odds:
    """Ask, and leave the slot empty again."""
    ids = await client.tokenize(TEXT, add_special=False, parse_special=False, headers=headers)
    guess = await client.guess(ids[:TOKENS], LIKELIEST, headers=headers)
    await swept(client, guess.slot, guess.held, headers)
    return guess.odds


def alike(one: Odds, other: Odds) -> bool:
    """Whether two voices are one. The least likely token of each may be missing in the other."""
    first, second = dict(one), dict(other)
    both = first.keys() & second.keys()
    return len(both) >= min(len(first), len(second)) - 1 and all(
        abs(first[token] - second[token]) <= TOLERANCE for token in both
    )


def recalled(folder: Path) -> list[KnownFingerprint]:
    """What was heard, the newest last; nothing where the file is not what we wrote. Blocks."""
    try:
        listed = orjson.loads((folder / FILE).read_bytes())
        return [KnownFingerprint(**one | {"odds": odds_in(one["odds"])}) for one in listed]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def odds_in(document: Any) -> Odds:
    return tuple((int(token), float(logprob)) for token, logprob in document)


def remembered(folder: Path, heard: Sequence[KnownFingerprint]) -> None:
    """Blocks. Raises OSError."""
    place = folder / f"{FILE}.new"
    place.write_bytes(orjson.dumps([asdict(one) for one in heard]))
    place.chmod(0o600)
    place.replace(folder / FILE)

"""The identity of an engine: the name of its build, and a fingerprint that its slot files must match.

The engine refuses a slot file with other shapes, or another layout (400, and the slot is empty). It accepts a
file of another model with the same shapes, or of another rope base, and generates nonsense (engine.md 2.4).
So any difference gives another fingerprint: a needless one costs a prefill, a missing one a wrong answer.
The fingerprint has the version of the files in place of the build, and not their layout, which is not known
before the first file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from io import SEEK_END, FileIO
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import orjson

from slotkeeper.engine.answers import Odds
from slotkeeper.engine.canary import TOKENS, Tried, try_out
from slotkeeper.engine.client import EngineClient, Headers
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.scheduler.policies.adapters import Adapter, single
from slotkeeper.scheduler.slots.engine_model import EngineTraits
from slotkeeper.vocab.gguf import GgufHeader

FIRST: Final = 1000  # a smaller number is a private build's own, as in b0-unknown and b1-7e4c0a9
LAZY_SINCE: Final = 11434  # first build whose source was read that thins only a full list (engine.md T7)
CARRYING: Final = 4  # the first version of slot files that may carry checkpoints (engine.md 2.2)


def number_in(build_info: str) -> int | None:
    """Return llama.cpp's build number in a text like `b11549-7e4c0a9`; None for a private build's number."""
    match = re.match(r"b(\d+)(?:-|$)", build_info)
    return int(match[1]) if match and int(match[1]) >= FIRST else None


def of_package(name: str, folder: Path | None = None) -> int | None:
    """Return the build number of a package: the largest number in its version, `2026.10.11549`.

    It is looked for in `folder`, else among those installed for this Python; None: it is not there.
    """
    path = sys.path if folder is None else [str(folder)]
    versions = (found.version for found in distributions(name=name, path=path))
    return max((int(part) for part in re.findall(r"\d+", next(versions, ""))), default=0) or None


def in_words(said: str, started: int, model: Mapping[str, Any], files: int) -> str:
    """Return the build as text: `b11549`, or for a build without a number what we know of its age.

    1. `said` is the `build_info` of /props. It counts if it holds one of llama.cpp's numbers.
    2. `started` is the number of the program that we have started; 0 if another program started the engine.
    3. `files` is the version of its slot files; 0 if none was seen.
    4. `model` is its entry in /v1/models.
    """
    number = number_in(said) or started  # (1) (2)
    if number:
        return f"b{number}"
    if files:  # (3)
        seen = "checkpoint files" if files >= CARRYING else "files without checkpoints"
    elif model:  # (4)
        seen = f"b{LAZY_SINCE} or newer" if thins_lazily(model) else f"older than b{LAZY_SINCE}"
    else:
        return "unknown build"
    return f"unknown build ({seen})"


def thins_lazily(model: Mapping[str, Any]) -> bool:
    """Whether a model's entry in /v1/models is of LAZY_SINCE or a newer build.

    These write "architecture", and in a router's entries, which have a status, "context_length".
    """
    return ("context_length" if "status" in model else "architecture") in model


# -- what a slot file must fit ---------------------------------------------------------------------------

DIGEST_BYTES: Final = 8
# Two trainings of one model have the same header, so we also read samples of the weights: enough that any
# training changes the digest, few enough for a cold disk.
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
PART: Final = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")

# Flags that change the numbers in a state. Some change its shapes too: such a file the engine would refuse,
# but only after it has emptied the slot.
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
    """The facts that decide whether an engine may load a slot file; functions below make each part."""

    model: Mapping[str, Any]
    flags: Mapping[str, Any] | None  # None: another program started the engine
    adapters: Sequence[Adapter]  # LoRA; not in the fingerprint: each state says with which it was made
    streams: int  # KV buffers: one for all slots, or one for each slot

    @property
    def digest(self) -> str:
        """A digest of the engine alone, without any fact about its slot files."""
        return self._digest()

    def fingerprint(self, state_version: int, voice: str = "") -> str:
        """Return the fingerprint that a slot file must match.

        Args:
            state_version: the format version of its files: no build reads another version (engine.md 2.2).
            voice: the name of its logprob fingerprint, if the flags are not known (see `voice_of`).
        """
        return self._digest(state_version=state_version, voice=voice)

    def _digest(self, **more: int | str) -> str:
        facts: dict[str, Any] = {
            "model": self.model,
            "flags": self.flags,
            "adapters": [],  # as in the fingerprint of an engine that has none
            "streams": self.streams,
            **more,
        }
        return digest_of(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS))


def about_model(
    path: Path | None, header: GgufHeader | None, props: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe the model by its file, or by the engine's answers if we cannot read the file. Blocks.

    The path counts only for a file that we cannot read, since all else may be equal in two trainings.

    Args:
        path: the file, if it can be read here.
        header: the file's header.
        props: the answer of /props.
        entry: the model's entry in /v1/models. `n_ctx` is left out: it is how the model is served.
    """
    if path is not None and header is not None:
        return {"header": header.fingerprint, "weights": [sampled(part) for part in parts(path)]}
    meta = {key: value for key, value in (entry.get("meta") or {}).items() if key != "n_ctx"}
    return {"path": props.get("model_path"), "ftype": props.get("model_ftype"), "meta": meta}


def about_flags(flags: EngineFlags | None) -> dict[str, Any] | None:
    """Return the flags in DECISIVE by name; None if another program started the engine."""
    return {name: getattr(flags, name) for name in DECISIVE} if flags else None


OF_PROCESS: Final = "process-"  # prefix of a name that holds for one process of an engine
RANDOM: Final = re.compile(r"<__media_[0-9A-Za-z]{32}__>")  # a marker that is new at each start


def projector_of(props: Mapping[str, Any], path: Path | None) -> str:
    """Return a name for the engine's projector of images; "" for an engine without images. Blocks.

    A slot file with images is used only under the same projector: neither the engine nor the file names it,
    and with another projector of the same kind answers are wrong (engine.md 15). If the projector's file is
    not known or cannot be read here, the name holds for one process of the engine: it is made from the media
    marker in /props, which is new at each start. If LLAMA_MEDIA_MARKER sets that marker, the name is random.

    Args:
        props: the answer of /props.
        path: the file of the projector, from the engine's command line.
    """
    modalities = props.get("modalities")
    if not isinstance(modalities, dict) or modalities.get("vision") is not True:
        return ""
    if path is not None and (weights := sampled(path)):
        return weights
    marker = str(props.get("media_marker"))
    return OF_PROCESS + digest_of((marker if RANDOM.fullmatch(marker) else token_hex()).encode())


def adapters_of(listed: Sequence[Mapping[str, Any]]) -> tuple[Adapter, ...]:
    """Return the adapters of GET /lora-adapters, in its order, which is that of their numbers. Blocks."""
    ordered = sorted(listed, key=lambda entry: int(entry.get("id", 0)))
    paths = [str(entry.get("path")) for entry in ordered]
    names = [sampled(Path(path)) or digest_of(path.encode()) for path in paths]
    scales = [float(entry.get("scale", 0.0)) for entry in ordered]
    return tuple(Adapter(name, single(scale)) for name, scale in zip(names, scales, strict=True))


def streams_of(traits: EngineTraits) -> int:
    """Return the number of the engine's KV buffers."""
    return 1 if traits.unified else traits.n_slots


def parts(path: Path) -> list[Path]:
    """Return all files of a split model, given the first, which the engine names."""
    found = PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, count = found["stem"], found["count"]
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def sampled(path: Path) -> str:
    """Return a digest of a file's size and of samples from the whole file; "" if it cannot be read here."""
    try:
        with FileIO(path) as file:
            size = file.seek(0, SEEK_END)
            step = max(1, size // SAMPLES)
            pieces = [_sample(file, at) for at in range(0, size, step)]
    except OSError:
        return ""
    return digest_of(size.to_bytes(8, "little"), *pieces)


def _sample(file: FileIO, at: int) -> bytes:
    file.seek(at)
    return file.read(SAMPLE_BYTES)


def digest_of(*pieces: bytes) -> str:
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()


# -- the logprob fingerprint, for engines whose flags cannot be seen --------------------------------------
# Another rope base, a control vector or an edited key of the model change the results, and no answer of the
# engine shows them (engine.md 2.4). But they change the logprobs. After one fixed text the logprobs of the
# likeliest tokens are equal to the last digit when an engine restarts unchanged, also with another number of
# threads. Another rope base moves them by 0.13 to 1.9 (tiny models, Gemma 3 270M). So each such set of
# logprobs gets a name, called `voice` in the code, and is stored beside the slot files of that engine.
#
# Only an unused engine is asked; a process keeps its logprob fingerprint until it ends. A build or a batch
# size that rounds differently gets another fingerprint. That costs a prefill.

FILE: Final = "slotkeeper-voices.json"
MOST: Final = 64  # fingerprints kept in the file; the oldest are dropped
TOLERANCE: Final = 0.05  # of a logprob: a graphics card may add up in another order from start to start


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFingerprint:
    """One logprob fingerprint, and the process that had it last."""

    name: str
    engine: str  # Identity.digest: all other facts about the engine
    process: str  # the marker in /props that is new at each start (engine.md 1.7)
    odds: Odds
    tokens: int = 128  # of the text before them; releases up to 0.7.0 did not write it


async def voice_of(
    client: EngineClient,
    folder: Path,
    engine: str,
    process: str,
    *,
    may_compute: bool,
    headers: Headers | None = None,
    adapters: Sequence[Adapter] = (),
    may_thin: Callable[[], bool] = lambda: False,
) -> tuple[str, Tried | None]:
    """Return the name of an engine's logprob fingerprint, and the trial that showed it, if there was one.

    No pinned request may run there meanwhile. `may_thin`: see `try_out`.

    1. If the file lists this process, its name is there.
    2. Else, if no slot was used yet, compute the logprobs. Take the name of an equal entry, or add a new one.
    3. Else (slots were used, computing is not allowed, or the engine refuses) take the newest entry of this
       engine, since most engines restart unchanged; "" if there is none.

    Raises EngineGoneError.
    """
    stored = await asyncio.to_thread(recalled, folder)
    for one in stored:
        if (one.engine, one.process) == (engine, process):  # (1)
            return one.name, None
    tried = await try_out(client, headers, adapters, may_thin=may_thin) if may_compute else None
    if tried is None or not tried.odds:  # (3)
        return next((one.name for one in reversed(stored) if one.engine == engine), ""), tried
    same = (one for one in stored if (one.engine, one.tokens) == (engine, TOKENS))
    known = next((one for one in same if alike(one.odds, tried.odds)), None)  # (2)
    name = known.name if known else digest_of(orjson.dumps(tried.odds))
    now = KnownFingerprint(name=name, engine=engine, process=process, odds=tried.odds, tokens=TOKENS)
    others = [one for one in stored if one != known]
    with contextlib.suppress(OSError):  # then the next start computes it again
        await asyncio.to_thread(remembered, folder, [*others, now][-MOST:])
    return now.name, tried


def alike(one: Odds, other: Odds) -> bool:
    """Whether two sets of logprobs are equal. The least likely token of each may be missing in the other."""
    first, second = dict(one), dict(other)
    both = first.keys() & second.keys()
    return len(both) >= min(len(first), len(second)) - 1 and all(
        abs(first[token] - second[token]) <= TOLERANCE for token in both
    )


def recalled(folder: Path) -> list[KnownFingerprint]:
    """Return the stored fingerprints, the newest last; none if the file is missing or damaged. Blocks."""
    try:
        listed = orjson.loads((folder / FILE).read_bytes())
        return [KnownFingerprint(**one | {"odds": odds_in(one["odds"])}) for one in listed]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def odds_in(document: Any) -> Odds:
    return tuple((int(token), float(logprob)) for token, logprob in document)


def remembered(folder: Path, stored: Sequence[KnownFingerprint]) -> None:
    """Write the fingerprints to their file. Blocks. Raises OSError."""
    place = folder / f"{FILE}.new"
    place.write_bytes(orjson.dumps([asdict(one) for one in stored]))
    place.chmod(0o600)
    place.replace(folder / FILE)

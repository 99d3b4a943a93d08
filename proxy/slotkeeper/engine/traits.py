"""The traits of the engine at a URL: read from its answers (GET /props), its flags and its model's header.

The format of its slot files needs an experiment, which is in `file_canary`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from slotkeeper.engine import fingerprint
from slotkeeper.engine.answers import EngineError, NoFilesError, Why, media_marker
from slotkeeper.engine.canary import Tried, try_out
from slotkeeper.engine.child.memory import checkpoint_bytes, token_bytes
from slotkeeper.engine.client import EngineClient, Headers
from slotkeeper.engine.file_canary import ProbeResult, probe_files, probe_images
from slotkeeper.engine.fingerprint import (
    Identity,
    about_flags,
    about_model,
    adapters_of,
    streams_of,
    voice_of,
)
from slotkeeper.engine.flags import AUTO_SLOTS, EngineFlags, flags_behind
from slotkeeper.engine.markers import family_of, learn_markers, user_openers
from slotkeeper.scheduler.policies.adapters import Adapter
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, keeps_checkpoints
from slotkeeper.scheduler.types import SlotId
from slotkeeper.vocab.gguf import GgufHeader, read_header

# -- reading all traits ----------------------------------------------------------------------------------

NO_PROJECTOR: Final = "the projector's file is not known: saved states with images serve this process only"
UNSEEN: Final = "started by others: flags that /props does not show count as defaults until found out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The result of reading an engine's traits. `notes` say what is assumed, for the log and `doctor`."""

    traits: EngineTraits
    props: dict[str, Any]
    model: dict[str, Any]  # its entry in /v1/models
    model_path: Path | None  # the served model's file, if this machine can read it
    header: GgufHeader | None
    build: str  # as people name it: b11549, or what we know of a build without a number
    notes: list[str]
    files: ProbeResult | None = None  # the format of its slot files; None without a folder
    no_files: NoFilesError | None = None  # why it cannot have snapshots; None without a folder
    voice: str = ""  # the name of its logprob fingerprint, if the flags are unknown
    flags: EngineFlags | None = None  # its command line, if that is known or could be read
    left: Mapping[SlotId, int] = field(default_factory=dict)  # tokens of ours that could not be erased


async def read_traits(
    client: EngineClient,
    flags: EngineFlags | None = None,
    *,
    headers: Headers | None = None,
    slot_dir: Path | None = None,
    may_compute: bool = False,
    may_read: bool = False,
    known: ProbeResult | None = None,
    hurried: Callable[[], bool] = lambda: False,
) -> Reading:
    """Read the traits of an engine that is awake: `GET /slots` would wake a sleeping one.

    If the flags are known or can be read, this computes nothing, but for an image. `client.computed` counts
    the tokens that it computes.

    Args:
        client: the client of that engine.
        flags: the flags that we started it with; None if another program started it.
        headers: credentials, if not the client's own.
        slot_dir: its --slot-save-path as this machine sees it; None = no snapshots, nothing is saved.
        may_compute: whether a canary is allowed in an unused engine.
        may_read: whether to look for its command line among this machine's processes.
        known: the `files` of an earlier reading, for an engine where a canary may not or cannot run.
        hurried: whether a request waits for the result. Then experiments are left out, but not the
            logprobs that tell which slot files fit: a wrong file gives wrong answers.

    Raises:
        EngineError: a refusal. Trouble with slot files only sets `Reading.no_files`.
        EngineGoneError: no answer.
    """
    reading = replace(await read_answers(client, flags, headers), flags=flags)
    if flags is None and may_read:
        reading = await read_command_line(client.base, reading)
    probe = _Probe(client, flags, headers, hurried, may_compute=may_compute)
    if slot_dir is not None:
        try:
            reading = await probe.with_files(reading, slot_dir, known)
        except NoFilesError as error:
            notes = [*reading.notes, f"no snapshots: {error}"]
            reading = replace(reading, no_files=error, notes=notes)
    elif reading.traits.checkpoints_in_doubt and may_compute and not hurried():
        read = reading.traits
        probe.tried = await try_out(client, headers, read.adapters, may_thin=lambda: probe.may_thin(read))
    if tried := probe.tried:
        reading = replace(reading, traits=tried.traits_into(reading.traits), left=tried.left)
    started = flags.build if flags else 0
    build = fingerprint.in_words(reading.build, started, reading.model, reading.traits.state_version)
    return replace(reading, build=build)


class _Probe:
    """The part of a reading that may compute something."""

    def __init__(
        self,
        client: EngineClient,
        given: EngineFlags | None,
        headers: Headers | None,
        hurried: Callable[[], bool],
        *,
        may_compute: bool,
    ) -> None:
        self._client = client
        self._given = given
        self._headers = headers
        self._hurried = hurried
        self._may_compute = may_compute
        self.tried: Tried | None = None  # the trial of an engine whose flags are unknown

    def may_thin(self, traits: EngineTraits) -> bool:
        """Whether to try out now whether the engine drops checkpoints: if it may, and no request waits."""
        return traits.checkpoints_in_doubt and traits.eager_thinning and not self._hurried()

    async def with_files(self, reading: Reading, slot_dir: Path, known: ProbeResult | None) -> Reading:
        """Return the reading with the format of the slot files and the fingerprint. Raises NoFilesError."""
        client, headers, traits = self._client, self._headers, reading.traits
        # If the model's file cannot be read here, only logprobs tell two trainings of it apart.
        flags = self._given or (reading.flags if reading.header else None)
        identity = await identify(client, reading, flags, headers)
        digest, voice = identity.digest, ""
        files = await probe_files(client, slot_dir, traits, digest, headers=headers)
        if flags is None:
            process = str(reading.props.get("media_marker", ""))
            voice, self.tried = await voice_of(
                *(client, slot_dir, digest, process),
                may_compute=self._may_compute,
                headers=headers,
                adapters=traits.adapters,
                may_thin=lambda: self.may_thin(reading.traits),
            )
            if self.tried is not None:
                traits = self.tried.traits_into(traits)
                files = replace(files, files_carry=files.files_carry and keeps_checkpoints(traits))
        may_compute = self._may_compute and not self._hurried()
        about = (client, slot_dir, traits, files, media_marker(reading.props))
        files = await probe_images(*about, may_compute=may_compute, known=known, headers=headers)
        traits = files.traits_into(traits, identity.fingerprint(files.state_version, voice))
        return replace(reading, traits=traits, files=files, voice=voice)


async def read_answers(client: EngineClient, flags: EngineFlags | None, headers: Headers | None) -> Reading:
    """Read all traits except those of slot files. This computes and saves nothing."""
    props = await client.props(headers=headers)
    model = await client.models(headers=headers)
    build, notes = str(props.get("build_info", "")), []
    eager = thins_eagerly(build, model)
    if eager is None:
        why = "assumed to thin checkpoints at every task (T7 in `slotkeeper docs engine`)"
        notes.append(f"build {build!r} is unknown: {why}")
    family = await family_of(client, str(props.get("chat_template") or ""), headers)
    traits = EngineTraits(
        n_slots=int(props.get("total_slots", 1)),
        n_ctx=int(props.get("default_generation_settings", {}).get("n_ctx", 0)),
        eager_thinning=eager is not False,
        unified=looks_unified(props, model),
        speculative=await speculates(client, headers),
        user_start=await user_openers(client, family, headers),
        markers=await learn_markers(client, family, headers),
        adapters=await adapters_now(client, headers),
    )
    if not traits.user_start:
        notes.append("the chat template is of no known family: where user messages begin is not known")
    elif not traits.markers.user:
        notes.append("the chat template's markers did not stand a check: boundaries are found by rendering")
    path, header = await model_file(props, model)
    if header is None:
        notes.append(
            "the model's file cannot be read here: its memory is assumed to be hybrid, the careful choice"
        )
    else:
        memory, window = memory_kind(header)
        traits = replace(
            traits,
            memory=memory,
            n_swa=window,
            token_bytes=token_bytes(header, flags),
            checkpoint_bytes=checkpoint_bytes(header, flags),
        )
    if flags is None:
        notes.append(UNSEEN)
    else:
        traits = flags.traits_into(traits)
    projector = await asyncio.to_thread(fingerprint.projector_of, props, flags.mmproj if flags else None)
    traits = replace(traits, projector=projector)
    if projector.startswith(fingerprint.OF_PROCESS):
        notes.append(NO_PROJECTOR)
    return Reading(
        traits=traits, props=props, model=model, model_path=path, header=header, build=build, notes=notes
    )


async def adapters_now(client: EngineClient, headers: Headers | None) -> tuple[Adapter, ...]:
    """Return the LoRA adapters that the engine has loaded; none if it does not list them.

    Raises EngineGoneError.
    """
    try:
        listed = await client.lora_adapters(headers=headers)
    except EngineError:
        return ()
    return await asyncio.to_thread(adapters_of, listed)


async def read_command_line(base: str, reading: Reading) -> Reading:
    """Return the reading with the flags of the engine's process, if that process is visible here."""
    flags = await asyncio.to_thread(flags_behind, base, reading.props)
    if flags is None:
        return reading
    gone, path = {UNSEEN}, flags.mmproj
    traits = replace(flags.traits_into(reading.traits), speculative=reading.traits.speculative)
    if path and path.is_absolute():  # the other process may run in another folder
        projector = await asyncio.to_thread(fingerprint.projector_of, reading.props, path)
        traits, gone = replace(traits, projector=projector), {UNSEEN, NO_PROJECTOR}
    notes = [note for note in reading.notes if note not in gone]
    notes.append("started by others: its flags were read here")
    return replace(reading, traits=traits, flags=flags, notes=notes)


async def identify(
    client: EngineClient, reading: Reading, flags: EngineFlags | None, headers: Headers | None
) -> Identity:
    """Return the facts that decide which slot files the engine may load.

    Raises NoFilesError, EngineGoneError.
    """
    try:
        adapters = await client.lora_adapters(headers=headers)
    except EngineError as error:
        raise NoFilesError(Why.UNCERTAIN, str(error)) from error
    return Identity(
        model=await asyncio.to_thread(
            about_model, reading.model_path, reading.header, reading.props, reading.model
        ),
        flags=about_flags(flags),
        adapters=await asyncio.to_thread(adapters_of, adapters),
        streams=streams_of(reading.traits),
    )


def thins_eagerly(build: str, model: Mapping[str, Any]) -> bool | None:
    """Whether the build drops close checkpoints at every task (engine.md T7); None = unknown.

    1. Decide by its number, if that is one of llama.cpp's own.
    2. Else by its entry in /v1/models.
    """
    number = fingerprint.number_in(build)
    if number:  # (1)
        return number < fingerprint.LAZY_SINCE
    if not model:
        return None
    return not fingerprint.thins_lazily(model)  # (2)


def looks_unified(props: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether llama-server runs without -np: four slots, each with the model's full context (T6)."""
    context = props.get("default_generation_settings", {}).get("n_ctx", 0)
    trained = model.get("meta", {}).get("n_ctx_train", 0)
    return bool(props.get("total_slots") == AUTO_SLOTS and trained and context >= trained)


async def speculates(client: EngineClient, headers: Headers | None) -> bool:
    try:
        return any(slot.speculative for slot in await client.slots(headers=headers))
    except EngineError as error:
        if error.status == 501:  # --no-slots
            return False
        raise


async def model_file(
    props: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[Path | None, GgufHeader | None]:
    """Return the model's file and header, if this machine has the file: the engine may run on another one."""
    path = Path(str(props.get("model_path") or ""))
    try:
        if not await asyncio.to_thread(path.is_file):  # raises if we may not look
            return None, None
        header = await asyncio.to_thread(read_header, path)
    except (OSError, ValueError):
        return None, None
    meta = model.get("meta") or {}
    same = meta.get("n_vocab") in {None, header.vocab_size}
    same = same and meta.get("n_ctx_train") in {None, header.context_length}
    return (path, header) if same else (None, None)


# -- which kind of memory llama.cpp gives a model, from its architecture and its metadata ----------------
# The lists are those of llama.cpp (`llm_arch_is_recurrent`, `llm_arch_is_hybrid`, and where `swa_type`
# is set). Other architectures may be UNKNOWN, which is treated as hybrid, the careful choice.

RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID: Final = frozenset(
    {
        "falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h",
        "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next",
    }
)  # fmt: skip
# Architectures with a sliding window, if the file states its size
SLIDING: Final = frozenset(
    {
        "afmoe", "cohere2", "cohere2moe", "exaone-moe", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss",
        "mimo2", "olmo2", "olmo3", "plamo3", "smallthinker", "step35",
    }
)  # fmt: skip
# The window in tokens that llama.cpp takes if the file states none
DEFAULT_WINDOW: Final = {"gemma2": 4096, "llama4": 8192, "smallthinker": 4096}
IGNORES_WINDOW: Final = frozenset({"phi3", "phimoe"})  # "Phi SWA is currently disabled"
EXAONE4_LAYERS: Final = 64  # only the 32B model slides; llama.cpp recognises it by its number of layers


def memory_kind(header: GgufHeader) -> tuple[Memory, int]:
    """Return the memory kind and the window in tokens (0 without a sliding window).

    1. Recurrent by name.
    2. Hybrid by name, or by a state key: with attention hybrid, without it recurrent.
    3. Sliding window by name.
    4. A window, or a header, that we cannot interpret: unknown.
    5. Else dense.
    """
    name, window = header.architecture, header.sliding_window
    if name in RECURRENT:  # (1)
        return Memory.RECURRENT, 0
    if name in HYBRID:  # (2)
        return Memory.HYBRID, window
    if header.has_state:
        return (Memory.HYBRID, window) if header.head_count else (Memory.RECURRENT, 0)
    if name == "llama4":  # (3) chunked: the window is the chunk
        chunk = header.values.get("llama4.attention.chunk_size", DEFAULT_WINDOW["llama4"])
        return (Memory.SWA, chunk) if isinstance(chunk, int) and chunk else (Memory.DENSE, 0)
    if name == "exaone4":
        slides = header.block_count == EXAONE4_LAYERS
        return (Memory.SWA, window or 4096) if slides else _without_name(header, window)
    if name in SLIDING:
        window = window or DEFAULT_WINDOW.get(name, 0)
        return (Memory.SWA, window) if window else (Memory.DENSE, 0)
    if name in IGNORES_WINDOW:
        return Memory.DENSE, 0
    return _without_name(header, window)


def _without_name(header: GgufHeader, window: int) -> tuple[Memory, int]:
    if window or not header.architecture or not header.head_count:  # (4)
        return Memory.UNKNOWN, window
    # sparse attention with a second cache for its indexer: how such a cache can be cut was not measured
    sparse = any(".attention.indexer." in key for key in header.values)
    if header.full_attention_interval or sparse:
        return Memory.UNKNOWN, 0
    return Memory.DENSE, 0  # (5)

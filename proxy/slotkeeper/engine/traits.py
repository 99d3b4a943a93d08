"""Reads the traits of an engine: from GET /props, its flags, its model's header, its chat template's markers.

The format of its slot files needs an experiment, which is in `file_canary`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
from slotkeeper.scheduler.policies.adapters import Adapter
from slotkeeper.scheduler.prompts.tokens import UNKNOWN, Boundary, BoundaryKind, Markers, Tokens, boundaries
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


# -- the markers of a chat template ---------------------------------------------------------------------

# The markers of an engine's chat template: known by family, or learned from samples.
#
# The engine renders a sample chat, because a template's text may build markers from parts. The token ids of
# a family's openers depend on the vocabulary and on the text after them, so they are read from the rendered
# text. Markers count only if they find the start of every message. A second rendering, with another text in
# that message, shows where the message starts.


@dataclass(frozen=True, slots=True)
class Family:
    """The texts that open messages in one family of chat templates."""

    user: str  # the engine splits its batches there and makes checkpoints
    reply: str  # "" if replies follow the user's message without an opener
    tools: tuple[str, ...] = ()  # openers of a tool's result: versions of the family differ


# If one user opener contains another, the longer one comes first.
FAMILIES: Final = (
    # ChatML: Qwen (results stand in a user message), Hermes, many others
    Family(
        "<|im_start|>user", "<|im_start|>assistant", ("<|im_start|>user\n<tool_response>", "<|im_start|>tool")
    ),
    Family("<start_of_turn>user", "<start_of_turn>model"),  # Gemma to 3
    Family("<|turn>user", "<|turn>model", ("<|tool_response>", "<|turn>tool")),  # Gemma 4
    Family(  # Llama 3
        "<|start_header_id|>user<|end_header_id|>",
        "<|start_header_id|>assistant<|end_header_id|>",
        ("<|start_header_id|>ipython<|end_header_id|>", "<|start_header_id|>tool<|end_header_id|>"),
    ),
    # gpt-oss; the function's name follows, then the recipient of the result
    Family("<|start|>user<|message|>", "<|start|>assistant", ("<|start|>functions",)),
    Family(  # Kimi
        "<|im_user|>user<|im_middle|>",
        "<|im_assistant|>assistant<|im_middle|>",
        ("<|im_system|>tool<|im_middle|>",),
    ),
    Family(  # Granite
        "<|start_of_role|>user<|end_of_role|>",
        "<|start_of_role|>assistant<|end_of_role|>",
        (
            "<|start_of_role|>user<|end_of_role|>\n<tool_response>",
            "<|start_of_role|>tool_response<|end_of_role|>",
            "<|start_of_role|>tool<|end_of_role|>",
        ),
    ),
    Family(  # Command R
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>",),
    ),
    Family(  # DeepSeek, with its own bars
        "<｜User｜>",  # noqa: RUF001
        "<｜Assistant｜>",  # noqa: RUF001
        ("<｜tool▁output▁begin｜>",),  # noqa: RUF001
    ),
    Family("]~b]user", "]~b]ai", ("]~b]tool",)),  # MiniMax
    Family(
        "<|user|>", "<|assistant|>", ("<|observation|>", "<|tool_response|>", "<|tool|>")
    ),  # GLM, Phi, Zephyr
    Family("[INST]", "", ("[TOOL_RESULTS]",)),  # Mistral
)
FIRST, REPLY, SECOND = "slotkeeper-first", "slotkeeper-reply", "slotkeeper-second"
REACH: Final = 64  # characters between the opener and the text: line ends, a date, never a message
CHAT: Final[Mapping[str, Any]] = {
    "messages": [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": REPLY},
        {"role": "user", "content": SECOND},
    ]
}


def family_in(rendered: str) -> Family | None:
    """Return the family whose user opener stands before both user messages of the rendered `CHAT`."""
    if not all(text in rendered for text in (FIRST, REPLY, SECOND)):
        return None
    first = rendered.partition(FIRST)[0][-REACH:]
    second = rendered.partition(REPLY)[2].partition(SECOND)[0][-REACH:]
    return next((known for known in FAMILIES if known.user in first and known.user in second), None)


async def family_of(client: EngineClient, template: str, headers: Headers | None = None) -> Family | None:
    """Return the family of an engine's template, whose source is `template`; None if it is unknown."""
    try:
        return family_in(await client.apply_template(CHAT, headers=headers))
    except EngineError:  # the template refuses such a chat
        return next((known for known in FAMILIES if known.user in template), None)


async def user_openers(
    client: EngineClient, family: Family | None, headers: Headers | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences by which the engine finds user messages; empty if they are unknown."""
    if family is None:
        return ()
    ids = await client.tokenize(family.user, add_special=False, parse_special=True, headers=headers)
    return (tuple(ids),)


# -- learned from sample chats, and checked on them ------------------------------------------------------

Chat = dict[str, Any]

SYSTEM: Final = {"role": "system", "content": "slotkeeper-system"}
TALK: Final = CHAT["messages"]
NAME, CALL = "slotkeeper_tool", "slotcall1"  # Mistral wants ids of nine letters and digits
PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": CALL, "type": "function", "function": {"name": NAME, "arguments": '{"a":"b"}'}}],
}
RESULT: Final = {"role": "tool", "tool_call_id": CALL, "content": "slotkeeper-result"}
KINDS: Final = {"user": BoundaryKind.USER, "tool": BoundaryKind.TOOL}
LONGEST: Final = 32  # tokens of a generation prompt; a longer one is a history that rendered differently
OTHER: Final = "other text"  # replaces a text that begins with "slotkeeper"


def tool(description: str) -> Chat:
    function = {"name": NAME, "description": description, "parameters": PARAMETERS}
    return {"type": "function", "function": function}


# The richest sample first: templates refuse message kinds that they do not know.
SAMPLES: Final[tuple[Chat, ...]] = (
    {"messages": [SYSTEM, *TALK, CALLED, RESULT], "tools": [tool("slotkeeper-tool")]},
    {"messages": [SYSTEM, *TALK]},
    {"messages": [*TALK]},
)


async def learn_markers(
    client: EngineClient, family: Family | None, headers: Headers | None = None
) -> Markers:
    """Return the markers of the engine's template; `UNKNOWN` if none pass the check.

    Without a family only the opener of the reply is learned, if the template has a generation prompt.
    """
    engine = Renderer(client, headers)
    for chat in SAMPLES if family else SAMPLES[1:]:  # the reply to a tool's result may have another prompt
        try:
            markers = await _learn(engine, chat, family)
        except EngineError:  # the template refuses such a chat
            continue
        if markers is not None:
            return markers
    return UNKNOWN if family is None else await learn_markers(client, None, headers)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders chats with the engine: template by `/apply-template`, tokenizer by `/tokenize`."""

    client: EngineClient
    headers: Headers | None

    async def text(self, chat: Chat) -> str:
        return await self.client.apply_template(chat, headers=self.headers)

    async def ids(self, text: str, *, whole: bool = True) -> Tokens:
        """Return the token ids of a whole prompt, or of a text in the middle of one."""
        return Tokens(
            await self.client.tokenize(text, add_special=whole, parse_special=True, headers=self.headers)
        )

    async def render(self, chat: Chat) -> Tokens:
        return await self.ids(await self.text(chat))


async def _learn(engine: Renderer, chat: Chat, family: Family | None) -> Markers | None:
    """Return the markers in one sample; None if they do not pass the check."""
    text = await engine.text(chat)
    if any(message["content"] not in text for message in chat["messages"]):
        return None
    prompt = await engine.ids(text)
    turn = await _turn(engine, chat, prompt)
    if family is None:
        return Markers(reply=(prompt.cut(turn),)) if 0 < len(prompt) - turn <= LONGEST else None
    markers = await _markers(engine, text, family)
    found = boundaries(prompt, markers)
    if not agrees(found, await _places(engine, chat, prompt)):
        return None
    if found[-1].at != turn and not await _goes_on(engine, chat, prompt, markers):
        return None
    inside = [found[0].at <= at < len(prompt) for at in await _lead(engine, chat, prompt)]
    return replace(markers, lead_inside=any(inside))


def agrees(found: Sequence[Boundary], places: Sequence[Boundary]) -> bool:
    """Whether each opener stands before its own message's text and after the text of the message before.

    Args:
        found: the boundaries that the markers give (see `boundaries`), with the turn as the last.
        places: where the texts of the messages begin, or a little later.
    """
    kinds = [*(place.kind for place in places), BoundaryKind.TURN]
    if [boundary.kind for boundary in found] != kinds:
        return False
    return all(
        ask.at <= place.at < after.at for ask, place, after in zip(found, places, found[1:], strict=False)
    )


async def _turn(engine: Renderer, chat: Chat, prompt: Tokens) -> int:
    """Return the token at which the generation prompt begins.

    The prompts with and without it are compared: without it, Phi writes an end-of-text token instead.
    """
    return prompt.lcp(await engine.render({**chat, "add_generation_prompt": False}))


async def _goes_on(engine: Renderer, chat: Chat, prompt: Tokens, markers: Markers) -> bool:
    """Whether only the reply to a tool's result lacks an opener, because it continues the calling turn.

    Gemma 4 does so, with a few words of a generation prompt: then the prompt's end counts as the turn.
    """
    if chat["messages"][-1] != RESULT or boundaries(prompt, markers)[-1].at != len(prompt):
        return False
    asked = {**chat, "messages": chat["messages"][: -len((CALLED, RESULT))]}
    before = await engine.render(asked)
    return boundaries(before, markers)[-1].at == await _turn(engine, asked, before)


async def _markers(engine: Renderer, text: str, family: Family) -> Markers:
    before, _, behind = text.partition(RESULT["content"])
    nearest = max(family.tools, key=before.rfind, default="") if behind else ""
    return Markers(
        user=await _opener(engine, family.user, text),
        tool=await _opener(engine, nearest, text),
        reply=await _opener(engine, family.reply, text),
    )


async def _opener(engine: Renderer, opener: str, text: str) -> tuple[Tokens, ...]:
    """Return the opener's ids, as far as they are equal alone and in the sample, where text follows.

    They can differ: Qwen 2.5 makes one token of the last ">" and the line end after it.
    """
    if not opener or opener not in text:
        return ()
    alone = await engine.ids(opener, whole=False)
    within = await engine.ids(text[text.index(opener) :], whole=False)
    return (alone.cut(0, alone.lcp(within)),)


async def _places(engine: Renderer, chat: Chat, prompt: Tokens) -> list[Boundary]:
    """Return where the texts of users and tools begin: a prompt with another text diverges there."""
    places: list[Boundary] = []
    for index, message in enumerate(chat["messages"]):
        if message["role"] in KINDS:
            at = prompt.lcp(await engine.render(_with_other(chat, index)))
            places.append(Boundary(at, KINDS[message["role"]] if places else BoundaryKind.HEAD))
    return places


async def _lead(engine: Renderer, chat: Chat, prompt: Tokens) -> list[int]:
    """Return where a prompt with another system text, or with another tool, diverges from this one."""
    others: list[Chat] = []
    if chat["messages"][0]["role"] == "system":
        others.append(_with_other(chat, 0))
    if "tools" in chat:
        others.append({**chat, "tools": [tool(OTHER)]})
    return [prompt.lcp(await engine.render(other)) for other in others]


def _with_other(chat: Chat, index: int) -> Chat:
    """Return the chat with another text in the message at `index`."""
    messages = list(chat["messages"])
    messages[index] = {**messages[index], "content": OTHER}
    return {**chat, "messages": messages}

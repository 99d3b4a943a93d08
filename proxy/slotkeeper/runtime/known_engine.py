"""What is known of one engine: its traits, its slot files, and its tokenizer, which renders prompts.

The tokenizer, and what was found out about slot files and flags, outlive the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from slotkeeper.api.document import Doc, Prompt
from slotkeeper.api.pictures import digests
from slotkeeper.engine.answers import MediaPrompt
from slotkeeper.engine.canary import ProbeResult
from slotkeeper.engine.client import EngineClient, EngineGoneError, Pulse
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.http import EngineAddress
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.runtime.images import EngineImages
from slotkeeper.scheduler.effects import Learned
from slotkeeper.scheduler.engine_model import FLAGS, EngineTraits, Known
from slotkeeper.scheduler.types import EngineId, Tokens
from slotkeeper.store import files
from slotkeeper.vocab.tokenizer import TokenizeCall, Tokenizer

# Between a request's text and the call stand caches and encoders that know of no client.
_LENT: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("lent", default=None)


class KnownEngine:
    """One engine, as far as it was read. Its control routes are spoken by `client`."""

    def __init__(
        self,
        engine: EngineId,
        *,
        address: EngineAddress | None = None,
        api_key: str | None,
        flags: EngineFlags | None = None,
        slot_dir: Path | None = None,
        may_compute: bool = False,
        may_read: bool = False,
    ) -> None:
        """Arguments as those of `EngineLink`."""
        self.engine = engine
        self.address = address or EngineAddress.of(engine)
        self.pulse = Pulse()
        self.client = EngineClient(self.address.engine, api_key=api_key, pulse=self.pulse)
        self.images = EngineImages(self.client)
        self.auth: dict[str, str] = {}  # of the last client whom the engine let in, for our own calls
        self.flags = flags
        self.files: ProbeResult | None = None  # what its slot files are like
        self.build = ""
        self.traits: EngineTraits | None = None
        self.tokenizer: Tokenizer | None = None
        self.process = ""  # changes with every start of the engine
        self.end_of_turn = -1  # the id that ends a reply
        self.slot_dir = slot_dir
        self.may_compute = may_compute
        self._may_read = may_read
        self._tokenizers = Tokenizers(self.tokenize)
        self._keeping = asyncio.Lock()

    async def read(self, *, may_compute: bool) -> Reading:
        """Look at it, and remember what was found. Raises what `read_traits` does."""
        reading = await read_traits(
            self.client,
            self.flags,
            headers=self.auth,
            slot_dir=self.slot_dir,
            may_compute=may_compute,
            may_read=self._may_read,
            known=self.files,
        )
        self.images.begins(reading.props)
        folder, self.build = self.slot_dir, reading.build
        self.traits = await completed(folder, reading.traits) if folder else reading.traits
        if folder and self.traits.guessed:
            self.traits = await with_flags(folder, self.process, self.traits)
        self.files = reading.files or self.files
        return reading

    def learned(self, what: Learned) -> None:
        """The scheduler found this out."""
        if self.traits:
            self.traits = self.traits.corrected(what.how, **{what.name: what.value})

    async def keep_learned(self) -> None:
        """For the next sidecar: it may find an engine in use, which cannot be tried out."""
        async with self._keeping:
            if self.slot_dir and self.traits:
                await keep_flags(self.slot_dir, self.process, self.traits)

    async def fitting(self, reading: Reading) -> Tokenizer:
        """The tokenizer for what was read."""
        return await self._tokenizers.fitting(reading)

    @property
    def layout(self) -> str:
        """Of its slot files, where one with tokens was seen."""
        return self.files.layout if self.files else ""

    def saw_layout(self, layout: str) -> None:
        """Of a file that it has just written."""
        if self.files and not self.files.layout:
            self.files = replace(self.files, layout=layout)

    # -- what the renderer needs -------------------------------------------------------------------

    async def tokenize(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        return await self.client.tokenize(
            content, add_special=add_special, parse_special=parse_special, headers=_LENT.get() or self.auth
        )

    async def render_chat(self, chat: Doc, auth: Mapping[str, str]) -> Tokens:
        """The exact prompt of a chat body (engine.md 1.4).

        Raises EngineError, EngineGoneError, and ValueError for images whose tokens cannot be known.
        """
        text = await self.client.apply_template(chat, headers=auth or self.auth)
        images = digests(chat) if self.images.marker else ()
        with _lending(auth):
            if images:
                return await self.images.tokens(self._tokenizer(), text, images, auth or self.auth)
            return await self._tokenizer().tokenize(text)

    async def sent(self, prompt: Tokens, auth: Mapping[str, str]) -> Sequence[int] | MediaPrompt:
        """What a prefill of these tokens is asked with. Raises as `render_chat` does."""
        if not prompt.chunks:
            return prompt.ids()
        with _lending(auth):
            return await self.images.prompt(self._tokenizer(), prompt, auth)

    async def render_prompt(self, prompt: Prompt, auth: Mapping[str, str]) -> Tokens:
        with _lending(auth):
            return await self._tokenizer().tokenize_prompt(prompt)

    async def render_text(self, text: str, auth: Mapping[str, str]) -> Tokens:
        """Plain text in the middle of a prompt."""
        with _lending(auth):
            return await self._tokenizer().tokenize(text, add_special=False)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise EngineGoneError(f"{self.engine} has not been probed yet")
        return self.tokenizer


@contextmanager
def _lending(auth: Mapping[str, str]) -> Iterator[None]:
    """What is asked of the engine in this block goes under the credential of a client."""
    before = _LENT.set(auth)
    try:
        yield
    finally:
        _LENT.reset(before)


# -- what outlives a process -----------------------------------------------------------------------------
# Whether files carry checkpoints is learnt from a canary, which is not possible in an engine that is in use
# (engine.md 2.2). It is true for every engine with the same fingerprint. Files' layout is not kept: a layout
# that is wrong would make every save look torn, and where the fingerprint had to be guessed it may be wrong.
#
# Flags cannot be tried out in an engine that is in use either; but the same process has the same flags.

SAID: Final = ("chat_template", "bos_token", "eos_token")  # by /props


class Tokenizers:
    """The tokenizer of the model that an engine serves: it outlives restarts, with all that it has seen."""

    def __init__(self, ask: TokenizeCall) -> None:
        self._ask = ask
        self._last: tuple[tuple[str, ...], Tokenizer] | None = None

    async def fitting(self, reading: Reading) -> Tokenizer:
        """The last one, if the same build serves the same model; else a new one, which is tried out first.

        A model whose file cannot be read here may be another each time.
        """
        said = {name: str(reading.props.get(name) or "") for name in SAID}
        model = reading.header.fingerprint if reading.header else ""
        same = (model, str(reading.model_path), reading.build, *said.values())
        if self._last and model and self._last[0] == same:
            return self._last[1]
        tokenizer = await Tokenizer.open(
            self._ask,
            model_path=reading.model_path,
            chat_template=said["chat_template"],
            bos_token=said["bos_token"],
            eos_token=said["eos_token"],
        )
        self._last = (same, tokenizer)
        return tokenizer


# -- whether files carry checkpoints, by fingerprint -----------------------------------------------------

FILE: Final = "slotkeeper-engines.json"
MOST: Final = 64  # engines, the oldest are forgotten
LARGEST: Final = 64 << 10  # bytes; what is larger is none of ours

Carrying = Mapping[str, bool]  # fingerprint -> whether its files carry checkpoints, the newest last


# -- pure ----------------------------------------------------------------------------------------------


def decode(data: bytes) -> Carrying:
    """Read what `encode` wrote. From anything else nothing is known."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(found, dict) or any(type(carry) is not bool for carry in found.values()):
        return {}
    return dict(list(found.items())[-MOST:])


def encode(known: Carrying) -> bytes:
    return orjson.dumps(known, option=orjson.OPT_INDENT_2)


def learnt(known: Carrying, fingerprint: str, *, carry: bool) -> Carrying:
    """The same and this one, which is the newest now."""
    others = [item for item in known.items() if item[0] != fingerprint]
    return dict([*others, (fingerprint, carry)][-MOST:])


# -- beside the slot files -----------------------------------------------------------------------------


async def completed(folder: Path, traits: EngineTraits) -> EngineTraits:
    """The traits with what is remembered, where nothing was found out; else that is remembered.

    A folder that cannot be read or written costs the memory, never the engine.
    """
    if not traits.fingerprint:
        return traits
    known = await asyncio.to_thread(recalled, folder)
    before = known.get(traits.fingerprint)
    if traits.files_carry is None:
        return replace(traits, files_carry=before)
    if traits.files_carry is not before:
        now = learnt(known, traits.fingerprint, carry=traits.files_carry)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember, folder, now)
    return traits


def recalled(folder: Path) -> Carrying:
    """Blocks. Nothing where the file cannot be read, or is not what we wrote."""
    try:
        with files.open_ours(folder / FILE) as file:
            return decode(file.read(LARGEST))
    except OSError:
        return {}


def remember(folder: Path, known: Carrying) -> None:
    """Blocks. Raises OSError. Written aside first, at a name that the store clears away after a crash."""
    files.write_small(folder / FILE, folder / files.new_temporary(time.time()), encode(known))


# -- flags of one process --------------------------------------------------------------------------------

FLAGS_FILE: Final = "slotkeeper-flags.json"
MOST_PROCESSES: Final = 16  # processes, the oldest are forgotten

Found = Mapping[str, tuple[bool | int | float, Known]]  # by the name of the field
READER: Final = TypeAdapter(dict[str, dict[str, tuple[bool | int | float, Known]]])


async def with_flags(folder: Path, process: str, traits: EngineTraits) -> EngineTraits:
    """The traits with what is remembered of this process, where nothing newer is known."""
    found = (await asyncio.to_thread(recalled_flags, folder)).get(process, {})
    for name, (value, how) in found.items():
        if name in FLAGS and traits.known(name) is Known.DEFAULT:
            traits = traits.learned(how, **{name: value})
    return traits


async def keep_flags(folder: Path, process: str, traits: EngineTraits) -> None:
    """A folder that cannot be read or written costs the memory, never the engine."""
    found = {
        told: (getattr(traits, told), how) for told, how in traits.knowledge.items() if how is not Known.FLAGS
    }
    if found and process:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember_flags, folder, process, found)


def recalled_flags(folder: Path) -> dict[str, Found]:
    """Blocks. Nothing where the file cannot be read, or is not what we wrote."""
    try:
        with files.open_ours(folder / FLAGS_FILE) as file:
            return dict(READER.validate_json(file.read(LARGEST)))
    except (OSError, ValidationError):
        return {}


def remember_flags(folder: Path, process: str, found: Found) -> None:
    """Blocks. Raises OSError. Written aside first, at a name that the store clears away after a crash."""
    others = {known: of for known, of in recalled_flags(folder).items() if known != process}
    kept = dict([*others.items(), (process, found)][-MOST_PROCESSES:])
    files.write_small(folder / FLAGS_FILE, folder / files.new_temporary(time.time()), orjson.dumps(kept))

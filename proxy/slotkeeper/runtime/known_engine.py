"""Our knowledge of one engine: its traits, its slot files, and its tokenizer, which renders prompts.

The tokenizer, and the findings about slot files and flags, outlive the engine's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from slotkeeper.api.document import Doc, Prompt
from slotkeeper.api.pictures import digests
from slotkeeper.engine.answers import EngineError, EngineGoneError, MediaPrompt
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.file_canary import ProbeResult
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.http import EngineAddress, Pulse
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.observe.log import get_logger
from slotkeeper.runtime.images import EngineImages
from slotkeeper.scheduler.adapters import Adapter, set_of, single
from slotkeeper.scheduler.effects import Learned
from slotkeeper.scheduler.engine_model import FLAGS, EngineTraits, Known
from slotkeeper.scheduler.events import AdaptersSeen
from slotkeeper.scheduler.tokens import Tokens
from slotkeeper.scheduler.types import EngineId
from slotkeeper.store import files
from slotkeeper.vocab.tokenizer import TokenizeCall, Tokenizer

log = get_logger(__name__)

# The client's credential for one request's calls: the caches and encoders in between do not know clients.
_LENT: Final[ContextVar[Mapping[str, str] | None]] = ContextVar("lent", default=None)


class KnownEngine:
    """What was found out about one engine, and rendering with it. `client` sends its control calls."""

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
        """Take the arguments of `EngineLink`."""
        self.engine = engine
        self.address = address or EngineAddress.of(engine)
        self.pulse = Pulse()
        self.client = EngineClient(self.address, api_key=api_key, pulse=self.pulse)
        self.images = EngineImages(self.client)
        self.auth: dict[str, str] = {}  # for our own calls: that of the last client that was let in
        self.flags = flags
        self.files: ProbeResult | None = None  # findings about its slot files
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
        self._measuring = asyncio.Lock()
        self._longest: tuple[Tokenizer | None, int | None] | None = None  # of the tokenizer's vocabulary

    async def read(self, *, may_compute: bool, hurried: Callable[[], bool] = lambda: False) -> Reading:
        """Probe the engine, and remember the result. Raises what `read_traits` raises."""
        reading = await read_traits(
            self.client,
            self.flags,
            headers=self.auth,
            slot_dir=self.slot_dir,
            may_compute=may_compute,
            may_read=self._may_read,
            known=self.files,
            hurried=hurried,
        )
        folder, self.build = self.slot_dir, reading.build
        self.traits = reading.traits
        if folder and self.traits.guessed:
            self.traits = await with_flags(folder, self.process, self.traits)
        self.files = reading.files or self.files
        closed = bool(reading.files and reading.files.images_closed)
        self.images.begins(reading.props, closed=closed)
        return reading

    def learned(self, what: Learned) -> None:
        """Correct a trait by what the scheduler has inferred."""
        if self.traits:
            self.traits = self.traits.corrected(what.how, **{what.name: what.value})

    async def keep_learned(self) -> None:
        """Write learnt flags to disk for the next sidecar, which cannot probe an engine that is in use."""
        async with self._keeping:
            if self.slot_dir and self.traits:
                await keep_flags(self.slot_dir, self.process, self.traits)

    async def see_adapters(self, *, announced: bool = False, exact: bool = False) -> AdaptersSeen:
        """Ask the engine for its LoRA adapters. While it runs only their scales change, never their files.

        `announced`, `exact`: see `AdaptersSeen`.
        """
        asked, known = time.monotonic(), self.traits.adapters if self.traits else ()
        adapters: tuple[Adapter, ...] | None = None
        try:
            listed = await self.client.lora_adapters(headers=self.auth)
            scales = {int(entry["id"]): single(float(entry["scale"])) for entry in listed}
            adapters = tuple(replace(adapter, scale=scales[at]) for at, adapter in enumerate(known))
        except (EngineError, EngineGoneError, KeyError, TypeError, ValueError) as error:
            log.debug("adapters_unseen", engine=self.engine, error=str(error))
        if adapters and self.traits and adapters != known:
            self.traits = replace(self.traits, adapters=adapters)
            log.info("adapters_changed", engine=self.engine, before=set_of(known), now=set_of(adapters))
        now = time.monotonic()
        return AdaptersSeen(
            at=now, asked=asked, engine=self.engine, adapters=adapters, announced=announced, exact=exact
        )

    async def fitting(self, reading: Reading) -> Tokenizer:
        """Return the tokenizer for the model that was read."""
        return await self._tokenizers.fitting(reading)

    @property
    def layout(self) -> str:
        """The layout of its slot files; empty until one with tokens was seen."""
        return self.files.layout if self.files else ""

    def saw_layout(self, layout: str) -> None:
        """Remember the layout of a file that the engine has just written."""
        if self.files and not self.files.layout:
            self.files = replace(self.files, layout=layout)

    # -- rendering ---------------------------------------------------------------------------------

    async def tokenize(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> Sequence[int]:
        """Return token ids. Raises EngineError for more than fit the context: such a prompt is refused."""
        return await self.client.tokenize_long(
            content,
            add_special=add_special,
            parse_special=parse_special,
            headers=_LENT.get() or self.auth,
            most=self.traits.n_ctx or None if self.traits else None,
        )

    async def longest_token(self, auth: Mapping[str, str]) -> int | None:
        """Return the most characters of a token, asked once for a tokenizer; None: unknown, or no limit."""
        async with self._measuring:
            if self._longest is None or self._longest[0] is not self.tokenizer:
                try:
                    longest = await self.client.longest_token(headers=auth or self.auth)
                except (EngineError, EngineGoneError, KeyError, TypeError) as error:
                    log.info("vocabulary_not_read", engine=self.engine, error=str(error))
                    return None
                self._longest = (self.tokenizer, longest)
            return self._longest[1]

    async def render_chat(self, chat: Doc, auth: Mapping[str, str]) -> Tokens:
        """Return the exact prompt of a chat body (engine.md 1.4).

        Raises EngineError, EngineGoneError, and ValueError for images whose tokens cannot be known.
        """
        text = await self.client.apply_template(chat, headers=auth or self.auth)
        images = digests(chat) if self.images.marker else ()
        with _lending(auth):
            if images:
                return await self.images.tokens(self._tokenizer(), text, images, auth or self.auth)
            return await self._tokenizer().tokenize(text)

    async def prefill_prompt(self, prompt: Tokens, auth: Mapping[str, str]) -> Sequence[int] | MediaPrompt:
        """Return the form in which a prefill sends these tokens. Raises the errors of `render_chat`."""
        if not prompt.chunks:
            return prompt.ids()
        with _lending(auth):
            return await self.images.prompt(self._tokenizer(), prompt, auth)

    async def render_prompt(self, prompt: Prompt, auth: Mapping[str, str]) -> Tokens:
        """Return the tokens of a raw prompt. Raises the errors of `render.FAILURES`."""
        with _lending(auth):
            return await self._tokenizer().tokenize_prompt(prompt)

    async def render_text(self, text: str, auth: Mapping[str, str]) -> Tokens:
        """Return the tokens of plain text in the middle of a prompt."""
        with _lending(auth):
            return await self._tokenizer().tokenize(text, add_special=False)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise EngineGoneError(f"{self.engine} has not been probed yet")
        return self.tokenizer


@contextmanager
def _lending(auth: Mapping[str, str]) -> Iterator[None]:
    """Use a client's credential for the engine calls in this block."""
    before = _LENT.set(auth)
    try:
        yield
    finally:
        _LENT.reset(before)


# -- knowledge that outlives a process -------------------------------------------------------------------
# Flags cannot be probed in an engine that is in use; but the same process has the same flags. The layout of
# its files is not written: a wrong layout would make every save look torn.

SAID: Final = ("chat_template", "bos_token", "eos_token")  # fields of GET /props


class Tokenizers:
    """The tokenizer of the model that an engine serves. It outlives restarts, with its caches."""

    def __init__(self, ask: TokenizeCall) -> None:
        self._ask = ask
        self._last: tuple[tuple[str, ...], Tokenizer] | None = None

    async def fitting(self, reading: Reading) -> Tokenizer:
        """Return the last tokenizer if the same build serves the same model, else a new one, checked first.

        A model whose file cannot be read here may be another one each time.
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


# -- flags of one process --------------------------------------------------------------------------------

FLAGS_FILE: Final = "slotkeeper-flags.json"
LARGEST: Final = 64 << 10  # bytes; the file is not larger
MOST_PROCESSES: Final = 16  # the oldest are forgotten

Found = Mapping[str, tuple[bool | int | float, Known]]  # by the name of the field
READER: Final = TypeAdapter(dict[str, dict[str, tuple[bool | int | float, Known]]])


async def with_flags(folder: Path, process: str, traits: EngineTraits) -> EngineTraits:
    """Return the traits with the remembered flags of this process, for flags that are still at defaults."""
    found = (await asyncio.to_thread(recalled_flags, folder)).get(process, {})
    for name, (value, how) in found.items():
        if name in FLAGS and traits.known(name) is Known.DEFAULT:
            traits = traits.learned(how, **{name: value})
    return traits


async def keep_flags(folder: Path, process: str, traits: EngineTraits) -> None:
    """Write the flags learnt of this process. If the folder cannot be written, they are lost with us."""
    found = {
        name: (getattr(traits, name), how) for name, how in traits.knowledge.items() if how is not Known.FLAGS
    }
    if found and process:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember_flags, folder, process, found)


def recalled_flags(folder: Path) -> dict[str, Found]:
    """Read the file; empty if it cannot be read or is not ours. Blocks."""
    try:
        with files.open_ours(folder / FLAGS_FILE) as file:
            return dict(READER.validate_json(file.read(LARGEST)))
    except (OSError, ValidationError):
        return {}


def remember_flags(folder: Path, process: str, found: Found) -> None:
    """Write the file, by a temporary name that the store removes after a crash. Blocks. Raises OSError."""
    others = {known: of for known, of in recalled_flags(folder).items() if known != process}
    kept = dict([*others.items(), (process, found)][-MOST_PROCESSES:])
    files.write_small(folder / FLAGS_FILE, folder / files.new_temporary(time.time()), orjson.dumps(kept))

"""What is known of one engine: its traits, its slot files, and its tokenizer, which renders prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Final

from slotkeeper.api.document import Doc, Prompt
from slotkeeper.engine.canary import ProbeResult
from slotkeeper.engine.client import EngineClient, EngineGoneError, Pulse
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.engine.http import EngineAddress
from slotkeeper.engine.traits import Reading, read_traits
from slotkeeper.runtime.remembered import Tokenizers, completed, keep_flags, with_flags
from slotkeeper.scheduler.effects import Learned
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.scheduler.types import EngineId, Tokens
from slotkeeper.vocab.tokenizer import Tokenizer

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
        """The exact prompt of a chat body (engine.md 1.4). Raises EngineError, EngineGoneError."""
        text = await self.client.apply_template(chat, headers=auth or self.auth)
        with _lending(auth):
            return await self._tokenizer().tokenize(text)

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

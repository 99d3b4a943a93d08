"""The front of this package: exact token ids of any text, as the engine would make them.

Three modes, each exact, each slower and surer than the one before: `local` (our own BPE), `segments`
(the engine, asked only for new pieces), `whole` (the engine, asked for every text). A mode is used only
if it agreed with the engine on the samples, and only until it is distrusted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from slotkeeper.scheduler.tokens import EMPTY, Tokens
from slotkeeper.vocab.bpe import LocalVocab, UnsupportedError
from slotkeeper.vocab.gguf import GgufError, read_vocabulary
from slotkeeper.vocab.remote import (
    RemoteEncoder,
    TokenizeCall,
    candidates_in,
    learn_affixes,
    learn_cuts,
    tokens_of,
)
from slotkeeper.vocab.segments import CACHE_BYTES, SegmentCache, SegmentTokenizer
from slotkeeper.vocab.selfcheck import samples
from slotkeeper.vocab.special import independent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Mode: TypeAlias = Literal["local", "segments", "whole"]
THREAD_CHARS: Final = 50_000  # about 4 ms of encoding: more would be felt by other requests' streams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rung:
    """A mode that passed the samples."""

    mode: Mode
    pieces: SegmentTokenizer


class Tokenizer:
    """Token ids of one engine's model. Not thread-safe: one event loop owns it."""

    def __init__(self, ask: TokenizeCall) -> None:
        self._ask = ask
        self._rungs: list[_Rung] = []
        self._prefix = self._suffix = EMPTY
        self.why = "not opened"

    @classmethod
    async def open(
        cls,
        ask: TokenizeCall,
        *,
        model_path: Path | None = None,
        chat_template: str = "",
        bos_token: str = "",
        eos_token: str = "",
        cache_bytes: int = CACHE_BYTES,
    ) -> Self:
        """Probe, self-check and choose a mode. The template and the two texts are those of /props.

        Takes some 100 to 200 small calls to /tokenize. Never raises: an odd model, or an engine that
        does not answer, gets mode `whole`, with `why`.
        """
        self = cls(ask)
        try:
            await self._climb(model_path, candidates_in(chat_template, (bos_token, eos_token)), cache_bytes)
        except Exception as error:  # noqa: BLE001 whatever the engine client raises: fail open
            self._rungs.clear()
            self.why = f"could not be probed: {error!r}"
        return self

    @property
    def mode(self) -> Mode:
        return self._rungs[0].mode if self._rungs else "whole"

    def __repr__(self) -> str:
        cache = f" {self._rungs[0].pieces.cache!r}" if self._rungs else ""
        return f"<Tokenizer {self.mode}: {self.why}{cache}>"

    def distrust(self, why: str) -> None:
        """The engine counted differently: drop to the next safer mode for good."""
        if self._rungs:
            dropped = self._rungs.pop(0)
            dropped.pieces.cache.clear()
            self.why = f"{dropped.mode} is distrusted: {why}"

    async def tokenize(self, text: str, *, add_special: bool = True) -> Tokens:
        """Ids as the chat route makes them from a rendered prompt (special tokens in the text count)."""
        if not self._rungs:
            return await tokens_of(await self._ask(text, add_special=add_special, parse_special=True))
        tokens = await self._rungs[0].pieces.tokenize(text)
        return self._prefix + tokens + self._suffix if add_special else tokens

    async def tokenize_prompt(self, prompt: str | Sequence[int | str]) -> Tokens:
        """Ids of a raw completion prompt: of an array, ids stay, and a string gets BOS only if it is first.

        An array of several strings is several prompts to the engine: ValueError, ask for each.
        """
        if isinstance(prompt, str):
            return await self.tokenize(prompt)
        if len(prompt) > 1 and all(isinstance(part, str) for part in prompt):
            raise ValueError("several prompts in one request")
        parts: list[Tokens] = []
        ids: list[int] = []
        for index, part in enumerate(prompt):
            if isinstance(part, str):
                parts += [_packed(ids), await self.tokenize(part, add_special=index == 0)]
                ids = []
            else:
                ids.append(part)
        return Tokens.of(b"".join(tokens.packed for tokens in (*parts, _packed(ids))))

    async def _climb(self, model_path: Path | None, candidates: list[str], cache_bytes: int) -> None:
        """Build the modes from the safest up, and keep those that agree with the engine."""
        self._prefix, self._suffix = await learn_affixes(self._ask)
        local, why = await _load(model_path)
        if local is None:
            cuts = await learn_cuts(self._ask, candidates)
        else:
            wanted = [*candidates, *(s for s in local.special if s in local.chat_template)]
            known = [text for text in dict.fromkeys(wanted) if text in local.special]
            cuts = {text: local.special_ids[text] for text in independent(known, local.special)}
        truths = {
            text: Tokens(await self._ask(text, add_special=False, parse_special=True))
            for text in samples(cuts)
        }
        remote = RemoteEncoder(self._ask, cuts)
        rung = _Rung(mode="segments", pieces=SegmentTokenizer(cuts, remote, SegmentCache(cache_bytes)))
        whys = [why, await self._try(rung, truths)]
        if local is not None:
            encoder = LocalEncoder(local, remote)
            rung = _Rung(mode="local", pieces=SegmentTokenizer(cuts, encoder, SegmentCache(cache_bytes)))
            whys.append(await self._try(rung, truths))
        self.why = "; ".join(filter(None, whys)) or "agrees with the engine"

    async def _try(self, rung: _Rung, truths: Mapping[str, Tokens]) -> str:
        """Put the mode on top if it agrees on every sample; else say why not."""
        try:
            for text, truth in truths.items():
                if await rung.pieces.tokenize(text) != truth:
                    return f"{rung.mode} differs from the engine on {text[:40]!r}"
        except Exception as error:  # noqa: BLE001 a mode that fails is a mode not to use
            return f"{rung.mode} failed: {error!r}"
        rung.pieces.cache.clear()
        self._rungs.insert(0, rung)
        return ""


class LocalEncoder:
    """Encodes pieces here; much text in a thread, and what cannot be done here by the engine."""

    def __init__(self, vocab: LocalVocab, remote: RemoteEncoder) -> None:
        self._vocab = vocab
        self._remote = remote

    async def __call__(self, pieces: Sequence[str], /) -> list[Tokens]:
        try:
            if sum(map(len, pieces)) > THREAD_CHARS:
                return await asyncio.to_thread(self._encode, pieces)
            return self._encode(pieces)
        except UnsupportedError:
            return await self._remote(pieces)

    def _encode(self, pieces: Sequence[str]) -> list[Tokens]:
        return [self._vocab.tokenize(piece) for piece in pieces]


async def _load(path: Path | None) -> tuple[LocalVocab | None, str]:
    if path is None:
        return None, "the model file is not at hand"
    try:
        vocabulary = await asyncio.to_thread(read_vocabulary, path)
        return await asyncio.to_thread(LocalVocab, vocabulary), ""
    except (GgufError, UnsupportedError) as error:
        return None, f"{path.name}: {error}"


def _packed(ids: list[int]) -> Tokens:
    try:
        return Tokens(ids)
    except (OverflowError, TypeError) as error:
        raise ValueError("not a token id") from error

"""Token ids for one engine's model: by its own vocabulary, or from the engine in as few calls as possible.

`POST /tokenize` never enters the engine's task queue (engine.md 1.4). Its `content` may mix strings and
ids: the engine tokenizes each string alone and returns ids unchanged. So an id that no piece can produce
marks where each piece ends.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens
from slotkeeper.vocab.bpe import (
    LocalVocab,
    SegmentCache,
    SegmentTokenizer,
    UnsupportedError,
    independent,
)
from slotkeeper.vocab.gguf import GgufError, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

# What a special token looks like in a chat template: <|im_start|>, <start_of_turn>, </s>, [INST]
_LOOKS_SPECIAL: Final = re.compile(r"<[^<>\s'\"{}()]{1,48}>|\[/?[A-Z_]{2,24}\]")
# Templates that build their special tokens from parts ('<|' + role + '|>') do not contain them whole
_USUAL: Final = (
    "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|endoftext|>",
)  # fmt: skip
MAX_CANDIDATES: Final = 48  # two small calls each, once per engine
THREAD_IDS: Final = 200_000  # about 4 ms of packing: more would delay other requests' streams


class TokenizeCall(Protocol):
    """`POST /tokenize` of one engine. The engine client provides it."""

    async def __call__(
        self, content: str | list[int | str], *, add_special: bool, parse_special: bool
    ) -> Sequence[int]: ...


class TokenizeError(RuntimeError):
    """The engine's answer to /tokenize does not have the expected shape."""


async def learn_cuts(ask: TokenizeCall, candidates: Iterable[str]) -> dict[str, int]:
    """Find out which candidates are control tokens: one id if parsed as special, another result if not.

    User-defined tokens give the same id both ways, as any word may. They stay inside the pieces, where the
    engine itself recognises them.
    """
    found: dict[str, int] = {}
    for text in list(dict.fromkeys(candidates))[:MAX_CANDIDATES]:
        parsed = await ask(text, add_special=False, parse_special=True)
        if len(parsed) == 1 and await ask(text, add_special=False, parse_special=False) != parsed:
            found[text] = parsed[0]
    return {text: found[text] for text in independent(found, found)}


def candidates_in(chat_template: str, hints: Iterable[str] = ()) -> list[str]:
    """Return texts that may be special tokens, the most likely first; `hints` are BOS and EOS."""
    return list(dict.fromkeys([*filter(None, hints), *_LOOKS_SPECIAL.findall(chat_template), *_USUAL]))


async def learn_affixes(ask: TokenizeCall) -> tuple[Tokens, Tokens]:
    """Return the tokens that add_special=true puts before and after a text: BOS, EOS or none.

    Raises TokenizeError if add_special=true changes the tokens of the text itself.
    """
    plain = await ask("hello", add_special=False, parse_special=True)
    full = await ask("hello", add_special=True, parse_special=True)
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return Tokens(full[:start]), Tokens(full[start + len(plain) :])
    raise TokenizeError("add_special changes the tokens of the text itself")


async def tokens_of(ids: Sequence[int]) -> Tokens:
    """Pack the ids of an answer; many ids in a thread, not to block the event loop."""
    return Tokens(ids) if len(ids) < THREAD_IDS else await asyncio.to_thread(Tokens, ids)


class RemoteEncoder:
    """Tokenizes all pieces in one call."""

    def __init__(self, ask: TokenizeCall, cuts: Mapping[str, int]) -> None:
        self._ask = ask
        # any cut serves as separator: pieces never contain its text, and no other text gives its id
        self._separator = next(iter(cuts.values()), None)

    async def __call__(self, pieces: Sequence[str], /) -> list[Tokens]:
        separator = self._separator
        if len(pieces) == 1 or separator is None:
            return [await self._tokens(piece) for piece in pieces]
        content: list[int | str] = []
        for piece in pieces:
            content += [separator, piece]
        # the array begins with an id, so that no piece comes first: only a first string gets BOS
        return _cut_at(await self._tokens(content), separator, len(pieces))

    async def _tokens(self, content: str | list[int | str]) -> Tokens:
        return await tokens_of(await self._ask(content, add_special=False, parse_special=True))


def _cut_at(ids: Tokens, separator: int, count: int) -> list[Tokens]:
    starts = ids.find_all(Tokens([separator]), most=count + 1)
    if len(starts) != count or starts[0] != 0:
        raise TokenizeError(f"{len(starts)} separators came back where {count} were sent")
    ends = [*starts[1:], len(ids)]
    return [ids.cut(start + 1, end) for start, end in zip(starts, ends, strict=True)]


# -- the modes of a tokenizer, and the texts that prove one ----------------------------------------------

# For each of these, two tokenizers once differed on a similar text.
_PLAIN: Final = (
    "Hello world",
    " leading blank",
    "  two leading blanks, and two at the end  ",
    "I'm he'll THEY'RE we'D can't 'sup",
    "1234567890 3.14159 1e-9 0x7fff",
    "x=1;y+=2;z**=3 # comment",
    "def f(a, *b):\n    return {k: v for k, v in a}\n\n\n",
    '{"name": "f", "arguments": {"a": [1, 2.5, null, true]}}',
    "tabs\tand\t\ttabs\r\nand\r\n\r\ncarriage returns",
    "\n\n\n   \n \t \n",
    "snake_case camelCase SCREAMING_CASE kebab-case",
    "https://example.org/a/b?c=d&e=f#g",
    "naïve café Ünïcödé ß \u017f ŉ",
    "cafe\u0301 n\u0303 a\u0328\u0301 \u0301alone",  # combining marks
    "中文字符,日本語のテキスト。한국어",
    "العربية עברית हिन्दी ไทย ελληνικά русский",
    "🎉 👩\u200d👩\u200d👧\u200d👦 🇩🇪 ❤\ufe0f ☕",  # joiners and variation selectors
    "\u00a0no-break\u2003em\u3000wide\u200bzero\ufeff",
    "²³¹ ½ Ⅷ ٣ \u0966",  # numbers that are not ASCII digits
    "∑∫√≠ «»“”\u2018\u2019…—\u2013",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<not|special> <| im_start |> <|", "[INST [/ ]", "</", "\x00\x07\x1b[0m\x7f",
)  # fmt: skip


def samples(cuts: Iterable[str]) -> list[str]:
    """Return about fifty texts, with the engine's special tokens next to all kinds of characters."""
    cuts = list(cuts)[:6]
    texts = list(_PLAIN)
    for cut in cuts:
        texts += [f"{cut}user\nHi there", f"before {cut} after", f"{cut}{cut}\n{cut}  x", f"a\n\n{cut}"]
    if len(cuts) > 1:
        a, b = cuts[:2]
        texts.append(f"{a}system\nBe brief.{b}\n{a}user\n{_PLAIN[4]}{b}\n{a}assistant\n")
        texts.append(f"{_PLAIN[3]}{a} {b}\t{a}\n{b}\n\n{_PLAIN[13]}{a}")
    return texts


# -- tokenizers ------------------------------------------------------------------------------------------

Mode: TypeAlias = Literal["local", "segments", "whole"]
THREAD_CHARS: Final = 50_000  # about 4 ms of encoding: more would delay other requests' streams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rung:
    """A mode, and its tokenizer; it is used once it has agreed with the engine on all samples."""

    mode: Mode
    pieces: SegmentTokenizer


class Tokenizer:
    """Gives token ids for one engine's model. Not thread-safe: one event loop owns it."""

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
    ) -> Self:
        """Probe the engine and choose a mode that agrees with it. Template, BOS and EOS come from /props.

        It makes about 100 to 200 small calls to /tokenize. It never raises: for an unusual model, or an
        engine that does not answer, the mode is `whole`, and `why` says why.
        """
        self = cls(ask)
        try:
            await self._climb(model_path, candidates_in(chat_template, (bos_token, eos_token)))
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
        """Change to the next safer mode for good, because the engine counted other tokens."""
        if self._rungs:
            dropped = self._rungs.pop(0)
            dropped.pieces.cache.clear()
            self.why = f"{dropped.mode} is distrusted: {why}"

    async def tokenize(self, text: str, *, add_special: bool = True) -> Tokens:
        """Return the ids that the chat route makes from a rendered prompt; special tokens are recognised.

        Raises TokenizeError, or whatever the call to /tokenize raises.
        """
        if not self._rungs:
            return await tokens_of(await self._ask(text, add_special=add_special, parse_special=True))
        tokens = await self._rungs[0].pieces.tokenize(text)
        return self._prefix + tokens + self._suffix if add_special else tokens

    async def tokenize_prompt(self, prompt: str | Sequence[int | str]) -> Tokens:
        """Return the ids of a raw completion prompt. In an array, ids stay; only a first string gets BOS.

        Raises ValueError for a number that is no id, and for an array of several strings: to the engine these
        are several prompts, so each must be tokenized alone. Other errors are those of `tokenize`.
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

    async def _climb(self, model_path: Path | None, candidates: list[str]) -> None:
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
        rung = _Rung(mode="segments", pieces=SegmentTokenizer(cuts, remote, SegmentCache()))
        whys = [why, await self._try(rung, truths)]
        if local is not None:
            encoder = LocalEncoder(local, remote)
            rung = _Rung(mode="local", pieces=SegmentTokenizer(cuts, encoder, SegmentCache()))
            whys.append(await self._try(rung, truths))
        self.why = "; ".join(filter(None, whys)) or "agrees with the engine"

    async def _try(self, rung: _Rung, truths: Mapping[str, Tokens]) -> str:
        """Use the mode first if it agrees on every sample, and return ""; else return why it does not."""
        try:
            for text, truth in truths.items():
                if await rung.pieces.tokenize(text) != truth:
                    return f"{rung.mode} differs from the engine on {text[:40]!r}"
        except Exception as error:  # noqa: BLE001 a mode that fails is not used
            return f"{rung.mode} failed: {error!r}"
        rung.pieces.cache.clear()
        self._rungs.insert(0, rung)
        return ""


class LocalEncoder:
    """Encodes pieces in this process, much text in a thread; the engine encodes unsupported text."""

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

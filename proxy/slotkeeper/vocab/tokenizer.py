"""Token ids for one engine's model: by its own vocabulary (BPE), or from the engine in few calls.

`POST /tokenize` never enters the engine's task queue (engine.md 1.4). Its `content` may mix strings and
ids: the engine tokenizes each string alone and returns ids unchanged. So an id that no piece can produce
marks where each piece ends.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias

import tiktoken

from slotkeeper.scheduler.prompts.tokens import EMPTY, Tokens
from slotkeeper.vocab.gguf import GgufError, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from slotkeeper.vocab.gguf import GgufVocabulary

# -- special tokens, cut out of a text ------------------------------------------------------------------

# Tokenizes as the engine does: cuts texts at special tokens, and encodes the pieces by byte-level BPE.
#
# llama.cpp takes the specials one by one, longest first (in bytes), and cuts each out of the remaining
# text. A regular expression takes them left to right. The results differ only where matches overlap
# (`<think>` and a line end, a line end and `</think>`), so only there we use the slow way.
#
# The text before a cut does not change the tokens after it, so each piece is cached: the n-th turn of a
# conversation costs a look-up of its old pieces and the tokenization of its new ones.
#
# BPE uses the GGUF's vocabulary and merges, and only for pre-tokenizers whose splitting rule is one regular
# expression, proved equal to llama.cpp's (engine.md 1.4). For all others we ask the engine.


class SpecialSplitter:
    """Splits a text into special tokens (as ids) and the texts between them (as str)."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._longest_first = sorted(ids, key=lambda token: -len(token.encode()))
        self._any = alternatives(ids)
        self._entangled = entangled(ids)

    def split(self, text: str) -> list[str | int]:
        """Return the parts in order; no part is an empty string."""
        if self._any is None:
            return [text] if text else []
        parts: list[str | int] = []
        done, at = 0, 0
        while match := self._any.search(text, at):
            start, at = match.span()
            if start > done:
                parts.append(text[done:start])
            if match.group() in self._entangled:
                at = self._cluster_end(text, start, at)
                parts += self._partition(text[start:at], self._longest_first)
            else:
                parts.append(self._ids[match.group()])
            done = at
        if done < len(text):
            parts.append(text[done:])
        return joined(parts)

    def _cluster_end(self, text: str, start: int, end: int) -> int:
        """Return the end of the run of overlapping matches that begins at `start`."""
        at = start + 1
        while at < end:
            if self._any and (match := self._any.match(text, at)):
                end = max(end, match.end())
            at += 1
        return end

    def _partition(self, text: str, tokens: list[str]) -> list[str | int]:
        for number, token in enumerate(tokens):
            if token not in text:
                continue
            parts: list[str | int] = []
            rest = tokens[number + 1 :]
            for index, piece in enumerate(text.split(token)):
                if index:
                    parts.append(self._ids[token])
                parts += self._partition(piece, rest) if piece else []
            return parts
        return [text]


def joined(parts: Iterable[str | int]) -> list[str | int]:
    """Join neighbouring texts: a run of overlapping matches may end in the middle of a text."""
    whole: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for the leftmost special, the longest of several there; None without specials."""
    ordered = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def entangled(tokens: Iterable[str]) -> frozenset[str]:
    """Return the tokens inside whose match another match can begin and reach beyond its end."""
    tokens = list(tokens)
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[:1], []).append(token)
    return frozenset(
        token
        for token in tokens
        if any(
            other.startswith(token[at:]) and len(other) > len(token) - at
            for at in range(1, len(token))
            for other in by_first.get(token[at], ())
        )
    )


def independent(candidates: Iterable[str], specials: Iterable[str]) -> list[str]:
    """Return the candidates at which a text may be cut first, because no other special overlaps them.

    A special inside a candidate does not matter: the longer one is taken first.
    """
    specials = list(specials)
    return [
        candidate
        for candidate in candidates
        if not any(_reaches_over(special, candidate) for special in specials if special != candidate)
    ]


def _reaches_over(special: str, cut: str) -> bool:
    return (
        cut in special
        or any(special.startswith(cut[at:]) for at in range(1, len(cut)))
        or any(cut.startswith(special[at:]) for at in range(1, len(special)))
    )


# -- the cache of pieces ---------------------------------------------------------------------------------

CACHE_BYTES: Final = 64 << 20  # about 10 million tokens of text and ids: many days of one user's turns
_OVERHEAD: Final = 300  # bytes of an entry besides its text and ids: measured for CPython 3.11, rounded up


class Encode(Protocol):
    """Tokenizes each piece alone, and returns the results in the same order."""

    async def __call__(self, pieces: Sequence[str], /) -> list[Tokens]: ...


class SegmentCache:
    """Pieces of text and their tokens; beyond `budget` bytes the least recently used are dropped."""

    def __init__(self, budget: int = CACHE_BYTES) -> None:
        self._budget = budget
        self._entries: OrderedDict[str, Tokens] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<SegmentCache {len(self)} pieces, {self.size_bytes / 2**20:.1f} of {self._budget >> 20} MiB>"

    def get(self, piece: str) -> Tokens | None:
        tokens = self._entries.get(piece)
        if tokens is not None:
            self._entries.move_to_end(piece)
        return tokens

    def put(self, piece: str, tokens: Tokens) -> None:
        size = _size(piece, tokens)
        if piece in self._entries or size > self._budget:
            return
        self._entries[piece] = tokens
        self.size_bytes += size
        while self.size_bytes > self._budget:
            self.size_bytes -= _size(*self._entries.popitem(last=False))

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0


def _size(piece: str, tokens: Tokens) -> int:
    # CPython uses at most four bytes for a character, usually one
    width = 1 if piece.isascii() else 4
    return width * len(piece) + len(tokens.packed) + _OVERHEAD


class SegmentTokenizer:
    """Tokenizes texts piece by piece. `cuts` are the special tokens at which a cut is safe, with ids."""

    def __init__(self, cuts: Mapping[str, int], encode: Encode, cache: SegmentCache) -> None:
        self._cuts = {text: Tokens([number]).packed for text, number in cuts.items()}
        ordered = sorted(cuts, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
        self._encode = encode
        self.cache = cache

    def split(self, text: str) -> list[str]:
        """Return texts and cuts alternately; the first and the last are texts, which may be empty."""
        return self._pattern.split(text) if self._pattern else [text]

    async def tokenize(self, text: str) -> Tokens:
        """Return the ids of the text, without BOS or EOS."""
        pieces = self.split(text)
        # all pieces of this text are kept here: another text may evict them from the cache meanwhile
        known: dict[str, bytes] = {"": b""}
        missing: list[str] = []
        for piece in pieces[::2]:
            if piece in known:
                continue
            tokens = self.cache.get(piece)
            if tokens is None:
                missing.append(piece)
            known[piece] = tokens.packed if tokens else b""
        if missing:
            for piece, tokens in zip(missing, await self._encode(missing), strict=True):
                known[piece] = tokens.packed
                self.cache.put(piece, tokens)
        woven = [b""] * len(pieces)
        woven[::2] = [known[piece] for piece in pieces[::2]]
        woven[1::2] = [self._cuts[cut] for cut in pieces[1::2]]
        return Tokens.of(b"".join(woven))


# -- byte-level BPE --------------------------------------------------------------------------------------

_CONTRACTIONS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# llama.cpp's own splitter for GPT-2 takes text that its pattern does not match as a word: hence `|\s+`
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# `tokenizer.ggml.pre` -> pattern, for those where llama.cpp uses literally the same pattern
PATTERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), _GPT2),
    "qwen35": _QWEN35,
}
# These take a whole word that is a token before they merge; they add BOS if the file does not say
WHOLE_WORDS: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"})

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# llama.cpp makes these special whatever their type is ("control-looking token")
_ALWAYS_SPECIAL: Final = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>",
        "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
        "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>",
    }
)  # fmt: skip
# The pattern's `\s+(?!\S)` backtracks over all of a run of blanks; tiktoken panics at about a million.
MAX_BLANKS: Final = 100_000
_LONG_RUN: Final = re.compile(rf"(?<!\s)\s{{{MAX_BLANKS}}}")  # starts at a run's first blank only: linear
# Letters, marks and numbers since Unicode 16: tiktoken knows them, llama.cpp's tables (15) do not. Found by
# comparing every code point on both builds; a newer tiktoken will know more (test_pre_tokenizers then fails).
_SINCE_UNICODE_16: Final = re.compile(
    "[\u0897\u1c89\u1c8a\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105ff\U00010d40-\U00010d8f"
    "\U00010ec2-\U00010ec7\U00010efa-\U00010efc\U00011380-\U000113ff\U000116d0-\U000116ff"
    "\U00011bc0-\U00011bff\U00011f5a\U00013460-\U000143ff\U00016100-\U0001613f"
    "\U00016d40-\U00016d7f\U00018cff\U0001cc00-\U0001cebf\U0001e5d0-\U0001e5ff]"
)


class UnsupportedError(ValueError):
    """We cannot tokenize this vocabulary, or this text, exactly as the engine does."""


class LocalVocab:
    """Gives exactly the ids that llama.cpp gives with parse_special=true."""

    def __init__(self, vocabulary: GgufVocabulary) -> None:
        """Build the encoder; blocks for about a second with 150,000 tokens. Raises UnsupportedError."""
        pattern = PATTERNS.get(vocabulary.pre)
        if vocabulary.model != "gpt2" or pattern is None:
            raise UnsupportedError(f"tokenizer {vocabulary.model!r}, pre-tokenizer {vocabulary.pre!r}")
        if re.search("phi-?3", vocabulary.name.lower()):
            raise UnsupportedError("special tokens that strip the blanks after them (phi-3)")
        ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        ranks, self._ids = _ranks(vocabulary, ids)
        self._encoding = tiktoken.Encoding(
            vocabulary.pre, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self.special_ids: Mapping[str, int] = _specials(vocabulary)
        self.special: frozenset[str] = frozenset(self.special_ids)
        self.chat_template = vocabulary.chat_template
        self._splitter = SpecialSplitter(self.special_ids)

    def tokenize(self, text: str) -> Tokens:
        """Return the ids of the whole text. Raises UnsupportedError for the rare text that would differ."""
        if too_blank(text):
            raise UnsupportedError(f"a run of {MAX_BLANKS} blanks")
        if not text.isascii() and _SINCE_UNICODE_16.search(text):
            raise UnsupportedError("characters newer than the engine's Unicode tables")
        out = array("i")
        to_id = self._ids.__getitem__
        for part in self._splitter.split(text):
            if isinstance(part, int):
                out.append(part)
            else:
                out.extend(map(to_id, self._encode(part)))
        return Tokens.of(out.tobytes())

    def _encode(self, part: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(part)
        except BaseException as error:
            # a panic inside tiktoken is not an Exception, and it must not end the process
            if type(error).__name__ != "PanicException":
                raise
            raise UnsupportedError(f"tiktoken gave up: {error}") from error


def too_blank(text: str) -> bool:
    """Whether the text has a run of blanks on which tiktoken would panic."""
    return len(text) >= MAX_BLANKS and _LONG_RUN.search(text) is not None


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte 0..255."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]


def _ranks(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> tuple[dict[bytes, int], list[int]]:
    """Return piece -> rank, and rank -> id. Bytes rank first, then the results of merges in their order."""
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    # dict.fromkeys: two merges may make the same piece; the earlier one counts
    pieces = list(dict.fromkeys([*byte_of, *_merged(vocabulary, byte_of.keys())]))
    try:
        ranks = {bytes(byte_of[symbol] for symbol in piece): rank for rank, piece in enumerate(pieces)}
        return ranks, [ids[piece] for piece in pieces]
    except KeyError as error:
        raise UnsupportedError(f"merges make {error.args[0]!r}, which is no token") from error


def _merged(vocabulary: GgufVocabulary, alphabet: KeysView[str]) -> Iterator[str]:
    """Yield the results of merges in order, then the whole words of models that take such."""
    for merge in vocabulary.merges:
        left, blank, right = merge.partition(" ")
        if not (left and blank and right):
            raise UnsupportedError(f"merge {merge!r}")
        yield left + right
    if vocabulary.pre in WHOLE_WORDS:
        yield from (token for token in vocabulary.tokens if alphabet >= set(token))


def _specials(vocabulary: GgufVocabulary) -> dict[str, int]:
    return {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=False))
        if token and (kind in {_UNKNOWN, _CONTROL, _USER_DEFINED} or token in _ALWAYS_SPECIAL)
    }


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

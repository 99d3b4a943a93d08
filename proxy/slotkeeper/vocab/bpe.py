"""Tokenizes as the engine does: cuts texts at special tokens, and encodes the pieces by byte-level BPE.

llama.cpp takes the specials one by one, longest first (in bytes), and cuts each out of the remaining text. A
regular expression takes them left to right. The results differ only where matches overlap (`<think>` and a
line end, a line end and `</think>`), so only there we use the slow way.

The text before a cut does not change the tokens after it, so each piece is cached: the n-th turn of a
conversation costs a look-up of its old pieces and the tokenization of its new ones.

BPE uses the GGUF's vocabulary and merges, and only for pre-tokenizers whose splitting rule is one regular
expression, proved equal to llama.cpp's (engine.md 1.4). For all others we ask the engine.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import tiktoken

from slotkeeper.scheduler.prompts.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slotkeeper.vocab.gguf import GgufVocabulary


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

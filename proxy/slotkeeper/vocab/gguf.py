"""Reads a GGUF file: its header, the facts about the model and its vocabulary; never the tensors.

For any bytes, a call returns or raises GgufError, in bounded memory and time.
Only the arrays that the caller asks for are kept; others, of hundreds of thousands of strings, are skipped.
Both readers block (about 0.1 to 0.2 s for a vocabulary of 150,000): call them in a thread.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["GgufError", "GgufHeader", "GgufVocabulary", "read_header", "read_vocabulary"]

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[int | float | bool, ...] | list[bytes]

# GGUF's type numbers; the fixed-size ones with their struct code
_FIXED: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_LAST_KIND: Final = 12

# Real files: about 60 keys, 1,200 tensors, 250,000 tokens, a header of 16 MB. The limits allow a few times
# that; we could not serve a larger file anyway.
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 17
MAX_ITEMS: Final = 1 << 21
MAX_STRING: Final = 1 << 24  # bytes
MAX_HEADER: Final = 1 << 27  # bytes
SHORT_ARRAY: Final = 1 << 10  # numbers; per-layer arrays are kept, token types only if wanted


class GgufError(ValueError):
    """The file is not a GGUF file that we can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The content of a header. `lengths` has the number of items of every array, kept or not."""

    values: Mapping[str, Value]
    lengths: Mapping[str, int]
    file_bytes: int
    header_bytes: int
    digest: str  # blake2b of all header bytes, tensor infos included


def scan(path: Path, wanted: Collection[str] = ()) -> Scan:
    """Read the header; long arrays are kept only if their key is in `wanted`. Raises only GgufError.

    Blocks: 0.1 s for a vocabulary of 150,000.
    """
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return _Scanner(file, wanted).scan()
    except OSError as error:
        raise GgufError(f"cannot be read: {error.strerror}") from error


class _Scanner:
    """A cursor over the header. It checks every length that the file gives."""

    def __init__(self, file: BinaryIO, wanted: Collection[str]) -> None:
        self._file = file
        self._wanted = wanted
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._left = min(self._file_bytes, MAX_HEADER)
        self._values: dict[str, Value] = {}
        self._lengths: dict[str, int] = {}

    def scan(self) -> Scan:
        if self._take(4) != b"GGUF":
            raise GgufError("not a GGUF file")
        version = self._number("I")
        if version not in {2, 3}:
            raise GgufError(f"GGUF version {version}")
        tensors = self._count("Q", MAX_TENSORS)
        for _ in range(self._count("Q", MAX_KEYS)):
            key = self._text()
            self._values_of(key, self._count("I", _LAST_KIND))
        for _ in range(tensors):
            self._tensor()
        end = self._file.tell()
        return Scan(
            values=self._values,
            lengths=self._lengths,
            file_bytes=self._file_bytes,
            header_bytes=end,
            digest=self._digest(end),
        )

    def _values_of(self, key: str, kind: int) -> None:
        if kind == _STRING:
            self._values[key] = self._text()
        elif code := _FIXED.get(kind):
            self._values[key] = self._number(code)
        elif kind == _ARRAY:
            self._array(key)
        else:
            raise GgufError(f"{key}: value type {kind}")

    def _array(self, key: str) -> None:
        kind = self._count("I", _LAST_KIND)
        length = self._lengths[key] = self._count("Q", MAX_ITEMS)
        if kind == _STRING:
            strings = self._strings(length, keep=key in self._wanted)
            if key in self._wanted:
                self._values[key] = strings
        elif code := _FIXED.get(kind):
            size = length * struct.calcsize("<" + code)
            if key in self._wanted or length <= SHORT_ARRAY:
                self._values[key] = struct.unpack(f"<{length}{code}", self._take(size))
            else:
                self._skip(size)
        else:  # an array of arrays is legal; no file that llama.cpp loads has one
            raise GgufError(f"{key}: array of type {kind}")

    def _strings(self, length: int, *, keep: bool) -> list[bytes]:
        """Read `length` strings. Half a million are normal, so the loop calls nothing except `read`."""
        read, left, kept = self._file.read, self._left, list[bytes]()
        for _ in range(length):
            head = read(8)
            size = int.from_bytes(head, "little")
            left -= 8 + size
            if left < 0 or size > MAX_STRING or len(head) < 8:
                raise GgufError("a string ends after the header")
            item = read(size)
            if keep:
                kept.append(item)
        self._left = left
        return kept

    def _tensor(self) -> None:
        self._skip(self._string_length())
        dimensions = self._count("I", 8)
        self._skip(8 * dimensions + 4 + 8)  # shape, type, offset

    def _digest(self, end: int) -> str:
        self._file.seek(0)
        hasher = hashlib.blake2b(digest_size=16)
        while end > 0:
            block = self._file.read(min(end, 1 << 20))
            if not block:
                raise GgufError("the file became shorter while it was read")
            hasher.update(block)
            end -= len(block)
        return hasher.hexdigest()

    def _text(self) -> str:
        return self._take(self._string_length()).decode("utf-8", "replace")

    def _string_length(self) -> int:
        return self._count("Q", MAX_STRING)

    def _count(self, code: str, limit: int) -> int:
        count = int(self._number(code))
        if count > limit:
            raise GgufError(f"a count of {count}, the limit is {limit}")
        return count

    def _number(self, code: str) -> Scalar:
        number: Scalar = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return number

    def _take(self, size: int) -> bytes:
        self._spend(size)
        taken = self._file.read(size)
        if len(taken) != size:
            raise GgufError("the file became shorter while it was read")
        return taken

    def _skip(self, size: int) -> None:
        self._spend(size)
        self._file.seek(size, os.SEEK_CUR)

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise GgufError("the header ends in the middle of a value, or is longer than 128 MiB")


# -- the facts and the vocabulary ------------------------------------------------------------------------

_TOKENS: Final = "tokenizer.ggml.tokens"
_KINDS: Final = "tokenizer.ggml.token_type"
_MERGES: Final = "tokenizer.ggml.merges"
# Keys of recurrent states: Mamba and DeltaNet, RWKV, LFM2's short convolution, Kimi's KDA
_STATE_KEYS: Final = ("ssm.", "wkv.", "shortconv.", "kda.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The facts about a model. 0, "" or None if the file does not have one."""

    architecture: str
    name: str
    context_length: int  # tokens the model was trained for
    block_count: int
    head_count: int  # attention heads of the layer that has most; 0 = no attention
    sliding_window: int  # tokens
    has_state: bool  # whether any key is about a recurrent state
    full_attention_interval: int
    nextn_predict_layers: int  # MTP blocks
    vocab_size: int
    chat_template: str
    fingerprint: str  # of the file's size and header: the same model, whatever its path
    values: Mapping[str, Value]  # every number, string and short array, by its full key


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Tokens by id, with GGUF's types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""

    model: str
    pre: str
    name: str
    tokens: list[str]
    kinds: tuple[int, ...]
    merges: list[str]  # "left right"
    chat_template: str


def read_header(path: Path) -> GgufHeader:
    """Read the facts, without the vocabulary. Raises only GgufError."""
    found = scan(path)
    values = found.values
    architecture = _text(values, "general.architecture")

    def own(key: str) -> str:
        return f"{architecture}.{key}"

    return GgufHeader(
        architecture=architecture,
        name=_text(values, "general.name"),
        context_length=_number(values, own("context_length")),
        block_count=_number(values, own("block_count")),
        head_count=_number(values, own("attention.head_count")),
        sliding_window=_number(values, own("attention.sliding_window")),
        has_state=any(key.startswith(tuple(map(own, _STATE_KEYS))) for key in values),
        full_attention_interval=_number(values, own("full_attention_interval")),
        nextn_predict_layers=_number(values, own("nextn_predict_layers")),
        vocab_size=found.lengths.get(_TOKENS, 0),
        chat_template=_text(values, "tokenizer.chat_template"),
        fingerprint=_fingerprint(found),
        values=values,
    )


def read_vocabulary(path: Path) -> GgufVocabulary:
    """Read tokens, types and merges. Raises only GgufError."""
    values = scan(path, wanted=(_TOKENS, _KINDS, _MERGES)).values
    tokens = _strings(values, _TOKENS)
    kinds = values.get(_KINDS, (1,) * len(tokens))
    if not tokens:
        raise GgufError("no tokens in the file")
    if not isinstance(kinds, tuple) or len(kinds) < len(tokens) or not isinstance(kinds[0], int):
        raise GgufError("token types are missing")
    return GgufVocabulary(
        model=_text(values, "tokenizer.ggml.model"),
        pre=_text(values, "tokenizer.ggml.pre"),
        name=_text(values, "general.name"),
        tokens=tokens,
        kinds=tuple(map(int, kinds)),
        merges=_strings(values, _MERGES),
        chat_template=_text(values, "tokenizer.chat_template"),
    )


def _fingerprint(found: Scan) -> str:
    """Return a digest of header and file size; the header has the tensors' shapes, types and offsets."""
    whole = hashlib.blake2b(f"{found.file_bytes}:{found.digest}".encode(), digest_size=16)
    return whole.hexdigest()


def _text(values: Mapping[str, Value], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _number(values: Mapping[str, Value], key: str) -> int:
    """Return a count; of counts per layer, the largest."""
    value = values.get(key)
    items = value if isinstance(value, tuple) else (value,)
    return max((item for item in items if isinstance(item, int)), default=0)


def _strings(values: Mapping[str, Value], key: str) -> list[str]:
    value = values.get(key)
    if not isinstance(value, list):
        return []
    try:
        return [item.decode("utf-8") for item in value]
    except UnicodeDecodeError as error:
        raise GgufError(f"{key} is not UTF-8") from error

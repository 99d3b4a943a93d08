"""A GGUF header is read correctly, and any bytes give a header or GgufError."""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.bench.models import Tiny, build
from slotkeeper.vocab.gguf import GgufError, read_header, read_vocabulary, scan


@cache
def header_bytes() -> bytes:
    path = build(Tiny.HYBRID)
    return path.read_bytes()[: scan(path).header_bytes]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "model.gguf"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(pairs: dict[str, bytes], tensors: int = 0) -> bytes:
    """Return a GGUF file; the values are given as type and content."""
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs))
    return head + b"".join(string(key) + value for key, value in pairs.items())


def test_the_fields_of_a_model_header_are_read() -> None:
    header = read_header(build(Tiny.HYBRID_MTP))
    assert (header.architecture, header.name) == ("qwen35", "tiny-hybrid-mtp")
    assert (header.context_length, header.block_count, header.head_count) == (262144, 5, 2)
    assert (header.full_attention_interval, header.nextn_predict_layers, header.has_state) == (4, 1, True)
    assert header.vocab_size == 3072
    assert header.chat_template.startswith("{%- macro text_of")
    assert read_header(build(Tiny.SWA)).sliding_window == 256


def test_the_vocabulary_is_read() -> None:
    vocabulary = read_vocabulary(build(Tiny.DENSE))
    assert len(vocabulary.tokens) == len(vocabulary.kinds) == 3072
    assert vocabulary.merges[0] == "\u0120 \u0120"


def test_the_fingerprint_depends_on_the_content_and_not_on_the_path(tmp_path: Path) -> None:
    prints = {read_header(build(tiny)).fingerprint for tiny in Tiny}
    assert len(prints) == len(Tiny)
    data = build(Tiny.DENSE).read_bytes()
    for name, content in {
        "same": data,
        "longer": data + b"\0",
        "renamed": data.replace(b"blk.0", b"blk.8"),
    }.items():
        (tmp_path / name).write_bytes(content)
    original = read_header(build(Tiny.DENSE)).fingerprint
    assert read_header(tmp_path / "same").fingerprint == original
    assert read_header(tmp_path / "longer").fingerprint != original
    assert read_header(tmp_path / "renamed").fingerprint != original


@given(at=st.integers(0, 300_000), new=st.binary(min_size=1, max_size=16), near=st.booleans())
def test_a_damaged_header_gives_a_header_or_gguf_error(file: Path, at: int, new: bytes, near: bool) -> None:
    data = bytearray(header_bytes())
    at %= 2_000 if near else len(data)
    data[at : at + len(new)] = new
    file.write_bytes(bytes(data))
    for read in (read_header, read_vocabulary):
        with suppress(GgufError):
            read(file)


@given(length=st.integers(0, 300_000))
def test_a_truncated_header_is_refused(file: Path, length: int) -> None:
    file.write_bytes(header_bytes()[: length % len(header_bytes())])
    with pytest.raises(GgufError):
        read_header(file)


@pytest.mark.parametrize(
    "data",
    [
        gguf({"a": struct.pack("<IIQ", 9, 8, 1 << 62)}),
        gguf({"a": struct.pack("<IIQ", 9, 6, (1 << 21) + 1)}),
        gguf({"a": struct.pack("<IIQ", 9, 9, 1)}),
        gguf({"a": struct.pack("<IQ", 8, 1 << 40)}),
        gguf({}, tensors=1 << 60),
        b"GGUF" + struct.pack("<I", 1),
        b"GGUF" + struct.pack(">I", 3),
    ],
    ids=["strings", "items", "nested", "string", "tensors", "version-1", "big-endian"],
)
def test_a_false_length_is_refused_before_memory_is_allocated(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(GgufError):
        read_header(file)


def test_a_value_of_the_wrong_type_counts_as_absent(file: Path) -> None:
    file.write_bytes(
        gguf(
            {
                "general.architecture": struct.pack("<I", 8) + string("x"),
                "x.context_length": struct.pack("<I", 8) + string("many"),
                "x.attention.head_count": struct.pack("<IIQ", 9, 4, 3) + struct.pack("<3I", 0, 8, 2),
            }
        )
    )
    header = read_header(file)
    assert (header.context_length, header.head_count) == (0, 8)


def test_a_missing_file_raises_a_gguf_error(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(GgufError, match="cannot be read"):
            read_header(path)

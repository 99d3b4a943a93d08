"""A sealed object opens under its name, complete and in order, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.store.shared_store.sealing import PIECE, TAG, Cutter, KeyFileError, SealError, StoreKey

KEY = StoreKey(b"k" * 32)
SALT = b"s" * 16


def sealed(pieces: list[bytes]) -> list[bytes]:
    sealer = KEY.pieces(SALT)
    return [sealer.seal(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)]


def unsealed(pieces: list[bytes]) -> list[bytes]:
    opener = KEY.pieces(SALT)
    return [opener.open(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)]


def test_a_sealed_object_opens_only_under_its_own_name_and_key():
    data = KEY.seal(b"tokens", "heads/a")
    assert KEY.open(data, "heads/a") == b"tokens"
    assert data != KEY.seal(b"tokens", "heads/a")
    for key, name in ((KEY, "heads/b"), (StoreKey(b"z" * 32), "heads/a")):
        with pytest.raises(SealError):
            key.open(data, name)
    for hurt in (b"", data[:10], data[:-1], data + b"\0"):
        with pytest.raises(SealError):
            KEY.open(hurt, "heads/a")


def test_pieces_cannot_be_dropped_repeated_exchanged_or_cut_off():
    one, two, three = sealed([b"one", b"two", b"three"])
    assert unsealed([one, two, three]) == [b"one", b"two", b"three"]
    for wrong in ([one, two], [two, one, three], [one, one, two, three], [one, two, three, three], [three]):
        with pytest.raises(SealError):
            unsealed(wrong)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 20))
def test_a_stream_is_cut_the_same_way_for_any_chunk_boundaries(chunks, size):
    cutter = Cutter(size)
    pieces = [piece for chunk in chunks for piece in cutter.feed(chunk)]
    assert b"".join([*pieces, cutter.rest()]) == b"".join(chunks)
    assert all(len(piece) == size for piece in pieces)
    assert len(cutter.rest()) <= size
    assert cutter.rest() or not any(chunks)


def test_a_sealed_piece_has_the_length_of_its_data_and_tag():
    piece, last = sealed([b"x" * PIECE, b"y"])
    assert (len(piece), len(last)) == (PIECE + TAG, 1 + TAG)


def test_a_key_file_must_hold_a_long_enough_key(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(KeyFileError, match="cannot be read"):
        StoreKey.read(path)
    path.write_text("short\n")
    with pytest.raises(KeyFileError, match="openssl"):
        StoreKey.read(path)
    path.write_text("0123456789abcdef" * 4 + "\n")
    assert StoreKey.read(path) == StoreKey(b"0123456789abcdef" * 4)
    assert b"0123" not in repr(StoreKey.read(path)).encode()

"""Images in slot files: read in the form that engines write, and rejected in any other."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import pytest

from slotkeeper.engine.slotfile import Damage, FileImage, HeldTokens, Verdict, tokens_with_images
from slotkeeper.scheduler.prompts.tokens import Chunk, Tokens
from unit.engine.slotfiles import attention, verdict_on, whole_file

DIGEST = sha256(b"an image").digest()
NAME = DIGEST.hex()
TEXT, BEGIN, END = list(range(100, 110)), [7], [8]
IDS = [*TEXT, *BEGIN, *[-1] * 6, *END, *TEXT]
CHUNK = Chunk(10, 8, DIGEST)  # with the text that the engine puts around it
IMAGE = FileImage(start=11, length=6, positions=3, name=NAME)


def chunk(
    name: str = NAME, *, version: int = 2, width: int = 3, height: int = 2, positions: int = 1, kind: int = 1
) -> bytes:
    made = struct.pack("<QIQBIIIIIQ", version, kind, 0, 1, width, height, positions, 0, 2, len(name))
    return made + name.encode() + bytes(20 if version == 1 else 24)


def slot_file(
    ids: Sequence[int] = IDS, starts: Sequence[int] = (11,), *chunks: bytes, version: int = 4
) -> bytes:
    listed = chunks or (chunk(version=2 if version == 4 else 1),)
    images = b"".join(struct.pack("<I", len(each)) + each for each in listed)
    images += bytes(-len(images) % 4)
    words = (-1, 1, len(ids), *ids, len(starts), *starts)
    count = len(words) + len(images) // 4
    head = struct.pack(f"<III{len(words)}i", 0x67677371, version, count, *words)
    return head + images + attention(range(len(ids)), version)


@pytest.mark.parametrize("version", [2, 4])
def test_an_image_is_read_from_a_slot_file(version):
    file = whole_file(slot_file(version=version))
    assert file.images == (IMAGE,)
    assert file.tokens == Tokens(IDS)
    assert file.payload_end == file.size


def test_an_entry_that_b10434_wrote_is_read():
    """Qwen's projector, 10 x 10 tokens of 320 x 320 pixels."""
    entry = bytes.fromhex(
        "0100000000000000 01000000 0000000000000000 01 0a000000 0a000000 01000000 00000000 02000000"
        "1300000000000000 35363933313230383632373733303031363432"
        "00 0100000000000000 00 00 40010000 40010000 00"
    )
    ids = [*TEXT, *[-1] * 100, *TEXT]
    (image,) = whole_file(slot_file(ids, (10,), entry, version=2)).images
    assert image == FileImage(start=10, length=100, positions=10, name="5693120862773001642")


def test_an_image_is_matched_to_its_chunk_with_the_surrounding_text():
    tokens = tokens_with_images(whole_file(slot_file()), [CHUNK])
    assert tokens == Tokens(TEXT) + Tokens.image(DIGEST, 8) + Tokens(TEXT)
    assert tokens.chunks == (CHUNK,)


def test_an_image_name_of_an_older_build_is_not_checked():
    file = whole_file(slot_file(IDS, (11,), chunk("1234567890", version=1), version=2))
    assert tokens_with_images(file, [CHUNK]) is not None


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [replace(CHUNK, digest=sha256(b"another").digest())],
        [replace(CHUNK, start=9, length=7)],
        [replace(CHUNK, start=12)],
        [replace(CHUNK, length=40)],
        [CHUNK, Chunk(20, 4, DIGEST)],
    ],
    ids=["none", "another", "before it", "behind it", "beyond the file", "two"],
)
def test_a_file_with_other_images_does_not_match_the_prompt(chunks):
    assert tokens_with_images(whole_file(slot_file()), chunks) is None


def test_images_after_the_end_of_the_file_do_not_count():
    assert tokens_with_images(whole_file(slot_file()), [CHUNK, Chunk(50, 8, DIGEST)]) is not None


@pytest.mark.parametrize(
    "data",
    [
        slot_file([*TEXT, *BEGIN, *[-1] * 5, 9, *END]),
        slot_file(IDS, (12,)),
        slot_file(IDS, (9,)),
        slot_file([-1, *IDS[1:]]),
        slot_file(IDS, (11, 11), chunk(), chunk()),
        slot_file(IDS, (1 << 20,)),
        slot_file(IDS, (11,), chunk(kind=2)),
        slot_file(IDS, (11,), chunk(version=3)),
        slot_file(IDS, (11,), chunk(positions=2)),
        slot_file(IDS, (11,), chunk(width=0)),
        slot_file(IDS, (11,), chunk(width=1 << 20, height=1 << 12)),
        slot_file(IDS, (11,), chunk("no name")),
        slot_file(IDS, (11,), chunk()[:60]),
        slot_file(IDS, (11,), b"short"),
        slot_file(IDS, (11,), bytes(2000)),
    ],
)
def test_an_inconsistent_image_list_is_damage(data):
    found = verdict_on(data)
    assert isinstance(found, Damage)
    assert found.verdict is Verdict.TOKENS


def test_a_truncated_file_with_images_is_damage():
    data = slot_file()
    for end in range(len(data)):
        assert isinstance(verdict_on(data[:end]), Damage)


def test_an_image_takes_fewer_positions_than_tokens():
    held = HeldTokens(len(IDS), (IMAGE,))
    assert [held.position(at) for at in (0, 11, 12, 16, 17, 20)] == [0, 11, -1, -1, 14, 17]

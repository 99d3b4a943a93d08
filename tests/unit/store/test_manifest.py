"""A manifest is read exactly as it was written, or rejected."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import Chunk, Tokens
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.store.manifest import BLOCK, LATEST, Flaw, Manifest, chain, decode, encode

ID = SnapshotId("slotkeeper-0123456789ab-01234567")
TOKENS = Tokens(range(600))
SECRET = bytes(range(32))
MANIFEST = Manifest(
    id=ID,
    fingerprint="f00d",
    version=4,
    layout="1a",
    tokens=600,
    chain=chain(TOKENS),
    checkpoints=(84, 596),
    draft=True,
    repaired=False,
    golden=True,
    size=123456,
    sha256="ab" * 32,
    created=1.5,
    build="b0-unknown",
)


def resealed(**changes: Any) -> bytes:
    """Return a manifest with other fields and a valid seal, as written by one who knows the secret."""
    body = orjson.loads(encode(MANIFEST, SECRET)) | changes
    body = {name: value for name, value in body.items() if value is not None and name != "seal"}
    seal = hmac.digest(SECRET, orjson.dumps(body, option=orjson.OPT_SORT_KEYS), "sha256").hex()
    return orjson.dumps(body | {"seal": seal})


def of_before(**changes: Any) -> bytes:
    """Return a manifest as releases without a secret wrote it."""
    body = orjson.loads(encode(MANIFEST, SECRET)) | {"format": 1} | changes
    del body["seal"]
    seal = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return orjson.dumps(body | {"seal": seal})


@pytest.mark.parametrize(("field", "most"), [("adapters", 4096), ("namespace", 64)])
def test_a_manifest_names_adapters_and_a_namespace_only_if_there_were_any(field, most):
    longest = replace(MANIFEST, **{field: "x" * most})
    assert field.encode() not in encode(MANIFEST, SECRET)
    assert decode(encode(longest, SECRET), ID, SECRET) == longest
    assert longest.space != MANIFEST.space == ""
    assert decode(resealed(**{field: 7}), ID, SECRET) is Flaw.FIELDS
    assert decode(resealed(**{field: "x" * (most + 1)}), ID, SECRET) is Flaw.VALUES


def test_a_manifest_is_read_as_it_was_written():
    assert decode(encode(MANIFEST, SECRET), ID, SECRET) == MANIFEST
    assert decode(resealed(), ID, SECRET) == MANIFEST


def test_the_manifest_lists_images_only_if_there_are_any():
    digest = "cd" * 32
    shown = replace(MANIFEST, images=((3, 10, digest), (20, 5, digest)))
    assert decode(encode(shown, SECRET), ID, SECRET) == shown
    assert shown.chunks == (Chunk(3, 10, bytes.fromhex(digest)), Chunk(20, 5, bytes.fromhex(digest)))
    assert b"images" not in encode(MANIFEST, SECRET)


@pytest.mark.parametrize(
    "images", [7, [7], [[]], [[1, 2]], [["1", 2, "cd" * 32]], [[1, 2, 3]], [[True, 2, ""]]]
)
def test_images_of_another_shape_are_a_flaw_of_the_fields(images: object):
    assert decode(resealed(images=images), ID, SECRET) is Flaw.FIELDS


@pytest.mark.parametrize("image", [[-1, 9, "cd" * 32], [9, 0, "cd" * 32], [599, 2, "cd" * 32], [1, 2, "cd"]])
def test_impossible_images_are_a_flaw_of_the_values(image: list[object]):
    assert decode(resealed(images=[image]), ID, SECRET) is Flaw.VALUES


def test_a_seal_without_the_secret_is_accepted_only_in_manifests_from_before_there_was_one():
    assert decode(of_before(), ID, SECRET) is Flaw.SEAL
    assert decode(of_before(), ID, SECRET, unkeyed=True) == MANIFEST
    assert decode(of_before(format=2), ID, SECRET, unkeyed=True) is Flaw.SEAL
    assert decode(encode(MANIFEST, SECRET), ID, SECRET, unkeyed=True) == MANIFEST
    assert decode(encode(MANIFEST, SECRET), ID, bytes(32)) is Flaw.SEAL


@pytest.mark.parametrize("seal", [None, 1, [], {}, "", "\ud800", "ü"])
def test_a_seal_of_any_other_type_or_text_is_refused(seal: object):
    body = orjson.loads(encode(MANIFEST, SECRET)) | {"seal": seal}
    assert decode(json.dumps(body).encode(), ID, SECRET) in {Flaw.SEAL, Flaw.NOT_JSON}


def test_the_manifest_contains_no_tokens_of_the_prompt():
    """Uses ids that occur in no other field: the manifest must not be a second copy of the prompt."""
    tokens = Tokens(range(777_000_000, 777_000_300))
    written = encode(replace(MANIFEST, tokens=300, chain=chain(tokens), checkpoints=()), SECRET)
    assert b"777000" not in written


@given(place=st.integers(0, len(encode(MANIFEST, SECRET)) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_always_found(place: int, bit: int):
    data = bytearray(encode(MANIFEST, SECRET))
    data[place] ^= 1 << bit
    assert isinstance(decode(bytes(data), ID, SECRET), Flaw)


ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary(max_size=300) | ANY.map(lambda value: json.dumps(value).encode()))
def test_any_other_bytes_are_a_flaw(data: bytes):
    assert isinstance(decode(data, ID, SECRET), Flaw)


@pytest.mark.parametrize("depth", [200, 254, 1000, 2000])
@pytest.mark.parametrize("unkeyed", [True, False])
def test_values_that_are_nested_too_deep_are_a_flaw(depth: int, unkeyed: bool):
    """orjson reads more levels than it writes, and the seal is over what it writes."""
    data = b'{"format": 1, "seal": "", "id": ' + b"[" * depth + b"]" * depth + b"}"
    assert isinstance(decode(data, ID, SECRET, unkeyed=unkeyed), Flaw)


@pytest.mark.parametrize("name", sorted(orjson.loads(encode(MANIFEST, SECRET)).keys() - {"seal"}))
@pytest.mark.parametrize("value", [None, "", [], {}, -1, 1.5, True, ["x"], [-1], [600, 84], "x" * 16])
def test_no_field_accepts_a_value_of_another_type(name: str, value: object):
    found = decode(resealed(**{name: value}), ID, SECRET)
    if isinstance(found, Manifest):  # a value of the right type is possible
        assert getattr(found, name) == (tuple(value) if isinstance(value, list) else value)
        allowed = {"layout", "build", "draft", "repaired", "golden", "created", "fingerprint", "checkpoints"}
        assert name in allowed | {"version"}


@pytest.mark.parametrize("created", [-1.0, -1e306, 0.0, LATEST, LATEST * 1.001, 1e300, 1e306])
def test_a_time_that_no_clock_shows_is_a_flaw_of_the_values(created: float):
    """Arithmetic with it fails: 1e306 seconds are an infinite number of milliseconds."""
    read = replace(MANIFEST, created=created) if 0.0 <= created <= LATEST else Flaw.VALUES
    assert decode(resealed(created=created), ID, SECRET) == read


def test_manifests_of_later_releases_are_distinguished_from_damage():
    assert decode(resealed(format=3, more="yes"), ID, SECRET) is Flaw.NEWER
    assert decode(resealed(more="yes"), ID, SECRET) is Flaw.FIELDS
    assert decode(b"[]", ID, SECRET) is Flaw.NOT_JSON
    assert decode(encode(MANIFEST, SECRET)[:-1], ID, SECRET) is Flaw.NOT_JSON
    assert decode(encode(MANIFEST, SECRET).replace(b"f00d", b"f00e"), ID, SECRET) is Flaw.SEAL
    assert (
        decode(encode(MANIFEST, SECRET), SnapshotId("slotkeeper-0123456789ab-01234568"), SECRET)
        is Flaw.FOREIGN
    )
    assert decode(resealed(tokens=BLOCK), ID, SECRET) is Flaw.VALUES


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3 * BLOCK), st.data())
def test_the_chain_of_digests_differs_from_the_first_different_block_on(ids: list[int], data: st.DataObject):
    whole = chain(Tokens(ids))
    assert len(whole) == -(-len(ids) // BLOCK)
    place = data.draw(st.integers(0, len(ids) - 1))
    other = chain(Tokens([*ids[:place], ids[place] ^ 1, *ids[place + 1 :]]))
    assert other[: place // BLOCK] == whole[: place // BLOCK]
    assert all(a != b for a, b in zip(other[place // BLOCK :], whole[place // BLOCK :], strict=True))


def test_a_manifest_fits_only_its_own_tokens():
    assert MANIFEST.fits(TOKENS)
    assert not MANIFEST.fits(Tokens(range(599)))
    assert not MANIFEST.fits(Tokens(range(1, 601)))

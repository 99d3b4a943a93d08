"""What the sidecar remembers of engines' slot files: bounded, complete or nothing, and never harmful."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import orjson
import pytest

from slotkeeper.runtime.known_engine import FILE, LARGEST, MOST, completed, decode, encode, learnt
from slotkeeper.scheduler.engine_model import EngineTraits
from slotkeeper.store import files
from unit.store.saving import mode

FOUND = EngineTraits(slot_files=True, state_version=4, files_carry=True, fingerprint="abc")
UNKNOWN = replace(FOUND, files_carry=None)


async def test_a_learned_trait_is_known_at_the_next_start(tmp_path):
    assert await completed(tmp_path, UNKNOWN) == UNKNOWN
    assert await completed(tmp_path, FOUND) == FOUND
    assert await completed(tmp_path, UNKNOWN) == FOUND
    assert mode(tmp_path / FILE) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


async def test_a_trait_is_not_applied_to_an_engine_of_another_fingerprint(tmp_path):
    await completed(tmp_path, FOUND)
    other = replace(UNKNOWN, fingerprint="other")
    assert await completed(tmp_path, other) == other


async def test_a_newly_learned_trait_replaces_the_old_one(tmp_path):
    await completed(tmp_path, FOUND)
    await completed(tmp_path, replace(FOUND, files_carry=False))
    assert (await completed(tmp_path, UNKNOWN)).files_carry is False


async def test_an_unchanged_file_is_not_written_again(tmp_path):
    await completed(tmp_path, FOUND)
    before = written_at(tmp_path)
    await completed(tmp_path, FOUND)
    assert written_at(tmp_path) == before


def written_at(folder):
    """Return when it was written. Reading changes other times of a file, and writing replaces the file."""
    found = (folder / FILE).stat()
    return found.st_ino, found.st_mtime_ns


async def test_for_an_engine_without_slot_files_nothing_is_written(tmp_path):
    nothing = EngineTraits(files_carry=True)
    assert await completed(tmp_path, nothing) == nothing
    assert not list(tmp_path.iterdir())


async def test_two_engines_at_once_leave_a_whole_file(tmp_path):
    kinds = [replace(FOUND, fingerprint=str(number)) for number in range(8)]
    await asyncio.gather(*(completed(tmp_path, kind) for kind in kinds))
    known = decode((tmp_path / FILE).read_bytes())
    assert known
    assert known.items() <= {(kind.fingerprint, True) for kind in kinds}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


async def test_a_missing_folder_is_ignored(tmp_path):
    assert await completed(tmp_path / "none", FOUND) == FOUND
    assert await completed(tmp_path / "none", UNKNOWN) == UNKNOWN


async def test_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(encode({"abc": True}))
    (tmp_path / FILE).symlink_to(elsewhere)
    assert await completed(tmp_path, UNKNOWN) == UNKNOWN
    await completed(tmp_path, replace(FOUND, files_carry=False))
    assert decode(elsewhere.read_bytes()) == {"abc": True}


async def test_a_file_that_is_too_large_is_ignored(tmp_path):
    data = encode({"abc": True})
    (tmp_path / FILE).write_bytes(data[:-1] + b" " * LARGEST + data[-1:])
    assert await completed(tmp_path, UNKNOWN) == UNKNOWN


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"null", b"\xff", b'{"a": 1}', b'{"a": true, "b": null}']
)
def test_an_unreadable_file_gives_no_traits(data):
    assert decode(data) == {}


def test_written_traits_are_read_back():
    known = {"b": True, "a": False}
    assert list(decode(encode(known)).items()) == list(known.items())


def test_the_oldest_trait_is_forgotten():
    known: Mapping[str, bool] = {}
    for number in range(MOST + 3):
        known = learnt(known, str(number), carry=True)
    known = learnt(known, "5", carry=False)
    assert len(known) == MOST
    assert next(iter(known)) == "3"
    assert list(known.items())[-1] == ("5", False)
    too_many = orjson.dumps({str(number): True for number in range(MOST + 3)})
    assert next(iter(decode(too_many))) == "3"


def test_the_store_does_not_treat_the_file_as_its_own():
    assert files.ours(FILE) is None

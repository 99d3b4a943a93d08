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


async def test_what_was_found_out_is_known_the_next_time(tmp_path):
    assert await completed(tmp_path, UNKNOWN) == UNKNOWN
    assert await completed(tmp_path, FOUND) == FOUND
    assert await completed(tmp_path, UNKNOWN) == FOUND
    assert mode(tmp_path / FILE) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


async def test_another_kind_of_engine_is_not_taken_for_it(tmp_path):
    await completed(tmp_path, FOUND)
    other = replace(UNKNOWN, fingerprint="other")
    assert await completed(tmp_path, other) == other


async def test_what_is_found_out_anew_counts(tmp_path):
    await completed(tmp_path, FOUND)
    await completed(tmp_path, replace(FOUND, files_carry=False))
    assert (await completed(tmp_path, UNKNOWN)).files_carry is False


async def test_nothing_is_written_that_is_there_already(tmp_path):
    await completed(tmp_path, FOUND)
    before = written_at(tmp_path)
    await completed(tmp_path, FOUND)
    assert written_at(tmp_path) == before


def written_at(folder):
    """Return when it was written. Reading changes other times of a file, and writing replaces the file."""
    found = (folder / FILE).stat()
    return found.st_ino, found.st_mtime_ns


async def test_an_engine_without_slot_files_has_nothing_to_remember(tmp_path):
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


async def test_a_folder_that_is_not_there_is_no_trouble(tmp_path):
    assert await completed(tmp_path / "none", FOUND) == FOUND
    assert await completed(tmp_path / "none", UNKNOWN) == UNKNOWN


async def test_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(encode({"abc": True}))
    (tmp_path / FILE).symlink_to(elsewhere)
    assert await completed(tmp_path, UNKNOWN) == UNKNOWN
    await completed(tmp_path, replace(FOUND, files_carry=False))
    assert decode(elsewhere.read_bytes()) == {"abc": True}


async def test_a_file_without_end_is_none_of_ours(tmp_path):
    data = encode({"abc": True})
    (tmp_path / FILE).write_bytes(data[:-1] + b" " * LARGEST + data[-1:])
    assert await completed(tmp_path, UNKNOWN) == UNKNOWN


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"null", b"\xff", b'{"a": 1}', b'{"a": true, "b": null}']
)
def test_anything_odd_is_nothing_known(data):
    assert decode(data) == {}


def test_what_was_written_is_read():
    known = {"b": True, "a": False}
    assert list(decode(encode(known)).items()) == list(known.items())


def test_the_oldest_is_forgotten():
    known: Mapping[str, bool] = {}
    for number in range(MOST + 3):
        known = learnt(known, str(number), carry=True)
    known = learnt(known, "5", carry=False)
    assert len(known) == MOST
    assert next(iter(known)) == "3"
    assert list(known.items())[-1] == ("5", False)
    too_many = orjson.dumps({str(number): True for number in range(MOST + 3)})
    assert next(iter(decode(too_many))) == "3"


def test_the_store_leaves_it_alone():
    assert files.ours(FILE) is None

"""Ways to damage a snapshot without the store's knowledge, some with a real engine's own files."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import aiohttp
import orjson

from builds import NEWER, OLDER
from chaos.lab_snapshots import Talk, bench, said
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.engine.client import EngineClient
from slotkeeper.scheduler.slots.engine_model import SnapshotId
from slotkeeper.scheduler.types import SlotId
from slotkeeper.store import files
from slotkeeper.store.manifest import Flaw, decode, encode


@dataclass(frozen=True, slots=True)
class Victim:
    """A snapshot to damage, and another one of the same folder."""

    folder: Path
    id: SnapshotId
    other: SnapshotId
    strangers: dict[str, bytes]  # files of other engines, by what differs
    chance: random.Random

    @property
    def slot(self) -> Path:
        return self.folder / f"{self.id}.slot"

    @property
    def manifest(self) -> Path:
        return self.folder / f"{self.id}.json"

    @property
    def other_slot(self) -> Path:
        return self.folder / f"{self.other}.slot"

    def place(self) -> int:
        return self.chance.randrange(self.slot.stat().st_size)


def cut(victim: Victim) -> None:
    with victim.slot.open("r+b") as file:
        file.truncate(victim.place())


def cut_by_a_byte(victim: Victim) -> None:
    """Cut the file by a byte, which kills an engine (engine.md T2)."""
    with victim.slot.open("r+b") as file:
        file.truncate(victim.slot.stat().st_size - 1)


def flipped(victim: Victim) -> None:
    data = bytearray(victim.slot.read_bytes())
    data[victim.place()] ^= 1 << victim.chance.randrange(8)
    with victim.slot.open("r+b") as file:
        file.write(data)


def zeroed(victim: Victim) -> None:
    """Fill the file with zeros from some place on, as after a power cut."""
    size, place = victim.slot.stat().st_size, victim.place()
    with victim.slot.open("r+b") as file:
        file.truncate(place)
        file.truncate(size)


def swapped(victim: Victim) -> None:
    aside = victim.folder / "aside"
    victim.slot.rename(aside)
    victim.other_slot.rename(victim.slot)
    aside.rename(victim.other_slot)


def deleted(victim: Victim) -> None:
    victim.slot.unlink()


def linked(victim: Victim) -> None:
    """Replace the file by a symlink to the same bytes; another program may write to its target."""
    aside = victim.folder.parent / victim.slot.name
    shutil.move(victim.slot, aside)
    victim.slot.symlink_to(aside)


def a_folder(victim: Victim) -> None:
    victim.slot.unlink()
    victim.slot.mkdir()


def stranger(what: str) -> Callable[[Victim], None]:
    def damage(victim: Victim) -> None:
        victim.slot.write_bytes(victim.strangers[what])

    damage.__name__ = what
    return damage


def manifest_edited(victim: Victim) -> None:
    """Change a number in the manifest, as an editor or a bad disk would."""
    doc = orjson.loads(victim.manifest.read_bytes())
    field = victim.chance.choice(["size", "tokens", "version", "created"])
    victim.manifest.write_bytes(orjson.dumps(doc | {field: doc[field] + 1}))


def manifest_of_another(victim: Victim) -> None:
    victim.manifest.write_bytes((victim.folder / f"{victim.other}.json").read_bytes())


def manifest_of_another_engine(victim: Victim) -> None:
    """Replace the manifest by a valid one of another engine."""
    secret = (victim.folder / files.SEAL).read_bytes()
    manifest = decode(victim.manifest.read_bytes(), victim.id, secret)
    assert not isinstance(manifest, Flaw)
    victim.manifest.write_bytes(encode(replace(manifest, fingerprint=manifest.fingerprint[::-1]), secret))


def the_manifest_of_a_stranger(victim: Victim) -> None:
    """Put another engine's file there, with a manifest of its size and hash, as a careless copy would."""
    data = victim.strangers["another_model"]
    doc = orjson.loads(victim.manifest.read_bytes())
    victim.slot.write_bytes(data)
    doc |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    victim.manifest.write_bytes(orjson.dumps(doc))


Damage = Callable[[Victim], None]
OTHER_CACHE: Final = ("--cache-type-k", "q8_0")
# The engine would load this without an error (engine.md 2.4), but the library has no such flag.
OTHER_ROPE: Final = ("--rope-freq-base", "5000")
STRANGERS: Final = ("another_model", "other_flags", "another_build")
FILES: Final[list[Damage]] = [
    cut, cut_by_a_byte, flipped, zeroed, swapped, deleted, linked, a_folder, *map(stranger, STRANGERS),
]  # fmt: skip
MANIFESTS: Final[list[Damage]] = [
    manifest_edited,
    manifest_of_another,
    manifest_of_another_engine,
    the_manifest_of_a_stranger,
]


def kinds(model: str, build: str) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Return engines that may not share files with this one: model, build and flags, by what differs."""
    kin = "tiny-hybrid-mtp" if model == "tiny-hybrid" else "tiny-hybrid"
    other = {OLDER: NEWER, NEWER: OLDER}[build]
    flags = OTHER_ROPE if build == EngineKind.SKULK else OTHER_CACHE
    return dict(zip(STRANGERS, ((kin, build, ()), (model, build, flags), (model, other, ())), strict=True))


async def strangers(model: str, build: str, talk: Talk, folder: Path) -> dict[str, bytes]:
    """Return the first turn of the same talk as other engines save it."""
    found = {}
    for what, (which, at, args) in kinds(model, build).items():
        async with bench(which, at, folder / what, *args) as engine, EngineClient(engine.base) as calls:
            async with aiohttp.ClientSession(engine.base) as client:
                await said(client, talk.body(0) | {"id_slot": 0})
            await calls.save(SlotId(0), "it")
            found[what] = (engine.slots / "it").read_bytes()
    return found

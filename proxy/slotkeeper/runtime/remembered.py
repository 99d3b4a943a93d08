"""What outlives an engine's process: its tokenizer, and what was found out about its slot files and flags.

Whether files carry checkpoints is learnt from a canary, which is not possible in an engine that is in use
(engine.md 2.2). It is true for every engine with the same fingerprint. Files' layout is not kept: a layout
that is wrong would make every save look torn, and where the fingerprint had to be guessed it may be wrong.

Flags cannot be tried out in an engine that is in use either; but the same process has the same flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from slotkeeper.engine.traits import Reading
from slotkeeper.scheduler.engine_model import FLAGS, EngineTraits, Known
from slotkeeper.store import files
from slotkeeper.vocab.tokenizer import TokenizeCall, Tokenizer

SAID: Final = ("chat_template", "bos_token", "eos_token")  # by /props


class Tokenizers:
    """The tokenizer of the model that an engine serves: it outlives restarts, with all that it has seen."""

    def __init__(self, ask: TokenizeCall) -> None:
        self._ask = ask
        self._last: tuple[tuple[str, ...], Tokenizer] | None = None

    async def fitting(self, reading: Reading) -> Tokenizer:
        """The last one, if the same build serves the same model; else a new one, which is tried out first.

        A model whose file cannot be read here may be another each time.
        """
        said = {name: str(reading.props.get(name) or "") for name in SAID}
        model = reading.header.fingerprint if reading.header else ""
        same = (model, str(reading.model_path), reading.build, *said.values())
        if self._last and model and self._last[0] == same:
            return self._last[1]
        tokenizer = await Tokenizer.open(
            self._ask,
            model_path=reading.model_path,
            chat_template=said["chat_template"],
            bos_token=said["bos_token"],
            eos_token=said["eos_token"],
        )
        self._last = (same, tokenizer)
        return tokenizer


# -- whether files carry checkpoints, by fingerprint -----------------------------------------------------

FILE: Final = "slotkeeper-engines.json"
MOST: Final = 64  # engines, the oldest are forgotten
LARGEST: Final = 64 << 10  # bytes; what is larger is none of ours

Carrying = Mapping[str, bool]  # fingerprint -> whether its files carry checkpoints, the newest last


# -- pure ----------------------------------------------------------------------------------------------


def decode(data: bytes) -> Carrying:
    """Read what `encode` wrote. From anything else nothing is known."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(found, dict) or any(type(carry) is not bool for carry in found.values()):
        return {}
    return dict(list(found.items())[-MOST:])


def encode(known: Carrying) -> bytes:
    return orjson.dumps(known, option=orjson.OPT_INDENT_2)


def learnt(known: Carrying, fingerprint: str, *, carry: bool) -> Carrying:
    """The same and this one, which is the newest now."""
    others = [item for item in known.items() if item[0] != fingerprint]
    return dict([*others, (fingerprint, carry)][-MOST:])


# -- beside the slot files -----------------------------------------------------------------------------


async def completed(folder: Path, traits: EngineTraits) -> EngineTraits:
    """The traits with what is remembered, where nothing was found out; else that is remembered.

    A folder that cannot be read or written costs the memory, never the engine.
    """
    if not traits.fingerprint:
        return traits
    known = await asyncio.to_thread(recalled, folder)
    before = known.get(traits.fingerprint)
    if traits.files_carry is None:
        return replace(traits, files_carry=before)
    if traits.files_carry is not before:
        now = learnt(known, traits.fingerprint, carry=traits.files_carry)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember, folder, now)
    return traits


def recalled(folder: Path) -> Carrying:
    """Blocks. Nothing where the file cannot be read, or is not what we wrote."""
    try:
        with files.open_ours(folder / FILE) as file:
            return decode(file.read(LARGEST))
    except OSError:
        return {}


def remember(folder: Path, known: Carrying) -> None:
    """Blocks. Raises OSError. Written aside first, at a name that the store clears away after a crash."""
    files.write_small(folder / FILE, folder / files.new_temporary(time.time()), encode(known))


# -- flags of one process --------------------------------------------------------------------------------

FLAGS_FILE: Final = "slotkeeper-flags.json"
MOST_PROCESSES: Final = 16  # processes, the oldest are forgotten

Found = Mapping[str, tuple[bool | int | float, Known]]  # by the name of the field
READER: Final = TypeAdapter(dict[str, dict[str, tuple[bool | int | float, Known]]])


async def with_flags(folder: Path, process: str, traits: EngineTraits) -> EngineTraits:
    """The traits with what is remembered of this process, where nothing newer is known."""
    found = (await asyncio.to_thread(recalled_flags, folder)).get(process, {})
    for name, (value, how) in found.items():
        if name in FLAGS and traits.known(name) is Known.DEFAULT:
            traits = traits.learned(how, **{name: value})
    return traits


async def keep_flags(folder: Path, process: str, traits: EngineTraits) -> None:
    """A folder that cannot be read or written costs the memory, never the engine."""
    found = {
        told: (getattr(traits, told), how) for told, how in traits.knowledge.items() if how is not Known.FLAGS
    }
    if found and process:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remember_flags, folder, process, found)


def recalled_flags(folder: Path) -> dict[str, Found]:
    """Blocks. Nothing where the file cannot be read, or is not what we wrote."""
    try:
        with files.open_ours(folder / FLAGS_FILE) as file:
            return dict(READER.validate_json(file.read(LARGEST)))
    except (OSError, ValidationError):
        return {}


def remember_flags(folder: Path, process: str, found: Found) -> None:
    """Blocks. Raises OSError. Written aside first, at a name that the store clears away after a crash."""
    others = {known: of for known, of in recalled_flags(folder).items() if known != process}
    kept = dict([*others.items(), (process, found)][-MOST_PROCESSES:])
    files.write_small(folder / FLAGS_FILE, folder / files.new_temporary(time.time()), orjson.dumps(kept))

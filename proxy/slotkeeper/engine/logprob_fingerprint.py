"""Telling engines apart by what they say, where others started them and their flags cannot be seen.

Another rope base, a control vector or an edited key of the model change what is computed, and no answer
of the engine tells (engine.md 2.4). But they change what the model says: after one fixed text the logprobs
of the likeliest tokens are equal to the last digit when an engine is started again as it was, also with
another number of threads; another rope base moves them by 0.13 to 1.9 (tiny models, Gemma 3 270M).
So each voice gets a name, and what was heard is remembered beside the slot files that it stands for.

Only an unused engine is asked; one process has one voice as long as it lives.
A build or a batch size that computes otherwise has another voice too. That costs a prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from slotkeeper.engine.answers import Odds
from slotkeeper.engine.canary import swept, unused
from slotkeeper.engine.client import EngineClient, EngineError, Headers
from slotkeeper.engine.fingerprint import digest_of

FILE: Final = "slotkeeper-voices.json"
MOST: Final = 64  # voices remembered, the oldest are forgotten
LIKELIEST: Final = 8
TOLERANCE: Final = 0.05  # of a logprob: a graphics card may add up in another order from start to start
TOKENS: Final = 128  # far enough for positions to matter
# With many ways to go on: where one token is certain, all engines agree.
TEXT: Final = (
    "The harbour master wrote seven names on a slate, sold the copper lamp to a stranger and said nothing "
    "more. Winter came early to the north valley; a train of grey mules carried salt, paper and window glass "
    "over the pass. In the third cellar they found a clock, two letters in an unknown hand, and a box of "
    "dried pears. Nobody asked why the river had changed its colour, for the council was busy with taxes, "
    "wolves and a wedding. A child counted backwards from ninety while her brother drew maps of cities that "
    "had never been built. On the last page of the ledger somebody had drawn a bird and below it one word: "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFingerprint:
    """One voice, and where it was heard last."""

    name: str
    engine: str  # Identity.digest: all else that is known about the engine
    process: str  # what /props marks each start with (engine.md 1.7)
    odds: Odds


async def voice_of(
    client: EngineClient,
    folder: Path,
    engine: str,
    process: str,
    *,
    may_compute: bool,
    headers: Headers | None = None,
) -> str:
    """The name of an engine's voice. No request may be pinned to it meanwhile.

    1. This process was heard before.
    2. No slot was used yet: it is asked, and found among those that were heard, or remembered.
    3. It is too late, not allowed, or refused: then it is taken for the one that was heard last, "" if none
       was, since most engines are started again as they were.

    Raises EngineGoneError.
    """
    heard = await asyncio.to_thread(recalled, folder)
    for one in heard:
        if (one.engine, one.process) == (engine, process):  # (1)
            return one.name
    try:
        odds = await listened(client, headers) if may_compute and await unused(client, headers) else ()
    except EngineError:
        odds = ()
    if not odds:  # (3)
        return next((one.name for one in reversed(heard) if one.engine == engine), "")
    known = next((one for one in heard if one.engine == engine and alike(one.odds, odds)), None)  # (2)
    now = known or KnownFingerprint(name=digest_of(orjson.dumps(odds)), engine=engine, process="", odds=odds)
    others = [one for one in heard if one != known]
    with contextlib.suppress(OSError):  # then it must be heard again after the next start
        await asyncio.to_thread(remembered, folder, [*others, replace(now, process=process)][-MOST:])
    return now.name


async def listened(client: EngineClient, headers: Headers | None) -> Odds:
    """Ask, and leave the slot empty again."""
    ids = await client.tokenize(TEXT, add_special=False, parse_special=False, headers=headers)
    guess = await client.guess(ids[:TOKENS], LIKELIEST, headers=headers)
    await swept(client, guess.slot, guess.held, headers)
    return guess.odds


def alike(one: Odds, other: Odds) -> bool:
    """Whether two voices are one. The least likely token of each may be missing in the other."""
    first, second = dict(one), dict(other)
    both = first.keys() & second.keys()
    return len(both) >= min(len(first), len(second)) - 1 and all(
        abs(first[token] - second[token]) <= TOLERANCE for token in both
    )


def recalled(folder: Path) -> list[KnownFingerprint]:
    """What was heard, the newest last; nothing where the file is not what we wrote. Blocks."""
    try:
        listed = orjson.loads((folder / FILE).read_bytes())
        return [KnownFingerprint(**one | {"odds": odds_in(one["odds"])}) for one in listed]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def odds_in(document: Any) -> Odds:
    return tuple((int(token), float(logprob)) for token, logprob in document)


def remembered(folder: Path, heard: Sequence[KnownFingerprint]) -> None:
    """Blocks. Raises OSError."""
    place = folder / f"{FILE}.new"
    place.write_bytes(orjson.dumps([asdict(one) for one in heard]))
    place.chmod(0o600)
    place.replace(folder / FILE)

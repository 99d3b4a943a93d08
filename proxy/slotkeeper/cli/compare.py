"""`slotkeeper doctor --compare URL URL`: whether two engines can continue from each other's snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from slotkeeper.engine.agreement import Agreement, Sayings, UsedError, agreement, sayings
from slotkeeper.engine.answers import SAID, EngineError, EngineGoneError, Health, NoFilesError
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.fingerprint import TOLERANCE

DIFFERS: Final = {
    "model": "They do not have the same model: start both with the same path of one file.",
    "adapters": "They have different LoRA adapters, or different scales for them.",
    "streams": "They have different numbers of slots: give both the same -np.",
}


class NotComparedError(Exception):
    """An engine could not be examined; the message says why."""


async def compare(urls: Sequence[str], api_key: str | None, console: Console) -> int:
    """Print whether two engines share snapshots. Returns 0 if they do, else 1."""
    try:
        one, other = await asyncio.gather(*(_asked(url, api_key) for url in urls))
    except NotComparedError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    found = agreement(one, other)
    for line in told(found):
        console.print(line)
    return int(not found.share)


async def _asked(url: str, api_key: str | None) -> Sayings:
    async with EngineClient(url, api_key=api_key) as client:
        health = await client.health()
        if health is not Health.OK:
            raise NotComparedError(f"{url} {SAID[health]}.")
        try:
            return await sayings(client)
        except UsedError:
            raise NotComparedError(
                f"{url} has been used, and the comparison would overwrite a slot: compare right after the "
                "engine's start, before any request."
            ) from None
        except (EngineError, EngineGoneError, NoFilesError) as error:
            raise NotComparedError(f"{url}: {error}") from error


def told(found: Agreement) -> Iterator[str]:
    """Yield the findings as sentences."""
    yield f"Texts at temperature 0: {found.said} of {found.steps} tokens are the same."
    noise = "that is noise" if found.equal else "that is more than noise"
    yield f"Logprobs of the likeliest tokens: at most {found.apart:.4f} apart; {noise} (up to {TOLERANCE})."
    yield from (DIFFERS[name] for name in found.differs)
    if found.share:
        yield "They share snapshots: with one slot folder, a conversation of one continues at the other."
    else:
        yield "They do not share snapshots: a conversation that moves is computed again."

"""Whether two engines compute the same, so that each may go on from states of the other.

After one text both continue with the likeliest token, and the logprobs of the likeliest are compared at each
step as far as both have said the same. Another build, backend, batch size or number of threads adds up in
another order: that moves a logprob by hundredths and may turn a tie. Another rope base moves it by tenths.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from slotkeeper.engine.answers import Odds
from slotkeeper.engine.canary import TEXT, swept, unused
from slotkeeper.engine.client import EngineClient, EngineError
from slotkeeper.engine.fingerprint import LIKELIEST, TOLERANCE, Identity
from slotkeeper.engine.traits import identify, read_answers

SAID: Final = 32  # tokens
BEGINS: Final = (0, 40)  # tokens of the fixed text that are left out: two texts, of which one is shorter


class UsedError(Exception):
    """The engine has been used: to ask it would take a slot that another may have been promised."""


@dataclass(frozen=True, slots=True)
class Sayings:
    """What one engine is, and what it says: after each text, at each step, the likeliest tokens."""

    identity: Identity
    texts: tuple[tuple[Odds, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two engines."""

    differs: tuple[str, ...]  # facts that are not equal in both, as `Identity` names them
    steps: int  # at which they were compared
    said: int  # at which both said the same token
    apart: float  # the largest difference of a logprob

    @property
    def equal(self) -> bool:
        """Whether the numbers are those of one engine, as far as noise goes."""
        return self.apart <= TOLERANCE

    @property
    def share(self) -> bool:
        """Whether snapshots of one are offered to the other."""
        return self.equal and not self.differs


async def sayings(client: EngineClient) -> Sayings:
    """Raises UsedError, EngineError and EngineGoneError. The engine's slots are empty afterwards."""
    if not await unused(client, None):
        raise UsedError
    identity = await identify(client, await read_answers(client, None, None), None, None)
    ids = await client.tokenize(TEXT, add_special=False, parse_special=False)
    texts = []
    for begin in BEGINS:
        found = await client.continued(ids[begin:], SAID, LIKELIEST)
        with suppress(EngineError):  # without a folder for slots it erases none: the text stays there
            await swept(client, found.slot, found.held, None)
        texts.append(found.steps)
    return Sayings(identity, tuple(texts))


def agreement(one: Sayings, other: Sayings) -> Agreement:
    facts = ("model", "adapters", "streams")
    differs = tuple(name for name in facts if getattr(one.identity, name) != getattr(other.identity, name))
    steps = said = 0
    apart = 0.0
    for mine, theirs in zip(one.texts, other.texts, strict=True):
        for first, second in zip(mine, theirs, strict=False):
            steps, apart = steps + 1, max(apart, distance(first, second))
            if first[:1] and second[:1] and first[0][0] != second[0][0]:
                break  # from here on they continue different texts
            said += 1
    return Agreement(differs, steps, said, apart)


def distance(one: Odds, other: Odds) -> float:
    """The largest difference of a logprob that both have; infinite where the likeliest tokens are others.

    The least likely tokens of each may be missing in the other.
    """
    first, second = dict(one), dict(other)
    both = first.keys() & second.keys()
    if len(both) < min(len(first), len(second)) - 1:
        return float("inf")
    return max((abs(first[token] - second[token]) for token in both), default=0.0)

"""Whether two engines compute the same, so that each can continue from states of the other.

Both continue the same text with the likeliest token, and the logprobs of the likeliest tokens are compared at
each step until they choose different tokens. Another build, backend, batch size or number of threads adds in
another order: that changes a logprob by hundredths and may change which of two equal tokens wins. Another
rope base changes it by tenths.
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

SAID: Final = 32  # tokens that each engine generates
BEGINS: Final = (0, 40)  # tokens of the fixed text to skip: this gives two texts of different length


class UsedError(Exception):
    """The engine has served requests: to ask it would overwrite a slot that may be promised to one."""


@dataclass(frozen=True, slots=True)
class Sayings:
    """An engine's identity and answers: after each text, the likeliest tokens at each step."""

    identity: Identity
    texts: tuple[tuple[Odds, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of comparing two engines."""

    differs: tuple[str, ...]  # fields of `Identity` that are not equal
    steps: int  # at which the engines were compared
    said: int  # at which both chose the same token
    apart: float  # the largest difference of a logprob

    @property
    def equal(self) -> bool:
        """Whether the logprobs are equal apart from noise."""
        return self.apart <= TOLERANCE

    @property
    def share(self) -> bool:
        """Whether snapshots of one engine may be offered to the other."""
        return self.equal and not self.differs


async def sayings(client: EngineClient) -> Sayings:
    """Ask an engine. Its slots are empty afterwards. Raises UsedError, EngineError and EngineGoneError."""
    if not await unused(client, None):
        raise UsedError
    identity = await identify(client, await read_answers(client, None, None), None, None)
    ids = await client.tokenize(TEXT, add_special=False, parse_special=False)
    texts = []
    for begin in BEGINS:
        found = await client.continued(ids[begin:], SAID, LIKELIEST)
        with suppress(EngineError):  # without --slot-save-path it cannot erase: the text stays in the slot
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
                break  # after this they continue different texts
            said += 1
    return Agreement(differs, steps, said, apart)


def distance(one: Odds, other: Odds) -> float:
    """Return the largest difference of a logprob that both have; infinite if the likeliest tokens differ.

    The least likely tokens of one engine may be missing in the other.
    """
    first, second = dict(one), dict(other)
    both = first.keys() & second.keys()
    if len(both) < min(len(first), len(second)) - 1:
        return float("inf")
    return max((abs(first[token] - second[token]) for token in both), default=0.0)

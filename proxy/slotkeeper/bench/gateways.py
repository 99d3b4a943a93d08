"""What stands in front of many sidecars in the simulator: rules by which a gateway chooses one.

Each sees what a gateway can see: the conversation's name, the prompt, and how many requests it has sent there
that are not over. Only LMetric is also told what engines hold and have to compute, which it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Final, Protocol

from slotkeeper.scheduler.types import WIDTH, Tokens

POINTS: Final = 160  # of each sidecar on the ring, as ketama and HAProxy have for a weight of one or more
MATCHED: Final = 256 * WIDTH  # bytes: prompts are compared block by block
# SMG 1.13, `smg launch --help`: --cache-threshold, --balance-abs-threshold, --balance-rel-threshold.
SMG_SHARE: Final = 0.3
SMG_ABOVE: Final = 64
SMG_TIMES: Final = 1.5
SMG_LEAST: Final = 4


class Worker(Protocol):
    """A sidecar, as a gateway sees it."""

    @property
    def in_flight(self) -> int: ...  # requests that were sent there and are not over

    @property
    def pending(self) -> int: ...  # prompt tokens that its engines have yet to compute

    def held(self, prompt: Tokens) -> int: ...  # the most of this prompt that a slot has


Choose = Callable[[str, Tokens], int]


def round_robin(workers: Sequence[Worker]) -> Choose:
    """One after the other."""
    sent = 0

    def choose(_: str, __: Tokens) -> int:
        nonlocal sent
        sent += 1
        return (sent - 1) % len(workers)

    return choose


def consistent_hash(workers: Sequence[Worker]) -> Choose:
    """By the conversation's name, on a ring: who comes or goes moves only its own share."""
    points = sorted((_digest(b"%d/%d" % (n, p)), n) for n in range(len(workers)) for p in range(POINTS))
    places = [place for place, _ in points]

    def choose(conversation: str, _: Tokens) -> int:
        at = bisect_right(places, _digest(conversation.encode()))
        return points[at % len(points)][1]

    return choose


def cache_aware(workers: Sequence[Worker]) -> Choose:
    """SMG's rule: who was sent the longest beginning of this prompt, if that is enough of it.

    Not where it has far more requests than the mean; then, and where too little is known, who has the fewest.
    """
    owners: dict[bytes, int] = {}  # the chained digest of blocks -> to whom they were sent last

    def choose(_: str, prompt: Tokens) -> int:
        loads = [worker.in_flight for worker in workers]
        chain = _chain(prompt)
        known = next((n for n in range(len(chain), 0, -1) if chain[n - 1] in owners), 0)
        chosen = loads.index(min(loads))
        if known and known * MATCHED >= SMG_SHARE * len(prompt.packed):
            owner = owners[chain[known - 1]]
            chosen = chosen if _too_loaded(loads[owner], sum(loads) / len(loads)) else owner
        owners.update(dict.fromkeys(chain, chosen))
        return chosen

    return choose


def _too_loaded(load: int, mean: float) -> bool:
    above = min(SMG_ABOVE, max(SMG_LEAST, 2 * sqrt(mean)))
    return load > mean + above and load > SMG_TIMES * mean


def lmetric(workers: Sequence[Worker]) -> Choose:
    """LMetric (OSDI'26): the least of new prompt tokens, waiting ones included, times the batch."""

    def price(worker: Worker, prompt: Tokens) -> tuple[float, int]:
        new = len(prompt) - worker.held(prompt) + worker.pending
        return new * (1 + worker.in_flight), worker.in_flight

    def choose(_: str, prompt: Tokens) -> int:
        return min(range(len(workers)), key=lambda n: price(workers[n], prompt))

    return choose


GATEWAYS: Final[dict[str, Callable[[Sequence[Worker]], Choose]]] = {
    "round-robin": round_robin,
    "consistent-hash": consistent_hash,
    "cache-aware": cache_aware,
    "lmetric": lmetric,
}


def _chain(prompt: Tokens) -> list[bytes]:
    digest, chain = b"", []
    for at in range(0, len(prompt.packed) - MATCHED + 1, MATCHED):
        digest = blake2b(digest + prompt.packed[at : at + MATCHED], digest_size=8).digest()
        chain.append(digest)
    return chain


def _digest(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())

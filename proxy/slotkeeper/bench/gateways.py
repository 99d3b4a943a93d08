"""Gateways of the simulator: rules that choose a sidecar for each request.

Each rule sees what a gateway can see: the conversation's name, the prompt, and the number of unfinished
requests that it sent to each sidecar. Only LMetric also sees the contents and the pending tokens of engines,
which it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Final, Protocol

from slotkeeper.scheduler.tokens import WIDTH, Tokens

POINTS: Final = 160  # points of each sidecar on the ring, as in ketama and HAProxy at weight one
MATCHED: Final = 256 * WIDTH  # bytes of a block: prompts are compared block by block
# SMG 1.13, `smg launch --help`: --cache-threshold, --balance-abs-threshold, --balance-rel-threshold.
SMG_SHARE: Final = 0.3
SMG_ABOVE: Final = 64
SMG_TIMES: Final = 1.5
SMG_LEAST: Final = 4


class Worker(Protocol):
    """A sidecar as a gateway sees it."""

    @property
    def in_flight(self) -> int: ...  # unfinished requests that were sent to it

    @property
    def pending(self) -> int: ...  # prompt tokens that its engines have not computed yet

    def held(self, prompt: Tokens) -> int: ...  # the longest prefix of this prompt in a slot, in tokens


Choose = Callable[[str, Tokens], int]


def round_robin(workers: Sequence[Worker]) -> Choose:
    """Choose each sidecar in turn."""
    sent = 0

    def choose(_: str, __: Tokens) -> int:
        nonlocal sent
        sent += 1
        return (sent - 1) % len(workers)

    return choose


def consistent_hash(workers: Sequence[Worker]) -> Choose:
    """Choose by the conversation's name on a ring: a sidecar that comes or goes moves only its own share."""
    points = sorted((_digest(b"%d/%d" % (n, p)), n) for n in range(len(workers)) for p in range(POINTS))
    places = [place for place, _ in points]

    def choose(conversation: str, _: Tokens) -> int:
        at = bisect_right(places, _digest(conversation.encode()))
        return points[at % len(points)][1]

    return choose


def cache_aware(workers: Sequence[Worker]) -> Choose:
    """Choose by SMG's rule: the sidecar that got the longest prefix of this prompt, if that is long enough.

    If that sidecar has far more requests than the mean, or no prefix is long enough, choose the one with the
    fewest.
    """
    owners: dict[bytes, int] = {}  # the chained digest of blocks -> the sidecar that got them last

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
    """Choose by LMetric (OSDI'26): least new prompt tokens, with pending ones, times the batch."""

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

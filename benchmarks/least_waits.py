"""The shortest time that clients can wait for first tokens, if they share an engine of some slots.

Requests are served in the order of their arrival. Each waits for a free slot, and for the prompts before it,
which the engine computes one after the other; then its own least tokens are computed. Answers run at full
speed, as if no prompt were computed beside them. So the bound has a queue only as far as any server has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRequest:
    """One request of a client, in seconds."""

    pause: float  # since the client's last answer
    prefill: float  # of the tokens that any cache must compute
    answer: float  # from its first token to its last


def least_waits(clients: Sequence[Sequence[LeastRequest]], slots: int) -> list[float]:
    """Return the time to the first token of each request, in the order of their arrival."""
    arrivals = [(requests[0].pause, number, 0) for number, requests in enumerate(clients) if requests]
    heapq.heapify(arrivals)
    free, computed, waits = [0.0] * slots, 0.0, list[float]()
    while arrivals:
        asked, number, place = heapq.heappop(arrivals)
        request = clients[number][place]
        computed = max(asked, heapq.heappop(free), computed) + request.prefill
        waits.append(computed - asked)
        ended = computed + request.answer
        heapq.heappush(free, ended)
        if place + 1 < len(clients[number]):
            heapq.heappush(arrivals, (ended + clients[number][place + 1].pause, number, place + 1))
    return waits

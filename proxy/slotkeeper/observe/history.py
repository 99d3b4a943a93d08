"""What was computed and what was reused, since the start and in the last half hour, for those who look on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

BUCKET: Final = 10.0  # seconds
BUCKETS: Final = 180  # half an hour, if each has something


@dataclass(slots=True)
class Figures:
    """Prompt tokens by the engine's count. `planted` were computed for requests before they went on."""

    requests: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    computed: int = 0
    oracle: int = 0
    planted: int = 0
    idle: int = 0  # computed while nobody waited
    repeated: int = 0  # lost by the cache, or unchanged behind what a client had changed
    saved_seconds: float = 0.0

    def shown(self) -> dict[str, Any]:
        return asdict(self) | {"saved_seconds": round(self.saved_seconds, 3)}


@dataclass(slots=True)
class _Bucket:
    at: float  # seconds since the epoch, when it begins
    figures: Figures = field(default_factory=Figures)


class History:
    """Sums, and the same in steps of ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self.totals = Figures()

    def add(self, **figures: float) -> None:
        """Each by its name in `Figures`."""
        at = self._clock() // BUCKET * BUCKET
        if not self._buckets or self._buckets[-1].at < at:
            self._buckets.append(_Bucket(at))
        now, totals = self._buckets[-1].figures, self.totals
        for name, value in figures.items():
            setattr(now, name, getattr(now, name) + value)
            setattr(totals, name, getattr(totals, name) + value)

    def shown(self) -> Iterator[dict[str, Any]]:
        """Oldest first; steps in which nothing happened are left out, and so is what is older."""
        oldest = self._clock() - BUCKET * BUCKETS
        for bucket in self._buckets:
            if bucket.at >= oldest:
                yield {"at": bucket.at, **bucket.figures.shown()}

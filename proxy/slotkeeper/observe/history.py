"""What was computed and what was reused, since the start and in the last half hour, for observers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from slotkeeper.scheduler.figures import Sums

BUCKET: Final = 10.0  # seconds
BUCKETS: Final = 180  # half an hour, if each has something


@dataclass(slots=True)
class _Bucket:
    at: float  # seconds since the epoch, when it begins
    sums: Sums = field(default_factory=Sums)


class History:
    """Sums, and the same in steps of ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self.totals = Sums()

    def add(self, **figures: float) -> None:
        """Each by its name in `Sums`."""
        at = self._clock() // BUCKET * BUCKET
        if not self._buckets or self._buckets[-1].at < at:
            self._buckets.append(_Bucket(at))
        self._buckets[-1].sums.add(**figures)
        self.totals.add(**figures)

    def shown(self) -> Iterator[dict[str, Any]]:
        """Oldest first; steps in which nothing happened are left out, and so is what is older."""
        oldest = self._clock() - BUCKET * BUCKETS
        for bucket in self._buckets:
            if bucket.at >= oldest:
                yield {"at": bucket.at, **bucket.sums.shown()}

"""Requests that could not be rendered because their engine was not known yet: they wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.events import Event, Rendered
from slotkeeper.scheduler.state import EARLY
from slotkeeper.scheduler.types import RequestId

MOST_BYTES: Final = 32 << 20  # of the bodies that are kept

Rendering = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class LateRenders:
    """The last of these requests: at most EARLY, with bodies of at most MOST_BYTES together."""

    tasks: Tasks
    post: Callable[[Event], None]
    _kept: dict[RequestId, tuple[int, Rendering]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """The bytes of their bodies."""
        return sum(size for size, _ in self._kept.values())

    def keep(self, request: RequestId, size: int, rendering: Rendering) -> None:
        """Keep a request. `size`: bytes of its body. `rendering` must end in `Rendered`."""
        self._kept[request] = size, rendering
        while len(self._kept) > EARLY or self.size > MOST_BYTES:
            del self._kept[next(iter(self._kept))]

    def start(self, request: RequestId) -> None:
        """Render a request now. If it is not kept any more, its tokens stay unknown."""
        _, rendering = self._kept.pop(request, (0, None))
        if rendering is None:
            self.post(Rendered(at=time.monotonic(), request=request, prompt=None))
        else:
            self.tasks.start(rendering())

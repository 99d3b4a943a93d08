"""The line in front of the slots: fair between clients, oldest first within each.

The engine's own deferred queue knows no fairness and leaves slots idle (engine.md 6), so nothing
waits there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from slotkeeper.scheduler.types import ClientId, RequestId


class FairQueue:
    """Requests in the order in which they may be placed."""

    def __init__(self) -> None:
        # The clients' own order is the turn order: a served client goes to the end.
        self._lines: OrderedDict[ClientId, OrderedDict[RequestId, None]] = OrderedDict()
        self._client: dict[RequestId, ClientId] = {}

    def __len__(self) -> int:
        return len(self._client)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._client

    def __iter__(self) -> Iterator[RequestId]:
        """One request of each client in turn, then the second of each, and so on."""
        turns = [iter(line) for line in self._lines.values()]
        while len(turns) > 1:
            heads = [next(line, None) for line in turns]
            yield from filter(None, heads)
            if None in heads:
                turns = [line for line, head in zip(turns, heads, strict=True) if head is not None]
        yield from chain.from_iterable(turns)  # at once: thousands may wait

    def of(self, client: ClientId) -> int:
        """How many of its requests wait."""
        return len(self._lines.get(client, ()))

    def add(self, request: RequestId, client: ClientId) -> None:
        self._lines.setdefault(client, OrderedDict())[request] = None
        self._client[request] = client

    def put_back(self, request: RequestId, client: ClientId) -> None:
        """It was served in vain, and is the next to be served."""
        self.add(request, client)
        self._lines[client].move_to_end(request, last=False)
        self._lines.move_to_end(client, last=False)

    def served(self, request: RequestId) -> None:
        """It leaves the queue, and its client goes to the end of the turn order."""
        client = self._client.get(request)
        self.discard(request)
        if client is not None and client in self._lines:
            self._lines.move_to_end(client)

    def discard(self, request: RequestId) -> None:
        """It leaves the queue without having been served."""
        client = self._client.pop(request, None)
        if client is None:
            return
        line = self._lines[client]
        del line[request]
        if not line:
            del self._lines[client]

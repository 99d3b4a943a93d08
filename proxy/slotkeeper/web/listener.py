"""Reading along while an answer goes to its client. What fails here is counted and left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import aiohttp

from slotkeeper.api.answer import Answer, AnswerReader, Figures
from slotkeeper.api.progress import ProgressFilter
from slotkeeper.api.routes import Api
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.why.record import Record

UNREAD: Final = Answer(figures=Figures(), reply=None, complete=False, error=None)

log = get_logger(__name__)


class Listener:
    """Of one answer. The bytes are already with the client when they are read here."""

    def __init__(self, api: Api, record: Record, metrics: Metrics, now: Callable[[], float]) -> None:
        """`now` in seconds, on the clock of `record.at`."""
        self._api = api
        self._record = record
        self._metrics = metrics
        self._now = now
        self._reader: AnswerReader | None = None

    def begin(self, answer: aiohttp.ClientResponse) -> None:
        """From here on. What is compressed is not read."""
        if "Content-Encoding" not in answer.headers:
            streamed = answer.content_type == "text/event-stream"
            self._reader = AnswerReader(self._api, stream=streamed, status=answer.status)

    @property
    def events(self) -> int:
        """That were heard of a stream so far: about as many as tokens that were generated."""
        return self._reader.events if self._reader else 0

    def heard(self, chunk: bytes) -> None:
        if self._reader is None:
            return
        try:
            self._reader.feed(chunk)
            if self._record.first_token is None and self._reader.first_token():
                self._record.first_token = self._now() - self._record.at
        except Exception:
            log.exception("answer_not_read", request_id=self._record.request_id)
            self._give_up()

    def without(self, progress: ProgressFilter) -> Callable[[bytes], bytes]:
        """What goes on of a chunk. What is removed is passed to observers."""

        def rest(chunk: bytes) -> bytes:
            left, work = progress.feed(chunk), self._record.work
            if work and progress.latest is not work.told:
                work.told, work.told_at = progress.latest, self._now()
            return left

        return rest

    def end(self) -> Answer:
        """What it was, as far as it was read."""
        try:
            return self._reader.close() if self._reader else UNREAD
        except Exception:
            log.exception("answer_not_read", request_id=self._record.request_id)
            self._give_up()
            return UNREAD

    def _give_up(self) -> None:
        self._metrics.fallback("read")
        self._reader = None

"""The conversation of one request: its name, what its client changed, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping

from slotkeeper.api.answer import Answer
from slotkeeper.api.document import Doc
from slotkeeper.api.headers import request_id
from slotkeeper.api.routes import Api
from slotkeeper.conversation.naming import Naming
from slotkeeper.observe.log import get_logger
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.why.record import Record
from slotkeeper.runtime.aside import Runner, here
from slotkeeper.runtime.rewriting import Rewriting, Taken
from slotkeeper.scheduler.tokens import Tokens

log = get_logger(__name__)


class NameKeeper:
    """Writes the name of a request's conversation into its record.

    No decision depends on a name, so a failure is logged and counted only.
    """

    def __init__(
        self, names: Naming, metrics: Metrics, record: Record, headers: Mapping[str, str], given: str | None
    ) -> None:
        """`given`: the name that the client gives its conversation."""
        self._names = names
        self._metrics = metrics
        self._record = record
        self._headers = headers
        self._given = given

    def update(self, taken: Taken | None) -> None:
        """Name it by all that is known so far."""
        record, line = self._record, taken.conversation if taken else None
        try:
            if line is not None:
                record.name = self._names.name(
                    record.client,
                    self._headers,
                    line,
                    coming=record.name,
                    given=self._given,
                    now=record.at,
                )
            else:
                before = taken.match.before if taken else None
                record.name = self._names.coming(
                    record.client,
                    self._headers,
                    taken.received if taken else None,
                    before=before.number if before else None,
                    given=self._given,
                    now=record.at,
                )
        except Exception:
            log.exception("not_named", request_id=record.request_id)
            self._metrics.fallback("explain")

    def answered(self, taken: Taken | None, answer: Answer) -> None:
        """The answer may be a title that the agent has asked for."""
        if taken and answer.reply and answer.complete:
            try:
                self._names.answered(self._record.client, taken.received, answer.reply)
            except Exception:
                log.exception("not_named", request_id=self._record.request_id)
                self._metrics.fallback("explain")


class Explaining:
    """Writes what it finds in the request's record. If that fails, the request goes as it came."""

    def __init__(self, rewriting: Rewriting, metrics: Metrics, record: Record) -> None:
        self._rewriting = rewriting
        self._metrics = metrics
        self._record = record
        self.taken: Taken | None = None  # what it goes on as; None: it is no chat, or was not looked at

    async def take(
        self, api: Api, doc: Doc, *, headers: Mapping[str, str], run: Runner = here
    ) -> Taken | None:
        """The request, and how rules would have it; None for what is no chat, or what failed."""
        record = self._record
        try:
            self.taken = await self._rewriting.take(
                api,
                doc,
                run=run,
                request_id=record.request_id,
                client=record.client,
                headers=headers,
                size=record.body_bytes,
                now=record.at,
            )
        except Exception:
            log.exception("rewrite_failed", request_id=record.request_id)
            self._metrics.fallback("rewrite")
        return self.taken

    def goes(self, *, changed: bool) -> None:
        """In which form it goes out."""
        if self.taken is not None:
            self._rewriting.goes(self.taken, changed=changed)

    @property
    def rules(self) -> list[str]:
        """Those that change the request, if it goes out so."""
        return self.taken.rules if self.taken else []

    def settle(self) -> None:
        """Find the conversation and the changes, once; the engine is already at work on the request."""
        taken, record = self.taken, self._record
        if taken is None or taken.judged is not None:
            return
        try:
            judged, line = self._rewriting.settle(taken), taken.conversation
        except Exception:
            log.exception("explanation_failed", request_id=record.request_id)
            self._failed()
            return
        if line is not None:
            record.conversation = line.number
            record.named = record.named or request_id(line.who.name, str) or None
        if judged is not None:
            record.kind, record.changes = judged.explained.kind, taken.changes

    def answered(self, answer: Answer, prompt: Tokens | None, *, planted: int) -> None:
        """What the request's own changes have cost. `planted` tokens were computed before it went on."""
        self.settle()
        if self.taken is None:
            return
        try:
            reply = answer.reply if answer.complete else None
            self._record.divergence = self._rewriting.answered(
                self.taken,
                reply,
                prompt,
                answer.figures,
                planted=planted,
                decision=self._record.decision,
            )
        except Exception:
            log.exception("explanation_failed", request_id=self._record.request_id)
            self._failed()

    def _failed(self) -> None:
        self._metrics.fallback("explain")
        self.taken = None

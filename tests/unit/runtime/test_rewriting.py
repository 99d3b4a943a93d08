"""The cost of a request's changes, by the engine's figures, and the text of them that is kept."""

from __future__ import annotations

from typing import Any

import pytest

from at_once import at_once
from slotkeeper.api.answers.answer_builder import Figures
from slotkeeper.api.head import Api
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.layout import Section
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.rules.apply import DEFAULTS
from slotkeeper.conversation.rules.base import Choice, RuleName
from slotkeeper.observe.metrics import Metrics
from slotkeeper.runtime.rewriting import Rewriting, Taken, judge
from slotkeeper.scheduler.prompts.tokens import Tokens

SYSTEM = "You are an agent. " * 200 + "\n\nCurrent date: 2026-11-2{day}\n\n" + "Keep lines short. " * 200
ASKED, SAID = {"role": "user", "content": "Which bolts are low?"}, {"role": "assistant", "content": "M4."}
HEAD, DATE, TAIL = Tokens(range(1000)), Tokens([7]), Tokens(range(2000, 3000))


def request(day: int, turns: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "system", "content": SYSTEM.format(day=day)}, *[ASKED, SAID] * turns, ASKED]
    }


def prompt(day: int, turns: int) -> Tokens:
    return HEAD + Tokens([day]) + TAIL + Tokens(range(5000, 5000 + 100 * turns))


class FakeThread:
    """A fake of the worker thread, which must not access objects that the event loop changes."""

    def __init__(self, rewriting: Rewriting, *meanwhile: Any) -> None:
        self.ran: list[str] = []
        self._inside = False
        self._meanwhile = list(meanwhile)  # what the event loop does meanwhile
        rewriting.conversations = OwnedByLoop(rewriting.conversations, self)  # type: ignore[assignment]
        rewriting._before = OwnedByLoop(rewriting._before, self)  # type: ignore[assignment]

    async def __call__(self, do: Any, /, *args: Any, **more: Any) -> Any:
        if self.ran and self._meanwhile:
            self._meanwhile.pop(0)()
        self.ran.append(do.__name__)
        self._inside = True
        try:
            return do(*args, **more)
        finally:
            self._inside = False


class OwnedByLoop:
    def __init__(self, real: Any, thread: FakeThread) -> None:
        self._real, self._thread = real, thread

    def __getattr__(self, name: str) -> Any:
        assert not self._thread._inside, f"{name} is the loop's"
        return getattr(self._real, name)


def take(rewriting: Rewriting, *args: Any, **more: Any) -> Taken | None:
    return at_once(rewriting.take(*args, **more))


class Clients:
    """A client's requests, and the engine's answers."""

    def __init__(self, *rules: str, text: bool = False) -> None:
        self.metrics = Metrics()
        self.rewriting = Rewriting(Choice.of(rules, DEFAULTS), self.metrics, text=text)
        self._count = 0

    def asks(
        self,
        doc: dict[str, Any],
        tokens: Tokens,
        *,
        cached: int,
        planted: int = 0,
        seconds: float = 1.0,
        changed: bool | None = None,
        **more: Any,
    ):
        """Return what was sent, and where it diverges.

        Rules have changed it, unless `changed` says otherwise.
        """
        self._count += 1
        taken = take(
            self.rewriting,
            Api.CHAT,
            doc,
            request_id=f"r{self._count}",
            client="anna",
            headers={},
            size=1000,
            now=float(self._count),
            **more,
        )
        if taken.rewritten is not None:
            self.rewriting.goes(taken, changed=changed is not False)
        computed = len(tokens) - cached
        figures = Figures(computed=computed, cached=cached, prefill_ms=seconds * 1000)
        return taken, self.rewriting.answered(taken, tokens, figures, planted=planted)

    def counted(self, cause: Cause) -> float:
        return self.metrics.registry.get_sample_value(
            "slotkeeper_repeated_tokens_total", {"cause": cause.value}
        )


def begun(*rules: str, text: bool = False) -> Clients:
    """Return a client whose first request was answered."""
    clients = Clients(*rules, text=text)
    clients.asks(request(1, 0), prompt(1, 0), cached=0)
    return clients


def test_a_change_costs_the_tokens_computed_again_behind_it():
    clients = begun()
    taken, divergence = clients.asks(request(2, 1), prompt(2, 1), cached=1000, seconds=2.2)
    assert taken.rewritten is None
    assert taken.judged.explained.kind is RequestKind.REWRITE
    assert (divergence.cause, divergence.token) == (Cause.DATE, 1000)
    assert 800 < divergence.tokens <= 1001
    assert divergence.seconds == pytest.approx(divergence.tokens * 2.2 / 1101)
    assert clients.counted(Cause.DATE) == divergence.tokens


def test_tokens_that_another_slot_had_do_not_count_as_cost_unless_they_were_planted_for_the_request():
    _, divergence = begun().asks(request(2, 1), prompt(2, 1), cached=2001)
    assert divergence.tokens == 100
    _, divergence = begun().asks(request(2, 1), prompt(2, 1), cached=2001, planted=1001)
    assert divergence.tokens > 800


def test_a_fixed_change_costs_nothing():
    clients = begun("date=fix")
    taken, divergence = clients.asks(request(2, 1), prompt(1, 1), cached=2001)
    assert taken.rewritten is not None
    assert (divergence.cause, divergence.tokens) == (Cause.DATE, 0)
    assert clients.counted(Cause.DATE) == 0


def test_different_tokens_of_an_equal_text_are_attributed_to_the_template():
    clients = begun()
    _, divergence = clients.asks(request(1, 1), prompt(2, 1), cached=1000)
    assert (divergence.cause, divergence.rule) == (Cause.TEMPLATE_RERENDERS, None)
    assert divergence.tokens == 1001


def test_a_request_without_a_divergence_has_no_report():
    clients = Clients()
    assert clients.asks(request(1, 0), prompt(1, 0), cached=0)[1] is None
    assert clients.asks(request(1, 1), prompt(1, 1), cached=2000)[1] is None


def test_a_request_that_is_not_a_chat_is_ignored():
    taken = take(
        Clients().rewriting,
        Api.COMPLETION,
        {"prompt": "x"},
        request_id="r",
        client="anna",
        headers={},
        size=10,
        now=0.0,
    )
    assert taken is None


@pytest.mark.parametrize("text", [True, False])
def test_changes_by_rules_have_short_excerpts_only_if_text_may_be_kept(text):
    taken, divergence = begun("date=fix", text=text).asks(request(2, 1), prompt(1, 1), cached=2000)
    change = taken.changes[0]
    assert ("2026-11-22" in change.before, "2026-11-21" in change.after) == (text, text)
    assert len(change.before) < 200
    assert bool(change.before or change.after) is text
    assert (change.rule, divergence.fixed) == (RuleName.DATE, True)


RECAP = {
    "messages": [
        {"role": "system", "content": "Write a recap."},
        *[ASKED, SAID] * 2,
        {"role": "user", "content": "Now."},
    ]
}


@pytest.mark.parametrize("mode", ["observe", "fix"])
def test_a_side_question_costs_the_history_unless_its_rule_fixes_it(mode):
    clients = begun(f"side_question={mode}")
    clients.asks(request(1, 1), prompt(1, 1), cached=2100)
    own = Tokens(range(9000, 9010)) + prompt(1, 1).cut(1001, 3100) + Tokens([3])
    tokens = own if mode == "observe" else prompt(1, 1) + Tokens([3])
    _, divergence = clients.asks(RECAP, tokens, cached=0 if mode == "observe" else len(tokens) - 1)
    if mode == "fix":
        assert divergence is None or divergence.tokens == 0
        assert clients.counted(Cause.SIDE_QUESTION) == 0
    else:
        assert (divergence.cause, divergence.rule) == (Cause.SIDE_QUESTION, RuleName.SIDE_QUESTION)
        assert clients.counted(Cause.SIDE_QUESTION) == divergence.tokens > 0


@pytest.mark.parametrize("keyed", [True, False])
def test_a_side_question_shows_nothing_of_a_conversation_that_held_a_key(keyed):
    clients = begun("side_question=fix", text=True)
    taken, _ = clients.asks(request(1, 1), prompt(1, 1), cached=2100)
    taken.conversation.keyed = keyed
    taken, _ = clients.asks(RECAP, prompt(1, 1), cached=2000)
    assert any(change.after for change in taken.changes) is not keyed


def test_the_tokens_around_a_divergence_are_kept_only_if_text_may_be_kept():
    for text in (True, False):
        divergence = begun(text=text).asks(request(2, 1), prompt(2, 1), cached=1000)[1]
        assert (divergence.token, divergence.section) == (1000, Section.SYSTEM)
        assert (divergence.was[divergence.lead :][:1], divergence.now[divergence.lead :][:1]) == (
            ((1,), (2,)) if text else ((), ())
        )


def test_a_rule_that_would_cost_tokens_is_declined_and_the_request_is_kept_unchanged():
    clients = begun("date=fix")
    taken, divergence = clients.asks(request(2, 1), prompt(2, 1), cached=1000, changed=False)
    assert [change.declined for change in taken.changes] == [True]
    assert (divergence.cause, divergence.fixed) == (Cause.DATE, False)
    value = clients.metrics.registry.get_sample_value
    counts = {
        action: value("slotkeeper_rewrites_total", {"rule": "date", "action": action})
        for action in ("fixed", "observed", "declined")
    }
    assert counts == {"fixed": 0, "observed": 0, "declined": 1}
    again, _ = clients.asks(request(2, 2), prompt(2, 2), cached=2000)  # the client continues its own text
    assert again.rewritten is None


def test_a_divergence_caused_only_by_a_rule_names_that_rule():
    """The rule restored the date once, and later does not: the client's request has not changed."""
    clients = begun("date=fix")
    clients.asks(request(2, 1), prompt(1, 1), cached=2000)
    _, divergence = clients.asks(request(2, 2), prompt(2, 2), cached=1000, changed=False)
    assert (divergence.cause, divergence.rule, divergence.token) == (Cause.OUR_RULE, RuleName.DATE, 1000)
    assert divergence.tokens > 800
    assert clients.counted(Cause.OUR_RULE) == divergence.tokens


def test_a_request_is_recorded_for_the_next_one_even_if_it_is_not_explained():
    clients = Clients()
    first, second = (
        take(
            clients.rewriting,
            Api.CHAT,
            request(1, turns),
            request_id="r",
            client="anna",
            headers={},
            size=10,
            now=1.0,
        )
        for turns in (0, 1)
    )
    assert first.conversation is not None
    assert second.match.before is not None
    assert second.match.before.number == first.conversation.number


def test_a_conversation_that_continues_meanwhile_does_not_change_what_the_thread_reads():
    clients = Clients()
    clients.asks(request(1, 1), prompt(1, 1), cached=0)

    def next_turn() -> None:
        clients.asks(request(1, 2), prompt(1, 2), cached=1000)

    run = FakeThread(clients.rewriting, next_turn)
    taken, _ = clients.asks(request(2, 2), prompt(2, 2), cached=1000, run=run)
    assert len(taken.match.before.received.messages) == len(request(1, 1)["messages"])
    assert taken.judged.explained.cause is Cause.DATE


@pytest.mark.parametrize("changed", [True, False])
def test_requests_are_compared_in_the_thread_and_not_in_the_event_loop(changed, monkeypatch):
    """Both forms were compared, so it does not matter which one is sent."""
    plain, clients = begun("date=fix"), begun("date=fix")
    _, expected = plain.asks(request(2, 1), prompt(2, 1), cached=1000, changed=changed)
    thread, judged = FakeThread(clients.rewriting), []

    def slow(*args: Any) -> Any:
        judged.append(thread._inside)
        return judge(*args)

    monkeypatch.setattr("slotkeeper.runtime.rewriting.judge", slow)
    taken, divergence = clients.asks(request(2, 1), prompt(2, 1), cached=1000, run=thread, changed=changed)
    assert taken.rewritten is not None
    assert judged == [True, True]
    assert len(thread.ran) == 3, "also the reading and the rules"
    assert divergence == expected


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": None}]])
def test_a_request_without_any_text_is_compared_with_one_that_has_tools(messages):
    clients, tools = Clients(), [{"type": "function", "function": {"name": "ls"}}]
    clients.asks({"messages": [ASKED], "tools": tools}, Tokens(range(20)), cached=0)
    taken, _ = clients.asks({"messages": messages}, Tokens(range(5)), cached=5)
    assert taken.judged.explained.divergence.section is Section.TOOLS
    assert taken.judged.lost == 0.0

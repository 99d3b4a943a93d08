"""Agents that prune old results in any way, at any time: what the model reads of them, and how much."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from properties.beside_stock import World, tokens_of
from properties.test_rules_never_cost import SESSION, tool, words
from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Conversation, Who
from slotkeeper.conversation.rules.base import Room, Scene
from slotkeeper.conversation.rules.rules import LEAST as SHORTEST_SUMMARIZED
from slotkeeper.conversation.rules.rules import PrunedResults, common

Doc = dict[str, Any]

SETTINGS = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
SYSTEM = {"role": "system", "content": words("system", 60)}
TOOLS = [tool("read"), tool("write")]


def placeholder(_: str) -> str:
    return "[Old tool result content cleared]"


def cut(text: str) -> str:
    return f"{text[:60]}\n[... truncated ...]\n{text[-60:]}"


def summary(text: str) -> str:
    """Hermes leaves short results as they are: a line in place of one would be another text."""
    return f"[read] read a file ({len(text)} chars)" if len(text) > SHORTEST_SUMMARIZED else text


class PruningMachine(RuleBasedStateMachine):
    @initialize(
        context=st.integers(400, 3000), slots=st.integers(1, 2), cap=st.sampled_from([None, 20, 5000])
    )
    def begin(self, context: int, slots: int, cap: int | None) -> None:
        self.room = Room(context, cap)
        self.world = World("all=off", "pruned_results=fix", slots=slots, context=context)
        self.talk: list[Doc] = [SYSTEM]
        self.given: dict[str, str] = {}  # each result as its tool gave it
        self.pruned: dict[str, str] = {}  # what the client sends in its place
        self.restarted = False
        self.asked = 0
        self.asks(1)

    # -- what the client does ------------------------------------------------------------------------------

    @rule(lines=st.integers(1, 4))
    def asks(self, lines: int) -> None:
        self.asked += 1
        self.talk.append({"role": "user", "content": words(("asked", self.asked), 10 * lines)})
        self.send()

    @rule(size=st.integers(5, 120), several=st.booleans())
    def calls(self, size: int, several: bool) -> None:
        self.asked += 1
        names = [f"call_{self.asked}_{n}" for n in range(1 + several)]
        function = {"name": "read", "arguments": "{}"}
        calls = [{"id": name, "type": "function", "function": function} for name in names]
        self.talk.append({"role": "assistant", "content": "", "tool_calls": calls})
        for name in names:
            self.given[name] = words(name, size)
            self.talk.append({"role": "tool", "tool_call_id": name, "content": self.given[name]})
        self.send()

    @precondition(lambda self: self.given)
    @rule(which=st.sets(st.integers(0, 30)), way=st.sampled_from([placeholder, cut, summary]))
    def prunes(self, which: set[int], way: Any) -> None:
        """The client prunes results; its next request shows it."""
        for at, (name, text) in enumerate(self.given.items()):
            if at in which and len(way(text)) < len(text):
                self.pruned.setdefault(name, way(text))

    @precondition(lambda self: self.pruned)
    @rule()
    def restarts(self) -> None:
        """The client restarts, and reads its whole history from a file."""
        self.pruned.clear()
        self.restarted = True

    # -- what the model reads ------------------------------------------------------------------------------

    def send(self) -> None:
        own = {"messages": [self.as_written(message) for message in self.talk], "tools": TOOLS}
        reply = {"role": "assistant", "content": words(("reply", self.asked), 6)}
        untouched = deepcopy(own)
        before = self.world.sent
        self.world.ask(own, deepcopy(reply), **SESSION)
        self.talk.append(reply)
        assert own == untouched
        self.check(own, before)

    def as_written(self, message: Doc) -> Doc:
        name = message.get("tool_call_id")
        return deepcopy(message) | ({"content": self.pruned[name]} if name in self.pruned else {})

    def check(self, own: Doc, before: Doc) -> None:
        sent = self.world.sent
        mine, read, stood = results(own), results(sent), results(before)
        assert without_results(sent) == without_results(own), (
            "only results change, and none changes its place"
        )
        assert list(read) == list(mine)
        for name, text in read.items():
            assert text in {mine[name], stood.get(name)}, (
                "a result is sent as the client sends it, or as it was sent before"
            )
            assert len(text) <= len(self.given[name])
        if read == mine:
            return
        assert len(tokens_of(sent)) <= self.room.limit
        assert not self.changes(sent, before), "the rule would restore nothing more"
        if not self.restarted:
            assert all(read[name] == text for name, text in stood.items()), "all of them, or none"

    def changes(self, doc: Doc, before: Doc) -> list[Any]:
        """Return the changes that the rule would make to it with unlimited context."""
        now, then = (lay_out(Api.CHAT, one) for one in (doc, before))
        assert now is not None
        assert then is not None
        line = Conversation(number=1, who=Who("anna"), received=then, sent=then, at=0.0)
        return [*PrunedResults().changes(Scene(now, line, common(then, now), room=Room(1 << 20)))]


def results(doc: Doc) -> dict[str, str]:
    return {m["tool_call_id"]: m["content"] for m in doc.get("messages", ()) if m["role"] == "tool"}


def without_results(doc: Doc) -> Doc:
    return {
        **doc,
        "messages": [{**m, "content": None} if m["role"] == "tool" else m for m in doc["messages"]],
    }


TestPruning = PruningMachine.TestCase
TestPruning.settings = SETTINGS


def played(context: int) -> PruningMachine:
    """Play an agent of three turns, which masks all results but the latest."""
    agent = PruningMachine()
    agent.begin(context=context, slots=1, cap=None)
    for _ in range(3):
        for _ in range(4):
            agent.calls(100, several=False)
            agent.prunes(set(range(len(agent.given) - 1)), placeholder)
        agent.asks(1)
    return agent


def test_with_enough_context_no_token_is_computed_twice():
    agent = played(20000)
    assert agent.world.fixed == agent.world.asked - 3  # the third request is the first that prunes one
    assert agent.world.work < 1.1 * len(tokens_of(agent.world.sent))


def test_without_enough_context_the_clients_own_text_is_sent():
    agent = played(2500)
    read = results(agent.world.sent)
    first, *_, latest = agent.given
    assert read[first] == agent.pruned[first]
    assert read[latest] == agent.given[latest]
    assert 0 < agent.world.fixed < agent.world.asked - 3

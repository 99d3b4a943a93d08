"""Canonical rules on generated conversations of agents that rewrite their history in every known way.

Whatever an agent does: no message is lost or moved, a second application changes nothing, nothing comes from
another conversation, and the bodies of an agent that rewrites nothing stay untouched. Above all, the part of
the prompt that was sent before stays unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.bodies import Doc, Reply
from properties.rewriting import WAYS, Agent, Request
from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Call, Conversation, Layout, Match, Message, Role, Section, Who
from slotkeeper.conversation.likeness import Conversations
from slotkeeper.conversation.rules.apply import DEFAULTS, RULES, Outcome, canonical
from slotkeeper.conversation.rules.base import Mode, Room, RuleName, parsed

CONVERSATIONS = 5_000
PORTIONS = 5
STEPS = (1, 2, 3, 3, 4)  # requests of one conversation
FIX = dict.fromkeys(RuleName, Mode.FIX)
ROOM = Room(1 << 20)  # for all that the rules add
FAITHFUL: frozenset[str] = frozenset()
_WORD = re.compile(r"Q\d+x\d+")


class Sidecar:
    """What the proxy does with requests, without a network."""

    def __init__(self, modes: Mapping[RuleName, Mode] = FIX) -> None:
        self.book, self.modes, self.now = Conversations(), modes, 0.0

    def apply(self, api: Api, doc: Doc, layout: Layout, match: Match) -> Outcome:
        read = partial(lay_out, api)
        return canonical(doc, layout, match, rules=RULES, modes=self.modes, lay_out=read, room=ROOM)

    def take(self, api: Api, doc: Doc, layout: Layout) -> tuple[Outcome, Layout, Match, Conversation]:
        """Return the request as it is sent, and its layout; its conversation is then the current one."""
        self.now += 1
        who = Who("client")
        match = self.book.find(who, layout)
        outcome = self.apply(api, doc, layout, match)
        sent = laid_out(api, outcome.doc)
        again = self.apply(api, outcome.doc, sent, match)
        assert written(again.doc) == written(outcome.doc), "a second time"
        seen = self.book.saw(
            match,
            who,
            received=layout,
            sent=outcome.layout,
            notes=outcome.notes,
            now=self.now,
        )
        return outcome, sent, match, seen


def laid_out(api: Api, doc: Doc) -> Layout:
    layout = lay_out(api, doc)
    assert layout is not None
    return layout


def written(doc: Any) -> str:
    return json.dumps(doc, ensure_ascii=False)


def words(body: str) -> set[str]:
    """Return the words of agents: in all messages and in the names of tools, but not in ids."""
    return {*_WORD.findall(body)}


def check_nothing_is_lost(request: Request, sent: str, came: Layout, went: Layout) -> None:
    assert [value for value in request.values if json.dumps(value)[1:-1] not in sent] == []
    assert words(written(request.body)) - words(sent) == set()
    assert [*map(calls_of, went.messages)] == [*map(calls_of, came.messages)]


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, parsed(call.arguments)) for call in message.calls]


def check_order(request: Request, came: Layout, went: Layout) -> None:
    assert [(m.path, m.role) for m in went.messages] == [(m.path, m.role) for m in came.messages]
    assert results(went) == results(came)
    assert len({call.id for call in calls(went)}) == len({call.id for call in calls(came)})
    authored = [m.said for m in went.messages if any(text.section is Section.USER for text in m.texts)]
    assert len(authored) == len(request.asked)
    assert all(typed in text for typed, text in zip(request.asked, authored, strict=True))
    newest, was = went.messages[-1], came.messages[-1]
    assert newest.role is not Role.USER or newest.said.startswith(was.said)


def calls(layout: Layout) -> list[Call]:
    return [call for message in layout.messages for call in message.calls]


def results(layout: Layout) -> list[int]:
    """Return for each result the number of the call that it answers: the latest with that id."""
    latest: dict[str, int] = {}
    found: list[int] = []
    numbers = count()
    for message in layout.messages:
        found += [latest[answer.text] for answer in message.answers]
        latest |= {call.id: next(numbers) for call in message.calls}
    return found


def past(layout: Layout, messages: int) -> list[Any]:
    """Return what the engine has of the first messages, without reasoning."""
    return [
        (
            message.role,
            [text.text for text in message.texts],
            [(call.name, call.id, written(call.arguments)) for call in message.calls],
            [answer.text for answer in message.answers],
        )
        for message in layout.messages[:messages]
    ]


def check_the_past_stands(agent: Agent, before: Layout, after: Layout) -> None:
    """Check that everything that was sent before is sent again unchanged, followed by something new."""
    assert written(after.tools[: len(before.tools)]) == written(before.tools)
    now, then = (past(layout, len(before.messages)) for layout in (after, before))
    if not agent.counts:
        assert now == then
    if any(message.reasoning and message.reasoning.text for message in after.messages):
        kept = [was for was in before.messages if was.reasoning and was.reasoning.text]
        thoughts = {message.path: message.reasoning for message in after.messages if message.reasoning}
        assert [was.path for was in kept if thoughts.get(was.path, was.reasoning) != was.reasoning] == []


def check_replies_come_back_as_sampled(agent: Agent, layout: Layout) -> None:
    replies = [item for item in agent.history if isinstance(item, Reply)]
    told = [arguments for reply in replies for _, _, arguments in reply.calls]
    came = [call.arguments for call in calls(layout)]
    for sampled, arguments in zip(told, came, strict=True):
        assert written(arguments) == written(sampled if isinstance(arguments, str) else json.loads(sampled))
    said = [
        text.text for message in layout.messages for text in message.texts if text.section is Section.REPLY
    ]
    assert [text for text in said if text] == [reply.content for reply in replies if reply.content]


def talk(agent: Agent, sidecar: Sidecar) -> Iterator[None]:
    """Play a session through the sidecar; it pauses after each request, so that others come in between."""
    before: Layout | None = None
    grown, tools = False, len(agent.tools)
    for request in agent.requests(agent.chance.choice(STEPS)):
        came, body = laid_out(agent.api, request.body), written(request.body)
        outcome, sent, match, conversation = sidecar.take(agent.api, request.body, came)
        sent_body = written(outcome.doc)
        assert written(request.body) == body
        known = (match.before is None) == (before is None)
        # Nothing shows that a request goes on whose system text and ids of calls are all new.
        assert known or "edits" in agent.ways or {"ids", "context"} <= agent.ways
        check_nothing_is_lost(request, sent_body, came, sent)
        check_order(request, came, sent)
        if not agent.ways:
            assert outcome.doc is request.body
        # An agent with another set of tools is another agent: rules remember nothing of it.
        same_tools, tools = len(request.body["tools"]) == tools, len(request.body["tools"])
        grown = grown or not same_tools
        grown = grown or not known
        if before is not None and same_tools and known and sidecar.modes is FIX and "edits" not in agent.ways:
            check_the_past_stands(agent, before, sent)
            if "ids" not in agent.ways and not grown:
                check_replies_come_back_as_sampled(agent, sent)
        assert all(word.startswith(agent.tag) for word in words(sent_body))
        before = sent
        yield
        sidecar.book.replied(conversation, agent.next_reply.told)


def play(seed: int, ways: frozenset[str] | None = None, modes: Mapping[RuleName, Mode] = FIX) -> None:
    """Play two sessions of one client, alternately."""
    chance = Random(seed)
    sidecar = Sidecar(modes)
    chosen = [some(chance) if ways is None else ways for _ in range(2)]
    talks = [talk(Agent(chance, f"Q{n}x", mine), sidecar) for n, mine in enumerate(chosen)]
    while talks:
        going = chance.choice(talks)
        if next(going, "over") == "over":
            talks.remove(going)


def some(chance: Random) -> frozenset[str]:
    return frozenset(way for way in WAYS if chance.random() < 0.5)


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_message_is_lost_or_changed_twice_for_agents_that_rewrite_their_history(portion):
    for seed in range(portion, CONVERSATIONS // 2, PORTIONS):
        play(seed)


@pytest.mark.parametrize("way", WAYS)
def test_no_message_is_lost_or_changed_twice_for_each_kind_of_rewrite_alone(way):
    for seed in range(30):
        play(seed, frozenset({way}))


@given(st.integers(0, 2**32), st.frozensets(st.sampled_from(WAYS)))
@settings(max_examples=100)
def test_no_message_is_lost_or_changed_twice_for_random_kinds_of_rewrites(seed, ways):
    play(seed, ways)


def test_requests_of_agents_that_rewrite_nothing_stay_unchanged():
    for seed in range(200):
        play(seed, FAITHFUL)


def test_no_message_is_lost_or_changed_twice_with_the_default_rules():
    for seed in range(200):
        play(seed, modes=DEFAULTS)

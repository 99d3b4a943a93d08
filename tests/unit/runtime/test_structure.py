"""Which renders are needed to find the boundaries of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slotkeeper.engine.answers import EngineError, EngineGoneError
from slotkeeper.runtime.render import boundaries_of
from slotkeeper.scheduler.prompts.tokens import UNKNOWN, Boundary, BoundaryKind, Markers, Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory
from unit.runtime.stubs import TRAITS, StubLink, asked

OPENER = "<U>"
TAIL = "<A>"
KNOWN = Markers(user=(Tokens(map(ord, OPENER)),), reply=(Tokens(map(ord, TAIL)),))
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief " * 100},
    {"role": "developer", "content": "and kind"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "reply"},
    {"role": "user", "content": [{"type": "text", "text": "second"}]},
    {"role": "assistant", "content": "calls"},
    {"role": "tool", "content": "result"},
]


class Templating(StubLink):
    """A template whose family is known by its markers only."""

    def __init__(self, markers: Markers, traits: EngineTraits = TRAITS) -> None:
        super().__init__(traits=replace(traits, markers=markers))

    async def render_chat(self, chat, auth) -> Tokens:
        await super().render_chat(chat, auth)
        return rendered_tokens(chat["messages"])


def rendered_tokens(messages) -> Tokens:
    openers = {"user": OPENER, "assistant": TAIL}
    parts = [openers.get(message["role"], "<S>") + str(message["content"]) for message in messages]
    return Tokens(map(ord, "".join(parts) + TAIL))


def position_of(text: str) -> int:
    return rendered_tokens(TALK).find_all(Tokens(map(ord, text)))[0]


async def found(link, messages=TALK):
    request = asked(chat={"messages": messages, "seed": 1})
    return await boundaries_of(link, request, rendered_tokens(messages), {"X-Api-Key": "k"})


async def test_with_known_markers_no_render_is_needed():
    link = Templating(KNOWN)
    result = await found(link)
    assert [b.kind for b in result] == [BoundaryKind.HEAD, BoundaryKind.USER, BoundaryKind.TURN]
    assert result[0].at == position_of("<U>first")
    assert link.rendered == []


async def test_the_end_of_a_system_text_inside_a_message_is_found_by_one_short_render():
    link = Templating(replace(KNOWN, lead_inside=True))
    head, user, turn = await found(link)
    assert head == Boundary(position_of("first"), BoundaryKind.HEAD)
    assert user == Boundary(position_of("<U>[{"), BoundaryKind.USER)
    assert turn == Boundary(len(rendered_tokens(TALK)) - len(TAIL), BoundaryKind.TURN)
    ((chat, auth),) = link.rendered
    assert chat["messages"][:-1] == TALK[:2]
    assert (chat["seed"], auth) == (1, {"X-Api-Key": "k"})


async def test_without_markers_two_renders_find_the_head_and_the_last_question():
    link = Templating(UNKNOWN)
    assert await found(link) == (
        Boundary(position_of("first"), BoundaryKind.HEAD),
        Boundary(position_of("[{"), BoundaryKind.USER),
    )
    assert [len(chat["messages"]) for chat, _ in link.rendered] == [3, 5]


async def test_a_chat_with_one_question_needs_one_render():
    link = Templating(UNKNOWN)
    assert await found(link, TALK[:3]) == (Boundary(position_of("first"), BoundaryKind.HEAD),)
    assert len(link.rendered) == 1


async def test_a_short_prompt_is_not_rendered():
    link = Templating(UNKNOWN)
    assert await found(link, TALK[1:]) == ()
    assert link.rendered == []


@pytest.mark.parametrize("error", [EngineError(500, "roles"), EngineGoneError("gone")])
async def test_boundaries_that_cannot_be_rendered_are_left_out(error, monkeypatch):
    async def refuse(*_):
        raise error

    link = Templating(replace(KNOWN, lead_inside=True))
    monkeypatch.setattr(link, "render_chat", refuse)
    assert [b.kind for b in await found(link)] == [BoundaryKind.USER, BoundaryKind.USER, BoundaryKind.TURN]
    link.traits = replace(TRAITS, markers=UNKNOWN)
    assert await found(link) == ()


async def test_a_raw_prompt_is_searched_for_markers_and_never_rendered():
    for markers, kinds in ((KNOWN, [BoundaryKind.HEAD, BoundaryKind.USER, BoundaryKind.TURN]), (UNKNOWN, [])):
        link = Templating(markers)
        result = await boundaries_of(link, asked(prompt="x"), rendered_tokens(TALK), {})
        assert [b.kind for b in result] == kinds
        assert link.rendered == []


async def test_an_engine_that_was_never_probed_gives_no_boundaries():
    link = Templating(KNOWN)
    link.traits = None
    assert await boundaries_of(link, asked(prompt="x"), rendered_tokens(TALK), {}) == ()


DOCUMENT = "A line of it.\n" * 100
ASKED: list[dict[str, Any]] = [TALK[0], {"role": "user", "content": f"{DOCUMENT}\nWhat is it?"}]
HYBRID = replace(TRAITS, memory=Memory.HYBRID)


async def kinds_of(link, messages=ASKED):
    return [b.kind for b in await found(link, messages)]


async def test_a_long_last_message_has_boundaries_before_its_question_if_checkpoints_last():
    link = Templating(KNOWN, HYBRID)
    result = await found(link, ASKED)
    assert [b.kind for b in result] == [
        BoundaryKind.HEAD,
        BoundaryKind.LINE,
        BoundaryKind.QUESTION,
        BoundaryKind.TURN,
    ]
    assert result[2].at == len(rendered_tokens(ASKED)) - len("What is it?" + TAIL)
    for memory in (Memory.DENSE, Memory.HYBRID):
        link.traits = replace(HYBRID, memory=memory, markers=KNOWN, eager_thinning=memory is Memory.HYBRID)
        assert await kinds_of(link) == [BoundaryKind.HEAD, BoundaryKind.TURN]


async def test_text_parts_are_one_text_and_each_part_begins_a_line():
    """This template writes parts as Python does, with escaped line feeds."""
    link = Templating(KNOWN, HYBRID)
    parts = [{"type": "text", "text": DOCUMENT * 2}, {"type": "text", "text": "What is it?"}]
    messages = [TALK[0], {"role": "user", "content": parts}]
    result = await found(link, messages)
    assert [b.kind for b in result] == [BoundaryKind.HEAD, BoundaryKind.QUESTION, BoundaryKind.TURN]
    assert result[1].at == rendered_tokens(messages).find_all(Tokens(map(ord, "What is it?")))[0]


async def test_a_last_message_of_an_assistant_or_tool_has_no_line_boundaries():
    link = Templating(KNOWN, HYBRID)
    tool = {"role": "tool", "content": ASKED[1]["content"]}
    for messages in ([*ASKED, {"role": "assistant", "content": "It is."}], [*TALK[:4], tool]):
        assert not {BoundaryKind.LINE, BoundaryKind.QUESTION} & set(await kinds_of(link, messages))


async def test_lines_that_cannot_be_tokenized_are_left_out(monkeypatch):
    async def refuse(*_):
        raise EngineGoneError("gone")

    link = Templating(KNOWN, HYBRID)
    monkeypatch.setattr(link, "render_text", refuse)
    assert await kinds_of(link) == [BoundaryKind.HEAD, BoundaryKind.TURN]

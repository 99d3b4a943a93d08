"""The family of a template, and how its markers are learned and checked, on templates in Python."""

from __future__ import annotations

import pytest

from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.markers import (
    FAMILIES,
    Family,
    agrees,
    family_in,
    family_of,
    learn_markers,
    user_openers,
)
from slotkeeper.scheduler.tokens import UNKNOWN, Boundary, BoundaryKind, Markers, Tokens

PLAIN = Family("<U>", "<A>", ("<T>",))


class Templating(EngineClient):
    """An engine with a token for every letter and a template that is a function."""

    def __init__(self, template):
        self.template = template

    async def apply_template(self, chat, *, headers=None):
        return self.template(chat["messages"], chat.get("tools"), chat.get("add_generation_prompt", True))

    async def tokenize(self, content, *, add_special, parse_special, headers=None):
        assert parse_special
        return [1] * add_special + [ord(letter) for letter in content]


def ids(*texts):
    return tuple(Tokens(map(ord, text)) for text in texts)


def refuse(*_):
    raise EngineError(500, "roles must alternate")


def said(messages, openers):
    return "".join(openers[message["role"]] + message["content"] for message in messages)


OPENERS = {"system": "<S>", "user": "<U>", "assistant": "<A>", "tool": "<T>"}


def plain(messages, tools, generate):
    lead = "".join(tool["function"]["description"] for tool in tools or [])
    return lead + said(messages, OPENERS) + "<A>" * generate


# -- families ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.user)
def test_every_family_is_known_by_what_stands_before_both_messages(family):
    opener = family.user
    chat = f"<s>{opener}\nslotkeeper-first</s>A: slotkeeper-reply</s>{opener}\nslotkeeper-second</s>"
    assert family_in(chat) is family
    assert family_in(chat.replace(opener, "Human:")) is None
    assert family_in(chat.replace(f"{opener}\nslotkeeper-second", "slotkeeper-second")) is None
    assert family_in(chat.replace("slotkeeper-reply", "")) is None


async def test_a_template_that_refuses_a_chat_is_known_by_its_own_text():
    engine = Templating(refuse)
    gemma = await family_of(engine, "{{ '<start_of_turn>user' }}")
    assert gemma.reply == "<start_of_turn>model"
    assert await family_of(engine, "Human:") is None


async def test_the_engines_own_openers_are_those_of_the_family():
    engine = Templating(plain)
    assert await user_openers(engine, PLAIN) == ((60, 85, 62),)
    assert await user_openers(engine, None) == ()


# -- markers -------------------------------------------------------------------------------------------


async def test_markers_that_find_every_message_are_believed():
    markers = await learn_markers(Templating(plain), PLAIN)
    assert markers == Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"))


async def test_a_template_that_refuses_tools_or_system_text_is_learned_without():
    def strict(messages, tools, generate):
        return refuse() if tools or messages[0]["role"] == "system" else plain(messages, tools, generate)

    assert await learn_markers(Templating(strict), PLAIN) == Markers(user=ids("<U>"), reply=ids("<A>"))


async def test_a_template_that_drops_results_is_learned_without_tools():
    def deaf(messages, tools, generate):
        return plain([m for m in messages if m["role"] != "tool"], tools, generate)

    assert (await learn_markers(Templating(deaf), PLAIN)).tool == ()


@pytest.mark.parametrize("inside", ["system", "tools"])
async def test_a_lead_behind_the_first_opener_is_noticed(inside):
    def gemma(messages, tools, generate):
        system, *rest = messages if messages[0]["role"] == "system" else [{"content": ""}, *messages]
        described = "".join(tool["function"]["description"] for tool in tools or [])
        before, behind = (
            (described, system["content"]) if inside == "system" else (system["content"], described)
        )
        first = {**rest[0], "content": behind + "\n" + rest[0]["content"]}
        return before + said([first, *rest[1:]], OPENERS) + "<A>" * generate

    markers = await learn_markers(Templating(gemma), PLAIN)
    assert markers == Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"), lead_inside=True)


async def test_markers_that_find_too_much_are_not_believed():
    """The opener is twice in front of each message: then only the generation prompt is learned."""

    def doubled(messages, tools, generate):
        return said(messages, {**OPENERS, "user": "<U><U>"}) + "<A>" * generate

    assert await learn_markers(Templating(doubled), PLAIN) == Markers(reply=ids("<A>"))


async def test_without_a_family_the_generation_prompt_is_learned_if_there_is_one():
    assert await learn_markers(Templating(plain), None) == Markers(reply=ids("<A>"))
    silent = Templating(lambda messages, tools, _: plain(messages, tools, generate=False))
    assert await learn_markers(silent, None) == UNKNOWN
    assert await learn_markers(Templating(refuse), PLAIN) == UNKNOWN


async def test_a_template_that_writes_its_history_anew_is_not_trusted():
    def anew(messages, tools, generate):
        return "!" * (not generate) + plain(messages, tools, generate)

    assert await learn_markers(Templating(anew), PLAIN) == UNKNOWN


async def test_an_end_of_text_in_place_of_the_generation_prompt_does_no_harm():
    def phi(messages, tools, generate):
        return said(messages, OPENERS) + ("<A>" if generate else "[end]")

    markers = await learn_markers(Templating(phi), PLAIN)
    assert markers == Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"))


@pytest.mark.parametrize(
    ("usual", "expected"),
    [
        ("<A>", Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"))),
        ("<B>", Markers(reply=ids("<B>"))),  # which no message in the history has: not of that family
    ],
)
async def test_a_reply_that_goes_on_behind_a_result_needs_no_opener_there_and_only_there(usual, expected):
    def gemma(messages, tools, generate):
        last = "(thought)" if messages[-1]["role"] == "tool" else usual
        return plain(messages, tools, generate=False) + last * generate

    assert await learn_markers(Templating(gemma), PLAIN) == expected


async def test_of_several_openers_of_a_result_the_nearest_counts():
    """Phi has a place for tools in its system message, with a name that others give to results."""
    family = Family("<U>", "<A>", ("<T>", "<R>"))

    def phi(messages, tools, generate):
        lead = "".join("<T>" + tool["function"]["description"] for tool in tools or [])
        return lead + said(messages, {**OPENERS, "tool": "<R>"}) + "<A>" * generate

    markers = await learn_markers(Templating(phi), family)
    assert markers == Markers(user=ids("<U>"), tool=ids("<R>"), reply=ids("<A>"))


def test_an_opener_belongs_before_its_own_text_and_behind_the_text_before():
    turn = Boundary(40, BoundaryKind.TURN)
    places = [
        Boundary(12, BoundaryKind.HEAD),
        Boundary(22, BoundaryKind.USER),
        Boundary(32, BoundaryKind.TOOL),
    ]
    asks = [Boundary(10, BoundaryKind.HEAD), Boundary(20, BoundaryKind.USER), Boundary(30, BoundaryKind.TOOL)]
    assert agrees([*asks, turn], places)
    assert agrees([*places, turn], places)  # nothing stands between the opener and the text
    assert not agrees(asks, places)
    assert not agrees([*asks[:2], turn], places)
    assert not agrees([*asks[:2], Boundary(30, BoundaryKind.USER), turn], places)
    assert not agrees([asks[0], Boundary(23, BoundaryKind.USER), asks[2], turn], places)
    assert not agrees([asks[0], Boundary(12, BoundaryKind.USER), asks[2], turn], places)
    assert not agrees([*asks, Boundary(32, BoundaryKind.TURN)], places)
    assert not agrees([], places)

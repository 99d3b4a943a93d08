"""The family of a template, and how its markers are learned and checked, on templates in Python."""

from __future__ import annotations

import pytest

from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.traits import (
    FAMILIES,
    Family,
    agrees,
    family_in,
    family_of,
    learn_markers,
    user_openers,
)
from slotkeeper.scheduler.prompts.tokens import UNKNOWN, Boundary, BoundaryKind, Markers, Tokens

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


def joined(messages, openers):
    return "".join(openers[message["role"]] + message["content"] for message in messages)


OPENERS = {"system": "<S>", "user": "<U>", "assistant": "<A>", "tool": "<T>"}


def plain(messages, tools, generate):
    lead = "".join(tool["function"]["description"] for tool in tools or [])
    return lead + joined(messages, OPENERS) + "<A>" * generate


# -- families ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.user)
def test_a_family_is_recognised_by_its_opener_before_both_user_messages(family):
    opener = family.user
    chat = f"<s>{opener}\nslotkeeper-first</s>A: slotkeeper-reply</s>{opener}\nslotkeeper-second</s>"
    assert family_in(chat) is family
    assert family_in(chat.replace(opener, "Human:")) is None
    assert family_in(chat.replace(f"{opener}\nslotkeeper-second", "slotkeeper-second")) is None
    assert family_in(chat.replace("slotkeeper-reply", "")) is None


async def test_a_template_that_refuses_the_chat_is_recognised_by_its_own_text():
    engine = Templating(refuse)
    gemma = await family_of(engine, "{{ '<start_of_turn>user' }}")
    assert gemma.reply == "<start_of_turn>model"
    assert await family_of(engine, "Human:") is None


async def test_the_user_openers_are_the_token_ids_of_the_family_opener():
    engine = Templating(plain)
    assert await user_openers(engine, PLAIN) == ((60, 85, 62),)
    assert await user_openers(engine, None) == ()


# -- markers -------------------------------------------------------------------------------------------


async def test_markers_are_learned_although_the_template_refuses_tools_and_system_text():
    def strict(messages, tools, generate):
        return refuse() if tools or messages[0]["role"] == "system" else plain(messages, tools, generate)

    assert await learn_markers(Templating(strict), PLAIN) == Markers(user=ids("<U>"), reply=ids("<A>"))


async def test_markers_are_learned_without_tools_if_the_template_drops_results():
    def drops_results(messages, tools, generate):
        return plain([m for m in messages if m["role"] != "tool"], tools, generate)

    assert (await learn_markers(Templating(drops_results), PLAIN)).tool == ()


@pytest.mark.parametrize("inside", ["system", "tools"])
async def test_a_system_text_or_tool_list_behind_the_first_opener_is_detected(inside):
    def gemma(messages, tools, generate):
        system, *rest = messages if messages[0]["role"] == "system" else [{"content": ""}, *messages]
        described = "".join(tool["function"]["description"] for tool in tools or [])
        before, behind = (
            (described, system["content"]) if inside == "system" else (system["content"], described)
        )
        first = {**rest[0], "content": behind + "\n" + rest[0]["content"]}
        return before + joined([first, *rest[1:]], OPENERS) + "<A>" * generate

    markers = await learn_markers(Templating(gemma), PLAIN)
    assert markers == Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"), lead_inside=True)


async def test_markers_that_find_too_many_places_are_rejected():
    """The opener is twice in front of each message: then only the generation prompt is learned."""

    def doubled(messages, tools, generate):
        return joined(messages, {**OPENERS, "user": "<U><U>"}) + "<A>" * generate

    assert await learn_markers(Templating(doubled), PLAIN) == Markers(reply=ids("<A>"))


async def test_without_a_family_only_the_generation_prompt_is_learned():
    assert await learn_markers(Templating(plain), None) == Markers(reply=ids("<A>"))
    silent = Templating(lambda messages, tools, _: plain(messages, tools, generate=False))
    assert await learn_markers(silent, None) == UNKNOWN
    assert await learn_markers(Templating(refuse), PLAIN) == UNKNOWN


async def test_a_template_that_rewrites_its_history_is_not_trusted():
    def rewrites(messages, tools, generate):
        return "!" * (not generate) + plain(messages, tools, generate)

    assert await learn_markers(Templating(rewrites), PLAIN) == UNKNOWN


async def test_an_end_of_text_in_place_of_the_generation_prompt_is_ignored():
    def phi(messages, tools, generate):
        return joined(messages, OPENERS) + ("<A>" if generate else "[end]")

    markers = await learn_markers(Templating(phi), PLAIN)
    assert markers == Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"))


@pytest.mark.parametrize(
    ("generation_prompt", "expected"),
    [
        ("<A>", Markers(user=ids("<U>"), tool=ids("<T>"), reply=ids("<A>"))),
        ("<B>", Markers(reply=ids("<B>"))),  # no message in the history has this opener: another family
    ],
)
async def test_a_reply_behind_a_result_may_lack_its_opener_only_there(generation_prompt, expected):
    def gemma(messages, tools, generate):
        last = "(thought)" if messages[-1]["role"] == "tool" else generation_prompt
        return plain(messages, tools, generate=False) + last * generate

    assert await learn_markers(Templating(gemma), PLAIN) == expected


async def test_the_nearest_of_several_result_openers_counts():
    """Phi marks tools in its system message with a token that other templates use for results."""
    family = Family("<U>", "<A>", ("<T>", "<R>"))

    def phi(messages, tools, generate):
        lead = "".join("<T>" + tool["function"]["description"] for tool in tools or [])
        return lead + joined(messages, {**OPENERS, "tool": "<R>"}) + "<A>" * generate

    markers = await learn_markers(Templating(phi), family)
    assert markers == Markers(user=ids("<U>"), tool=ids("<R>"), reply=ids("<A>"))


def test_openers_agree_only_if_each_is_between_its_text_and_the_text_before():
    turn = Boundary(40, BoundaryKind.TURN)
    places = [
        Boundary(12, BoundaryKind.HEAD),
        Boundary(22, BoundaryKind.USER),
        Boundary(32, BoundaryKind.TOOL),
    ]
    asks = [Boundary(10, BoundaryKind.HEAD), Boundary(20, BoundaryKind.USER), Boundary(30, BoundaryKind.TOOL)]
    assert agrees([*asks, turn], places)
    assert agrees([*places, turn], places)  # there is nothing between the opener and the text
    assert not agrees(asks, places)
    assert not agrees([*asks[:2], turn], places)
    assert not agrees([*asks[:2], Boundary(30, BoundaryKind.USER), turn], places)
    assert not agrees([asks[0], Boundary(23, BoundaryKind.USER), asks[2], turn], places)
    assert not agrees([asks[0], Boundary(12, BoundaryKind.USER), asks[2], turn], places)
    assert not agrees([*asks, Boundary(32, BoundaryKind.TURN)], places)
    assert not agrees([], places)

"""Boundaries on real engines, in the templates of every family, compared with renderings by brute force.

A message begins at its opener, and its text is found by rendering the chat with another one in its place.
The templates are ours, in the shape of each family's own. The tiny vocabulary spells their markers as text,
which is harder than a token for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import parse
from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineAddress
from slotkeeper.engine.traits import read_traits
from slotkeeper.runtime.link import EngineLink
from slotkeeper.runtime.render import TurnRenderer, boundaries_of, prompt_of
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.slots.engine_model import Memory
from slotkeeper.scheduler.types import EngineId

TEMPLATES = Path(__file__).parent / "templates"
FILLER = " ".join(f"Rule {n} is to be kept." for n in range(150))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Look outside.", "parameters": SCHEMA},
}
ARGUMENTS = '{"city":"Rome"}'
SYSTEM = {"role": "system", "content": FILLER}
FIRST = {"role": "user", "content": "Hello there, who are you?"}
GREETING = {"role": "assistant", "content": "A model, as you see."}
SECOND = {"role": "user", "content": "Weather in Rome, please."}
CALL = {"id": "c12345678", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c12345678", "content": "Fine and warm."}
ANSWER = {"role": "assistant", "content": "It is fine and warm."}
THIRD = {"role": "user", "content": "Tell me more of it."}
TALK: list[dict[str, Any]] = [SYSTEM, FIRST, GREETING, SECOND]
LOOP = [*TALK, CALLS, RESULT]
WHOLE = [*LOOP, ANSWER, THIRD]


@dataclass(frozen=True)
class Family:
    """A template, and the beginnings of messages in it; "" = no markers: texts count."""

    user: str
    tool: str = ""
    chats: tuple = (TALK, LOOP, WHOLE)
    tools: bool = True
    inside: bool = False  # the first message's text shows where the head ends


FAMILIES = {
    "chatml": Family("<|im_start|>user", "<|im_start|>user\n<tool_response>"),
    "gemma": Family("<start_of_turn>user", chats=(TALK,), tools=False, inside=True),
    "llama3": Family(
        "<|start_header_id|>user<|end_header_id|>", "<|start_header_id|>ipython<|end_header_id|>", inside=True
    ),
    "mistral": Family("[INST]", "[TOOL_RESULTS]"),
    "mistral-old": Family("[INST]", "[TOOL_RESULTS]", inside=True),
    "harmony": Family("<|start|>user<|message|>", "<|start|>functions."),
    "unknown": Family(""),
}


class ProbedEngine:
    """An engine behind a link that has probed it."""

    def __init__(self, base: str) -> None:
        self.link = EngineLink(EngineId(base), address=EngineAddress.of(EngineId(base)), api_key=None)

    async def __aenter__(self):
        await self.link._look(lambda _: None, lambda _: None)
        assert self.link.ready
        return self

    async def __aexit__(self, *_):
        await self.link.client.close()

    async def asked(self, api, body) -> tuple[Tokens, tuple[Boundary, ...]]:
        ask = parse(api, orjson.dumps(body))
        prompt = await prompt_of(self.link, ask, {})
        return prompt, await boundaries_of(self.link, ask, prompt, {})

    async def ids(self, text: str) -> Tokens:
        return Tokens(await self.link.tokenize(text, add_special=True, parse_special=True))

    async def text(self, chat) -> str:
        return await self.link.client.apply_template(chat)


async def by_brute_force(engine: ProbedEngine, chat, family: Family) -> list[Boundary]:
    """Render every message with another text; find the reply by rendering without a generation prompt."""
    whole = await engine.text(chat)
    prompt = await engine.ids(whole)
    places: list[Boundary] = []
    for index, message in enumerate(chat["messages"]):
        if message["role"] not in {"user", "tool"}:
            continue
        other = [*chat["messages"]]
        other[index] = {**message, "content": "~ nothing of the kind"}
        changed = await engine.text({**chat, "messages": other})
        text = next(n for n, (a, b) in enumerate(zip(whole, changed, strict=False)) if a != b)
        opener = family.user if message["role"] == "user" else family.tool
        kind = BoundaryKind(message["role"]) if places else BoundaryKind.HEAD
        # another conversation, which shares no more than this
        if kind is BoundaryKind.HEAD and family.inside:
            changed = await engine.text({**chat, "messages": other[: index + 1]})
            places.append(Boundary(prompt.lcp(await engine.ids(changed)), kind))
        elif opener:
            places.append(Boundary(len(await engine.ids(whole[: whole.rindex(opener, 0, text)])), kind))
        else:
            places.append(Boundary(prompt.lcp(await engine.ids(changed)), kind))
    if not family.user:  # only the head and the last question are looked for
        places = [places[0], *[place for place in places[1:] if place.kind is BoundaryKind.USER][-1:]]
    asked = await engine.ids(await engine.text({**chat, "add_generation_prompt": False}))
    return [*places, Boundary(len(asked), BoundaryKind.TURN)]


@pytest.mark.parametrize("name", FAMILIES)
async def test_boundaries_equal_those_found_by_rendering_changed_chats(engine_factory, build, name):
    family = FAMILIES[name]
    args = ["-c", "8192", "-np", "1"]
    if name != "chatml":  # the tiny model's own
        args += ["--chat-template-file", str(TEMPLATES / f"{name}.jinja")]
    started = engine_factory("tiny-dense", build, args=args)
    async with ProbedEngine(started.base) as engine:
        markers = engine.link.traits.markers
        assert bool(markers.user) is bool(family.user)
        assert bool(markers.tool) is bool(family.tool)
        assert markers.lead_inside is family.inside
        for messages in family.chats:
            chat = {"messages": messages, **({"tools": [TOOL]} if family.tools else {})}
            prompt, found = await engine.asked(Api.CHAT, chat)
            assert list(found) == await by_brute_force(engine, chat, family)
            assert len(prompt) > 512
            _, raw = await engine.asked(Api.COMPLETION, {"prompt": prompt.ids()})
            if family.user:
                assert raw[1:] == found[1:], "the ids alone say the same, but for a lead inside a message"


async def test_ambiguous_markers_are_not_used_and_boundaries_are_rendered(engine_factory, build, tmp_path):
    """The opener of a known family, but twice before each message."""
    template = tmp_path / "doubled.jinja"
    doubled = (TEMPLATES / "unknown.jinja").read_text().replace("HUMAN", "<|im_start|>user<|im_start|>user")
    template.write_text(doubled)
    started = engine_factory(
        "tiny-dense", build, args=["-c", "8192", "-np", "1", "--chat-template-file", str(template)]
    )
    async with ProbedEngine(started.base) as engine:
        assert engine.link.traits.user_start, "the engine itself looks for it all the same"
        assert not engine.link.traits.markers.user
        notes = (await read_traits(engine.link.client)).notes
        assert any("did not stand a check" in note for note in notes)
        _, found = await engine.asked(Api.CHAT, {"messages": WHOLE})
        assert list(found) == await by_brute_force(engine, {"messages": WHOLE}, FAMILIES["unknown"])


ANTHROPIC = {
    "system": [{"type": "text", "text": FILLER}],
    "messages": [
        FIRST,
        GREETING,
        {"role": "user", "content": [{"type": "text", "text": SECOND["content"]}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": CALL["id"], "name": "weather", "input": {"city": "Rome"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": CALL["id"], "content": RESULT["content"]}],
        },
        ANSWER,
        THIRD,
    ],
}


def spoken(message):
    return {"type": "message", "role": message["role"], "content": message["content"]}


RESPONSES = {
    "instructions": FILLER,
    "input": [
        spoken(FIRST),
        spoken(GREETING),
        spoken(SECOND),
        {"type": "function_call", "call_id": CALL["id"], "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": CALL["id"], "output": RESULT["content"]},
        spoken(ANSWER),
        spoken(THIRD),
    ],
}


@pytest.mark.parametrize("engine", ["tiny-dense"], indirect=True)
async def test_a_conversation_has_the_same_boundaries_in_every_api(engine):
    kinds = [BoundaryKind.HEAD, BoundaryKind.USER, BoundaryKind.TOOL, BoundaryKind.USER, BoundaryKind.TURN]
    async with ProbedEngine(engine.base) as told:
        prompt, found = await told.asked(Api.CHAT, {"messages": WHOLE})
        assert [boundary.kind for boundary in found] == kinds
        rendered = await told.text({"messages": WHOLE})
        for api, body in (
            (Api.MESSAGES, ANTHROPIC),
            (Api.RESPONSES, RESPONSES),
            (Api.COMPLETION, {"prompt": rendered}),
            (Api.COMPLETIONS, {"prompt": prompt.ids()}),
        ):
            assert await told.asked(api, body) == (prompt, found), api


@pytest.mark.parametrize("engine", ["tiny-dense"], indirect=True)
@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"plain": True}},
        {"tools": [TOOL], "tool_choice": "auto"},
    ],
    ids=["no thinking", "plain", "tools"],
)
async def test_the_end_of_the_turn_is_found_with_any_generation_prompt(engine, more):
    async with ProbedEngine(engine.base) as told:
        chat = {"messages": LOOP, **more}
        _, found = await told.asked(Api.CHAT, chat)
        assert list(found) == await by_brute_force(told, chat, FAMILIES["chatml"])


@pytest.mark.parametrize("engine", ["tiny-dense"], indirect=True)
async def test_a_text_without_messages_has_no_boundaries(engine):
    async with ProbedEngine(engine.base) as told:
        _, found = await told.asked(Api.COMPLETION, {"prompt": FILLER})
        assert found == ()


QUESTION = "What does this say of Rome?"
DOCUMENTS = {
    "ascii": (FILLER + "\n") * 2 + "\n",
    "multi-byte": ("Größe und 語言 🦙🦙 и дальше.\n" * 60) + "\n",
    "crlf": (FILLER + "\r\n") * 2 + "\r\n",
    "indented": ("def f():\n    return 1  # a\n\n" * 120) + "    ",
}


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "mistral", "unknown"])
async def test_a_long_message_has_boundaries_where_its_last_lines_begin(engine_factory, build, name):
    args = ["-c", "8192", "-np", "1"]
    if name != "chatml":
        args += ["--chat-template-file", str(TEMPLATES / f"{name}.jinja")]
    started = engine_factory("tiny-dense", build, args=args)
    async with ProbedEngine(started.base) as engine:
        engine.link.traits = replace(engine.link.traits, memory=Memory.HYBRID, eager_thinning=False)
        for kind, document in DOCUMENTS.items():
            chat = {"messages": [{"role": "user", "content": document + QUESTION + "\n"}]}
            prompt, found = await engine.asked(Api.CHAT, chat)
            whole = await engine.text(chat)
            line = document[document.rindex("\n") + 1 :] + QUESTION  # it begins with its blanks
            before = await engine.ids(whole[: whole.rindex(line)])
            assert Boundary(len(before), BoundaryKind.QUESTION) in found, kind
            assert prompt.begins_with(before), kind
            assert any(b.kind is BoundaryKind.LINE for b in found), kind
            assert list(found) == sorted(found)


# -- chats of which only the end is rendered -------------------------------------------------------------

THOUGHT = {**ANSWER, "reasoning_content": "It was fine, so it is."}
NEW_CALL = {"id": "d12345678", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
NEW_CALLS = {**CALLS, "tool_calls": [NEW_CALL], "reasoning_content": "I had better look again."}
NEW_RESULT = {**RESULT, "tool_call_id": "d12345678", "content": "Rain\n\n7"}
OLD_TALK = [SYSTEM, *[FIRST, GREETING] * 6]
LONG_CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [*OLD_TALK, SECOND],
    "result": [*OLD_TALK, SECOND, {**CALLS, "reasoning_content": "Let me look."}, RESULT],
    "loop": [*OLD_TALK, SECOND, *[CALLS, RESULT] * 4],
    "one task": [SYSTEM, SECOND, *[CALLS, RESULT] * 8],
    "later": [*OLD_TALK, SECOND, CALLS, RESULT, ANSWER, THIRD],
}
FOLLOWING: dict[str, list[dict[str, Any]]] = {
    "user": [ANSWER, THIRD],
    "thought, user": [THOUGHT, THIRD],
    "thought, result": [THOUGHT, {**RESULT, "tool_call_id": "x"}],
    "call": [NEW_CALLS, NEW_RESULT],
    "call, user": [NEW_CALLS, NEW_RESULT, THIRD],
}


def is_result(message) -> bool:
    return message["role"] == "tool"


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_chat_rendered_by_its_end_is_the_whole_chat(engine_factory, build, name):
    """Whatever the template does with reasoning, tools and the order of messages."""
    family, args = FAMILIES[name], ["-c", "8192", "-np", "1"]
    asked, parts = list[int](), 0
    both = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "b"}}]
    tools = {"tools": both} if family.tools else {}
    if name != "chatml":
        args += ["--chat-template-file", str(TEMPLATES / f"{name}.jinja")]
    started = engine_factory("tiny-dense", build, args=args)
    async with ProbedEngine(started.base) as engine:
        link, render_text = engine.link, engine.link.chat_text
        assert not link.dated

        async def spied(chat, auth):
            asked.append(len(orjson.dumps(chat)))
            return await render_text(chat, auth)

        link.chat_text = spied
        for messages, added in product(LONG_CHATS.values(), FOLLOWING.values()):
            chat, longer = ({"messages": said, **tools} for said in (messages, [*messages, *added]))
            kind = (added[-1]["role"] == "user", bool(added[0].get("tool_calls")))
            link.renders_parts = {kind: True}
            render = TurnRenderer(link)
            try:
                await render.prompt(chat, {})
                whole = await link.render_chat(longer, {})
            except EngineError:  # this family has no such chats
                continue
            asked.clear()
            found, after = await render(longer, {}), TurnRenderer(link, render)
            part = max(asked) < len(orjson.dumps(longer))
            parts += part
            if is_result(added[-1]) and not added[0].get("tool_calls"):  # no client sends that
                text = await engine.text(longer)
                end = len(await engine.ids(text[: text.rindex(ANSWER["content"]) + len(ANSWER["content"])]))
                assert found.lcp(whole) >= end - 1
                continue
            assert found == whole
            assert await after.prompt(longer, {}) == whole
            assert after.pieced is part
    assert parts >= (2 if family.inside else 20)

"""The markers of an engine's chat template: known by family, or learned from samples.

The engine renders a sample chat, because a template's text may build markers from parts. The token ids of a
family's openers depend on the vocabulary and on the text after them, so they are read from the rendered text.
Markers count only if they find the start of every message. A second rendering, with another text in that
message, shows where the message starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient, Headers
from slotkeeper.scheduler.prompts.tokens import UNKNOWN, Boundary, BoundaryKind, Markers, Tokens, boundaries


@dataclass(frozen=True, slots=True)
class Family:
    """The texts that open messages in one family of chat templates."""

    user: str  # the engine splits its batches there and makes checkpoints
    reply: str  # "" if replies follow the user's message without an opener
    tools: tuple[str, ...] = ()  # openers of a tool's result: versions of the family differ


# If one user opener contains another, the longer one comes first.
FAMILIES: Final = (
    # ChatML: Qwen (results stand in a user message), Hermes, many others
    Family(
        "<|im_start|>user", "<|im_start|>assistant", ("<|im_start|>user\n<tool_response>", "<|im_start|>tool")
    ),
    Family("<start_of_turn>user", "<start_of_turn>model"),  # Gemma to 3
    Family("<|turn>user", "<|turn>model", ("<|tool_response>", "<|turn>tool")),  # Gemma 4
    Family(  # Llama 3
        "<|start_header_id|>user<|end_header_id|>",
        "<|start_header_id|>assistant<|end_header_id|>",
        ("<|start_header_id|>ipython<|end_header_id|>", "<|start_header_id|>tool<|end_header_id|>"),
    ),
    # gpt-oss; the function's name follows, then the recipient of the result
    Family("<|start|>user<|message|>", "<|start|>assistant", ("<|start|>functions",)),
    Family(  # Kimi
        "<|im_user|>user<|im_middle|>",
        "<|im_assistant|>assistant<|im_middle|>",
        ("<|im_system|>tool<|im_middle|>",),
    ),
    Family(  # Granite
        "<|start_of_role|>user<|end_of_role|>",
        "<|start_of_role|>assistant<|end_of_role|>",
        (
            "<|start_of_role|>user<|end_of_role|>\n<tool_response>",
            "<|start_of_role|>tool_response<|end_of_role|>",
            "<|start_of_role|>tool<|end_of_role|>",
        ),
    ),
    Family(  # Command R
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>",),
    ),
    Family(  # DeepSeek, with its own bars
        "<｜User｜>",  # noqa: RUF001
        "<｜Assistant｜>",  # noqa: RUF001
        ("<｜tool▁output▁begin｜>",),  # noqa: RUF001
    ),
    Family("]~b]user", "]~b]ai", ("]~b]tool",)),  # MiniMax
    Family(
        "<|user|>", "<|assistant|>", ("<|observation|>", "<|tool_response|>", "<|tool|>")
    ),  # GLM, Phi, Zephyr
    Family("[INST]", "", ("[TOOL_RESULTS]",)),  # Mistral
)
FIRST, REPLY, SECOND = "slotkeeper-first", "slotkeeper-reply", "slotkeeper-second"
REACH: Final = 64  # characters between the opener and the text: line ends, a date, never a message
CHAT: Final[Mapping[str, Any]] = {
    "messages": [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": REPLY},
        {"role": "user", "content": SECOND},
    ]
}


def family_in(rendered: str) -> Family | None:
    """Return the family whose user opener stands before both user messages of the rendered `CHAT`."""
    if not all(text in rendered for text in (FIRST, REPLY, SECOND)):
        return None
    first = rendered.partition(FIRST)[0][-REACH:]
    second = rendered.partition(REPLY)[2].partition(SECOND)[0][-REACH:]
    return next((known for known in FAMILIES if known.user in first and known.user in second), None)


async def family_of(client: EngineClient, template: str, headers: Headers | None = None) -> Family | None:
    """Return the family of an engine's template, whose source is `template`; None if it is unknown."""
    try:
        return family_in(await client.apply_template(CHAT, headers=headers))
    except EngineError:  # the template refuses such a chat
        return next((known for known in FAMILIES if known.user in template), None)


async def user_openers(
    client: EngineClient, family: Family | None, headers: Headers | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences by which the engine finds user messages; empty if they are unknown."""
    if family is None:
        return ()
    ids = await client.tokenize(family.user, add_special=False, parse_special=True, headers=headers)
    return (tuple(ids),)


# -- learned from sample chats, and checked on them ------------------------------------------------------

Chat = dict[str, Any]

SYSTEM: Final = {"role": "system", "content": "slotkeeper-system"}
TALK: Final = CHAT["messages"]
NAME, CALL = "slotkeeper_tool", "slotcall1"  # Mistral wants ids of nine letters and digits
PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": CALL, "type": "function", "function": {"name": NAME, "arguments": '{"a":"b"}'}}],
}
RESULT: Final = {"role": "tool", "tool_call_id": CALL, "content": "slotkeeper-result"}
KINDS: Final = {"user": BoundaryKind.USER, "tool": BoundaryKind.TOOL}
LONGEST: Final = 32  # tokens of a generation prompt; a longer one is a history that rendered differently
OTHER: Final = "other text"  # replaces a text that begins with "slotkeeper"


def tool(description: str) -> Chat:
    function = {"name": NAME, "description": description, "parameters": PARAMETERS}
    return {"type": "function", "function": function}


# The richest sample first: templates refuse message kinds that they do not know.
SAMPLES: Final[tuple[Chat, ...]] = (
    {"messages": [SYSTEM, *TALK, CALLED, RESULT], "tools": [tool("slotkeeper-tool")]},
    {"messages": [SYSTEM, *TALK]},
    {"messages": [*TALK]},
)


async def learn_markers(
    client: EngineClient, family: Family | None, headers: Headers | None = None
) -> Markers:
    """Return the markers of the engine's template; `UNKNOWN` if none pass the check.

    Without a family only the opener of the reply is learned, if the template has a generation prompt.
    """
    engine = Renderer(client, headers)
    for chat in SAMPLES if family else SAMPLES[1:]:  # the reply to a tool's result may have another prompt
        try:
            markers = await _learn(engine, chat, family)
        except EngineError:  # the template refuses such a chat
            continue
        if markers is not None:
            return markers
    return UNKNOWN if family is None else await learn_markers(client, None, headers)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders chats with the engine: template by `/apply-template`, tokenizer by `/tokenize`."""

    client: EngineClient
    headers: Headers | None

    async def text(self, chat: Chat) -> str:
        return await self.client.apply_template(chat, headers=self.headers)

    async def ids(self, text: str, *, whole: bool = True) -> Tokens:
        """Return the token ids of a whole prompt, or of a text in the middle of one."""
        return Tokens(
            await self.client.tokenize(text, add_special=whole, parse_special=True, headers=self.headers)
        )

    async def render(self, chat: Chat) -> Tokens:
        return await self.ids(await self.text(chat))


async def _learn(engine: Renderer, chat: Chat, family: Family | None) -> Markers | None:
    """Return the markers in one sample; None if they do not pass the check."""
    text = await engine.text(chat)
    if any(message["content"] not in text for message in chat["messages"]):
        return None
    prompt = await engine.ids(text)
    turn = await _turn(engine, chat, prompt)
    if family is None:
        return Markers(reply=(prompt.cut(turn),)) if 0 < len(prompt) - turn <= LONGEST else None
    markers = await _markers(engine, text, family)
    found = boundaries(prompt, markers)
    if not agrees(found, await _places(engine, chat, prompt)):
        return None
    if found[-1].at != turn and not await _goes_on(engine, chat, prompt, markers):
        return None
    inside = [found[0].at <= at < len(prompt) for at in await _lead(engine, chat, prompt)]
    return replace(markers, lead_inside=any(inside))


def agrees(found: Sequence[Boundary], places: Sequence[Boundary]) -> bool:
    """Whether each opener stands before its own message's text and after the text of the message before.

    Args:
        found: the boundaries that the markers give (see `boundaries`), with the turn as the last.
        places: where the texts of the messages begin, or a little later.
    """
    kinds = [*(place.kind for place in places), BoundaryKind.TURN]
    if [boundary.kind for boundary in found] != kinds:
        return False
    return all(
        ask.at <= place.at < after.at for ask, place, after in zip(found, places, found[1:], strict=False)
    )


async def _turn(engine: Renderer, chat: Chat, prompt: Tokens) -> int:
    """Return the token at which the generation prompt begins.

    The prompts with and without it are compared: without it, Phi writes an end-of-text token instead.
    """
    return prompt.lcp(await engine.render({**chat, "add_generation_prompt": False}))


async def _goes_on(engine: Renderer, chat: Chat, prompt: Tokens, markers: Markers) -> bool:
    """Whether only the reply to a tool's result lacks an opener, because it continues the calling turn.

    Gemma 4 does so, with a few words of a generation prompt: then the prompt's end counts as the turn.
    """
    if chat["messages"][-1] != RESULT or boundaries(prompt, markers)[-1].at != len(prompt):
        return False
    asked = {**chat, "messages": chat["messages"][: -len((CALLED, RESULT))]}
    before = await engine.render(asked)
    return boundaries(before, markers)[-1].at == await _turn(engine, asked, before)


async def _markers(engine: Renderer, text: str, family: Family) -> Markers:
    before, _, behind = text.partition(RESULT["content"])
    nearest = max(family.tools, key=before.rfind, default="") if behind else ""
    return Markers(
        user=await _opener(engine, family.user, text),
        tool=await _opener(engine, nearest, text),
        reply=await _opener(engine, family.reply, text),
    )


async def _opener(engine: Renderer, opener: str, text: str) -> tuple[Tokens, ...]:
    """Return the opener's ids, as far as they are equal alone and in the sample, where text follows.

    They can differ: Qwen 2.5 makes one token of the last ">" and the line end after it.
    """
    if not opener or opener not in text:
        return ()
    alone = await engine.ids(opener, whole=False)
    within = await engine.ids(text[text.index(opener) :], whole=False)
    return (alone.cut(0, alone.lcp(within)),)


async def _places(engine: Renderer, chat: Chat, prompt: Tokens) -> list[Boundary]:
    """Return where the texts of users and tools begin: a prompt with another text diverges there."""
    places: list[Boundary] = []
    for index, message in enumerate(chat["messages"]):
        if message["role"] in KINDS:
            at = prompt.lcp(await engine.render(_with_other(chat, index)))
            places.append(Boundary(at, KINDS[message["role"]] if places else BoundaryKind.HEAD))
    return places


async def _lead(engine: Renderer, chat: Chat, prompt: Tokens) -> list[int]:
    """Return where a prompt with another system text, or with another tool, diverges from this one."""
    others: list[Chat] = []
    if chat["messages"][0]["role"] == "system":
        others.append(_with_other(chat, 0))
    if "tools" in chat:
        others.append({**chat, "tools": [tool(OTHER)]})
    return [prompt.lcp(await engine.render(other)) for other in others]


def _with_other(chat: Chat, index: int) -> Chat:
    """Return the chat with another text in the message at `index`."""
    messages = list(chat["messages"])
    messages[index] = {**messages[index], "content": OTHER}
    return {**chat, "messages": messages}

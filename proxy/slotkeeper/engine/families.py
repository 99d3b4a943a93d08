"""The families of chat templates: what stands in front of a message, by who speaks.

A template is asked to render a chat, because its text may build these from parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slotkeeper.engine.client import EngineClient, EngineError, Headers


@dataclass(frozen=True, slots=True)
class Family:
    """Openers of messages, as text."""

    user: str  # the engine cuts there and makes its checkpoints
    reply: str  # "" where replies follow what was asked without any
    tools: tuple[str, ...] = ()  # of a tool's result: versions of the family differ


# The longer user opener first where one holds another.
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
    # gpt-oss; the function's name follows, and then whom the result is for
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
    """The one whose opener stands before both user messages of `CHAT` as a template rendered it."""
    if not all(text in rendered for text in (FIRST, REPLY, SECOND)):
        return None
    first = rendered.partition(FIRST)[0][-REACH:]
    second = rendered.partition(REPLY)[2].partition(SECOND)[0][-REACH:]
    return next((known for known in FAMILIES if known.user in first and known.user in second), None)


async def family_of(client: EngineClient, template: str, headers: Headers | None = None) -> Family | None:
    """The family of an engine's template, whose own text is `template`; None if it is not known."""
    try:
        return family_in(await client.apply_template(CHAT, headers=headers))
    except EngineError:  # a template that refuses such a chat
        return next((known for known in FAMILIES if known.user in template), None)


async def user_openers(
    client: EngineClient, family: Family | None, headers: Headers | None = None
) -> tuple[tuple[int, ...], ...]:
    """Token sequences that open a user message, as the engine itself looks for them; empty if not known."""
    if family is None:
        return ()
    ids = await client.tokenize(family.user, add_special=False, parse_special=True, headers=headers)
    return (tuple(ids),)

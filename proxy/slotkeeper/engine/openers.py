"""What opens a user message in a chat template: there the engine cuts and makes its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slotkeeper.engine.client import EngineClient, EngineError

# The longer marker first where one holds another.
OPENERS: Final = (
    "<|im_start|>user",  # ChatML: Qwen, Hermes, many others
    "<start_of_turn>user",  # Gemma to 3
    "<|turn>user",  # Gemma 4
    "<|start_header_id|>user<|end_header_id|>",  # Llama 3
    "<|start|>user<|message|>",  # gpt-oss
    "<|im_user|>user<|im_middle|>",  # Kimi
    "<|start_of_role|>user<|end_of_role|>",  # Granite
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",  # Command R
    "<｜User｜>",  # noqa: RUF001 - DeepSeek's own bars
    "]~b]user",  # MiniMax
    "<|user|>",  # GLM, Phi, Zephyr
    "[INST]",  # Mistral
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


def opener_in(rendered: str) -> str:
    """The marker before both user messages of `CHAT` as a template rendered it, "" if none is known."""
    if not all(text in rendered for text in (FIRST, REPLY, SECOND)):
        return ""
    first = rendered.partition(FIRST)[0][-REACH:]
    second = rendered.partition(REPLY)[2].partition(SECOND)[0][-REACH:]
    return next((opener for opener in OPENERS if opener in first and opener in second), "")


async def user_openers(
    client: EngineClient, template: str, *, headers: Mapping[str, str] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Token sequences that open a user message; empty if the template is of no known family.

    The template is asked to render a chat, because its text may build markers from parts.
    """
    try:
        opener = opener_in(await client.apply_template(CHAT, headers=headers))
    except EngineError:  # a template that refuses such a chat
        opener = next((known for known in OPENERS if known in template), "")
    if not opener:
        return ()
    ids = await client.tokenize(opener, add_special=False, parse_special=True, headers=headers)
    return (tuple(ids),)

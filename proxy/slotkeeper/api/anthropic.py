"""Anthropic Messages bodies as the chat body that llama-server turns them into, for rendering only.

Mirrors the engine's own converter (engine.md 1.2, 1.3; the same on both builds): it has no render route for
these, so this is how we learn their token ids. `thinking` and `cache_control` do not reach the template.
"""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc, NotOurs, Shape, compact, pick, rows, table, text
from slotkeeper.api.openai import carries_media
from slotkeeper.conversation.rules.stable import without_stamp

_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "required"}


def shape(doc: Doc) -> Shape:
    """A /v1/messages body."""
    if "messages" not in doc:
        raise NotOurs("messages")
    lead = _system(doc.get("system"))
    messages = lead + _messages(doc["messages"])
    chat: Doc = {"messages": messages, **pick(doc, ("model", "chat_template_kwargs"))}
    if isinstance(doc.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in rows(doc["tools"])]
    choice = _CHOICES.get(text(table(doc, "tool_choice"), "type"))
    if choice is not None:
        chat["tool_choice"] = choice
    return Shape(chat=chat, lead=len(lead), media=carries_media(messages))


def _system(system: Any) -> list[Doc]:
    if system is None:
        return []
    if isinstance(system, str):
        content = without_stamp(system)
    else:
        blocks = [block for block in rows(system) if block.get("type") == "text"]
        content = "".join(without_stamp(text(block, "text")) for block in blocks)
    return [{"role": "system", "content": content}]


def _tool(tool: Doc) -> Doc:
    function = {
        "name": text(tool, "name"),
        "description": text(tool, "description"),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _messages(messages: Any) -> list[Doc]:
    converted: list[Doc] = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            raise NotOurs("messages")
        if isinstance(message.get("content"), list):
            converted += _blocks(text(message, "role"), rows(message["content"]))
        elif "content" in message or message.get("role") != "assistant":
            converted.append(message)
    return converted


def _blocks(role: str, blocks: list[Doc]) -> list[Doc]:
    """One message of blocks: what was said as one message, then a tool message for each tool result."""
    content: list[Doc] = []
    calls: list[Doc] = []
    results: list[Doc] = []
    reasoning = ""
    for block in blocks:
        match block.get("type"):
            case "text":
                content.append(block)
            case "thinking":
                reasoning += text(block, "thinking")
            case "image":
                content += _image(block)
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                results.append(_result(block))
            case _:  # the engine skips what it does not know, redacted_thinking among it
                pass
    if not (content or calls or reasoning):
        return results
    said: Doc = {"role": role, "content": content or ""}
    if calls:
        said["tool_calls"] = calls
    if reasoning:
        said["reasoning_content"] = reasoning
    return [said, *results]


def _call(block: Doc) -> Doc:
    arguments = block.get("input")
    function = {"name": text(block, "name"), "arguments": compact({} if arguments is None else arguments)}
    return {"id": text(block, "id"), "type": "function", "function": function}


def _result(block: Doc) -> Doc:
    content: Any = block.get("content")
    if isinstance(content, list):
        parts: list[Doc] = []
        for part in rows(content):
            if part.get("type") == "text":
                parts.append({"type": "text", "text": text(part, "text")})
            elif part.get("type") == "image":
                parts += _image(part)
        media = any(part.get("type") == "image" for part in rows(content))
        content = parts if media else "".join(part["text"] for part in parts)
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": text(block, "tool_use_id"), "content": content}


def _image(block: Doc) -> list[Doc]:
    source = table(block, "source")
    match source.get("type"):
        case "base64":
            url = f"data:{text(source, 'media_type', 'image/jpeg')};base64,{text(source, 'data')}"
        case "url":
            url = text(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]

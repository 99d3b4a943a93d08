"""A request and the one before it, as a rule sees them, and the rule's result."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Conversation, Edit, Layout, Who, edited
from slotkeeper.conversation.rules.base import Room, Rule, Scene
from slotkeeper.conversation.rules.rules import common
from slotkeeper.scheduler.prompts.tokens import Tokens

Doc = dict[str, Any]


def call(id_: str, arguments: str = "{}", name: str = "read") -> Doc:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*calls: Doc, content: str | None = "", **more: Any) -> Doc:
    """Return a reply, with its calls if there are some."""
    said: Doc = {"role": "assistant", "content": content, **more}
    return {**said, "tool_calls": [*calls]} if calls else said


def result(id_: str, content: Any = "1: import os") -> Doc:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def system(text: str) -> Doc:
    return {"role": "system", "content": text}


def user(content: Any) -> Doc:
    return {"role": "user", "content": content}


def turn(text: str) -> tuple[Doc, Doc]:
    """Return a reply and the user's next message."""
    return called(content="Done."), user(text)


def laid_out(doc: Doc, api: Api = Api.CHAT) -> Layout:
    layout = lay_out(api, doc)
    assert layout is not None
    return layout


def replies_of(*messages: Doc) -> dict[str, Doc]:
    """Return replies by the ids of their calls, and a reply without calls by its index."""
    kept: dict[str, Doc] = {}
    for at, message in enumerate(messages):
        kept |= {call["id"]: message for call in message.get("tool_calls", ())} or {f"#{at}": message}
    return kept


def scene(
    now: Doc,
    sent: Doc | None = None,
    *,
    received: Doc | None = None,
    replies: Iterable[Doc] = (),
    api: Api = Api.CHAT,
    room: Room | None = None,
    tokens: int | None = None,
) -> Scene:
    """Return a scene. `tokens`: length of the prompt that was sent before."""
    layout = laid_out(now, api)
    if sent is None:
        return Scene(layout, None, 0, room=room)
    first = laid_out(sent, api)
    before = Conversation(
        number=1,
        who=Who("client"),
        received=laid_out(received, api) if received else first,
        sent=first,
        at=0.0,
        replies=replies_of(*replies),
        tokens=None if tokens is None else Tokens(range(tokens)),
    )
    return Scene(layout, before, common(first, layout), room=room)


def apply_rule(rule: Rule, now: Doc, sent: Doc | None = None, **more: Any) -> Doc:
    """Return the rule's result. The request is never edited in place, and a second pass changes nothing."""
    untouched = deepcopy(now)
    edits = [change for change in rule.changes(scene(now, sent, **more)) if isinstance(change, Edit)]
    after = edited(now, edits)
    assert now == untouched
    assert [*rule.changes(scene(after, sent, **more))] == []
    return after

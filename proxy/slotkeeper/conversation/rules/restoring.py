"""Rules that restore what should not change: the billing stamp, white space, reasoning, tools and calls.

Those for facts that change, such as dates and git status, are in `moving`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Any, Final

from slotkeeper.conversation.layout import (
    Call,
    Conversation,
    Edit,
    Layout,
    Message,
    Path,
    Role,
    Section,
    Text,
)
from slotkeeper.conversation.rules.base import (
    Mode,
    RuleName,
    Scene,
    alike,
    new,
    parsed,
    same_writing,
    sampled,
    size,
)

Doc = dict[str, Any]

_BILLING: Final = "x-anthropic-billing-header:"
_STAMP: Final = "cch="
_STAMP_LENGTH: Final = 5


class BillingNonce:
    """Replaces the stamp that Claude Code puts into each request with the one that the agent first sent."""

    name = RuleName.BILLING_NONCE
    default = Mode.FIX
    about = "Claude Code begins its system text with a billing header whose `cch=` differs in each request."
    safe = (
        "It keeps the first stamp, as llama-server does on /v1/messages; it is a checksum for the "
        "vendor's servers."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        first = scene.before or scene.kin
        stamp = (
            next(filter(None, (_stamp(text.text) for text in _system(first.sent))), None) if first else None
        )
        if stamp is not None:
            for text in _system(scene.now):
                yield from _as(text, without_stamp(text.text, stamp))


class TrailingWhitespace:
    """Restores the white space around a text as it was first sent, or sampled.

    Runs after the rules that restore facts, because it changes only texts that differ in nothing else.
    """

    name = RuleName.TRAILING_WHITESPACE
    default = Mode.FIX
    about = "Clients trim replies and system texts."
    safe = (
        "White space at the ends becomes what the engine first received or sampled. A message without "
        "a reply stays."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        now, before = scene.now, scene.before
        lead = zip(now.messages[: now.lead], before.sent.messages[: before.sent.lead], strict=False)
        for message, first in (*lead, *((message, first) for _, message, first in scene.altered)):
            if message is not now.messages[-1] or not _authored(message):
                yield from _ends(message, first)
        for at in new(scene)[:-1]:  # the last message, if it is a reply, is to be continued
            if now.messages[at].role is Role.ASSISTANT:
                yield from _as_sampled(now.messages[at], sampled(before, now.messages, at) or {})


class Reasoning:
    """Restores the reasoning that was sent or sampled with a reply."""

    name = RuleName.REASONING
    default = Mode.OBSERVE
    about = "Some clients return the reasoning of a reply at first and drop it later."
    safe = (
        "The model's own reasoning goes back to its reply, unless the client returned that, or all, "
        "without it."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        before, messages = scene.before, scene.now.messages
        if before is None or not any(message.reasoning_text for message in messages):
            return
        for _, message, first in scene.altered:
            if first.reasoning:
                yield from _thought(message, first.reasoning.text)
        for at in new(scene):
            if messages[at].reasoning and messages[at].role is Role.ASSISTANT:
                yield from _thought(messages[at], _sampled_reasoning(before, messages, at))


def without_stamp(system: str, written: str = "f" * _STAMP_LENGTH) -> str:
    """Replace the stamp in a system text's billing header; on /v1/messages the engine writes `fffff`."""
    stamp = _stamp(system)
    if not stamp:
        return system
    start = system.index(_STAMP, len(_BILLING)) + len(_STAMP)
    return system[:start] + written + system[start + len(stamp) :]


def _stamp(system: str) -> str | None:
    """Return the stamp of a system text that begins with a billing header; None for other texts."""
    at = system.find(_STAMP, len(_BILLING)) if system.startswith(_BILLING) else -1
    start, end = at + len(_STAMP), at + len(_STAMP) + _STAMP_LENGTH
    return system[start:end] if at >= 0 and system[end : end + 1] == ";" else None


def _system(layout: Layout) -> Iterator[Text]:
    for message in layout.messages:
        yield from (text for text in message.texts if text.section is Section.SYSTEM)


def _authored(message: Message) -> bool:
    """Whether the message has words of the user, or is a reply; the engine continues one that is the last."""
    return message.role is Role.ASSISTANT or any(text.section is Section.USER for text in message.texts)


def _ends(message: Message, first: Message) -> Iterator[Edit]:
    """Restore the white space around each text as in `first`, if nothing else differs."""
    if len(message.texts) == len(first.texts):
        for text, was in zip(message.texts, first.texts, strict=True):
            yield from _end(text, was.text)
    if first.reasoning:
        yield from _end(message.reasoning, first.reasoning.text)


def _as_sampled(message: Message, reply: Doc) -> Iterator[Edit]:
    if len(message.texts) == 1:
        yield from _end(message.texts[0], reply.get("content"))
    yield from _end(message.reasoning, reply.get("reasoning_content"))


def _sampled_reasoning(before: Conversation, messages: Sequence[Message], at: int) -> Any:
    """Return the sampled reasoning; None for a reply without calls.

    Such a reply is recognised by its text only, and it may be the answer to another request.
    """
    reply = sampled(before, messages, at) or {}
    return reply.get("reasoning_content") if reply.get("tool_calls") else None


def _end(text: Text | None, first: Any) -> Iterator[Edit]:
    if text and isinstance(first, str) and text.text != first and text.text.strip() == first.strip():
        yield from _as(text, first)


def _thought(message: Message, reasoning: Any) -> Iterator[Edit]:
    if message.reasoning and not message.reasoning.text and isinstance(reasoning, str):
        yield from _as(message.reasoning, reasoning)


def _as(text: Text, written: str) -> Iterator[Edit]:
    if written != text.text:
        yield Edit(text.path, text.text or None, written)


# -- the list of tools -----------------------------------------------------------------------------------

Key = tuple[str, int]  # the name of a tool, and how many tools of that name come before it


class ToolOrder:
    """Restores the order in which this conversation first sent its tools; new tools follow at the end."""

    name = RuleName.TOOL_ORDER
    default = Mode.FIX
    about = "Clients list tools of several servers in the order in which those answered."
    safe = "The same tools with the same texts. A removed tool stays removed."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        now, first = keyed(scene.now.tools), keyed(scene.before.sent.tools)
        rank = {key: at for at, key in enumerate(first)}
        order = sorted(now, key=lambda key: rank.get(key, len(rank)))
        if order != [*now]:
            path, tools = scene.now.tools_path, [*scene.now.tools]
            behind = dropwhile(lambda pair: pair[0] == pair[1], zip(now, order, strict=True))
            moved = sum(size(now[key]) for key, _ in behind if key in first)
            yield Edit(path, tools, [now[key] for key in order], moved)


class SchemaKeys:
    """Restores the text of a tool as it was first sent, if the meaning is the same."""

    name = RuleName.SCHEMA_KEYS
    default = Mode.FIX
    about = "Clients that build schemas again (mistral-vibe) may write keys in another order."
    safe = "The order of keys, and of the names under `required`, means nothing. Any other difference stays."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None or scene.now.tools is scene.before.sent.tools:
            return
        first = keyed(scene.before.sent.tools)
        for at, (key, tool) in enumerate(keyed(scene.now.tools).items()):
            was = first.get(key)
            if was is not None and not same_writing(tool, was) and alike(tool, was, schema=True):
                yield Edit((*scene.now.tools_path, at), tool, was)


def keyed(tools: Sequence[Doc]) -> dict[Key, Doc]:
    """Return the tools by name, in their order; a counter tells tools of the same name apart."""
    seen: Counter[str] = Counter()
    by_key: dict[Key, Doc] = {}
    for tool in tools:
        name = _name(tool)
        by_key[name, seen[name]] = tool
        seen[name] += 1
    return by_key


def _name(tool: Doc) -> str:
    """Return the name that a model calls; tools that the server runs have only a type or a label."""
    function = tool.get("function")
    names = (function if isinstance(function, dict) else tool).get("name"), tool.get("server_label")
    return next((name for name in names if isinstance(name, str)), str(tool.get("type")))


# -- calls that come back: their ids, the text of their arguments ----------------------------------------


class CallIds:
    """Restores the id that a call had when it was first sent, in the call and in its result."""

    name = RuleName.CALL_IDS
    default = Mode.FIX
    about = "Clients that store calls without ids make new ones; some templates write them into the prompt."
    safe = (
        "A call and its result get the same first id, if name, arguments and place are equal. No two "
        "calls share one."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        ids = _first_ids(scene)
        if not ids or _collide(scene, ids):
            return
        current: dict[str, str] = {}  # the client's id -> the id that we gave the latest call with it
        for message in scene.now.messages:
            for answer in message.answers:
                given = current.get(answer.text, answer.text)
                if given != answer.text:
                    yield Edit(answer.path, answer.text, given)
            for call in message.calls:
                current[call.id] = ids.get(call.id_path, call.id)
                if current[call.id] != call.id:
                    yield Edit(call.id_path, call.id, current[call.id])


class ToolCalls:
    """Restores the text of a call's arguments as it was first sent, or as it was sampled."""

    name = RuleName.TOOL_CALLS
    default = Mode.FIX
    about = (
        "Most clients serialise the arguments of a call again: white space, escapes, order of keys, 1 "
        "for 1.0."
    )
    safe = "The same JSON value, in the text that the model wrote."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        for _, message, first in scene.altered:
            for call, was in zip(message.calls, first.calls, strict=False):
                if call.name == was.name:
                    yield from _written(call, was.arguments)
        for at in new(scene):
            for call in scene.now.messages[at].calls:
                yield from _written(call, _sampled(scene.before, call))


def _first_ids(scene: Scene) -> Mapping[Path, str]:
    """Return the first ids of calls whose ids have changed, by the paths of the ids."""
    ids = {}
    for _, message, first in scene.altered:
        for call, was in zip(message.calls, first.calls, strict=False):
            if call.id and was.id and call.id != was.id and _same_call(call, was):
                ids[call.id_path] = was.id
    return ids


def _same_call(call: Call, was: Call) -> bool:
    if call.name != was.name:
        return False
    return same_writing(call.arguments, was.arguments) or _say_the_same(call.arguments, was.arguments)


def _collide(scene: Scene, ids: Mapping[Path, str]) -> bool:
    """Whether two calls with different ids would get the same id."""
    named = defaultdict(set)
    for message in scene.now.messages:
        for call in message.calls:
            named[ids.get(call.id_path, call.id)].add(call.id)
    return any(len(before) > 1 for before in named.values())


def _sampled(before: Conversation, call: Call) -> Any:
    """Return the arguments of this call as the model wrote them; None if they are not known."""
    reply = before.replies.get(call.id, {})
    for sampled_call in reply.get("tool_calls") or ():
        function = sampled_call.get("function") or {}
        if sampled_call.get("id") == call.id and function.get("name") == call.name:
            return function.get("arguments")
    return None


def _written(call: Call, first: Any) -> Iterator[Edit]:
    """Restore the arguments' first text. An object stays an object; its keys get their first order."""
    if first is None or same_writing(call.arguments, first) or not _say_the_same(call.arguments, first):
        return
    after = first if isinstance(call.arguments, str) else parsed(first)
    if isinstance(after, type(call.arguments)) and not same_writing(call.arguments, after):
        yield Edit(call.arguments_path, call.arguments, after)


def _say_the_same(one: Any, other: Any) -> bool:
    value = parsed(one)
    return value is not None and alike(value, parsed(other))

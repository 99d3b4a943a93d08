"""Rules for tool calls that come back: their ids, and the text of their arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from slotkeeper.conversation.record import Conversation
from slotkeeper.conversation.requests.layout import Call, Edit, Path
from slotkeeper.conversation.rules.base import Mode, RuleName, Scene
from slotkeeper.conversation.rules.pairs import new, paired
from slotkeeper.conversation.rules.values import alike, parsed, same_writing

Doc = dict[str, Any]


class CallIds:
    """A call that was sent before has the id that it had then, and so has its result."""

    name = RuleName.CALL_IDS
    default = Mode.FIX
    about = (
        "Clients that store calls without their ids make new ids for each request; some templates write ids "
        "into the prompt."
    )
    safe = (
        "An id only links a call to its result: both get the same first id, and only if name, arguments and "
        "place of the call are equal. No two calls get the same id."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        ids = _first_ids(scene)
        if not ids or _collide(scene, ids):
            return
        current: dict[str, str] = {}  # the id that the latest call with that id has been given
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
    """The arguments of a call are written as they were first sent, or as they were sampled."""

    name = RuleName.TOOL_CALLS
    default = Mode.FIX
    about = (
        "Most clients parse the arguments of a call and serialise them again when they return it: other "
        "white space, other escapes, keys in another order, 1 for 1.0."
    )
    safe = "The same JSON value, in the exact text that the model wrote. Anything else stays unchanged."

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None:
            return
        for message, first in paired(scene):
            for call, was in zip(message.calls, first.calls, strict=False):
                if call.name == was.name:
                    yield from _written(call, was.arguments)
        for at in new(scene):
            for call in scene.now.messages[at].calls:
                yield from _written(call, _sampled(scene.before, call))


def _first_ids(scene: Scene) -> Mapping[Path, str]:
    """By the paths of ids: those that calls had, where they have other ones now."""
    found = {}
    for message, first in paired(scene):
        for call, was in zip(message.calls, first.calls, strict=False):
            if call.id and was.id and call.id != was.id and _same_call(call, was):
                found[call.id_path] = was.id
    return found


def _same_call(call: Call, was: Call) -> bool:
    if call.name != was.name:
        return False
    return same_writing(call.arguments, was.arguments) or _say_the_same(call.arguments, was.arguments)


def _collide(scene: Scene, ids: Mapping[Path, str]) -> bool:
    """Whether two calls with different ids would get the same."""
    named = defaultdict(set)
    for message in scene.now.messages:
        for call in message.calls:
            named[ids.get(call.id_path, call.id)].add(call.id)
    return any(len(before) > 1 for before in named.values())


def _sampled(before: Conversation, call: Call) -> Any:
    """The arguments of this call as the model wrote them, if they are known."""
    reply = before.replies.get(call.id, {})
    for told in reply.get("tool_calls") or ():
        function = told.get("function") or {}
        if told.get("id") == call.id and function.get("name") == call.name:
            return function.get("arguments")
    return None


def _written(call: Call, first: Any) -> Iterator[Edit]:
    """An object stays an object, whose keys come in their first order."""
    if first is None or same_writing(call.arguments, first) or not _say_the_same(call.arguments, first):
        return
    after = first if isinstance(call.arguments, str) else parsed(first)
    if isinstance(after, type(call.arguments)) and not same_writing(call.arguments, after):
        yield Edit(call.arguments_path, call.arguments, after)


def _say_the_same(one: Any, other: Any) -> bool:
    value = parsed(one)
    return value is not None and alike(value, parsed(other))

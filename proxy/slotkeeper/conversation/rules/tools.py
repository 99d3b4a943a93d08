"""Rules for the list of tools, which stands before everything else in most prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from typing import Any

from slotkeeper.conversation.requests.layout import Edit
from slotkeeper.conversation.rules.base import Mode, RuleName, Scene
from slotkeeper.conversation.rules.values import alike, same_writing, size

Doc = dict[str, Any]
Key = tuple[str, int]  # the name of a tool, and how many of that name stand before it


class ToolOrder:
    """Tools stand in the order in which this conversation first sent them, new ones behind them."""

    name = RuleName.TOOL_ORDER
    default = Mode.FIX
    about = "Clients that collect tools from several servers list them in the order in which those answered."
    safe = "The same tools with the same texts, in another order. A tool that was removed stays removed."

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
    """A tool is written as it was first sent, where it says the same."""

    name = RuleName.SCHEMA_KEYS
    default = Mode.FIX
    about = (
        "A client that builds its schemas again may write the keys of an object in another order: "
        "mistral-vibe does so when a session is resumed."
    )
    safe = (
        "The order of keys in a JSON object means nothing, nor does that of the names under `required`. A "
        "tool with any other difference stays unchanged."
    )

    def changes(self, scene: Scene) -> Iterator[Edit]:
        if scene.before is None or scene.now.tools is scene.before.sent.tools:
            return
        first = keyed(scene.before.sent.tools)
        for at, (key, tool) in enumerate(keyed(scene.now.tools).items()):
            was = first.get(key)
            if was is not None and not same_writing(tool, was) and alike(tool, was, schema=True):
                yield Edit((*scene.now.tools_path, at), tool, was)


def keyed(tools: Sequence[Doc]) -> dict[Key, Doc]:
    """Tools by their names, in their order; of those with one name, by their order among each other."""
    seen: Counter[str] = Counter()
    found: dict[Key, Doc] = {}
    for tool in tools:
        name = _name(tool)
        found[name, seen[name]] = tool
        seen[name] += 1
    return found


def _name(tool: Doc) -> str:
    """What a model calls it; tools that the server runs itself have only a type, or a label."""
    function = tool.get("function")
    names = (function if isinstance(function, dict) else tool).get("name"), tool.get("server_label")
    return next((name for name in names if isinstance(name, str)), str(tool.get("type")))

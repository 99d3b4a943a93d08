"""The rule for side questions: a summary or a recap that a client asks for with the history of its agent.

Such a request has the agent's history behind another system text, often without its tools, so that no token
of it is in a slot. No list of words tells it: at least half of its text is the history of a known
conversation (`likeness.asked_aside`). The rule sends the agent's own head instead. The client's instructions
follow in the newest message, where they replace those at the beginning, and no tool may be called.

Both builds render the tools with `tool_choice` `none` as without it, and return what looks like a call as
text. A client's `response_format` or grammar counts then too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from slotkeeper.conversation.layout import NOWHERE, Edit, Layout, Message
from slotkeeper.conversation.likeness import same_family
from slotkeeper.conversation.rules.base import Fact, Mode, RuleName, Scene, place, same_writing

PLACE: Final = "question"  # of the fact
INSTEAD: Final = "Only these instructions count now:"
WITHOUT: Final = "The instructions at the beginning do not count."
NO_CALLS: Final = "No tool can be called."
TOOL_CHOICE: Final = "tool_choice"
# Options that can change how a template renders the head. A client's own value stays.
OF_HEAD: Final = ("chat_template_kwargs", "reasoning_effort", "enable_thinking")


class SideQuestion:
    """Sends a side question behind the head of the agent whose history it has."""

    name = RuleName.SIDE_QUESTION
    default = Mode.OBSERVE
    about = (
        "Codex, Qwen Code, Claude Code, oh-my-pi and others ask for a summary or a recap with the agent's "
        "history behind another system text, or without the agent's tools."
    )
    safe = (
        "The newest message has all of the client's instructions, and says that they replace the agent's. "
        "The model cannot call a tool. The rule waits for a history that is at least half of the request."
    )

    def changes(self, scene: Scene) -> Iterator[Edit | Fact]:
        asked = scene.asked
        if asked is None or place(scene.now, scene.common) is None:
            return
        now, head = scene.now, asked.sent
        system = [] if same_family(head, now) else _system(now, head)
        if system is None or not same_form(now, head):
            return
        yield from _tools(now, head)
        yield from _options(now, head)
        yield from system
        told = _told(now, head, instead=bool(system))
        if told and scene.told.get(PLACE) != told:
            yield Fact(PLACE, told, plain=True)


def _told(now: Layout, head: Layout, *, instead: bool) -> str:
    """Return what the newest message has to say; "" if nothing. `instead`: of other system texts."""
    said = "\n".join(message.said for message in now.messages[: now.lead]).strip()
    instructions = (f"{INSTEAD}\n{said}" if said else WITHOUT) if instead else ""
    return "\n".join(filter(None, (NO_CALLS if _forbids(now, head) else "", instructions)))


def same_form(now: Layout, head: Layout) -> bool:
    """Whether both requests were sent to the same API, so that one can have parts of the other."""
    keys = [layout.messages[-1].path[:1] if layout.messages else NOWHERE for layout in (now, head)]
    return keys[0] == keys[1] and now.no_calls == head.no_calls


def _forbids(now: Layout, head: Layout) -> bool:
    """Whether calls have to be forbidden, because the client did not offer all of the agent's tools."""
    return len(head.tools) > len(now.tools)


def _tools(now: Layout, head: Layout) -> Iterator[Edit]:
    if not same_writing(list(now.tools), list(head.tools)):
        yield Edit(head.tools_path, list(now.tools) or None, list(head.tools))
    if _forbids(now, head) and now.no_calls is not None:
        yield Edit((TOOL_CHOICE,), None, now.no_calls)  # the template renders them all the same


def _options(now: Layout, head: Layout) -> Iterator[Edit]:
    for name in OF_HEAD:
        if name in head.options and name not in now.options:
            yield Edit((name,), None, head.options[name])


# -- system texts ----------------------------------------------------------------------------------------


def _system(now: Layout, head: Layout) -> list[Edit] | None:
    """Return the edits that put the agent's system texts in place of the client's; None if that cannot be."""
    (beside, listed), (first_beside, first_listed) = _lead(now), _lead(head)
    if beside and not first_beside:
        return None  # no value of the field means that there is none
    edits = [Edit(path, beside.get(path), value) for path, value in first_beside.items()]
    for at, message in reversed([*enumerate(listed)]):
        edits.append(Edit((message.path[0], at), message.doc, None, item=True))
    for at, message in enumerate(first_listed):
        edits.append(Edit((message.path[0], at), None, message.doc, item=True))
    return edits


def _lead(layout: Layout) -> tuple[dict[Any, Any], list[Message]]:
    """Return the values of the system text beside the list of messages, by path, and the messages in it."""
    lead = layout.messages[: layout.lead]
    beside = {m.path: m.doc[str(m.path[0])] for m in lead if len(m.path) == 1 and m.doc is not None}
    return beside, [message for message in lead if len(message.path) > 1]

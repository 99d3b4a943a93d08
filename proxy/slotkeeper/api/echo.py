"""How a client sends replies back: learning it, and doing it in its place.

Messages are those of a chat body, as our conversions make them of every API. Content that is `""`, null,
missing or `[]`, and text that is a string or one part, come to the same prompt on both builds, so they
are no habits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final, TypeVar

from slotkeeper.api.document import Doc, compact, hash_chain, rows, table, text
from slotkeeper.api.head import Api

# Two texts that part in their first token, whatever stands before them: letters are joined to a space
# or a bracket before them, line ends to a line end.
OPENINGS: Final = ("x", "\n\n7")

_Way = TypeVar("_Way", bound=StrEnum)


class ReasoningForm(StrEnum):
    """What becomes of the reasoning of a reply."""

    KEPT = "kept"
    DROPPED = "dropped"
    INLINE = "inline"  # moved into the content, as <think> or as plain text
    PART = "part"  # a text part of its own before the content


class Trim(StrEnum):
    """What becomes of the white space around a text."""

    NONE = "none"
    END = "end"
    BOTH = "both"

    def of(self, said: str) -> str:
        return said.strip() if self is Trim.BOTH else said.rstrip() if self is Trim.END else said


class Arguments(StrEnum):
    """How the arguments of a call are written. Most templates get them parsed: then only order counts."""

    SAMPLED = "sampled"
    COMPACT = "compact"  # as JavaScript writes JSON
    SPACED = "spaced"  # as Python does, in ASCII
    SORTED = "sorted"  # as Go does

    def of(self, call: Doc) -> str:
        given, parsed = table(call, "function").get("arguments"), arguments(call)
        match self:
            case Arguments.COMPACT if parsed is not None:
                return compact(parsed)
            case Arguments.SPACED if parsed is not None:
                return json.dumps(parsed)
            case Arguments.SORTED if parsed is not None:
                return compact(dict(sorted(parsed.items())))
            case _:
                return given if isinstance(given, str) else compact(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """How one client sends replies back; None is not known yet, and of several ways each is possible."""

    calling: ReasoningForm | None = None  # in a reply that calls tools
    answering: ReasoningForm | None = None  # in one that does not
    forgets: bool | None = None  # at a user's message the reasoning in all earlier replies is left out
    wrap: tuple[str, str] | None = None  # what stands around reasoning that was moved into the content
    wrap_alone: tuple[str, str] | None = None  # the same, where nothing else was said
    content: tuple[Trim, ...] = tuple(Trim)
    thought: tuple[Trim, ...] = tuple(Trim)
    arguments: tuple[Arguments, ...] = tuple(Arguments)
    same_ids: bool = True  # of the calls
    asks_before: bool = False  # sometimes a user's text stands before the results of tools
    asks_after: bool = False  # or behind them
    puzzling: bool = False  # the last reply did not come back in any way that we know

    def way(self, message: Doc) -> ReasoningForm | None:
        """What becomes of the reasoning in `message`."""
        return self.calling if message.get("tool_calls") else self.answering

    def wrapping(self, message: Doc) -> tuple[str, str] | None:
        return self.wrap if words(message).strip() else self.wrap_alone

    def tells_nothing(self, reply: Doc) -> bool:
        """Whether it does not say, not even in two versions, how this reply comes back."""
        moved = bool(text(reply, "reasoning_content")) and self.way(reply) is ReasoningForm.INLINE
        return self.puzzling or (moved and self.wrapping(reply) is None)

    def having(self, message: Doc, way: ReasoningForm) -> Habit:
        """The same habit, with another way for such messages."""
        return replace(self, calling=way) if message.get("tool_calls") else replace(self, answering=way)


def returnable(reply: Doc) -> bool:
    """Whether any client would send it back: something was said or called, and no call was cut in two."""
    calls = rows(reply.get("tool_calls"))
    return bool(words(reply).strip() or calls) and all(arguments(call) is not None for call in calls)


def guesses(habit: Habit, reply: Doc, messages: Sequence[Doc]) -> tuple[Habit, ...]:
    """The habit if all that matters here of it is known, else the two that differ most, or none."""
    if habit.tells_nothing(reply):
        return ()
    way, thought, calls = habit.way(reply), text(reply, "reasoning_content"), rows(reply.get("tool_calls"))
    content = _extremes(habit.content, lambda trim: trim.of(words(reply)))
    thoughtful = _extremes(habit.thought, lambda trim: trim.of(thought))
    written = _extremes(habit.arguments, lambda style: [style.of(call) for call in calls])
    faithful, careless = (
        replace(
            habit.having(reply, way or unknown),
            forgets=forgets if habit.forgets is None else habit.forgets,
            content=(content[at],),
            thought=(thoughtful[at],),
            arguments=(written[at],),
        )
        for at, unknown, forgets in ((0, ReasoningForm.KEPT, False), (1, ReasoningForm.DROPPED, True))
    )
    forgetting = not calls and faithful.forgets is not careless.forgets and thoughts(messages) > 0
    differ = forgetting or echoed(faithful, reply) != echoed(careless, reply)
    return (faithful, careless) if differ else (faithful,)


def _extremes(ways: Sequence[_Way], write: Callable[[_Way], object]) -> tuple[_Way, _Way]:
    """The first of the possible ways, and the last of them that comes to something else, if any does."""
    first = ways[0]
    others = [way for way in ways if write(way) != write(first)]
    return first, others[-1] if others else first


def next_turns(habit: Habit, messages: Sequence[Doc], reply: Doc) -> Iterator[list[Doc]]:
    """The messages of the next turn, in versions that share no more of their prompts than is certain."""
    forgotten = habit.forgets and not reply.get("tool_calls")
    history = thoughtless(messages) if forgotten else messages
    for opening in OPENINGS:
        yield [*history, *_turn(habit, messages, reply, opening)]
    if reply.get("tool_calls"):
        said, *results = _turn(habit, messages, reply, OPENINGS[0])
        asked = {"role": "user", "content": OPENINGS[0]}
        if habit.asks_before:
            yield [*messages, said, asked, *results]
        if habit.asks_after:
            yield [*messages, said, *results, asked]


def _turn(habit: Habit, messages: Sequence[Doc], reply: Doc, opening: str) -> list[Doc]:
    """The reply as this client sends it back, and what it will say to it."""
    said = echoed(habit, reply)
    calls = rows(said.get("tool_calls"))
    if not calls:
        return [said, {"role": "user", "content": opening}]
    named = any(message.get("role") == "tool" and "name" in message for message in messages)
    results: list[Doc] = []
    for number, call in enumerate(calls):
        if not habit.same_ids:
            call["id"] = f"{opening.strip()}{number}"
        name = {"name": table(call, "function").get("name")} if named else {}
        results.append({"role": "tool", "tool_call_id": call["id"], "content": opening, **name})
    return [said, *results]


def echoed(habit: Habit, reply: Doc) -> Doc:
    """The reply as this client sends it back, but for new ids of its calls."""
    content, thought = words(reply), text(reply, "reasoning_content")
    said: Doc = {"role": "assistant", "content": habit.content[0].of(content)}
    match habit.way(reply):
        case ReasoningForm.INLINE if thought and (wrap := habit.wrapping(reply)):
            opening, closing = wrap
            said["content"] = opening + thought.strip() + closing + content.strip()
        case ReasoningForm.PART if thought:
            said["content"] = [{"type": "text", "text": part} for part in (thought, content) if part]
        case ReasoningForm.KEPT if thought:
            said["reasoning_content"] = habit.thought[0].of(thought)
        case _:
            pass
    if calls := rows(reply.get("tool_calls")):
        written = habit.arguments[0]
        said["tool_calls"] = [
            {**call, "function": {**table(call, "function"), "arguments": written.of(call)}} for call in calls
        ]
    return said


# -- parts of messages ---------------------------------------------------------------------------------


def words(message: Doc) -> str:
    """The content as one text."""
    return "\n".join(texts(message))


def texts(message: Doc) -> list[str]:
    """The texts of the content. Whether line ends join several depends on the template."""
    content = message.get("content")
    found = [content] if isinstance(content, str) else [text(part, "text") for part in rows(content)]
    return [part for part in found if part]


def arguments(call: Doc) -> Doc | None:
    """The arguments of a call, or None where they are no whole object."""
    given = table(call, "function").get("arguments")
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def thoughts(messages: Sequence[Doc]) -> int:
    """How many of the messages carry reasoning."""
    return sum(1 for message in messages if text(message, "reasoning_content"))


def thoughtless(messages: Sequence[Doc]) -> list[Doc]:
    return [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]


# -- what a client does, learned from what it sent and what it was told ----------------------------------

_WRAP_LIMIT: Final = 64  # characters of what a client puts around reasoning


def usual(api: Api) -> Habit:
    """What is taken for granted of a client that we have not heard yet."""
    # On /v1/messages arguments are objects, which the engine writes down itself (engine.md 1.2).
    return Habit(arguments=(Arguments.COMPACT, Arguments.SORTED)) if api is Api.MESSAGES else Habit()


def trail(messages: Sequence[Doc]) -> tuple[bytes, ...]:
    """One digest for each message, chained, by which a conversation is known again without its reasoning.

    Raises NotOurs for messages nested too deep.
    """
    return hash_chain({"messages": thoughtless(messages)})[1:]


def gleaned(habit: Habit, messages: Sequence[Doc]) -> Habit:
    """The habit with what a history says by itself, whatever wrote its replies.

    That a user speaks among the results of tools is said of this conversation only: a request to
    sum it up does so too, and never comes back.
    """
    habit = replace(habit, asks_before=False, asks_after=False)
    last = max((at for at in range(len(messages)) if _asks(messages, at)), default=-1)
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if message.get("tool_calls"):
            habit = _asking(habit, messages, at + 1)
        if not text(message, "reasoning_content"):
            continue
        if at < last:
            habit = replace(habit, forgets=False)
        habit = habit.having(message, ReasoningForm.KEPT)
    return _completed(habit)


def learnt(habit: Habit, reply: Doc, messages: Sequence[Doc], at: int, *, before: int) -> Habit:
    """The habit after `reply` came back as `messages[at]`. What fits as it was is left so.

    `before` is `thoughts` of the messages that the reply answered.
    """
    echo = messages[at]
    if before and not thoughts(messages[:at]) and any(_asks(messages, i) for i in range(at, len(messages))):
        habit = replace(habit, forgets=True)
    calls, theirs = rows(reply.get("tool_calls")), rows(echo.get("tool_calls"))
    written = [Arguments.SAMPLED.of(call) for call in theirs]
    said, thought = words(reply), text(echo, "reasoning_content")
    found = replace(
        habit,
        content=_fitting(habit.content, Trim, lambda way: way.of(said) == words(echo)),
        thought=_fitting(
            habit.thought, Trim, lambda way: way.of(text(reply, "reasoning_content")) == thought
        ),
        arguments=_fitting(
            habit.arguments, Arguments, lambda way: [way.of(call) for call in calls] == written
        ),
        same_ids=_ids(calls) == _ids(theirs) if calls else habit.same_ids,
        puzzling=False,
    )
    for trial in _reasonings(found, reply, echo):
        if _comes_to(echoed(trial, reply)) == _comes_to(echo):
            return _completed(trial)
    return replace(habit, puzzling=True)


def _fitting(known: tuple[_Way, ...], ways: Iterable[_Way], fits: Callable[[_Way], bool]) -> tuple[_Way, ...]:
    """The possible ways that fit; if there are none, all that fit; if there are none, as it was."""
    fitting = tuple(way for way in ways if fits(way))
    return tuple(way for way in known if way in fitting) or fitting or known


def _reasonings(habit: Habit, reply: Doc, echo: Doc) -> Iterator[Habit]:
    """What may have become of the reasoning."""
    thought, said = text(reply, "reasoning_content"), words(reply).strip()
    if not thought:
        yield habit
        return
    yield habit.having(reply, ReasoningForm.KEPT)
    yield habit.having(reply, ReasoningForm.DROPPED)
    yield habit.having(reply, ReasoningForm.PART)
    opening, _, rest = words(echo).partition(thought.strip())
    wrap = (opening, rest.removesuffix(said))
    if sum(map(len, wrap)) <= _WRAP_LIMIT:
        inline = habit.having(reply, ReasoningForm.INLINE)
        yield replace(inline, wrap=wrap) if said else replace(inline, wrap_alone=wrap)


def _completed(habit: Habit) -> Habit:
    """Who drops reasoning between calls does so after an answer; who keeps it after one does so before."""
    if habit.answering is None and habit.calling is ReasoningForm.DROPPED:
        return replace(habit, answering=ReasoningForm.DROPPED)
    if habit.calling is None and habit.answering in (
        ReasoningForm.KEPT,
        ReasoningForm.INLINE,
        ReasoningForm.PART,
    ):
        return replace(habit, calling=habit.answering)
    return habit


def _asking(habit: Habit, messages: Sequence[Doc], at: int) -> Habit:
    """The habit with what a user says among the results of tools that begin there."""
    answers = takewhile(lambda role: role != "assistant", _roles(messages, at, len(messages)))
    match list(answers):
        case ["user", *rest] if "tool" in rest:
            return replace(habit, asks_before=True)
        case ["tool", *rest] if "user" in rest:
            return replace(habit, asks_after=True)
        case _:
            return habit


def _asks(messages: Sequence[Doc], at: int) -> bool:
    """Whether a user's message begins a new turn there; before the results of tools it does not."""
    return _roles(messages, at, at + 1) == ["user"] and _roles(messages, at + 1, at + 2) != ["tool"]


def _roles(messages: Sequence[Doc], start: int, end: int) -> list[Any]:
    return [message.get("role") for message in messages[start:end]]


def _ids(calls: Sequence[Doc]) -> list[Any]:
    return [call.get("id") for call in calls]


def _comes_to(message: Doc) -> tuple[Any, ...]:
    """What of a message reaches the prompt, but for the ids of its calls."""
    calls = rows(message.get("tool_calls"))
    names = [table(call, "function").get("name") for call in calls]
    written = [Arguments.SAMPLED.of(call) for call in calls]
    return texts(message), text(message, "reasoning_content"), names, written

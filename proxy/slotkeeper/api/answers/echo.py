"""How a client sends replies back: we learn its habit, and predict the next turn from it.

All messages are in chat shape, into which we convert those of every API. Content that is `""`, null, missing
or `[]` gives the same prompt on both builds, and so does text as a string or as one part: these differences
are not part of a habit.
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

# Two texts that differ in their first token, whatever precedes them: a tokenizer joins a letter to a space or
# a bracket before it, and a line end to a line end.
OPENINGS: Final = ("x", "\n\n7")

_Way = TypeVar("_Way", bound=StrEnum)


class ReasoningForm(StrEnum):
    """What the client does with the reasoning of a reply."""

    KEPT = "kept"
    DROPPED = "dropped"
    INLINE = "inline"  # moved into the content, as <think> or as plain text
    PART = "part"  # sent as a separate text part before the content


class Trim(StrEnum):
    """Where the client trims the white space around a text."""

    NONE = "none"
    END = "end"
    BOTH = "both"

    def of(self, value: str) -> str:
        return value.strip() if self is Trim.BOTH else value.rstrip() if self is Trim.END else value


class Arguments(StrEnum):
    """How the client writes a call's arguments. Most templates get them parsed: only key order counts."""

    SAMPLED = "sampled"  # unchanged, as the model generated it
    COMPACT = "compact"  # as JavaScript writes JSON
    SPACED = "spaced"  # as Python writes it, in ASCII
    SORTED = "sorted"  # as Go writes it

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
    """How one client sends replies back. None: not known yet. A tuple lists the ways still possible."""

    calling: ReasoningForm | None = None  # for the reasoning in a reply that calls tools
    answering: ReasoningForm | None = None  # for the reasoning in a reply that calls none
    forgets: bool | None = None  # after a new user message the client drops the reasoning of earlier replies
    wrap: tuple[str, str] | None = None  # the text before and after reasoning that was moved into the content
    wrap_alone: tuple[str, str] | None = None  # the same, for a reply without other content
    content: tuple[Trim, ...] = tuple(Trim)
    thought: tuple[Trim, ...] = tuple(Trim)
    arguments: tuple[Arguments, ...] = tuple(Arguments)
    same_ids: bool = True  # the client keeps the ids of calls
    asks_before: bool = False  # the client sometimes puts a user's text before the results of tools
    asks_after: bool = False  # or after them
    puzzling: bool = False  # the last reply came back in a way that we do not know
    # The chance that the next turn begins with the last reply, as predicted. An agent sends the result of a
    # call; a user may also stop, ask again, or speak to a program that writes the history anew.
    calls_return: float = 0.9
    answers_return: float = 0.5

    def way(self, message: Doc) -> ReasoningForm | None:
        """Return what the client does with the reasoning in `message`."""
        return self.calling if message.get("tool_calls") else self.answering

    def wrapping(self, message: Doc) -> tuple[str, str] | None:
        return self.wrap if words(message).strip() else self.wrap_alone

    def tells_nothing(self, reply: Doc) -> bool:
        """Whether the habit cannot predict, not even in two versions, how this reply comes back."""
        moved = bool(text(reply, "reasoning_content")) and self.way(reply) is ReasoningForm.INLINE
        return self.puzzling or (moved and self.wrapping(reply) is None)

    def chance(self, reply: Doc) -> float:
        """Return the chance that the next turn begins with this reply, as predicted."""
        return self.calls_return if reply.get("tool_calls") else self.answers_return

    def trusting(self, other: Habit) -> Habit:
        """Return the habit with the chances of `other`."""
        return replace(self, calls_return=other.calls_return, answers_return=other.answers_return)

    def having(self, message: Doc, way: ReasoningForm) -> Habit:
        """Return the habit with another form of reasoning for messages like this one."""
        return replace(self, calling=way) if message.get("tool_calls") else replace(self, answering=way)


def returnable(reply: Doc) -> bool:
    """Whether clients send the reply back: it has content or calls, and no call's arguments are cut off."""
    calls = rows(reply.get("tool_calls"))
    return bool(words(reply).strip() or calls) and all(arguments(call) is not None for call in calls)


def guesses(habit: Habit, reply: Doc, messages: Sequence[Doc]) -> tuple[Habit, ...]:
    """Return the habits to predict with, for this reply.

    One habit if everything that matters for the reply is known, the two that differ most if not, and none if
    the habit cannot predict the reply at all.
    """
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
    """Return the first possible way, and the last one with another result, else the first one again."""
    first = ways[0]
    others = [way for way in ways if write(way) != write(first)]
    return first, others[-1] if others else first


def next_turns(habit: Habit, messages: Sequence[Doc], reply: Doc) -> Iterator[list[Doc]]:
    """Yield versions of the next turn's messages; their prompts share only the part that is certain."""
    forgotten = habit.forgets and not reply.get("tool_calls")
    history = thoughtless(messages) if forgotten else messages
    for opening in OPENINGS:
        yield [*history, *_turn(habit, messages, reply, opening)]
    if reply.get("tool_calls"):
        returned, *results = _turn(habit, messages, reply, OPENINGS[0])
        question = {"role": "user", "content": OPENINGS[0]}
        if habit.asks_before:
            yield [*messages, returned, question, *results]
        if habit.asks_after:
            yield [*messages, returned, *results, question]


def _turn(habit: Habit, messages: Sequence[Doc], reply: Doc, opening: str) -> list[Doc]:
    """Return the reply as this client sends it back, and the messages that follow it."""
    returned = echoed(habit, reply)
    calls = rows(returned.get("tool_calls"))
    if not calls:
        return [returned, {"role": "user", "content": opening}]
    named = any(message.get("role") == "tool" and "name" in message for message in messages)
    results: list[Doc] = []
    for number, call in enumerate(calls):
        if not habit.same_ids:
            call["id"] = f"{opening.strip()}{number}"
        name = {"name": table(call, "function").get("name")} if named else {}
        results.append({"role": "tool", "tool_call_id": call["id"], "content": opening, **name})
    return [returned, *results]


def echoed(habit: Habit, reply: Doc) -> Doc:
    """Return the reply as this client sends it back, with the ids that its calls had."""
    content, thought = words(reply), text(reply, "reasoning_content")
    returned: Doc = {"role": "assistant", "content": habit.content[0].of(content)}
    match habit.way(reply):
        case ReasoningForm.INLINE if thought and (wrap := habit.wrapping(reply)):
            opening, closing = wrap
            returned["content"] = opening + thought.strip() + closing + content.strip()
        case ReasoningForm.PART if thought:
            returned["content"] = [{"type": "text", "text": part} for part in (thought, content) if part]
        case ReasoningForm.KEPT if thought:
            returned["reasoning_content"] = habit.thought[0].of(thought)
        case _:
            pass
    if calls := rows(reply.get("tool_calls")):
        written = habit.arguments[0]
        returned["tool_calls"] = [
            {**call, "function": {**table(call, "function"), "arguments": written.of(call)}} for call in calls
        ]
    return returned


# -- parts of messages ---------------------------------------------------------------------------------


def words(message: Doc) -> str:
    """Return the content as one text."""
    return "\n".join(texts(message))


def texts(message: Doc) -> list[str]:
    """Return the texts of the content. The template decides whether line ends join several texts."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [text(part, "text") for part in rows(content)]
    return [part for part in parts if part]


def arguments(call: Doc) -> Doc | None:
    """Return the arguments of a call; None if they are not a complete JSON object."""
    given = table(call, "function").get("arguments")
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def thoughts(messages: Sequence[Doc]) -> int:
    """Return how many of the messages carry reasoning."""
    return sum(1 for message in messages if text(message, "reasoning_content"))


def thoughtless(messages: Sequence[Doc]) -> list[Doc]:
    return [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]


# -- a client's habit, learned from its requests and our replies -----------------------------------------

# The share of the doubt that a right prediction leaves, and of the trust that a wrong one does.
DOUBT_LEFT: Final = 0.75
TRUST_LEFT: Final = 0.5
_WRAP_LIMIT: Final = 64  # characters that a client puts before and after reasoning, in all


def usual(api: Api) -> Habit:
    """Return the habit that we assume of a new client."""
    # On /v1/messages arguments are objects; the engine itself writes them as text (engine.md 1.2).
    return Habit(arguments=(Arguments.COMPACT, Arguments.SORTED)) if api is Api.MESSAGES else Habit()


def trail(messages: Sequence[Doc]) -> tuple[bytes, ...]:
    """Return one chained digest per message, without reasoning, to recognise a conversation.

    Raises NotOurs for messages that are nested too deep.
    """
    return hash_chain({"messages": thoughtless(messages)})[1:]


def gleaned(habit: Habit, messages: Sequence[Doc]) -> Habit:
    """Return the habit with what the client's history alone shows, including replies of other servers.

    `asks_before` and `asks_after` are learned from this history only: a request for a summary also has a
    user's text among the results of tools, and no later request continues it.
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
    """Return the habit after `reply` came back as `messages[at]`. Ways that still fit stay unchanged.

    `before` is the number of messages with reasoning (`thoughts`) in the request that the reply answered.
    """
    echo = messages[at]
    if before and not thoughts(messages[:at]) and any(_asks(messages, i) for i in range(at, len(messages))):
        habit = replace(habit, forgets=True)
    calls, theirs = rows(reply.get("tool_calls")), rows(echo.get("tool_calls"))
    written = [Arguments.SAMPLED.of(call) for call in theirs]
    content, thought = words(reply), text(echo, "reasoning_content")
    fitted = replace(
        habit,
        content=_fitting(habit.content, Trim, lambda way: way.of(content) == words(echo)),
        thought=_fitting(
            habit.thought, Trim, lambda way: way.of(text(reply, "reasoning_content")) == thought
        ),
        arguments=_fitting(
            habit.arguments, Arguments, lambda way: [way.of(call) for call in calls] == written
        ),
        same_ids=_ids(calls) == _ids(theirs) if calls else habit.same_ids,
        puzzling=False,
    )
    for trial in _reasonings(fitted, reply, echo):
        if _comes_to(echoed(trial, reply)) == _comes_to(echo):
            return _completed(trial)
    return replace(habit, puzzling=True)


def follows(reply: Doc, after: Sequence[Doc]) -> bool:
    """Whether the messages after a request begin with its reply, and go on as `next_turns` expects."""
    match [message.get("role") for message in after[:2]]:
        case ["assistant", behind]:
            return bool(reply.get("tool_calls")) or behind != "tool"
        case roles:
            return roles == ["assistant"]


def judged(habit: Habit, reply: Doc, *, returned: bool) -> Habit:
    """Return the habit after the next turn began with `reply` as predicted, or did not.

    A client that sends its calls back sends answers back too. One whose user leaves an answer out may not.
    """
    if returned:
        calls, answers = (
            1.0 - (1.0 - old) * DOUBT_LEFT for old in (habit.calls_return, habit.answers_return)
        )
        return replace(habit, calls_return=calls, answers_return=answers)
    chance = habit.chance(reply) * TRUST_LEFT
    if reply.get("tool_calls"):
        return replace(habit, calls_return=chance)
    return replace(habit, answers_return=chance)


def _fitting(known: tuple[_Way, ...], ways: Iterable[_Way], fits: Callable[[_Way], bool]) -> tuple[_Way, ...]:
    """Return the known ways that fit; if none does, all ways that fit; if none does, the known ways."""
    fitting = tuple(way for way in ways if fits(way))
    return tuple(way for way in known if way in fitting) or fitting or known


def _reasonings(habit: Habit, reply: Doc, echo: Doc) -> Iterator[Habit]:
    """Yield habits with each form that the reasoning may have taken."""
    thought, content = text(reply, "reasoning_content"), words(reply).strip()
    if not thought:
        yield habit
        return
    yield habit.having(reply, ReasoningForm.KEPT)
    yield habit.having(reply, ReasoningForm.DROPPED)
    yield habit.having(reply, ReasoningForm.PART)
    opening, _, rest = words(echo).partition(thought.strip())
    wrap = (opening, rest.removesuffix(content))
    if sum(map(len, wrap)) <= _WRAP_LIMIT:
        inline = habit.having(reply, ReasoningForm.INLINE)
        yield replace(inline, wrap=wrap) if content else replace(inline, wrap_alone=wrap)


def _completed(habit: Habit) -> Habit:
    """Infer the unknown form of reasoning from the known one.

    A client that drops reasoning between calls also drops it after an answer. A client that sends the
    reasoning of an answer sends that of calls in the same form.
    """
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
    """Return the habit with the place of a user's text among the results of tools from `at` on."""
    answers = takewhile(lambda role: role != "assistant", _roles(messages, at, len(messages)))
    match list(answers):
        case ["user", *rest] if "tool" in rest:
            return replace(habit, asks_before=True)
        case ["tool", *rest] if "user" in rest:
            return replace(habit, asks_after=True)
        case _:
            return habit


def _asks(messages: Sequence[Doc], at: int) -> bool:
    """Whether `messages[at]` is a user's and begins a new turn; before the results of tools it does not."""
    return _roles(messages, at, at + 1) == ["user"] and _roles(messages, at + 1, at + 2) != ["tool"]


def _roles(messages: Sequence[Doc], start: int, end: int) -> list[Any]:
    return [message.get("role") for message in messages[start:end]]


def _ids(calls: Sequence[Doc]) -> list[Any]:
    return [call.get("id") for call in calls]


def _comes_to(message: Doc) -> tuple[Any, ...]:
    """Return the parts of a message that reach the prompt, except the ids of its calls."""
    calls = rows(message.get("tool_calls"))
    names = [table(call, "function").get("name") for call in calls]
    written = [Arguments.SAMPLED.of(call) for call in calls]
    return texts(message), text(message, "reasoning_content"), names, written

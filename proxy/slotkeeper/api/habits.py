"""Learning how a client sends replies back (api/echo.py): from what it sent, and what we saw it be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final, TypeVar

from slotkeeper.api.document import Doc, rows, table, text
from slotkeeper.api.echo import (
    Arguments,
    Habit,
    ReasoningForm,
    Trim,
    echoed,
    texts,
    thoughtless,
    thoughts,
    words,
)
from slotkeeper.api.hash_chain import hash_chain
from slotkeeper.api.routes import Api

_WRAP_LIMIT: Final = 64  # characters of what a client puts around reasoning
_Way = TypeVar("_Way", bound=StrEnum)


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

"""Scripts of sessions that stress a prefix cache as agents do (`slotkeeper.bench.target.play` plays them).

`SESSIONS` names them. Their texts are parts of Python's documentation, so no recorded prompts are needed.
`shrink` divides the length of all texts, for engines that take seconds for a hundred tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from slotkeeper.api.document import Doc
from slotkeeper.bench.target import PLAIN, Script, Turn
from slotkeeper.bench.texts import edited, prose, result, system, title

# The template's default: thinking is left out of the history before the last user message.
THINKING: Final[Mapping[str, Any]] = MappingProxyType({})
TOOL: Final[Doc] = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "enum": ["a.py", "b.py", "c.py"]}},
            "required": ["path"],
        },
    },
}
AGENTS: Final = 5  # new agents in the session "agents"
TOOLS: Final = ("read_file", "write_file", "run_tests", "find_names", "ask_user")  # the agents' tools
QUESTIONS: Final = (  # about one document: one short line each, as a form or a reader asks them
    "Which of these statements can raise an error, and when?",
    "Explain in two sentences what this text is about.",
    "What does it say about names that are not bound?",
    "Where does the text speak of something that was removed?",
    "List the three most important terms that it explains.",
    "Is anything said here about what happens at exit?",
    "Which examples does it give, and what do they show?",
    "Name one thing that a reader may misunderstand here.",
    "What would be different if names were bound later?",
    "Which part of the text is about modules?",
    "Write a title of at most ten words for it.",
)
READERS: Final = 6  # questions about the short document; the long one gets all of them


def user(number: int, characters: int = 2000) -> Doc:
    return {"role": "user", "content": f"Question {number}. " + prose(characters, 10 + number)}


def chat(
    turns: int, max_tokens: int = 64, fields: Mapping[str, Any] = PLAIN, *, shrink: int = 1
) -> Generator[Turn, Doc, list[Doc]]:
    """Yield `turns` questions, each appended to the history. Returns the whole history."""
    history = [system(prose(8000 // shrink, 1))]
    for number in range(turns):
        history.append(user(number, 2000 // shrink))
        history.append(
            (
                yield Turn(
                    label=f"turn {number + 1}", messages=tuple(history), max_tokens=max_tokens, fields=fields
                )
            )
        )
    return history


def append() -> Script:
    """Nothing ever changes."""
    yield from chat(6)


def thinking() -> Script:
    """The thinking of the last answer is left out of the next prompt."""
    yield from chat(6, max_tokens=300, fields=THINKING)


def tool_loop() -> Script:
    """Three tasks, each with three tool calls and an answer."""
    history = [system()]
    for task in range(3):
        history.append(user(task))
        for number in range(3):
            reply = yield Turn(
                label=f"task {task + 1} call {number + 1}",
                messages=tuple(history),
                max_tokens=400,
                fields={"tools": [TOOL], "tool_choice": "required"},
            )
            history += [reply, result(reply, prose(3000, 40 + 3 * task + number))]
        answer = Turn(
            label=f"task {task + 1} answer", messages=tuple(history), max_tokens=300, fields={"tools": [TOOL]}
        )
        history.append((yield answer))


def long_tools() -> list[Doc]:
    """Return tools with long descriptions, as those of coding agents: about 10,000 tokens."""
    return [
        {**TOOL, "function": {**TOOL["function"], "name": name, "description": prose(7000, 90 + number)}}
        for number, name in enumerate(TOOLS)
    ]


def clock(*, first: bool) -> Script:
    """The time of day in the system prompt, as its first or as its last line."""
    history = [system()]
    for number in range(4):
        now = f"Current time: 2026-01-01 10:0{number}:00"
        text = prose(8000, 1)
        history[0] = system(f"{now}\n{text}" if first else f"{text}\n{now}")
        history.append(user(number))
        history.append((yield Turn(label=f"turn {number + 1}", messages=tuple(history))))


def edits(*, max_tokens: int = 64, shrink: int = 1) -> Script:
    """Regenerate, edit, cut off the rest, and return to the first branch."""
    turn, length = partial(Turn, max_tokens=max_tokens), 2000 // shrink
    history = yield from chat(5, max_tokens, shrink=shrink)
    asked = tuple(history[:-1])
    yield turn(label="regenerate the last answer", messages=asked)
    text = "Edited question. " + prose(length, 77)
    yield turn(label="edit the last message", messages=edited(asked, -1, text))
    text = asked[-1]["content"] + " And one more thing."
    yield turn(label="add to the last message", messages=edited(asked, -1, text))
    text = "Edited in the middle. " + prose(length, 78)
    yield turn(label="edit message 3, cut off the rest", messages=edited(history[:6], 5, text))
    text = "Edited in the middle B. " + prose(length, 79)
    yield turn(label="edit message 3, keep the rest", messages=edited(asked, 5, text))
    yield turn(label="back to the first branch", messages=(*history, user(9, length)))


def interleaved() -> Script:
    """Two chats with one system prompt, turn by turn, and a title for the first."""
    one, other = [system()], [system()]
    for number in range(4):
        one.append(user(number))
        one.append((yield Turn(label=f"A{number + 1}", messages=tuple(one))))
        if number == 0:
            yield Turn(label="title", messages=title(one), max_tokens=16)
        other.append(user(20 + number))
        other.append((yield Turn(label=f"B{number + 1}", messages=tuple(other))))


def many_turns() -> Script:
    """More turns than the engine keeps checkpoints for, then an early edit, then back."""
    history = yield from chat(12, max_tokens=48)
    text = "Edited early. " + prose(2000, 88)
    yield Turn(label="edit message 2, cut off the rest", messages=edited(history[:4], 3, text))
    yield Turn(label="back to the first branch", messages=(*history, user(15)))


def document(characters: int, questions: Sequence[str], *, max_tokens: int = 16, shrink: int = 1) -> Script:
    """One document of this length, 3.5 characters a token; each question is a conversation of its own."""
    head, text = system(prose(1000 // shrink, 1)), prose(characters // shrink, 60)
    for number, question in enumerate(questions):
        asked = {"role": "user", "content": f"{text}\n\n{question}"}
        yield Turn(label=f"question {number + 1}", messages=(head, asked), max_tokens=max_tokens)


def agents() -> Script:
    """Five new agents with one long system prompt, and two other conversations that take the slots.

    The other conversations continue by one turn after each agent; they are the session "others".
    """
    others = [[system(prose(6000, 62 + number))] for number in range(2)]
    for number in range(AGENTS):
        yield from agent(number)
        for place, history in enumerate(others):
            history.append(user(20 * (place + 1) + number))
            label = f"{'AB'[place]}{number + 1}"
            history.append((yield Turn(label=label, messages=tuple(history), session="others")))


def agent(number: int) -> Script:
    """One agent: about 20,000 tokens of system text and tools, a task of 100 tokens, a call, an answer."""
    task = {"role": "user", "content": f"Task {number + 1}. " + prose(350, 70 + number)}
    history = [system(prose(35000, 61)), task]
    label, tools = f"agent {number + 1}", {"tools": long_tools()}
    reply = yield Turn(
        label=f"{label} call",
        messages=tuple(history),
        max_tokens=300,
        fields={**tools, "tool_choice": "required"},
    )
    history += [reply, result(reply, prose(1500, 80 + number))]
    yield Turn(label=f"{label} answer", messages=tuple(history), max_tokens=200, fields=tools)


SESSIONS: Final[Mapping[str, Callable[[], Script]]] = MappingProxyType(
    {
        "append": append,
        "thinking": thinking,
        "tool-loop": tool_loop,
        "clock-first": lambda: clock(first=True),
        "clock-last": lambda: clock(first=False),
        "edits": edits,
        "interleaved": interleaved,
        "many-turns": many_turns,
        "document": lambda: document(21_000, QUESTIONS[:READERS]),
        "long-document": lambda: document(49_500, QUESTIONS),
        "agents": agents,
    }
)

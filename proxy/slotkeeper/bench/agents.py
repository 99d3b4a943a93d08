"""The demo's session: two coding agents at work at the same time, as a small team has them.

They share the system prompt and the tools, call tools turn by turn, and their client asks for a title
in between. At the end one user rewrites his last message. All texts are ours.
"""

from __future__ import annotations

from typing import Any, Final

from slotkeeper.api.document import Doc
from slotkeeper.bench.prose import prose
from slotkeeper.bench.sessions import Script, Turn, edited, result, system, title

RULES: Final = """\
You are a careful programmer in a team. Read before you write, change as little as you can, and run the
tests before you say that something works. Say what you did in plain words. The team's handbook follows.

"""
TASKS: Final = {
    "A": ("The import fails on empty files. Find out why.", "Now write a test that would have caught it."),
    "B": ("Explain how names are looked up in this code.", "Which of these names could be made private?"),
}
REWRITTEN: Final = "Now write two tests that would have caught it, and keep them short."
SECOND_TASK: Final = "A2 call 1"  # the label of its first request
ROUNDS: Final = 3  # tool calls for each task


def tool(name: str, description: str, *arguments: str) -> Doc:
    # A closed set of values: the tiny models cannot write a path that ends by itself.
    values = {"type": "string", "enum": ["reader.py", "names.py", "tests.py"]}
    properties = dict.fromkeys(arguments, values)
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: Final = [
    tool("read_file", "Give back the text of a file of the project.", "path"),
    tool("run_tests", "Run the tests of a file and give back what they print.", "path"),
    tool("find_names", "List the names that one file takes from another.", "path", "origin"),
]
CALL: Final[dict[str, Any]] = {"tools": TOOLS, "tool_choice": "required"}
ANSWER: Final[dict[str, Any]] = {"tools": TOOLS}


def agents() -> Script:
    """Nineteen requests."""
    handbook = system(RULES + prose(16000, 1))
    histories: dict[str, list[Doc]] = {name: [handbook] for name in TASKS}
    for task in range(2):
        for name, history in histories.items():
            history.append({"role": "user", "content": f"{TASKS[name][task]}\n\n{prose(1500, 50 + task)}"})
        for number in range(ROUNDS):
            for name, history in histories.items():
                yield from _call(
                    history,
                    f"{name}{task + 1} call {number + 1}",
                    seed=ord(name) * 10 + task * ROUNDS + number,
                )
                if task == number == 0:
                    yield Turn(label=f"title for {name}", messages=title(history), max_tokens=16)
        for name, history in histories.items():
            answer = Turn(
                label=f"{name}{task + 1} answer", messages=tuple(history), max_tokens=200, fields=ANSWER
            )
            history.append((yield answer))
    yield _edit(histories["A"])


def _call(history: list[Doc], label: str, seed: int) -> Script:
    reply = yield Turn(label=label, messages=tuple(history), max_tokens=300, fields=CALL)
    history += [reply, result(reply, prose(2500, seed))]


def _edit(history: list[Doc]) -> Turn:
    """The last message of the user is rewritten: what came after it is gone."""
    last = max(at for at, message in enumerate(history) if message["role"] == "user")
    messages = edited(history[: last + 1], last, REWRITTEN)
    return Turn(label="A2 rewritten", messages=messages, max_tokens=200, fields=ANSWER)

"""Agents that rewrite their own prompts, as scripts: one for each rule that can be seen in tokens.

Each does two tasks in one conversation. Its replies are fixed texts, so requests differ only in the agent's
changes to earlier messages. `REWRITERS` names them by their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from benchmarks.pruners import CLEARED
from slotkeeper.api.document import Doc
from slotkeeper.bench.target import PLAIN, Script, Turn
from slotkeeper.bench.texts import prose, result
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.rules.base import RuleName

TASKS: Final = 2
CALLS: Final = 2  # in each task
NAMES: Final = ("read_file", "write_file", "run_tests")
COMMITS: Final = ("1a2b3c4 Import the shop", "5d6e7f8 Report what is low", "9a8b7c6 Round prices")
FILES: Final = (
    "# Conventions\n- Run the tests before you commit.",
    "# Conventions\n- Run the tests before you commit.\n- Keep lines short.",
)
BEFORE, BEHIND = prose(3000, 70), prose(5000, 71)  # the text around the place that changes

# takes the number of the task and of the request, and the plain body
Rewrite = Callable[[int, int, Doc], Doc]


@dataclass(frozen=True, slots=True)
class Rewriter:
    """One agent."""

    rule: RuleName  # the rule that undoes its change
    cause: Cause  # the cause that is reported
    rewrite: Rewrite

    def __call__(self) -> Script:
        """Return the session."""
        for number, (task, messages) in enumerate(_requests()):
            body = self.rewrite(task, number, {"tools": tools(), "messages": messages})
            fields = {**PLAIN, "tools": body["tools"]}
            label = f"task {task + 1}, request {number + 1}"
            yield Turn(label=label, messages=tuple(body["messages"]), max_tokens=8, fields=fields)


def _requests() -> Iterator[tuple[int, list[Doc]]]:
    """Yield the number of the task, and the messages of each request."""
    history: list[Doc] = [{"role": "system", "content": f"{BEFORE}\n\n{BEHIND}"}]
    for task in range(TASKS):
        history.append({"role": "user", "content": f"Task {task + 1}. {prose(800, 80 + task)}"})
        for number in range(CALLS):
            yield task, list(history)
            said = scripted_call(10 * task + number)
            history += [said, result(said, prose(1500, 90 + 10 * task + number))]
        yield task, list(history)
        history.append({"role": "assistant", "content": f"Task {task + 1} is done.\n"})


def tools() -> list[Doc]:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer", "default": 1.0}},
        "required": ["path"],
    }
    return [
        {
            "type": "function",
            "function": {"name": name, "description": prose(600, 60 + n), "parameters": parameters},
        }
        for n, name in enumerate(NAMES)
    ]


def scripted_call(number: int) -> Doc:
    arguments = f'{{"path": "shop/part{number}.py", "lines": {10 + number}}}'
    function = {"name": NAMES[0], "arguments": arguments}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "I look into it.", "tool_calls": [call]}


# -- the changes -----------------------------------------------------------------------------------------


def _in_system(write: Callable[[int, int], str]) -> Rewrite:
    """Insert into the system text a block that `write` makes from the numbers of the task and the request."""

    def rewrite(task: int, number: int, body: Doc) -> Doc:
        head = {"role": "system", "content": f"{BEFORE}\n\n{write(task, number)}\n\n{BEHIND}"}
        return {**body, "messages": [head, *body["messages"][1:]]}

    return rewrite


def _in_first_user(write: Callable[[int, int], str]) -> Rewrite:
    """Put the text of `write`, which may be empty, before the first user message."""

    def rewrite(task: int, number: int, body: Doc) -> Doc:
        head, asked, *rest = body["messages"]
        asked = {**asked, "content": write(task, number) + asked["content"]}
        return {**body, "messages": [head, asked, *rest]}

    return rewrite


def _git(task: int, _: int) -> str:
    lines = [f"git: {commit}" for commit in COMMITS[: task + 2]]
    return "\n".join(
        ["git: Current branch: main", "git: Status:", "git: (clean)", "git: Recent commits:", *lines]
    )


def _billing(_: int, number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={number:05x};"


def _nonce(_: int, number: int, body: Doc) -> Doc:
    head = {"role": "system", "content": f"{_billing(0, number)}\n{BEFORE}\n\n{BEHIND}"}
    return {**body, "messages": [head, *body["messages"][1:]]}


def _other_order(task: int, _: int, body: Doc) -> Doc:
    return {**body, "tools": body["tools"][task:] + body["tools"][:task]}


def _other_keys(task: int, _: int, body: Doc) -> Doc:
    return {**body, "tools": [_turned(tool) for tool in body["tools"]] if task else body["tools"]}


def _turned(value: Any) -> Any:
    """Return objects with their keys in reverse order."""
    if isinstance(value, dict):
        return {key: _turned(inner) for key, inner in reversed(value.items())}
    return value


def _rewritten_calls(task: int, _: int, body: Doc) -> Doc:
    """Reorder the keys in the arguments of old calls after the first task."""
    if not task:
        return body
    return {**body, "messages": [_sorted_arguments(message) for message in body["messages"]]}


def _sorted_arguments(message: Doc) -> Doc:
    calls = [
        {**call, "function": {**call["function"], "arguments": _swapped(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _swapped(arguments: str) -> str:
    first, second = arguments.strip("{}").split(", ")
    return f"{{{second}, {first}}}"


def _trimmed(_: int, number: int, body: Doc) -> Doc:
    """Trim white space at the ends of all replies, in the very last request only."""
    if number < TASKS * (CALLS + 1) - 1:
        return body
    trimmed = [
        {**message, "content": message["content"].rstrip()} if message["role"] == "assistant" else message
        for message in body["messages"]
    ]
    return {**body, "messages": trimmed}


def _pruned(task: int, number: int, body: Doc) -> Doc:
    """Remove one more of the old results at each request of the second task."""
    results = [at for at, message in enumerate(body["messages"]) if message["role"] == "tool"]
    gone = results[: max(0, number - CALLS) if task else 0]
    messages = [{**m, "content": CLEARED} if at in gone else m for at, m in enumerate(body["messages"])]
    return {**body, "messages": messages}


_DAYS: Final = ("Saturday, November 21, 2026", "Sunday, November 22, 2026")

REWRITERS: Final[Mapping[RuleName, Rewriter]] = MappingProxyType(
    {
        rewriter.rule: rewriter
        for rewriter in (
            Rewriter(RuleName.BILLING_NONCE, Cause.NONCE, _nonce),
            Rewriter(RuleName.TOOL_ORDER, Cause.TOOL_ORDER, _other_order),
            Rewriter(RuleName.SCHEMA_KEYS, Cause.KEY_ORDER, _other_keys),
            Rewriter(RuleName.TOOL_CALLS, Cause.CALL_RERENDERED, _rewritten_calls),
            Rewriter(RuleName.PRUNED_RESULTS, Cause.RESULT_PRUNED, _pruned),
            Rewriter(RuleName.TRAILING_WHITESPACE, Cause.WHITESPACE, _trimmed),
            Rewriter(
                RuleName.DATE, Cause.DATE, _in_system(lambda task, _: f"Current date: 2026-11-2{task + 1}")
            ),
            Rewriter(
                RuleName.CLOCK,
                Cause.CLOCK,
                _in_system(lambda _, number: f"Current time: 2026-11-21T10:{number:02}:00"),
            ),
            Rewriter(
                RuleName.CWD,
                Cause.CWD,
                _in_system(lambda task, _: f"Current working directory: /home/dev/shop{task}"),
            ),
            Rewriter(RuleName.GIT_STATUS, Cause.GIT_STATUS, _in_system(_git)),
            Rewriter(
                RuleName.ENVIRONMENT,
                Cause.ENVIRONMENT,
                _in_system(lambda task, _: f"Platform: linux\nShell: {('bash', 'zsh')[task]}"),
            ),
            Rewriter(
                RuleName.MEMORY_FILE,
                Cause.MEMORY_FILE,
                _in_system(
                    lambda task, _: (
                        f"Instructions from: /home/dev/shop/AGENTS.md\n{FILES[task]}\n\n"
                        "Skills provide specialized instructions and workflows."
                    )
                ),
            ),
            Rewriter(
                RuleName.COUNTDOWN,
                Cause.COUNTDOWN,
                _in_system(
                    lambda _, number: (
                        f"<system_warning>Token usage: {5000 * number}/200000; "
                        f"{200000 - 5000 * number} remaining</system_warning>"
                    )
                ),
            ),
            Rewriter(
                RuleName.REMINDERS,
                Cause.REMINDER_MOVED,
                _in_first_user(
                    lambda task, _: (
                        f"<system-reminder>\nThe current date is: {_DAYS[0]}.\n</system-reminder>\n\n"
                        * (1 - task)
                    )
                ),
            ),
        )
    }
)

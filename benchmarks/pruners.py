"""Agents that prune old results of tools, as real programs do: the requests that each would have sent.

A pruner takes the unpruned messages of each request of a session, and returns them as its agent would send
them. A result that was pruned once stays pruned. `rules/rules.py` names the sources. Recorded sessions are
short, so sizes are smaller here than in the agents, and opencode, which leaves the last two turns alone,
leaves only the present one alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from slotkeeper.api.document import Doc
from slotkeeper.bench.replay import Entry

CLEARED: Final = "[Old tool result content cleared]"
TOKEN: Final = 4  # characters, by opencode's own estimate
PROTECTED: Final = 400  # tokens of the latest results that opencode keeps; its own value is 40,000
WORTH: Final = 200  # tokens that opencode wants to free at least; its own value is 20,000
KEPT: Final = 3  # latest results to keep when all others are pruned; Qwen Code keeps 5
TRIMMED: Final = 300  # characters that OpenClaw keeps at either end; its own value is 1,500
SHORT: Final = 200  # characters: Hermes leaves such results alone, since a placeholder would save nothing

Choose = Callable[[Sequence[Doc]], Iterator[int]]  # returns the messages to prune from now on
Write = Callable[[str, str], str]  # returns the replacement for a tool's name and its result


class Pruner:
    """Prunes the results of one session."""

    def __init__(self, choose: Choose, write: Write) -> None:
        self._choose, self._write = choose, write
        self._pruned: dict[str, str] = {}  # replacements, by the ids of calls

    def __call__(self, messages: Sequence[Doc]) -> list[Doc]:
        names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
        for at in self._choose(messages):
            call, text = messages[at]["tool_call_id"], messages[at]["content"]
            if isinstance(text, str) and len(text) > SHORT:
                self._pruned.setdefault(call, self._write(names.get(call, "tool"), text))
        return [self._as_sent(message) for message in messages]

    def _as_sent(self, message: Doc) -> Doc:
        pruned = self._pruned.get(message.get("tool_call_id", ""))
        return message if pruned is None else {**message, "content": pruned}


def _results(messages: Sequence[Doc]) -> list[int]:
    return [at for at, message in enumerate(messages) if message.get("role") == "tool"]


def _after_a_turn(messages: Sequence[Doc]) -> Iterator[int]:
    """As opencode and Kilo Code: prune what is older than the latest results, if it frees enough."""
    if messages[-1]["role"] != "user":
        return
    sizes = {at: len(str(messages[at]["content"])) // TOKEN for at in _results(messages)}
    old = [at for at in sizes if sum(size for later, size in sizes.items() if later >= at) > PROTECTED]
    if sum(sizes[at] for at in old) > WORTH:
        yield from old


def _at_each_request(messages: Sequence[Doc]) -> Iterator[int]:
    """As SWE-agent and OpenHands: prune all but the latest results."""
    yield from _results(messages)[:-KEPT]


def _when_rested(messages: Sequence[Doc]) -> Iterator[int]:
    """As Claude Code and Qwen Code: prune all but the latest results, when the user sends a message."""
    if messages[-1]["role"] == "user":
        yield from _at_each_request(messages)


def _summed_up(name: str, text: str) -> str:
    return f"[{name}] gave {text.count(chr(10)) + 1} lines ({len(text):,} chars)"


def _trimmed(_: str, text: str) -> str:
    if len(text) <= 2 * TRIMMED + SHORT:
        return CLEARED
    note = f"[Tool result trimmed: kept first {TRIMMED} chars and last {TRIMMED} chars of {len(text)} chars.]"
    return f"{text[:TRIMMED]}\n...\n{text[-TRIMMED:]}\n\n{note}"


PRUNERS: Final[Mapping[str, Callable[[], Pruner]]] = MappingProxyType(
    {
        "opencode": lambda: Pruner(_after_a_turn, lambda *_: CLEARED),
        "qwen-code": lambda: Pruner(_when_rested, lambda *_: CLEARED),
        "hermes": lambda: Pruner(_at_each_request, _summed_up),
        "openclaw": lambda: Pruner(_at_each_request, _trimmed),
        "openhands": lambda: Pruner(_at_each_request, lambda *_: "<MASKED>"),
        "swe-agent": lambda: Pruner(
            _at_each_request,
            lambda _, text: f"Old environment output: ({text.count(chr(10)) + 1} lines omitted)",
        ),
    }
)


def pruned(entries: Iterable[Entry], way: str) -> Iterator[Entry]:
    """Return recorded chats as an agent that prunes in this way sends them; sub-agents are separate."""
    pruners: defaultdict[tuple[str, int], Pruner] = defaultdict(PRUNERS[way])
    for entry in entries:
        body = entry.body or {}
        agent = pruners[entry.headers.get("x-session-id", entry.session), len(body.get("tools") or ())]
        yield replace(entry, body={**body, "messages": agent(body["messages"])})

"""Agents, sub-agents and side requests of one client, mixed as in recorded sessions; the texts are ours.

They share what a rule could take for one conversation: a session id, a history, the names of tools.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slotkeeper.bench.texts import prose

Doc = dict[str, Any]
Send = Callable[[Doc], Awaitable[Doc]]

TOOLS: Final = (
    *("read", "write", "edit", "search", "list", "shell", "fetch", "plan", "remember", "ask", "agent"),
)


def tool(name: str, seed: int) -> Doc:
    properties = {key: {"type": "string", "description": prose(40, seed + n)} for n, key in enumerate("ab")}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    described = {"name": name, "description": prose(120, seed), "parameters": parameters}
    return {"type": "function", "function": described}


def keys_turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: keys_turned(inner) for key, inner in reversed(value.items())}
    return value


@dataclass
class Agent:
    """An agent that sends requests. `history` is the beginning of all of them."""

    send: Send
    system: str
    tools: Sequence[Doc]
    history: list[Doc] = field(default_factory=list)

    def sub(self, *names: str, system: str | None = None, **more: Any) -> Agent:
        """Return a sub-agent with some of the tools, in that order; it has the history so far."""
        by_name = {one["function"]["name"]: one for one in self.tools}
        found = [by_name[name] for name in names]
        return replace(
            self,
            tools=found,
            system=self.system if system is None else system,
            history=[*self.history],
            **more,
        )

    def body(self, question: str, tools: Sequence[Doc] | None = None) -> Doc:
        lead = {"role": "system", "content": self.system}
        asked = [*self.history, {"role": "user", "content": question}]
        offered = self.tools if tools is None else tools
        return {"messages": [lead, *asked], **({"tools": [*offered]} if offered else {})}

    async def asks(self, question: str, tools: Sequence[Doc] | None = None) -> None:
        body = self.body(question, tools)
        self.history = [*body["messages"][1:], await self.send(body)]


def main_agent(send: Send, seed: int) -> Agent:
    offered = [tool(name, 100 * seed + 10 * n) for n, name in enumerate(TOOLS)]
    return Agent(send, f"You are agent {seed} at work.\n\n" + prose(1000, seed), offered)


def task(seed: int) -> str:
    return prose(250, 1000 + seed)


async def qwen(send: Send, seed: int) -> None:
    """Its memory sub-agent has four of the eleven tools, in another order, and shares the history."""
    main = main_agent(send, seed)
    await main.asks(task(1))
    await main.asks(task(2))
    memory = main.sub("remember", "write", "read", "list")
    await memory.asks("What of this is to be kept for later?")
    await main.asks(task(3))
    await main.asks(task(4))


async def sub_agent_first(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    await main.sub("agent", "ask", "plan").asks(task(1))
    await main.asks(task(1))
    await main.asks(task(2))


async def another_system_text(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    await main.asks(task(1))
    other = main.sub(*TOOLS[::-1], system="You explore files for somebody else.\n\n" + prose(1000, seed + 50))
    await other.asks(task(2))
    await main.asks(task(3))
    await other.asks(task(4))
    await main.asks(task(5))


async def another_order_each_time(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    for turn in range(4):
        await main.asks(task(turn), [*main.tools[turn:], *main.tools[:turn]])


async def tools_are_added(send: Send, seed: int) -> None:
    """The tools of an MCP server that has started are put before the others."""
    main = main_agent(send, seed)
    await main.asks(task(1))
    main.tools = [tool("mcp_query", seed + 7), tool("mcp_list", seed + 8), *main.tools]
    await main.asks(task(2))
    await main.asks(task(3))
    main.tools = main.tools[2:]
    await main.asks(task(4))


async def a_title_in_between(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    titles = Agent(send, "You are a title generator. Say nothing but a title.", [])
    await titles.asks(task(1))
    await main.asks(task(1))
    await titles.asks(task(2))
    await main.asks(task(2))
    await main.asks(task(3))


async def a_memory_request_without_tools(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    await main.asks(task(1))
    await main.asks(task(2))
    await main.sub().asks("Summarise what was said, for a new session.")
    await main.asks(task(3))


async def two_sub_agents(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    await main.asks(task(1))
    one, other = main.sub("edit", "read", "shell"), main.sub("shell", "edit", "read")
    for turn in range(2):
        await one.asks(task(10 + turn))
        await other.asks(task(20 + turn))
    await main.asks(task(2))


async def a_sub_agent_with_all_tools_in_another_order(send: Send, seed: int) -> None:
    """By its tools and system text it looks like the main agent."""
    main = main_agent(send, seed)
    await main.asks(task(1))
    twin = main.sub(*TOOLS[::-1])
    await twin.asks(task(2))
    await main.asks(task(3))
    await twin.asks(task(4))
    await main.asks(task(5))


async def keys_in_another_order(send: Send, seed: int) -> None:
    """A client that resumes builds its schemas again, with their keys in another order."""
    main = main_agent(send, seed)
    await main.asks(task(1))
    main.tools = [keys_turned(one) for one in main.tools]
    await main.asks(task(2))
    memory = main.sub("remember", "read")
    await memory.asks(task(3))
    await main.asks(task(4))


async def white_space_is_trimmed(send: Send, seed: int) -> None:
    main = main_agent(send, seed)
    await main.asks(f"{task(1)}\n\n")
    main.history = [{**message, "content": message["content"].strip()} for message in main.history]
    main.system += "\n"
    await main.asks(task(2))
    await main.sub("ask", "agent").asks(task(3))
    await main.asks(task(4))


MIXES: Final = (
    *(qwen, sub_agent_first, another_system_text, another_order_each_time, tools_are_added),
    *(a_title_in_between, a_memory_request_without_tools, two_sub_agents),
    *(a_sub_agent_with_all_tools_in_another_order, keys_in_another_order, white_space_is_trimmed),
)

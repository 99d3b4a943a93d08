"""Agents, sub-agents and side requests in any order: no rule makes an engine compute more than without it.

That holds of each request, in the slots as they are then. It cannot hold of every session as a whole: what
a rule saves now changes what the slots hold, and a later request may need what is gone. Of random
sessions the sums are compared, and how many lost.

The shapes are those of recorded sessions: some of the tools, in another order, tools of an MCP server added,
another system text under the same session id, the whole history sent by another agent, and the ways in which
clients write the same thing again.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from properties.beside_stock import World

Doc = dict[str, Any]

SETTINGS = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
MORE = 64  # tokens for each conversation
NAMES = ("read", "write", "edit", "search", "shell", "plan", "ask", "agent")
SERVER = ("mcp_query", "mcp_list", "mcp_get")
WAYS = ("keys", "order", "trimmed", "arguments", "ids", "stamp", "pruned", "context")
# Which only observe by themselves.
RULES = ("pruned_results=fix", "refreshed_context=fix", "side_question=fix")
CONTEXT = 3 << 10  # tokens of a slot: long sessions outgrow what is put back and what notes add
TITLES = "You are a title generator. Answer with nothing but a title of at most five words."
SESSION = {"x-session-id": "one", "User-Agent": "agent/1"}


def words(seed: object, count: int) -> str:
    chance = Random(str(seed))
    return " ".join(f"w{chance.randrange(1 << 20)}" for _ in range(count))


def tool(name: str) -> Doc:
    properties = {key: {"type": "string", "description": words((name, key), 4)} for key in ("path", "text")}
    parameters = {"type": "object", "properties": properties, "required": ["path", "text"]}
    return {
        "type": "function",
        "function": {"name": name, "description": words(name, 12), "parameters": parameters},
    }


def turned(value: Any) -> Any:
    return (
        {key: turned(inner) for key, inner in reversed(value.items())} if isinstance(value, dict) else value
    )


@dataclass
class Talk:
    """One agent's conversation."""

    system: str
    tools: list[str]
    history: list[Doc] = field(default_factory=list)


class SessionsMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 3))
    def build(self, slots: int) -> None:
        self.slots = slots
        self.ours, self.stock = World(*RULES, slots=slots, context=CONTEXT), World("all=off", slots=slots)
        self.talks: list[Talk] = []
        self.sent: list[tuple[Doc, Doc]] = []  # requests and their replies
        self.asked = 0

    # -- who asks ------------------------------------------------------------------------------------------

    @rule(system=st.integers(0, 1))
    def begin(self, system: int) -> None:
        if len(self.talks) < 4:
            self.talks.append(Talk(self.main_text(system), list(NAMES)))
            self.turn(self.talks[-1], frozenset(), 0)

    @precondition(lambda self: self.talks)
    @rule(which=st.integers(0, 7), ways=st.frozensets(st.sampled_from(WAYS)), seed=st.integers(0, 3))
    def asks(self, which: int, ways: frozenset[str], seed: int) -> None:
        self.turn(self.talks[which % len(self.talks)], ways, seed)

    @precondition(lambda self: 0 < len(self.talks) < 8)
    @rule(
        which=st.integers(0, 7),
        names=st.permutations(NAMES),
        count=st.integers(0, len(NAMES)),
        knows=st.booleans(),
        same=st.booleans(),
    )
    def sub_agent(self, which: int, names: list[str], count: int, knows: bool, same: bool) -> None:
        main = self.talks[which % len(self.talks)]
        system = main.system if same else words(("explorer", which), 60)
        self.talks.append(Talk(system, names[:count], deepcopy(main.history) if knows else []))
        self.turn(self.talks[-1], frozenset(), 0)

    @precondition(lambda self: self.talks)
    @rule(which=st.integers(0, 7), count=st.integers(0, 3), at=st.integers(0, 8))
    def tools_of_a_server(self, which: int, count: int, at: int) -> None:
        """Add or remove the tools of an MCP server."""
        talk = self.talks[which % len(self.talks)]
        talk.tools = [name for name in talk.tools if name not in SERVER]
        talk.tools[at:at] = SERVER[:count]

    @precondition(lambda self: self.talks)
    @rule(which=st.integers(0, 7), kind=st.sampled_from(["title", "memory", "suggestion", "again"]))
    def side_request(self, which: int, kind: str) -> None:
        talk = self.talks[which % len(self.talks)]
        asked = [m for m in talk.history if m["role"] == "user"][-1:]
        match kind:
            case "title":
                self.send(Talk(TITLES, [], asked))
            case "memory":
                question = {"role": "user", "content": "What of this is worth to be remembered?"}
                self.send(Talk(talk.system, talk.tools[::-2], [*talk.history, question]))
            case "suggestion":
                question = {"role": "user", "content": "[SUGGESTION MODE: Suggest what the user might type.]"}
                self.send(Talk(talk.system, talk.tools, [*talk.history, question]))
            case _:
                self.send(Talk(talk.system, talk.tools, talk.history[:-1]))

    # -- how it is written ---------------------------------------------------------------------------------

    def main_text(self, system: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2; cch=00000;{words(('main', system), 120)}\n"

    def turn(self, talk: Talk, ways: frozenset[str], seed: int) -> None:
        self.asked += 1
        talk.history.append({"role": "user", "content": words(self.asked, 12) + "\n\n"})
        reply = self.send(talk, ways, seed)
        talk.history.append(reply)
        for call in reply.get("tool_calls", ()):
            answer = {"role": "tool", "tool_call_id": call["id"], "content": words(call["id"], 15)}
            talk.history.append(answer)

    def send(self, talk: Talk, ways: frozenset[str] = frozenset(), seed: int = 0) -> Doc:
        """Send the same request to both worlds; both give the same reply."""
        chance = Random(f"{seed}/{self.asked}")
        system, tools = talk.system, [tool(name) for name in talk.tools]
        if "stamp" in ways:
            system = system.replace("cch=00000", f"cch={chance.randrange(16**5):05x}")
        if "context" in ways:
            known = chance.sample(range(8), chance.randrange(1, 5))
            system += "\n".join(("<known>", *(f"- {words(('known', n), 12)}" for n in known), "</known>"))
        if "order" in ways:
            chance.shuffle(tools)
        if "keys" in ways:
            tools = [turned(one) for one in tools]
        if "trimmed" in ways:
            system = system.strip()
        messages = [
            {"role": "system", "content": system},
            *(self.written(m, ways, seed) for m in talk.history),
        ]
        doc = {"messages": messages, **({"tools": tools} if tools else {})}
        reply = self.reply()
        self.sent.append((doc, reply))
        for world in (self.ours, self.stock):
            ask(world, doc, reply)
        return reply

    def written(self, message: Doc, ways: frozenset[str], seed: int) -> Doc:
        message = deepcopy(message)
        if "trimmed" in ways:
            message["content"] = message["content"].strip()
        if "pruned" in ways and "tool_call_id" in message and Random(message["content"]).randrange(4) >= seed:
            message["content"] = "<MASKED>"
        if "ids" in ways and "tool_call_id" in message:
            message["tool_call_id"] += f"_{seed}"
        for call in message.get("tool_calls", ()):
            if "ids" in ways:
                call["id"] += f"_{seed}"
            if "arguments" in ways:
                given = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(given, separators=(",", ":"))
        return message

    def reply(self) -> Doc:
        self.asked += 1
        said: Doc = {"role": "assistant", "content": words(self.asked, 8) + "\n"}
        if self.asked % 2:
            arguments = json.dumps({"path": words(("path", self.asked), 2), "limit": 40, "all": True})
            function = {"name": "read", "arguments": arguments}
            said["tool_calls"] = [{"id": f"call_{self.asked}", "type": "function", "function": function}]
        return said


class EachRequestMachine(SessionsMachine):
    """Compare each request that a rule has changed with the same request unchanged, in the same slots."""

    def send(self, talk: Talk, ways: frozenset[str] = frozenset(), seed: int = 0) -> Doc:
        fixed = self.ours.fixed
        reply = super().send(talk, ways, seed)
        if self.ours.fixed > fixed:
            assert self.ours.work <= self.unchanged().work
        return reply

    def unchanged(self) -> World:
        """Return the same world, but no rule changes the last request."""
        world = World(*RULES, slots=self.slots, context=CONTEXT)
        for doc, reply in self.sent[:-1]:
            ask(world, doc, reply)
        world.without_rules()
        ask(world, *self.sent[-1])
        return world


def ask(world: World, doc: Doc, reply: Doc) -> None:
    world.ask(deepcopy(doc), deepcopy(reply), **SESSION)


TestEachRequest = EachRequestMachine.TestCase
TestEachRequest.settings = SETTINGS


def a_session(seed: int) -> SessionsMachine:
    """Return a world after up to 25 random steps of the machine above."""
    chance, world = Random(seed), SessionsMachine()
    world.build(chance.randint(1, 3))
    world.begin(chance.randint(0, 1))
    for _ in range(chance.randint(4, 24)):
        which = chance.randint(0, 7)
        match chance.choice(["begin", "asks", "asks", "asks", "server", "side", "side", "agent"]):
            case "begin":
                world.begin(chance.randint(0, 1))
            case "asks":
                ways = frozenset(way for way in WAYS if chance.random() < 0.3)
                world.asks(which, ways, chance.randint(0, 3))
            case "server":
                world.tools_of_a_server(which, chance.randint(0, 3), chance.randint(0, 8))
            case "side":
                world.side_request(which, chance.choice(["title", "memory", "suggestion", "again"]))
            case "agent" if len(world.talks) < 8:
                names = chance.sample(NAMES, len(NAMES))
                knows, same = chance.random() < 0.5, chance.random() < 0.5
                world.sub_agent(which, names, chance.randint(0, len(NAMES)), knows, same)
    return world


def test_over_many_sessions_rules_save_tokens_and_at_most_one_session_costs_more():
    worlds = [a_session(seed) for seed in range(100)]
    assert sum(world.ours.work for world in worlds) < 0.8 * sum(world.stock.work for world in worlds)
    dearer = [world for world in worlds if world.ours.work > world.stock.work + MORE * len(world.talks)]
    assert len(dearer) <= 1


def test_a_rule_that_saves_tokens_now_may_cost_tokens_later():
    """Why no rule saves in every session: one conversation keeps its slot, so another one loses its own."""
    world = SessionsMachine()
    world.build(2)
    world.begin(0)
    world.tools_of_a_server(0, 1, 7)
    world.asks(0, frozenset({"keys", "order"}), 0)
    world.side_request(0, "suggestion")
    assert world.ours.work < world.stock.work - 600
    world.side_request(0, "title")
    world.begin(0)  # the tools as they were first, which lay in the slot that the title took
    assert world.stock.work + MORE * 2 < world.ours.work < 1.1 * world.stock.work


def test_rules_change_requests_in_these_sessions():
    """Otherwise the property above would show nothing."""
    world = SessionsMachine()
    world.build(2)
    world.begin(0)
    for seed, way in enumerate(WAYS * 2):
        world.asks(0, frozenset([way]), seed)
    assert world.ours.fixed > 4
    assert world.ours.work < 0.7 * world.stock.work


def test_tools_are_not_reordered_for_a_short_prefix_of_another_conversation():
    """The last agent shares the order of the one before, and must find that in the slot."""
    world = SessionsMachine()
    world.build(1)
    world.begin(0)
    world.sub_agent(0, ["read", "shell", "ask", "plan", "write"], 5, knows=False, same=True)
    world.begin(0)  # it shares one tool with the order that the second agent sent first
    world.sub_agent(0, ["plan", "ask", "shell", "read", "write"], 5, knows=True, same=True)
    world.sub_agent(0, ["plan", "ask", "shell", "read"], 4, knows=False, same=False)
    assert world.ours.work == world.stock.work

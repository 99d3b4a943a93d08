"""Side questions: the agent's own head and history, then the client's instructions, and no call of a tool."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.causes import explain
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.layout import Layout, Match, Who
from slotkeeper.conversation.likeness import Conversations, RequestKind, calls_of
from slotkeeper.conversation.rules.apply import RULES, Outcome, canonical
from slotkeeper.conversation.rules.aside import INSTEAD, NO_CALLS, WITHOUT
from slotkeeper.conversation.rules.base import ASIDE, Mode, Room, RuleName
from unit.conversation.rules.sessions import noted
from unit.conversation.talks import DONE, HISTORY, NEXT, SYSTEM, TOOLS, reply, result, system, tool, user

Doc = dict[str, Any]

ME = Who("key/agent")
HEAD = system()
CHAT = [*HISTORY, DONE]  # with the reply to the agent's last request
RECAP = "Write a recap of the conversation, of at most three sentences. Use no markdown."
ASKED = user("Recap now.")
SUMMARIZER = "You are a helpful AI assistant tasked with summarizing conversations."
FIRST = user("Fix the bug in the parser, and add a test for it.")


class Client:
    """A client whose requests go through all rules, with an index of its conversations."""

    def __init__(self, api: Api = Api.CHAT, mode: Mode = Mode.FIX) -> None:
        self._api, self._mode = api, mode
        self._book = Conversations()
        self._at = 0.0
        self.match = Match(None)
        self.room: Room | None = None

    def sends(self, body: Doc, answer: Doc | None = None) -> Outcome:
        """Return the request as it is sent; the engine then gives this answer."""
        untouched = deepcopy(body)
        received = self._laid_out(body)
        self._at += 1
        self.match = self._book.find(ME, received)
        modes = {rule.name: self._mode for rule in RULES}
        more: dict[str, Any] = {"lay_out": self._laid_out, "room": self.room}
        outcome = canonical(body, received, self.match, rules=RULES, modes=modes, **more)
        assert body == untouched
        line = self._book.saw(
            self.match,
            ME,
            received=received,
            sent=outcome.layout,
            notes=outcome.notes,
            now=self._at,
            rules=outcome.fixed,
        )
        if answer is not None:
            self._book.replied(line, answer)
        return outcome

    def explains(self, body: Doc) -> tuple[RequestKind, Cause | None, RuleName | None]:
        layout = self._laid_out(body)
        found = explain(self._book.find(ME, layout), layout)
        return found.kind, found.cause, found.rule

    def _laid_out(self, body: Doc) -> Layout:
        layout = lay_out(self._api, deepcopy(body))
        assert layout is not None
        return layout


def agent(*more: Doc, **options: Any) -> Doc:
    """Return a request of the agent."""
    return {"messages": [HEAD, *HISTORY, *more], "tools": TOOLS, **options}


def recap(*history: Doc, **options: Any) -> Doc:
    """Return a side question, with another system text and without tools."""
    return {"messages": [system(RECAP), *history, ASKED], **options}


def beside(body: Doc, *, before: Doc | None = None, mode: Mode = Mode.FIX, api: Api = Api.CHAT) -> Outcome:
    """Return what is sent for a request after one of the agent, which got DONE as its answer."""
    client = Client(api, mode)
    client.sends(agent() if before is None else before, DONE)
    return client.sends(body)


def sides(outcome: Outcome) -> list[RuleName]:
    return [done.rule for done in outcome.done if done.rule is RuleName.SIDE_QUESTION]


# -- chat completions -----------------------------------------------------------------------------------


def test_a_recap_goes_behind_the_agents_head_and_history_with_all_that_its_client_says():
    sent = beside(recap(*CHAT, max_tokens=99)).doc
    *before, asked = sent["messages"]
    assert before == [HEAD, *CHAT]
    assert asked["role"] == "user"
    assert asked["content"] == f"Recap now.\n\n{NO_CALLS}\n{INSTEAD}\n{RECAP}"
    assert (sent["tools"], sent["tool_choice"], sent["max_tokens"]) == (TOOLS, "none", 99)


def test_a_client_that_only_leaves_out_its_tools_gets_them_back_and_no_call():
    body = {"messages": [HEAD, *CHAT, ASKED], "tool_choice": "auto", "parallel_tool_calls": False}
    sent = beside(body).doc
    assert sent["messages"] == [HEAD, *CHAT, user(f"Recap now.\n\n{NO_CALLS}")]
    assert (sent["tools"], sent["tool_choice"]) == (TOOLS, "none")


def test_with_no_system_text_the_agents_instructions_are_said_not_to_count():
    sent = beside({"messages": [*CHAT, ASKED]}).doc
    assert sent["messages"][0] == HEAD
    assert sent["messages"][-1]["content"] == f"Recap now.\n\n{NO_CALLS}\n{WITHOUT}"


def test_without_tools_on_both_sides_only_the_instructions_change():
    sent = beside(recap(*CHAT), before={"messages": [HEAD, *HISTORY]}).doc
    assert sent["messages"][-1]["content"] == f"Recap now.\n\n{INSTEAD}\n{RECAP}"
    assert "tool_choice" not in sent
    assert not sent.get("tools")


def test_what_a_client_says_of_the_answer_stays():
    format_ = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    options = {"response_format": format_, "reasoning_effort": "low", "temperature": 0}
    sent = beside(recap(*CHAT, **options), before=agent(reasoning_effort="high")).doc
    assert {key: sent[key] for key in options} == options


def test_options_of_the_template_that_the_client_leaves_out_are_the_agents():
    before = agent(reasoning_effort="high", chat_template_kwargs={"a": 1}, response_format={"type": "text"})
    sent = beside(recap(*CHAT), before=before).doc
    assert (sent["reasoning_effort"], sent["chat_template_kwargs"]) == ("high", {"a": 1})
    assert "response_format" not in sent


def test_the_history_is_as_the_engine_has_it():
    """The client wrote it anew: other ids, no reasoning, shorter results; a note told the agent the date."""
    client = Client()
    client.sends(agent())
    tomorrow = system(SYSTEM.replace("Sat Nov 21", "Sun Nov 22"))
    last = client.sends({"messages": [tomorrow, *CHAT, NEXT], "tools": TOOLS}, reply("Written."))
    assert noted(last.doc["messages"][-1]["content"])
    written = deepcopy([*CHAT, NEXT])
    written[1]["tool_calls"][0]["id"] = written[2]["tool_call_id"] = "call_other"
    sent = client.sends(recap(*written, reply("Written."))).doc
    assert sent["messages"][:-2] == last.doc["messages"]


def test_one_reply_is_enough_if_the_request_brings_it():
    first = {"messages": [HEAD, FIRST], "tools": TOOLS}
    body = {"messages": [FIRST, DONE, user("Recap.")]}
    assert beside(body, before=first).doc["messages"][0] == HEAD
    other = {"messages": [FIRST, reply("Something else."), user("Recap.")]}
    assert beside(other, before=first).doc is other


def test_only_a_part_of_the_history_is_enough():
    sent = beside(recap(*HISTORY[:3])).doc
    assert sent["messages"][:-1] == [HEAD, *HISTORY[:3]]


def test_a_question_without_room_for_its_answer_goes_as_it_came():
    client = Client()
    client.room = Room(3200)
    client.sends(agent(), DONE)
    assert client.sends(recap(*CHAT)).most == 3200 - 3200 // ASIDE
    client.room = Room(3200, asked=50)
    assert client.sends(recap(*CHAT)).most == 3200 - 50


# -- other APIs -----------------------------------------------------------------------------------------


def items(*lead: str) -> list[Doc]:
    return [
        *({"type": "message", "role": "developer", "content": [text(one)]} for one in lead),
        {"type": "message", "role": "user", "content": [text("Fix the parser.")]},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"path":"a"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "1: import os\n" * 40},
    ]


def text(said: str) -> Doc:
    return {"type": "input_text", "text": said}


FUNCTIONS = [{"type": "function", **one["function"]} for one in TOOLS] + [{"type": "web_search"}]
QUESTION = {"type": "message", "role": "user", "content": [text("Recap now.")]}


def test_codex_gets_its_tools_back_on_responses():
    before = {"input": items(SYSTEM, "Skills."), "tools": FUNCTIONS, "tool_choice": "auto"}
    body = {"input": [*items(SYSTEM, "Skills."), QUESTION], "tools": [], "tool_choice": "auto"}
    sent = beside(body, before=before, api=Api.RESPONSES).doc
    assert sent["input"][:-1] == before["input"]
    assert sent["input"][-1]["content"] == [text(f"Recap now.\n\n{NO_CALLS}")]
    assert (sent["tools"], sent["tool_choice"]) == (FUNCTIONS, "none")


@pytest.mark.parametrize("lead", [(), ("Skills.",)])
def test_instructions_on_responses_are_the_agents_and_the_clients_follow(lead):
    before = {"instructions": SYSTEM, "input": items(*lead), "tools": FUNCTIONS}
    body = {"instructions": RECAP, "input": [*items("Be brief."), QUESTION]}
    sent = beside(body, before=before, api=Api.RESPONSES).doc
    assert (sent["instructions"], sent["input"][:-1]) == (SYSTEM, before["input"])
    assert sent["input"][-1]["content"] == [text(f"Recap now.\n\n{NO_CALLS}\n{INSTEAD}\n{RECAP}\nBe brief.")]


def test_a_field_beside_the_list_that_the_agent_does_not_have_cannot_be_taken_out():
    before = {"input": items(SYSTEM), "tools": FUNCTIONS}
    body = {"instructions": RECAP, "input": [*items(), QUESTION]}
    assert beside(body, before=before, api=Api.RESPONSES).doc is body


BLOCKS = [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "Skills."}]
INPUTS: list[Doc] = [
    {"name": name, "description": f"Call {name}.", "input_schema": {}} for name in ("read", "edit")
]
TALK = [
    user("Fix the parser."),
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {}}]},
    user([{"type": "tool_result", "tool_use_id": "1", "content": "1: import os\n" * 40}]),
]


def spoken(instructions: Any, *more: Doc, tools: list[Doc] | None = None) -> Doc:
    offered = {} if tools is None else {"tools": tools}
    return {"system": instructions, "messages": [*TALK, *more], "max_tokens": 9, **offered}


def test_a_summary_on_messages_keeps_the_agents_blocks_and_the_tool_with_which_it_calls_nothing():
    body = spoken(SUMMARIZER, ASKED, tools=INPUTS[:1])
    sent = beside(body, before=spoken(BLOCKS, tools=INPUTS), api=Api.MESSAGES).doc
    assert (sent["system"], sent["tools"], sent["messages"][:-1]) == (BLOCKS, INPUTS, TALK)
    assert sent["messages"][-1] == user(f"Recap now.\n\n{NO_CALLS}\n{INSTEAD}\n{SUMMARIZER}")
    assert "tool_choice" not in sent


def test_other_instructions_with_the_same_tools_on_messages():
    sent = beside(spoken(RECAP, ASKED, tools=INPUTS), before=spoken(SYSTEM, tools=INPUTS), api=Api.MESSAGES)
    assert sent.doc["messages"][-1] == user(f"Recap now.\n\n{INSTEAD}\n{RECAP}")


def test_where_calls_cannot_be_forbidden_a_client_without_tools_gets_none():
    body = spoken(SUMMARIZER, ASKED)
    assert beside(body, before=spoken(SYSTEM, tools=INPUTS), api=Api.MESSAGES).doc is body


# -- what is no side question ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [system(RECAP), FIRST, ASKED]},  # no reply
        {"messages": [system(RECAP * 60), *CHAT, ASKED]},  # mostly something else
        {**recap(*CHAT), "tools": [tool("write", path="string")]},  # calls a tool that the agent lacks
        {**recap(*CHAT), "tools": TOOLS[:1]},  # may call one, but not the others
        {"messages": [system(RECAP), user("Something else."), *CHAT[1:], ASKED]},
        {"messages": [HEAD, *CHAT, NEXT], "tools": TOOLS},
    ],
)
def test_no_side_question_goes_as_it_came(body):
    outcome = beside(body)
    assert outcome.doc is body
    assert not sides(outcome)


def test_an_observed_side_question_is_reported_and_not_changed():
    body = recap(*CHAT)
    outcome = beside(body, mode=Mode.OBSERVE)
    assert outcome.doc is body
    assert sides(outcome) == [RuleName.SIDE_QUESTION]


def test_its_cause_and_rule_are_reported():
    client = Client()
    client.sends(agent(), DONE)
    told = (RequestKind.SIDE, Cause.SIDE_QUESTION, RuleName.SIDE_QUESTION)
    assert client.explains(recap(*CHAT)) == told


# -- afterwards -----------------------------------------------------------------------------------------


def test_the_agent_goes_on_with_its_own_conversation():
    client = Client()
    client.sends(agent(), DONE)
    client.sends(recap(*CHAT), reply("A recap."))
    body = {"messages": [HEAD, *CHAT, NEXT], "tools": TOOLS}
    assert client.sends(body).doc is body
    assert client.match.remembered is not None
    assert not client.match.remembered.aside


def test_a_second_question_is_asked_of_the_agent_too():
    client = Client()
    client.sends(agent(), DONE)
    client.sends(recap(*CHAT), reply("A recap."))
    client.sends({"messages": [HEAD, *CHAT, NEXT], "tools": TOOLS}, reply("Written."))
    sent = client.sends(recap(*CHAT, NEXT, reply("Written."))).doc
    assert sent["messages"][:-1] == [HEAD, *CHAT, NEXT, reply("Written.")]


def test_a_client_that_goes_on_with_its_question_goes_on_behind_the_agents_head():
    client = Client()
    client.sends(agent(), DONE)
    first = client.sends(recap(*CHAT), reply("A recap.")).doc
    more = [reply("A recap."), user("Shorter.")]
    then = client.sends({"messages": [*recap(*CHAT)["messages"], *more]}).doc
    assert then["messages"] == [*first["messages"], *more]
    assert (then["tools"], then["tool_choice"]) == (TOOLS, "none")


def test_calls_of_the_agents_replies_keep_their_text():
    given = reply(read='{ "path":"src/writer.py" }')
    client = Client()
    client.sends(agent(DONE, NEXT), given)
    assert [*calls_of(given)] == ["call_read"]
    rewritten = reply(read={"path": "src/writer.py"})
    sent = client.sends(recap(*CHAT, NEXT, rewritten, result("read", "1: import csv"))).doc
    assert sent["messages"][-3]["tool_calls"][0]["function"]["arguments"] == '{ "path":"src/writer.py" }'

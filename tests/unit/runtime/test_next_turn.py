"""The predicted prefix of the next turn: the next prompt really begins with it, or there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import UNNAMED
from slotkeeper.engine.answers import EngineError
from slotkeeper.runtime.render import LARGEST, NextTurns, Recent, TurnRenderer, with_reply
from slotkeeper.scheduler.prompts.tokens import Tokens
from unit.runtime.stubs import StubLink, asked

Message = dict[str, Any]

ASKED: list[Message] = [{"role": "user", "content": "Look."}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
ANSWER: Message = {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."}
CALL: Message = {**ANSWER, "content": "", "tool_calls": CALLS}
RESULT: Message = {"role": "tool", "tool_call_id": "c", "content": "README"}
NEXT: Message = {"role": "user", "content": "And now?"}


class Template(StubLink):
    """Renders a chat as letters. `strips`: no reasoning before the last user message."""

    def __init__(self, *, strips: bool = False) -> None:
        super().__init__()
        self.strips = strips
        self.refuses: Exception | None = None

    async def render_chat(self, chat: Any, auth: Any) -> Tokens:
        self.rendered.append((chat, auth))
        if self.refuses:
            raise self.refuses
        return Tokens(map(ord, self.text(chat["messages"])))

    def text(self, messages: list[Message]) -> str:
        last = max(at for at, message in enumerate(messages) if message["role"] == "user")
        text = ""
        for at, message in enumerate(messages):
            thought = message.get("reasoning_content", "") if at > last or not self.strips else ""
            calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
            text += f"<{message['role']}>({thought}){message['content'] or ''}{calls or ''}|"
        return text + "<assistant>"


def drops(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


class Program:
    """One program's requests; `said` returns the prediction as text."""

    def __init__(self, turns: NextTurns, link: Template, client: str = "a") -> None:
        self.turns, self.link, self.client = turns, link, client

    async def said(self, messages: list[Message], reply: Message, copies: int = 1) -> str | None:
        request = asked(claim=replace(UNNAMED, copies=copies), chat={"messages": messages, "tools": []})
        begins = await self.turns.prefix(
            self.link, request, reply, client=self.client, auth={"X-Api-Key": "k"}
        )
        return None if begins is None else "".join(map(chr, begins))


@pytest.fixture
def turns() -> NextTurns:
    return NextTurns()


async def test_a_template_that_strips_reasoning_makes_the_next_turn_certain(turns):
    link = Template(strips=True)
    assert await Program(turns, link).said(ASKED, ANSWER) == "<user>()Look.|<assistant>()Done.|<user>()"
    assert len(link.rendered) == 4
    assert all(auth == {"X-Api-Key": "k"} for _, auth in link.rendered)
    assert all(chat["tools"] == [] for chat, _ in link.rendered)


@pytest.mark.parametrize("send_back", [dict, drops], ids=["kept", "dropped"])
@pytest.mark.parametrize(("reply", "after"), [(ANSWER, NEXT), (CALL, RESULT)], ids=["answer", "call"])
async def test_nothing_is_predicted_until_the_habit_of_the_client_is_known(turns, send_back, reply, after):
    link = Template()
    talk = Program(turns, link)
    assert await talk.said(ASKED, reply) is None
    history = [*ASKED, send_back(reply), after]
    link.rendered.clear()
    said = await talk.said(history, reply)
    assert len(link.rendered) == 2
    real = link.text([*history, send_back(reply), after])
    assert said == real[: real.rindex(after["content"])]


async def test_the_turn_after_a_reply_without_reasoning_is_predicted_without_a_known_habit(turns):
    link = Template()
    assert (
        await Program(turns, link).said(ASKED, drops(ANSWER)) == "<user>()Look.|<assistant>()Done.|<user>()"
    )
    assert len(link.rendered) == 2


async def test_the_habit_of_one_client_is_not_used_for_another(turns):
    link = Template()
    one, other = Program(turns, link, "a"), Program(turns, link, "b")
    await one.said(ASKED, ANSWER)
    assert await one.said([*ASKED, ANSWER, NEXT], ANSWER) is not None
    assert await other.said([*ASKED, drops(ANSWER), NEXT], ANSWER) is None


async def test_the_habit_of_a_conversation_precedes_that_of_its_client(turns):
    """Two programs use one key."""
    link = Template()
    talk = Program(turns, link)
    other = [{"role": "user", "content": "Other."}]
    await talk.said(ASKED, ANSWER)
    keeping = [*ASKED, ANSWER, NEXT]
    await talk.said(keeping, ANSWER)
    await talk.said(other, ANSWER)
    dropping = [*other, drops(ANSWER), NEXT]
    said = await talk.said(dropping, ANSWER)
    assert said == link.text([*dropping, drops(ANSWER), NEXT]).removesuffix("And now?|<assistant>")
    dropping += [drops(ANSWER), NEXT]
    await talk.said(dropping, drops(ANSWER))  # nothing is to be learned from this turn
    keeping += [ANSWER, NEXT]
    said = await talk.said(keeping, ANSWER)
    assert said == link.text([*keeping, ANSWER, NEXT]).removesuffix("And now?|<assistant>")
    dropping += [drops(ANSWER), NEXT]
    said = await talk.said(dropping, ANSWER)
    assert said == link.text([*dropping, drops(ANSWER), NEXT]).removesuffix("And now?|<assistant>")


@pytest.mark.parametrize(
    ("messages", "reply", "more"),
    [
        ([*ASKED, {"role": "assistant", "content": "The answer is"}], drops(ANSWER), {}),
        (ASKED, drops(ANSWER), {"copies": 2}),
        (ASKED, {"role": "assistant", "content": ""}, {}),
        ([], drops(ANSWER), {}),
    ],
    ids=["prefilled", "two at once", "nothing was said", "no messages"],
)
async def test_some_turns_cannot_be_predicted(turns, messages, reply, more):
    link = Template()
    assert await Program(turns, link).said(messages, reply, **more) is None
    assert link.rendered == []


async def test_a_refused_render_raises_and_keeps_what_was_learned(turns):
    link = Template()
    talk = Program(turns, link)
    link.refuses = EngineError(500, "template")
    with pytest.raises(EngineError):
        await talk.said(ASKED, ANSWER)
    link.refuses = None
    assert await talk.said([*ASKED, ANSWER, NEXT], ANSWER) is not None


async def test_a_reply_that_is_too_long_teaches_no_habit(turns):
    link = Template()
    talk = Program(turns, link)
    long = {**ANSWER, "content": "x" * LARGEST}
    await talk.said(ASKED, long)
    assert repr(turns) == "<NextTurns 1 clients, 0 replies>"
    assert await talk.said([*ASKED, drops(long), NEXT], ANSWER) is None


async def test_only_the_newest_clients_and_replies_are_remembered():
    turns = NextTurns(clients=2, replies=3)
    link = Template(strips=True)
    for number in range(5):
        await Program(turns, link, str(number)).said(ASKED, ANSWER)
    assert repr(turns) == "<NextTurns 2 clients, 3 replies>"


def test_a_key_that_is_put_again_becomes_the_newest():
    recent: Recent[str, int] = Recent(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        recent.put(key, value)
    assert [recent.get(key) for key in "abc"] == [3, None, 4]
    assert len(recent) == 2


PLAIN = drops(ANSWER)
MORE = {"role": "user", "content": "More."}


def chance(turns: NextTurns, reply: Message = PLAIN) -> float:
    return turns.chance("a", Api.CHAT, reply)


async def test_each_reply_that_comes_back_makes_the_next_prediction_more_likely(turns):
    talk, history, chances = Program(turns, Template()), [*ASKED], []
    for turn in range(6):
        await talk.said(history, PLAIN)
        chances.append(chance(turns))
        history += [PLAIN, {**NEXT, "content": f"And {turn}?"}]
    assert chances[0] == 0.5
    assert chances == sorted(set(chances))
    assert 0.8 < chances[-1] < 1.0


@pytest.mark.parametrize(
    "then",
    [
        [*ASKED],  # the user has it answered again
        [*ASKED, MORE],  # and leaves the answer out
        [*ASKED, {**PLAIN, "content": "Rewritten."}, MORE],
        [*ASKED, PLAIN, RESULT],  # of a call that it did not make
        [{"role": "user", "content": "Found: a cat."}, PLAIN, MORE],  # the question is written anew
    ],
    ids=["again", "left out", "rewritten", "result", "wrapped"],
)
async def test_a_reply_that_does_not_come_back_makes_the_next_prediction_less_likely(turns, then):
    talk = Program(turns, Template())
    await talk.said(ASKED, PLAIN)
    await talk.said(then, {**PLAIN, "content": "Again."})
    assert chance(turns) == 0.25


async def test_a_reply_is_judged_once_however_many_requests_contain_it(turns):
    talk = Program(turns, Template())
    await talk.said(ASKED, PLAIN)
    for question in ("And now?", "A title, please.", "Follow-up questions, please."):
        await talk.said([*ASKED, PLAIN, {**NEXT, "content": question}], {**PLAIN, "content": question})
    assert chance(turns) == 0.625


async def test_the_result_of_a_call_is_likely_from_the_start_and_its_absence_tells_nothing_of_answers(turns):
    talk = Program(turns, Template())
    await talk.said(ASKED, CALL)
    assert chance(turns, CALL) == 0.9
    await talk.said([*ASKED, MORE], PLAIN)
    assert (chance(turns, CALL), chance(turns)) == (0.45, 0.5)


async def test_calls_that_come_back_make_it_likely_that_the_answer_behind_them_does(turns):
    talk, history = Program(turns, Template()), [*ASKED]
    for number in range(3):
        await talk.said(history, CALL)
        history += [CALL, {**RESULT, "content": f"{number}"}]
    await talk.said(history, PLAIN)
    assert chance(turns) > 0.75


@pytest.mark.parametrize("reply", [drops(ANSWER), drops(CALL)], ids=["answer", "call"])
async def test_a_reply_and_the_turn_after_it_share_a_rendering(turns, reply):
    link, prompt = Template(), Tokens(map(ord, "<user>()Look.|<assistant>"))
    request = asked(chat={"messages": ASKED, "tools": []})
    render = TurnRenderer(link)
    await with_reply(link, request, prompt, reply, generated=8, auth={}, render=render)
    assert len(link.rendered) == 1
    alone = await turns.prefix(link, request, reply, client="a", auth={})
    link.rendered.clear()
    assert await NextTurns().prefix(link, request, reply, client="a", auth={}, render=render) == alone
    assert len(link.rendered) == 1

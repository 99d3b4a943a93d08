"""Prompts and replies as token ids: exact, or none."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.engine.answers import EngineError
from slotkeeper.runtime.link import shows_time
from slotkeeper.runtime.render import (
    LatestPrompts,
    TurnRenderer,
    prompt_of,
    shortened,
    spliced,
    with_reply,
)
from slotkeeper.scheduler.prompts.tokens import Tokens
from unit.runtime.stubs import END_OF_TURN, StubLink, asked

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": []}
PROMPT = Tokens([1, 2, 3, 4])
SAID = [ord(letter) for letter in "abc"]
AFTER = [50, 51, 52]  # opens the turn after the reply


async def reply_in_chat(link: StubLink, rendered: list[int], generated: int, **reply) -> Tokens | None:
    link.says = Tokens(rendered)
    said = {"role": "assistant", "content": "abc", **reply}
    return await with_reply(link, asked(chat=CHAT), PROMPT, said, generated=generated, auth={})


# -- prompts -------------------------------------------------------------------------------------------


async def test_a_chat_is_rendered_by_the_engine_with_the_clients_key(link):
    link.says = PROMPT
    assert await prompt_of(link, asked(chat=CHAT), {"X-Api-Key": "k"}) == PROMPT
    assert link.rendered == [(CHAT, {"X-Api-Key": "k"})]


async def test_a_raw_prompt_is_tokenized_without_a_template(link):
    assert await prompt_of(link, asked(prompt=[1, 2]), {}) == Tokens([1, 2])
    assert link.rendered == []


async def test_an_unreadable_prompt_has_no_tokens(link):
    assert await prompt_of(link, asked(media=True), {}) is None


async def test_a_chat_that_the_template_refuses_raises_an_error(link):
    link.says = EngineError(500, "template")
    with pytest.raises(EngineError):
        await prompt_of(link, asked(chat=CHAT), {})


# -- replies -------------------------------------------------------------------------------------------


async def test_a_reply_rendered_as_sampled_is_known_except_for_its_last_token(link):
    rendered = [*PROMPT, *SAID, END_OF_TURN, *AFTER]
    tokens = await reply_in_chat(link, rendered, generated=4)  # three words and the end of the turn
    assert tokens == Tokens([*PROMPT, *SAID])  # the end was sampled, and never evaluated


async def test_a_reply_rendered_with_other_tokens_is_not_guessed(link):
    rendered = [*PROMPT, 97, 97, 98, 98, 99, 99, END_OF_TURN, *AFTER]
    assert await reply_in_chat(link, rendered, generated=30) is None


async def test_a_template_that_changes_the_history_gives_no_tokens(link):
    """A reply's text may be right while the history before it is rendered differently."""
    rendered = [1, 2, 88, 4, *SAID, END_OF_TURN, *AFTER]
    assert await reply_in_chat(link, rendered, generated=4) is None


@pytest.mark.parametrize("generated", [1, 2, 3, 4, 5, 30])
async def test_the_tokens_are_never_more_than_the_slot_holds(link, generated):
    rendered = [*PROMPT, *SAID, END_OF_TURN, *AFTER]
    tokens = await reply_in_chat(link, rendered, generated=generated)
    if tokens is not None:
        assert len(tokens) <= len(PROMPT) + generated - 1
        assert Tokens(rendered).begins_with(tokens)


@pytest.mark.parametrize(
    ("reply", "role"),
    [({}, "user"), ({"reasoning_content": "hm"}, "tool"), ({"tool_calls": [{"id": "1"}]}, "tool")],
)
async def test_the_turn_after_a_reply_keeps_its_reasoning(link, reply, role):
    """Many templates strip the reasoning before a user's message."""
    await reply_in_chat(link, [*PROMPT, *SAID, END_OF_TURN], generated=4, **reply)
    chat, _ = link.rendered[-1]
    *before, said, after = chat["messages"]
    assert before == CHAT["messages"]
    assert said["content"] == "abc"
    assert after["role"] == role
    assert chat["tools"] == CHAT["tools"]
    assert len(CHAT["messages"]) == 1, "the client's own body was changed"


@pytest.mark.parametrize(
    ("generated", "known"),
    [
        (4, [*PROMPT, *SAID]),  # the answer ended by itself: the end token has no text
        (3, [*PROMPT, *SAID[:-1]]),  # the answer was cut off: the last token was never evaluated
        (2, None),
        (5, None),
    ],
)
async def test_a_raw_completion_is_known_only_if_the_counts_agree(link, generated, known):
    tokens = await with_reply(
        link, asked(prompt=[1]), PROMPT, {"content": "abc"}, generated=generated, auth={}
    )
    assert tokens == (Tokens(known) if known else None)


# -- chats of which only the end is rendered -------------------------------------------------------------

LONG = [{"role": "user", "content": "First."}, {"role": "assistant", "content": "One."}] * 3
ASKED = [{"role": "system", "content": "Be kind."}, *LONG, {"role": "user", "content": "Second."}]
MORE = [{"role": "assistant", "content": "Two."}, {"role": "user", "content": "Third."}]


class Template(StubLink):
    """Renders a chat as lines, if it is `numbered`, with numbers. `leads`: it wants a system message."""

    def __init__(self, *, numbered: bool = False, leads: bool = False) -> None:
        super().__init__()
        self.numbered, self.leads, self.dated = numbered, leads, False
        self.asked: list[int] = []  # messages of each rendering

    async def render_chat(self, chat: Any, auth: Any) -> Tokens:
        return await self.chat_tokens(await self.chat_text(chat, auth), chat, auth)

    async def chat_text(self, chat: Any, auth: Any) -> str:
        messages = chat["messages"]
        self.asked.append(len(messages))
        if self.leads and messages[0]["role"] != "system":
            raise EngineError(500, "system message first")
        lines = [f"{n if self.numbered else ''}<{m['role']}>{m['content']}|" for n, m in enumerate(messages)]
        return "".join([*lines, "<assistant>"])

    async def chat_tokens(self, text: str, chat: Any, auth: Any) -> Tokens:
        return Tokens(map(ord, text))


async def longer(link: Template) -> TurnRenderer:
    """Render a prompt and the chat after it. Checks that this is the whole chat."""
    chat = {"messages": [*ASKED, *MORE], "tools": []}
    render = TurnRenderer(link)
    await render.prompt({**chat, "messages": ASKED}, {})
    assert await render(chat, {}) == await Template(numbered=link.numbered).render_chat(chat, {})
    return render


async def test_only_the_last_messages_are_rendered_again_once_the_template_allows_it():
    link, whole = Template(), len(ASKED) + len(MORE)
    await longer(link)
    assert link.asked == [len(ASKED), 1, 1 + len(MORE), whole]
    link.asked.clear()
    await longer(link)
    assert link.asked == [len(ASKED), 1, 1 + len(MORE)]


@pytest.mark.parametrize("template", [{"numbered": True}, {"leads": True}])
async def test_a_template_that_shows_the_end_otherwise_gets_whole_chats(template):
    link = Template(**template)
    await longer(link)
    assert link.renders_parts == {(True, False): False}
    link.asked.clear()
    await longer(link)
    assert link.asked == [len(ASKED), len(ASKED) + len(MORE)]


@pytest.mark.parametrize(
    "change", ["nothing", "none was compared", "the date is shown", "the engine was lost", "other tools"]
)
async def test_the_next_prompt_is_rendered_from_the_one_before(change):
    link, latest, tools = Template(), LatestPrompts(), []
    link.renders_parts = {(True, False): True}
    before, after = asked(hash_chain=(b"", b"1")), asked(hash_chain=(b"", b"1", b"2", b"3"))
    render = latest.renderer(link, before)
    await render.prompt({"messages": ASKED, "tools": []}, {})
    latest.keep(before, render)
    match change:
        case "none was compared":  # so the whole chat is rendered too, and its text is taken
            link.renders_parts = {}
        case "the date is shown":
            link.dated = True
        case "the engine was lost":
            link.losses += 1
        case "other tools":
            tools = [{"type": "function"}]
    follower = latest.renderer(link, after)
    chat = {"messages": [*ASKED, *MORE], "tools": tools}
    assert await follower.prompt(chat, {}) == await Template().render_chat(chat, {})
    assert follower.pieced is (change == "nothing")
    assert link.renders_parts == {(True, False): True}
    assert not latest.renderer(Template(), after).before  # another engine may have another template
    assert not latest.renderer(link, before).before


PARTS = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "Second. "}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in "ab"]


@pytest.mark.parametrize(
    ("asked_last", "more", "kept"),
    [
        ({"content": PARTS}, {"tools": TOOLS}, TOOLS[:1]),
        ({}, {"tools": TOOLS, "tool_choice": "auto"}, TOOLS[:1]),
        ({}, {"tools": TOOLS, "tool_choice": {"function": {"name": "b"}}}, TOOLS),
        ({}, {"tools": []}, []),
        ({"content": ""}, {}, None),  # nothing shows where it is
        ({"content": "Second. " * 200}, {}, None),  # most of the text
        ({"role": "assistant"}, {}, None),  # it is continued
    ],
)
def test_what_is_left_of_a_shortened_chat(asked_last, more, kept):
    chat = {"messages": [*ASKED[:-1], {**ASKED[-1], **asked_last}], **more}
    short = shortened(chat, {**chat, "messages": [*chat["messages"], *MORE]}, 2000)
    assert (None if short is None else short.get("tools", [])) == kept
    if short:
        assert short["messages"] == chat["messages"][-1:]


@pytest.mark.parametrize("head", [{}, {"tools": []}, {"tools": TOOLS, "chat_template_kwargs": {"a": 1}}])
def test_a_chat_with_another_head_is_rendered_whole(head):
    chat = {"messages": ASKED, "tools": TOOLS}
    assert shortened(chat, {"messages": [*ASKED, *MORE], **head}, 2000) is None


def test_a_last_message_is_also_found_as_json():
    text, end = 'say "hm"\n', 'to=tool {"text": "say \\"hm\\"\\n"}|'
    before, longer = f"head {end}", f"head {end}more"
    assert spliced(f"all that {end}", before, longer, last=text.strip()) == f"all that {end}more"
    assert spliced("all that}|", before, longer, last=text.strip()) is None
    assert spliced(f"all that {end}", before, f"new {end}more", last=text.strip()) is None


@pytest.mark.parametrize(
    ("template", "dated"),
    [("", True), ("{{ strftime_now('%d') }}", True), ("{{ date_string }}", True), ("{{ messages }}", False)],
)
def test_a_template_that_may_show_the_time_is_known(template, dated):
    assert shows_time(template) is dated

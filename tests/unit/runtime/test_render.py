"""Prompts and replies as token ids: exact, or none."""

from __future__ import annotations

import pytest

from slotkeeper.engine.answers import EngineError
from slotkeeper.runtime.render import prompt_of, with_reply
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

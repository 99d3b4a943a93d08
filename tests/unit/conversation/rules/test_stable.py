"""Texts that should not change: Claude Code's stamp, trimmed white space, dropped reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.rules.rules import BillingNonce, Reasoning, TrailingWhitespace
from unit.conversation.rules.scenes import apply_rule, call, called, result, scene, system

Doc = dict[str, Any]

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={};"
PROMPT = "You are Claude Code, Anthropic's official CLI for Claude."
ASKED = {"role": "user", "content": "Look at it."}
NEXT = {"role": "user", "content": "And now?"}


def reply(content: str = "", thought: str | None = None, *ids: str) -> Doc:
    more = {} if thought is None else {"reasoning_content": thought}
    return called(*map(call, ids), content=content, **more)


def chat(*messages: Doc) -> Doc:
    return {"model": "m", "messages": [system("You are pi.\n"), ASKED, *messages]}


# -- the stamp --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [True, False])
def test_the_billing_stamp_of_claude_code_is_the_same_in_each_request(joined):
    def body(stamp: str) -> Doc:
        texts = [HEADER.format(stamp), PROMPT]
        blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]
        return {"system": "\n".join(texts) if joined else blocks, "messages": [ASKED], "max_tokens": 9}

    first = body("a1b2c")
    assert apply_rule(BillingNonce(), first, api=Api.MESSAGES) is first
    for stamp in ("00000", "a1b2c"):
        assert apply_rule(BillingNonce(), body(stamp), body("a1b2c"), api=Api.MESSAGES) == body("a1b2c")


def test_a_new_session_of_the_same_agent_keeps_the_billing_stamp():
    kin = scene({"messages": []}, {"messages": [system(HEADER.format("a1b2c") + PROMPT), ASKED]}).before
    now = {"messages": [system(HEADER.format("00000") + PROMPT), NEXT]}
    (edit,) = BillingNonce().changes(replace(scene(now), kin=kin))
    assert edit.after == HEADER.format("a1b2c") + PROMPT


def test_the_billing_stamp_is_restored_on_every_route():
    chatted, was = (
        {"messages": [system(HEADER.format(stamp) + PROMPT), ASKED]} for stamp in ("00000", "a1b2c")
    )
    assert apply_rule(BillingNonce(), chatted, was) == was
    said, asked = ({"instructions": HEADER.format(stamp), "input": "Look."} for stamp in ("00000", "a1b2c"))
    assert apply_rule(BillingNonce(), said, asked, api=Api.RESPONSES) == asked


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (PROMPT, ASKED),
        ("\n" + HEADER.format("a1b2c"), ASKED),
        (HEADER.format("a1b2c7"), ASKED),
        (HEADER.format("a1"), ASKED),
        ("x-anthropic-billing-header: cc_entrypoint=cli;", ASKED),
        (HEADER.format("fffff"), ASKED),
        (PROMPT, {"role": "user", "content": HEADER.format("a1b2c")}),
    ],
)
def test_a_text_that_is_not_a_billing_stamp_is_not_edited(text, asked):
    now = {"messages": [system(text), asked]}
    assert apply_rule(BillingNonce(), now, {"messages": [system(HEADER.format("fffff")), ASKED]}) is now


# -- white space ------------------------------------------------------------------------------------------


def test_trimmed_white_space_of_a_reply_is_restored_as_sampled():
    replies = [reply("I look.\n\n", None, "c1"), reply("\nDone.\n")]
    now = chat(reply("I look.", None, "c1"), result("c1"), reply("Done."), NEXT)
    after = apply_rule(TrailingWhitespace(), now, chat(), replies=replies)
    assert after == chat(reply("I look.\n\n", None, "c1"), result("c1"), reply("\nDone.\n"), NEXT)


def test_trimmed_white_space_of_reasoning_is_restored_as_sampled():
    sent = chat(reply("", "First this.\n", "c1"), result("c1"))
    now = chat(reply("", "First this.", "c1"), result("c1"), reply("", "Then that.", "c2"), result("c2"))
    after = apply_rule(TrailingWhitespace(), now, sent, replies=[reply("", "\nThen that.\n", "c2")])
    assert after["messages"][:4] == sent["messages"]
    assert after["messages"][4] == reply("", "\nThen that.\n", "c2")


def test_messages_that_were_already_sent_keep_their_white_space():
    sent = chat(reply("I look.\n", None, "c1"), result("c1", "1: import os\n"))
    trimmed = {"role": "user", "content": "Look at it.  "}
    now = {"messages": [system("You are pi."), trimmed, reply("I look.", None, "c1"), result("c1"), NEXT]}
    assert apply_rule(TrailingWhitespace(), now, sent)["messages"] == [*sent["messages"], NEXT]


def test_white_space_that_the_client_trims_again_is_restored_again():
    sent, received = chat(reply("Done.\n"), NEXT), chat(reply("Done."), NEXT)
    now = chat(reply("Done."), NEXT, reply("Good."))
    after = apply_rule(TrailingWhitespace(), now, sent, received=received)
    assert after == chat(reply("Done.\n"), NEXT, reply("Good."))


TWO = chat(reply("I looked.", None, "c1"), result("c1"), reply("All done."), NEXT)
BEGUN = reply("Once upon\n\n")


@pytest.mark.parametrize(
    ("now", "sent", "replies"),
    [
        (TWO, chat(), [reply("I look.\n\n", None, "c1"), reply("Done.\n")]),
        (chat(reply("Done."), NEXT), chat(), [reply("Done.\n"), reply("Done.\n\n")]),
        ({"messages": [system("You are somebody else."), ASKED, NEXT]}, chat(), []),
        ({"messages": [system("You are pi.\n"), {**ASKED, "content": "Look at it.\n"}]}, chat(), []),
        # the client joins the text that it has with what it gets: white space that it does not know is lost
        (chat(reply("Once upon")), chat(), [BEGUN]),
        (chat(reply("Once upon")), chat(BEGUN), [BEGUN]),
    ],
    ids=[
        "other texts",
        "two replies match",
        "a rewritten system text",
        "the newest user message",
        "a reply to continue",
        "a reply to continue, sent before",
    ],
)
def test_white_space_is_only_restored_in_a_finished_reply_of_which_one_form_is_known(now, sent, replies):
    assert apply_rule(TrailingWhitespace(), now, sent, replies=replies) is now


def test_the_parts_of_a_message_are_matched_one_by_one():
    def parts(*texts: str) -> Doc:
        return {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": t} for t in texts]}

    sent = chat(reply("", None, "c1"), parts("<system>Read.</system>\n", "import os\n"))
    now = chat(reply("", None, "c1"), parts("<system>Read.</system>", "import os\n"), NEXT)
    assert apply_rule(TrailingWhitespace(), now, sent)["messages"] == [*sent["messages"], NEXT]


# -- reasoning --------------------------------------------------------------------------------------------


def test_reasoning_that_was_already_sent_is_restored():
    sent = chat(reply("", "First this.", "c1"), result("c1"))
    now = chat(reply("", None, "c1"), result("c1"), reply("", "Then that.", "c2"), result("c2"))
    after = apply_rule(Reasoning(), now, sent)
    assert after["messages"][:4] == sent["messages"]
    assert after["messages"][4:] == now["messages"][4:]


def test_reasoning_that_is_missing_in_one_reply_is_restored():
    sent = chat(reply("", "First this.", "c1"), result("c1"))
    now = chat(*sent["messages"][2:], reply("", None, "c2"), result("c2"))
    after = apply_rule(Reasoning(), now, sent, replies=[reply("", "Then that.", "c2")])
    assert after == chat(*sent["messages"][2:], reply("", "Then that.", "c2"), result("c2"))


THOUGHT = (reply("", "First this.", "c1"), result("c1"))
SILENT = (reply("", None, "c1"), result("c1"))
SECOND = (reply("", "Then that.", "c2"), result("c2"))


@pytest.mark.parametrize(
    ("now", "sent", "replies"),
    [
        (chat(*SILENT, NEXT), chat(*THOUGHT), [THOUGHT[0]]),
        (chat(*SILENT, *SECOND), chat(*SILENT), [THOUGHT[0]]),
        (
            chat(reply("## Goal\nRead it."), NEXT, *THOUGHT),
            chat(),
            [reply("## Goal\nRead it.", "They want a summary.")],
        ),
        (
            chat(*THOUGHT, reply("A summary."), *SECOND),
            chat(*THOUGHT),
            [reply("Something else.", "Then that.", "c2")],
        ),
        (chat(reply("", "First.", "c1"), result("c1"), NEXT), chat(*THOUGHT), []),
    ],
    ids=[
        "a client that never sends it",
        "a reply that was sent without",
        "a summary, which opencode sends as a reply",
        "a text before a reply with calls",
        "another reasoning",
    ],
)
def test_reasoning_is_not_restored(now, sent, replies):
    assert apply_rule(Reasoning(), now, sent, replies=replies) is now


def test_an_emptied_reasoning_item_of_a_responses_client_gets_its_text_back():
    def body(*items: Doc) -> Doc:
        asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]}
        return {"input": [asked, *items]}

    def thought(text: str) -> Doc:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def called(id_: str) -> tuple[Doc, Doc]:
        made = {"type": "function_call", "call_id": id_, "name": "read", "arguments": "{}"}
        return made, {"type": "function_call_output", "call_id": id_, "output": "1: import os"}

    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    sent = body(thought("First this."), *called("c1"))
    now = body(thought("First this."), *called("c1"), thought(""), said, *called("c2"))
    replies = [reply("I look.\n", "Then that.", "c2")]
    after = apply_rule(Reasoning(), now, sent, replies=replies, api=Api.RESPONSES)
    assert after == body(thought("First this."), *called("c1"), thought("Then that."), said, *called("c2"))

"""Texts that should not change: Claude Code's stamp, trimmed white space, dropped reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.rules.restoring import BillingNonce, Reasoning, TrailingWhitespace
from unit.conversation.rules.scenes import apply_rule, scene

Doc = dict[str, Any]

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={};"
PROMPT = "You are Claude Code, Anthropic's official CLI for Claude."
ASKED = {"role": "user", "content": "Look at it."}
NEXT = {"role": "user", "content": "And now?"}


def system(text: str) -> Doc:
    return {"role": "system", "content": text}


def call(id_: str) -> Doc:
    return {"id": id_, "type": "function", "function": {"name": "read", "arguments": "{}"}}


def reply(content: str = "", thought: str | None = None, *ids: str) -> Doc:
    said: Doc = {"role": "assistant", "content": content}
    if thought is not None:
        said["reasoning_content"] = thought
    return {**said, "tool_calls": [call(id_) for id_ in ids]} if ids else said


def result(id_: str, content: str = "1: import os") -> Doc:
    return {"role": "tool", "tool_call_id": id_, "content": content}


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
    "text",
    [
        PROMPT,
        "\n" + HEADER.format("a1b2c"),
        HEADER.format("a1b2c7"),
        HEADER.format("a1"),
        "x-anthropic-billing-header: cc_entrypoint=cli;",
        HEADER.format("fffff"),
    ],
)
def test_a_text_that_is_not_a_billing_stamp_is_not_edited(text):
    now = {"messages": [system(text), ASKED]}
    assert apply_rule(BillingNonce(), now, {"messages": [system(HEADER.format("fffff")), ASKED]}) is now


def test_a_billing_stamp_in_a_user_message_is_not_edited():
    now = {"messages": [system(PROMPT), {"role": "user", "content": HEADER.format("a1b2c")}]}
    first = {"messages": [system(HEADER.format("fffff")), ASKED]}
    assert apply_rule(BillingNonce(), now, first) is now


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


def test_a_reply_with_another_text_is_sent_unchanged():
    now = chat(reply("I looked.", None, "c1"), result("c1"), reply("All done."), NEXT)
    replies = [reply("I look.\n\n", None, "c1"), reply("Done.\n")]
    assert apply_rule(TrailingWhitespace(), now, chat(), replies=replies) is now


def test_white_space_is_not_restored_if_two_sampled_replies_match():
    now = chat(reply("Done."), NEXT)
    assert (
        apply_rule(TrailingWhitespace(), now, chat(), replies=[reply("Done.\n"), reply("Done.\n\n")]) is now
    )


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


def test_a_rewritten_system_text_keeps_its_new_white_space():
    now = {"messages": [system("You are somebody else."), ASKED, NEXT]}
    assert apply_rule(TrailingWhitespace(), now, chat()) is now


def test_the_newest_user_message_is_not_edited():
    now = {"messages": [system("You are pi.\n"), {"role": "user", "content": "Look at it.\n"}]}
    assert apply_rule(TrailingWhitespace(), now, chat()) is now


@pytest.mark.parametrize("sent", [chat(), chat(reply("Once upon\n\n"))], ids=["new", "sent before"])
def test_a_reply_that_the_engine_is_to_continue_is_not_edited(sent):
    """The client joins the text that it has with what it gets: white space that it does not know is lost."""
    now = chat(reply("Once upon"))
    assert apply_rule(TrailingWhitespace(), now, sent, replies=[reply("Once upon\n\n")]) is now


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


def test_no_reasoning_is_restored_for_a_client_that_never_sends_it():
    sent = chat(reply("", "First this.", "c1"), result("c1"))
    now = chat(reply("", None, "c1"), result("c1"), NEXT)
    assert apply_rule(Reasoning(), now, sent, replies=[reply("", "First this.", "c1")]) is now


def test_a_reply_that_was_sent_without_reasoning_stays_so():
    sent = chat(reply("", None, "c1"), result("c1"))
    now = chat(*sent["messages"][2:], reply("", "Then that.", "c2"), result("c2"))
    assert apply_rule(Reasoning(), now, sent, replies=[reply("", "First this.", "c1")]) is now


def test_a_summary_does_not_get_the_reasoning_of_its_request():
    """opencode sends the reply to its request for a summary as a reply of the conversation."""
    made = reply("## Goal\nRead it.", "They want a summary.")
    now = chat(reply("## Goal\nRead it."), NEXT, reply("", "First this.", "c1"), result("c1"))
    assert apply_rule(Reasoning(), now, chat(), replies=[made]) is now


def test_a_text_message_before_a_reply_with_calls_gets_no_reasoning():
    sent = chat(reply("", "First this.", "c1"), result("c1"))
    now = chat(*sent["messages"][2:], reply("A summary."), reply("", "Then that.", "c2"), result("c2"))
    replies = [reply("Something else.", "Then that.", "c2")]
    assert apply_rule(Reasoning(), now, sent, replies=replies) is now


def test_reasoning_with_another_text_is_not_edited():
    sent = chat(reply("", "First this.", "c1"), result("c1"))
    now = chat(reply("", "First.", "c1"), result("c1"), NEXT)
    assert apply_rule(Reasoning(), now, sent) is now


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

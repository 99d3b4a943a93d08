"""What each agent leaves of old tool results, and texts that only look like that."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Edit, Layout, edited
from slotkeeper.conversation.rules.rules import common, left_of, pruned
from unit.conversation.rules import scenes
from unit.conversation.rules.scenes import user

Doc = dict[str, Any]

FILE = "\n".join(f"{n}: a line of the shop's price list, article {n * 37 % 101}" for n in range(1, 81))
HEAD, TAIL = FILE[:300], FILE[-300:]


# By the agent that prunes in this form.
LEFT = {
    "opencode": "[Old tool result content cleared]",
    "Claude Code": "[Old tool result content cleared]",
    "Claude Code, on disk": (
        f"<persisted-output>\nOutput too large (4KB). Preview:\n{FILE[:200]}\n</persisted-output>"
    ),
    "Hermes": "[Old tool output cleared to save context space]",
    "Hermes, twice the same": "[Duplicate tool output - same content as a more recent call]",
    "Hermes, summed up": "[read_file] read prices.txt from line 1 (4,200 chars)",
    "OpenClaw": (
        f"{HEAD}\n...\n{TAIL}\n\n[Tool result trimmed: kept first 300 chars and last 300 of 4200 chars.]"
    ),
    "OpenClaw, at first": f"{HEAD}\n...\n{TAIL}",
    "Gemini CLI": (
        f"<tool_output_masked>\n{FILE[:250]}\n... [lines omitted] ...\n{FILE[-250:]}\n</tool_output_masked>"
    ),
    "Cline": (
        "[[NOTE] This file read has been removed to save space in the context window. Refer to the latest."
    ),
    "SWE-agent": "Old environment output: (80 lines omitted)",
    "OpenHands": "<MASKED>",
    "LangChain": "[cleared]",
    "oh-my-pi": "[Output truncated - 1042 tokens]",
    "a summary's input": f"{FILE[:2000]}\n[Tool output truncated for compaction: omitted 2200 chars]",
    "head and mark": f"{FILE[:1000]}\n\n... (truncated)",
    "mark in the middle": f"{HEAD}\n[... output truncated, 3600 characters omitted ...]\n{TAIL}",
    "tail only": f"... [3900 characters omitted] ...\n{TAIL}",
    "cut without a word": FILE[:1500],
    "both ends without a word": FILE[:1500] + FILE[-500:],
    "dropped": "",
}
NOT_LEFT = {
    "the same": FILE,
    "another": "The file was deleted.",
    "more": f"{FILE}\n81: one more",
    "a placeholder that is longer": f"[Old tool result content cleared] {FILE}",
    "a line was edited": FILE.replace("40: a line of the shop's price list", "40: gone"),
    "other lines in the middle": f"{HEAD}\n... and then the {'other ' * 60}...\n{TAIL}",
    "words that no program frames": f"{HEAD}\nThe rest was removed from the shop\n{TAIL}",
    "a secret": f"{HEAD}\n[... REDACTED, removed ...]\n{TAIL}",
    "a secret, summed up": "[read_file] contents redacted by policy",
    "a summary of nothing much": "[read_file]",
    "two lines in brackets": "[read_file] read it\nand more",
    "little went": FILE[:1000] + "..." + FILE[1150:],
}


@pytest.mark.parametrize("agent", LEFT)
def test_the_rest_that_a_client_leaves_of_a_pruned_result_is_recognised(agent):
    assert left_of(LEFT[agent], FILE)


@pytest.mark.parametrize("text_kind", NOT_LEFT)
def test_another_text_is_not_taken_for_the_rest_of_a_pruned_result(text_kind):
    assert not left_of(NOT_LEFT[text_kind], FILE)


@pytest.mark.parametrize("agent", LEFT)
def test_a_pruned_or_empty_result_is_not_pruned_again(agent):
    assert not left_of(LEFT[agent], "[Old tool result content cleared, and it was long]")
    assert not left_of(LEFT[agent], "")


def test_a_short_result_counts_as_pruned_only_if_a_placeholder_replaces_it():
    short = "3 tests passed, and 1 was skipped: no printer"
    assert left_of("<MASKED>", short)
    assert not left_of("3 tests...", short)


# -- pruned results in messages --------------------------------------------------------------------------


def laid_out(*messages: Doc, api: Api = Api.CHAT) -> Layout:
    key = "input" if api is Api.RESPONSES else "messages"
    layout = lay_out(api, {key: [*messages]})
    assert layout is not None
    return layout


def call(name: str = "c1") -> Doc:
    return scenes.called(scenes.call(name, '{"path": "prices.txt"}', "read_file"))


def result(content: Any, name: str = "c1") -> Doc:
    return scenes.result(name, content)


def block(content: Any, name: str = "c1") -> Doc:
    return {"type": "tool_result", "tool_use_id": name, "content": content}


CLEARED = LEFT["opencode"]
ASKED = user("What does a lamp cost?")
PARTS = [{"type": "text", "text": FILE[:1000]}, {"type": "text", "text": FILE[1000:]}]


def test_messages_behind_a_pruned_result_stay_common():
    old = laid_out(ASKED, call(), result(FILE), call("c2"), result(FILE, "c2"))
    new = laid_out(ASKED, call(), result(CLEARED), call("c2"), result(FILE, "c2"), user("And a chair?"))
    assert common(old, new) == 5


def test_a_result_that_is_sent_in_full_again_differs_from_the_pruned_one():
    assert common(laid_out(ASKED, call(), result(CLEARED)), laid_out(ASKED, call(), result(FILE))) == 2


@pytest.mark.parametrize("first", [FILE, PARTS], ids=["a text", "parts"])
@pytest.mark.parametrize("now", [CLEARED, [{"type": "text", "text": CLEARED}]], ids=["a text", "a part"])
def test_a_pruned_result_may_be_a_text_or_a_list_of_parts(now, first):
    old, new = laid_out(ASKED, call(), result(first)), laid_out(ASKED, call(), result(now))
    (edit,) = pruned(new.messages[2], old.messages[2])
    back = edited({"messages": [ASKED, call(), result(now)]}, [edit])
    assert laid_out(*back["messages"]).messages[2].has_texts_of(old.messages[2])


def edits(first: Doc, now: Doc, api: Api) -> list[Edit]:
    return [*pruned(laid_out(now, api=api).messages[0], laid_out(first, api=api).messages[0])]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png"}}
QUICK = "<system-reminder>\nBe quick.\n</system-reminder>"
PASSED, FAILED = block("3 tests passed", "c2"), block("1 test failed", "c2")


@pytest.mark.parametrize(
    ("first", "now"),
    [
        (user(FILE), user(CLEARED)),
        ({"role": "assistant", "content": FILE}, {"role": "assistant", "content": CLEARED}),
        ({"role": "system", "content": FILE}, {"role": "system", "content": CLEARED}),
        (result(FILE), user(CLEARED)),
        (result([IMAGE]), result(CLEARED)),
        (result(f"{FILE}\n\n{QUICK.replace('quick', 'quick, ' * 40)}"), result(FILE)),
        (user([block(FILE), PASSED]), user([block(CLEARED), FAILED])),
    ],
    ids=["a user's", "a reply", "system text", "another role", "an image", "a reminder", "another change"],
)
def test_only_the_text_of_a_tool_result_can_be_pruned(first, now):
    api = Api.MESSAGES if isinstance(now["content"], list) else Api.CHAT
    assert not edits(first, now, api)


def test_each_of_several_results_in_one_message_may_be_pruned():
    first = user([block(FILE), block(PARTS, "c2"), block("3 tests passed", "c3")])
    now = user([block(CLEARED), block(CLEARED, "c2"), block("3 tests passed", "c3")])
    assert [(edit.path, edit.after) for edit in edits(first, now, Api.MESSAGES)] == [
        (("messages", 0, "content", 0, "content"), FILE),
        (("messages", 0, "content", 1, "content"), PARTS),
    ]
    reminded = user([block(FILE), {"type": "text", "text": QUICK}])
    assert edits(reminded, user([block(CLEARED)]), Api.MESSAGES), "a reminder that goes hides no pruning"


def test_pruned_results_of_the_responses_api_are_recognised():
    output = {"type": "function_call_output", "call_id": "c1"}
    (edit,) = edits({**output, "output": FILE}, {**output, "output": CLEARED}, Api.RESPONSES)
    assert (edit.path, edit.before, edit.after) == (("input", 0, "output"), CLEARED, FILE)

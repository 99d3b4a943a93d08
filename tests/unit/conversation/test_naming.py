"""Names of conversations: the same for all of their requests, with no more of their text than may be kept."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.book import Conversations
from slotkeeper.conversation.layout import Conversation, Who
from slotkeeper.conversation.naming import LONGEST, WORDS, Name, Naming, shortened, task_of, title_in
from slotkeeper.conversation.phrases import TITLE_ASKED

OPENCODE = {"User-Agent": "opencode/1.18.33"}
TASK = "Fix the importer: it loses rows that have a comma in their names, and nobody noticed for a year"
FIRST = "Fix the importer: it loses rows that have a…"
BLOCK = "<system-reminder>\nToday is a day.\n</system-reminder>"


def layout(*messages: tuple[str, str]) -> Any:
    return lay_out(Api.CHAT, {"messages": [{"role": role, "content": text} for role, text in messages]})


def task(text: str = TASK, *more: tuple[str, str]) -> Any:
    return layout(("system", "You are opencode, a tool."), ("user", text), *more)


def title_request(text: str = TASK) -> Any:
    return layout(("system", "You are a title generator."), ("user", f'Generate a title:\n"{text}"'))


class Desk:
    """Requests of clients, as the sidecar receives them."""

    def __init__(self, *, text: bool) -> None:
        self.naming = Naming(text=text)
        self.book = Conversations()
        self.now = 0.0

    def seen(self, laid: Any, client: str) -> Conversation:
        self.now += 1
        who = Who(client)
        match = self.book.find(who, laid)
        return self.book.saw(match, who, received=laid, sent=laid, notes={}, noted={}, now=self.now)

    def asks(self, laid: Any, client: str = "anna", headers=OPENCODE, given: str | None = None) -> Name:
        conversation = self.seen(laid, client)
        return self.naming.name(client, headers, conversation, given=given, now=self.now)

    def answers(self, laid: Any, said: str, client: str = "anna") -> None:
        self.naming.answered(client, laid, {"role": "assistant", "content": said})


def test_a_name_is_the_agent_its_number_and_the_first_words_of_the_task():
    name = Desk(text=True).asks(task())
    assert str(name) == f"opencode #1: {FIRST}"
    assert (name.agent, name.conversation, name.words, name.began) == ("opencode", 1, FIRST, 1.0)


def test_without_leave_to_keep_text_there_is_no_word_of_a_prompt_in_it():
    desk = Desk(text=False)
    name = desk.asks(task())
    desk.asks(title_request())
    desk.answers(title_request(), "Comma bug")
    assert (str(name), name.words) == ("opencode #1", "")
    assert TASK[:8] not in repr(vars(desk.naming))


def test_all_requests_of_a_conversation_share_one_name():
    desk = Desk(text=True)
    first = desk.asks(task())
    second = desk.asks(task(TASK, ("assistant", "Done."), ("user", "And the tests?")))
    assert second is first
    assert second.began == 1.0


def test_what_a_header_gives_is_kept_and_beats_every_word():
    desk = Desk(text=True)
    desk.asks(task(), given="fix-importer")
    assert str(desk.asks(task(), given=None)) == "opencode #1: fix-importer"
    assert str(Desk(text=False).asks(task(), given="fix-importer")) == "opencode #1: fix-importer"


def test_a_title_names_the_conversation_that_it_is_of_also_where_it_comes_late():
    desk = Desk(text=True)
    other, name = desk.asks(task("Write a poem about bolts, please.")), desk.asks(task())
    desk.asks(title_request())
    desk.answers(title_request(), "Comma bug in the importer")
    assert str(name) == "opencode #2: Comma bug in the importer"
    assert str(other) == "opencode #1: Write a poem about bolts, please."


def test_a_title_that_is_there_first_waits_for_its_conversation():
    desk = Desk(text=True)
    desk.asks(title_request())
    desk.answers(title_request(), "Comma bug in the importer")
    assert desk.asks(task()).title == "Comma bug in the importer"


def test_a_title_is_nobody_elses():
    desk = Desk(text=True)
    desk.asks(title_request(), client="bert")
    desk.answers(title_request(), "Comma bug", client="bert")
    assert desk.asks(task(), client="anna").title == ""
    desk.answers(title_request(), "Comma bug", client="bert")
    assert desk.asks(task(), client="anna").title == ""


def test_an_answer_to_anything_else_is_no_title():
    desk = Desk(text=True)
    name = desk.asks(task())
    desk.answers(task(), "Comma bug in the importer")
    assert name.title == ""


def test_a_task_of_a_few_letters_is_in_many_texts_and_matches_none():
    desk = Desk(text=True)
    name = desk.asks(task("hi"))
    desk.answers(title_request("hi there, this is another one"), "Greeting")
    assert str(name) == "opencode #1: hi"


def test_a_side_request_is_called_by_no_task_of_its_own():
    desk = Desk(text=True)
    assert str(desk.asks(title_request())) == "opencode #1"


def test_what_is_no_chat_has_the_agents_name():
    naming = Naming(text=True)
    assert str(naming.coming("anna", {"User-Agent": "curl/8.5.0"}, None)) == "curl"
    assert str(naming.coming("anna", {"User-Agent": "curl/8.5.0"}, None, given="smoke")) == "curl: smoke"


def test_who_waits_is_called_by_what_is_known_by_then_and_keeps_that_name():
    desk = Desk(text=True)
    coming = desk.naming.coming("anna", OPENCODE, task(), now=1.0)
    assert str(coming) == f"opencode: {FIRST}"
    name = desk.naming.name("anna", OPENCODE, desk.seen(task(), "anna"), coming=coming)
    assert name is coming
    assert str(name) == f"opencode #1: {FIRST}"
    more = task(TASK, ("assistant", "Done."), ("user", "And the tests?"))
    assert desk.naming.coming("anna", OPENCODE, more, before=1) is name
    assert desk.naming.coming("bert", OPENCODE, more, before=1) is not name
    branch = desk.naming.name("anna", OPENCODE, desk.seen(task("Another one, please."), "anna"), coming=name)
    assert (str(name), str(branch)) == (f"opencode #1: {FIRST}", "opencode #2: Another one, please.")


def test_what_turns_out_to_be_beside_a_conversation_loses_its_task():
    desk = Desk(text=True)
    aside = layout(("user", "[SUGGESTION MODE: what may the user type next?]"))
    coming = desk.naming.coming("anna", OPENCODE, aside)
    assert str(desk.naming.name("anna", OPENCODE, desk.seen(aside, "anna"), coming=coming)) == "opencode #1"


def test_the_numbers_of_two_clients_are_not_mixed_up_after_a_fresh_start():
    desk = Desk(text=True)
    first = desk.asks(task())
    desk.book = Conversations()  # numbers begin again
    assert desk.asks(task("Something else, from the start."), client="bert") is not first


@pytest.mark.parametrize("phrase", TITLE_ASKED)
@pytest.mark.parametrize("role", ["system", "user"])
def test_every_known_way_to_ask_for_a_title_is_known(phrase, role):
    desk = Desk(text=True)
    name = desk.asks(task())
    asked = layout((role, f"{phrase} and so on."), ("user", TASK))
    desk.asks(asked)
    desk.answers(asked, "Comma bug")
    assert name.title == "Comma bug"


# -- the task ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        (),
        (("user", BLOCK),),
        (("user", "<environment_context>\n<cwd>/src</cwd>\n</environment_context>"),),
        (("user", "I have *added these files to the chat*: a.py"), ("assistant", "Ok.")),
        (("user", "Change get_factorial() to use math.factorial"), ("assistant", "Ok.")),
        (("user", "Another language model started to solve this problem: it read files."),),
    ],
)
def test_what_programs_say_as_a_user_is_no_task(before):
    assert task_of(layout(("system", "x"), *before, ("user", TASK))) == FIRST


def test_a_block_in_front_of_the_task_is_left_out():
    assert task_of(task(f"{BLOCK}\n{TASK}")) == FIRST


def test_no_user_no_task():
    assert task_of(layout(("system", "You are here."), ("assistant", "Hello."))) == ""


@pytest.mark.parametrize("text", ["a" * 200, "word " * 50, "Fix it.", "Ü" * 49, "one two" + "x" * 60])
def test_a_task_is_cut_to_a_line(text):
    cut = shortened(text.strip())
    assert len(cut) <= WORDS
    assert cut.endswith("…") == (cut != text.strip())


def test_what_cannot_be_seen_is_left_out():
    assert task_of(task('"Read\x1b[31m\n\tthis\u202e file"')) == "Read [31m this file"


# -- the title ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("Comma bug", "Comma bug"),
        ('"Comma bug"\n', "Comma bug"),
        ("\n# Comma bug\n\nIt is about commas.", "Comma bug"),
        ("Title: Comma bug", "Comma bug"),
        ("**Title:** Comma bug", "Comma bug"),
        ("<think>What may it be?\nA bug.</think>\n\nComma bug", "Comma bug"),
        ("<think>never ended", ""),
        ('{ "title": "Comma bug" }', "Comma bug"),
        ('```json\n{"isNewTopic": true, "title": "Comma bug"}\n```', "Comma bug"),
        ('{"isNewTopic": false, "title": null}', ""),
        ('{"title": ["x"]}', ""),
        ("{broken", "{broken"),
        ("", ""),
        (None, ""),
        ([{"type": "text"}], ""),
        ("word " * 40, ("word " * 40)[: LONGEST - 1].rstrip() + "…"),
    ],
)
def test_a_title_is_read_as_models_write_it(content, title):
    assert title_in({"role": "assistant", "content": content}) == title

"""Names of conversations: one for all requests, with no more of their text than may be kept."""

from __future__ import annotations

from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation.layout import Conversation, Who
from slotkeeper.conversation.likeness import Conversations
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


class Clients:
    """Requests of clients, as the sidecar receives them."""

    def __init__(self, *, text: bool) -> None:
        self.naming = Naming(text=text)
        self.book = Conversations()
        self.now = 0.0

    def seen(self, laid: Any, client: str) -> Conversation:
        self.now += 1
        who = Who(client)
        match = self.book.find(who, laid)
        return self.book.saw(match, who, received=laid, sent=laid, notes={}, now=self.now)

    def asks(self, laid: Any, client: str = "anna", headers=OPENCODE, given: str | None = None) -> Name:
        conversation = self.seen(laid, client)
        return self.naming.name(client, headers, conversation, given=given, now=self.now)

    def answers(self, laid: Any, said: str, client: str = "anna") -> None:
        self.naming.answered(client, laid, {"role": "assistant", "content": said})


def test_a_name_of_a_conversation_has_the_agent_and_its_number_and_the_first_words_of_the_task():
    clients = Clients(text=True)
    name = clients.asks(task())
    assert str(name) == f"opencode #1: {FIRST}"
    assert (name.agent, name.conversation, name.words, name.began) == ("opencode", 1, FIRST, 1.0)
    assert name.without_text == "opencode #1", "the log has no words of a prompt, also with --why-text"
    assert clients.asks(task(TASK, ("assistant", "Done."), ("user", "And the tests?"))) is name
    assert str(clients.asks(title_request())) == "opencode #2", "a side request has no task"


def test_a_name_contains_no_prompt_text_unless_text_may_be_kept():
    clients = Clients(text=False)
    name = clients.asks(task())
    clients.asks(title_request())
    clients.answers(title_request(), "Comma bug")
    assert (str(name), name.words) == ("opencode #1", "")
    assert TASK[:8] not in repr(vars(clients.naming))


def test_a_name_from_a_header_is_kept_and_outweighs_the_task():
    clients = Clients(text=True)
    clients.asks(task(), given="fix-importer")
    assert str(clients.asks(task(), given=None)) == "opencode #1: fix-importer"
    assert str(Clients(text=False).asks(task(), given="fix-importer")) == "opencode #1: fix-importer"


@pytest.mark.parametrize("late", [True, False])
def test_a_title_names_its_conversation_whenever_it_arrives(late):
    clients = Clients(text=True)
    other = clients.asks(task("Write a poem about bolts, please."))
    name = clients.asks(task()) if late else None
    clients.answers(task(), "no title")
    assert not late or name.title == "", "an answer to another request is no title"
    clients.answers(title_request(), "Comma bug in the importer")
    name = name or clients.asks(task())
    assert str(name) == "opencode #2: Comma bug in the importer"
    assert str(other) == "opencode #1: Write a poem about bolts, please."
    brief = clients.asks(task("hi"))
    clients.answers(title_request("hi there, this is another one"), "Greeting")
    assert str(brief) == "opencode #3: hi", "a few letters match no title request"


def test_a_title_does_not_name_the_conversation_of_another_client():
    clients = Clients(text=True)
    clients.asks(title_request(), client="bert")
    clients.answers(title_request(), "Comma bug", client="bert")
    assert clients.asks(task(), client="anna").title == ""
    clients.answers(title_request(), "Comma bug", client="bert")
    assert clients.asks(task(), client="anna").title == ""


def test_a_request_that_is_not_a_chat_is_named_after_its_agent():
    naming = Naming(text=True)
    assert str(naming.coming("anna", {"User-Agent": "curl/8.5.0"}, None)) == "curl"
    assert str(naming.coming("anna", {"User-Agent": "curl/8.5.0"}, None, given="smoke")) == "curl: smoke"


def test_a_waiting_request_is_named_early_and_keeps_that_name_in_its_conversation():
    clients = Clients(text=True)
    coming = clients.naming.coming("anna", OPENCODE, task(), now=1.0)
    assert str(coming) == f"opencode: {FIRST}"
    name = clients.naming.name("anna", OPENCODE, clients.seen(task(), "anna"), coming=coming)
    assert name is coming
    assert str(name) == f"opencode #1: {FIRST}"
    more = task(TASK, ("assistant", "Done."), ("user", "And the tests?"))
    assert clients.naming.coming("anna", OPENCODE, more, before=1) is name
    assert clients.naming.coming("bert", OPENCODE, more, before=1) is not name
    branch = clients.naming.name(
        "anna", OPENCODE, clients.seen(task("Another one, please."), "anna"), coming=name
    )
    assert (str(name), str(branch)) == (f"opencode #1: {FIRST}", "opencode #2: Another one, please.")
    aside = layout(("user", "[SUGGESTION MODE: what may the user type next?]"))
    coming = clients.naming.coming("anna", OPENCODE, aside)
    found = clients.naming.name("anna", OPENCODE, clients.seen(aside, "anna"), coming=coming)
    assert str(found) == "opencode #3", "it was found to be a side request, and lost its task"


def test_two_clients_with_the_same_conversation_number_do_not_share_a_name():
    clients = Clients(text=True)
    first = clients.asks(task())
    clients.book = Conversations()  # numbers begin again
    assert clients.asks(task("Something else, from the start."), client="bert") is not first


@pytest.mark.parametrize("phrase", TITLE_ASKED)
@pytest.mark.parametrize("role", ["system", "user"])
def test_every_known_phrase_of_a_title_request_is_recognised(phrase, role):
    clients = Clients(text=True)
    name = clients.asks(task())
    asked = layout((role, f"{phrase} and so on."), ("user", TASK))
    clients.asks(asked)
    clients.answers(asked, "Comma bug")
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
def test_messages_that_client_programs_insert_as_user_are_not_the_task(before):
    assert task_of(layout(("system", "x"), *before, ("user", TASK))) == FIRST


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("user", f"{BLOCK}\n{TASK}"), FIRST),
        (("user", '"Read\x1b[31m\n\tthis\u202e file"'), "Read [31m this file"),
        (("assistant", "Hello."), ""),
    ],
    ids=["behind a block", "invisible characters", "no user message"],
)
def test_the_task_is_what_the_user_wrote(said, words):
    assert task_of(layout(("system", "You are here."), said)) == words


@pytest.mark.parametrize("text", ["a" * 200, "word " * 50, "Fix it.", "Ü" * 49, "one two" + "x" * 60])
def test_a_long_task_is_shortened_to_the_limit(text):
    cut = shortened(text.strip())
    assert len(cut) <= WORDS
    assert cut.endswith("…") == (cut != text.strip())


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
        ('{"a":' + "[" * 5000 + "}", ('{"a":' + "[" * 5000)[: LONGEST - 1] + "…"),
        ("", ""),
        (None, ""),
        ([{"type": "text"}], ""),
        ("word " * 40, ("word " * 40)[: LONGEST - 1].rstrip() + "…"),
    ],
)
def test_a_title_is_read_from_each_form_in_which_models_write_it(content, title):
    assert title_in({"role": "assistant", "content": content}) == title

"""Where the last lines of a message begin, in its text and in the ids of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.tokens import (
    FURTHER,
    LONG,
    REACH,
    Boundary,
    BoundaryKind,
    Tokens,
    begins,
    endings,
    last_message,
)

HEAD, USER = Boundary(5, BoundaryKind.HEAD), Boundary(9, BoundaryKind.USER)
TOOL, TURN = Boundary(20, BoundaryKind.TOOL), Boundary(3000, BoundaryKind.TURN)


def cut(text: str) -> dict[str, str]:
    return {end: kind.value for end, kind in endings(text)}


WORDS: dict[str, int] = {}


def ids(text: str) -> Tokens:
    """Return a token for everything between two blanks."""
    return Tokens(WORDS.setdefault(word, len(WORDS)) for word in text.split(" "))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("A text.\n\nWhat is it?", ["What is it?"]),
        ("A text.\nWhat is it?\n\n", ["What is it?"]),
        ("A text.\n\nQuestion: what?\nAnswer:", ["Answer:", "Question: what?\nAnswer:"]),
        ("A text.\r\n\r\nQuestion: what?\r\nAnswer:", ["Answer:", "Question: what?\r\nAnswer:"]),
        ("A text.\n \n\t\n    indented", ["    indented"]),
        ("Ein Text: äöü 🦙\n\nWas heißt 语言?", ["Was heißt 语言?"]),
        ("A text of one line.", []),
        ("A text.\n\n \n", []),
        ("\n\nA text.", ["A text."]),
        ("", []),
    ],
)
def test_a_message_has_boundaries_before_its_last_line_and_its_last_paragraph(text, ends):
    assert cut(text) == dict.fromkeys(ends, "question")


def test_a_few_earlier_lines_are_boundaries_at_increasing_distances():
    text = "\n".join(f"{n:0>63}" for n in range(1000))
    found = cut(text)
    assert list(found.values()) == ["question", "line", "line"]
    last, near, far = map(len, found)
    assert last < FURTHER <= near < FURTHER + 64
    assert 4 * near <= far < 4 * near + 64 <= REACH


@given(st.text(alphabet="ab \n\r\t语🦙", max_size=200))
def test_every_ending_is_a_suffix_of_the_text_and_begins_a_line_that_is_not_blank(text):
    for end, _ in endings(text):
        before, _, rest = text.rstrip().rpartition(end)
        assert not rest
        assert before.endswith("\n")
        assert end.split("\n")[0].strip()


@pytest.mark.parametrize(
    ("found", "length", "message"),
    [
        ((HEAD, TURN), 3010, range(5, 3000)),
        ((HEAD, USER, TURN), 3010, range(9, 3000)),
        ((HEAD, USER), 3010, range(9, 3010)),  # the template's reply is not known
        ((HEAD, USER, TOOL, TURN), 3010, None),
        ((HEAD, USER, Boundary(9 + LONG - 1, BoundaryKind.TURN)), 3010, None),
        ((TURN,), 3010, None),
        ((), 3010, None),
    ],
)
def test_the_last_user_message_is_found_if_it_is_long_enough(found, length, message):
    assert last_message(found, length) == message


PROMPT = ids("<user> some text \n \n what is it ? </user> <reply>")
MESSAGE = range(len(PROMPT) - 1)


def test_an_ending_begins_at_the_last_place_of_its_tokens():
    at = begins(PROMPT, MESSAGE, ids("what is it ?"))
    assert at == len(PROMPT) - 6
    twice = ids("<user> what is it ? \n \n what is it ? </user>")
    assert begins(twice, range(len(twice)), ids("what is it ?")) == len(twice) - 5


def test_an_ending_that_merges_with_the_template_behind_it_is_still_found():
    merged = ids("<user> some text \n \n what is it ?</user> <reply>")
    assert begins(merged, range(len(merged)), ids("what is it ?")) == len(merged) - 5


def test_an_ending_is_not_found_if_a_token_spans_the_line_break():
    merged = ids("<user> some text \n \nwhat is it ? </user> <reply>")
    assert begins(merged, range(len(merged)), ids("what is it ?")) is None
    assert begins(merged, range(len(merged)), Tokens()) is None


def test_tokens_outside_the_message_are_not_searched():
    assert begins(PROMPT, range(2, 5), ids("what is it ?")) is None
    assert begins(PROMPT, MESSAGE, ids("<user> some")) is None  # no line begins with the message's opener

"""Context that a client puts anew into each request: its first form stays, a note tells what changed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slotkeeper.api.head import Api
from slotkeeper.conversation.rules.base import Room
from slotkeeper.conversation.rules.refreshed import MOVED_MESSAGES, RefreshedContext, difference
from unit.conversation.rules.scenes import called, system, turn, user
from unit.conversation.rules.sessions import Session, noted

Doc = dict[str, Any]

TEXT = "You help with a garden.\nAnswer briefly."
CAT = "- The user has a cat that is called Minka and is old."
DOG = "- The user has a dog that is called Bello and is young."
OAK = "- The oldest tree of the garden is an oak behind the house."
ROOM = Room(8192)
NOTE = system("[Write in short sentences.]")
SOURCES = "Answer from these sources.\n" + "A source about roses and about when to cut them. " * 8 + "\n"


def context(*lines: str) -> Doc:
    return system("\n".join((TEXT, "<memories>", *lines, "</memories>")))


def chat(*messages: Doc) -> Doc:
    return {"messages": [*messages]}


def session(api: Api = Api.CHAT, room: Room | None = ROOM) -> Session:
    return Session((RefreshedContext(),), api, room)


def sent(*requests: Doc, api: Api = Api.CHAT, room: Room | None = ROOM) -> list[Doc]:
    """Return the requests as they are sent."""
    chat = session(api, room)
    return [chat.send(request).doc for request in requests]


def newest(doc: Doc) -> str:
    return doc["messages"][-1]["content"]


def words(doc: Doc) -> list[str]:
    """Return the messages without our notes."""
    return [message["content"].split("\n\n<system-reminder>")[0] for message in doc["messages"]]


# -- lines of a system text -----------------------------------------------------------------------------


def test_the_first_form_of_a_context_stays_and_the_newest_message_tells_the_lines_that_changed():
    first, then = sent(
        chat(context(CAT, OAK), user("Hello.")),
        chat(context(OAK, DOG), user("Hello."), *turn("And now?")),
    )
    assert then["messages"][:3] == [*first["messages"], called(content="Done.")]
    assert noted(newest(then)) == (f"Gone (first words):\nThe user has a cat that …\nNew:\n{DOG}",)


def test_each_change_is_told_against_the_last_and_a_line_that_comes_back_by_its_first_words():
    _, _, then, last = sent(
        chat(context(CAT, OAK), user("1")),
        chat(context(OAK), user("1"), *turn("2")),
        chat(context(OAK, CAT), user("1"), *turn("2"), *turn("3")),
        chat(context(OAK, CAT), user("1"), *turn("2"), *turn("3"), *turn("4")),
    )
    assert noted(newest(then)) == ("Back (first words):\nThe user has a cat that …",)
    assert last["messages"][: len(then["messages"])] == then["messages"], "an appended turn changes nothing"
    assert not noted(newest(last)), "nothing changed"


def test_another_order_of_a_list_is_not_told_and_numbers_of_its_items_do_not_count():
    numbered = [f"{n}. {line[2:]}" for n, line in enumerate((CAT, DOG, OAK), 1)]
    turned = [f"{n}. {line[2:]}" for n, line in enumerate((OAK, CAT, DOG), 1)]
    first, then = sent(chat(context(*numbered), user("1")), chat(context(*turned), user("1"), *turn("2")))
    assert words(then)[0] == words(first)[0]
    assert not noted(newest(then))


def test_another_order_of_other_lines_is_told():
    steps = ["Water the garden.", "Then go to bed."]
    _, then = sent(chat(context(*steps), user("1")), chat(context(*reversed(steps)), user("1"), *turn("2")))
    assert noted(newest(then)) == ("Now in this order:\nThen go to bed.\nWater the garden.",)


def test_lines_with_the_same_first_words_are_named_by_more_of_them():
    alike = [f"- The user's favourite tree in the {place} garden." for place in ("north", "south")]
    told = difference("\n".join(alike), alike[1], "")
    assert told == "Gone (first words):\nThe user's favourite tree in the north garden."


def test_of_a_long_line_only_the_sentences_that_changed_are_told():
    line = " ".join(f"Sentence {n} says something about plants." for n in range(20))
    changed = line.replace("Sentence 7 says", "Sentence 7 now says")
    told = difference(line, changed, line)
    assert told.endswith("New:\nSentence 7 now says something about plants.")
    assert told.count("\n") == 3


def test_every_line_of_the_context_can_be_read_in_each_request():
    """What the model reads, lines that are gone aside, is what the client's context says."""
    sets = [(CAT, OAK), (DOG,), (OAK, DOG), (CAT, DOG, OAK), ()]
    history: list[Doc] = []
    talk = session()
    for number, lines in enumerate(sets):
        history += [user(f"Question {number}")]
        doc = talk.send(chat(context(*lines), *history)).doc
        assert read(doc) == {line[2:] for line in lines}
        history += [called(content="Done.")]


def read(doc: Doc) -> set[str]:
    """Follow the notes from the first form to the end, as a model is told to do."""
    known = set(re.findall(r"^- (.*)", doc["messages"][0]["content"], re.MULTILINE))
    ever = set(known)
    for message in doc["messages"]:
        for note in noted(message["content"]):
            heading = ""
            for line in note.split("\n"):
                if line.endswith(":"):
                    heading = line
                    continue
                words = line.removeprefix("- ").removesuffix(" …")
                named = {text for text in ever if text.startswith(words)}
                if heading.startswith("Gone"):
                    known -= named
                elif heading.startswith("Back"):
                    assert len(named) == 1
                    known |= named
                else:
                    known.add(words)
                    ever.add(words)
    return known


def test_a_line_with_a_reminder_in_it_is_left_where_the_client_put_it():
    odd = "- </system-reminder> and more"
    request = chat(context(odd), user("1"), *turn("2"))
    _, then = sent(chat(context(CAT), user("1")), request)
    assert then is request


def test_after_a_branch_the_lines_are_told_against_what_stands_there():
    talk = session()
    start = chat(context(CAT, OAK), user("1"))
    talk.send(start)
    talk.send(chat(context(OAK), user("1"), *turn("2")))
    back = talk.send(chat(context(OAK), user("1"), called(content="Done."), user("another 2"))).doc
    assert noted(newest(back)) == ("Gone (first words):\nThe user has a cat that …",)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.MESSAGES, lambda text, *said: {"system": text, "messages": [*said]}),
        (Api.RESPONSES, lambda text, *said: {"instructions": text, "input": [*said]}),
    ],
)
def test_the_system_text_beside_the_messages_is_held_too(api, body):
    old, new = (context(line)["content"] for line in (CAT, DOG))
    first = body(old, user("1"))
    then = body(
        new, user("1"), {"role": "assistant", "type": "message", "content": [text_of(api)]}, user("2")
    )
    _, after = sent(first, then, api=api)
    key = "instructions" if api is Api.RESPONSES else "system"
    assert after[key] == old
    assert DOG in str(after)


def text_of(api: Api) -> Doc:
    return {"type": "output_text" if api is Api.RESPONSES else "text", "text": "Done."}


# -- system messages that come, go and move ----------------------------------------------------------------


def test_a_message_of_context_that_comes_later_is_told_at_the_end():
    lore = system("The oak is a thousand years old.\nNobody knows who planted it.")
    first = chat(system(TEXT), system("The user is Ada."), user("1"))
    with_lore = [system(TEXT), lore, system("The user is Ada."), user("1")]
    _, then, last = sent(
        first, chat(*with_lore, *turn("2")), chat(*first["messages"], *turn("2"), *turn("3"))
    )
    assert words(then) == [TEXT, "The user is Ada.", "1", "Done.", "2"]
    assert noted(newest(then)) == (f"New:\n{lore['content']}",)
    assert last["messages"][:5] == then["messages"]
    assert noted(newest(last)) == ("Gone (first words):\nThe oak is a thousand …\nNobody knows who …",)


def test_a_note_that_moves_down_with_the_chat_stays_where_it_was_first():
    said = [user("1"), *turn("2"), *turn("3"), *turn("4")]
    requests = []
    for end in range(1, len(said) + 1, 2):
        chat_so_far = said[:end]
        at = max(0, end - 4)
        requests.append(chat(system(TEXT), *chat_so_far[:at], NOTE, *chat_so_far[at:]))
    for doc in sent(*requests):
        assert words(doc)[:3] == [TEXT, NOTE["content"], "1"]
        assert words(doc).count(NOTE["content"]) == 1
        assert not noted(newest(doc))


def test_a_note_that_has_moved_far_is_told_again():
    talk, said = session(), [user("1")]
    told = []
    for _ in range(MOVED_MESSAGES + 8):
        at = max(0, len(said) - 4)
        doc = talk.send(chat(system(TEXT), *said[:at], NOTE, *said[at:])).doc
        told.append(noted(newest(doc)))
        said += turn("go on")
    assert [some for some in told if some] == [(NOTE["content"],)] * 2
    assert not any(told[: MOVED_MESSAGES // 2])


# -- what stood around a question --------------------------------------------------------------------------


def asked_again(first: str, *then: Doc, reply: str, room: Room | None = ROOM) -> tuple[Doc, Doc]:
    """Return a first question, and the next request, as they are sent; `reply` is the engine's."""
    talk = session(room=room)
    begun = talk.send(chat(system(TEXT), user(first))).doc
    talk.hears(reply)
    return begun, talk.send(chat(system(TEXT), *then)).doc


ROSES = user("When do I cut roses?")
WITH_SOURCES = f"{SOURCES}{ROSES['content']}"


def test_a_question_keeps_the_sources_it_was_asked_with():
    then = (ROSES, called(content="In March."), user(f"{SOURCES}And oaks?"))
    first, after = asked_again(WITH_SOURCES, *then, reply="In March.")
    assert after["messages"][:2] == first["messages"]
    assert words(after)[2:] == ["In March.", f"{SOURCES}And oaks?"]


@pytest.mark.parametrize("room", [None, Room(64)], ids=["unknown", "too little"])
def test_sources_are_put_back_only_if_there_is_room_for_them(room):
    _, after = asked_again(WITH_SOURCES, ROSES, *turn("And oaks?"), reply="Done.", room=room)
    assert words(after) == [TEXT, ROSES["content"], "Done.", "And oaks?"]


def test_words_that_a_user_took_back_do_not_come_back():
    """The reply shows it: it was given to the shorter message, in a request of its own."""
    _, after = asked_again(
        WITH_SOURCES, ROSES, called(content="In March."), user("2"), reply="Of which kind?"
    )
    assert words(after) == [TEXT, ROSES["content"], "In March.", "2"]
    _, after = asked_again(WITH_SOURCES, ROSES, reply="In March.")
    assert words(after) == [TEXT, ROSES["content"]]


def test_an_earlier_message_in_other_words_is_not_touched():
    other = user("When do I cut my roses?")
    _, after = asked_again(WITH_SOURCES, other, *turn("2"), reply="Done.")
    assert words(after) == [TEXT, other["content"], "Done.", "2"]

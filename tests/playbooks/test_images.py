"""Prompts with images: the places of planted checkpoints, and the model of the slot afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from playbooks.playbook import (
    NEW_FILES,
    OLD_FILES,
    Play,
    arrives,
    ends,
    filled,
    follows,
    goes,
    knows,
    one_turn,
    planted,
    plants,
    reports,
    saved,
    saves,
)
from slotkeeper.scheduler.effects import Forward, Prefill, Purpose, Save, SaveMoment
from slotkeeper.scheduler.prompts.tokens import Boundary, BoundaryKind, Tokens
from slotkeeper.scheduler.slots.engine_model import TAIL, marked
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Reason

TEXT = Tokens(range(10_000, 10_500))
A, B = (Tokens.image(name * 32, 300) for name in (b"a", b"b"))
ASKS = [Tokens(range(n, n + 40)) for n in (30_000, 40_000, 50_000)]
END = len(TEXT) + len(A)  # end of the image
LATER_BUILD: dict[str, Any] = {"eager_thinning": False}


def behind(question: Tokens, image: Tokens = A) -> Tokens:
    return TEXT + image + question.cut(0, TAIL)


def test_a_checkpoint_is_planted_right_after_the_last_image():
    play = Play(n_slots=1, **LATER_BUILD)
    play << arrives("r1") << knows("r1", TEXT + A + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=behind(ASKS[0]))
    assert play << planted("r1", END + TAIL) >> goes("r1", slot=0, reason=Reason.COLD)
    assert play << ends("r1", END + 40, END + TAIL) >> reports("r1", usage__planted=END + TAIL)

    assert one_turn(play, "r2", TEXT + A + ASKS[1], slot=0, cached=END)
    assert one_turn(play, "r3", TEXT + A + ASKS[2], slot=0, cached=END)


@pytest.mark.parametrize(
    "traits", [{"memory": "dense"}, {"eager_thinning": True}, {"checkpoint_cap": 0, **LATER_BUILD}]
)
def test_no_checkpoint_is_planted_if_it_would_not_help(traits):
    """The slot can be cut anywhere, or no checkpoint outlives the next task."""
    play = Play(n_slots=1, **traits)
    play << arrives("r1") << knows("r1", TEXT + A + ASKS[0])
    assert play >> goes("r1", slot=0)


@pytest.mark.parametrize("asked", [0, 2, 8])
def test_no_checkpoint_is_planted_if_no_question_follows_the_image(asked):
    """The last message of the chat ends in an image; only the template's text follows."""
    play = Play(n_slots=1, **LATER_BUILD)
    turn = Boundary(END + asked, BoundaryKind.TURN)
    play << arrives("r1") << knows("r1", TEXT + A + ASKS[0], turn)
    assert play >> goes("r1", slot=0)


def test_no_checkpoint_is_planted_if_the_engine_must_read_many_images_again():
    play, images = Play(n_slots=1, **LATER_BUILD), TEXT
    for number in range(20):
        images += Tokens.image(bytes([number]) * 32, 20) + Tokens([7])
    assert one_turn(play, "r1", images, slot=0)
    small = Tokens.image(b"c" * 32, 300)
    play << arrives("r2") << knows("r2", images + small + ASKS[0])
    assert play >> goes("r2", slot=0, reason=Reason.PREFIX)


def test_a_plant_before_a_differing_image_has_foreign_tokens_in_place_of_the_image():
    """The engine ends no batch inside an image, so only text behind the boundary can make a checkpoint."""
    play = Play(n_slots=1, **LATER_BUILD)
    play << arrives("r1") << knows("r1", TEXT + A + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT) << planted("r1", END + TAIL) >> goes("r1", slot=0)
    assert play << ends("r1", END + 40, END + TAIL) >> reports("r1")
    play << arrives("r2") << knows("r2", TEXT + B + ASKS[0])
    at = (
        len(TEXT) + len(B) + 40 - TAIL - play.traits.n_ubatch
    )  # where the request itself would leave a checkpoint
    play >> plants("r2", 0, Purpose.PLANT, tokens=TEXT.cut(0, at + TAIL)) << planted("r2", at + TAIL)
    play >> plants("r2", 0, Purpose.PLANT, tokens=marked(TEXT)) << planted("r2", len(TEXT) - at)
    play >> plants("r2", 0, Purpose.PLANT, tokens=behind(ASKS[0], B)) << planted("r2", len(B) + TAIL)
    assert play >> goes("r2", slot=0)
    assert play << ends("r2", END + 40, END + TAIL) >> reports("r2", predicted=END + TAIL)


@pytest.mark.parametrize("files", [OLD_FILES, NEW_FILES], ids=["old", "new"])
def test_no_plant_ends_inside_an_image_or_right_after_one(files):
    """Some engines abort on such a prompt."""
    play, ended = Play(n_slots=2, limits=Limits(pause=0.0), **files, **LATER_BUILD), 0
    for number, question in enumerate((*ASKS, *ASKS)):
        image, request = (A, B)[number % 2], f"r{number}"
        play << arrives(request) << knows(request, TEXT + image + question)
        while play.effects:
            match play.effects[0]:
                case Prefill(request=owner, tokens=tokens):
                    assert tokens.may_end(len(tokens))
                    ended += 1
                    play.effects.popleft()
                    play << planted(owner, 10)
                case Forward():
                    play.effects.popleft()
                    play << ends(request, END + 40, 0)
                case Save(place=place, moment=moment):
                    play >> saves(place.slot, moment) << saved(f"s{number} {ended}")
                case _:
                    play.effects.popleft()
    assert ended


CLOSED = Tokens.image(b"a" * 32, 300, closed=True)


def test_files_without_checkpoints_get_one_that_ends_behind_the_image():
    """It serves every question about the image, also after a restart."""
    play = Play(n_slots=1, **OLD_FILES, **LATER_BUILD)
    play << arrives("r1") << knows("r1", TEXT + CLOSED + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=TEXT + CLOSED)
    assert play << planted("r1", END) >> saves(0, SaveMoment.BOUNDARY)
    assert play << saved("image") >> plants("r1", 0, Purpose.PLANT, tokens=behind(ASKS[0]))
    assert play << planted("r1", TAIL) >> goes("r1", slot=0, reason=Reason.COLD)
    assert play << ends("r1", END + 40, END + TAIL) >> reports("r1", usage__planted=END + TAIL)


@pytest.mark.parametrize(
    ("image", "files"), [(A, OLD_FILES), (CLOSED, NEW_FILES)], ids=["not closed", "with checkpoints"]
)
def test_no_file_ends_behind_an_image_if_that_may_abort_the_engine_or_buys_nothing(image, files):
    play = Play(n_slots=1, **files, **LATER_BUILD)
    play << arrives("r1") << knows("r1", TEXT + image + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=behind(ASKS[0]))
    assert play << planted("r1", END + TAIL) >> goes("r1", slot=0, reason=Reason.COLD)


def test_no_file_ends_behind_an_image_if_it_is_dearer_than_the_image():
    play = Play(n_slots=1, **OLD_FILES, **LATER_BUILD)
    play.table.rates.prefill.mean = 1e6  # tokens per second
    play << arrives("r1") << knows("r1", TEXT + CLOSED + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT, tokens=behind(ASKS[0]))
    assert play << planted("r1", END + TAIL) >> goes("r1", slot=0, reason=Reason.COLD)


def test_a_plant_that_cannot_be_sent_leaves_the_contents_of_the_slot_unchanged():
    play = Play(n_slots=1, **LATER_BUILD)
    assert one_turn(play, "r0", TEXT, slot=0)
    held = play.table.shadow.slots[0]
    play << arrives("r1") << knows("r1", TEXT + A + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT)
    assert play << planted("r1", None, unsent=True) >> goes("r1", slot=0, reason=Reason.PREFIX)
    contents = play.table.shadow.slots[0]
    assert held is not None
    assert contents is not None
    assert contents.tokens == held.tokens


def test_a_plant_that_cannot_be_sent_is_not_retried_in_idle_time():
    play = Play(n_slots=1, limits=Limits(pause=0.1), **LATER_BUILD)
    assert one_turn(play, "r1", TEXT + Tokens(range(40)), slot=0)
    play << follows("r1", TEXT + A + ASKS[0])
    play.wakes()
    (chore,) = play.placement._state.chores
    assert play >> plants(chore, 0, Purpose.NEXT) << filled(None, unsent=True)
    play.later(100.0)
    while play.alarms:
        play.wakes()
    assert play.rests()


def test_a_differing_token_count_leaves_a_slot_with_unknown_tokens():
    play = Play(n_slots=1, **LATER_BUILD)
    play << arrives("r1") << knows("r1", TEXT + A + ASKS[0])
    assert play >> plants("r1", 0, Purpose.PLANT) << planted("r1", END + TAIL) >> goes("r1", slot=0)
    assert play << ends("r1", END + 41, END + TAIL) >> reports("r1")
    contents = play.table.shadow.slots[0]
    assert contents is not None
    assert (len(contents.tokens), contents.total) == (0, END + 41)

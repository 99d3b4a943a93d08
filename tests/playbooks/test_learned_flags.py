"""Flags that the sidecar does not know: the engine's behaviour changes later decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from playbooks.playbook import Play, arrives, ends, goes, knows, learns, one_turn, planted, plants, reports
from slotkeeper.scheduler.effects import Purpose
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import FLAGS, EngineTraits, Known
from slotkeeper.scheduler.types import Reason

TALK = Tokens(range(10_000, 14_000))
OTHER = [Tokens(range(n, n + 1000)) for n in (30_000, 40_000, 50_000)]
OLD: dict[str, Any] = {"n_slots": 1, "eager_thinning": True}
LEFT = 1996  # by the second turn: 4 tokens before its prompt's end


def turns(play: Play) -> None:
    """Four turns of a conversation, each 1000 tokens longer than the one before."""
    for n in range(1, 5):
        prompt, cached = TALK.cut(0, n * 1000), (n - 1) * 1000
        assert one_turn(play, f"t{n}", prompt, slot=0, cached=cached)


def edited(play: Play, name: str, prompt: Tokens, cached: int) -> Play:
    """An edit of the second turn's end, which finds the state that the second turn left."""
    play << arrives(name) << knows(name, prompt) >> goes(name, slot=0, reason=Reason.PREFIX)
    return play << ends(name, len(prompt), cached) >> reports(name)


def test_a_checkpoint_that_survived_thinning_shows_that_planting_is_worth_it():
    play = Play(**OLD)
    turns(play)
    edited(play, "edit", TALK.cut(0, 1998) + OTHER[0], LEFT)
    assert play >> learns(name="checkpoint_min_step", value=0, how=Known.KEPT)
    play << arrives("next") << knows("next", TALK.cut(0, 1400) + OTHER[1])
    play >> plants("next", 0, Purpose.PLANT) << planted("next", 500)


def test_a_flag_from_the_command_line_is_not_replaced_by_an_answer():
    read = EngineTraits().learned(Known.FLAGS, **{name: getattr(EngineTraits(), name) for name in FLAGS})
    play = Play(**OLD, knowledge=read.knowledge)
    turns(play)
    assert edited(play, "edit", TALK.cut(0, 1998) + OTHER[0], LEFT)
    assert play.table.traits.checkpoint_min_step == 8192


def test_the_ends_of_a_plants_batches_reveal_the_batch_size():
    play = Play(n_slots=1, eager_thinning=False)
    assert one_turn(play, "r1", TALK.cut(0, 1000) + OTHER[0], slot=0)
    play << arrives("r2") << knows("r2", TALK.cut(0, 1000) + OTHER[1])
    play >> plants("r2", 0, Purpose.PLANT, tokens=TALK.cut(0, 1000) + OTHER[1].cut(0, 4))
    play << replace(planted("r2", 1004), cuts=(744, 1000)) >> goes("r2", slot=0)
    assert play >> learns(name="n_ubatch", value=256, how=Known.BATCHES)
    assert play.table.traits.n_ubatch == 256


def test_a_known_batch_size_is_not_reported_again():
    play = Play(n_slots=1, eager_thinning=False)
    play.table.learn(play.table.traits.learned(Known.BATCHES, n_ubatch=256))
    assert one_turn(play, "r1", TALK.cut(0, 1000) + OTHER[0], slot=0)
    play << arrives("r2") << knows("r2", TALK.cut(0, 1000) + OTHER[1])
    play >> plants("r2", 0, Purpose.PLANT)
    assert play << replace(planted("r2", 1004), cuts=(744, 1000)) >> goes("r2", slot=0)

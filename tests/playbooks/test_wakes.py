"""Timers: few are set for each turn, however long a slot waits to be saved."""

from __future__ import annotations

from playbooks.playbook import NEW_FILES, Play, arrives, ends, knows, saved, sees, starts
from slotkeeper.scheduler.effects import Save
from slotkeeper.scheduler.prompts.tokens import Tokens

ENDLESS = Tokens(range(900_000, 901_000))
TURNS = 60


def test_a_turn_sets_few_timers():
    """Two conversations alternate, beside a stream that keeps the engine from pausing for long."""
    play = Play(memory="dense", n_slots=3, **NEW_FILES)
    prompts = [Tokens(range(start, start + 1000)) for start in (0, 100_000)]
    starts_running(play, "stream", ENDLESS)
    for turn in range(TURNS):
        prompts[turn % 2] += Tokens([turn] * 40)
        prompt = prompts[turn % 2]
        starts_running(play, f"r{turn}", prompt)
        play.later(1)
        play << ends(f"r{turn}", len(prompt), len(prompt) - 40 if turn > 1 else 0)
        answer_effects(play)
        if turn % 5 == 0:  # the stream pauses for a moment
            play << ends("stream", len(ENDLESS), 0)
            answer_effects(play)
            starts_running(play, "stream", ENDLESS)
        until = play.clock + 3
        while play.alarms and min(play.alarms) <= until:
            play.wakes()
            answer_effects(play)
        play.clock = max(play.clock, until)
    assert 0 < play.timers_set <= TURNS


def starts_running(play: Play, request: str, prompt: Tokens) -> None:
    play << arrives(request) << knows(request, prompt)
    if play.looking:  # nothing ran for some seconds
        play << sees()
    answer_effects(play)
    play << starts(request)


def answer_effects(play: Play) -> None:
    """Answer all effects; saves succeed."""
    while play.effects:
        effect = play.effects.popleft()
        if isinstance(effect, Save):
            play.step = effect
            play << saved(f"s{play.clock}")

"""The mechanisms of the scheduler by name, and how each is switched off: for `benchmarks.ablations`.

A mechanism stays if some published row gets worse by `WORSE` without it, or if a test names the fault that
then comes back. What makes no decision about slots has no name here: the shell, the store, routers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any, Final
from unittest.mock import patch

from slotkeeper.api.answers.echo import Habit
from slotkeeper.scheduler.effects import Step
from slotkeeper.scheduler.idle_work import first_step, pause, prefetch_plan
from slotkeeper.scheduler.prompts.planting import CutPlace, places
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import Rates
from slotkeeper.scheduler.requests.pending import Pending, Plan, Structure
from slotkeeper.scheduler.slots.engine_model import EngineTraits, SlotContents
from slotkeeper.scheduler.slots.table import EngineTable
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.state import State
from slotkeeper.scheduler.types import RequestId

WORSE: Final = 0.02  # of a published ratio to the stock engine, in tokens or seconds
JOINED: Final = "+"  # between the names of mechanisms that are left out together
SCHEDULER: Final = "slotkeeper.scheduler."
NEVER_SO_MANY: Final = 1 << 40  # tokens, bytes or slots


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What a mechanism does, and the replacement of each name without it, below `slotkeeper.scheduler`.

    `fault`: a test of tests/playbooks or tests/unit/scheduler that fails without it, for a mechanism that no
    published row shows.
    """

    about: str
    off: Mapping[str, Any]
    fault: str = ""
    within: str = SCHEDULER
    simulated: bool = True  # whether the simulation has what it replaces


# -- replacements ----------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


def _no_places(*_: Any, **__: Any) -> set[int]:
    return set()


def _none(*_: Any, **__: Any) -> None:
    return None


def _false(*_: Any, **__: Any) -> bool:
    return False


def _true(*_: Any, **__: Any) -> bool:
    return True


def _zero(*_: Any, **__: Any) -> float:
    return 0.0


def _certain(*_: Any, **__: Any) -> float:
    return 1.0


def _mean(rates: Rates) -> float:
    return rates.prefill.mean


def _never(*_: Any, **__: Any) -> float:
    return inf


async def _unknown(*_: Any, **__: Any) -> None:
    """Return a prediction that the next turn is unknown."""


def _usual(habit: Habit, *_: Any, **__: Any) -> Habit:
    return habit


def _unchanged(_: Any, traits: EngineTraits, *__: Any, **___: Any) -> EngineTraits:
    return traits


def _as_before(traits: EngineTraits, **_: Any) -> EngineTraits:
    return traits


def _arrived(_: State, arrived: Sequence[Pending], __: float) -> list[RequestId]:
    return [pending.arrived.request for pending in arrived]


def _whole(_: Pending, plan: Plan) -> Plan:
    return plan


def _all(found: Iterable[CutPlace], *_: Any) -> Iterator[CutPlace]:
    yield from found


def _without_branches(structure: Structure, prompt: Tokens, **more: bool) -> Iterator[CutPlace]:
    return places(replace(structure, branches=()), prompt, **more)


def _at_once(state: State, table: EngineTable, contents: SlotContents, _: float) -> float:
    return state.limits.pause if prefetch_plan(contents, table, state.catalog) else inf


def _after_a_pause(state: State, table: EngineTable, contents: SlotContents, now: float) -> float:
    return contents.used + pause(state, table, contents, now)


def _only_to_park(
    contents: SlotContents, table: EngineTable, catalog: Catalog, *, rested: bool
) -> Step | None:
    return None if rested else first_step(contents, table, catalog, rested=rested)


# -- names -----------------------------------------------------------------------------------------------

MECHANISMS: Final[Mapping[str, Mechanism]] = MappingProxyType(
    {
        # choose a place
        "messages": Mechanism(
            "continues a conversation in its slot by its messages",
            {"placement._continuing": _none},
            fault="test_a_brief_request_that_continues_a_conversation_goes_to_its_slot",
        ),
        "touch": Mechanism(
            "loads from the engine's RAM cache, by a task of one token",
            {"candidates._touched": _nothing},
        ),
        "restore": Mechanism("restores a file before a request", {"candidates._restored": _nothing}),
        "parking": Mechanism("saves a slot before it is overwritten", {"candidates._parking": _none}),
        "coming-files": Mechanism("waits for a file that is being written", {"placement._coming": _nothing}),
        "waits": Mechanism(
            "waits for a better slot than the free ones",
            dict.fromkeys(
                ("candidates._draining", "candidates._in_maintenance", "candidates.when_over"), _nothing
            ),
        ),
        "one-prompt": Mechanism("keeps two prompts out of one batch", {"placement._shares_batch": _false}),
        "steer": Mechanism(
            "prefills a prompt where the engine will look for it",
            {"candidates.STEER_TAIL": NEVER_SO_MANY, "requests.lifecycle.STEER_TAIL": NEVER_SO_MANY},
            fault="test_a_messages_request_is_steered_if_the_engine_would_overwrite_a_more_valuable_slot",
        ),
        "few-priced": Mechanism(
            "prices only a few of many slots: saves time",
            {"candidates.PRICED_SLOTS": NEVER_SO_MANY},
            fault="test_few_of_many_slots_are_priced",
        ),
        # prices
        "loss": Mechanism("counts what a request overwrites", {"prices._loss": _zero}),
        "chance": Mechanism(
            "discounts states that are old",
            {"slots.engine_model.SlotContents.chance": _certain},
            fault="test_the_least_recently_used_contents_are_overwritten",
        ),
        "after-edit": Mechanism(
            "discounts a state whose last message is edited", {"prices.KEPT_AFTER_EDIT": 1.0}
        ),
        "ram-copies": Mechanism(
            "counts copies to and from the engine's RAM cache", {"rates.Rates.copy_price": _zero}
        ),
        "small-ram": Mechanism(
            "knows states that exceed the RAM cache",
            {"slots.shadow.EngineShadow.exceeds_ram": _false},
            fault="test_the_oldest_entries_leave_a_ram_cache_that_is_full_but_the_last_one_stays",
        ),
        "file-times": Mechanism(
            "learns how long files, copies and prefills take", {"rates.LinearTimes.took": _none}
        ),
        "marginal": Mechanism(
            "prices files by the marginal speed of a prefill",
            {"rates.Rates.marginal_prefill": property(_mean)},
            fault="test_a_file_is_priced_in_the_tokens_by_which_a_prefill_may_be_longer",
        ),
        "large-files": Mechanism(
            "believes the time of a large first file",
            {"rates.LARGE_BYTES": NEVER_SO_MANY},
            fault="test_a_large_slow_first_file_counts_alone",
        ),
        # plant
        "planting": Mechanism(
            "makes checkpoints and files while it prefills", {"prompts.planting.steps": _nothing}
        ),
        "planted-files": Mechanism(
            "saves shared beginnings at once", {"prompts.planting._files": _no_places}
        ),
        "branches": Mechanism(
            "plants where prompts diverged before (rule 1)",
            {"prompts.planting.places": _without_branches},
            fault="test_a_checkpoint_is_planted_where_two_prompts_diverge_for_the_third",
        ),
        "new-heads": Mechanism(
            "plants in new tools and system text (rules 2, 3)", {"prompts.planting._in_head": _nothing}
        ),
        "distances": Mechanism(
            "plants at even distances there (rule 3)",
            {"prompts.planting.STRETCH_TOKENS": NEVER_SO_MANY},
            fault="test_a_long_unknown_head_gets_checkpoints_at_even_distances",
        ),
        "edits": Mechanism(
            "plants at user messages (rule 4)",
            {"prompts.planting.CHANCE_OF_EDIT": 0.0},
            fault="test_the_most_valuable_places_are_planted_and_those_close_to_them_left_out",
        ),
        "guesses": Mechanism(
            "plants inside a long message (rule 5)", {"prompts.planting.CHANCE_GUESSED": {}}
        ),
        "images": Mechanism(
            "plants behind the last image (rule 6)",
            {"prompts.planting.CHANCE_ABOUT_IMAGE": 0.0},
            fault="test_a_checkpoint_is_planted_right_after_the_last_image",
        ),
        "displaced": Mechanism(
            "plants checkpoints that a plant would displace",
            {"prompts.planting._displaced": _no_places},
            fault="test_a_plant_does_not_prevent_the_requests_own_checkpoint",
        ),
        "first-checkpoint": Mechanism(
            "leaves the list's first checkpoint where it is worth most",
            {"prompts.planting._worth_being_first": _all},
        ),
        # idle work
        "idle-saves": Mechanism(
            "saves slots while conversations pause", {"idle_work.first_step": _only_to_park}
        ),
        "prefetch": Mechanism(
            "prefetches the next turn's beginning",
            {"idle_work._pays_ahead": _false},
            fault="test_the_start_of_the_next_turn_is_computed_in_a_pause_and_reused_by_that_turn",
        ),
        "patience": Mechanism(
            "prefetches only where clients will hardly wait for it",
            {"idle_work.patience": _at_once},
            fault="test_a_short_prefetch_begins_when_its_client_will_probably_not_return_during_the_pass",
        ),
        "rests": Mechanism(
            "saves in rests that are expected to last",
            {"idle_work.save_due": _after_a_pause},
            fault="test_a_slow_save_does_not_begin_in_the_short_rests_of_another_client",
        ),
        "beside-answers": Mechanism(
            "saves beside running answers after a long time",
            {"idle_work.pause_beside_answers": _never},
            fault="test_while_other_slots_are_busy_a_conversation_is_saved_after_two_minutes",
        ),
        "make-way": Mechanism(
            "stops a prefetch when a request comes",
            {"idle_work._make_way": _nothing},
            fault="test_a_request_waits_for_a_short_prefetch_and_stops_a_long_one",
        ),
        "crowded": Mechanism(
            "saves sooner, prefetches less while conversations exceed slots",
            {"slots.table.EngineTable.crowded": _false},
            fault="test_in_a_crowd_a_slot_is_saved_after_a_shorter_pause",
        ),
        "crowd-cut": Mechanism(
            "cuts a slot back and saves it in a crowd",
            {"idle_work.crowd_cut": _none},
            fault="test_in_a_crowd_a_slot_is_cut_back_before_it_is_saved_and_is_not_restored",
        ),
        "cut-back": Mechanism(
            "cuts back to where the next turn continues before a save",
            {"idle_work.cut_back": _none},
            fault="test_in_a_crowd_a_slot_is_cut_back_before_it_is_saved_and_is_not_restored",
        ),
        "boundary-files": Mechanism(
            "cuts back to boundaries for more files",
            {"idle_work._next_cut": _none},
            fault="test_an_old_engine_gets_files_of_the_end_the_last_prompt_and_user_messages_then_a_restore",
        ),
        "spares": Mechanism(
            "spares checkpoints that the next turn needs",
            {"idle_work._spares": _true},
            fault="test_a_slot_whose_answer_broke_off_is_not_cut_if_that_would_lose_its_checkpoints",
        ),
        "draft-marks": Mechanism(
            "puts the draft state of the end into files",
            {"idle_work._mark": _none},
            fault="test_with_a_draft_model_four_foreign_tokens_are_added_to_a_newer_engines_file",
        ),
        "outdone": Mechanism(
            "drops a file that a later one replaces",
            {"idle_work._outdone": _nothing},
            fault="test_with_a_draft_model_a_file_is_dropped_once_a_later_one_of_the_same_tokens_has_the_draft_state",
        ),
        "warming": Mechanism(
            "warms the drafts of an engine that came up",
            {"idle_work._may_warm": _false},
            fault="test_with_a_draft_model_empty_slots_of_an_old_engine_get_the_latest_conversations",
        ),
        # flags that cannot be read
        "flags-by-batches": Mechanism(
            "infers batch sizes from prefills",
            {"requests.lifecycle.by_batches": _as_before},
            fault="test_the_ends_of_a_plants_batches_reveal_the_batch_size",
        ),
        "flags-by-reuse": Mechanism(
            "infers checkpoint flags from reuse",
            {"slots.evidence.Doubts.by_reuse": _unchanged},
            fault="test_a_checkpoint_that_survived_thinning_shows_that_planting_is_worth_it",
        ),
        "flags-by-file": Mechanism(
            "infers checkpoint flags from files",
            {"slots.evidence.Doubts.by_file": _unchanged},
            fault="test_a_file_with_only_the_last_checkpoints_lowers_the_limit_at_the_second_observation",
        ),
        "possible-states": Mechanism(
            "keeps the checkpoints that other flags would leave",
            {"slots.shadow.generous": _as_before},
            fault="test_a_checkpoint_that_survived_thinning_shows_that_planting_is_worth_it",
        ),
        # order
        "pieces": Mechanism(
            "prefills low requests in pieces",
            {"policies.priority.in_pieces": _whole},
            fault="test_a_long_low_request_is_computed_in_batches_and_no_token_twice",
        ),
        "stands-behind": Mechanism(
            "holds low requests back beside urgent ones",
            {"policies.priority.stands_behind": _none},
            fault="test_a_low_request_does_not_begin_while_a_more_urgent_one_runs",
        ),
        "aging": Mechanism(
            "serves a request that waited too long first",
            {"policies.priority._aged": _none},
            fault="test_a_priority_without_service_for_a_minute_is_served_next",
        ),
        "cheapest-first": Mechanism(
            "serves the waiting request with the shortest prompt first",
            {"policies.turns._ordered": _arrived},
            fault="test_the_request_whose_prompt_takes_the_shortest_time_goes_first",
        ),
        "kept-slots": Mechanism(
            "keeps a slot for a conversation whose tools return soon",
            {"policies.turns.kept_until": _none},
            fault="test_a_slot_is_kept_for_a_conversation_whose_tools_usually_return_soon",
        ),
        "kv-cells": Mechanism(
            "keeps requests within a shared KV buffer",
            {"policies.kv_pool.shortage": _none},
            fault="test_with_one_cell_too_few_the_second_request_waits_for_the_first",
        ),
        "breaker": Mechanism(
            "rests an engine that fails",
            {"rates.Breaker.failed": _none},
            fault="test_several_failures_in_a_row_open_the_breaker",
        ),
        "outdated": Mechanism(
            "looks again before it counts on idle slots",
            {"slots.table.EngineTable.outdated": _false},
            fault="test_after_some_seconds_a_long_state_is_seen_before_it_is_counted_on",
        ),
        # predict the next turn; the simulation knows it
        "next-turns": Mechanism(
            "predicts how a reply returns",
            {"runtime.render.NextTurns.prefix": _unknown},
            within="slotkeeper.",
            simulated=False,
        ),
        "habits": Mechanism(
            "learns how each client sends replies back",
            {"runtime.render.learnt": _usual},
            within="slotkeeper.",
            simulated=False,
        ),
    }
)


def known(text: str) -> str:
    """Return one name, or several that are left out together. Raises ValueError for an unknown one."""
    if unknown := [name for name in text.split(JOINED) if name not in MECHANISMS]:
        raise ValueError(f"unknown mechanism: {', '.join(unknown)}")
    return text


@contextmanager
def without(names: str = "") -> Iterator[None]:
    """Switch off one mechanism, or several joined by `JOINED`. Raises AttributeError if a place is gone."""
    with ExitStack() as off:
        for name in names.split(JOINED) if names else ():
            mechanism = MECHANISMS[known(name)]
            for place, replacement in mechanism.off.items():
                off.enter_context(patch(mechanism.within + place, replacement))
        yield

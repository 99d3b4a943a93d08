"""What no playbook shows of the choice of a slot: alternatives, turns of unknown tokens, and many slots."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from slotkeeper.scheduler import candidates
from slotkeeper.scheduler.candidates import BEATEN, blind, cheapest, continuing
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    Checkpoint,
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
)
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.slots.table import EngineTable, Maintenance, SlotState
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.types import EngineId, Reason, RequestId, SlotId

NOW = 1000.0
SYSTEM = Tokens(range(2125))


def text(start, length):
    return Tokens(range(start, start + length))


def conversation(prompt, *, turns=3, memory=Memory.HYBRID, hash_chain=()):
    """Return a state of a chat: checkpoints at the system prompt's end and four tokens before its own end."""
    kept = () if memory is Memory.DENSE else (Checkpoint(2125, 1), Checkpoint(len(prompt) - 4, 2))
    checkpoints = tuple(c for c in kept if c.at < len(prompt))
    return SlotContents(
        tokens=prompt, checkpoints=checkpoints, turns=turns, used=NOW - 10, hash_chain=hash_chain
    )


def table(*contents, name="e0", **traits):
    engine = EngineTraits(**({"memory": Memory.HYBRID, "n_slots": len(contents), **traits}))
    built = EngineTable(EngineId(name), EngineShadow(engine))
    built.shadow.slots = list(contents)
    return built


def choose(engine, prompt, *, pinnable=True, **more):
    tables = engine if isinstance(engine, list) else [engine]
    return cheapest(
        tables, prompt, pinnable=pinnable, now=NOW, catalog=more.pop("catalog", Catalog()), **more
    )


A = SYSTEM + text(10_000, 1900)
B1 = SYSTEM + text(20_000, 599)
TITLE = SYSTEM.cut(0, 300) + text(30_000, 200)


@pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.DENSE])
@pytest.mark.parametrize("ram", [True, False])
@pytest.mark.parametrize("title", [TITLE, text(30_000, 500), SYSTEM + text(30_000, 200)])
def test_a_title_request_does_not_overwrite_a_long_conversation_while_another_slot_is_free(
    memory, ram, title
):
    long = SYSTEM + text(10_000, 30_000)
    engine = table(conversation(long, memory=memory), None, memory=memory, ram_cache=ram)
    assert choose(engine, title).slot == 1


@pytest.mark.parametrize(("size", "reason"), [(10**8, Reason.SNAPSHOT), (10**9, Reason.RAM_CACHE)])
def test_with_a_draft_model_a_small_snapshot_is_preferred_to_the_prompt_cache(size, reason):
    """Of several states of one conversation the engine may load an older one."""
    files = {
        "slot_files": True,
        "fingerprint": "f",
        "state_version": 4,
        "files_carry": True,
        "speculative": True,
    }
    long = conversation(SYSTEM + text(10_000, 10_000))
    engine = table(conversation(A), **files)
    engine.shadow.ram.append(long)
    catalog = Catalog()
    file = Snapshot(id=SnapshotId("s"), fingerprint="f", tokens=long.tokens, size=size)
    catalog.put(replace(file, checkpoints=(2125, len(long.tokens) - 4)))
    assert choose(engine, long.tokens + text(70_000, 400), catalog=catalog).reason is reason


def test_the_least_recently_used_contents_are_overwritten():
    old = replace(conversation(text(60_000, len(A))), used=NOW - 7200)
    engine = table(conversation(A), old, ram_cache=False)
    assert choose(engine, text(30_000, 500)).slot == 1


def test_t6_with_a_unified_buffer_a_request_is_unpinned_if_the_engine_would_load_its_prompt():
    engine = table(None, None, unified=True)
    engine.shadow.ram.append(conversation(A))
    plan = choose(engine, A + text(11_900, 400))
    assert (plan.reason, plan.pinned, plan.steps) == (Reason.ENGINE_CHOSE, False, ())
    assert plan.reuse_plan.reuse == len(A)


def test_an_unpinnable_request_waits_while_a_pinned_request_is_being_sent():
    engine = table(conversation(A), None)
    engine.move(SlotId(1), SlotState.LAUNCHED, RequestId("r"), NOW)
    assert choose(engine, A + text(11_900, 400), pinnable=False) is None


def test_a_slot_that_is_being_saved_is_waited_for_because_its_engine_is_stalled():
    """The engine computes nothing meanwhile, so a request in another slot would not begin sooner."""
    now = conversation(A + text(40_000, 100))
    engine = table(now, conversation(A), ram_cache=False)
    engine.move(SlotId(0), SlotState.MAINTENANCE, RequestId("chore"), NOW)
    engine.maintenance[SlotId(0)] = Maintenance(NOW, 0.5, None, stalls=True)
    plan = choose(engine, now.tokens + text(11_900, 30))
    assert (plan.slot, plan.wait) == (0, True)


def test_an_engine_that_is_closed_for_a_moment_is_waited_for():
    closed, free = table(conversation(A), None), table(None, name="e1")
    closed.send(RequestId("r"), 1, NOW)
    assert choose([closed, free], A + text(11_900, 400)).wait


# -- alternatives ----------------------------------------------------------------------------------------


def test_the_alternatives_are_kept_in_order_of_cost():
    engine = table(conversation(A), conversation(text(60_000, len(A))), None, ram_cache=False)
    plan = choose(engine, A + text(11_900, 400))
    assert (plan.slot, plan.reason) == (0, Reason.PREFIX)
    assert plan.beaten
    assert plan.price <= plan.beaten[0].price
    prices = [other.price for other in plan.beaten]
    assert prices == sorted(prices)
    assert {other.slot for other in plan.beaten} >= {1, 2}


def test_only_a_few_alternatives_are_kept_and_none_of_theirs():
    plan = choose(table(*[conversation(text(n * 10_000, 2000)) for n in range(1, 20)]), B1)
    assert len(plan.beaten) == BEATEN
    assert all(other.beaten == () for other in plan.beaten)


# -- without tokens --------------------------------------------------------------------------------------


def with_hash_chain(*digests):
    return conversation(A, hash_chain=digests)


def test_if_the_longest_matching_conversation_is_busy_no_shorter_one_is_continued():
    engine = table(with_hash_chain(b"s", b"1"), with_hash_chain(b"s", b"1", b"2", b"3"))
    engine.move(SlotId(1), SlotState.RUNNING, RequestId("r"), NOW)
    assert continuing([engine], (b"s", b"1", b"2", b"3", b"4"), NOW) is None


def test_if_the_longest_matching_conversation_is_on_a_closed_engine_no_other_is_continued():
    closed, free = table(with_hash_chain(b"s", b"1", b"2")), table(with_hash_chain(b"s", b"1"), name="e1")
    closed.send(RequestId("r"), 1, NOW)
    assert continuing([closed, free], (b"s", b"1", b"2", b"3"), NOW) is None


def test_a_prompt_of_unknown_tokens_overwrites_the_contents_least_likely_to_return():
    engine = table(*(replace(conversation(A), used=NOW - age) for age in (10, 90, 30)))
    assert blind([engine], pinnable=True, now=NOW, catalog=Catalog()).slot == 1
    assert blind([engine], pinnable=False, now=NOW, catalog=Catalog()).slot is None
    engine.up = False
    assert blind([engine], pinnable=True, now=NOW, catalog=Catalog()) is None


SAID = (b"s", b"1")
NEXT, AGAIN = (*SAID, b"2", b"3"), SAID
OLD = {"slot_files": True, "state_version": 2, "fingerprint": "f", "files_carry": False}
NEW = {**OLD, "state_version": 4, "files_carry": True, "eager_thinning": False}


@pytest.mark.parametrize(
    ("asked", "state", "traits", "at_once"),
    [
        (NEXT, {}, NEW, True),
        (NEXT, {}, OLD, False),  # its checkpoints are thinned out: a file may have more
        (NEXT, {}, {}, True),  # there are no files
        (NEXT, {}, {**OLD, "checkpoint_min_step": 0}, True),
        (NEXT, {"sure": True}, NEW, True),
        (NEXT, {"sure": True, "given_up": 5000}, NEW, False),  # the next request may differ
        (NEXT, {"sure": True, "given_up": 600}, NEW, False),
        (NEXT, {"sure": True, "given_up": 600}, {}, True),
        (
            NEXT,
            {"from_file": True},
            {**OLD, "checkpoint_min_step": 0},
            False,
        ),  # nor does its file have more
        (NEXT, {"checkpoints": ()}, NEW, False),  # restored: only an extension can reuse it
        (AGAIN, {}, NEW, True),
        (AGAIN, {"sure": True}, NEW, False),  # longer than the last prompt, perhaps by another reply
        (AGAIN, {"checkpoints": ()}, NEW, False),
        (AGAIN, {"checkpoints": ()}, {**NEW, "memory": Memory.DENSE}, True),
    ],
)
def test_a_turn_continues_without_known_tokens_only_if_little_is_lost_by_a_divergence(
    asked, state, traits, at_once
):
    contents = replace(conversation(A, hash_chain=SAID), **state)
    plan = continuing([table(contents, None, **traits)], asked, NOW)
    assert (plan is not None) is at_once


# -- many slots: only a few are priced -------------------------------------------------------------------

FILES: Any = {"slot_files": True, "fingerprint": "f", "state_version": 4, "files_carry": True}
MANY = 32  # engines, of eight slots each


def in_fleet(number, length):
    return SYSTEM.cut(0, 500) + text(number * 10_000, length)


@pytest.fixture
def fleet():
    """Conversations behind one system prompt; every second one is in a file, too."""
    chance, tables, catalog = Random(3), [], Catalog()
    for number in range(MANY):
        slots = []
        for slot in range(8):
            tokens = in_fleet(1 + number * 8 + slot, chance.randint(300, 3000))
            used, turns = NOW - chance.uniform(1, 600), chance.randint(1, 5)
            slots.append(SlotContents(tokens=tokens, turns=turns, used=used))
            if slot % 2:
                name, size = SnapshotId(f"s{number}-{slot}"), len(tokens) * 65_536
                catalog.put(Snapshot(id=name, fingerprint="f", tokens=tokens, size=size))
        tables.append(table(*slots, name=f"e{number}", memory=Memory.DENSE, ram_cache=False, **FILES))
    return tables, catalog


@pytest.mark.parametrize(
    "prompt",
    [in_fleet(77, 3200), in_fleet(900, 700), text(50_000_000, 1000)],
    ids=["next turn", "new conversation", "nothing in common"],
)
@pytest.mark.parametrize("pinnable", [True, False])
def test_few_of_many_slots_are_priced(fleet, prompt, pinnable, monkeypatch):
    (tables, catalog), asked = fleet, []
    plan_reuse = EngineShadow.plan_reuse

    def counted(shadow, slot, *args, **more):
        asked.append((shadow, slot))
        return plan_reuse(shadow, slot, *args, **more)

    monkeypatch.setattr(EngineShadow, "plan_reuse", counted)
    found = choose(tables, prompt, pinnable=pinnable, catalog=catalog)
    few = len(asked)
    monkeypatch.setattr(candidates, "PRICED_SLOTS", 8 * MANY)
    best = choose(tables, prompt, pinnable=pinnable, catalog=catalog)
    assert (found.table, found.slot, found.reason) == (best.table, best.slot, best.reason)
    assert few * 2 <= len(asked) - few


def test_a_free_slot_is_priced_although_many_busy_ones_share_more():
    engine = table(*(conversation(A, memory=Memory.DENSE) for _ in range(30)), memory=Memory.DENSE)
    engine.shadow.slots[17] = conversation(TITLE, memory=Memory.DENSE)
    for slot in range(30):
        if slot != 17:
            engine.move(SlotId(slot), SlotState.RUNNING, RequestId(f"r{slot}"), NOW - 1)
    assert choose(engine, A + text(90_000, 50)).slot == 17

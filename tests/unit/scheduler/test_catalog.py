"""Cached answers of the catalog: how many, and how long they are valid."""

from dataclasses import replace

import pytest

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import EngineTraits, Memory, Snapshot, SnapshotId
from slotkeeper.scheduler.snapshots import catalog as module
from slotkeeper.scheduler.snapshots.catalog import REMEMBERED, Catalog
from slotkeeper.scheduler.types import Tier

TRAITS = EngineTraits(
    memory=Memory.DENSE, slot_files=True, state_version=4, files_carry=True, fingerprint="f"
)
A = Tokens(range(1000))


def snapshot(name, tokens=A, **more):
    return Snapshot(id=SnapshotId(name), fingerprint="f", tokens=tokens, size=len(tokens), **more)


def test_without_snapshots_no_answers_are_cached():
    """Otherwise each answer would keep a prompt in memory, for ever if there is never a snapshot."""
    catalog = Catalog()
    for n in range(100):
        assert catalog.covered(Tokens(range(n, n + 50)), TRAITS) == 0
    assert not catalog._covered


def test_the_number_of_cached_answers_is_limited():
    catalog = Catalog()
    catalog.put(snapshot("s"))
    for n in range(3 * REMEMBERED):
        assert catalog.covered(Tokens(range(100 + n)), TRAITS) == min(100 + n, len(A))
    assert len(catalog._covered) <= REMEMBERED


def test_the_tokens_of_cached_answers_are_limited(monkeypatch):
    """An answer keeps its prompt: a thousand of 100,000 tokens were 400 MB."""
    monkeypatch.setattr(module, "REMEMBERED_TOKENS", 5000)
    catalog = Catalog()
    catalog.put(snapshot("s"))
    for n in range(100):
        assert catalog.covered(Tokens(range(200 + n)), TRAITS) == 200 + n
        assert sum(len(tokens) for _, tokens in catalog._covered) <= 5000
        if n == 10:  # the answers that this file outdates are forgotten, so their tokens no longer count
            catalog.put(snapshot("t", Tokens([*range(205), 7])))
            catalog.take(SnapshotId("s"))
            catalog.put(snapshot("s"))
    assert len(catalog._covered) > 10
    assert catalog.covered(Tokens(range(6000)), TRAITS) == len(A)  # one that is longer than the limit
    assert len(catalog._covered) == 1


def test_a_cached_answer_is_valid_until_a_snapshot_is_added_or_removed():
    catalog = Catalog()
    catalog.put(snapshot("s", A.cut(0, 500)))
    assert catalog.covered(A, TRAITS) == 500
    catalog.put(snapshot("t", A.cut(0, 700)))
    assert catalog.covered(A, TRAITS) == 700
    catalog.take(SnapshotId("t"))
    assert catalog.covered(A, TRAITS) == 500


def test_a_cached_answer_outlives_files_that_would_give_no_more(monkeypatch):
    """Otherwise each such file would cost a lookup for each slot that shares its system prompt."""
    catalog, looked_up = Catalog(), []
    best = Catalog.best

    def counted(*args):
        looked_up.append(args)
        return best(*args)

    monkeypatch.setattr(Catalog, "best", counted)
    catalog.put(snapshot("s", A.cut(0, 500)))
    assert catalog.covered(A, TRAITS) == 500
    catalog.put(snapshot("t", A.cut(0, 500) + Tokens([7])))
    catalog.take(SnapshotId("t"))
    assert catalog.covered(A, TRAITS) == 500
    assert len(looked_up) == 1
    catalog.take(SnapshotId("s"))
    assert catalog.covered(A, TRAITS) == 0


def test_nothing_is_covered_until_a_file_has_come():
    catalog = Catalog()
    assert catalog.covered(A, TRAITS) == 0
    catalog.put(snapshot("s"))
    assert catalog.covered(A, TRAITS) == len(A)


def test_a_snapshot_that_moves_to_the_cold_tier_is_still_offered():
    catalog = Catalog()
    hot = snapshot("s")
    catalog.put(hot)
    catalog.put(replace(hot, tier=Tier.COLD))
    assert (catalog.size(Tier.HOT), catalog.size(Tier.COLD)) == (0, 1000)
    assert catalog.best(A, TRAITS, lambda _: 0.0) == (replace(hot, tier=Tier.COLD), 999)


def test_the_sums_of_a_tier_are_known_without_a_look_at_its_files():
    """They are needed for each file that is saved."""
    catalog = Catalog()
    for n in range(20):
        catalog.put(snapshot(f"s{n}", A.cut(0, 500 + n)))
    catalog._all = None
    assert (catalog.size(Tier.HOT), catalog.beyond(Tier.HOT, 19)) == (10190, 10190 // 20)


def test_the_sums_of_a_tier_are_those_of_its_files():
    catalog = Catalog()
    for n in range(20):
        catalog.put(snapshot(f"s{n}", A.cut(0, 500 + n)))
    for n in range(0, 20, 3):
        catalog.put(replace(catalog.get(SnapshotId(f"s{n}")), tier=Tier.COLD, size=7 + n))
        catalog.put(replace(catalog.get(SnapshotId(f"s{n + 1}")), size=3))
        catalog.take(SnapshotId(f"s{n + 2}"))
    catalog.take(SnapshotId("never there"))
    for tier in Tier:
        files = [file for file in catalog if file.tier is tier]
        assert (catalog.count(tier), catalog.size(tier)) == (len(files), sum(f.size for f in files))
        assert catalog.beyond(tier, 2) == catalog.size(tier) * max(0, len(files) - 2) // len(files)


@pytest.mark.parametrize("count", [20, 200])
def test_a_new_file_is_compared_only_with_answers_that_it_may_change(count, monkeypatch):
    """With a thousand answers, comparing all takes 7 ms for each file."""
    catalog = Catalog()
    catalog.put(snapshot("s", A.cut(0, 500)))
    talks = [A.cut(0, 600) + Tokens([5000 + n] * 50) for n in range(count)]
    for tokens in talks:
        catalog.covered(tokens, TRAITS)
    compared, lcp = [], Tokens.lcp

    def counted(*given):
        compared.append(given)
        return lcp(*given)

    monkeypatch.setattr(Tokens, "lcp", counted)
    catalog.put(snapshot("t", A.cut(0, 500) + talks[3].cut(600)))  # shares no more than is covered
    assert len(compared) <= 2, "with its neighbours in the order"
    assert len(catalog._covered) == count
    catalog.put(snapshot("u", A.cut(0, 600) + talks[3].cut(600, 620)))
    assert not catalog._covered


def test_a_file_that_moves_to_the_other_tier_is_compared_with_no_answer(monkeypatch):
    """Many files move at once. What they cover stays as it was, but not what a restore of it costs."""
    catalog = Catalog()
    for name, tokens in (("s", A.cut(0, 500)), ("t", A.cut(0, 700))):
        catalog.put(snapshot(name, tokens))
    for tokens in (A.cut(0, 600), A.cut(0, 800)):
        catalog.covered(tokens, TRAITS)
    given = [covered.by for covered in catalog._covered.values()]
    monkeypatch.setattr(module, "_shares_more", None)
    catalog.put(replace(catalog.get(given[1]), tier=Tier.COLD))
    left = [covered.by for covered in catalog._covered.values()]
    assert left == [by for by in given if by != given[1]]
    assert catalog.covered(A.cut(0, 800), TRAITS) == 700


def test_engines_of_one_model_do_not_share_answers_if_only_one_of_them_has_snapshots():
    catalog, without = Catalog(), replace(TRAITS, slot_files=False)
    catalog.put(snapshot("one"))
    for traits, covered in ((without, 0), (TRAITS, len(A)), (without, 0)):
        assert catalog.covered(A, traits) == covered
        assert bool(catalog.best(A, traits, lambda _: 0.0)) is bool(covered)


@pytest.mark.parametrize(
    "changed", [{"tokens": Tokens(range(50, 600))}, {"tier": Tier.COLD}, {"fingerprint": "other"}]
)
def test_a_file_that_comes_with_another_place_leaves_its_old_one(changed):
    """A shared folder's manifest may say anything: then the old tokens must not be offered any more."""
    catalog = Catalog()
    for name in ("s", "t"):
        catalog.put(snapshot(name, A.cut(0, 500) + Tokens([ord(name)])))
    was = catalog.get(SnapshotId("t"))
    assert catalog.covered(was.tokens, TRAITS) == 501
    catalog.put(now := replace(was, **changed))
    every = [*catalog.order(was.tier, "f").states, *catalog.order(Tier.COLD, "f").states]
    every += catalog.order(was.tier, "other").states
    assert every.count(now) == 1
    assert was not in every
    assert catalog.covered(was.tokens, TRAITS) == (501 if "tier" in changed else 500)

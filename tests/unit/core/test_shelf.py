"""The shelf: what it keeps in mind, and for how long."""

from dataclasses import replace

from slotkeeper.core.shelf import REMEMBERED, Shelf
from slotkeeper.core.snapshots import Snapshot, SnapshotId, Tier
from slotkeeper.core.tokens import Tokens
from slotkeeper.core.traits import EngineTraits, Memory

TRAITS = EngineTraits(
    memory=Memory.DENSE, slot_files=True, state_version=4, files_carry=True, fingerprint="f"
)
A = Tokens(range(1000))


def snapshot(name, tokens=A, **more):
    return Snapshot(id=SnapshotId(name), fingerprint="f", tokens=tokens, size=len(tokens), **more)


def test_without_files_nothing_is_kept_in_mind():
    """Each answer would keep a prompt alive, for ever where no file ever comes."""
    shelf = Shelf()
    for n in range(100):
        assert shelf.covered(Tokens(range(n, n + 50)), TRAITS) == 0
    assert not shelf._covered


def test_what_is_kept_in_mind_is_bounded():
    shelf = Shelf()
    shelf.put(snapshot("s"))
    for n in range(3 * REMEMBERED):
        assert shelf.covered(A.cut(0, 100 + n), TRAITS) == 100 + n
    assert len(shelf._covered) <= REMEMBERED


def test_an_answer_holds_until_a_file_comes_or_goes():
    shelf = Shelf()
    shelf.put(snapshot("s", A.cut(0, 500)))
    assert shelf.covered(A, TRAITS) == 500
    shelf.put(snapshot("t", A.cut(0, 700)))
    assert shelf.covered(A, TRAITS) == 700
    shelf.take(SnapshotId("t"))
    assert shelf.covered(A, TRAITS) == 500


def test_a_file_that_moves_to_the_cold_tier_is_still_offered():
    shelf = Shelf()
    hot = snapshot("s")
    shelf.put(hot)
    shelf.put(replace(hot, tier=Tier.COLD))
    assert (shelf.size(Tier.HOT), shelf.size(Tier.COLD)) == (0, 1000)
    assert shelf.best(A, TRAITS, lambda _: 0.0) == (replace(hot, tier=Tier.COLD), 999)


def test_the_kin_of_a_conversation_are_those_with_most_in_common_and_checkpoints():
    shelf = Shelf()
    for name, length, cuts in (("a", 400, (396,)), ("b", 900, (896,)), ("c", 1000, ()), ("d", 800, (796,))):
        shelf.put(snapshot(name, A.cut(0, length), checkpoints=cuts))
    assert shelf.kin(A, TRAITS) == ("b", "d")
    assert shelf.kin(A, replace(TRAITS, files_carry=False)) == ()

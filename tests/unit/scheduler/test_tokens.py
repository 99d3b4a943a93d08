from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import EMPTY, MOST_FOUND, ComparedPrompt, Tokens

IDS = st.lists(st.integers(-2, 3) | st.sampled_from([0x01010101, 2**31 - 1]), max_size=300)


def naive_lcp(one, other):
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


@given(IDS, IDS, IDS)
@settings(max_examples=200)
def test_lcp_equals_a_loop_over_the_ids(shared, one, other):
    a, b = shared + one, shared + other
    assert Tokens(a).lcp(Tokens(b)) == naive_lcp(a, b)


@given(IDS, IDS, IDS, st.integers(0, 10))
@settings(max_examples=200)
def test_lcp_begins_after_the_given_start(shared, one, other, start):
    a, b = shared + one, [5] * start + shared + other
    assert Tokens(a).lcp(Tokens(b), start) == naive_lcp(a, b[start:])
    assert Tokens(a).lcp(Tokens(b), len(b) + start) == 0


def test_lcp_is_exact_at_every_place_of_a_long_prompt():
    ids = [7] * 1500
    for place in range(0, 1500, 7):
        other = [*ids[:place], 8, *ids[place + 1 :]]
        assert Tokens(ids).lcp(Tokens(other)) == place


@given(IDS, st.lists(IDS, max_size=4), st.sampled_from(["", "other"]))
@settings(max_examples=100)
def test_a_compared_prompt_has_the_same_common_prefixes(shared, others, space):
    prompt = Tokens(shared)
    states = [Tokens([*shared[: len(other)], *other]).within(space) for other in others]
    compared = ComparedPrompt(prompt)
    for state in [*states, *states]:  # the second time from what it remembers
        assert compared.lcp(state) == prompt.lcp(state) == state.lcp(prompt)


def test_lcp_with_an_empty_sequence_is_zero():
    assert EMPTY.lcp(Tokens([1])) == Tokens([1]).lcp(EMPTY) == EMPTY.lcp(EMPTY) == 0


@given(IDS, st.lists(st.integers(-2, 3), max_size=3))
@settings(max_examples=200)
def test_find_all_gives_every_place_that_a_loop_finds(ids, needle):
    found = [n for n in range(len(ids)) if needle and ids[n : n + len(needle)] == needle]
    assert Tokens(ids).find_all(Tokens(needle)) == found


def test_find_all_limits_the_number_of_places():
    assert Tokens([7] * 3 * MOST_FOUND).find_all(Tokens([7])) == list(range(MOST_FOUND))


def test_find_all_does_not_match_across_the_bytes_of_two_ids():
    assert Tokens([0x00010000, 0x00010000]).find_all(Tokens([0x00000001])) == []


@given(IDS, st.integers(0, 40), st.none() | st.integers(0, 40))
@settings(max_examples=100)
def test_cut_is_a_slice(ids, start, end):
    assert Tokens(ids).cut(start, end).ids() == ids[start:end]


@given(IDS, IDS)
@settings(max_examples=100)
def test_equality_hash_and_order_are_those_of_the_ids(a, b):
    assert (Tokens(a) == Tokens(b)) == (a == b)
    assert hash(Tokens(a)) == hash(Tokens(list(a)))
    assert list(Tokens(a) + Tokens(b)) == a + b
    assert Tokens(a + b).begins_with(Tokens(a))
    assert Tokens(a).begins_with(Tokens(b)) == (a[: len(b)] == b)


def test_the_repr_shows_the_length_and_the_first_ids():
    assert repr(Tokens(range(6))) == "<Tokens 6: 0, 1, 2, 3, ...>"
    assert Tokens([5, 6])[1] == 6
    assert Tokens.of(Tokens([1, 2]).packed) == Tokens([1, 2])
    assert Tokens([1]) != [1]


def test_sequences_of_two_namespaces_share_nothing():
    ours, theirs = Tokens([1, 2, 3]), Tokens([1, 2, 3]).within("bob")
    assert ours != theirs
    assert len({ours, theirs}) == 2
    assert ours.lcp(theirs) == theirs.lcp(ours) == 0
    assert not theirs.begins_with(ours.cut(0, 1))
    assert theirs.cut(0, 2) == Tokens([1, 2]).within("bob")
    assert (theirs + Tokens([4])).space == "bob"
    assert theirs.within("") == ours


def test_each_namespace_has_its_own_prompt_tree_within_one_budget():
    tree = PromptTree(budget=40_000)
    said = Tokens(range(1000))
    tree.add(said.within("ann"))
    assert tree.longest(said.within("ann")) == 1000
    assert tree.longest(said.within("bob")) == tree.longest(said) == 0
    tree.add((said.cut(0, 500) + Tokens([7] * 500)).within("bob"))
    assert tree.branches(said.within("ann")) == []
    assert [branch.at for branch in tree.branches(said.within("bob"))] == [500]
    assert len(tree.recent_edges(10)) == 2
    for number in range(200):
        tree.add(said.within(f"key {number}"))
    assert tree.size <= 40_000
    assert len(tree._roots) <= tree.leaves + 1

from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.core.tokens import EMPTY, Tokens
from slotkeeper.core.tree import PromptTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12).map(Tokens), max_size=25)


def stored(tree):
    """Tokens on all edges, counted by walking."""
    nodes, total = [tree._root], 0
    while nodes:
        node = nodes.pop()
        total += len(node.edge)
        nodes += node.children.values()
    return total


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=14).map(Tokens))
@settings(max_examples=200, deadline=None)
def test_longest_is_the_best_of_all_sequences_while_there_is_room(sequences, prompt):
    tree = PromptTree()
    for sequence in sequences:
        tree.add(sequence)
    assert tree.longest(prompt) == max((s.lcp(prompt) for s in sequences), default=0)
    assert tree.tokens == stored(tree)


@given(SEQUENCES, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_budget_holds_and_the_newest_sequence_is_always_known(sequences, budget):
    tree = PromptTree(budget)
    for sequence in sequences:
        tree.add(sequence)
        assert tree.longest(sequence) == len(sequence)
        assert tree.tokens == stored(tree)
        assert tree.tokens <= max(budget, *map(len, sequences))


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=14).map(Tokens), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_nothing_is_known_that_was_never_added(sequences, prompt, budget):
    tree = PromptTree(budget)
    for sequence in sequences:
        tree.add(sequence)
    assert tree.longest(prompt) <= max((s.lcp(prompt) for s in sequences), default=0)


def test_the_least_recently_passed_leaf_goes_first():
    tree = PromptTree(budget=30)
    a, b, c = Tokens([1] * 10), Tokens([2] * 10), Tokens([3] * 10)
    for sequence in (a, b, c, a):  # a is passed again
        tree.add(sequence)
    tree.add(Tokens([4] * 10))
    assert [tree.longest(s) for s in (a, b, c)] == [10, 0, 10]


def test_a_shared_prefix_outlives_the_first_branch_that_is_dropped():
    tree = PromptTree(budget=25)
    system = Tokens([1] * 10)
    tree.add(system + Tokens([2] * 10))
    tree.add(system + Tokens([3] * 10))
    assert tree.longest(system + Tokens([2] * 10)) == 10
    assert tree.longest(system + Tokens([3] * 10)) == 20


def test_an_empty_tree_knows_nothing():
    tree = PromptTree()
    tree.add(EMPTY)
    assert tree.longest(Tokens([1])) == 0
    assert repr(tree) == "<PromptTree 0 tokens, 0 leaves>"

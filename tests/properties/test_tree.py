"""The prompt tree compared with a list of all sequences; its guarantees if it is cold or full."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.prompt_tree import BLOCK, Branch, PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens

SETTINGS = settings(max_examples=200)
SHORT = st.lists(st.integers(0, 2), max_size=12).map(Tokens)
CHUNKS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 40, 2 * BLOCK])), max_size=6)
LONG = CHUNKS.map(lambda chunks: Tokens(token for token, times in chunks for _ in range(times)))
PLENTY = 1 << 30
COLD = 0
LITTLE_WARMTH = 3 * BLOCK
LITTLE_ROOM = 4000  # bytes


class Naive:
    """All sequences in a list."""

    def __init__(self, sequences=()):
        self.sequences = [*sequences]

    def longest(self, prompt):
        return max((s.lcp(prompt) for s in self.sequences), default=0)

    def branches(self, prompt):
        return [found for at in range(1, len(prompt)) if (found := self._branch(prompt, at))]

    def _branch(self, prompt, at):
        seen, passed, used = set(), 0, 0.0
        for now, sequence in enumerate(self.sequences):
            if sequence.lcp(prompt) < at:
                continue
            used = float(now)
            seen |= set(sequence.cut(at, at + 1))
            if len(seen) > 1:
                passed += 1 if passed else 2
        if not seen or len(seen | {prompt[at]}) < 2:
            return None
        return Branch(at, len(seen | {prompt[at]}), passed or 1, used)


def grown(sequences, warm=PLENTY, budget=PLENTY):
    tree = PromptTree(warm, budget)
    for now, sequence in enumerate(sequences):
        tree.add(sequence, float(now))
    return tree


def nodes(tree):
    """Return all nodes except the root."""
    found, left = [], [tree._root]
    while left:
        below = [*left.pop().children.values()]
        found += below
        left += below
    return found


def check(tree):
    """Check that the tree's counters agree with its nodes."""
    there = nodes(tree)
    assert tree.tokens == sum(len(n.edge) for n in there)
    assert tree.warm == sum(n.edge.coolable for n in there)
    assert tree.size == sum(n.size for n in there)
    assert {*tree._warm} == {n for n in there if n.edge.coolable}
    assert {*tree._leaves} == {n for n in there if not n.children}
    assert all(n.parent.children[n.edge.first] is n for n in there)


def places(branches):
    return [(branch.at, branch.ways) for branch in branches]


@given(st.lists(SHORT, max_size=25), SHORT)
@SETTINGS
def test_a_warm_tree_equals_a_list_of_all_sequences(sequences, prompt):
    tree, naive = grown(sequences), Naive(sequences)
    assert tree.longest(prompt) == naive.longest(prompt)
    found, expected = tree.branches(prompt), naive.branches(prompt)
    assert [(b.at, b.ways, b.passed) for b in found] == [(b.at, b.ways, b.passed) for b in expected]
    assert all(ours.used >= theirs.used for ours, theirs in zip(found, expected, strict=True))
    check(tree)


@given(st.lists(LONG, max_size=12), LONG)
@SETTINGS
def test_a_cold_tree_never_reports_too_long_a_prefix(sequences, prompt):
    tree, naive = grown(sequences, COLD), Naive(sequences)
    assert tree.longest(prompt) <= naive.longest(prompt)
    check(tree)


@given(LONG, LONG)
@SETTINGS
def test_a_cold_edge_reports_less_than_one_block_too_little(known, prompt):
    common = known.lcp(prompt)
    assert common - BLOCK < grown([known], COLD).longest(prompt) <= common


@given(
    st.lists(LONG, max_size=12),
    st.sampled_from([COLD, LITTLE_WARMTH, PLENTY]),
    st.sampled_from([LITTLE_ROOM, PLENTY]),
)
@SETTINGS
def test_limits_hold_and_the_newest_sequence_is_always_known(sequences, warm, budget):
    tree = PromptTree(warm, budget)
    for sequence in sequences:
        tree.add(sequence)
        check(tree)
        assert tree.warm <= warm
        assert tree.size <= budget or len(tree._leaves) == 1
        missing = len(sequence) - tree.longest(sequence)
        assert missing == 0 if warm == PLENTY else 0 <= missing < BLOCK


@given(st.lists(LONG, max_size=12), st.sampled_from([COLD, LITTLE_WARMTH, PLENTY]))
@SETTINGS
def test_adding_a_known_sequence_again_takes_no_more_bytes(sequences, warm):
    tree = PromptTree(warm)
    for sequence in sequences:
        tree.add(sequence)
        before = repr(tree), tree.size, len(nodes(tree))
        tree.add(sequence)
        assert (repr(tree), tree.size, len(nodes(tree))) == before


@given(st.lists(LONG, max_size=12), LONG, st.sampled_from([COLD, LITTLE_WARMTH, PLENTY]))
@SETTINGS
def test_the_predicted_divergences_of_a_prompt_are_those_after_it_is_added(sequences, prompt, warm):
    tree = grown(sequences, warm)
    before = tree.branches(prompt)
    tree.add(prompt)
    assert places(tree.branches(prompt)) == places(before)


@given(st.lists(SHORT, max_size=25), SHORT, st.integers(700, 5000))
@SETTINGS
def test_divergences_that_a_full_tree_still_knows_are_real(sequences, prompt, budget):
    tree, naive = grown(sequences, budget=budget), Naive(sequences)
    assert tree.longest(prompt) <= naive.longest(prompt)
    assert {b.at for b in tree.branches(prompt)} <= {b.at for b in naive.branches(prompt)}


@pytest.mark.parametrize("warm", [COLD, PLENTY])
def test_the_number_of_comparisons_does_not_grow_with_the_turns_of_a_conversation(warm, monkeypatch):
    calls = []

    def counted(self, other, start=0, lcp=Tokens.lcp):
        calls.append(start)
        return lcp(self, other, start)

    monkeypatch.setattr(Tokens, "lcp", counted)
    prompt = Tokens(range(20_000))
    known = [prompt.cut(0, 100 * turn) for turn in range(150)]
    trees = [grown(known, warm), grown(known[-1:], warm)]
    counts = []
    for tree in trees:
        calls.clear()
        assert tree.longest(prompt) == 14_900
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0

import pytest

from slotkeeper.scheduler.prompts.prompt_tree import BLOCK, HASH_BYTES, NODE_BYTES, Branch, PromptTree
from slotkeeper.scheduler.prompts.tokens import EMPTY, WIDTH, Tokens

SYSTEM = Tokens([1] * 10)


def repeated(token, times=10):
    return Tokens([token] * times)


def numbered(start, end):
    return Tokens(range(start, end))


def test_an_empty_tree_finds_no_prefix():
    tree = PromptTree()
    tree.add(EMPTY)
    assert tree.longest(repeated(1)) == 0
    assert tree.branches(repeated(1)) == []
    assert repr(tree) == "<PromptTree 0 tokens, 0 warm, 0 leaves>"
    assert tree.size == 0


def test_turns_of_a_conversation_are_one_leaf():
    tree = PromptTree()
    for turn in range(1, 6):
        tree.add(numbered(0, 200 * turn))
    assert repr(tree) == "<PromptTree 1000 tokens, 768 warm, 1 leaves>"
    assert tree.size == NODE_BYTES + 1000 * WIDTH
    assert tree.branches(numbered(0, 1500)) == []


class TestBranches:
    def test_branches_show_where_sequences_diverged_and_how_often_they_were_passed(self):
        tree = PromptTree()
        for now, token in enumerate((2, 3, 4, 3)):
            tree.add(SYSTEM + repeated(token), 100.0 + now)
        assert tree.branches(SYSTEM + repeated(3)) == [Branch(10, ways=3, passed=4, used=103.0)]

    def test_a_prompt_that_diverges_before_it_is_added_makes_a_branch(self):
        tree = PromptTree()
        tree.add(SYSTEM + repeated(2), 5.0)
        tree.add(SYSTEM + repeated(3), 6.0)
        assert tree.branches(SYSTEM + repeated(4)) == [Branch(10, ways=3, passed=2, used=6.0)]
        assert tree.branches(repeated(1, 4) + repeated(9)) == [Branch(4, ways=2, passed=1, used=6.0)]
        assert tree.branches(SYSTEM + repeated(2, 4) + repeated(9))[1] == Branch(
            14, ways=2, passed=1, used=5.0
        )

    def test_there_is_no_branch_at_the_beginning_or_the_end_or_before_a_next_turn(self):
        tree = PromptTree()
        tree.add(SYSTEM + repeated(2))
        tree.add(repeated(7))
        assert tree.branches(repeated(9)) == []  # diverges at 0
        assert tree.branches(SYSTEM) == []  # ends where others continue
        assert tree.branches(SYSTEM + repeated(2) + repeated(5)) == []  # continues where others end

    def test_a_branch_remains_after_the_sequences_that_made_it_are_evicted(self):
        tree = PromptTree(budget=3 * NODE_BYTES + 35 * WIDTH)
        tree.add(SYSTEM + repeated(2))
        tree.add(SYSTEM + repeated(3))
        tree.add(SYSTEM + repeated(3) + repeated(4))
        assert tree.longest(SYSTEM + repeated(2)) == 10
        assert tree.branches(SYSTEM + repeated(3)) == [Branch(10, ways=2, passed=3)]

    def test_a_branch_remains_after_all_sequences_behind_it_are_evicted(self):
        tree = PromptTree(budget=2 * NODE_BYTES + 100 * WIDTH)
        for sequence in (SYSTEM + repeated(2), SYSTEM + repeated(3), repeated(7)):
            tree.add(sequence)
        assert repr(tree) == "<PromptTree 20 tokens, 0 warm, 2 leaves>"
        tree.add(SYSTEM + repeated(4), 9.0)
        assert tree.branches(SYSTEM + repeated(4)) == [Branch(10, ways=3, passed=3, used=9.0)]


class TestPassedAt:
    def test_passed_at_is_the_last_use_of_the_longest_known_prefix(self):
        tree = PromptTree()
        tree.add(SYSTEM + repeated(2), 5.0)
        tree.add(SYSTEM + repeated(3), 6.0)
        assert tree.passed_at(SYSTEM + repeated(2) + repeated(9)) == 5.0
        assert tree.passed_at(SYSTEM + repeated(3)) == 6.0
        assert tree.passed_at(SYSTEM + repeated(4)) == 6.0  # all sequences pass there

    def test_passed_at_is_zero_for_an_unknown_prompt(self):
        tree = PromptTree()
        assert tree.passed_at(SYSTEM) == 0.0
        tree.add(repeated(2), 5.0)
        assert tree.passed_at(SYSTEM) == 0.0
        assert tree.passed_at(EMPTY) == 0.0


class TestRecentEdges:
    def test_an_empty_tree_has_no_edges(self):
        assert PromptTree().recent_edges(100) == []
        assert PromptTree().twig(repeated(1)) is None

    def test_edges_have_a_begin_and_an_end_and_their_use(self):
        tree = PromptTree()
        for now, token in enumerate((2, 3, 2)):
            tree.add(SYSTEM + repeated(token, token * 10), 100.0 + now)
        stem, *others = tree.recent_edges(100)
        assert (stem.parent, stem.begin, stem.end) == (None, 0, 10)
        assert (stem.ways, stem.passed, stem.used) == (2, 3, 102.0)
        assert {twig.parent for twig in others} == {stem.id}
        assert {(twig.begin, twig.end, twig.ways, twig.passed, twig.used) for twig in others} == {
            (10, 30, 0, 2, 102.0),
            (10, 40, 0, 1, 101.0),
        }

    def test_parents_come_before_their_children_and_every_id_once(self):
        tree = PromptTree()
        for n in range(60):
            tree.add(SYSTEM + repeated(n % 3 + 2) + repeated(n % 7 + 2) + repeated(n))
        seen: dict[int, int] = {}
        for twig in tree.recent_edges(1000):
            assert twig.id not in seen
            assert twig.begin == (0 if twig.parent is None else seen[twig.parent])
            assert twig.end > twig.begin
            seen[twig.id] = twig.end
        assert sum(twig.end - twig.begin for twig in tree.recent_edges(1000)) == tree.tokens

    def test_a_limited_list_has_the_most_recently_passed_edges_and_their_ancestors(self):
        tree = PromptTree()
        for n in range(100):
            tree.add(SYSTEM + repeated(n + 2), float(n))
        tree.add(SYSTEM + repeated(7), 200.0)
        stem, *others = tree.recent_edges(4)
        assert (stem.parent, stem.end) == (None, 10)
        assert sorted(twig.used for twig in others) == [98.0, 99.0, 200.0]
        assert tree.recent_edges(0) == []

    def test_a_sequence_belongs_to_the_edge_where_it_ends_or_diverges(self):
        tree = PromptTree()
        tree.add(SYSTEM + repeated(2))
        tree.add(SYSTEM + repeated(3))
        stem, *others = tree.recent_edges(100)
        ends = {twig.id for twig in others}
        assert tree.twig(SYSTEM.cut(0, 4)) == tree.twig(SYSTEM) == stem.id
        assert tree.twig(SYSTEM + repeated(9)) == stem.id  # no sequence continues like this
        assert {tree.twig(SYSTEM + repeated(2)), tree.twig(SYSTEM + repeated(3, 4))} == ends
        assert tree.twig(repeated(9)) is None

    def test_queries_do_not_change_the_tree(self):
        tree = PromptTree(warm=0)
        for n in range(20):
            tree.add(SYSTEM + numbered(n, n + 3 * BLOCK), float(n))
        before = (repr(tree), tree.size, tree.recent_edges(1000))
        tree.recent_edges(3)
        tree.twig(SYSTEM + numbered(5, 5 + 3 * BLOCK))
        tree.passed_at(SYSTEM + numbered(5, 400))
        assert (repr(tree), tree.size, tree.recent_edges(1000)) == before


class TestHashedEdges:
    """An edge of 5 blocks: the ids of the first, three hashes, the ids of the last."""

    KNOWN = numbered(0, 5 * BLOCK - 1)

    @pytest.fixture
    def tree(self):
        tree = PromptTree(warm=0)
        tree.add(self.KNOWN)
        return tree

    def test_a_hashed_edge_takes_little_memory_and_is_still_found_whole(self, tree):
        assert tree.size == NODE_BYTES + (2 * BLOCK - 1) * WIDTH + 3 * HASH_BYTES
        assert tree.longest(self.KNOWN) == len(self.KNOWN)
        assert repr(tree._root.children[0].edge) == "<Edge 639 tokens, 384 hashed>"

    def test_the_least_recently_passed_edge_is_hashed_first(self):
        tree = PromptTree(warm=4 * BLOCK)
        a, b, c = (repeated(token, 3 * BLOCK) for token in (1, 2, 3))
        for sequence in (a, b, a, c):  # a is passed again
            tree.add(sequence)
        warm = {node.edge.first for node in tree._root.children.values() if not node.edge.hashed}
        assert warm == {1, 3}
        assert tree.warm == 4 * BLOCK

    def test_an_edge_that_is_passed_again_has_its_ids_again(self):
        tree = PromptTree(warm=5 * BLOCK)
        tree.add(self.KNOWN)
        tree.add(repeated(2, 5 * BLOCK))
        assert tree.warm == 4 * BLOCK
        assert tree.longest(self.KNOWN) == len(self.KNOWN)  # a query does not restore its ids
        assert tree.warm == 4 * BLOCK
        tree.add(self.KNOWN)
        assert tree.warm == 3 * BLOCK  # and the other edge is hashed
        assert tree.longest(numbered(0, 200) + repeated(9)) == 200  # exact to the token

    def test_a_prompt_diverges_from_a_hashed_edge_at_a_block_and_what_followed_is_forgotten(self, tree):
        prompt = numbered(0, 2 * BLOCK + 50) + repeated(9, 2 * BLOCK)
        assert tree.branches(prompt) == [Branch(2 * BLOCK, ways=2, passed=1)]
        tree.add(prompt)
        assert tree.branches(prompt) == [Branch(2 * BLOCK, ways=2, passed=2)]
        assert tree.longest(prompt) == len(prompt)
        assert tree.longest(self.KNOWN) == 2 * BLOCK + 50
        assert tree.tokens == len(prompt)

    def test_a_forgotten_node_takes_its_subtree_with_it(self):
        tree = PromptTree(warm=0)
        for token in (2, 3, 4):
            tree.add(self.KNOWN + repeated(token, 3 * BLOCK))
        prompt = self.KNOWN.cut(0, 2 * BLOCK) + repeated(9, 2 * BLOCK)
        tree.add(prompt)
        assert repr(tree) == f"<PromptTree {len(prompt)} tokens, 0 warm, 1 leaves>"

    def test_a_prompt_that_ends_in_a_hashed_edge_makes_nothing_forgotten(self, tree):
        prompt = self.KNOWN.cut(0, 2 * BLOCK + 50)
        tree.add(prompt)
        assert tree.longest(self.KNOWN) == len(self.KNOWN)
        assert tree.longest(prompt) == 2 * BLOCK
        assert tree.branches(prompt) == []

    @pytest.mark.parametrize("at", [1, BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 50])
    def test_a_prompt_diverges_at_the_exact_token_where_ids_are_kept(self, tree, at):
        prompt = self.KNOWN.cut(0, at) + repeated(9, 2 * BLOCK)
        assert tree.branches(prompt) == [Branch(at, ways=2, passed=1)]
        tree.add(prompt)
        assert tree.branches(prompt) == [Branch(at, ways=2, passed=2)]
        assert tree.longest(self.KNOWN) == len(self.KNOWN)
        tree.add(self.KNOWN + repeated(9, BLOCK))
        assert tree.longest(self.KNOWN + repeated(9, BLOCK)) == len(self.KNOWN) + BLOCK

    def test_conversations_with_the_same_beginning_are_all_found(self):
        tree = PromptTree(warm=0)
        chats = [SYSTEM + repeated(n % 7, n % 5 + 1) + numbered(n, n + 4 * BLOCK) for n in range(300)]
        for chat in chats:
            tree.add(chat)
        assert [tree.longest(chat) for chat in chats] == [len(chat) for chat in chats]


class TestBudget:
    def test_the_least_recently_passed_leaf_is_evicted_first(self):
        tree = PromptTree(budget=3 * (NODE_BYTES + 10 * WIDTH))
        a, b, c = (repeated(token) for token in (1, 2, 3))
        for sequence in (a, b, c, a):  # a is passed again
            tree.add(sequence)
        tree.add(repeated(4))
        assert [tree.longest(s) for s in (a, b, c)] == [10, 0, 10]

    def test_a_shared_prefix_remains_after_its_first_branch_is_evicted(self):
        tree = PromptTree(budget=3 * NODE_BYTES + 29 * WIDTH)
        tree.add(SYSTEM + repeated(2))
        tree.add(SYSTEM + repeated(3))
        assert tree.longest(SYSTEM + repeated(2)) == 10
        assert tree.longest(SYSTEM + repeated(3)) == 20

    def test_a_prefix_without_branches_is_evicted_in_its_turn(self):
        tree = PromptTree(budget=3 * NODE_BYTES + 50 * WIDTH)
        for sequence in (SYSTEM + repeated(2), SYSTEM + repeated(3), repeated(4), repeated(5), repeated(6)):
            tree.add(sequence)
        assert tree.longest(SYSTEM) == 0
        assert [tree.longest(repeated(token)) for token in (4, 5, 6)] == [10, 10, 10]

    def test_the_newest_leaf_is_kept_whatever_its_size(self):
        tree = PromptTree(budget=NODE_BYTES)
        tree.add(repeated(1))
        tree.add(repeated(2, 1000))
        assert [tree.longest(repeated(1)), tree.longest(repeated(2, 1000))] == [0, 1000]

"""The prompt tree: every prompt the engines ever computed, so that the oracle can be known.

A radix tree over exact token ids, bounded in tokens; the least recently passed leaf goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from slotkeeper.core.tokens import Tokens

DEFAULT_BUDGET: Final = 16_000_000  # tokens, 4 bytes each


class _Node:
    __slots__ = ("children", "edge", "parent")

    def __init__(self, edge: Tokens, parent: _Node | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}


class PromptTree:
    """Remembers token sequences; answers how long a prefix of a prompt was ever seen."""

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self._root = _Node(Tokens(), None)
        self._budget = budget
        self._leaves: OrderedDict[_Node, None] = OrderedDict()
        self.tokens = 0

    def __repr__(self) -> str:
        return f"<PromptTree {self.tokens} tokens, {len(self._leaves)} leaves>"

    def longest(self, prompt: Tokens) -> int:
        """Length of the longest prefix of `prompt` that was ever added, in tokens."""
        return self._descend(prompt)[1]

    def add(self, sequence: Tokens) -> None:
        """Remember a sequence that an engine holds or held."""
        node, matched, inside = self._descend(sequence)
        if inside < len(node.edge):
            if matched == len(sequence):
                self._passed(node)
                return
            node = self._split(node, inside)
        if matched < len(sequence):
            leaf = _Node(sequence.cut(matched), node)
            node.children[leaf.edge[0]] = leaf
            self._leaves.pop(node, None)
            self.tokens += len(leaf.edge)
            node = leaf
        self._passed(node)
        while self.tokens > self._budget and len(self._leaves) > 1:
            self._drop_oldest()

    def _descend(self, prompt: Tokens) -> tuple[_Node, int, int]:
        """(last node entered, tokens matched from the root, tokens matched inside that node's edge)."""
        node, matched = self._root, 0
        while matched < len(prompt):
            child = node.children.get(prompt[matched])
            if child is None:
                break
            common = child.edge.lcp(prompt.cut(matched, matched + len(child.edge)))
            node, matched = child, matched + common
            if common < len(child.edge):
                return node, matched, common
        return node, matched, len(node.edge)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node's edge in two; returns the upper half."""
        assert node.parent is not None  # noqa: S101 - the root's edge is empty: it is never split
        upper = _Node(node.edge.cut(0, at), node.parent)
        node.parent.children[upper.edge[0]] = upper
        node.edge = node.edge.cut(at)
        node.parent = upper
        upper.children[node.edge[0]] = node
        return upper

    def _passed(self, node: _Node) -> None:
        if not node.children and node.parent is not None:
            self._leaves[node] = None
            self._leaves.move_to_end(node)

    def _drop_oldest(self) -> None:
        leaf, _ = self._leaves.popitem(last=False)
        parent = leaf.parent
        assert parent is not None  # noqa: S101 - the root is never among the leaves
        del parent.children[leaf.edge[0]]
        self.tokens -= len(leaf.edge)
        if not parent.children and parent.parent is not None:
            self._leaves[parent] = None  # now a leaf itself, and as old as the one that went
            self._leaves.move_to_end(parent, last=False)

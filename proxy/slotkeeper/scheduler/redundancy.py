"""Which states serve the same prompts: all of them as one tree, and what each gives that no other does.

A node is a place in a token sequence where a state can be used, or where two sequences part.
A state serves a node if the engine can go on from there (engine.md 2.6): on dense models every node down
to the state's end, on all others its end and its checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile

from slotkeeper.scheduler.checkpoints import keeps_checkpoints
from slotkeeper.scheduler.prefixes import PrefixOrder, State
from slotkeeper.scheduler.slot_contents import SlotContents
from slotkeeper.scheduler.traits import EngineTraits, Memory


def cuts(state: State, traits: EngineTraits) -> tuple[int, ...]:
    """Where a state can be used, in tokens, ascending. A dense one can also be used anywhere before.

    The checkpoints of a slot count only where a file would carry them: another request may take the slot
    at any time.
    """
    total = len(state.tokens)
    before: tuple[int, ...] = ()
    if keeps_checkpoints(traits) and traits.files_carry is not False:
        shift = 1 if traits.memory is Memory.SWA else 0  # the window's last token is computed again
        found = (c if isinstance(c, int) else c.at for c in state.checkpoints[-traits.checkpoint_cap :])
        before = tuple(sorted({at - shift for at in found if shift < at <= total}))
    if _usable_at_end(state, traits) and (not before or before[-1] < total):
        return (*before, total)
    return before


def _usable_at_end(state: State, traits: EngineTraits) -> bool:
    total = len(state.tokens)
    if isinstance(state, SlotContents):
        return total > 0 and (not state.opaque or traits.memory is Memory.DENSE)
    if traits.memory is Memory.SWA and not traits.swa_full:
        return state.repaired and total > traits.n_swa  # T4
    return total > 0


def given(usable: Sequence[int], common: int, traits: EngineTraits) -> int:
    """Tokens that a state with these cuts gives a prompt that has `common` tokens in common with it."""
    if not usable:
        return 0
    if traits.memory is Memory.DENSE:
        return min(usable[-1], common)
    return max((at for at in usable if at <= common), default=0)


class Node:
    """A place in the tree. `demand`: how likely prompts are that would be served here, were nothing lost."""

    __slots__ = ("at", "demand", "density", "inner", "newest", "parent", "served")

    def __init__(self, at: int, parent: Node | None) -> None:
        self.at = at  # tokens from the beginning
        self.parent = parent
        self.served = 0  # states that serve it
        self.demand = 0.0
        self.density = 0.0  # demand for each token between the parent and here
        self.newest = 0.0  # when a state that ends here or below was last used
        self.inner = False  # there are nodes below

    def __repr__(self) -> str:
        return f"<Node {self.at} served {self.served} demand {self.demand:.3g}>"


class PrefixTree:
    """All states as a tree of prefixes. `ends[i]` is the node at which state i ends."""

    def __init__(self, order: PrefixOrder, traits: EngineTraits) -> None:
        self.anywhere = traits.memory is Memory.DENSE
        self.root = Node(0, None)
        self._nodes: list[Node] = []  # without the root
        self.ends: list[Node] = []
        self.usable = [cuts(state, traits) for state in order.states]
        self._points: list[list[Node]] = []  # the nodes at these
        path = [self.root]
        for state, common, usable in zip(order.states, order.common, self.usable, strict=True):
            del path[self._place(path, common) + 1 :]
            self._points.append([path[self._place(path, at)] for at in usable])
            self.ends.append(path[self._place(path, len(state.tokens))])
        self._nodes.sort(key=lambda node: -node.at)
        self._count()

    def upward(self) -> Iterator[tuple[Node, Node]]:
        """Each node with its parent, the deepest first."""
        for node in self._nodes:
            if node.parent is not None:
                yield node, node.parent

    def _place(self, path: list[Node], at: int) -> int:
        """The index of the node at `at` on the path to the newest state; one is made if there is none."""
        index = bisect_left(path, at, key=lambda node: node.at)
        if index == len(path) or path[index].at > at:
            node = Node(at, path[index - 1])
            if index < len(path):  # subtrees part from the path only at nodes, so nothing else moves
                path[index].parent = node
            path.insert(index, node)
            self._nodes.append(node)
        return index

    def _count(self) -> None:
        for points in self._points:
            for node in points:
                node.served += 1
        for node, parent in self.upward():
            parent.inner = True
            parent.served += node.served if self.anywhere else 0

    def settle(self) -> None:
        """All demand is known: what no state serves falls back on the nearest node above that is served."""
        for node in self._nodes:
            if not node.served:
                self._fall(node)

    def loss(self, state: int) -> float:
        """Tokens to be computed again without this state alone, times the chance that they are asked for."""
        lost, last, floor = 0.0, self.root, 0
        for node in self._alone(state):
            above = self._above(node)
            floor = floor if above is last else above.at
            lost += node.demand * (node.at - floor)
            last = node
        return lost

    def drop(self, state: int) -> None:
        """The state is gone."""
        for node in self._served_by(state):
            node.served -= 1
            if not node.served:
                self._fall(node)

    def _alone(self, state: int) -> list[Node]:
        """The nodes that only this state serves, the shallowest first."""
        if not self.anywhere:
            return [node for node in self._points[state] if node.served == 1]
        return [*takewhile(lambda node: node.served == 1, self._served_by(state))][::-1]

    def _served_by(self, state: int) -> Iterator[Node]:
        """The nodes that a state serves, the deepest first."""
        if not self.anywhere:
            yield from reversed(self._points[state])
            return
        for end in self._points[state]:
            node = end
            while node.parent is not None:
                yield node
                node = node.parent

    def _above(self, node: Node) -> Node:
        """The nearest node above that is served, or the root."""
        above = node.parent or self.root
        while not above.served and above.parent is not None:
            above = above.parent
        node.parent = above  # what is between is never served again
        return above

    def _fall(self, node: Node) -> None:
        self._above(node).demand += node.demand
        node.demand = 0.0

"""The catalog: every snapshot that may be offered, and how much of a prompt each would save.

Which states serve the same prompts is read from all of them sorted (`prefix_order`), and as one tree.

A node is a place in a token sequence where a state can be used, or where two sequences part.
A state serves a node if the engine can go on from there (engine.md 2.6): on dense models every node down
to the state's end, on all others its end and its checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Final

from slotkeeper.scheduler.engine_model import EngineTraits, Memory, keeps_checkpoints
from slotkeeper.scheduler.prefix_order import AnyState, Neighbours, PrefixOrder
from slotkeeper.scheduler.slot_contents import SlotContents, Snapshot, SnapshotId, Tier, restored, reuse
from slotkeeper.scheduler.types import Tokens

# -- one tree of all states: what each gives that no other does ------------------------------------------


def cuts(state: AnyState, traits: EngineTraits) -> tuple[int, ...]:
    """Where a state can be used, in tokens, ascending. A dense one can also be used anywhere before."""
    total, before = len(state.tokens), _at_checkpoints(state, traits)
    if _usable_at_end(state, traits) and (not before or before[-1] < total):
        return (*before, total)
    return before


def _at_checkpoints(state: AnyState, traits: EngineTraits) -> tuple[int, ...]:
    """Where its checkpoints are. A slot may be taken at any time: its own count if a file would have them."""
    if not keeps_checkpoints(traits) or traits.files_carry is False:
        return ()
    shift = 1 if traits.memory is Memory.SWA else 0  # the window's last token is computed again
    found = (c if isinstance(c, int) else c.at for c in state.checkpoints[-traits.checkpoint_cap :])
    return tuple(sorted({at - shift for at in found if shift < at <= len(state.tokens)}))


def _usable_at_end(state: AnyState, traits: EngineTraits) -> bool:
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


# -- the catalog -----------------------------------------------------------------------------------------

REMEMBERED: Final = 1024  # answers that hold until a file comes or goes that concerns them; slots of a fleet
NEVER: Final = Tokens([-1])  # a token that no model has: it makes any prompt a true extension


NONE_ASKED: Final[tuple[None, str, bool, Sequence[Neighbours]]] = (None, "", False, ())


class Catalog:
    """Files stand sorted by their tokens, so that a prompt is compared with its neighbours, not with all."""

    def __init__(self) -> None:
        self._all: dict[SnapshotId, Snapshot] = {}
        self._orders: dict[tuple[Tier, str], PrefixOrder] = {}
        self._covered: dict[tuple[str, Tokens], int] = {}
        self.apart = False  # whether there ever was one of a namespace
        self._last: tuple[Tokens | None, str, bool, Sequence[Neighbours]] = NONE_ASKED

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._all.values())

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._all

    def get(self, snapshot: SnapshotId) -> Snapshot | None:
        return self._all.get(snapshot)

    def size(self, tier: Tier) -> int:
        """Bytes of all files in one tier."""
        return sum(snapshot.size for snapshot in self._all.values() if snapshot.tier is tier)

    def beyond(self, tier: Tier, most: int) -> int:
        """Bytes of as many average files as there are more than `most` in a tier."""
        count = sum(1 for snapshot in self._all.values() if snapshot.tier is tier)
        return self.size(tier) * max(0, count - most) // max(1, count)

    def order(self, tier: Tier, fingerprint: str) -> PrefixOrder:
        """Those of one tier and one kind of engine, sorted by their tokens."""
        return self._orders.get((tier, fingerprint)) or PrefixOrder()

    def put(self, snapshot: Snapshot) -> None:
        """Add it, or say something new of it."""
        self._last = NONE_ASKED
        before = self._all.get(snapshot.id)
        if before and before.tier is not snapshot.tier:
            self._leaves_order(before)
        self._orders.setdefault((snapshot.tier, snapshot.fingerprint), PrefixOrder()).put(snapshot)
        self._all[snapshot.id] = snapshot
        self.apart = self.apart or bool(snapshot.tokens.space)
        if before is None or before.checkpoints != snapshot.checkpoints:
            self._forget_covered(snapshot, least=1)

    def take(self, snapshot: SnapshotId) -> Snapshot | None:
        """It is not to be offered any more."""
        self._last = NONE_ASKED
        taken = self._all.pop(snapshot, None)
        if taken:
            self._leaves_order(taken)
            self._forget_covered(taken, least=0)
        return taken

    def _forget_covered(self, snapshot: Snapshot, *, least: int) -> None:
        """Answers to tokens that have so many more in common with this file than were covered.

        A file gives no more than that: one that comes with less changes no answer, nor does one that goes.
        """
        for key, covered in [*self._covered.items()]:
            if key[1].lcp(snapshot.tokens) >= covered + least:
                del self._covered[key]

    def _leaves_order(self, snapshot: Snapshot) -> None:
        """With the last one the order goes, too: engines come with new fingerprints for ever."""
        order = self._orders[snapshot.tier, snapshot.fingerprint]
        order.drop(snapshot)
        if not order.states:
            del self._orders[snapshot.tier, snapshot.fingerprint]

    def best(
        self, prompt: Tokens, traits: EngineTraits, price: Callable[[Snapshot], float]
    ) -> tuple[Snapshot, int] | None:
        """The snapshot that saves most tokens of `prompt` for its price, and how many; None if none does."""
        best, most = None, 0.0
        for neighbours in self._around(prompt, traits):
            for snapshot, common in neighbours:
                if common <= most:
                    break
                bound = _at_most(snapshot, common, traits)
                if bound <= most or bound - (cost := price(snapshot)) <= most:
                    continue
                saved = reuse(restored(snapshot, traits, now=0.0), prompt, traits)
                if saved - cost > most:
                    best, most = (snapshot, saved), saved - cost
        return best

    def _around(self, prompt: Tokens, traits: EngineTraits) -> Sequence[Neighbours]:
        """Kept for the prompt that was asked about last: each engine asks about the same one."""
        dense = traits.memory is Memory.DENSE
        last, fingerprint, was_dense, found = self._last
        if last is not prompt or (fingerprint, was_dense) != (traits.fingerprint, dense):
            found = tuple(Neighbours(order, prompt, dense=dense) for order in self._fitting(traits))
            self._last = (prompt, traits.fingerprint, dense, found)
        return found

    def covered(self, tokens: Tokens, traits: EngineTraits) -> int:
        """How many of these tokens a snapshot would bring back to a prompt that goes on from them."""
        if not self._all:
            return 0
        key = (traits.fingerprint, tokens)
        if key not in self._covered:
            if len(self._covered) == REMEMBERED:
                self._covered.clear()
            found = self.best(tokens + NEVER, traits, lambda _: 0.0)
            self._covered[key] = found[1] if found else 0
        return self._covered[key]

    def covers(self, contents: SlotContents, traits: EngineTraits) -> int:
        """The same for what a slot holds; of ids that we do not know nothing is covered."""
        return self.covered(contents.tokens, traits) if contents.tokens else 0

    def _fitting(self, traits: EngineTraits) -> Iterator[PrefixOrder]:
        """Those that this engine can load, tier by tier."""
        for tier in Tier:
            for fingerprint in traits.fingerprints:
                order = self._orders.get((tier, fingerprint))
                if order and traits.snapshots:
                    yield order


def _at_most(snapshot: Snapshot, common: int, traits: EngineTraits) -> int:
    """A bound of `reuse`, for a thousandth of its cost: all in common, or its newest checkpoint there."""
    if traits.cuttable or len(snapshot.tokens) <= common:
        return common
    # One more than in common will do for a window, whose last token does not count.
    return min(common, max((at for at in snapshot.checkpoints if at <= common + 1), default=0))

"""The catalog of all snapshots that may be offered, and how much of a prompt each would save.

Two structures show which states serve the same prompts: the states sorted by tokens (`PrefixOrder`), and a
tree of their prefixes. The order is kept and changed one sequence at a time: sorting long prompts again takes
longer than all the rest of an eviction (1000 of up to 100,000 tokens: 50 ms).

A node of the tree is a place in a token sequence where a state can be used, or where two sequences diverge. A
state serves a node if the engine can continue from there (engine.md 2.6). On dense models these are all nodes
up to the state's end; on all other models, its end and its checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, takewhile
from operator import attrgetter
from typing import Final, NamedTuple, Self

from slotkeeper.scheduler.policies.adapters import namespace_in
from slotkeeper.scheduler.prompts.tokens import WIDTH, Tokens
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
    keeps_checkpoints,
    restored,
    reuse,
)
from slotkeeper.scheduler.types import Tier

# -- all states in the order of their tokens -------------------------------------------------------------

ROOT: Final = 16  # tokens: with less in common a snapshot is of no use
SIZE: Final = attrgetter("size")

AnyState = Snapshot | SlotContents


def _place(state: AnyState) -> tuple[str, bytes, str]:
    """Return the sort key: any order of the ids will do, if a sequence stands right before its extensions."""
    return state.tokens.space, state.tokens.packed, state.id if isinstance(state, Snapshot) else ""


class PrefixOrder:
    """States sorted by their tokens; state i shares `common[i]` tokens with the one before."""

    __slots__ = ("common", "states")

    def __init__(self, snapshots: Iterable[Snapshot] = ()) -> None:
        self.states: list[AnyState] = sorted(snapshots, key=_place)
        self.common = [one.tokens.lcp(following.tokens) for one, following in pairwise(self.states)]
        if self.states:
            self.common.insert(0, 0)

    def __repr__(self) -> str:
        return f"<PrefixOrder {len(self.states)} states>"

    def __iter__(self) -> Iterator[Snapshot]:
        return (state for state in self.states if isinstance(state, Snapshot))

    def put(self, state: AnyState) -> None:
        """Add a state; a snapshot replaces what was known of it (the tokens of an id never change)."""
        index = self._find(state)
        if isinstance(state, Snapshot) and self._is_at(index, state):
            self.states[index] = state
            return
        before = self.states[index - 1].tokens.lcp(state.tokens) if index else 0
        if index < len(self.states):
            self.common[index] = state.tokens.lcp(self.states[index].tokens)
        self.states.insert(index, state)
        self.common.insert(index, before)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot; nothing happens if it is not known."""
        index = self._find(snapshot)
        if self._is_at(index, snapshot):
            del self.states[index]
            gap = self.common.pop(index)
            if index < len(self.common):
                self.common[index] = min(gap, self.common[index])

    def beside(self, live: Iterable[SlotContents]) -> Self:
        """Return a copy to which the contents of slots are added."""
        copy = type(self)()
        copy.states, copy.common = [*self.states], [*self.common]
        for contents in live:
            copy.put(contents)
        return copy

    def around(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the other states and what each has in common with the one at `index`, the most first.

        Those without any common token are left out.
        """
        before, behind = index - 1, index + 1
        left = self.common[index]
        right = self.common[behind] if behind < len(self.states) else 0
        while left or right:
            if left >= right:
                yield before, left
                left = min(left, self.common[before])
                before -= 1
            else:
                yield behind, right
                behind += 1
                right = min(right, self.common[behind]) if behind < len(self.states) else 0

    def _find(self, state: AnyState) -> int:
        return bisect_left(self.states, _place(state), key=_place)

    def _is_at(self, index: int, snapshot: Snapshot) -> bool:
        here = self.states[index] if index < len(self.states) else None
        return isinstance(here, Snapshot) and here.id == snapshot.id


# -- around one prompt -----------------------------------------------------------------------------------


class Neighbours:
    """Files and how many tokens each has in common with a prompt, the most first; found on demand.

    `dense`: any file gives all that it has in common. Then of files that have equally much of it, only the
    nearest and the smallest are found: whatever a restore costs, it costs no less for a larger file.
    """

    def __init__(self, order: PrefixOrder, prompt: Tokens, *, dense: bool) -> None:
        self._found: list[tuple[Snapshot, int]] = []
        self._more = _nearest(order, prompt, dense=dense)

    def __iter__(self) -> Iterator[tuple[Snapshot, int]]:
        yield from self._found
        for state, common in self._more:
            if isinstance(state, Snapshot):
                self._found.append((state, common))
                yield state, common


def _nearest(order: PrefixOrder, prompt: Tokens, *, dense: bool) -> Iterator[tuple[AnyState, int]]:
    """Yield states and how many tokens each has in common with `prompt`, the most first.

    In the order they stand around the prompt's place. Thousands of files may begin with one system prompt, so
    those with equally much in common are found at once, after the nearest one, which is often enough.
    """
    states, common = order.states, order.common
    begin = end = bisect_left(states, (prompt.space, prompt.packed), key=_begins)
    left = states[begin - 1].tokens.lcp(prompt) if begin else 0
    right = states[end].tokens.lcp(prompt) if end < len(states) else 0
    while (most := max(left, right)) >= ROOT:
        yield states[begin - 1 if left == most else end], most
        before, behind, shared = begin, end, (prompt.space, prompt.packed[: most * WIDTH])
        begins = partial(_begins, length=most * WIDTH)
        if left == most:
            begin = bisect_left(states, shared, hi=before, key=begins)
            left = common[begin]  # the first one has nothing in common with one before it
        if right == most:
            end = bisect_right(states, shared, lo=behind, key=begins)
            right = common[end] if end < len(states) else 0
        equal = [*states[begin:before][::-1], *states[behind:end]]
        yield from ((state, most) for state in _others(equal, dense=dense))


def _others(equal: list[AnyState], *, dense: bool) -> list[AnyState]:
    """Return all but the nearest of states with equally much in common; of a dense model the smallest."""
    others = equal[1:]
    return [min(others, key=SIZE)] if dense and others else others


def _begins(state: AnyState, length: int | None = None) -> tuple[str, bytes]:
    """Return the key that is compared with a prompt: a state's ids, or their first `length` bytes."""
    return state.tokens.space, state.tokens.packed[:length]


# -- a tree of all states: what each one saves that no other does ----------------------------------------


def cuts(state: AnyState, traits: EngineTraits) -> tuple[int, ...]:
    """Return where a state can be used, in tokens, ascending.

    A dense state can be used anywhere before, too.
    """
    total, before = len(state.tokens), _at_checkpoints(state, traits)
    if _usable_at_end(state, traits) and (not before or before[-1] < total):
        return (*before, total)
    return before


def _at_checkpoints(state: AnyState, traits: EngineTraits) -> tuple[int, ...]:
    """Return where the checkpoints of a state are; none if a file would not have them.

    A slot may be overwritten at any time, so its own checkpoints count only if a file would carry them.
    """
    if not keeps_checkpoints(traits) or traits.files_carry is False:
        return ()
    shift = 1 if traits.memory is Memory.SWA else 0  # the last token of a window is computed again
    places = (c if isinstance(c, int) else c.at for c in state.checkpoints[-traits.checkpoint_cap :])
    return tuple(sorted({at - shift for at in places if shift < at <= len(state.tokens)}))


def _usable_at_end(state: AnyState, traits: EngineTraits) -> bool:
    total = len(state.tokens)
    if isinstance(state, SlotContents):
        return total > 0 and (not state.opaque or traits.memory is Memory.DENSE)
    if traits.memory is Memory.SWA and not traits.swa_full:
        return state.repaired and total > traits.n_swa  # T4
    return total > 0


def given(usable: Sequence[int], common: int, traits: EngineTraits) -> int:
    """Return how many tokens of a prompt a state with these cuts saves, if they share `common` tokens."""
    if not usable:
        return 0
    if traits.memory is Memory.DENSE:
        return min(usable[-1], common)
    return max((at for at in usable if at <= common), default=0)


class Node:
    """A place in the tree. `demand`: how likely prompts are that this place would serve best."""

    __slots__ = ("at", "demand", "density", "inner", "newest", "parent", "served")

    def __init__(self, at: int, parent: Node | None) -> None:
        self.at = at  # tokens before this place
        self.parent = parent
        self.served = 0  # number of states that serve this node
        self.demand = 0.0
        self.density = 0.0  # demand per token between the parent and this node
        self.newest = 0.0  # when a state that ends here or below was last used
        self.inner = False  # whether there are nodes below

    def __repr__(self) -> str:
        return f"<Node {self.at} served {self.served} demand {self.demand:.3g}>"


class PrefixTree:
    """All states as a tree of prefixes. `ends[i]` is the node at which state i ends."""

    def __init__(self, order: PrefixOrder, traits: EngineTraits) -> None:
        self.anywhere = traits.memory is Memory.DENSE
        self.root = Node(0, None)
        self._nodes: list[Node] = []  # all nodes but the root
        self.ends: list[Node] = []
        self.usable = [cuts(state, traits) for state in order.states]
        self._points: list[list[Node]] = []  # for each state, the nodes at its cuts
        path = [self.root]
        for state, common, usable in zip(order.states, order.common, self.usable, strict=True):
            del path[self._place(path, common) + 1 :]
            self._points.append([path[self._place(path, at)] for at in usable])
            self.ends.append(path[self._place(path, len(state.tokens))])
        self._nodes.sort(key=lambda node: -node.at)
        self._count()

    def upward(self) -> Iterator[tuple[Node, Node]]:
        """Yield each node with its parent, the deepest first."""
        for node in self._nodes:
            if node.parent is not None:
                yield node, node.parent

    def _place(self, path: list[Node], at: int) -> int:
        """Return the index of the node at `at` on the path to the newest state; create the node if needed."""
        index = bisect_left(path, at, key=lambda node: node.at)
        if index == len(path) or path[index].at > at:
            node = Node(at, path[index - 1])
            if index < len(path):  # other subtrees branch off the path at nodes only, so nothing else moves
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
        """Once all demand is known, move the demand of unserved nodes up to the nearest served node."""
        for node in self._nodes:
            if not node.served:
                self._fall(node)

    def loss(self, state: int) -> float:
        """Return the tokens to compute again without this state, weighted with the chance of their use."""
        lost, last, floor = 0.0, self.root, 0
        for node in self._alone(state):
            above = self._above(node)
            floor = floor if above is last else above.at
            lost += node.demand * (node.at - floor)
            last = node
        return lost

    def drop(self, state: int) -> None:
        """Remove a state, and move the demand that no state serves any more."""
        for node in self._served_by(state):
            node.served -= 1
            if not node.served:
                self._fall(node)

    def _alone(self, state: int) -> list[Node]:
        """Return the nodes that only this state serves, the shallowest first."""
        if not self.anywhere:
            return [node for node in self._points[state] if node.served == 1]
        return [*takewhile(lambda node: node.served == 1, self._served_by(state))][::-1]

    def _served_by(self, state: int) -> Iterator[Node]:
        """Yield the nodes that a state serves, the deepest first."""
        if not self.anywhere:
            yield from reversed(self._points[state])
            return
        for end in self._points[state]:
            node = end
            while node.parent is not None:
                yield node
                node = node.parent

    def _above(self, node: Node) -> Node:
        """Return the nearest served node above, or the root."""
        above = node.parent or self.root
        while not above.served and above.parent is not None:
            above = above.parent
        node.parent = above  # the nodes between are never served again
        return above

    def _fall(self, node: Node) -> None:
        self._above(node).demand += node.demand
        node.demand = 0.0


# -- the catalog -----------------------------------------------------------------------------------------

REMEMBERED: Final = 1024  # answers kept until a file that concerns them comes or goes; enough for a fleet
REMEMBERED_TOKENS: Final = 16 << 20  # in the prompts of these answers: 64 MiB
NEVER: Final = Tokens([-1])  # a token that no model has: it makes any prompt a true extension

# A file's place in the orders, and what the tokens that it saves depend on. The tokens of a file never
# change, but in a shared folder any writer can replace the file's manifest.
PLACE: Final = attrgetter("tier", "fingerprint", "tokens")
STATE: Final = attrgetter("fingerprint", "tokens", "checkpoints")


class Covered(NamedTuple):
    """An answer that is kept until a file that concerns it comes or goes."""

    tokens: int  # that a file saves
    by: SnapshotId | None


Fingerprints = tuple[str, ...]
NONE_ASKED: Final[tuple[None, Fingerprints, bool, Sequence[Neighbours]]] = (None, (), False, ())


class Catalog:
    """All snapshots. They are sorted by their tokens, so a prompt is compared only with its neighbours."""

    def __init__(self) -> None:
        self._all: dict[SnapshotId, Snapshot] = {}
        self._counts, self._sizes = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)  # files, bytes
        self._orders: dict[tuple[Tier, str], PrefixOrder] = {}
        self._covered: dict[tuple[Fingerprints, Tokens], Covered] = {}
        self._remembered = 0  # tokens of the prompts in `_covered`
        self.had_namespaces = False  # whether there ever was a snapshot of a namespace
        self._last: tuple[Tokens | None, Fingerprints, bool, Sequence[Neighbours]] = NONE_ASKED

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._all.values())

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._all

    def get(self, snapshot: SnapshotId) -> Snapshot | None:
        return self._all.get(snapshot)

    def size(self, tier: Tier) -> int:
        """Return the bytes of all files in one tier. What several have in common counts once."""
        return self._sizes[tier]

    def count(self, tier: Tier) -> int:
        """Return the number of all files in one tier."""
        return self._counts[tier]

    def beyond(self, tier: Tier, most: int) -> int:
        """Return the bytes that the files beyond the first `most` of a tier take, at their average size."""
        count = self.count(tier)
        return self.size(tier) * max(0, count - most) // max(1, count)

    def order(self, tier: Tier, fingerprint: str) -> PrefixOrder:
        """Return the snapshots of one tier and one fingerprint, sorted by their tokens."""
        return self._orders.get((tier, fingerprint)) or PrefixOrder()

    def put(self, snapshot: Snapshot) -> None:
        """Add a snapshot, or replace what is known of it."""
        self._last = NONE_ASKED
        before = self._all.get(snapshot.id)
        if before:
            self._counted(before, -1)
        if before and PLACE(before) != PLACE(snapshot):
            self._leaves_order(before)
            self._forget_covered(before.id)
        self._orders.setdefault((snapshot.tier, snapshot.fingerprint), PrefixOrder()).put(snapshot)
        self._all[snapshot.id] = snapshot
        self._counted(snapshot)
        self.had_namespaces = self.had_namespaces or bool(namespace_in(snapshot.tokens.space))
        if before is None or STATE(before) != STATE(snapshot):
            self._forget_covered(snapshot.id, comes=snapshot.tokens)

    def take(self, snapshot: SnapshotId) -> Snapshot | None:
        """Remove a snapshot, so that it is not offered any more."""
        self._last = NONE_ASKED
        taken = self._all.pop(snapshot, None)
        if taken:
            self._counted(taken, -1)
            self._leaves_order(taken)
            self._forget_covered(snapshot)
        return taken

    def _counted(self, snapshot: Snapshot, sign: int = 1) -> None:
        """Add a file to the sums of its tier, or subtract it."""
        self._counts[snapshot.tier] += sign
        self._sizes[snapshot.tier] += sign * snapshot.counts

    def _forget_covered(self, snapshot: SnapshotId, *, comes: Tokens | None = None) -> None:
        """Forget the answers that this file gave, and those that it may give now with the tokens that come.

        A file saves no more than it shares. So it changes no answer if it shares no more than was covered.
        """
        for key, covered in [*self._covered.items()]:
            if covered.by == snapshot or (comes is not None and _shares_more(key[1], comes, covered.tokens)):
                del self._covered[key]
                self._remembered -= len(key[1])

    def _leaves_order(self, snapshot: Snapshot) -> None:
        """Remove a snapshot from its order, and the order if it is empty: new fingerprints keep coming."""
        order = self._orders[snapshot.tier, snapshot.fingerprint]
        order.drop(snapshot)
        if not order.states:
            del self._orders[snapshot.tier, snapshot.fingerprint]

    def best(
        self, prompt: Tokens, traits: EngineTraits, price: Callable[[Snapshot], float]
    ) -> tuple[Snapshot, int] | None:
        """Return the snapshot that saves most tokens of `prompt` less its price, and how many it saves.

        None if no snapshot saves more than its price.
        """
        best, most = None, 0.0
        for neighbours in self._around(prompt, traits):
            for snapshot, common in neighbours:
                bound = _at_most(snapshot, common, traits)
                if bound > most and bound - (cost := price(snapshot)) > most:
                    saved = _saved(snapshot, common, prompt, traits)
                    if saved - cost > most:
                        best, most = (snapshot, saved), saved - cost
                if common <= most:
                    break  # those that follow have no more in common
        return best

    def _around(self, prompt: Tokens, traits: EngineTraits) -> Sequence[Neighbours]:
        """Return a prompt's neighbours in each order.

        The last result is kept: each engine asks for the same prompt.
        """
        dense, files = traits.memory is Memory.DENSE, _loadable(traits)
        last, had, was_dense, neighbours = self._last
        if last is not prompt or (had, was_dense) != (files, dense):
            neighbours = tuple(Neighbours(order, prompt, dense=dense) for order in self._fitting(files))
            self._last = (prompt, files, dense, neighbours)
        return neighbours

    def covered(self, tokens: Tokens, traits: EngineTraits) -> int:
        """Return how many of these tokens a snapshot saves for a prompt that continues after them."""
        if not self._all:
            return 0
        key = (_loadable(traits), tokens)
        found = self._covered.get(key)
        if found is None:
            if len(self._covered) == REMEMBERED or self._remembered + len(tokens) > REMEMBERED_TOKENS:
                self._covered.clear()
                self._remembered = 0
            self._remembered += len(tokens)
            best = self.best(tokens + NEVER, traits, lambda _: 0.0)
            found = self._covered[key] = Covered(*(best[1], best[0].id) if best else (0, None))
        return found.tokens

    def covers(self, contents: SlotContents, traits: EngineTraits) -> int:
        """Return the result of `covered` for the contents of a slot; unknown ids are never covered."""
        return self.covered(contents.tokens, traits) if contents.tokens else 0

    def _fitting(self, fingerprints: Fingerprints) -> Iterator[PrefixOrder]:
        """Yield the orders of files with these fingerprints, tier by tier."""
        for tier in Tier:
            for fingerprint in fingerprints:
                if order := self._orders.get((tier, fingerprint)):
                    yield order


def _shares_more(one: Tokens, other: Tokens, common: int) -> bool:
    """Whether two sequences share more than `common` tokens. Nearly always the next token shows that."""
    at, end = common * WIDTH, (common + 1) * WIDTH
    return one.packed[at:end] == other.packed[at:end] and one.lcp(other) > common


def _loadable(traits: EngineTraits) -> Fingerprints:
    """Return the fingerprints of all files that this engine can load; none without snapshots."""
    return traits.fingerprints if traits.snapshots else ()


def _saved(snapshot: Snapshot, common: int, prompt: Tokens, traits: EngineTraits) -> int:
    """Return how many tokens of a prompt a snapshot saves that has `common` tokens in common with it."""
    if traits.memory is Memory.DENSE:
        return min(common, len(prompt) - 1)  # the engine evaluates at least one token
    return reuse(restored(snapshot, traits, now=0.0), prompt, traits)


def _at_most(snapshot: Snapshot, common: int, traits: EngineTraits) -> int:
    """Return an upper bound of `reuse` at a thousandth of its cost.

    It is all shared tokens, or the newest checkpoint in them.
    """
    if traits.cuttable or len(snapshot.tokens) <= common:
        return common
    # For a window, one token more than shared will do, because its last token does not count.
    return min(common, max((at for at in snapshot.checkpoints if at <= common + 1), default=0))

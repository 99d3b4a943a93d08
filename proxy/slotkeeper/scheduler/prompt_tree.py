"""The prompt tree: every prompt the engines ever computed, and where they parted from each other.

The first tells the oracle, the second where the next prompt may part.
A radix tree over token ids: an edge is what follows until sequences part or the longest of them ends.
What was not passed for longest is held as hashes (`Edge`), and when there is no room for more, the
least recently passed leaf goes. The scheduler has no clock: times are seconds of the caller's.

Warm, an edge has all its ids, and comparing is memcmp. Cold, it has the ids at both ends, a block at most,
and of what is between a hash of each block of 128 ids, chained to the one before: a sixty-fourth of the
memory. A prompt that parts from the hashes, or ends there, does so at the last whole block that is the
same, as far as is known: too early by less than a block, never too late.
At the beginning ids are kept because many conversations open alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.types import EMPTY, WIDTH, Tokens

BLOCK: Final = 128  # tokens
HASH_BYTES: Final = 8
NO_TOKEN: Final = -1
_BLOCK_BYTES: Final = BLOCK * WIDTH


class Edge:
    """The token ids between two nodes; at least one, but for the edge above the root."""

    __slots__ = ("_chain", "_lead", "first", "hashed", "head", "ids")

    def __init__(self, ids: Tokens) -> None:
        self.first = ids[0] if ids.packed else NO_TOKEN
        self.head = EMPTY  # cold: the ids before the hashes
        self.hashed = 0  # tokens that are known by their hashes only; whole blocks
        self.ids = ids  # of all that follow
        # The hashes of an edge that was warmed again are kept, and serve when it is cooled again.
        # Python's own hash is keyed, of 64 bits and three times as fast as any of hashlib's; it
        # differs from process to process, and so does not leave this one.
        self._chain = array("q")
        self._lead = BLOCK  # tokens before the first block

    def __len__(self) -> int:
        return len(self.head) + self.hashed + len(self.ids)

    def __repr__(self) -> str:
        return f"<Edge {len(self)} tokens, {self.hashed} hashed>"

    @property
    def coolable(self) -> int:
        """How many ids cooling would free, in tokens."""
        return 0 if self.hashed else max(0, (len(self.ids) - self._lead) // BLOCK * BLOCK)

    @property
    def size(self) -> int:
        """Memory of what grows with the tokens, in bytes."""
        return len(self.head.packed) + HASH_BYTES * len(self._chain) + len(self.ids.packed)

    def common(self, prompt: Tokens, begin: int) -> int:
        """Tokens in common with the prompt from `begin` on."""
        same = self.head.lcp(prompt, begin)
        if same < len(self.head):
            return same
        same += BLOCK * self._same_blocks(prompt, begin + same)
        if same < len(self.head) + self.hashed:
            return same
        return same + self.ids.lcp(prompt, begin + same)

    def parts(self, common: int, left: int) -> bool:
        """Whether a prompt goes on differently inside this edge.

        `left` of its tokens are not in common. Fewer than a block may yet be the beginning of one
        that is hashed.
        """
        return common < len(self) and left >= (BLOCK if self._hazy(common) else 1)

    def take(self, sequence: Tokens, begin: int, end: int) -> None:
        """Warm the edge with the ids of a sequence that has it from `begin` on, and have it end at `end`."""
        self.head, self.hashed = EMPTY, 0
        ids = sequence.packed[begin * WIDTH : end * WIDTH]  # no copy if it is all
        self.ids = Tokens.of(ids, sequence.space)

    def cool(self) -> None:
        """Keep the hashes of all whole blocks, and the ids before and behind."""
        ids, chain, lead, hashed = self.ids, self._chain, self._lead, self.coolable
        last = chain[-1] if chain else 0
        for at in range((lead + BLOCK * len(chain)) * WIDTH, (lead + hashed) * WIDTH, _BLOCK_BYTES):
            last = hash((last, ids.packed[at : at + _BLOCK_BYTES]))
            chain.append(last)
        self.head, self.hashed, self.ids = ids.cut(0, lead), hashed, ids.cut(lead + hashed)

    def below(self, at: int) -> Edge | None:
        """What follows the first `at` tokens, as an edge of its own; None where its first id is not known."""
        if self._hazy(at):
            return None
        if at >= len(self.head):
            return Edge(self.ids.cut(at - len(self.head) - self.hashed))
        edge = Edge(self.head.cut(at))
        edge.head, edge.hashed, edge.ids = edge.ids, self.hashed, self.ids
        edge._chain, edge._lead = self._chain, len(edge.head)
        return edge

    def _hazy(self, at: int) -> bool:
        """Whether what comes next is known by its hash only."""
        return len(self.head) <= at < len(self.head) + self.hashed

    def _same_blocks(self, prompt: Tokens, begin: int) -> int:
        """How many of the hashed blocks the prompt has from `begin` on."""
        packed, last = prompt.packed, 0
        blocks = min(self.hashed, len(prompt) - begin) // BLOCK
        for index in range(blocks):
            at = begin * WIDTH + index * _BLOCK_BYTES
            last = hash((last, packed[at : at + _BLOCK_BYTES]))
            if last != self._chain[index]:
                return index
        return blocks


# -- the tree --------------------------------------------------------------------------------------------

WARM_TOKENS: Final = 16_000_000  # 4 bytes each
BUDGET: Final = 192 << 20  # bytes in all: 1.5e9 tokens, if conversations are long
NODE_BYTES: Final = 700  # of a node and its places in all tables: 610 measured, and what malloc wastes


@dataclass(frozen=True, slots=True)
class Branch:
    """A place on a prompt's path where sequences have parted."""

    at: int  # tokens before it
    ways: int  # continuations seen, the prompt's own included; one forgotten and seen again counts twice
    passed: int = 0  # sequences that came here since it was found; the first two of them count as well
    used: float = 0.0  # when one last did, or came nearly as far


@dataclass(frozen=True, slots=True)
class Twig:
    """An edge, as observers see it."""

    id: int  # as long as it is there
    parent: int | None
    begin: int  # tokens before it
    end: int
    ways: int  # continuations seen behind it
    passed: int
    used: float


class _Node:
    """The place where an edge ends."""

    __slots__ = ("children", "edge", "parent", "passed", "used", "ways")

    def __init__(self, edge: Edge, parent: _Node | None, used: float) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}  # by the first id of their edges
        self.ways = 0  # children that it ever had
        self.passed = 1
        self.used = used

    @property
    def size(self) -> int:
        return NODE_BYTES + self.edge.size


_Path = list[tuple[_Node, int, int]]  # nodes entered: tokens before the edge, and in common with it


class PromptTree:
    """Remembers token sequences; answers how long a prefix of a prompt was ever seen, and where it may part.

    A sequence that parts inside a cold edge makes it forget what followed there: only hashes are known of
    it, which no longer say where in the tree it belongs.

    Args:
        warm: tokens of edges that need not be cold.
        budget: memory in bytes, as `size` counts it. The newest leaf stays whatever it takes.
    """

    def __init__(self, warm: int = WARM_TOKENS, budget: int = BUDGET) -> None:
        self._root = _Node(Edge(EMPTY), None, 0.0)
        self._roots: dict[str, _Node] = {}  # of the other namespaces
        self._limits = (warm, budget)
        self._warm: OrderedDict[_Node, None] = OrderedDict()  # those that can be cooled
        self._leaves: OrderedDict[_Node, None] = OrderedDict()
        self._last: tuple[Tokens, _Path] = (EMPTY, [])  # both questions are asked of the same prompt
        self.tokens = 0
        self.warm = 0  # tokens whose ids cooling would free
        self.size = 0  # bytes

    def __repr__(self) -> str:
        return f"<PromptTree {self.tokens} tokens, {self.warm} warm, {len(self._leaves)} leaves>"

    @property
    def leaves(self) -> int:
        return len(self._leaves)

    def longest(self, prompt: Tokens) -> int:
        """Length of the longest prefix of `prompt` that was ever added, in tokens; see `Edge`."""
        path = self._last_path(prompt)
        return path[-1][1] + path[-1][2] if path else 0

    def passed_at(self, prompt: Tokens) -> float:
        """When a sequence with that prefix last came by, in seconds; 0 where none did."""
        path = self._last_path(prompt)
        return path[-1][0].used if path else 0.0

    def branches(self, prompt: Tokens) -> list[Branch]:
        """Where sequences have parted on this prompt's way, and where it parts itself; ascending.

        Neither its beginning nor its end is such a place.
        """
        found = []
        for node, begin, common in self._last_path(prompt):
            end = begin + common
            left = len(prompt) - end
            if node.edge.parts(common, left):
                found.append(Branch(end, 2, 1, node.used))
            elif left and node.ways and common == len(node.edge):
                ways = node.ways + (prompt[end] not in node.children)
                found.append(Branch(end, ways, node.passed, node.used))
        return found

    def recent_edges(self, most: int) -> list[Twig]:
        """The edges passed most recently, parents before their children; about `most` of them."""
        wanted = self._recent(most)
        found, ahead = [], [(root, 0) for root in (self._root, *self._roots.values())]
        while ahead:
            parent, begin = ahead.pop()
            for node in parent.children.values():
                if node in wanted:
                    end = begin + len(node.edge)
                    above = id(parent) if begin else None
                    found.append(Twig(id(node), above, begin, end, node.ways, node.passed, node.used))
                    ahead.append((node, end))
        return found

    def _recent(self, most: int) -> set[_Node]:
        """The latest leaves, with all that leads to them."""
        recent: set[_Node] = set()
        for leaf in reversed(self._leaves):
            if len(recent) >= most:
                break
            node: _Node | None = leaf
            while node is not None and node.parent is not None and node not in recent:
                recent.add(node)
                node = node.parent
        return recent

    def twig(self, sequence: Tokens) -> int | None:
        """The `Twig.id` of the edge in which a sequence ends, or parts from all that is known."""
        path = self._path(sequence)
        return id(path[-1][0]) if path else None

    def add(self, sequence: Tokens, now: float = 0.0) -> None:
        """Remember a sequence that an engine holds or held."""
        node, end = self._root_of(sequence) or self._new_root(sequence.space), 0
        for step, begin, common in self._path(sequence):
            node, end = step, begin + common
            if node.edge.parts(common, len(sequence) - end):
                node = self._split(node, sequence.cut(begin, end))
            elif common < len(node.edge):
                end = len(sequence)  # it ends there, as far as is known
            else:
                end = end if node.ways else len(sequence)  # a leaf grows
                self._pass(node, sequence, begin, end)
            self._touch(node, now)
        if end < len(sequence):
            node = self._attach(node, sequence.cut(end), now)
            self._touch(node, now)
        self._make_room()
        self._last = (EMPTY, [])

    def _last_path(self, prompt: Tokens) -> _Path:
        """Its path; that of the prompt asked for last is kept, since one request asks several times."""
        if self._last[0] is not prompt:
            self._last = (prompt, self._path(prompt))
        return self._last[1]

    def _path(self, prompt: Tokens) -> _Path:
        path: _Path = []
        node, begin = self._root_of(prompt), 0
        while node and begin < len(prompt) and (child := node.children.get(prompt[begin])):
            common = child.edge.common(prompt, begin)
            path.append((child, begin, common))
            if common < len(child.edge):
                break
            node, begin = child, begin + common
        return path

    def _root_of(self, sequence: Tokens) -> _Node | None:
        """Namespaces have a tree each, and all of them one budget."""
        return self._roots.get(sequence.space) if sequence.space else self._root

    def _new_root(self, space: str) -> _Node:
        """A tree for a namespace; those with nothing in them go."""
        self._roots = {space: root for space, root in self._roots.items() if root.children}
        root = self._roots[space] = _Node(Edge(EMPTY), None, 0.0)
        return root

    def _split(self, node: _Node, above: Tokens) -> _Node:
        """Part a node's edge after these ids; returns the node that ends there."""
        assert node.parent is not None  # noqa: S101 - the root's edge is empty: it is never split
        upper = _Node(Edge(above), node.parent, node.used)
        upper.ways = 1
        upper.passed = 2  # what was there, and what parts from it
        node.parent.children[upper.edge.first] = upper
        self._count(upper)
        below = node.edge.below(len(above))
        if below is None:
            self._forget(node)
            return upper
        self._count(node, -1)
        node.edge, node.parent = below, upper
        upper.children[below.first] = node
        self._count(node)
        return upper

    def _pass(self, node: _Node, sequence: Tokens, begin: int, end: int) -> None:
        """A sequence has all of a node's edge. The edge is warm then, and ends at `end`."""
        node.passed += 1
        if node.edge.hashed or len(node.edge) < end - begin:
            self._count(node, -1)
            node.edge.take(sequence, begin, end)
            self._count(node)

    def _attach(self, node: _Node, ids: Tokens, now: float) -> _Node:
        leaf = _Node(Edge(ids), node, now)
        node.children[leaf.edge.first] = leaf
        node.ways += 1
        self._leaves.pop(node, None)
        self._count(leaf)
        return leaf

    def _touch(self, node: _Node, now: float) -> None:
        """A sequence came into this node's edge."""
        node.used = now
        if not node.children:
            self._leaves[node] = None
            self._leaves.move_to_end(node)
        if node in self._warm:
            self._warm.move_to_end(node)

    def _count(self, node: _Node, sign: int = 1) -> None:
        """Count a node's edge, or no longer: whatever changes one stands between the two."""
        self.tokens += sign * len(node.edge)
        self.warm += sign * node.edge.coolable
        self.size += sign * node.size
        if sign > 0 and node.edge.coolable:
            self._warm[node] = None
        elif sign > 0:
            self._warm.pop(node, None)

    def _make_room(self) -> None:
        warm, budget = self._limits
        while self.warm > warm:
            node = next(iter(self._warm))
            self._count(node, -1)
            node.edge.cool()
            self._count(node)
        while self.size > budget and len(self._leaves) > 1:
            self._drop(next(iter(self._leaves)))

    def _drop(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None  # noqa: S101 - the root is never among the leaves
        del parent.children[leaf.edge.first]
        self._forget(leaf)
        if not parent.children and parent.parent is not None:
            self._leaves[parent] = None  # now a leaf itself, and as old as the one that went
            self._leaves.move_to_end(parent, last=False)

    def _forget(self, node: _Node) -> None:
        """A node that nothing leads to any more, and all below it."""
        nodes = [node]
        while nodes:
            gone = nodes.pop()
            nodes += gone.children.values()
            self._count(gone, -1)
            self._warm.pop(gone, None)
            self._leaves.pop(gone, None)

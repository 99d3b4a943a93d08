"""The prompt tree: all prompts that the engines have computed, and where they diverge from each other.

The prompts give the oracle; the branch points tell where the next prompt may diverge.
It is a radix tree over token ids: an edge has the ids up to the next branch point or the end of the longest
sequence. The least recently passed edges are stored as hashes (`Edge`). When the budget is spent, the least
recently passed leaf is dropped. The scheduler has no clock: the caller gives times, in seconds.

A warm edge has all its ids, and comparison is memcmp. A cold edge has the ids at both ends, at most a block
each, and for each block of 128 ids between them a hash, chained to the one before: a sixty-fourth of the
memory. A prompt that diverges, or ends, inside the hashes is taken to do so at the end of the last equal
block: too early by less than a block, never too late.
The ids at the beginning are kept because many conversations begin alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from slotkeeper.scheduler.policies.adapters import namespace_in, set_in
from slotkeeper.scheduler.prompts.tokens import EMPTY, WIDTH, Tokens, outside

BLOCK: Final = 128  # tokens
HASH_BYTES: Final = 8
NO_TOKEN: Final = -1
_BLOCK_BYTES: Final = BLOCK * WIDTH


class Edge:
    """The token ids between two nodes: at least one, except for a root, whose edge is empty."""

    __slots__ = ("_chain", "_lead", "first", "hashed", "head", "ids")

    def __init__(self, ids: Tokens) -> None:
        ids = Tokens.of(ids.packed, ids.space)  # images are numbers here: only a prompt knows where they are
        self.first = ids[0] if ids.packed else NO_TOKEN
        self.head = EMPTY  # cold: the ids before the hashes
        self.hashed = 0  # tokens that are stored only as hashes; whole blocks
        self.ids = ids  # the ids after the hashes; warm: all ids
        # An edge that is warmed keeps its hashes, for when it is cooled again.
        # Python's own hash is keyed, has 64 bits and is three times as fast as any of hashlib's. It
        # differs between processes, so it must not leave this one.
        self._chain = array("q")
        self._lead = BLOCK  # tokens before the first block

    def __len__(self) -> int:
        return len(self.head) + self.hashed + len(self.ids)

    def __repr__(self) -> str:
        return f"<Edge {len(self)} tokens, {self.hashed} hashed>"

    @property
    def coolable(self) -> int:
        """The number of ids that cooling would free, in tokens."""
        return 0 if self.hashed else max(0, (len(self.ids) - self._lead) // BLOCK * BLOCK)

    @property
    def size(self) -> int:
        """The memory that grows with the number of tokens, in bytes."""
        return len(self.head.packed) + HASH_BYTES * len(self._chain) + len(self.ids.packed)

    def common(self, prompt: Tokens, begin: int) -> int:
        """Return the number of tokens that the edge has in common with the prompt from `begin` on."""
        same = self.head.lcp(prompt, begin)
        if same < len(self.head):
            return same
        same += BLOCK * self._same_blocks(prompt, begin + same)
        if same < len(self.head) + self.hashed:
            return same
        return same + self.ids.lcp(prompt, begin + same)

    def parts(self, common: int, left: int) -> bool:
        """Whether a prompt diverges inside this edge; `left` of its tokens are not in common.

        Inside the hashes, fewer than a block of tokens prove nothing: they may begin the next hashed block.
        """
        return common < len(self) and left >= (BLOCK if self._hazy(common) else 1)

    def take(self, sequence: Tokens, begin: int, end: int) -> None:
        """Warm the edge: take its ids from a sequence that contains it, from `begin` to `end`."""
        self.head, self.hashed = EMPTY, 0
        ids = sequence.packed[begin * WIDTH : end * WIDTH]  # no copy for the whole sequence
        self.ids = Tokens.of(ids, sequence.space)

    def cool(self) -> None:
        """Cool the edge: replace all whole blocks by hashes, and keep the ids before and after them."""
        ids, chain, lead, hashed = self.ids, self._chain, self._lead, self.coolable
        last = chain[-1] if chain else 0
        for at in range((lead + BLOCK * len(chain)) * WIDTH, (lead + hashed) * WIDTH, _BLOCK_BYTES):
            last = hash((last, ids.packed[at : at + _BLOCK_BYTES]))
            chain.append(last)
        self.head, self.hashed, self.ids = ids.cut(0, lead), hashed, ids.cut(lead + hashed)

    def below(self, at: int) -> Edge | None:
        """Return the part after the first `at` tokens as a new edge; None if its first id is not known."""
        if self._hazy(at):
            return None
        if at >= len(self.head):
            return Edge(self.ids.cut(at - len(self.head) - self.hashed))
        edge = Edge(self.head.cut(at))
        edge.head, edge.hashed, edge.ids = edge.ids, self.hashed, self.ids
        edge._chain, edge._lead = self._chain, len(edge.head)
        return edge

    def _hazy(self, at: int) -> bool:
        """Whether the token at `at` is stored only as part of a hash."""
        return len(self.head) <= at < len(self.head) + self.hashed

    def _same_blocks(self, prompt: Tokens, begin: int) -> int:
        """Return how many of the hashed blocks are equal to the prompt's from `begin` on."""
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
NODE_BYTES: Final = 700  # of a node and its entries in all tables: 610 measured, plus malloc's overhead


@dataclass(frozen=True, slots=True)
class Branch:
    """A place on a prompt's path where sequences have diverged."""

    at: int  # tokens before it
    ways: int  # continuations seen, the prompt's own included; one dropped and seen again counts twice
    passed: int = 0  # sequences that reached it since it was found, the first two included
    used: float = 0.0  # when a sequence last reached it, or the edge before it


@dataclass(frozen=True, slots=True)
class Twig:
    """An edge, as observers see it."""

    id: int  # valid as long as the edge exists
    parent: int | None
    begin: int  # tokens before it
    end: int
    ways: int  # continuations seen after it
    passed: int
    used: float


class _Node:
    """The place where an edge ends."""

    __slots__ = ("children", "edge", "parent", "passed", "used", "ways")

    def __init__(self, edge: Edge, parent: _Node | None, used: float) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}  # by the first id of their edges
        self.ways = 0  # children that it has ever had
        self.passed = 1
        self.used = used

    @property
    def size(self) -> int:
        return NODE_BYTES + self.edge.size


_Path = list[tuple[_Node, int, int]]  # node, tokens before its edge, tokens in common with its edge


class PromptTree:
    """Stores token sequences; finds a prompt's longest known prefix, and where the prompt may diverge.

    When a sequence diverges inside a cold edge, the rest of that edge is dropped: only its hashes are known,
    and a child needs its first id.

    Args:
        warm: tokens of edges that may stay warm.
        budget: memory in bytes, as `size` counts it. The newest leaf stays whatever it takes.
    """

    def __init__(self, warm: int = WARM_TOKENS, budget: int = BUDGET) -> None:
        self._root = _Node(Edge(EMPTY), None, 0.0)
        self._roots: dict[str, _Node] = {}  # of the other spaces
        self._limits = (warm, budget)
        self._warm: OrderedDict[_Node, None] = OrderedDict()  # nodes whose edges can be cooled
        self._leaves: OrderedDict[_Node, None] = OrderedDict()
        self._last: tuple[Tokens, _Path] = (EMPTY, [])  # callers ask several things about the same prompt
        self.tokens = 0
        self.warm = 0  # tokens whose ids cooling would free
        self.size = 0  # bytes

    def __repr__(self) -> str:
        return f"<PromptTree {self.tokens} tokens, {self.warm} warm, {len(self._leaves)} leaves>"

    @property
    def leaves(self) -> int:
        return len(self._leaves)

    def longest(self, prompt: Tokens) -> int:
        """Return the length of the prompt's longest prefix that was ever added, in tokens.

        It is too short by less than a block if the prompt diverges inside a cold edge.
        """
        path = self._last_path(prompt)
        return outside(prompt.chunks, path[-1][1] + path[-1][2]) if path else 0

    def longest_of_other_sets(self, prompt: Tokens) -> int:
        """Return the longest prefix among sequences of the same namespace under other LoRA adapters."""
        if not set_in(prompt.space):
            return 0
        mine = namespace_in(prompt.space)
        others = [space for space in self._roots if namespace_in(space) == mine and space != prompt.space]
        return max((self.longest(prompt.within(space)) for space in others), default=0)

    def passed_at(self, prompt: Tokens) -> float:
        """Return when the edge in which `longest` ends was last passed, in seconds; 0 if there is none."""
        path = self._last_path(prompt)
        return path[-1][0].used if path else 0.0

    def branches(self, prompt: Tokens) -> list[Branch]:
        """Return where sequences diverge on the prompt's path, and where the prompt itself does; ascending.

        The prompt's beginning and end are never such places.
        """
        branches = []
        for node, begin, common in self._last_path(prompt):
            end = begin + common
            left, at = len(prompt) - end, outside(prompt.chunks, end)
            if node.edge.parts(common, left):
                branches.append(Branch(at, 2, 1, node.used))
            elif left and node.ways and common == len(node.edge):
                ways = node.ways + (prompt[end] not in node.children)
                branches.append(Branch(at, ways, node.passed, node.used))
        return branches

    def recent_edges(self, most: int) -> list[Twig]:
        """Return the most recently passed edges, parents before their children; about `most` of them."""
        wanted = self._recent(most)
        twigs, ahead = [], [(root, 0) for root in (self._root, *self._roots.values())]
        while ahead:
            parent, begin = ahead.pop()
            for node in parent.children.values():
                if node in wanted:
                    end = begin + len(node.edge)
                    above = id(parent) if begin else None
                    twigs.append(Twig(id(node), above, begin, end, node.ways, node.passed, node.used))
                    ahead.append((node, end))
        return twigs

    def _recent(self, most: int) -> set[_Node]:
        """Return the latest leaves and all their ancestors."""
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
        """Return the `Twig.id` of the edge in which a sequence ends, or diverges from all known ones."""
        path = self._path(sequence)
        return id(path[-1][0]) if path else None

    def add(self, sequence: Tokens, now: float = 0.0) -> None:
        """Add a sequence that an engine holds or held."""
        node, end = self._root_of(sequence) or self._new_root(sequence.space), 0
        for step, begin, common in self._path(sequence):
            node, end = step, begin + common
            if node.edge.parts(common, len(sequence) - end):
                node = self._split(node, sequence.cut(begin, end))
            elif common < len(node.edge):
                end = len(sequence)  # the sequence ends inside this edge, as far as is known
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
        """Return the prompt's path; the last one is cached, because a request asks for it several times."""
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
        """Return the root of the sequence's space. All spaces share one budget."""
        return self._roots.get(sequence.space) if sequence.space else self._root

    def _new_root(self, space: str) -> _Node:
        """Make a root for a space, and drop the roots without children."""
        self._roots = {space: root for space, root in self._roots.items() if root.children}
        root = self._roots[space] = _Node(Edge(EMPTY), None, 0.0)
        return root

    def _split(self, node: _Node, above: Tokens) -> _Node:
        """Split a node's edge after these ids; return the new node that ends there."""
        assert node.parent is not None  # noqa: S101 - the root's edge is empty: it is never split
        upper = _Node(Edge(above), node.parent, node.used)
        upper.ways = 1
        upper.passed = 2  # the sequence that was there, and the one that diverges
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
        """Record a sequence that contains a node's whole edge; the edge is then warm and ends at `end`."""
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
        """Mark the node as the most recently used one."""
        node.used = now
        if not node.children:
            self._leaves[node] = None
            self._leaves.move_to_end(node)
        if node in self._warm:
            self._warm.move_to_end(node)

    def _count(self, node: _Node, sign: int = 1) -> None:
        """Add a node's edge to the sums, or subtract it; call it with -1 before a change, and again after."""
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
            self._leaves[parent] = None  # now a leaf itself, and as old as the dropped one
            self._leaves.move_to_end(parent, last=False)

    def _forget(self, node: _Node) -> None:
        """Remove a detached node and all nodes below it from the sums and tables."""
        nodes = [node]
        while nodes:
            gone = nodes.pop()
            nodes += gone.children.values()
            self._count(gone, -1)
            self._warm.pop(gone, None)
            self._leaves.pop(gone, None)

"""Edges of the prompt tree: token ids, all of them or little more than hashes of them.

Warm, an edge has all its ids, and comparing is memcmp. Cold, it has the ids at both ends, a block at most,
and of what is between a hash of each block of 128 ids, chained to the one before: a sixty-fourth of the
memory. A prompt that parts from the hashes, or ends there, does so at the last whole block that is the
same, as far as is known: too early by less than a block, never too late.
At the beginning ids are kept because many conversations open alike.
"""

from __future__ import annotations

from array import array
from typing import Final

from slotkeeper.scheduler.tokens import EMPTY, WIDTH, Tokens

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

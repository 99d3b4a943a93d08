"""Names of objects in a shared store. They make states findable and contain no text of a prompt.

    heads/GROUP/ANCHOR/ENTRY     the manifest and the tokens of a state, written last
    blobs/XX/STATE-SHA256-SALT   its slot file; XX are the first letters of the state
    used/STATE                   empty; its time says when the state was last fetched
    heads/GROUP/ANCHOR/ENTRY-parts   the same for a state in parts, with their names
    parts/XX/NAME                a part (`part_objects`): a keyed hash of namespace and contents
    parts/XX/NAME-1              another copy of it, because the first one is about to be removed
    doomed/NUMBER                the names of parts that are removed an hour later
    marks/STATE                  for a state in parts what used/STATE is for others
    elections/NUMBER             empty; its writer collects garbage in that term
    seal                         the secret of a store for which the user has set no key

A GROUP is one kind of engine and one namespace. An ANCHOR is the hash of a prompt's first 1, 16 or 256 blocks
of 256 tokens: a prompt has up to three anchors. A state is stored under the anchor of its longest beginning.
The ENTRY has the number of tokens of the state, three bytes of its hash chain at several depths, and STATE: a
hash of all that identifies the state. So one listing under each anchor shows how much every state shares with
a prompt.

Sidecars of release 0.7.0 know no states in parts: they do not parse such an ENTRY and do not list the other
three folders, so their collectors leave all that alone.

If the user has set a key, all these hashes are keyed: access to the store alone cannot even confirm a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import itemgetter
from typing import Final

from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.store.manifest import BLOCK, Manifest, chain

HEADS: Final = "heads"
BLOBS: Final = "blobs"
USED: Final = "used"
PARTS: Final = "parts"
DOOMED: Final = "doomed"
MARKS: Final = "marks"
ELECTIONS: Final = "elections"
STORE_SEAL: Final = "seal"

ANCHORS: Final = (1, 16, 256)  # blocks of 256 tokens: at most three listings for a prompt
SHORT: Final = 6  # hex digits of a hash in an entry: two are equal by chance once in 16 million
NEAR_END: Final = 3  # last blocks whose hashes are in an entry: a reply may come back in another form
PROMISING: Final = 4  # heads that are read for one prompt
SURE: Final = 2  # heads that are read if the best state is a beginning of the prompt
_ALL: Final = 0xFFFFFFFF  # an entry begins with _ALL less its tokens: the longest states are listed first
IN_PARTS: Final = "-parts"
_ENTRY: Final = re.compile(rf"([0-9a-f]{{8}})-([0-9a-f]+)-([0-9a-f]{{32}})({IN_PARTS})?")
_STATE: Final = re.compile(r"[0-9a-f]{32}(?![0-9a-f])")
_PART: Final = re.compile(rf"{PARTS}/([0-9a-f]{{2}})/(\1[0-9a-f]{{38}})(?:-([1-9][0-9]{{0,2}}))?")
PART_BYTES: Final = 21  # bytes of a name of a part: 20 of its hash, and which copy it is
MOST_COPIES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadName:
    """The name of one state's head."""

    folder: str  # heads/GROUP/ANCHOR
    name: str
    tokens: int
    marks: tuple[str, ...]
    state: str
    in_parts: bool = False

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def used(self) -> str:
        return f"{MARKS if self.in_parts else USED}/{self.state}"

    @property
    def parted(self) -> HeadName:
        """The name of the head of the same state in parts."""
        return replace(self, name=self.name + IN_PARTS, in_parts=True)

    def common(self, marks: Sequence[str]) -> int:
        """Return the least number of tokens that the state shares with a prompt of these marks."""
        depths = [depth for depth in rungs(self.tokens // BLOCK) if depth <= len(marks)]
        alike = (d for d, mark in zip(depths, self.marks, strict=False) if marks[d - 1] == mark)
        return BLOCK * max(alike, default=0)


def rungs(blocks: int) -> list[int]:
    """Return the depths at which an entry has a mark, in blocks, ascending."""
    powers = {1 << bit for bit in range(blocks.bit_length())}
    return sorted(powers | {depth for depth in range(blocks - NEAR_END + 1, blocks + 1) if depth > 0})


def state_of(path: str) -> str | None:
    """Return the state whose blob or mark of use has this path; None for any other path."""
    match = _STATE.match(path.rpartition("/")[2])
    return match[0] if match and path.startswith((f"{BLOBS}/", f"{USED}/", f"{MARKS}/")) else None


def part_path(part: bytes) -> str:
    """Return the path of a part: `part` is the hash and the number of the copy (PART_BYTES)."""
    name, copy = part[:-1].hex(), part[-1]
    return f"{PARTS}/{name[:2]}/{name}{f'-{copy}' if copy else ''}"


def part_at(path: str) -> bytes | None:
    """Return the part that has this path; None for any other path."""
    match = _PART.fullmatch(path)
    if match is None or (copy := int(match[3] or 0)) >= MOST_COPIES:
        return None
    return bytes.fromhex(match[2]) + bytes([copy])


def parts_in(packed: bytes) -> list[bytes]:
    """Return the parts whose names are written one after the other."""
    return [packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES)]


def parsed(path: str) -> HeadName | None:
    """Parse the path of a head; None if the path is not one of ours."""
    folder, _, name = path.rpartition("/")
    match = _ENTRY.fullmatch(name)
    if match is None or folder.count("/") != 2 or not folder.startswith(f"{HEADS}/"):
        return None
    tokens, letters = _ALL - int(match[1], 16), match[2]
    marks = tuple(letters[at : at + SHORT] for at in range(0, len(letters), SHORT))
    if len(marks) != len(rungs(tokens // BLOCK)) or len(letters) % SHORT:
        return None
    in_parts = match[4] is not None
    return HeadName(folder=folder, name=name, tokens=tokens, marks=marks, state=match[3], in_parts=in_parts)


class ObjectNames:
    """Makes names under one key. Without a key, anyone can compute them from the tokens."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key

    def marks(self, tokens: Tokens) -> list[str]:
        """Return one mark for each whole block of a prompt."""
        whole = tokens.cut(0, len(tokens) // BLOCK * BLOCK)
        return [self._hash("mark", link, size=SHORT // 2) for link in chain(whole)]

    def folders(self, tokens: Tokens, fingerprint: str) -> list[str]:
        """Return the folders of states that may share the prompt's beginning, the longest beginning first."""
        links = chain(tokens.cut(0, len(tokens) // BLOCK * BLOCK))
        depths = [depth for depth in reversed(ANCHORS) if depth <= len(links)]
        return [self._folder(links[depth - 1], fingerprint, tokens.space) for depth in depths]

    def entry(self, manifest: Manifest, tokens: Tokens) -> HeadName | None:
        """Return the name of a snapshot's head; None if the snapshot is too short to be found."""
        tokens = tokens.within(manifest.space)
        folders = self.folders(tokens, manifest.fingerprint)
        if not folders:
            return None
        marks, blocks = self.marks(tokens), len(tokens) // BLOCK
        shown = tuple(marks[depth - 1] for depth in rungs(blocks))
        cuts = " ".join(map(str, manifest.checkpoints))
        kind = f"{manifest.version} {manifest.draft} {manifest.repaired}"
        facts = (manifest.fingerprint, manifest.space, manifest.layout, kind, cuts)
        state = self._hash("state", *facts, *manifest.chain, str(manifest.tokens), size=16)
        name = f"{_ALL - manifest.tokens:08x}-{''.join(shown)}-{state}"
        return HeadName(folder=folders[0], name=name, tokens=manifest.tokens, marks=shown, state=state)

    def blob(self, entry: HeadName, sha256: str, salt: bytes) -> str:
        """Return the name of a blob with this content.

        The salt makes it unique to one write, so that no sidecar overwrites or removes another one's blob.
        """
        content = self._hash("content", sha256, size=32) if self._key else sha256
        return f"{BLOBS}/{entry.state[:2]}/{entry.state}-{content}-{salt.hex()}"

    def _folder(self, link: str, fingerprint: str, space: str) -> str:
        group = self._hash("group", fingerprint, space, size=16)
        return f"{HEADS}/{group}/{self._hash('anchor', link, size=8)}"

    def _hash(self, *parts: str, size: int) -> str:
        """Hash the parts, each with its length, so that different lists of parts never give the same text."""
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return blake2b(text.encode(), key=self._key, digest_size=size).hexdigest()


# -- which heads to read for a prompt -----------------------------------------------------------------------


def entries_to_read(
    found: Iterable[tuple[str, Iterable[str]]], marks: Sequence[str], length: int, beyond: int
) -> list[HeadName]:
    """Return the most promising of the entries `found` in folders: each folder with its names.

    Thousands of states may begin with one system prompt. Then this takes tens of milliseconds.
    """
    entries = (parsed(f"{folder}/{name}") for folder, names in found for name in names)
    return most_promising(filter(None, entries), marks, length, beyond)


def most_promising(
    entries: Iterable[HeadName], marks: Sequence[str], length: int, beyond: int
) -> list[HeadName]:
    """Return the entries to read for a prompt of `length` tokens, the best ones first.

    There are fewer if the best state is a beginning of the prompt. Each may share more than `beyond` tokens.
    """
    promises = ((_promise(entry, marks, length), entry) for entry in entries)
    ranked = sorted(promises, key=itemgetter(0), reverse=True)
    most = SURE if ranked and ranked[0][0][1] else PROMISING
    good = (entry for _, entry in ranked[:most])
    return [entry for entry in good if min(length, entry.common(marks) + BLOCK - 1) > beyond]


def _promise(entry: HeadName, marks: Sequence[str], length: int) -> tuple[int, bool, int]:
    """Return a sort key for a prompt of `length` tokens.

    It is the tokens shared with the prompt, then whether these are all of the entry's, in whole blocks. Of
    equal entries the longest that is no longer than the prompt comes first: it may share most of a block.
    """
    common = entry.common(marks)
    fits = entry.tokens if entry.tokens <= length else 0
    return common, common == entry.tokens // BLOCK * BLOCK, fits

"""Which states to keep: prompt tokens computed a second time under a byte budget, by rule of eviction.

`python -m benchmarks.retention [--seeds 50] [--first 1000] [--share 3]`. A simulation: one slot, and states
saved at the start of each user message and at the end of each reply, as engines need whose files carry no
checkpoints. The user goes back to a random turn, edits it and continues. The budget holds a third of the
states that the first twelve turns save: 8 of 24.

`--traces FILE...` plays recorded sessions of agents instead, six at a time; the budget holds a third of all
their states. Four bytes of text are one token.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.progress import track
from rich.table import Table

from benchmarks.figures import console, keep
from benchmarks.going_back import SYSTEM, TURNS, Request, at_once, edits_after, edits_among, edits_of_it
from benchmarks.simulator.load import from_files
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
    restored,
    reuse,
)
from slotkeeper.scheduler.snapshots.retention import evict

FIRST_SEED: Final = 1000  # the rule was chosen on seeds below this one
SHARE: Final = 3
TITLE: Final = "prompt tokens computed again in a session, with room for 1/{} of {}; others ÷ LRU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of memory, and the size of its states."""

    traits: EngineTraits
    state_bytes: int  # constant bytes of a state
    token_bytes: int  # bytes of each token in a state
    golden: bool = False  # the system prompt is a golden prefix


Trace = Callable[[random.Random], list[Request]]
Cases = Mapping[str, tuple[Kind, Trace]]
Row = dict[str, Any]

EQUAL: Final = Kind(
    traits=EngineTraits(memory=Memory.HYBRID, files_carry=False), state_bytes=50_000_000, token_bytes=0
)
MIXED: Final = replace(EQUAL, state_bytes=20_000_000, token_bytes=10_000)
DENSE: Final = Kind(traits=EngineTraits(memory=Memory.DENSE), state_bytes=0, token_bytes=100_000, golden=True)

CASES: Final[Cases] = {
    "hybrid: edits among 12 turns": (EQUAL, edits_among),
    "hybrid: edits of 12 turns": (EQUAL, edits_of_it),
    "edits of 12 turns, thoughts stripped": (EQUAL, partial(edits_of_it, thinks=True)),
    "hybrid: edits of edits": (EQUAL, edits_after),
    "edits of edits, thoughts stripped": (EQUAL, partial(edits_after, thinks=True)),
    "edits of edits, 1 in 4 goes back": (EQUAL, partial(edits_after, returns=0.25)),
    "edits of edits, mixed sizes": (MIXED, edits_after),
    "hybrid, mixed: two conversations": (replace(MIXED, golden=True), partial(edits_after, chats=2)),
    "dense: two conversations": (DENSE, partial(edits_after, chats=2)),
    "dense: the same, 1 in 2 goes back": (DENSE, partial(edits_after, chats=2, returns=0.5)),
}

RECORDED: Final = {"hybrid": EQUAL, "mixed sizes": MIXED, "dense": replace(DENSE, golden=False)}


# -- rules of eviction ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a rule of eviction is given; `budget` in bytes. Only `foresight` and `workflow` use `future`."""

    states: Sequence[Snapshot]
    budget: int
    traits: EngineTraits
    live: SlotContents
    now: float
    past: Sequence[Request]
    future: Sequence[Request]

    @property
    def over(self) -> int:
        return sum(s.size for s in self.states) - self.budget


Rule = Callable[[Asked], list[SnapshotId]]


def by_value(asked: Asked) -> list[SnapshotId]:
    return evict(asked.states, asked.budget, traits=asked.traits, live=[asked.live], now=asked.now)


def oldest_used(asked: Asked) -> list[SnapshotId]:
    return _first(asked, _recency)


def oldest(asked: Asked) -> list[SnapshotId]:
    return _first(asked, lambda s: s.created)


def _first(asked: Asked, key: Callable[[Snapshot], Any]) -> list[SnapshotId]:
    over, gone = asked.over, []
    for state in sorted(asked.states, key=lambda s: (s.golden, key(s))):
        if over > 0:
            over -= state.size
            gone.append(state.id)
    return gone


def foresight(asked: Asked) -> list[SnapshotId]:
    """Evict what the prompts to come will miss least: not a bound, but an estimate of what is possible.

    A prompt counts only if it shares no more tokens with the requests before it than with the past.
    """
    coming = [request.prompt for n, request in enumerate(asked.future)
              if _common(asked.past, request) >= _common(asked.future[:n], request)]  # fmt: skip
    left, over, gone = list(asked.states), asked.over, []
    gives = {s.id: [_given(s, prompt, asked.traits) for prompt in coming] for s in left}
    while over > 0:
        missed = dict.fromkeys(gives, 0)
        for n in range(len(coming)):
            best, *others = sorted(left, key=lambda s: gives[s.id][n], reverse=True)[:2]
            missed[best.id] += gives[best.id][n] - max((gives[s.id][n] for s in others), default=0)
        worst = min(left, key=lambda s: (missed[s.id] / s.size, s.created))
        left.remove(worst)
        gone.append(worst.id)
        over -= worst.size
    return gone


def flop_aware(asked: Asked, weight: float) -> list[SnapshotId]:
    """Evict as Marconi does (arXiv 2411.19379, 4.2): recency plus weighted tokens per byte, both up to 1."""
    last = {s.id: max(s.used, s.created) for s in asked.states}
    first, latest = min(last.values()), max(last.values())
    saves = {s.id: len(s.tokens) / s.size for s in asked.states}
    most = max(saves.values())

    def score(state: Snapshot) -> float:
        recency = (last[state.id] - first) / max(1.0, latest - first)
        return recency + weight * saves[state.id] / most

    return _first(asked, score)


def segment_length(asked: Asked, weight: float) -> list[SnapshotId]:
    """Evict as `seglen` does (sgl-project/sglang#22172): tokens since the state before, and recency."""
    left, over, gone = list(asked.states), asked.over, []
    last = {s.id: max(s.used, s.created) for s in left}
    while over > 0:
        replayed = {s.id: len(s.tokens) - _shorter(s, left) for s in left}
        longest, first, latest = max(replayed.values()), min(last.values()), max(last.values())
        keeps = {
            s.id: weight * replayed[s.id] / max(1, longest)
            + (1 - weight) * (last[s.id] - first) / max(1.0, latest - first)
            for s in left
        }
        worst = min(left, key=lambda s: (s.golden, keeps[s.id]))
        left.remove(worst)
        gone.append(worst.id)
        over -= worst.size
        del last[worst.id]
    return gone


def _shorter(state: Snapshot, others: Collection[Snapshot]) -> int:
    """Return the length of the longest other state with which this one begins."""
    lengths = (len(o.tokens) for o in others if o is not state and state.tokens.begins_with(o.tokens))
    return max(lengths, default=0)


def workflow(asked: Asked) -> list[SnapshotId]:
    """Evict as KVFlow does (arXiv 2507.07400): first the states of the agent whose next step is farthest.

    It is told the order in which agents come, here conversations, but not where in these they go on.
    """

    def steps(state: Snapshot) -> int:
        shares = (request.prompt.lcp(state.tokens) > SYSTEM for request in asked.future)
        return next((n for n, share in enumerate(shares) if share), len(asked.future))

    return _first(asked, lambda s: (-steps(s), _recency(s)))


def time_to_live(asked: Asked, rate: float) -> list[SnapshotId]:
    """Evict as Continuum does (arXiv 2511.02230, 4): states whose time to live is over, oldest used first.

    The newest state of a conversation lives until its next request, and at most for the seconds that gain
    most: the chance that a pause ends by then, times the seconds of prefill at `rate` tokens a second, less
    these seconds themselves (equation 2; with one slot no request queues). If all live, the conversation that
    began last gives way. Chances are those of all pauses so far, from the first on: the paper waits for 100
    of a tool, and leaves a user's pause out.
    """
    newest = {request.chat: request for request in asked.past}
    order = {chat: number for number, chat in enumerate(newest)}
    pauses = sorted(_pauses(asked.past))
    lives = {
        request.end: order[chat]
        for chat, request in newest.items()
        if request.at + _worthwhile(pauses, len(request.end) / rate) >= asked.now
    }
    return _first(asked, lambda s: (s.tokens in lives, -lives.get(s.tokens, 0), _recency(s)))


def _pauses(past: Sequence[Request]) -> Iterator[float]:
    """Yield the seconds between two requests of one conversation."""
    before: dict[str, float] = {}
    for request in past:
        if request.chat in before:
            yield request.at - before[request.chat]
        before[request.chat] = request.at


def _worthwhile(pauses: Sequence[float], gain: float) -> float:
    """Return for how many seconds a state is kept that saves `gain` seconds; `pauses` are sorted."""

    def value(seconds: float) -> float:
        return bisect_right(pauses, seconds) / len(pauses) * gain - seconds

    return max((0.0, *pauses), key=value) if pauses else 0.0


def sparse(asked: Asked) -> list[SnapshotId]:
    """Keep the states of the newest path that an exact search prefers (arXiv 2605.05219), then recent ones.

    They save most for prompts that diverge where prompts have diverged before, as shares of a path, or with
    the weight of one prompt anywhere.
    """
    end, over = asked.past[-1].end, asked.over
    path = {len(s.tokens): s for s in asked.states if end.begins_with(s.tokens)}
    gone = []
    for state in sorted(asked.states, key=_recency):
        if over > 0 and state not in path.values() and not state.golden:
            gone.append(state.id)
            over -= state.size
    always = max((at for at, state in path.items() if state.golden), default=0)
    choices = sorted(at for at in path if at > always)
    depths = [share * len(end) for share in _divergences(asked.past)]
    for kept in range(len(choices) - (over > 0), -1, -1):
        dropped = set(choices) - _placed(choices, depths, len(end), kept, always)
        if sum(path[at].size for at in dropped) >= over:
            return [*gone, *(path[at].id for at in sorted(dropped))]
    return gone


def _recency(state: Snapshot) -> float:
    return max(state.used, state.created)


def _divergences(past: Sequence[Request]) -> list[float]:
    """Return where each prompt diverged from the one before, as a share of that one with its reply."""
    return [request.prompt.lcp(before.end) / len(before.end) for before, request in pairwise(past)]


def _placed(
    choices: Sequence[int], depths: Sequence[float], end: int, kept: int, always: int
) -> frozenset[int]:
    """Return up to `kept` of these lengths: those that leave the fewest tokens from them to the depths."""

    def computed(start: int, until: int) -> float:
        """Return the tokens from `start` to the depths before `until`, and to one that may be anywhere."""
        anywhere = (until - start) ** 2 / (2 * end)
        return anywhere + sum(depth - start for depth in depths if start <= depth < until)

    @cache
    def search(start: int, first: int, left: int) -> tuple[float, tuple[int, ...]]:
        found = [(computed(start, end + 1), tuple[int, ...]())]
        for n in range(first, len(choices) if left else first):
            cost, others = search(choices[n], n + 1, left - 1)
            found.append((computed(start, choices[n]) + cost, (choices[n], *others)))
        return min(found)

    return frozenset(search(always, 0, kept)[1])


class Policy(NamedTuple):
    """A rule of eviction, and whether states are admitted as Marconi does it (4.1).

    It admits the end of a reply, and a place where prompts have diverged.
    """

    rule: Rule
    selects: bool = False


OURS: Final = "by value"
LRU: Final = "least recently used"
WEIGHTS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
RATES: Final = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # tokens a second
SHARES: Final = (0.5, 0.7, 0.85, 1.0)  # 0.85 is the example in the pull request
POLICIES: Final[dict[str, Policy]] = {
    LRU: Policy(oldest_used),
    "oldest": Policy(oldest),
    OURS: Policy(by_value),
    "KVFlow": Policy(workflow),
    "sparse": Policy(sparse),
    "with foresight": Policy(foresight),
    "all kept": Policy(lambda _: []),  # computed again are then only tokens of states that were never saved
}
# With the best weight, or rate, of each case: Marconi's paper tunes it on the work itself.
TUNED: Final[dict[str, list[Policy]]] = {
    "Marconi": [Policy(partial(flop_aware, weight=weight)) for weight in WEIGHTS],
    "Marconi, admission too": [
        Policy(partial(flop_aware, weight=weight), selects=True) for weight in WEIGHTS
    ],
    "SegLen": [Policy(partial(segment_length, weight=weight)) for weight in SHARES],
    "Continuum": [Policy(partial(time_to_live, rate=rate)) for rate in RATES],
}


# -- one slot and its files -------------------------------------------------------------------------


def _given(state: Snapshot, prompt: Tokens, traits: EngineTraits) -> int:
    return reuse(restored(state, traits, now=0.0), prompt, traits)


def _common(others: Sequence[Request], request: Request) -> int:
    """Return the longest prefix of a prompt that the others, with their replies, have in common with it."""
    return max((other.end.lcp(request.prompt) for other in others), default=0)


@dataclass
class Desk:
    """One slot and its files, under one rule of eviction."""

    kind: Kind
    budget: int
    policy: Policy
    states: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    live: SlotContents = field(default_factory=SlotContents)
    again: int = 0  # tokens computed that had been computed before
    most: int = 0  # largest size of all files, bytes

    def serve(self, request: Request, past: Sequence[Request], future: Sequence[Request]) -> None:
        traits = self.kind.traits
        cached = reuse(self.live, request.prompt, traits)
        best = max(self.states.values(), key=lambda s: _given(s, request.prompt, traits), default=None)
        if best and (given := _given(best, request.prompt, traits)) > cached:
            cached = given
            self.states[best.id] = replace(best, used=request.at, restores=best.restores + 1)
        self.again += max(0, min(_common(past, request), len(request.prompt) - 1) - cached)
        for end in (request.boundary, len(request.end)):
            if end >= cached and self._admits(request, end, past):
                self.live = SlotContents(tokens=request.end.cut(0, end), used=request.at)
                self._save(self.live.tokens, request.at)
                self._make_room(request, past, future)

    def _admits(self, request: Request, end: int, past: Sequence[Request]) -> bool:
        if not self.policy.selects or end == len(request.end):
            return True
        return any(earlier.end.lcp(request.prompt) == end < len(earlier.end) for earlier in past)

    def _save(self, tokens: Tokens, at: float) -> None:
        same = next((s for s in self.states.values() if s.tokens == tokens), None)
        if same:
            self.states[same.id] = replace(same, used=at)
            return
        name = SnapshotId(f"{at:012.3f}-{len(tokens)}")
        size = self.kind.state_bytes + self.kind.token_bytes * len(tokens)
        golden = self.kind.golden and len(tokens) == SYSTEM
        self.states[name] = Snapshot(
            id=name, fingerprint="", tokens=tokens, size=size, created=at, golden=golden
        )

    def _make_room(self, request: Request, past: Sequence[Request], future: Sequence[Request]) -> None:
        asked = Asked(
            states=tuple(self.states.values()), budget=self.budget, traits=self.kind.traits,
            live=self.live, now=request.at, past=(*past, request), future=future,
        )  # fmt: skip
        if asked.over > 0:
            for gone in self.policy.rule(asked):
                del self.states[gone]
        self.most = max(self.most, sum(s.size for s in self.states.values()))


def play(kind: Kind, requests: Sequence[Request], policy: Policy, budget: int) -> Desk:
    desk = Desk(kind, budget, policy)
    for n, request in enumerate(requests):
        desk.serve(request, requests[:n], requests[n + 1 :])
    return desk


def measure(name: str, case: tuple[Kind, Trace], seeds: Sequence[int], share: int, most: int | None) -> Row:
    """Return a row of the table; the budget is a part of the states of the first `most` requests."""
    kind, trace = case
    sessions = [trace(random.Random(seed)) for seed in seeds]
    budgets = [play(kind, each[:most], POLICIES["all kept"], 0).most // share for each in sessions]

    def computed_again(policy: Policy) -> list[int]:
        pairs = zip(sessions, budgets, strict=True)
        return [play(kind, requests, policy, budget).again for requests, budget in pairs]

    again = {rule: computed_again(policy) for rule, policy in POLICIES.items()}
    again |= {rule: min(map(computed_again, policies), key=sum) for rule, policies in TUNED.items()}
    pairs = zip(again[OURS], again[LRU], strict=True)
    return {
        "case": name,
        "seeds": len(seeds),
        "prompt_tokens": sum(len(request.prompt) for session in sessions for request in session),
        "computed_again": {rule: sum(found) for rule, found in again.items()},
        "seeds_no_worse_than_lru": sum(ours <= theirs for ours, theirs in pairs),
    }


def table(rows: Sequence[Row], share: int, whole: str) -> Table:
    others = [rule for rule in rows[0]["computed_again"] if rule != LRU]
    shown = Table("case", LRU, *others, "seeds no worse", title=TITLE.format(share, whole))
    for row in rows:
        found, seeds = row["computed_again"], row["seeds"]
        ratios = (f"{found[rule] / max(1, found[LRU]):.2f}" for rule in others)
        worse = f"{row['seeds_no_worse_than_lru']}/{seeds}"
        shown.add_row(row["case"], f"{found[LRU] / seeds:,.0f}", *ratios, worse)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retention", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=FIRST_SEED)
    parser.add_argument("--share", type=int, default=SHARE, help="the budget is one part in this number")
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    cases, whole = CASES, "twelve turns"
    most: int | None = TURNS

    if chosen.traces:
        recorded = partial(at_once, recorded=[from_files([path]) for path in chosen.traces])
        cases = {f"recorded, {name}": (kind, recorded) for name, kind in RECORDED.items()}
        most, whole = None, "all states"
    shown = track(cases.items(), "cases", console=console, transient=True)
    rows = [measure(name, case, seeds, chosen.share, most) for name, case in shown]
    console.print(table(rows, chosen.share, whole))
    name = "retention-recorded" if chosen.traces else "retention"
    keep(name, {"share": chosen.share, "first_seed": chosen.first, "cases": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

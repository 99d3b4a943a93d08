"""Collections that outlive a request are bounded: each is filled ten times over."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
from prometheus_client import generate_latest

from playbooks.playbook import Play, arrives, ends
from slotkeeper.api import document
from slotkeeper.api.answers.answer import REMEMBERED, EngineSpeed, Prefilled, SseSplitter
from slotkeeper.api.head import Api
from slotkeeper.api.request import lay_out
from slotkeeper.conversation import layout, naming
from slotkeeper.conversation.layout import Who
from slotkeeper.conversation.likeness import REPLIES, Conversations
from slotkeeper.conversation.naming import Agents, Naming
from slotkeeper.engine.child.process import trim
from slotkeeper.exchange.connections import Connections
from slotkeeper.observe.gauges import SlotFigures
from slotkeeper.observe.journal import FOLLOWED, MOST, UNDER_WAY, Journal, Owners
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import BUCKET, BUCKETS, ClientFigures, Clients, History
from slotkeeper.observe.request_record import NAMED_CLIENTS as CLIENTS
from slotkeeper.observe.states import Spent
from slotkeeper.runtime.driver import LATE_RENDER_BYTES, LateRenders
from slotkeeper.runtime.render import LATEST_PROMPTS_CHARACTERS, LatestPrompts, Recent, TurnRenderer
from slotkeeper.runtime.tasks import Tasks
from slotkeeper.scheduler.events import Arrived, SnapshotsChanged
from slotkeeper.scheduler.idle_work import coldest
from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.rates import REMEMBERED as TIMES
from slotkeeper.scheduler.rates import LinearTimes, Measured
from slotkeeper.scheduler.requests.figures import Usage
from slotkeeper.scheduler.requests.pending import Pause
from slotkeeper.scheduler.slots.engine_model import (
    RAM_ENTRIES,
    EngineTraits,
    Memory,
    SlotContents,
    Snapshot,
    SnapshotId,
    publish,
)
from slotkeeper.scheduler.slots.shadow import EngineShadow
from slotkeeper.scheduler.slots.table import UNSEEN, EngineTable
from slotkeeper.scheduler.snapshots.catalog import Catalog
from slotkeeper.scheduler.state import (
    ANSWERS,
    CONVERSATIONS,
    EARLY,
    KINDS,
    PAUSES,
    PAUSES_OF_ALL,
    Ahead,
    FairQueue,
    Outputs,
    Pauses,
)
from slotkeeper.scheduler.state import MOST as AHEAD
from slotkeeper.scheduler.types import ClientId, EngineId, Reason, RequestId, Tier
from slotkeeper.store.files import Lane
from slotkeeper.vocab.tokenizer import SegmentCache
from unit.conversation.talks import chat, reply, system, user
from unit.observe.watched import record
from unit.runtime.stubs import StubLink, asked
from unit.store.saving import keep, names_in, opened

TRAITS: Final = EngineTraits(
    memory=Memory.DENSE, slot_files=True, state_version=4, files_carry=True, fingerprint="f", n_slots=2
)


def numbered(count: int) -> Iterator[Tokens]:
    return (Tokens(range(n, n + 20)) for n in range(count))


def snapshot(n: int, **more: object) -> Snapshot:
    known: dict[str, Any] = {
        "id": SnapshotId(f"s{n}"),
        "fingerprint": "f",
        "tokens": Tokens(range(n, n + 20)),
        "size": 20,
    }
    return Snapshot(**known | more)


# -- collections: each function fills one, and returns its size and its bound ------------------------------


def states_computed_ahead() -> tuple[int, int]:
    ahead = Ahead()
    for tokens in numbered(10 * AHEAD):
        ahead.computed(tokens, 1)
    return len(ahead._begins), AHEAD


def agents() -> tuple[int, int]:
    known, layout = Agents(most=5), chat(system("You are opencode, an agent."))
    for n in range(50):
        known.of(f"client {n}", {}, layout)
    return len(known._known), 5


def conversations_by_number() -> tuple[int, int]:
    book = Conversations(most=10)
    for n in range(100):
        sends(book, chat(system(), user(f"Task {n}.")), f"{n}")
    assert len(book._index) <= 6 * len(book)  # each conversation has only a few keys
    return max(len(book._lines), len(book._keys)), 10


def conversations_by_characters() -> tuple[int, int]:
    book = Conversations(characters=100_000)
    for n in range(100):
        sends(book, chat(user(f"Task {n}. " + "more " * 2000)), f"{n}")
    return len(book), 10


def conversations_of_empty_messages() -> tuple[int, int]:
    """A message without characters takes memory, too."""
    book = Conversations(characters=1000 * 600)
    for n in range(100):
        sends(book, chat(*[user("")] * 100), f"{n}")
    return len(book), 10


def conversations_with_options() -> tuple[int, int]:
    book = Conversations(characters=100_000)
    for n in range(100):
        kwargs = {"messages": [user(f"Task {n}.")], "chat_template_kwargs": {"a": "x" * 10_000}}
        sends(book, lay_out(Api.CHAT, kwargs), f"{n}")
    return len(book), 10


def conversations_with_tokens() -> tuple[int, int]:
    book = Conversations(characters=100_000)
    for n in range(100):
        line = sends(book, chat(user(f"Task {n}.")), f"{n}")
        book.rendered(line, Tokens(range(2500)))
    return len(book), 10


def replies_of_a_conversation() -> tuple[int, int]:
    book = Conversations()
    line = sends(book, chat(user("Task.")), "1")
    for n in range(10 * REPLIES):
        book.replied(line, reply(f"Answer {n}."))
    return len(line.replies), REPLIES


def sends(book: Conversations, layout, name: str):
    who = Who("key", name)
    return book.saw(book.find(who, layout), who, received=layout, sent=layout, notes={}, now=0.0)


def names_of_conversations() -> tuple[int, int]:
    book, known = Conversations(), Naming()
    for n in range(100):
        known.name("key", {}, sends(book, chat(user(f"Task {n}.")), f"{n}"))
    return len(known._names), 10


def titles() -> tuple[int, int]:
    """Bounded in characters, too: they are kept with the text of their request."""
    known, asked = Naming(text=True), "Generate a title for this conversation. " + "x" * 10 * naming.LOOKED_IN
    for n in range(10 * naming.TITLES):
        known.answered(f"{n}", chat(user(asked)), {"content": "A title"})
    assert known._titles
    return sum(len(what) for _, what, _ in known._titles), naming.TITLES * naming.LOOKED_IN


def queue() -> tuple[int, int]:
    line = FairQueue()
    for n in range(1000):
        line.add(RequestId(f"{n}"), ClientId(f"{n}"))
        line.served(RequestId(f"{n}"))
    return len(line._lines) + len(line._client), 0


def file_times() -> tuple[int, int]:
    times = LinearTimes(1e9)
    for n in range(10 * TIMES):
        times.took(1 << 20, 1.0 + n)
    return len(times._seen), TIMES


def speeds() -> tuple[int, int]:
    speed = Measured(1.0)
    for n in range(10 * TIMES):
        speed.was(100.0 + n)
    return len(speed._seen), TIMES


def prefills() -> tuple[int, int]:
    speed = EngineSpeed()
    for n in range(10 * REMEMBERED):
        speed.took(Prefilled(tokens=1 + n, context=0, seconds=1.0))
    return len(speed._seen), REMEMBERED


def texts_with_facts() -> tuple[int, int]:
    for n in range(10 * layout.REMEMBERED):
        layout.facts(f"Text {n}.")
    return layout.found_in.cache_info().currsize, layout.REMEMBERED


def ram_cache() -> tuple[int, int]:
    shadow = EngineShadow(TRAITS)
    for tokens in numbered(10 * RAM_ENTRIES):
        publish(shadow.ram, SlotContents(tokens=tokens), TRAITS)
    return len(shadow.ram), RAM_ENTRIES


def orders_of_files() -> tuple[int, int]:
    """Each new model, and each changed flag, is a new fingerprint."""
    catalog = Catalog()
    for n in range(100):
        catalog.put(snapshot(n, fingerprint=f"{n}"))
        catalog.put(snapshot(n, fingerprint=f"{n}", tier=Tier.COLD))
        assert catalog.order(Tier.HOT, f"{n}").states == []
        catalog.take(SnapshotId(f"s{n}"))
    return len(catalog._orders), 0


def files() -> tuple[int, int]:
    play = Play(memory="dense")
    play.placement.on(SnapshotsChanged(at=1.0, snapshots=tuple(snapshot(n) for n in range(80))))
    return len(play.placement.catalog), 8


def warmed_files() -> tuple[int, int]:
    table, catalog = EngineTable(EngineId("e"), EngineShadow(TRAITS)), Catalog()
    for n in range(100):
        one = snapshot(n, used=1.0)
        catalog.put(one)
        table.shadow.slots[0] = SlotContents(tokens=one.tokens)
        coldest(table, catalog, 1.0)
        table.warmed.add(one.id)
        catalog.take(one.id)
    return len(table.warmed), 2


def requests_that_were_never_seen() -> tuple[int, int]:
    """GET /slots does not answer; every other route does."""
    play = Play(memory="dense")
    for n in range(10 * UNSEEN):
        _ = play << arrives(f"r{n}", bypass=True, rendered=False) << ends(f"r{n}", 40)
    table = play.placement.tables[play.names[0]]
    assert len(play.placement._state.requests) <= UNSEEN
    return len(table.orphans), UNSEEN


def prompt_tree() -> tuple[int, int]:
    tree = PromptTree(warm=1000, budget=50_000)
    for n in range(500):
        tree.add(Tokens(range(10_000 * n, 10_000 * n + 300)), n)
    assert tree.warm <= 1000
    return tree.size, 50_000


def layouts_of_requests() -> tuple[int, int]:
    recent = document.RecentRequests()
    for n in range(10 * document.RECENT):
        doc = {"messages": [user(f"{n}")]}
        recent.add(Api.CHAT, "key", doc, lay_out(Api.CHAT, doc), 100)
    return len(recent._kept), document.RECENT


def pieces_of_text() -> tuple[int, int]:
    cache = SegmentCache(budget=10_000)
    for n in range(1000):
        cache.put(f"piece {n}", Tokens(range(100)))
    return cache.size_bytes, 10_000


def rows_of_clients() -> tuple[int, int]:
    clients = Clients()
    for n in range(10 * CLIENTS):
        clients.add(counted(f"{n:08}"))
    return len(clients._clients), CLIENTS + 1


def counted(client: str):
    return record(client=client, usage=Usage(prompt=1000, cached=900))


def connections() -> tuple[int, int]:
    """Clients come and go, each from its own address."""
    handlers: Iterator[Any] = (asyncio.BaseProtocol() for _ in range(100))
    port = Connections(Metrics(), most=5, of_one=5, head_seconds=1.0)
    port._handlers = lambda: next(handlers)
    for n in range(100):
        let_in: list[asyncio.BaseProtocol] = []
        one: Any = SimpleNamespace(address=f"10.0.0.{n}", let_in=let_in.append, transport=None)
        port.admit(one)
        assert len(port._by_address) == len(port) == 1
        port.left(one, *let_in)
    return len(port._by_address) + len(port), 0


def history() -> tuple[int, int]:
    now = iter(range(10**6, 10**9, int(BUCKET)))
    kept = History(clock=lambda: float(next(now)))
    for _ in range(10 * BUCKETS):
        kept.add(requests=1)
    return len(kept._buckets), BUCKETS


def journal() -> tuple[int, int]:
    kept = Journal(5)
    for n in range(50):
        kept.arrived(record(f"r{n}"))
    for n in range(10 * FOLLOWED):
        kept.follow(RequestId(f"{n}"), record())
    assert len(kept._live) <= FOLLOWED
    return len(kept._records), 5


def owners_of_files() -> tuple[int, int]:
    known, one = Owners(), record()
    for n in range(10 * MOST):
        known.restored(SnapshotId(f"s{n}"), one)
        known.saving(RequestId(f"{n}"), one)
    assert len(known._saving) <= UNDER_WAY
    return len(known._names), MOST


def newest_entries() -> tuple[int, int]:
    recent: Recent[int, int] = Recent(10)
    for n in range(100):
        recent.put(n, n)
    return len(recent), 10


def latest_prompts() -> tuple[int, int]:
    latest, link, size = LatestPrompts(), StubLink(), LATEST_PROMPTS_CHARACTERS // 8
    for n in range(80):
        ask = asked(hash_chain=(b"", b"%d" % n))
        for _ in range(2):  # the second replaces the first
            latest.keep(ask, TurnRenderer(link, chat={"messages": []}, text="x" * size))
    return sum(len(kept.text) for kept in latest._renderers.values()), 8 * size


def events_of_a_stream() -> tuple[int, int]:
    splitter = SseSplitter(limit=1000)
    for _ in range(100):
        splitter.feed(b"data: " + b"x" * 94)  # one line without an end
    for _ in range(100):
        splitter.feed(b"\ndata: " + b"x" * 93)  # lines of one event without an end
    return sum(map(len, (*splitter._partial, *splitter._data))), 1000


def series_of_metrics() -> tuple[int, int]:
    """No label has a client's value, except the rows of the first clients."""
    metrics, clients = Metrics(), Clients()
    metrics.watch(SlotFigures(lambda: Play(memory="dense").placement), ClientFigures(clients))

    def count() -> int:
        for reason in Reason:
            metrics.decisions.labels(reason=reason.value).inc()
        return generate_latest(metrics.registry).count(b"\n")

    for n in range(CLIENTS + 1):
        clients.add(counted(f"{n:08}"))
    metrics.ended({Spent.QUEUE: 0.1}, "first")
    before = count()
    for n in range(10 * CLIENTS):
        clients.add(counted(f"{n:08}"))
        metrics.ended({Spent.QUEUE: 0.1}, f"request-{n}")
        metrics.waited(0.1, 0.2, f"request-{n}")
    return count(), before


def pauses() -> tuple[int, int]:
    pauses = Pauses()
    for n in range(10 * CONVERSATIONS):
        chain: tuple[bytes, ...] = (b"%d" % n,)
        known: tuple[Pause, ...] = ()
        for turn in range(2 * PAUSES):
            asked = Arrived(at=0.0, request=RequestId("r"), client=ClientId("c"), hash_chain=chain)
            pauses.begins(asked, known, None, 2.0 * turn)
            chain = (*chain, b"%d/%d" % (n, turn))
            known = pauses.ends(chain, 2.0 * turn + 1.0)
    return (
        len(pauses.of_all) + sum(1 + len(left.pauses) for left in pauses._left.values()),
        PAUSES_OF_ALL + CONVERSATIONS * (1 + PAUSES),
    )


def lengths_of_answers() -> tuple[int, int]:
    outputs = Outputs()
    for n in range(10 * KINDS):
        for _ in range(3):
            outputs.add(f"{n}", 100)
    for _ in range(10 * ANSWERS):
        outputs.add("one", 100)
    return sum(map(len, outputs._seen.values())), 3 * KINDS + ANSWERS


def late_renders() -> tuple[int, int]:
    """Requests that ended before their engine was known, with short bodies and with long ones."""

    async def renders() -> None: ...

    kept, most = LateRenders(Tasks(print), print), 0
    for n in range(10 * EARLY):
        kept.keep(RequestId(f"short {n}"), 100, renders)
        most = max(most, len(kept))
    for n in range(10 * EARLY):
        kept.keep(RequestId(f"long {n}"), LATE_RENDER_BYTES // 4, renders)
        most = max(most, len(kept) + kept.size - LATE_RENDER_BYTES)
    return most, EARLY


FILLED: Final[tuple[Callable[[], tuple[int, int]], ...]] = (
    states_computed_ahead,
    pauses,
    lengths_of_answers,
    late_renders,
    agents,
    conversations_by_number,
    conversations_by_characters,
    conversations_of_empty_messages,
    conversations_with_options,
    conversations_with_tokens,
    replies_of_a_conversation,
    names_of_conversations,
    titles,
    queue,
    file_times,
    speeds,
    prefills,
    texts_with_facts,
    ram_cache,
    orders_of_files,
    files,
    warmed_files,
    requests_that_were_never_seen,
    prompt_tree,
    layouts_of_requests,
    pieces_of_text,
    rows_of_clients,
    connections,
    history,
    journal,
    owners_of_files,
    newest_entries,
    latest_prompts,
    events_of_a_stream,
    series_of_metrics,
)


@pytest.mark.parametrize("fill", FILLED, ids=lambda fill: fill.__name__)
def test_a_collection_stays_within_its_bound_when_it_is_filled_ten_times_over(fill, monkeypatch):
    monkeypatch.setattr("slotkeeper.conversation.naming.KEPT", 10)
    monkeypatch.setattr("slotkeeper.conversation.naming.LOOKED_IN", 100)
    monkeypatch.setattr("slotkeeper.scheduler.snapshots.retention.MOST", 8)
    kept, bound = fill()
    assert kept <= bound
    assert kept > 0 or bound == 0, "nothing was filled"


async def test_removed_and_unknown_snapshots_leave_nothing_behind(tmp_path):
    async with opened(tmp_path) as store:
        for n in range(20):
            kept = await keep(store, tmp_path)
            await store.offer(kept.id, kept.manifest.fingerprint)
            await store.forget(kept.id)
            await store.forget(SnapshotId(f"never-{n}"))
        gc.collect()
        catalogue, hot = store._catalogue, store._tiers.hot
        assert (len(catalogue._kept), len(catalogue._locks), len(hot._proved), len(store._saving)) == (
            0,
            0,
            0,
            0,
        )
        assert catalogue._index._rows is not None
        rows = await catalogue._lane.do(lambda _: catalogue._index.open({}))
        assert rows == {}
    assert names_in(tmp_path) == set()


async def test_ended_tasks_and_lane_work_are_not_kept():
    async def nothing() -> None:
        pass

    tasks, lane = Tasks(lambda _: None), Lane("test")
    for _ in range(100):
        await tasks.start(nothing())
        await lane.do(lambda _: None)
    assert (len(tasks), len(lane._halts)) == (0, 0)
    await lane.close()


def test_the_log_of_an_engine_is_truncated(tmp_path):
    log = tmp_path / "llama-server.log"
    for _ in range(100):
        with log.open("ab") as file:
            file.write(b"x" * 100)
        trim(log, limit=1000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 1000 + 100

"""Checks credentials: the engine judges an unknown one before any work is done for the request.

The engine checks a request's key itself, but only when the request reaches it. Before that we would have
rendered, planted and restored for it with our own key. So its headers go to `GET /props` first, which needs
the key on every build, takes a millisecond and wakes no sleeping engine; of llama-swap it is `GET /running`.
An engine that needs no key is asked once. Only this module decides whose request it is (`Caller`).
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Final, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from slotkeeper.api.errors import ClientFault, UpstreamFault
from slotkeeper.api.head import AUTH, STREAM_ID, Api, is_for_clients, is_open, is_shared
from slotkeeper.api.request import is_plain
from slotkeeper.engine.answers import Health
from slotkeeper.engine.client import RUNNING
from slotkeeper.exchange.connections import Network, asker
from slotkeeper.exchange.forwarding import Upstream, UpstreamAnswer
from slotkeeper.exchange.keys import Counted, CrowdedFault, Key, OwnKeys
from slotkeeper.exchange.streams import digests, given_ids
from slotkeeper.runtime.driver import Driver
from slotkeeper.runtime.link import EngineLink
from slotkeeper.scheduler.types import ClientId, EngineId

SHOWN: Final = (*AUTH, "Cookie")  # the engine's headers, and that of a gateway in front of it
OURS_SHOWN: Final = ("Cookie",)  # with --keys-file: the engine gets our key for all clients
READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # these start no work in the engine
ACCEPTS: Final = range(200, 300)
REFUSES: Final = frozenset({401, 403})
LASTS: Final = 60.0  # seconds: a gateway in front of the engine may revoke a key
REFUSAL_LASTS: Final = 5.0  # seconds
RENEWAL: Final = 5.0  # seconds for which a credential stays valid while it is checked again
MOST_KNOWN: Final = 4096
MOST_REFUSED: Final = 256
ASK_SECONDS: Final = 5.0
BEARER: Final = "Bearer "
NO_KEY: Final = "a key is needed here: send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
UNKNOWN_KEY: Final = "this key is not known here; ask the operator of the sidecar for one"
NOT_YOURS: Final = "this route is for operators; the sidecar's keys file says which keys are theirs"
SHARED: Final = (
    "this route shows or changes what the engine does for other keys, and keys are kept apart here "
    "(--namespaces); use the engine's own port, or a key of --keys-file with `operator = true`"
)
OWN_REFUSED: Final = (
    "the engine refuses the key of the sidecar itself; its operator has to set --engine-api-key to a key of "
    "llama-server's --api-key"
)
ANYONE: Final = "~"  # the namespace of requests without a key, if the engine needs none
_NAMESPACES: Final = b"namespaces of slotkeeper"  # separates this use of the folder's secret from others


class KeyCheck(StrEnum):
    LET_IN = "let_in"
    LATER = "later"  # no engine is up, but the key was accepted: check again when one is
    UNSURE = "unsure"  # no engine could answer: the request passes through without any work for it


Refusal = UpstreamAnswer  # the engine's own answer
Judged = KeyCheck | Refusal
V = TypeVar("V")
Seen = tuple[EngineId, str, bytes]  # engine, its process, a digest of the credential


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, as far as that is verified."""

    line: ClientId  # the queue that it joins: that of a verified key, else of an address
    namespace: str = ""  # the namespace whose states it may use; "" while namespaces are off
    key: Key | None = None  # the entry of --keys-file


_CALLER: Final = web.RequestKey("caller", Caller)


class Door:
    """Remembers which credentials engines accept and refuse. It keeps only digests of them."""

    def __init__(
        self,
        driver: Driver,
        upstream: Upstream,
        *,
        trusted: Sequence[Network] = (),
        keys: OwnKeys | None = None,
        namespaces: bool | None = False,
        secret: Callable[[], bytes | None] = lambda: None,
        had_namespaces: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`trusted` are proxies in front, `keys` is our --keys-file.

        `namespaces`: one for each key; None: with `keys`, else from the second key on that an engine has
        verified. `secret` makes the namespaces of engine keys the same after a restart; without it they
        change. `had_namespaces`: whether there are states in namespaces from an earlier run.
        """
        self.keys = keys
        self._shown = SHOWN if keys is None else OURS_SHOWN
        self._driver = driver
        self._trusted = trusted
        self.namespaces = True if namespaces is None and keys else namespaces  # whether each key has one now
        self._first_key: bytes | None = None  # a digest of the first verified key
        self._secret = secret
        self._were_apart = had_namespaces
        self._upstream = upstream
        self._now = now
        self._salt = secrets.token_bytes(16)
        self._anyone: dict[EngineId, tuple[str, bool, float]] = {}  # process, needs no key, until
        self._known: OrderedDict[Seen, float] = OrderedDict()
        self._refused: OrderedDict[Seen, tuple[float, Refusal]] = OrderedDict()

    def admit(self, request: web.BaseRequest, api: Api, path: str, route: str) -> None:
        """Check what the client may do, before the engine judges its key. Raises ClientFault.

        With --keys-file its key must be listed, and be an operator's for the operators' routes. With
        namespaces no other client may use a route that is shared by all, or one that the engine may read
        otherwise than we do. `route` is the path at the engine's own server.
        """
        listed = self.keys is not None and not is_open(request.method, path)
        key = self._listed(request, api, path) if listed else None
        if not self.namespaces or (key and key.operator):
            return
        if is_shared(request.method, route) or not is_plain(route):
            raise ClientFault(SHARED, status=403)

    def _listed(self, request: web.BaseRequest, api: Api, path: str) -> Key:
        """Return the client's entry of --keys-file. Raises ClientFault if it has none, or may not do this."""
        given = key_in(request.headers)
        key = self.keys.find(given) if self.keys and given else None
        if key is None:
            raise ClientFault(UNKNOWN_KEY if given else NO_KEY, status=401)
        theirs = is_for_clients(api, request.method, path)
        unloads = request.query.get("reload")  # a router then reads its presets again
        if not key.operator and (unloads or not theirs):
            raise ClientFault(NOT_YOURS, status=403)
        line, namespace = ClientId(digest_of(f"name {key.name}")), key.namespace if self.namespaces else ""
        request[_CALLER] = Caller(line, namespace, key)
        return key

    @asynccontextmanager
    async def counted(self, request: web.BaseRequest, api: Api) -> AsyncIterator[Counted | None]:
        """Count a request for its key while the block runs; None if it has no key, or costs no work.

        It counts before its body is read, on every route. Raises CrowdedFault at a limit of the key.
        """
        key = self.caller(request).key
        if self.keys is None or key is None or request.method in READS:
            yield None
            return
        try:
            counted = await self.keys.admit(key)
        except CrowdedFault as fault:
            metrics = self._driver.metrics
            metrics.crowded.labels(reason=fault.reason.value).inc()
            metrics.requests.labels(route=api.value, outcome="client_error").inc()
            raise
        try:
            yield counted
        finally:
            counted.close()

    def lent(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the client's credential for our own calls for this request; none with --keys-file.

        The engine reads the first of several equal names.
        """
        given = request.headers
        return {} if self.keys else {name: given[name] for name in AUTH if name in given}

    def program_of(self, request: web.BaseRequest) -> str:
        """Return digests of the client's identity and of its User-Agent, never what was sent."""
        key, given = self.caller(request).key, filter(None, map(request.headers.get, AUTH))
        who = f"name {key.name}" if key else next(given, None) or asker(request, self._trusted)
        return f"{digest_of(who)}/{digest_of(request.headers.get('User-Agent', ''))}"

    async def judge(self, request: web.BaseRequest, *, since: float, later: bool = False) -> Judged:
        """Ask every engine that is up whether it accepts this client. It may wait for one that is gone.

        That wait counts from `since`, in seconds. With `later`, a client that was accepted before does not
        wait here, and the result is LATER. If an engine refuses the client, its answer is returned.
        """
        driver = self._driver
        await driver.folder_tried()  # namespaces need the folder's secret
        engines = driver.engines
        if any(link.doubtful for link in driver.links.values()):
            if later and self._was_let_in(request):
                return KeyCheck.LATER
            await engines.awake(since)
        judged = await self._judged(request)
        if judged is KeyCheck.UNSURE:  # the engine may be starting
            if later and engines.expects() and self._was_let_in(request):
                return KeyCheck.LATER
            await engines.awake(since)
            judged = await self._judged(request)
        return judged

    def caller(self, request: web.BaseRequest) -> Caller:
        """Return whose request this is; by its address alone if no engine has verified its key."""
        return request.get(_CALLER) or Caller(ClientId(digest_of(asker(request, self._trusted))))

    def stream_space(self, request: web.BaseRequest, *, let_in: bool) -> str | None:
        """Return the namespace of this client's resumable streams; None: it has none.

        "": the ids of all clients are passed on as they came, as nothing keeps the clients apart. A client of
        --keys-file that may not use the routes of resumable streams, or whose key has limits, has none.
        """
        if self.keys:
            key = self.caller(request).key
            return key.namespace if key and key.operator and not key.limited else None
        if not self.namespaces:
            return ""
        return (self.caller(request).namespace or ANYONE) if let_in else None

    def stream_ids(self, request: web.BaseRequest, *, let_in: bool) -> tuple[str, ...]:
        """Return the values of X-Conversation-Id that the engine gets for this request."""
        if STREAM_ID not in request.headers:
            return ()
        given, space = given_ids(request.headers), self.stream_space(request, let_in=let_in)
        if space is None:
            return ()
        return digests(space, given[:1]) if space else given

    def _let_in(self, request: web.BaseRequest, *, verified: bool) -> None:
        """Remember the caller of a request that an engine accepts: its key is `verified`, or not needed."""
        if self.keys:
            return
        key = key_in(request.headers)
        if verified and self.namespaces is None:
            one = _keyed(key, self._salt)
            self._first_key = self._first_key or one
            self.namespaces = True if one != self._first_key or self._were_apart() else None
        who = f"key {key}" if verified else asker(request, self._trusted)
        namespace = self._namespace(key) if key and self.namespaces else ""
        request[_CALLER] = Caller(ClientId(digest_of(who)), namespace)

    def _namespace(self, key: str) -> str:
        """Return a key's namespace, which is the same after a restart once the folder is open.

        Before that it is another one, but states that are computed then are in no file.
        """
        secret = self._secret() or self._salt
        return _keyed(key, blake2b(_NAMESPACES, key=secret, digest_size=32).digest()).hex()

    def _was_let_in(self, request: web.BaseRequest) -> bool:
        """Whether our own list has accepted this client, or the engine processes that were asked last."""
        if self.keys:
            return True
        digest = self._digest(request, self._shown)
        upstreams = [link.engine for link in self._driver.engines.upstreams]
        last = [(engine, *self._anyone.get(engine, ("", False, 0.0))) for engine in upstreams]
        closed = [(engine, process, digest) for engine, process, open_, _ in last if not open_]
        if any(seen not in self._known for seen in closed):
            return False
        self._let_in(request, verified=bool(closed))
        return True

    async def _judged(self, request: web.BaseRequest) -> Judged:
        links, judged, wanted = self._driver.engines.upstreams, KeyCheck.LET_IN, False
        there = [link for link in links if link.health is not Health.DOWN] or list(links)
        for link in there:
            if await self._wants_no_key(link):
                continue
            wanted = True
            verdict = await self._by(link, request)
            if isinstance(verdict, Refusal):
                return verdict
            if verdict is KeyCheck.UNSURE:
                judged = verdict
        if judged is KeyCheck.LET_IN:
            self._let_in(request, verified=wanted)
        return judged

    async def _wants_no_key(self, link: EngineLink) -> bool:
        """Whether the engine needs no key; asked once for each process, without any credential."""
        process, open_, until = self._anyone.get(link.engine, ("", False, 0.0))
        if process == link.process and self._now() < until:
            return open_
        asked_of = link.process
        verdict = await self._ask(link, CIMultiDict())
        if verdict is not KeyCheck.UNSURE:
            lasts = float("inf") if asked_of else REFUSAL_LASTS  # its process is not known yet
            self._anyone[link.engine] = asked_of, verdict is KeyCheck.LET_IN, self._now() + lasts
        return verdict is KeyCheck.LET_IN

    async def _by(self, link: EngineLink, request: web.BaseRequest) -> Judged:
        now, seen = self._now(), (link.engine, link.process, self._digest(request, self._shown))
        until = self._known.get(seen)
        if until is not None and now < until:
            return KeyCheck.LET_IN
        # The answer depends on Origin too, which the engine repeats.
        refused = (link.engine, link.process, self._digest(request, (*self._shown, "Origin")))
        again, refusal = self._refused.get(refused, (0.0, None))
        if refusal and now < again:
            return refusal
        if until is not None:
            self._known[seen] = now + RENEWAL
        verdict = await self._ask(link, self._upstream.outgoing(request, None, ""))
        match verdict:
            case Refusal() if self.keys:
                raise UpstreamFault(OWN_REFUSED)
            case Refusal() if not link.judges:  # no key was ever accepted: the route may be closed
                return KeyCheck.UNSURE
            case Refusal():
                self._known.pop(seen, None)
                _keep(self._refused, refused, (self._now() + REFUSAL_LASTS, verdict), MOST_REFUSED)
            case KeyCheck.LET_IN:
                _keep(self._known, seen, self._now() + LASTS, MOST_KNOWN)
                link.let_in(self.lent(request))
            case KeyCheck.UNSURE if until is not None:  # the engine had accepted it
                return KeyCheck.LET_IN
        return verdict

    async def _ask(self, link: EngineLink, headers: CIMultiDict[str]) -> Judged:
        if link.pulse.frozen:
            return KeyCheck.UNSURE
        try:
            path = RUNNING if link.health is Health.SWAPPER else "/props"
            answer = await self._upstream.look(link.address.base, path, headers, seconds=ASK_SECONDS)
        except UpstreamFault:
            link.kick()
            return KeyCheck.UNSURE
        if answer.status in ACCEPTS:
            return KeyCheck.LET_IN
        # Otherwise the engine is loading, or this is a gateway's answer.
        return answer if answer.status in REFUSES else KeyCheck.UNSURE

    def _digest(self, request: web.BaseRequest, fields: tuple[str, ...]) -> bytes:
        digest = blake2b(key=self._salt, digest_size=16)
        for field in fields:
            for value in request.headers.getall(field, ()):
                digest.update(f"{field}\0{value}\0".encode(errors="surrogateescape"))
        return digest.digest()


def key_in(headers: Mapping[str, str]) -> str:
    """Return the key as the engine reads it, the same from either header; "" if there is none."""
    return next(filter(None, map(headers.get, AUTH)), "").removeprefix(BEARER)


def digest_of(text: str) -> str:
    """Return a digest of a text that identifies a client. Unlike the text, it may be stored."""
    return blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _keyed(key: str, secret: bytes) -> bytes:
    return blake2b(key.encode(errors="surrogateescape"), key=secret, digest_size=16).digest()


def _keep(kept: OrderedDict[Seen, V], key: Seen, value: V, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)

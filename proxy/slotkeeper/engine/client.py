"""Control calls to one engine, over a connector of its own so that a busy data plane cannot starve them.

Only what the engine answers: no decisions here. Client requests are forwarded elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from io import BytesIO
from typing import Any, Final, Self

import aiohttp
import orjson

from slotkeeper.core.observed import SlotView
from slotkeeper.core.types import SlotId

CONNECT_SECONDS: Final = 5.0
QUICK_SECONDS: Final = 5.0  # these routes never enter the engine's task queue (engine.md 1.4, 1.7)
KEEP_SECONDS: Final = 4.0  # llama-server closes an idle connection after 5
CONNECTIONS: Final = 16  # idle work and control calls of all slots; llama-server keeps np + 4 threads
QUICK: Final = aiohttp.ClientTimeout(total=QUICK_SECONDS, sock_connect=CONNECT_SECONDS)
TEXT: Final = aiohttp.ClientTimeout(total=60.0, sock_connect=CONNECT_SECONDS)  # megabytes to tokenize
PATIENT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # a prefill takes minutes
PREFILL_FIELDS: Final = ["timings/prompt_n", "timings/cache_n", "tokens_cached", "id_slot"]

Headers = Mapping[str, str]


class EngineError(Exception):
    """The engine answered, and the answer was a refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class EngineGoneError(ConnectionError):
    """No answer: refused, reset, or silent past the time limit."""


class Health(StrEnum):
    OK = "ok"
    LOADING = "loading"  # alive, 503 "Loading model" (engine.md 7)
    SLEEPING = "sleeping"  # alive, model unloaded, all slots empty (engine.md 7)
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What one prefill cost, in tokens, by the engine's own count."""

    computed: int
    cached: int
    held: int  # tokens in the slot afterwards
    slot: SlotId


class EngineClient:
    """One engine's control routes. Use as an async context manager, or `close` it."""

    def __init__(self, base: str, *, api_key: str | None = None) -> None:
        self.base = base.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<EngineClient {self.base}{' with key' if self._headers else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def health(self, *, headers: Headers | None = None) -> Health:
        """Never raises. Does not wake a sleeping engine."""
        try:
            await self._json("GET", "/health", limits=QUICK)
            return Health.SLEEPING if (await self.props(headers=headers)).get("is_sleeping") else Health.OK
        except EngineError as error:
            # /health needs no key, /props does: a 401 comes from an engine that is up.
            return Health.LOADING if error.status == 503 else Health.OK
        except EngineGoneError:
            return Health.DOWN

    async def props(self, *, headers: Headers | None = None) -> dict[str, Any]:
        """Does not wake a sleeping engine."""
        return dict(await self._json("GET", "/props", limits=QUICK, headers=headers))

    async def slots(self, *, headers: Headers | None = None) -> tuple[SlotView, ...]:
        """Wakes a sleeping engine, so ask `health` first when idle."""
        listed = await self._json("GET", "/slots", limits=QUICK, headers=headers)
        return tuple(view(slot) for slot in listed)

    async def metrics(self, *, headers: Headers | None = None) -> str:
        """Prometheus text. Wakes a sleeping engine."""
        async with self._ask("GET", "/metrics", limits=QUICK, headers=headers) as response:
            return await response.text()

    async def models(self, *, headers: Headers | None = None) -> dict[str, Any]:
        """The entry of the model that is served (engine.md 1.1)."""
        listed = await self._json("GET", "/v1/models", limits=QUICK, headers=headers)
        return dict(listed["data"][0]) if listed.get("data") else {}

    async def saves_slots(self, *, headers: Headers | None = None) -> bool:
        """Whether slots can be saved to files. Do not ask a sleeping engine: it may wake.

        An action that does not exist changes nothing: 501 without --slot-save-path, else 400 (both builds).
        """
        try:
            await self._json("POST", "/slots/0?action=none", limits=QUICK, headers=headers, body={})
        except EngineError as error:
            if error.status in {400, 501}:
                return error.status == 400
            raise
        return False

    async def apply_template(self, chat: Mapping[str, Any], *, headers: Headers | None = None) -> str:
        """The text that the chat route would evaluate; an OpenAI chat body only (engine.md 1.4)."""
        answer = await self._json("POST", "/apply-template", limits=TEXT, headers=headers, body=chat)
        return str(answer["prompt"])

    async def tokenize(
        self,
        content: str | Sequence[str | int],
        *,
        add_special: bool,
        parse_special: bool,
        headers: Headers | None = None,
    ) -> list[int]:
        """With both set to true, on a rendered chat: exactly the ids that the chat route evaluates.

        The content may be text and ids mixed.
        """
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self._json("POST", "/tokenize", limits=TEXT, headers=headers, body=body)
        return list(answer["tokens"])

    async def prefill(
        self, ids: Sequence[int], slot: SlotId, *, headers: Headers | None = None
    ) -> PrefillResult:
        """Evaluate a prompt in one slot; it then holds exactly these tokens (engine.md 1.5).

        The slot must be idle: the engine neither refuses nor waits safely (engine.md T1).
        When we are cancelled the connection closes and the engine stops at its next batch. That is why
        the answer is a stream with progress: an engine that has nothing to write looks for a closed
        connection only after a second in which it answered nobody, and we ask for its slots more often.
        """
        body = {
            "prompt": list(ids),
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0,
            "stream": True,
            "return_progress": True,
            "response_fields": PREFILL_FIELDS,  # of the last event only
        }
        last: dict[str, Any] = {}
        # llama-server closes the connection after a stream, though it promises to keep it.
        once = {**(headers or {}), "Connection": "close"}
        async with self._ask("POST", "/completion", limits=PATIENT, headers=once, body=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = orjson.loads(line[6:])
        if "timings/prompt_n" not in last:  # the key is the path, not a nested object
            raise EngineError(response.status, message_in(orjson.dumps(last)))
        return PrefillResult(
            computed=last["timings/prompt_n"],
            cached=last["timings/cache_n"],
            held=last["tokens_cached"],
            slot=SlotId(last["id_slot"]),
        )

    async def _json(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        headers: Headers | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        async with self._ask(method, path, limits=limits, headers=headers, body=body) as response:
            data = await response.read()
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineError(response.status, f"{path}: not JSON") from error

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        headers: Headers | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200; leaving before its end closes the connection.

        Raises EngineError for every other status, EngineGoneError when there is no answer.
        """
        data = orjson.dumps(body) if body is not None else None

        async def send() -> aiohttp.ClientResponse:
            stream = BytesIO(data) if data is not None else None  # aiohttp warns of bytes above 1 MiB
            url = self.base + path
            return await self._open().request(method, url, data=stream, headers=headers, timeout=limits)

        try:
            try:
                response = await send()
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                response = await send()  # it had closed an idle connection; every call may be made twice
            async with response:
                if response.status != 200:
                    raise EngineError(response.status, message_in(await response.read()))
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineGoneError(f"{self.base}{path}: {error!r}") from error

    def _open(self) -> aiohttp.ClientSession:
        """The session, made at the first call because it belongs to the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=KEEP_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json", **self._headers},
            )
        return self._session


def message_in(data: bytes) -> str:
    """The text of an error body, whatever its shape."""
    try:
        return str(orjson.loads(data)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return data[:200].decode(errors="replace")


def view(slot: Mapping[str, Any]) -> SlotView:
    return SlotView(
        slot=SlotId(slot["id"]),
        busy=slot["is_processing"],
        task=slot.get("id_task"),
        speculative=slot.get("speculative", False),
        held=slot.get("n_prompt_tokens"),
    )

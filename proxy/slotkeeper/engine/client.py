"""Control calls to one engine, and their answers.

This module makes no decisions. `http` sends the calls; client requests are forwarded elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Self

import orjson

from slotkeeper.engine.answers import (
    PREFILL,
    Continuation,
    EngineError,
    EngineGoneError,
    EngineSilentError,
    Guess,
    Health,
    MediaPrompt,
    PrefillResult,
    RestoreResult,
    SaveResult,
    TimedAnswer,
    lora_field,
    seconds,
    view,
)
from slotkeeper.engine.http import (
    BRIEF_SECONDS,
    RUNNING,
    CallKind,
    CallLimits,
    EngineAddress,
    EngineHttp,
    Headers,
    Pulse,
    message_in,
)
from slotkeeper.scheduler.adapters import Scales
from slotkeeper.scheduler.types import SlotId, SlotView

__all__ = [
    "EngineClient",
    "EngineError",
    "EngineGoneError",
    "Headers",
    "Health",
    "PrefillResult",
    "Pulse",
    "RestoreResult",
    "SaveResult",
    "message_in",
]

# These routes never enter the engine's task queue (engine.md 1.4, 1.7).
QUICK: Final = CallLimits(CallKind.BRIEF, BRIEF_SECONDS)
EXACT_VOCABULARIES: Final = frozenset({1, 2})  # llama_vocab_type: SPM and BPE
PIECES_AT_ONCE: Final = 10_000  # ids; an answer of 300 KB
TEXT: Final = CallLimits(CallKind.TEXT, 60.0)  # megabytes to tokenize
# The rest of a batch, then 8 GB to a disk at 20 MB per second: an engine that takes longer is stuck.
LONG: Final = CallLimits(CallKind.TASK, 600.0)
PATIENT: Final = CallLimits(CallKind.TASK, None)  # a prefill takes minutes
LOOP_STATUS: Final = 508  # a sidecar's answer to a request that has passed through it before
OWN_PROPS: Final = frozenset(  # one of these is in every llama-server's /props
    {"total_slots", "default_generation_settings", "build_info", "model_path", "is_sleeping", "role"}
)
OF_SERVERS: Final = {503: Health.LOADING, LOOP_STATUS: Health.LOOP}  # by the status of a refusal
# A router with `autoload=false`: 400 "model is not loaded" or "not found", 500 while it starts or ends.
OF_MODELS: Final = {400: Health.UNLOADED, 500: Health.LOADING, 503: Health.LOADING}
# llama-swap: 502 if its process cannot be reached, 409 for a path that must not load it (`ignorePaths`).
OF_SWAPPED: Final = {409: Health.UNLOADED, 500: Health.LOADING, 502: Health.LOADING, 503: Health.LOADING}
READY: Final = "ready"  # a state in llama-swap's listing
NO_KEY: Final = "unauthorized: invalid or missing API key"  # llama-swap's words, and of no llama-server


def is_router(props: Mapping[str, Any]) -> bool:
    """Whether this is a router's answer to GET /props."""
    return props.get("role") == "router"


def running_in(said: Any) -> dict[str, dict[str, Any]] | None:
    """Return the models in llama-swap's answer to GET /running; None for any other server's answer."""
    running = said.get("running") if isinstance(said, dict) else None
    if not isinstance(running, list):
        return None
    return {str(one.get("model")): one for one in running if isinstance(one, dict)}


class ControlClient:
    """The connections to one server. Use as an async context manager, or `close` it."""

    def __init__(
        self, base: str | EngineAddress, *, api_key: str | None = None, pulse: Pulse | None = None
    ) -> None:
        self._http = EngineHttp(base, api_key=api_key, pulse=pulse)
        self.base = self._http.base

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._http!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()


class EngineClient(ControlClient):
    """The control routes of one engine.

    Except `health` and `bar`, all methods raise EngineError for a refusal, and EngineGoneError without an
    answer.
    """

    def __init__(
        self, base: str | EngineAddress, *, api_key: str | None = None, pulse: Pulse | None = None
    ) -> None:
        super().__init__(base, api_key=api_key, pulse=pulse)
        self.computed = 0  # prompt tokens of completed prefills and guesses

    @property
    def busy(self) -> bool:
        """Whether any call is in progress."""
        return self._http.calls > 0

    def bar(self, *, barred: bool) -> None:
        """Send nothing from now on, not even the next call of a probe in progress; or send again."""
        self._http.barred = barred

    async def health(self, *, headers: Headers | None = None, seconds: float = BRIEF_SECONDS) -> Health:
        """Return the engine's health. Never raises or wakes a sleeping engine.

        `seconds` limits each of up to three calls; a call that takes longer means SILENT.
        """
        limits, address = CallLimits(CallKind.BRIEF, seconds), self._http.address
        known = OF_SERVERS if not address.model else OF_SWAPPED if address.swaps else OF_MODELS
        try:
            if address.swaps and not await self._is_ready(limits, headers):
                return Health.UNLOADED
            if not address.model:  # a router answers for itself
                await self._http.json("GET", "/health", limits=limits)
            props = await self._props(limits, headers)
        except EngineError as error:
            if error.foreign:
                return Health.FOREIGN if address.model else await self._swapper(limits, headers)
            # /health needs no key, /props does: a 401 comes from an engine that is up.
            return known.get(error.status, Health.OK)
        except EngineSilentError:
            return Health.SILENT
        except EngineGoneError:
            return Health.DOWN
        if OWN_PROPS.isdisjoint(props):
            return Health.FOREIGN
        if is_router(props):
            return Health.ROUTER
        return Health.SLEEPING if props.get("is_sleeping") else Health.OK

    async def _is_ready(self, limits: CallLimits, headers: Headers | None) -> bool:
        """Whether llama-swap has loaded this model. Asked before /upstream/MODEL/, which would load it."""
        said = running_in(await self._http.json("GET", RUNNING, limits=limits, headers=headers)) or {}
        return said.get(self._http.address.model, {}).get("state") == READY

    async def _swapper(self, limits: CallLimits, headers: Headers | None) -> Health:
        """Tell llama-swap, whose /health is not llama-server's, from any other server. Never raises."""
        try:
            said = await self._http.json("GET", RUNNING, limits=limits, headers=headers)
        except EngineError as error:
            return Health.SWAPPER if NO_KEY in error.message else Health.FOREIGN
        except EngineGoneError:
            return Health.DOWN
        return Health.FOREIGN if running_in(said) is None else Health.SWAPPER

    async def props(self, *, headers: Headers | None = None) -> dict[str, Any]:
        """Return GET /props. Does not wake a sleeping engine."""
        return await self._props(QUICK, headers)

    async def _props(self, limits: CallLimits, headers: Headers | None) -> dict[str, Any]:
        props = await self._http.json("GET", "/props", limits=limits, headers=headers)
        return props if isinstance(props, dict) else {}

    async def slots(self, *, headers: Headers | None = None) -> tuple[SlotView, ...]:
        """Return GET /slots. Wakes a sleeping engine, so ask `health` first when idle."""
        listed = await self._http.json("GET", "/slots", limits=QUICK, headers=headers)
        return tuple(view(slot) for slot in listed)

    async def rouse(self, *, headers: Headers | None = None) -> None:
        """Make a sleeping engine load its model, as any task would; returns when it is loaded."""
        async with self._http.ask("GET", "/slots", limits=LONG, headers=headers) as response:
            await response.read()

    async def metrics(self) -> str:
        """Return the Prometheus text. Wakes a sleeping engine."""
        async with self._http.ask("GET", "/metrics", limits=QUICK) as response:
            return await response.text()

    async def models(self, *, headers: Headers | None = None) -> dict[str, Any]:
        """Return the entry of the model that is served (engine.md 1.1); a router lists all its models."""
        listed = await self._http.json("GET", "/v1/models", limits=QUICK, headers=headers)
        address, entries = self._http.address, listed.get("data") or []
        model = "" if address.swaps else address.model
        return dict(next((entry for entry in entries if not model or entry.get("id") == model), {}))

    async def lora_adapters(self, *, headers: Headers | None = None) -> list[dict[str, Any]]:
        """Return path and scale of each adapter. Enters the task queue: it would wake a sleeping engine."""
        return list(await self._http.json("GET", "/lora-adapters", limits=LONG, headers=headers))

    async def saves_slots(self, *, headers: Headers | None = None) -> bool:
        """Whether slots can be saved to files. Do not ask a sleeping engine: it may wake.

        An unknown action changes nothing: 501 without --slot-save-path, else 400 (both builds).
        """
        try:
            await self._http.json("POST", "/slots/0?action=none", limits=QUICK, headers=headers, body={})
        except EngineError as error:
            if error.status in {400, 501}:
                return error.status == 400
            raise
        return False

    async def apply_template(self, chat: Mapping[str, Any], *, headers: Headers | None = None) -> str:
        """Return the text that the chat route would evaluate; OpenAI chat bodies only (engine.md 1.4)."""
        answer = await self._http.json("POST", "/apply-template", limits=TEXT, headers=headers, body=chat)
        return str(answer["prompt"])

    async def count_chat(self, chat: Mapping[str, Any], *, headers: Headers | None = None) -> int:
        """Return the exact number of tokens of a chat. This computes nothing and takes no slot."""
        path = "/v1/chat/completions/input_tokens"
        answer = await self._http.json("POST", path, limits=TEXT, headers=headers, body=chat)
        return int(answer.get("input_tokens", 0))

    async def tokenize(
        self,
        content: str | Sequence[str | int],
        *,
        add_special: bool,
        parse_special: bool,
        headers: Headers | None = None,
    ) -> list[int]:
        """Return token ids; with both flags set, on a rendered chat, exactly those of the chat route."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self._http.json("POST", "/tokenize", limits=TEXT, headers=headers, body=body)
        return list(answer["tokens"])

    async def tokenize_long(
        self,
        content: str | Sequence[str | int],
        *,
        add_special: bool,
        parse_special: bool,
        headers: Headers | None = None,
        most: int | None = None,
    ) -> array[int]:
        """Return what `tokenize` returns, for texts of any length; EngineError for more than `most` ids."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        return await self._http.ids("/tokenize", limits=TEXT, headers=headers, body=body, most=most)

    async def longest_token(self, *, headers: Headers | None = None) -> int | None:
        """Return the most characters that one token of the vocabulary stands for; None if there is no limit.

        Only for tokenizers that give a token for every character: others leave characters out, or give one
        token for a whole unknown word.
        """
        meta = (await self.models(headers=headers)).get("meta") or {}
        if meta.get("vocab_type") not in EXACT_VOCABULARIES or not meta.get("n_vocab"):
            return None
        longest = 1
        for start in range(0, int(meta["n_vocab"]), PIECES_AT_ONCE):
            ids = list(range(start, min(start + PIECES_AT_ONCE, int(meta["n_vocab"]))))
            body = {"content": ids, "with_pieces": True}
            answer = await self._http.json("POST", "/tokenize", limits=TEXT, headers=headers, body=body)
            longest = max(longest, *(len(token["piece"]) for token in answer["tokens"]))
        return longest

    async def detokenize(self, ids: Sequence[int], *, headers: Headers | None = None) -> str:
        """Return the text of these tokens."""
        body = {"tokens": list(ids)}
        answer = await self._http.json("POST", "/detokenize", limits=TEXT, headers=headers, body=body)
        return str(answer["content"])

    async def prefill(
        self,
        ids: Sequence[int] | MediaPrompt,
        slot: SlotId,
        *,
        headers: Headers | None = None,
        progress: Callable[[int, int], object] | None = None,
        lora: Scales | None = None,
    ) -> PrefillResult:
        """Evaluate a prompt in one slot; the slot then holds exactly these tokens (engine.md 1.5).

        After each batch, `progress` gets the numbers of processed and of cached prompt tokens. The slot must
        be idle: the engine neither refuses nor waits safely (engine.md T1). A cancelled call closes its
        connection. The engine notices that when it writes (engine.md T10), so the answer is a stream with
        progress: the engine stops at its next batch.
        """
        prompt = ids.body if isinstance(ids, MediaPrompt) else list(ids)
        body = {"prompt": prompt, "id_slot": slot, **PREFILL, **lora_field(lora)}
        last, ends = dict[str, Any](), list[int]()
        async for last in self._streamed(body, headers):
            if said := last.get("prompt_progress"):
                ends.append(said["processed"])
                if progress:
                    progress(said["processed"], said["cache"])
        if "timings/prompt_n" not in last:  # the key is the path, not a nested object
            raise EngineError(200, message_in(orjson.dumps(last)))
        self.computed += last["timings/prompt_n"]
        return PrefillResult(
            computed=last["timings/prompt_n"],
            cached=last["timings/cache_n"],
            held=last["tokens_cached"],
            slot=SlotId(last["id_slot"]),
            seconds=last["timings/prompt_ms"] / 1000,
            cuts=tuple(end for end in ends if last["timings/cache_n"] < end < len(ids)) if ends else None,
        )

    async def _streamed(
        self, body: Mapping[str, Any], headers: Headers | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of each event of a streamed completion."""
        async with self._http.ask(
            "POST", "/completion", limits=PATIENT, headers=headers, body=body
        ) as response:
            async for line in response.content:
                self._http.pulse.answered()
                if line.startswith(b"data: {"):
                    yield orjson.loads(line[6:])

    async def guess(
        self, ids: Sequence[int], most: int, *, headers: Headers | None = None, lora: Scales | None = None
    ) -> Guess:
        """Return the `most` likeliest tokens after a prompt. The engine chooses the slot.

        The answer is a stream, because only streams report where batches ended.
        """
        fields = {"n_predict": 1, "cache_prompt": True, "n_probs": most, "temperature": 0}
        body = {"prompt": list(ids), **fields, "stream": True, "return_progress": True, **lora_field(lora)}
        last, ends, steps = dict[str, Any](), list[int](), list[dict[str, Any]]()
        async for said in self._streamed(body, headers):
            last = said
            steps += said.get("completion_probabilities", ())
            if progress := said.get("prompt_progress"):
                ends.append(progress["processed"])
        if "timings" not in last:
            raise EngineError(200, message_in(orjson.dumps(last)))
        cached = last["timings"]["cache_n"]
        self.computed += last["timings"]["prompt_n"]
        odds = tuple((t["id"], t["logprob"]) for step in steps for t in step["top_logprobs"])
        cuts = tuple(end for end in ends if cached < end < len(ids)) if ends else None
        return Guess(odds=odds, held=last["tokens_cached"], slot=SlotId(last["id_slot"]), cuts=cuts)

    async def continued(self, ids: Sequence[int], tokens: int, most: int) -> Continuation:
        """Return the `most` likeliest tokens at each of `tokens` steps. The engine chooses the slot."""
        asked = {"n_predict": tokens, "ignore_eos": True, "n_probs": most, "temperature": 0}
        doc = await self._http.json("POST", "/completion", limits=LONG, body={"prompt": list(ids), **asked})
        self.computed += doc["timings"]["prompt_n"]
        places = doc.get("completion_probabilities", ())
        steps = tuple(tuple((t["id"], t["logprob"]) for t in place["top_logprobs"]) for place in places)
        return Continuation(steps=steps, held=doc["tokens_cached"], slot=SlotId(doc["id_slot"]))

    async def timed_answer(self, ids: Sequence[int], slot: SlotId, tokens: int) -> TimedAnswer:
        """Generate `tokens`, two or more, after a prompt in one idle slot."""
        asked = {"n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
        body = {"prompt": list(ids), "id_slot": slot, **asked}
        doc = await self._http.json("POST", "/completion", limits=LONG, body=body)
        timings = doc["timings"]
        self.computed += timings["prompt_n"]
        each = timings["predicted_ms"] / 1000 / max(1, timings["predicted_n"] - 1)  # from the first token on
        return TimedAnswer(token_seconds=each, held=doc["tokens_cached"])

    async def save(self, slot: SlotId, filename: str, *, headers: Headers | None = None) -> SaveResult:
        """Write an idle slot's state to a file in the engine's own folder (engine.md 2)."""
        answer = await self._act(slot, "save", headers, filename=filename)
        took = seconds(answer, "save_ms")
        return SaveResult(tokens=answer["n_saved"], written=answer["n_written"], seconds=took)

    async def restore(self, slot: SlotId, filename: str, *, headers: Headers | None = None) -> RestoreResult:
        """Load a file into an idle slot. After any error the slot is empty (engine.md 2.1).

        A damaged file can kill the engine (engine.md T2): only restore files whose bytes were verified.
        """
        answer = await self._act(slot, "restore", headers, filename=filename)
        took = seconds(answer, "restore_ms")
        return RestoreResult(tokens=answer["n_restored"], read=answer["n_read"], seconds=took)

    async def erase(self, slot: SlotId, *, headers: Headers | None = None) -> int:
        """Empty an idle slot; return its number of tokens. Also needs --slot-save-path."""
        return int((await self._act(slot, "erase", headers))["n_erased"])

    async def _act(self, slot: SlotId, action: str, headers: Headers | None, **body: str) -> dict[str, Any]:
        """Wait for the current batch, then act while all slots are blocked (engine.md 2.3).

        The engine may act even if the call was cancelled first: after that, the slot's contents are unknown.
        Never sent twice (see `EngineHttp.ask`; a file can kill the engine: T2).
        """
        path = f"/slots/{slot}?action={action}"
        return dict(await self._http.json("POST", path, limits=LONG, headers=headers, body=body))

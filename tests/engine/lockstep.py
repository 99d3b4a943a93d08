"""An engine and its shadow, driven side by side with the same prompts.

The shadow predicts the reuse of every prompt before the engine gets it, and both results are kept: so a
shadow that knows the engine's rules differs from one that only corrects itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import unpack_from
from typing import Any

import aiohttp

from engine.conftest import Engine
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.traits import read_traits
from slotkeeper.scheduler.prompts.tokens import Tokens
from slotkeeper.scheduler.slots.engine_model import SlotContents, Snapshot, SnapshotId, user_starts
from slotkeeper.scheduler.slots.shadow import EngineShadow, ReusePlan
from slotkeeper.scheduler.types import SlotId

Message = dict[str, str]
FIELDS = ["tokens", "tokens_cached", "tokens_predicted", "timings/cache_n"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt: the reuse that the shadow predicted, and the engine's actual reuse."""

    note: str
    reuse_plan: ReusePlan
    length: int
    cached: int
    before: str  # the shadow before the prompt

    def __str__(self) -> str:
        base = self.reuse_plan.base
        state = f"{base.total} tokens, cuts {[c.at for c in base.checkpoints]}" if base else "nothing"
        return (
            f"{self.note}: slot {self.reuse_plan.slot}, prompt of {self.length}: "
            f"predicted {self.reuse_plan.reuse} from "
            f"{self.reuse_plan.source} ({state}), the engine reused {self.cached}; {self.before}"
        )


@dataclass(slots=True)
class LockStep:
    """`shadow` learns only what the scheduler would tell it, from answers of the engine."""

    engine: Engine
    client: EngineClient
    session: aiohttp.ClientSession
    shadow: EngineShadow
    asked: list[Asked] = field(default_factory=list)
    opens: bool = False  # user messages begin in these prompts, and the engine knows where
    clock: float = 0.0
    before: str = ""

    @classmethod
    async def begin(cls, engine: Engine, client: EngineClient, session: aiohttp.ClientSession) -> LockStep:
        traits = (await read_traits(client, engine.flags)).traits
        return cls(engine, client, session, EngineShadow(traits))

    async def ask(self, slot: int, prompt: Tokens, *, reply: int, note: str, learns: bool = True) -> Tokens:
        """Send a prompt, pinned. Returns it with the reply, as a client would send it back.

        Unless the shadow `learns` the reply's ids, it knows only their number.
        """
        reuse_plan = await self._launch(slot, prompt)
        body = {"prompt": prompt.ids(), "n_predict": reply, "return_tokens": True, "response_fields": FIELDS}
        said = await self._post("/completion", slot, body)
        cached, whole = said["timings/cache_n"], prompt + Tokens(said["tokens"])
        contents = self._finish(
            reuse_plan, prompt, cached=cached, generated=said["tokens_predicted"], note=note
        )
        if self.shadow.traits.speculative:  # the scheduler gets it from GET /slots
            contents = contents.shrunk(said["tokens_cached"])
        assert contents.total == said["tokens_cached"], note
        self.shadow.slots[slot] = contents.known_as(whole) if learns else contents
        return whole

    async def chat(self, slot: int, messages: Sequence[Message], *, note: str) -> None:
        """Send a chat to the slot, without a reply."""
        body = {"messages": messages, "max_tokens": 0}
        text = await self.client.apply_template(body)
        prompt = Tokens(await self.client.tokenize(text, add_special=True, parse_special=True))
        reuse_plan = await self._launch(slot, prompt)
        said = await self._post("/v1/chat/completions", slot, body)
        self._finish(reuse_plan, prompt, cached=said["timings"]["cache_n"], generated=0, note=note)

    async def save(self, slot: int, name: str) -> Snapshot:
        written = await self.client.save(SlotId(slot), name)
        tokens, checkpoints = contents(self.engine.slot_dir / name)
        return Snapshot(
            id=SnapshotId(name),
            fingerprint="",
            tokens=tokens,
            size=written.written,
            checkpoints=checkpoints,
        )

    async def restore(self, slot: int, snapshot: Snapshot) -> None:
        await self.client.restore(SlotId(slot), snapshot.id)
        self.shadow.restore(SlotId(slot), snapshot, self.clock)

    async def erase(self, slot: int) -> None:
        await self.client.erase(SlotId(slot))
        self.shadow.erase(SlotId(slot))

    def misses(self) -> list[Asked]:
        return [one for one in self.asked if one.reuse_plan.reuse != one.cached]

    async def _launch(self, slot: int, prompt: Tokens) -> ReusePlan:
        self.clock += 1.0
        reuse_plan = self.shadow.plan_reuse(SlotId(slot), prompt)
        if reuse_plan.unsafe:
            await self.erase(slot)
            reuse_plan = self.shadow.plan_reuse(SlotId(slot), prompt)
        self.before = repr(self.shadow)
        others = [SlotId(other) for other in range(self.shadow.traits.n_slots) if other != slot]
        self.shadow.launch(reuse_plan, others)
        return reuse_plan

    def _finish(
        self, reuse_plan: ReusePlan, prompt: Tokens, *, cached: int, generated: int, note: str
    ) -> SlotContents:
        asked = Asked(note=note, reuse_plan=reuse_plan, length=len(prompt), cached=cached, before=self.before)
        self.asked.append(asked)
        return self.shadow.finish(
            reuse_plan.slot,
            prompt=prompt,
            prompt_tokens=len(prompt),
            cached=cached,
            generated=generated,
            user_starts=user_starts(prompt, self.shadow.traits) if self.opens else (),
            hash_chain=(),
            request=None,
            now=self.clock,
        )

    async def _post(self, path: str, slot: int, body: dict[str, Any]) -> dict[str, Any]:
        body = {**body, "id_slot": slot, "temperature": 0, "cache_prompt": True}
        async with self.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()


def contents(path: Path) -> tuple[Tokens, tuple[int, ...]]:
    """Return the ids in a file that the engine just wrote, and its checkpoints in order (engine.md 2.2).

    The package's reader is not used, so that its mistakes cannot hide those of the shadow.
    """
    data = path.read_bytes()
    (count,) = unpack_from("<I", data, 8)
    tokens = Tokens(unpack_from(f"<{count}i", data, 12)[3:-1])
    at = data.find(b"SCKP\x01\0\0\0", 12 + 4 * count)
    if at < 0:
        return tokens, ()
    (records,) = unpack_from("<I", data, at + 8)
    at, places = at + 12, list[int]()
    for _ in range(records):
        places.append(unpack_from("<q", data, at)[0])
        at += 16
        for _ in range(3):
            at += 8 + unpack_from("<Q", data, at)[0]
    assert at == len(data), path
    return tokens, tuple(places)

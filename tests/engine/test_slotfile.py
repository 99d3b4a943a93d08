"""Real slot files: read as the engine wrote them, and restored by it after the sidecar changed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import httpx
import pytest

from engine.conftest import Engine
from patience import PATIENCE
from recipes import made, other_last_token, whole
from slotkeeper.bench.models import Tiny
from slotkeeper.engine.child.launch import EngineKind
from slotkeeper.engine.slotfile import RUN, Damage, SlotFile, keep, patched, read, repair_window
from slotkeeper.scheduler.prompts.tokens import Tokens
from unit.engine.slotfiles import joined, parts_of

N = 1500
UBATCH = 512
WINDOW = 256  # tokens, of tiny-swa
MODELS = [str(tiny) for tiny in Tiny]
CHECKPOINTED = [Tiny.SWA, Tiny.HYBRID, Tiny.HYBRID_MTP, Tiny.RECURRENT]
ALONE = ["--cache-ram", "0"]  # only files can bring a state back
DRAFTS = ["--spec-type", "draft-mtp"]


def prompt(n: int, seed: int = 0) -> list[int]:
    """Return token ids of ordinary words; two seeds differ from the first token on."""
    return [5 + (i * 7919 + i // 13 + seed * 101) % 900 for i in range(n)]


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine to save from and to restore into."""

    engine: Engine
    http: httpx.Client

    def complete(
        self, ids: Sequence[int], n_predict: int = 0, *, slot: int = 0, **more: Any
    ) -> dict[str, Any]:
        asked = {"prompt": list(ids), "n_predict": n_predict, "id_slot": slot, "temperature": 0}
        answer = self.http.post("/completion", json={**asked, "return_tokens": True, **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def save(self, slot: int = 0) -> bytes:
        said = self._act("save", slot)
        data = (self.engine.slot_dir / "file").read_bytes()
        assert said["n_written"] == len(data)
        return data

    def restore(self, data: bytes, slot: int = 0) -> int:
        """Restore a file; return the engine's count of the bytes that it used."""
        (self.engine.slot_dir / "file").write_bytes(data)
        return int(self._act("restore", slot)["n_read"])

    def reused(self, data: bytes, ids: Sequence[int]) -> int:
        """Restore, ask, and check that the answer is that of a slot that computed the whole prompt."""
        assert self.restore(data) == len(data)
        answer = self.complete(ids, 24)
        fresh = self.complete(ids, 24, slot=1, cache_prompt=False)
        assert fresh["timings"]["cache_n"] == 0
        assert answer["tokens"] == fresh["tokens"]
        return int(answer["timings"]["cache_n"])

    def _act(self, action: str, slot: int) -> dict[str, Any]:
        answer = self.http.post(f"/slots/{slot}?action={action}", json={"filename": "file"})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


@contextmanager
def bench(engine: Engine) -> Iterator[Bench]:
    with httpx.Client(base_url=engine.base, timeout=PATIENCE) as http:
        yield Bench(engine, http)


def look(data: bytes) -> SlotFile | Damage:
    return read(BytesIO(data), len(data))


def understood(data: bytes) -> SlotFile:
    file = look(data)
    assert isinstance(file, SlotFile), file
    assert file.layout
    return file


@pytest.mark.parametrize("engine", MODELS, indirect=True)
def test_a_state_that_grew_keeps_its_runs_also_in_another_slot(engine: Engine) -> None:
    """The parts of real files are the files; and most of them are those of the turn before."""
    ids = prompt(N, 7)
    with bench(engine) as at:
        at.complete(ids)
        before = at.save()
        at.restore(before, slot=1)
        at.complete([*ids, *prompt(300, 8)], slot=1)
        after = at.save(slot=1)
    assert joined(before) == before
    assert joined(after) == after
    runs = 0 if engine.model.stem == Tiny.RECURRENT else N // RUN
    records = [set(_records(data)) for data in (before, after)]
    assert len(set(parts_of(before)) & set(parts_of(after))) >= runs + len(set.intersection(*records))


def _records(data: bytes) -> list[bytes]:
    return [data[record.offset : record.offset + record.length] for record in understood(data).records]


@pytest.mark.parametrize("engine", MODELS, indirect=True)
def test_a_slot_file_is_read_with_the_engines_own_figures(engine: Engine) -> None:
    ids = prompt(N, 1)
    with bench(engine) as at:
        at.complete(ids)
        data = at.save()
        file = understood(data)
        n_read = at.restore(data)
        without_checkpoints = at.restore(data[: file.payload_end])
    newer, dense = engine.build == EngineKind.XLLAMACPP, engine.model.stem == Tiny.DENSE
    assert file.version == (4 if newer else 2)
    assert file.tokens == Tokens(ids)
    assert [r.at for r in file.records] == ([N - 4 - UBATCH, N - 4] if newer and not dense else [])
    assert n_read == file.size == len(data)
    assert without_checkpoints == file.payload_end
    assert not any(record.draft for record in file.records)


@pytest.mark.parametrize("engine", MODELS, indirect=True)
def test_the_layout_does_not_depend_on_the_tokens_or_the_slot(engine: Engine) -> None:
    with bench(engine) as at:
        at.complete(prompt(300, 2))
        short = understood(at.save())
        answer = at.complete(prompt(700, 3), 40, slot=1)
        long = understood(at.save(slot=1))
        at.http.post("/slots/0?action=erase", json={}).raise_for_status()
        empty = look(at.save())
    assert short.layout == long.layout
    assert list(long.tokens) == [*prompt(700, 3), *answer["tokens"]][: len(long.tokens)]
    assert len(long.tokens) >= 700 + len(answer["tokens"]) - 1
    assert isinstance(empty, SlotFile)
    assert (len(empty.tokens), empty.layout) == (0, "")


@pytest.mark.parametrize("model", CHECKPOINTED)
def test_a_trimmed_file_is_restored_with_the_kept_checkpoint(model, engine_factory) -> None:
    args = [*ALONE, *(DRAFTS if model == Tiny.HYBRID_MTP else [])]
    ids = prompt(N)
    with bench(engine_factory(model, EngineKind.XLLAMACPP, args=args)) as at:
        at.complete(ids[:704])
        at.complete(ids)
        data = at.save()
        file = understood(data)
        assert [r.at for r in file.records] == [188, 700, 984, 1496]
        assert all(r.draft is (model == Tiny.HYBRID_MTP) for r in file.records)
        trimmed = made(keep(file, [file.records[1]]), data)
        branch = [*ids[:900], *prompt(80, 9)]
        lost = 1 if model == Tiny.SWA else 0  # a window computes the last token of a checkpoint again
        assert at.reused(trimmed, branch) == 700 - lost
        assert at.reused(made(keep(file, ()), data), branch) == 0
    assert understood(trimmed).records[0].at == 700
    assert len(trimmed) < len(data)


@pytest.mark.parametrize("held", [N, WINDOW + 1, N + 40])
def test_a_repaired_window_can_be_extended_and_is_never_cut_wrongly(held, engine_factory, build) -> None:
    ids = prompt(min(held, N))
    with bench(engine_factory(Tiny.SWA, build, args=ALONE)) as at:
        at.complete(ids, held - len(ids))
        data = at.save()
        file = understood(data)
        held_ids, n = list(file.tokens), len(file.tokens)
        patch = repair_window(BytesIO(data), file, WINDOW)
        assert patch is not None
        repaired = made(patched(keep(file, ()), patch), data)
        assert repair_window(BytesIO(repaired), understood(repaired), WINDOW) is None
        assert at.reused(made(keep(file, ()), data), [*held_ids, 9, 9]) == 0  # as it was (T4)
        assert at.reused(repaired, [*held_ids, 9, 9]) == n
        assert at.reused(repaired, [*held_ids, *prompt(40, 9)]) == n
        assert at.reused(repaired, held_ids) == 0
        for back in (1, 40, 256):
            assert at.reused(repaired, [*held_ids[:-back], *prompt(60, 9)]) == 0


def test_a_repaired_window_is_cut_at_its_checkpoints(engine_factory) -> None:
    ids = prompt(N)
    with bench(engine_factory(Tiny.SWA, EngineKind.XLLAMACPP, args=ALONE)) as at:
        at.complete(ids)
        data = at.save()
        file = understood(data)
        patch = repair_window(BytesIO(data), file, WINDOW)
        assert patch is not None
        repaired = made(patched(whole(file), patch), data)
        assert at.reused(repaired, [*ids, 9, 9]) == N
        assert at.reused(repaired, ids) == N - 5
        assert at.reused(repaired, [*ids[:-100], *prompt(60, 9)]) == N - 4 - UBATCH - 1


def test_a_window_that_has_wrapped_is_repaired_too(engine_factory, build) -> None:
    """It is a ring, so its cells need not be in order in the file."""
    ids, wrapped = prompt(2600), list[tuple[int, bytes]]()
    with bench(engine_factory(Tiny.SWA, build, args=[*ALONE, "-ub", "128", "-c", "8192"])) as at:
        for end in range(300, 2600, 230):  # a restore would put the cells in order
            at.complete(ids[:end])
            data = at.save()
            file = understood(data)
            patch = repair_window(BytesIO(data), file, WINDOW)
            assert patch is not None
            if patch.offset > file.caches[1].table:
                wrapped.append((end, made(patched(whole(file), patch), data)))
        assert len(wrapped) > 1
        for end, repaired in wrapped[-2:]:
            assert at.reused(repaired, [*ids[:end], 9, 9]) == end


def test_another_last_token_restores_the_draft_state(engine_factory) -> None:
    def drafts(answer: dict[str, Any]) -> tuple[int, int]:
        return answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]

    ids = prompt(N)
    extended = [*ids, 9, 9]
    with bench(engine_factory(Tiny.HYBRID_MTP, EngineKind.XLLAMACPP, args=[*ALONE, *DRAFTS])) as at:
        at.complete(ids)
        data = at.save()
        file = understood(data)
        live = at.complete(extended, 100)
        changed = made(patched(whole(file), other_last_token(file, ids[-1] + 1)), data)
        assert at.reused(changed, extended) == N - 4
        at.restore(changed)
        assert drafts(at.complete(extended, 100)) == drafts(live)
        assert at.reused(data, extended) == N
        at.restore(data)
        assert drafts(at.complete(extended, 100))[1] < drafts(live)[1]  # the reason why it is worth 4 tokens

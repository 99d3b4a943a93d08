"""A tokenizer is tested once for each model and build, not at each start of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slotkeeper.bench.models import Tiny, build
from slotkeeper.engine.answers import EngineGoneError
from slotkeeper.engine.traits import Reading
from slotkeeper.runtime.link import Tokenizers
from slotkeeper.scheduler.slots.engine_model import EngineTraits
from slotkeeper.vocab.gguf import read_header


async def unreachable(*_args: object, **_more: object) -> list[int]:
    raise EngineGoneError("not asked here")


@pytest.fixture
def reading() -> Reading:
    path = build(Tiny.DENSE)
    return Reading(
        traits=EngineTraits(),
        props={"chat_template": "{{ x }}", "bos_token": "a"},
        model={},
        model_path=path,
        header=read_header(path),
        build="b1-x",
        notes=[],
    )


async def test_the_same_model_keeps_its_tokenizer_after_a_restart(reading):
    tokenizers = Tokenizers(unreachable)
    first = await tokenizers.fitting(reading)
    assert await tokenizers.fitting(replace(reading, notes=["started again"])) is first


@pytest.mark.parametrize(
    "change",
    [
        {"build": "b2-x"},
        {"props": {"chat_template": "{{ y }}", "bos_token": "a"}},
        {"model_path": Path("another.gguf")},
        {"header": read_header(build(Tiny.HYBRID))},
        {"header": None},
    ],
)
async def test_another_model_or_build_or_template_gets_another_tokenizer(reading, change):
    tokenizers = Tokenizers(unreachable)
    first = await tokenizers.fitting(reading)
    assert await tokenizers.fitting(replace(reading, **change)) is not first


async def test_an_unreadable_model_gets_a_new_tokenizer_each_time(reading):
    tokenizers = Tokenizers(unreachable)
    unknown = replace(reading, header=None)
    first = await tokenizers.fitting(unknown)
    assert await tokenizers.fitting(unknown) is not first

"""The demo's output; tests/engine shows that it works."""

from __future__ import annotations

from slotkeeper.bench import demo as module
from slotkeeper.bench.demo import demo
from slotkeeper.bench.measure import Sample, totals
from slotkeeper.engine.child.launch import NOTHING, NoEngineError
from slotkeeper.scheduler.requests.figures import Usage


async def test_without_an_engine_the_demo_says_what_to_install(monkeypatch, capsys):
    def nothing(_):
        raise NoEngineError(NOTHING)

    monkeypatch.setattr(module, "find_engine", nothing)
    assert await demo(engine=None, model="tiny-hybrid") == 1
    assert "slotkeeper[engine]" in capsys.readouterr().out  # the brackets are not read as markup


async def test_an_unknown_model_is_a_usage_error(capsys):
    assert await demo(engine=None, model="llama") == 2
    assert "tiny-hybrid" in capsys.readouterr().out


def totals_with(computed, oracle=20):
    usage = Usage(prompt=100, cached=100 - computed)
    return totals([Sample(session="s", label="x", usage=usage, oracle=oracle, idle=0)])


def test_the_saved_tokens_are_summarised_in_one_sentence():
    said = module._sentence(totals_with(80), totals_with(20))
    assert "saved 60 of 80 prompt tokens (75%)" in said
    assert "1.00 times" in said


def test_a_demo_without_savings_says_so():
    assert "saved nothing" in module._sentence(totals_with(20), totals_with(20))
    assert "saved nothing" in module._sentence(totals_with(20), totals_with(30))

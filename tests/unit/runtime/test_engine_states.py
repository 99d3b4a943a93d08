"""The metrics of each engine: one state at a time, also if the engine is drained, asleep or lost."""

from __future__ import annotations

import pytest

from slotkeeper.engine.answers import Health
from slotkeeper.observe.states import EngineState
from unit.runtime.stubs import ENGINE, settled


@pytest.fixture
def figure(driver):
    """Return a function that reads a metric of the only engine."""
    return lambda name, **labels: driver.metrics.registry.get_sample_value(
        f"slotkeeper_engine_{name}", {"engine": ENGINE, **labels}
    )


@pytest.fixture
def seen(figure):
    """Return a function that reads the state of the engine from the metrics."""

    def look() -> EngineState:
        (found,) = (state for state in EngineState if figure("state", state=state.value))
        return found

    return look


async def test_a_serving_engine_is_up_until_its_circuit_breaker_opens(driver, link, seen):
    assert seen() is EngineState.UP
    driver.failed(link, broken=True)
    assert seen() is EngineState.FAILING
    assert (
        driver.metrics.registry.get_sample_value("slotkeeper_engine_failures_total", {"engine": ENGINE}) == 1
    )


async def test_a_drained_engine_is_shown_as_drained_even_while_it_is_down(driver, link, seen):
    driver.membership.drain(link, drain=True)
    await settled()
    assert seen() is EngineState.DRAINED
    link.up, link.health = False, Health.DOWN
    assert seen() is EngineState.DRAINED
    driver.membership.drain(link, drain=False)
    assert seen() is EngineState.DOWN


async def test_a_draining_engine_with_running_answers_is_shown_as_draining(driver, link, seen, monkeypatch):
    driver.membership.drain(link, drain=True)
    monkeypatch.setattr(driver.placement, "drained", lambda _: False)
    assert seen() is EngineState.DRAINING


@pytest.mark.parametrize(
    ("health", "state"),
    [
        (Health.DOWN, EngineState.DOWN),
        (Health.LOADING, EngineState.LOADING),
        (Health.SLEEPING, EngineState.SLEEPING),
        (Health.ROUTER, EngineState.UP),
        (Health.UNLOADED, EngineState.UNLOADED),
    ],
)
async def test_an_engine_that_is_not_probed_has_the_state_that_it_answers(link, seen, figure, health, state):
    link.up, link.health = False, health
    assert seen() is state
    expected = {EngineState.DOWN: 0, EngineState.LOADING: 0, EngineState.UNLOADED: None}
    assert figure("up") == expected.get(state, 1)

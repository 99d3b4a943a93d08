"""Slots that share one KV buffer: a request goes out only if its cells fit (8 in `placement`)."""

from types import MappingProxyType
from typing import Any

from playbooks.playbook import (
    Play,
    arrives,
    ends,
    goes,
    knows,
    pooled,
    reports,
    starts,
)
from slotkeeper.scheduler.effects import PoolAct
from slotkeeper.scheduler.engine_model import Known
from slotkeeper.scheduler.types import Tokens

READ = MappingProxyType({"unified": Known.FLAGS})
A, B, C, D = (Tokens(range(n, n + 1000)) for n in (10_000, 20_000, 30_000, 40_000))
MORE = Tokens(range(100))


def pool(n_ctx: int = 4096, **traits: Any) -> Play:
    """Four slots over one buffer, of which the engine keeps no copies."""
    known: dict[str, Any] = {"n_slots": 4, "memory": "dense", "n_ctx": n_ctx, "unified": True}
    return Play(**known | {"knowledge": READ} | traits)


def asks(play: Play, request: str, prompt: Tokens, most: int = 100, **more: Any) -> Play:
    """It comes, and its tokens are known."""
    return play << arrives(request, most=most, **more) << knows(request, prompt)


def test_a_request_waits_until_its_cells_are_free():
    play = pool(2300)
    assert asks(play, "r1", A) >> goes("r1", slot=0) << starts("r1")
    assert asks(play, "r2", B) >> goes("r2", slot=1) << starts("r2")
    assert asks(play, "r3", C) >> pooled("r3", PoolAct.WAITED, cells=997)
    assert play.placement.queued == 1


def test_prompt_and_answer_less_one_token_fill_the_buffer_exactly():
    play = pool(2198)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    assert asks(play, "r2", B) >> goes("r2")


def test_one_cell_less_and_the_second_waits():
    play = pool(2197)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    assert asks(play, "r2", B) >> pooled("r2", PoolAct.WAITED, cells=1)
    assert play << ends("r1", 1000, generated=50) >> reports("r1") >> goes("r2")


def test_an_engine_with_a_buffer_for_each_slot_is_left_alone():
    play = pool(1200, unified=False)
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    assert asks(play, "r2", B) >> goes("r2")


def test_an_engine_that_is_only_likely_to_share_one_is_left_alone():
    play = pool(1200, knowledge={})
    assert asks(play, "r1", A) >> goes("r1") << starts("r1")
    assert asks(play, "r2", B) >> goes("r2")

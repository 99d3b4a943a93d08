"""What a router reports on its models, and how a call names a model."""

import pytest

from slotkeeper.engine.client import EngineAddress
from slotkeeper.engine.routers.router_client import entry_of
from slotkeeper.scheduler.policies.router import ModelStatus

BASE = "http://router:8080"
ARGS = ["llama-server", "--port", "46919", "--ctx-size", "8192", "--parallel", "2"]


def model_entry(value="loaded", **status):
    return {"id": "coder", "aliases": ["gpt-x"], "status": {"value": value, "args": ARGS, **status}}


def test_an_entry_has_the_flags_and_the_port_of_its_process():
    entry = entry_of(model_entry())
    assert (entry.name, entry.aliases, entry.status) == ("coder", ("gpt-x",), ModelStatus.LOADED)
    assert entry.flags
    assert (entry.flags.n_ctx, entry.flags.n_parallel, entry.port) == (8192, 2, 46919)
    assert entry_of(model_entry(args=["llama-server", "--parallel"])).flags is None, "they are unreadable"


def test_an_entry_of_a_failed_load_says_so_and_its_port_is_ignored():
    entry = entry_of(model_entry("unloaded", failed=True))
    assert (entry.failed, entry.port) == (True, 0)


@pytest.mark.parametrize("value", ["loading", "sleeping", "unloaded"])
def test_each_model_status_is_read(value):
    assert entry_of(model_entry(value)).status == value


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"id": "coder"},
        {"id": "coder", "status": None},
        model_entry("exploded"),
        {"id": "x", "aliases": None},
    ],
)
def test_an_unreadable_entry_counts_as_unloaded(entry):
    assert entry_of(entry).status is ModelStatus.UNLOADED


# -- addresses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [BASE, f"{BASE}#coder", f"{BASE}#org/coder:Q4_K_M"])
def test_an_engine_is_named_by_base_and_model(engine):
    address = EngineAddress.of(engine)
    assert address.base == BASE
    assert address.engine == engine


def test_calls_to_a_server_without_a_router_are_unchanged():
    address = EngineAddress.of(f"{BASE}/")
    assert address.url("GET", "/slots") == f"{BASE}/slots"
    assert address.body("POST", {"content": "x"}) == {"content": "x"}
    assert address.body("GET", None) is None
    assert address.passed_on("/completion?x=1", held=True) == "/completion?x=1"


def test_calls_to_a_router_name_the_model_and_never_load_it():
    address = EngineAddress.of(f"{BASE}#a b/c&d")
    assert address.url("GET", "/slots") == f"{BASE}/slots?model=a%20b%2Fc%26d&autoload=false"
    assert address.url("POST", "/slots/0?action=save") == f"{BASE}/slots/0?action=save&autoload=false"
    assert address.body("POST", {"filename": "f", "model": "other"}) == {"filename": "f", "model": "a b/c&d"}
    assert address.body("POST", None) == {"model": "a b/c&d"}
    assert address.body("GET", None) is None


def test_a_client_request_does_not_load_a_model_that_is_already_loaded():
    address = EngineAddress.of(f"{BASE}#coder")
    assert address.passed_on("/completion", held=True) == "/completion?autoload=false"
    assert address.passed_on("/completion?a=1", held=True) == "/completion?a=1&autoload=false"
    assert address.passed_on("/completion", held=False) == "/completion"

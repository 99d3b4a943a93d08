"""The store that the settings describe: which settings conflict, and the errors for missing parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ByteSize

from slotkeeper.app import limits_in, store_in
from slotkeeper.observe.metrics import Metrics
from slotkeeper.settings import Settings
from slotkeeper.values import UsageError
from unit.store.sharing import KEY, sidecar


def made(tmp_path: Path, **more):
    return store_in(Settings(**{"slot_dir": tmp_path / "hot", **more}), Metrics())


def test_without_a_slot_folder_there_is_no_store():
    assert store_in(Settings(), Metrics()) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cold_store": "/x", "cold_dir": "/y"}, "replaces --cold-dir"),
        ({"cold_store": "/x", "slot_dir": None}, "needs --slot-dir"),
        ({"hints": "redis://127.0.0.1:1"}, "need --cold-store"),
        ({"store_key_file": "/x"}, "need --cold-store"),
        ({"cold_store": "/dev/null/x"}, "cannot be used"),
        ({"cold_store": "s3://"}, "cannot be used"),
    ],
)
def test_conflicting_settings_are_refused(settings, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        made(tmp_path, **settings)


def test_invalid_values_are_refused_without_quoting_a_secret(tmp_path):
    with pytest.raises(UsageError, match="redis://HOST") as told:
        made(tmp_path, cold_store=str(tmp_path / "cold"), hints="http://user:hidden@host")
    assert "hidden" not in str(told.value)
    with pytest.raises(UsageError, match="cannot be read"):
        made(tmp_path, cold_store=str(tmp_path / "cold"), store_key_file=tmp_path / "none")


@pytest.mark.parametrize(
    ("module", "extra"),
    [("slotkeeper.store.shared_store.shared", "s3"), ("slotkeeper.store.shared_store.hints", "hints")],
)
def test_a_missing_extra_is_named(module, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"slotkeeper\[{extra}\]"):
        made(tmp_path, cold_store=str(tmp_path / "cold"), hints="redis://127.0.0.1:1")


def test_the_scheduler_does_not_evict_from_a_shared_store(tmp_path):
    five = ByteSize(5)
    shared = limits_in(Settings(slot_dir=tmp_path, cold_store="s3://bucket", cold_store_bytes=five))
    assert (shared.shared_bytes, shared.cold_bytes) == (5, sys.maxsize)
    own = limits_in(Settings(slot_dir=tmp_path, cold_dir=tmp_path, cold_bytes=five))
    assert (own.shared_bytes, own.cold_bytes) == (None, 5)
    assert limits_in(Settings(slot_dir=tmp_path, cold_bytes=five)).cold_bytes == 0


@pytest.mark.parametrize("key", [None, KEY])
async def test_sidecars_that_share_a_store_share_the_namespace_secret(tmp_path, key):
    cold = tmp_path / "cold"
    async with (
        sidecar(tmp_path / "one", cold, key) as (one, _),
        sidecar(tmp_path / "two", cold, key) as (two, _),
    ):
        assert one.secret == two.secret
        assert len(one.secret or b"") == 32

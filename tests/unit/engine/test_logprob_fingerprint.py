"""When two logprob fingerprints count as equal, and which of them are remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotkeeper.engine.answers import EngineError
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.fingerprint import (
    FILE,
    TOLERANCE,
    KnownFingerprint,
    alike,
    recalled,
    remembered,
    voice_of,
)

ODDS = tuple((token, -1.0 - token / 2) for token in range(8))
KNOWN = KnownFingerprint(name="n", engine="e", process="p", odds=ODDS)


def test_fingerprints_with_small_differences_in_all_tokens_or_any_in_one_are_alike():
    def shifted(by: float):
        return tuple((token, logprob + by) for token, logprob in ODDS)

    assert alike(ODDS, ODDS)
    assert alike(ODDS, shifted(TOLERANCE / 2))
    assert not alike(ODDS, shifted(TOLERANCE * 2))
    assert alike(ODDS, (*ODDS[:-1], (99, -4.6)))
    assert not alike(ODDS, (*ODDS[:-2], (98, -4.1), (99, -4.6)))


def test_remembered_fingerprints_are_read_back(tmp_path):
    assert recalled(tmp_path) == []
    remembered(tmp_path, [KNOWN, KNOWN])
    assert recalled(tmp_path) == [KNOWN, KNOWN]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b"{}x", b"3", b"[3]", b'[{"name":"n"}]', b'[{"odds":[[1]]}]', b'[{"odds":3}]'],
)
def test_an_unreadable_fingerprint_file_holds_no_fingerprints(tmp_path, data):
    (tmp_path / FILE).write_bytes(data)
    assert recalled(tmp_path) == []


class Refuses(EngineClient):
    """An idle engine that gives no logprobs."""

    def __init__(self):
        pass

    async def slots(self, **_):
        return ()

    async def tokenize(self, *_, **__):
        return [1, 2, 3]

    async def guess(self, *_, **__):
        raise EngineError(400, "no")


async def test_an_engine_without_logprobs_keeps_the_name_of_its_last_known_fingerprint(tmp_path):
    assert (await voice_of(Refuses(), tmp_path, "e", "new", may_compute=True)) == ("", None)
    remembered(tmp_path, [KNOWN, replace(KNOWN, name="newer"), replace(KNOWN, engine="other", name="x")])
    assert (await voice_of(Refuses(), tmp_path, "e", "new", may_compute=True)) == ("newer", None)
    assert (await voice_of(Refuses(), tmp_path, "e", "new", may_compute=False)) == ("newer", None)

"""When two logprob fingerprints are of one engine, and what is remembered of them."""

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
HEARD = KnownFingerprint(name="n", engine="e", process="p", odds=ODDS)


def moved(by: float):
    return tuple((token, logprob + by) for token, logprob in ODDS)


def test_a_voice_is_itself_and_may_tremble():
    assert alike(ODDS, ODDS)
    assert alike(ODDS, moved(TOLERANCE / 2))
    assert not alike(ODDS, moved(TOLERANCE * 2))


def test_one_token_may_fall_off_the_end_and_not_two():
    assert alike(ODDS, (*ODDS[:-1], (99, -4.6)))
    assert not alike(ODDS, (*ODDS[:-2], (98, -4.1), (99, -4.6)))


def test_what_was_heard_is_recalled(tmp_path):
    assert recalled(tmp_path) == []
    remembered(tmp_path, [HEARD, HEARD])
    assert recalled(tmp_path) == [HEARD, HEARD]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b"{}x", b"3", b"[3]", b'[{"name":"n"}]', b'[{"odds":[[1]]}]', b'[{"odds":3}]'],
)
def test_a_file_that_is_not_ours_is_nothing_heard(tmp_path, data):
    (tmp_path / FILE).write_bytes(data)
    assert recalled(tmp_path) == []


class Refuses(EngineClient):
    """An unused engine that gives no logprobs."""

    def __init__(self):
        pass

    async def slots(self, **_):
        return ()

    async def tokenize(self, *_, **__):
        return [1, 2, 3]

    async def guess(self, *_, **__):
        raise EngineError(400, "no")


async def test_an_engine_that_does_not_answer_is_taken_for_the_one_heard_last(tmp_path):
    assert (await voice_of(Refuses(), tmp_path, "e", "new", may_compute=True)) == ""
    remembered(tmp_path, [HEARD, replace(HEARD, name="newer"), replace(HEARD, engine="other", name="x")])
    assert (await voice_of(Refuses(), tmp_path, "e", "new", may_compute=True)) == "newer"
    assert (await voice_of(Refuses(), tmp_path, "e", "new", may_compute=False)) == "newer"

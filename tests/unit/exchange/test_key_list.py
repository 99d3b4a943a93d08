"""The list of --keys-file: its format, who may read it, and what a key may use."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from slotkeeper.exchange import keys as keys_module
from slotkeeper.exchange.keys import CrowdedFault, KeyList, KeysError, OwnKeys, new_key

SECRET = "a-long-key-of-somebody"  # noqa: S105
DIGEST = sha256(SECRET.encode()).hexdigest()


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("line", [f'key = "{SECRET}"', f'sha256 = "{DIGEST}"'])
def test_a_key_is_found_by_its_text_or_its_digest_with_its_limits(tmp_path, line):
    for more, queued, most in (
        ("", None, "high"),
        ("queued = 3", 3, "high"),
        ('priority = "normal"', None, "normal"),
        ('priority = "low"', None, "low"),
    ):
        found = KeyList.read(key_file(tmp_path, f"[alice]\n{line}\n{more}\n")).find(SECRET)
        assert (found.name, found.namespace, found.operator) == ("alice", "alice", False)
        assert (found.queued, found.priority) == (queued, most)


def test_an_unknown_key_is_not_found_and_no_key_is_stored(tmp_path):
    listed = KeyList.read(key_file(tmp_path, f'[alice]\nkey = "{SECRET}"\n[bob]\nsha256 = "{"0" * 64}"\n'))
    assert [listed.find(given) for given in ("", DIGEST, SECRET[:-1], f"{SECRET} ", "0" * 64, "\udce4")] == [
        None
    ] * 6
    assert len(listed) == 2
    assert SECRET not in repr(vars(listed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "slotkeeper keys NAME"),
        ("[alice\n", "not TOML: look at line 1"),
        (f'alice = "{SECRET}"\n', "a line [NAME] above"),
        ("[alice]\n", "needs either"),
        (f'[alice]\nkey = "{SECRET}"\nsha256 = "{DIGEST}"\n', "needs either"),
        ('[alice]\nkey = "sesame-secret"\n', "at least 16"),
        ('[alice]\nkey = "a long key of somebody"\n', "without spaces"),
        (f'[alice]\nsha256 = "{SECRET}"\n', "should match"),
        (f'[alice]\nkey = "{SECRET}"\nqueue = 3\n', "there is no such field"),
        (f'[alice]\nkey = "{SECRET}"\nqueued = 0\n', "greater than or equal to 1"),
        (f'[alice]\nkey = "{SECRET}"\noperator = "yes"\n', "valid boolean"),
        (f'[alice]\nkey = "{SECRET}"\npriority = "urgent"\n', "'high', 'normal' or 'low'"),
        (f'["a b"]\nkey = "{SECRET}"\n', "a name has up to 40"),
        (f'[alice]\nkey = "{SECRET}"\nnamespace = "../x"\n', "should match"),
        (f'[alice]\nkey = "{SECRET}"\n[bob]\nsha256 = "{DIGEST}"\n', "two names have the same key"),
        ("#" * (keys_module.LARGEST + 1), "larger than"),
    ],
)
def test_errors_in_the_key_list_do_not_quote_the_key(tmp_path, text, message):
    with pytest.raises(KeysError) as error:
        KeyList.read(key_file(tmp_path, text))
    assert message in str(error.value)
    assert SECRET not in str(error.value)
    assert "sesame-secret" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "mode", "command"),
    [
        (f'key = "{SECRET}"', 0o640, "chmod 600"),
        (f'key = "{SECRET}"', 0o604, "chmod 600"),
        (f'key = "{SECRET}"', 0o602, "chmod 600"),
        (f'sha256 = "{DIGEST}"', 0o620, "chmod go-w"),
        (f'sha256 = "{DIGEST}"', 0o602, "chmod go-w"),
        (f'sha256 = "{DIGEST}"', 0o644, None),
        (f'key = "{SECRET}"', 0o400, None),
    ],
)
def test_a_key_list_that_others_may_use_is_refused_with_the_command_that_repairs_it(
    tmp_path, line, mode, command
):
    path = key_file(tmp_path, f"[alice]\n{line}\n", mode)
    if command is None:
        assert len(KeyList.read(path)) == 1
        return
    with pytest.raises(KeysError, match=f"Fix it: {command} "):
        KeyList.read(path)


def test_a_key_list_of_another_user_is_refused(tmp_path, monkeypatch):
    path = key_file(tmp_path, f'[alice]\nsha256 = "{DIGEST}"\n')
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid == 0:  # a file of root is trusted
        assert len(KeyList.read(path)) == 1
    else:
        with pytest.raises(KeysError, match="Fix it: sudo chown"):
            KeyList.read(path)


def test_a_new_key_is_found_by_the_entry_that_comes_with_it(tmp_path):
    key, table = new_key("a.b-c")
    assert key not in table
    found = KeyList.read(key_file(tmp_path, table, 0o644)).find(key)
    assert found.name == "a.b-c"
    with pytest.raises(ValueError, match="is not a name"):
        new_key("a b")


class Limited:
    """One key and a clock."""

    def __init__(self, folder: Path, limits: str) -> None:
        self.clock = 1000.0
        self.path = key_file(folder, f'[alice]\nkey = "{SECRET}"\n{limits}\n')
        self.keys = OwnKeys(self.path, now=lambda: self.clock)

    def refused(self) -> tuple[str, int] | None:
        """Return why the key may not begin a request now, and for how long."""
        key = self.keys.find(SECRET)
        try:
            used = self.keys.begin(key)
        except CrowdedFault as fault:
            return fault.reason.value, fault.retry_after or 0
        self.keys.end(key, used, 0)
        return None

    def costs(self, tokens: int) -> None:
        key = self.keys.find(SECRET)
        self.keys.end(key, self.keys.begin(key), tokens)


def test_a_key_has_a_limit_of_concurrent_requests(tmp_path):
    one = Limited(tmp_path, "concurrent = 2")
    key = one.keys.find(SECRET)
    first, second = one.keys.begin(key), one.keys.begin(key)
    assert one.refused() == ("key_concurrent", 2)
    one.keys.end(key, first, 1)
    assert one.refused() is None
    one.keys.end(key, second, 1)


def test_the_token_budget_of_a_key_refills_within_a_minute(tmp_path):
    one = Limited(tmp_path, "tokens_per_minute = 600")
    one.costs(599)
    assert one.refused() is None
    one.costs(1)
    assert one.refused() == ("key_tokens", 1)
    one.clock += 1
    assert one.refused() is None
    one.costs(1800)  # more than the budget had: the rest is owed
    reason, wait = one.refused() or ("", 0)
    assert reason == "key_tokens"
    assert wait in {180, 179}
    one.clock += wait - 2
    assert one.refused() is not None
    one.clock += 2
    assert one.refused() is None


def test_the_usage_of_a_key_survives_a_reload_and_ends_with_the_key(tmp_path):
    one = Limited(tmp_path, "")
    for _ in range(100):
        one.costs(10**6)
    assert one.refused() is None, "a key without limits"
    key_file(tmp_path, f'[alice]\nkey = "{SECRET}"\ntokens_per_minute = 600\n')
    one.keys.reload()
    assert one.refused() is None, "what it used before it had a limit does not count"
    key_file(tmp_path, "[alice\n")
    with pytest.raises(KeysError):
        one.keys.reload()
    assert one.keys.find(SECRET) is not None, "an invalid list changes nothing"
    one = Limited(tmp_path, "tokens_per_minute = 600")
    one.costs(700)
    key_file(tmp_path, f'[alice]\nkey = "{SECRET}"\ntokens_per_minute = 650\n')
    one.keys.reload()
    assert one.refused() is not None
    key_file(tmp_path, '[bob]\nkey = "another-long-key-1234"\n')
    one.keys.reload()
    assert one.keys.find(SECRET) is None
    assert one.keys._used == {}

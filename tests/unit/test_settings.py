"""Settings: precedence of sources, refused values and their errors, and secrets that are never shown."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from pydantic import ByteSize, TypeAdapter

from slotkeeper.environment import SECRETS
from slotkeeper.settings import GROUPS, Settings, in_words, load, shown
from slotkeeper.values import REMOVED_SETTINGS, Address, UsageError

# name -> (text as a variable, in a file, as a flag), three values that differ
VALUES: dict[str, tuple[str, str, str]] = {
    "upstream": ("http://env:1", '["http://file:1"]', "http://flag:1"),
    "upstreams_file": ("/env", '"/file"', "/flag"),
    "listen": ("127.0.0.1:1001", '"127.0.0.1:1002"', "127.0.0.1:1003"),
    "admin_listen": ("127.0.0.1:2001", '"127.0.0.1:2002"', "127.0.0.1:2003"),
    "slot_dir": ("/env", '"/file"', "/flag"),
    "cold_dir": ("/env", '"/file"', "/flag"),
    "cold_store": ("s3://env/a", '"s3://file/a"', "s3://flag/a"),
    "cold_store_bytes": ("1KiB", '"2MiB"', "3GiB"),
    "store_key_file": ("/env", '"/file"', "/flag"),
    "hints": ("redis://env:1", '"redis://file:1"', "redis://flag:1"),
    "engine_api_key": ("env-key", '"file-key"', "flag-key"),
    "admin_token": ("env-token", '"file-token"', "flag-token"),
    "admin_host": ("env.lan", '["file.lan"]', "flag.lan"),
    "max_body_bytes": ("1001", "1002", "1003"),
    "drain_delay": ("1.5", "2.5", "3.5"),
    "drain_timeout": ("11", "12", "13"),
    "log_level": ("debug", '"warning"', "error"),
    "hot_bytes": ("1KiB", '"2MiB"', "3GiB"),
    "cold_bytes": ("1KiB", '"2MiB"', "3GiB"),
    "hourly_bytes": ("1GB", "12", "1.5GiB"),
    "idle_tokens": ("14", "15", "16"),
    "max_running": ("2", "3", "4"),
    "max_delay_factor": ("1.5", "2.5", "3.5"),
    "engine_wait": ("31", "32", "33"),
    "keep_alive": ("17", "18", "19"),
    "save_timeout": ("11", "12", "13"),
    "max_connections": ("23", "24", "25"),
    "trusted_proxies": ("10.0.0.1", '["10.0.0.0/8"]', "::1"),
    "rules": ("date=fix", '["all=off"]', "git_status=fix@qwen*"),
    "tls_cert": ("/env/cert", '"/file/cert"', "/flag/cert"),
    "tls_key": ("/env/key", '"/file/key"', "/flag/key"),
    "keys_file": ("/env/keys", '"/file/keys"', "/flag/keys"),
    "namespaces": ("off", '"key"', "off"),
    "shared_slot_dir": ("1", "true", "true"),
    "evacuate": ("1", "true", "true"),
    "why_text": ("1", "true", "true"),
    "record": ("/env", '"/file"', "/flag"),
    "otlp_endpoint": ("http://env:4318", '"http://file:4318"', "http://flag:4318"),
}


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    for name in Settings.model_fields:
        for tail in ("", "_FILE"):
            monkeypatch.delenv(f"SLOTKEEPER_{name.upper()}{tail}", raising=False)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "slotkeeper.toml"
    path.write_text(text, "utf-8")
    return path


def complaint(flags=None, config: Path | None = None) -> str:
    with pytest.raises(UsageError) as refused:
        load(flags or {}, config)
    return str(refused.value)


def plain(name: str, loaded) -> str:
    value = getattr(loaded.settings, name)
    if name in SECRETS:
        return value.get_secret_value()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def agrees(name: str, loaded, text: str) -> bool:
    """Numbers may come back as 11.0, sizes as a number, and truth in capitals."""
    got, wanted = plain(name, loaded), text.strip('[]"')
    kind = type(getattr(loaded.settings, name))
    if kind in {bool, ByteSize}:
        return TypeAdapter(kind).validate_python(wanted) == getattr(loaded.settings, name)
    return got == wanted or float(got) == float(wanted)


# -- precedence ----------------------------------------------------------------------------------------


def test_every_setting_has_test_values():
    assert set(VALUES) == set(Settings.model_fields)


def test_every_setting_is_in_one_group_and_in_its_order():
    assert [name for names in GROUPS.values() for name in names] == list(Settings.model_fields)


def test_what_follows_from_other_settings():
    settings = load({"max_body_bytes": "128MiB", "max_connections": "1"}).settings
    assert (settings.all_bodies_bytes, settings.max_connections_per_address) == (1024 * 2**20, 1)
    small = load({"max_body_bytes": "1MiB"}).settings
    assert small.all_bodies_bytes == 512 * 2**20, "the room for all is not lessened"


@pytest.mark.parametrize("name", VALUES)
def test_flag_beats_variable_beats_file_beats_default(name, monkeypatch, tmp_path):
    variable, line, flag = VALUES[name]
    assert load({}).origins[name] == "default"

    config = toml(tmp_path, f"{name} = {line}\n")
    in_file = load({}, config)
    assert agrees(name, in_file, line)
    assert in_file.origins[name] == f"file {config}"

    monkeypatch.setenv(f"SLOTKEEPER_{name.upper()}", variable)
    in_environment = load({}, config)
    assert agrees(name, in_environment, variable)
    assert in_environment.origins[name] == "environment"

    by_flag = load({name: flag}, config)
    assert agrees(name, by_flag, flag)
    assert by_flag.origins[name] == "flag"


def test_a_source_changes_only_what_it_names(monkeypatch, tmp_path):
    monkeypatch.setenv("SLOTKEEPER_LOG_LEVEL", "debug")
    loaded = load({"otlp_endpoint": "http://a:1"}, toml(tmp_path, "drain_delay = 9.0\n"))
    named = {name: origin.split()[0] for name, origin in loaded.origins.items() if origin != "default"}
    assert named == {"log_level": "environment", "otlp_endpoint": "flag", "drain_delay": "file"}


def test_several_engines_can_be_named_in_every_source(monkeypatch, tmp_path):
    both = ("http://a:1", "http://b:1")
    assert load({"upstream": list(both)}).settings.upstream == both
    assert load({}, toml(tmp_path, f"upstream = {list(both)}\n")).settings.upstream == both
    monkeypatch.setenv("SLOTKEEPER_UPSTREAM", "http://a:1/, http://b:1")
    assert load({}).settings.upstream == both


# -- secrets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_can_be_read_from_a_file(name, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text("  s3cret\n", "utf-8")
    monkeypatch.setenv(f"SLOTKEEPER_{name.upper()}_FILE", str(path))
    loaded = load({})
    assert plain(name, loaded) == "s3cret"
    assert loaded.origins[name] == "environment"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "no text"])
def test_a_secret_file_that_cannot_be_read_is_named(content, monkeypatch, tmp_path):
    path = tmp_path / "key"
    if content:
        path.write_bytes(content)
    monkeypatch.setenv("SLOTKEEPER_ENGINE_API_KEY_FILE", str(path))
    said = complaint()
    assert "SLOTKEEPER_ENGINE_API_KEY_FILE" in said
    assert str(path) in said


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_never_shown(name):
    loaded = load({name: "s3cret"})
    told = f"{shown(loaded)} {loaded!r} {loaded.settings} {loaded.settings.model_dump()}"
    assert "s3cret" not in told
    row = next(row for row in shown(loaded) if row[0] == name)
    assert row[1], "that it is set must be visible"
    assert row[2] == "flag"


def test_a_secret_is_not_shown_in_an_error_about_another_setting():
    said = complaint({"admin_token": "s3cret", "engine_api_key": "s3cret", "listen": "x"})
    assert "s3cret" not in said


def test_every_setting_is_shown_with_its_origin():
    assert [row[0] for row in shown(load({}))] == list(Settings.model_fields)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1023, "1023"),
        (1 << 10, "1KiB"),
        (16 << 30, "16GiB"),
        (3 << 29, "1536MiB"),
        (1 << 40, "1TiB"),
        (20 * 10**9, "20GB"),
        (123456789, "123456789"),
    ],
)
def test_a_size_is_shown_with_a_binary_unit_and_read_back(count, text):
    assert in_words(ByteSize(count)) == text
    assert load({"hot_bytes": text}).settings.hot_bytes == count


def test_shown_values_can_be_set_again(monkeypatch):
    """Every row of --print-config, set as a variable, gives the same row again."""
    given = {
        "hot_bytes": "7GiB",
        "evacuate": "false",
        "upstream": ["http://a:1", "http://b:1"],
        "slot_dir": "/s",
    }
    before = shown(load(given))
    for name, value, _ in before:
        if name not in SECRETS and value:
            monkeypatch.setenv(f"SLOTKEEPER_{name.upper()}", value)
    assert [row[:2] for row in shown(load({}))] == [row[:2] for row in before]


# -- refused values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("upstream", [], "at least one"),
        ("upstream", ["http://a:1", "http://a:1/"], "only once"),
        ("upstream", ["auto", "http://a:1"], "auto finds one engine"),
        ("listen", "8080", "HOST:PORT"),
        ("listen", "127.0.0.1:http", "HOST:PORT"),
        ("listen", "127.0.0.1:\u00b2", "is not HOST:PORT"),
        ("listen", "127.0.0.1:" + "9" * 5000, "is not HOST:PORT"),
        ("admin_listen", "127.0.0.1:70000", "HOST:PORT"),
        ("max_body_bytes", "0", "greater than 0"),
        ("max_body_bytes", "many", "as in 32GiB"),
        ("hot_bytes", "16GiBs", "as in 32GiB"),
        ("hot_bytes", "-1", "as in 32GiB"),
        ("evacuate", "perhaps", "neither true nor false"),
        ("drain_delay", "-1", "greater than or equal to 0"),
        ("drain_timeout", "soon", "not a number; write it as in 2.5"),
        ("idle_tokens", "some", "not a whole number; write it as in 500"),
        ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("namespaces", "xml", "'auto', 'key' or 'off'"),
    ],
)
def test_a_bad_value_is_refused_with_its_flag_and_what_to_write(name, value, hint):
    said = complaint({name: value})
    assert f"--{name.replace('_', '-')}: " in said
    assert hint in said


@pytest.mark.parametrize("listen", ["0.0.0.0:9090", ":9090", "[::]:9090", "example.org:9090"])
def test_an_admin_port_beyond_loopback_needs_a_token(listen):
    said = complaint({"admin_listen": listen})
    assert "--admin-token" in said
    assert "127.0.0.1" in said
    assert load({"admin_listen": listen, "admin_token": "x"}).settings.admin_token


def test_an_empty_token_counts_as_no_token(monkeypatch):
    """A compose file may set the variable to an empty value: it must not open the port."""
    monkeypatch.setenv("SLOTKEEPER_ADMIN_TOKEN", "")
    assert load({}).settings.admin_token is None
    assert "--admin-token" in complaint({"admin_listen": ":9090"})


@pytest.mark.parametrize("name", ["absent.toml", "."], ids=["missing", "folder"])
def test_a_config_that_is_no_file_is_named(name, tmp_path):
    assert complaint(config=tmp_path / name) == f"--config: there is no file {tmp_path / name}"


def test_a_config_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    config = toml(tmp_path, "drain_delay = 9.0\n")

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)  # not by its mode: root reads it all the same
    assert complaint(config=config) == (
        f"--config: {config}: Permission denied; give a file that this user can read"
    )


def test_a_config_file_that_is_not_toml_is_named(tmp_path):
    assert "slotkeeper.toml" in complaint(config=toml(tmp_path, "listen = \n"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lisen", "did you mean listen?"),
        ("hot-bytes", "did you mean hot_bytes?"),
        ("q", "--print-config lists them"),
        ("record-bytes", f"it was removed: {REMOVED_SETTINGS['record_bytes']}"),
    ],
)
def test_an_unknown_setting_in_a_file_is_refused_with_a_hint(name, hint, tmp_path):
    path = toml(tmp_path, f"{name} = 1\n")
    assert complaint(config=path) == f"{path}: {name}: there is no such setting; {hint}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SLOTKEEPER_LISTN", "SLOTKEEPER_LISTEN"),
        ("SLOTKEEPER_UPSTREAMS", "SLOTKEEPER_UPSTREAM"),
        ("SLOTKEEPER_ADMIN_TOKEN_FIEL", "SLOTKEEPER_ADMIN_TOKEN_FILE"),
        ("SLOTKEEPER_LOGLEVEL", "SLOTKEEPER_LOG_LEVEL"),
    ],
)
def test_a_misspelled_variable_is_refused_with_a_suggestion(name, meant, monkeypatch):
    monkeypatch.setenv(name, "x")
    assert complaint() == f"{name}: there is no such variable; did you mean {meant}?"


@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_variable_of_a_removed_setting_is_refused_and_says_what_holds_now(name, monkeypatch):
    monkeypatch.setenv(f"SLOTKEEPER_{name.upper()}", "off")
    assert complaint().endswith(f"there is no such variable; it was removed: {REMOVED_SETTINGS[name]}")


def test_no_removed_setting_is_a_setting():
    assert not set(REMOVED_SETTINGS) & set(Settings.model_fields)


@pytest.mark.parametrize(
    "name",
    [
        "SLOTKEEPER_SERVICE_HOST",
        "SLOTKEEPER_SERVICE_PORT_ADMIN",
        "SLOTKEEPER_PORT_9090_TCP_ADDR",
        "SLOTKEEPER_ADMIN_PORT",
        "SLOTKEEPER_ENGINE_PARENT",
        "SLOTKEEPER_IMAGE",
    ],
)
def test_a_variable_of_kubernetes_is_ignored(name, monkeypatch):
    """Kubernetes sets such variables for every Service, here for one that is called slotkeeper."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:9090")
    load({})


def test_an_error_names_the_setting_as_its_source_does(monkeypatch, tmp_path):
    path = toml(tmp_path, 'drain_delay = "soon"\n')
    monkeypatch.setenv("SLOTKEEPER_HOT_BYTES", "plenty")
    said = complaint({"listen": "x"}, path).splitlines()
    assert {line.rpartition(": ")[0] for line in said} == {
        "--listen",
        "SLOTKEEPER_HOT_BYTES",
        f"{path}: drain_delay",
    }


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "//"])
def test_an_engine_url_may_end_with_or_without_v1(tail):
    assert load({"upstream": [f"http://a:1{tail}"]}).settings.upstream == ("http://a:1",)
    assert load({"upstream": [f"http://a:1/llm{tail}"]}).settings.upstream == ("http://a:1/llm",)


@pytest.mark.parametrize("url", ["http://", "a:1", "http://a:x", "http://a:99999", "ftp://a", "http://a?x=1"])
def test_an_invalid_engine_url_is_refused(url):
    assert f"--upstream: {url!r} is not a URL; write http://HOST:PORT" in complaint({"upstream": [url]})


# -- addresses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:8080", "::1", 8080, True),
        (":8080", "0.0.0.0", 8080, False),  # noqa: S104 - read, not bound
        ("192.0.2.7:0", "192.0.2.7", 0, False),
    ],
)
def test_an_address_is_parsed_and_written_back_unchanged(text, host, port, loopback):
    address = Address.parse(text)
    assert (address.host, address.port, address.loopback) == (host, port, loopback)
    assert Address.parse(str(address)) == address

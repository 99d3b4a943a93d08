"""The compose files, merged by Compose: what they name exists, and fits the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from builds import needs_b10434
from containers import ROOT
from image.compose import BASE, FOLDER, NEEDED, OVERRIDES, VARIANTS, merged, read, seconds, services
from image.dockerfile import image
from slotkeeper.engine.child.launch import EngineKind, find_engine, recommended
from slotkeeper.engine.fingerprint import LAZY_SINCE
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.environment import PREFIX, SECRETS
from slotkeeper.settings import Settings

LOOPBACK = "127.0.0.1"


@pytest.fixture(params=VARIANTS, ids=lambda files: files[-1])
def parts(request) -> dict[str, dict[str, Any]]:
    return services(*request.param)


def mounts(service: dict[str, Any], kind: str) -> dict[str, str]:
    """Return target -> source."""
    return {mount["target"]: mount["source"] for mount in service["volumes"] if mount["type"] == kind}


def settings_in(env: dict[str, str]) -> dict[str, Any]:
    return {key.removeprefix(PREFIX).lower(): value for key, value in env.items() if key.startswith(PREFIX)}


# -- the files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", VARIANTS, ids=lambda files: files[-1])
def test_compose_accepts_the_files_without_a_warning(files):
    done = read(files)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_overrides_change_only_the_engine():
    base = services(BASE)
    for override in OVERRIDES:
        changed = services(BASE, override)
        assert {name for name in changed if changed[name] != base.get(name)} == {"engine"}


def test_every_mounted_folder_and_file_of_the_repository_exists(parts):
    sources = {source for part in parts.values() for source in mounts(part, "bind").values()}
    assert sources > {NEEDED["MODELS"]}
    for source in sources - {NEEDED["MODELS"]}:
        assert Path(source).is_relative_to(ROOT)
        assert Path(source).exists(), source


def test_images_are_pinned_and_all_engines_have_one_build():
    images = {part["image"] for files in VARIANTS for part in services(*files).values()} - {"slotkeeper"}
    assert all(re.search(r":[\w-]*\d", name) for name in images)
    assert len({name.rpartition("-")[2] for name in images if "llama.cpp" in name}) == 1


def test_the_example_env_file_lists_every_variable_with_its_default():
    text = "".join((FOLDER / file).read_text("utf-8") for file in (BASE, *OVERRIDES))
    used = dict(re.findall(r"\$\{(\w+)(?::-([^}]*))?", text))
    example = (FOLDER / ".env.example").read_text("utf-8")
    shown = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, re.MULTILINE))
    assert set(shown) - {"COMPOSE_FILE", "COMPOSE_PROFILES"} == set(used)
    for name, default in used.items():
        assert default in {"", shown[name]}, name


# -- the sidecar ---------------------------------------------------------------------------------------


def test_variables_of_the_sidecar_are_settings(parts):
    given = settings_in(parts["slotkeeper"]["environment"])
    files = {f"{name}_file" for name in SECRETS}
    assert set(given) <= {*Settings.model_fields, *files}
    values = {name.removesuffix("_file"): value for name, value in given.items()}
    assert Settings(**values).upstream == (f"http://engine:{port_of(parts['engine'])}",)


def test_the_grace_period_covers_running_answers_and_saves(parts):
    given = settings_in(parts["slotkeeper"]["environment"])
    settings = Settings(**{name: value for name, value in given.items() if "drain" in name or "save" in name})
    longest = settings.drain_delay + settings.drain_timeout + settings.save_timeout
    assert seconds(parts["slotkeeper"]["stop_grace_period"]) > longest


def test_the_sidecar_ends_before_the_engine(parts):
    assert set(parts["slotkeeper"]["depends_on"]) == {"engine"}


def test_the_health_check_equals_that_of_the_image(parts):
    assert parts["slotkeeper"]["healthcheck"]["test"] == ["CMD", *image().health]


# -- the engine ----------------------------------------------------------------------------------------


@needs_b10434
def test_the_engines_flags_equal_those_of_up_but_its_own_default_of_checkpoints(parts):
    engine = parts["engine"]
    binary = find_engine(EngineKind.SKULK)
    advised = recommended(
        binary.known,
        port=port_of(engine),
        slot_dir=Path(parts["slotkeeper"]["environment"]["SLOTKEEPER_SLOT_DIR"]),
        eager_thinning=int(engine["image"].rpartition("-b")[2]) < LAZY_SINCE,
        checkpoints=EngineFlags().checkpoint_cap,  # what fits depends on the model and the machine
    )
    advised[advised.index("--host") + 1] = "0.0.0.0"  # noqa: S104 - in the container
    assert engine["command"] == ["--model", f"/models/{NEEDED['MODEL']}", *advised]
    assert {word for word in engine["command"] if word.startswith("-")} <= binary.known


def test_the_engine_and_the_sidecar_share_slots_and_models_as_the_same_user(parts):
    sidecar, engine = parts["slotkeeper"], parts["engine"]
    assert mounts(sidecar, "volume") == mounts(engine, "volume")
    assert mounts(sidecar, "volume") == {sidecar["environment"]["SLOTKEEPER_SLOT_DIR"]: "slots"}
    assert mounts(sidecar, "bind")["/models"] == mounts(engine, "bind")["/models"]
    assert sidecar["user"] == engine["user"] == image().user


def test_only_the_sidecar_reaches_the_engine(parts):
    assert set(parts["engine"]["networks"]) == {"engine"}
    assert merged(BASE)["networks"]["engine"]["internal"]
    assert [name for name, part in parts.items() if "engine" in part["networks"]] == ["engine", "slotkeeper"]
    assert "ports" not in parts["engine"]


def port_of(engine: dict[str, Any]) -> int:
    words = engine["command"]
    return int(words[words.index("--port") + 1])


# -- all of them ---------------------------------------------------------------------------------------


def test_containers_have_no_more_privileges_than_they_need(parts):
    for name, part in parts.items():
        assert part["read_only"], name
        assert part["cap_drop"] == ["ALL"], name
        assert part["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "pid", "network_mode"} & set(part), name
        assert {port["host_ip"] for port in part.get("ports", ())} <= {LOOPBACK}, name
        assert part["healthcheck"]["test"], name


def test_prometheus_scrapes_the_sidecar_with_its_token(parts):
    prometheus, sidecar = parts["prometheus"], parts["slotkeeper"]
    folder = ROOT / "grafana" / "prometheus"
    assert mounts(prometheus, "bind") == {"/etc/prometheus": str(folder)}
    (config,) = (word.partition("=")[2] for word in prometheus["command"] if "--config.file" in word)
    (job,) = yaml.safe_load((folder / Path(config).name).read_text("utf-8"))["scrape_configs"]
    token = sidecar["environment"]["SLOTKEEPER_ADMIN_TOKEN_FILE"]
    _, _, admin_port = sidecar["environment"]["SLOTKEEPER_ADMIN_LISTEN"].rpartition(":")
    assert job["static_configs"] == [{"targets": [f"slotkeeper:{admin_port}"]}]
    assert job["authorization"]["credentials_file"] == token
    for part in (prometheus, sidecar):
        assert [f"/run/secrets/{secret['source']}" for secret in part["secrets"]] == [token]


def test_grafana_finds_its_dashboard_and_prometheus(parts):
    grafana = parts["grafana"]
    inside = mounts(grafana, "bind")
    provisioning = Path(inside["/etc/grafana/provisioning"])
    providers = yaml.safe_load((provisioning / "dashboards" / "slotkeeper.yaml").read_text("utf-8"))
    (folder,) = (provider["options"]["path"] for provider in providers["providers"])
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder
    assert (Path(inside[folder]) / home.name).is_file()
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text("utf-8"))
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]

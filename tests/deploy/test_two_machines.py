"""docker/compose.fleet.yaml: its additions to compose.yaml, and that its parts fit together."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from containers import ROOT
from deploy.manifests import rendered
from deploy.test_fleet import OF_THE_STORE
from fleet.parts import found
from image import compose
from image.compose import BASE, FOLDER, seconds
from slotkeeper.environment import PREFIX, SECRETS
from slotkeeper.settings import Settings

GIVEN = {
    "COLD_STORE": "s3://bucket/fleet",
    "VALKEY": "192.168.1.10",
    "GATEWAY": "192.168.1.10",
    "VALKEY_PASSWORD": "word",
    "BIND": "192.168.1.10",
}


FILES = (BASE, "compose.fleet.yaml")


@pytest.fixture
def services() -> dict[str, Any]:
    return compose.services(*FILES, **GIVEN)


@pytest.mark.parametrize("missing", [name for name in GIVEN if name != "BIND"])
def test_compose_names_each_missing_variable(missing):
    done = compose.read(FILES, **{name: value for name, value in GIVEN.items() if name != missing})
    assert done.returncode != 0
    assert missing in done.stderr


def test_variables_of_the_sidecar_are_settings_or_of_the_shared_store(services):
    known = {*Settings.model_fields, *(f"{name}_file" for name in SECRETS)}
    given = services["slotkeeper"]["environment"]
    names = {name.removeprefix(PREFIX).lower() for name in given if name.startswith(PREFIX)}
    assert names <= known
    assert names >= OF_THE_STORE - {"cold_store_bytes"}
    hints = services["slotkeeper"]["environment"][f"{PREFIX}HINTS"]
    assert hints == f"redis://:{GIVEN['VALKEY_PASSWORD']}@{GIVEN['VALKEY']}:6379/0"
    (port,) = services["valkey"]["ports"]
    assert (port["host_ip"], str(port["published"])) == (GIVEN["BIND"], "6379")


def test_gateway_and_valkey_are_hardened_and_run_only_in_their_profile(services):
    for name in ("gateway", "valkey"):
        part = services[name]
        assert part["profiles"] == ["gateway"]
        assert part["read_only"] is True
        assert part["cap_drop"] == ["ALL"]
        assert part["security_opt"] == ["no-new-privileges:true"]


def test_images_and_grace_periods_equal_those_of_kubernetes(services):
    fleet = rendered("fleet")
    for service, app in (("gateway", "fleet-gateway"), ("valkey", "valkey")):
        pod = fleet.one("Deployment", app)["spec"]["template"]["spec"]
        assert services[service]["image"] == pod["containers"][0]["image"]
    grace = fleet.one("Deployment", "fleet-gateway")["spec"]["template"]["spec"][
        "terminationGracePeriodSeconds"
    ]
    assert seconds(services["gateway"]["stop_grace_period"]) == grace


def test_haproxy_accepts_the_example_of_the_servers_file(services):
    mounted = {each["target"]: each["source"] for each in services["gateway"]["volumes"]}
    assert mounted["/etc/fleet/haproxy.cfg"] == str(ROOT / "deploy" / "fleet" / "haproxy.cfg")
    example = FOLDER / "servers.cfg.example"
    words = [found("haproxy"), "-f", mounted["/etc/fleet/haproxy.cfg"], "-f", str(example), "-c"]
    env = {**os.environ, **services["gateway"]["environment"]}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

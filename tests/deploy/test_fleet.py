"""The fleet of deploy/k8s/fleet: valid objects that agree with each other, and with their configurations."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from containers import ROOT
from deploy.manifests import K8S, Manifests, rendered, selects
from deploy.pod_security import violations
from deploy.test_manifests import ENGINE_END
from fleet.parts import found
from slotkeeper.api.document import SESSION_HEADERS
from slotkeeper.environment import PREFIX, SECRETS
from slotkeeper.settings import Settings

FLEET = K8S / "fleet"
OF_THE_STORE = {"cold_store", "cold_store_bytes", "store_key_file", "hints"}
APPS = ("fleet-gateway", "valkey")


@pytest.fixture
def fleet() -> Manifests:
    return rendered("fleet")


def deployment(fleet: Manifests, name: str) -> Any:
    return fleet.one("Deployment", name)["spec"]["template"]


def policy(fleet: Manifests, name: str) -> Any:
    return fleet.one("NetworkPolicy", name)["spec"]


def labels_of(fleet: Manifests) -> dict[str, dict[str, str]]:
    """Return app -> the labels of its pods."""
    return {
        "slotkeeper": fleet.template["metadata"]["labels"],
        **{name: deployment(fleet, name)["metadata"]["labels"] for name in APPS},
    }


def test_every_pod_meets_the_restricted_standard(fleet):
    for spec in (fleet.pod, *(deployment(fleet, name)["spec"] for name in APPS)):
        assert violations(spec) == []
        assert spec["automountServiceAccountToken"] is False
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in containers)


def test_every_selector_matches_the_pods_of_one_app(fleet):
    labels = labels_of(fleet)
    selectors = {
        "Service fleet": (fleet.one("Service", "fleet")["spec"]["selector"], "fleet-gateway"),
        "Service valkey": (fleet.one("Service", "valkey")["spec"]["selector"], "valkey"),
        "Service pods": (fleet.one("Service", "slotkeeper-pods")["spec"]["selector"], "slotkeeper"),
        "budget": (
            fleet.one("PodDisruptionBudget", "fleet-gateway")["spec"]["selector"]["matchLabels"],
            "fleet-gateway",
        ),
        "budget of pods": (
            fleet.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
            "slotkeeper",
        ),
        **{
            f"policy {name}": (policy(fleet, name)["podSelector"]["matchLabels"], name)
            for name in ("slotkeeper", *APPS)
        },
        "policy of the store": (
            policy(fleet, "slotkeeper-store")["podSelector"]["matchLabels"],
            "slotkeeper",
        ),
    }
    for what, (selector, app) in selectors.items():
        assert [name for name in labels if selects(selector, labels[name])] == [app], what


def test_network_policies_allow_exactly_the_needed_connections(fleet):
    """Each connection is allowed at both ends, and only the gateway reaches the sidecars' data port."""
    labels, ports = labels_of(fleet), {"slotkeeper": "data", "valkey": "redis"}

    def peers(rules: list[Any], side: str, port: str | int) -> set[str]:
        found = set()
        for rule in rules:
            if port in {each["port"] for each in rule["ports"]}:
                for peer in rule.get(side, ()):
                    selector = peer.get("podSelector", {}).get("matchLabels", {})
                    found |= {name for name in labels if selects(selector, labels[name])}
        return found

    assert peers(policy(fleet, "slotkeeper")["ingress"], "from", ports["slotkeeper"]) == {"fleet-gateway"}
    assert peers(policy(fleet, "valkey")["ingress"], "from", ports["valkey"]) == {"slotkeeper"}
    assert peers(policy(fleet, "fleet-gateway")["egress"], "to", "data") == {"slotkeeper"}
    assert peers(policy(fleet, "slotkeeper")["egress"], "to", 6379) == {"valkey"}
    assert "egress" not in policy(fleet, "valkey")
    for name in APPS:
        assert policy(fleet, name)["policyTypes"] == ["Ingress", "Egress"]


def test_every_variable_of_the_sidecar_is_a_setting(fleet):
    known = {*Settings.model_fields, *(f"{name}_file" for name in SECRETS)}
    names = {name.removeprefix(PREFIX).lower() for name in fleet.env_of_maps("slotkeeper")}
    assert names <= known
    assert names >= OF_THE_STORE
    assert "cold_dir" not in names


def test_hints_and_store_have_the_addresses_and_mounts_of_the_settings(fleet):
    env = fleet.env_of_maps("slotkeeper")
    host, port = re.fullmatch(r"redis://(\w+):(\d+)/0", env[f"{PREFIX}HINTS"]).groups()
    (service_port,) = fleet.one("Service", host)["spec"]["ports"]
    assert service_port["port"] == int(port)
    mounts = fleet.mounts("slotkeeper")
    key = env[f"{PREFIX}STORE_KEY_FILE"]
    assert mounts[key.rpartition("/")[0]] == "store-key"
    assert "/cold" not in mounts
    volumes = {volume["name"] for volume in fleet.pod["volumes"]}
    assert set(mounts.values()) <= volumes
    assert "volumeClaimTemplates" not in fleet.one("StatefulSet")["spec"]


@pytest.mark.parametrize(
    ("file", "form"), [("haproxy.cfg", r"req\.hdr\(([\w-]+)\)"), ("nginx.conf", r"\$http_(\w+) ")]
)
def test_gateways_read_the_headers_that_name_a_conversation_in_the_order_of_sidecars(file, form):
    """Otherwise the turns of a conversation come to several sidecars."""
    text = (ROOT / "deploy" / "fleet" / file).read_text("utf-8")
    found = [name.lower().replace("_", "-") for name in re.findall(form, text)]
    names = list(dict.fromkeys(name.replace("_", "-") for name in SESSION_HEADERS))
    assert list(dict.fromkeys(found))[: len(names)] == names


def test_the_grace_periods_cover_all_steps_of_the_shutdown(fleet):
    steps = sum(
        float(fleet.env_of_maps("slotkeeper")[f"{PREFIX}{name}"])
        for name in ("DRAIN_DELAY", "DRAIN_TIMEOUT", "SAVE_TIMEOUT")
    )
    assert fleet.pod["terminationGracePeriodSeconds"] >= steps + ENGINE_END
    config = (ROOT / "deploy" / "fleet" / "haproxy.cfg").read_text("utf-8")
    minutes = int(re.search(r"hard-stop-after (\d+)m", config)[1])
    assert deployment(fleet, "fleet-gateway")["spec"]["terminationGracePeriodSeconds"] >= 60 * minutes + 10


def test_the_gateway_lists_each_pod_that_may_start(fleet):
    lines = re.findall(r'server (pod\d+) "(slotkeeper-\d+)\.([\w-]+)\.', servers(fleet))
    most = fleet.one("HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    assert [pod for _, pod, _ in lines] == [f"slotkeeper-{n}" for n in range(most)]
    assert {service for *_, service in lines} == {fleet.one("StatefulSet")["spec"]["serviceName"]}
    assert fleet.one("Service", "slotkeeper-pods")["spec"]["publishNotReadyAddresses"] is True


def test_haproxy_accepts_the_mounted_configuration(fleet, tmp_path):
    data = next(each["data"] for each in fleet.all("ConfigMap") if "servers.cfg" in each["data"])
    (container,) = deployment(fleet, "fleet-gateway")["spec"]["containers"]
    for name, text in data.items():
        (tmp_path / name).write_text(text, "utf-8")
    words = [word.replace("/etc/fleet", str(tmp_path)) for word in container["args"][1:]]
    env = {"FLEET_BIND": "*:8080", "FLEET_DOMAIN": "default.svc.cluster.local"}
    done = subprocess.run(
        [found("haproxy"), *words, "-c"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    given = {each["name"] for each in container["env"]}
    assert given >= env.keys()


def servers(fleet: Manifests) -> str:
    return next(
        each["data"]["servers.cfg"] for each in fleet.all("ConfigMap") if "servers.cfg" in each["data"]
    )


def test_the_autoscaler_uses_documented_metrics(fleet):
    metrics = [
        each["pods"]["metric"]["name"] for each in fleet.one("HorizontalPodAutoscaler")["spec"]["metrics"]
    ]
    rules = yaml.safe_load((FLEET / "prometheus-adapter.yaml").read_text("utf-8"))["rules"]["custom"]
    assert [rule["name"]["as"] for rule in rules] == metrics
    there = set(re.findall(r"`(slotkeeper_\w+)`", (ROOT / "docs" / "reference.md").read_text("utf-8")))
    used = {name for rule in rules for name in re.findall(r"slotkeeper_\w+(?={)", rule["metricsQuery"])}
    assert len(used) == 3
    assert used <= there

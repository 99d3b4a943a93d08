"""The Helm chart has the objects of the kustomizations, and uses all of its values."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from containers import ROOT
from deploy.charts import CHART, RefusedError, comparable, release
from deploy.manifests import OVERLAYS, Manifests, rendered, selects
from deploy.pod_security import violations
from deploy.test_documented_patches import applied
from deploy.test_manifests import MONITOR, RULES, VERSIONS
from pages import shown
from scripts import loaded
from slotkeeper import __version__
from slotkeeper.environment import PREFIX
from slotkeeper.settings import Settings

DEFAULTS: Final = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
STORE: Final = {"url": "s3://bucket/prefix", "secret": "s3", "keySecret": "store-key", "port": 9000}
# Every value, each unlike its default and all others.
ALL: Final[Mapping[str, Any]] = {
    "accelerator": "vulkan",
    "replicas": 3,
    "image": {"repository": "registry/sidecar", "tag": "tag-1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull-secret"}],
    "engine": {
        "image": {"repository": "registry/engine", "tag": "tag-2", "pullPolicy": "IfNotPresent"},
        "model": "/models/other.gguf",
        "slots": 5,
        "contextTokens": 1048576,
        "checkpoints": 17,
        "env": {"LLAMA_ARG_CACHE_RAM": 16384},
        "resources": {"requests": {"memory": "61Gi"}, "limits": {"gpu.intel.com/i915": 1}},
        "startMinutes": 45,
    },
    "settings": {"SLOTKEEPER_EVACUATE": False, "SLOTKEEPER_HOT_BYTES": "32GiB"},
    "resources": {"requests": {"memory": "18Gi"}, "limits": {"memory": "71Gi"}},
    "adminSecret": "admin-secret",
    "storage": {
        "models": {"size": "101Gi", "storageClassName": "class-1", "accessModes": ["ReadWriteMany"]},
        "hot": {"inMemory": True, "sizeLimit": "64Gi"},
        "cold": {"size": "102Gi", "storageClassName": "class-2"},
    },
    "terminationGracePeriodSeconds": 600,
    "supplementalGroups": [44, 109],
    "nodeSelector": {"node": "gpu"},
    "tolerations": [{"key": "toleration", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "runtimeClassName": "runtime-class",
    "priorityClassName": "priority-class",
    "podAnnotations": {"note": "annotation"},
    "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 4318}]}]},
    "ingress": {
        "enabled": True,
        "className": "ingress-class",
        "annotations": {"buffering": "off"},
        "host": "llm.example.com",
        "tlsSecret": "tls-secret",
    },
    "metrics": {
        "namespace": "observability",
        "serviceMonitor": True,
        "prometheusRule": True,
        "dashboard": True,
        "labels": {"release": "operator"},
        "dashboardLabels": {"grafana_board": "yes"},
    },
    "fullnameOverride": "other-name",
}
# What excludes values above.
CLAIM: Final = {"storage": {"models": {"existingClaim": "my-claim"}}}


generate: Final = loaded(CHART.parent / "generate.py")


def leaves(value: Any) -> Iterator[Any]:
    match value:
        case dict():
            for each in value.values():
                yield from leaves(each)
        case list():
            for each in value:
                yield from leaves(each)
        case bool():
            pass  # its effect is an object, or none
        case _:
            yield value


def keys(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Return the dotted names of values."""
    found = set()
    for key, value in values.items():
        found |= keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}"}
    return found


# -- generated files -----------------------------------------------------------------------------------


def test_generated_files_equal_the_kustomizations():
    assert generate.main(["--check"]) == 0, "run `python deploy/k8s/helm/generate.py`"


def test_a_stale_file_is_detected_and_repaired(tmp_path, capsys):
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    stale = chart / "templates" / "statefulset.yaml"
    stale.write_text(stale.read_text("utf-8").replace("restartPolicy: Always", ""), "utf-8")
    assert generate.main(["--check"], chart) == 1
    assert "statefulset.yaml" in capsys.readouterr().err
    assert generate.main([], chart) == 0
    assert stale.read_text("utf-8") == (CHART / "templates" / "statefulset.yaml").read_text("utf-8")


@pytest.mark.parametrize("text", ["replicas: 2", "replicas: 1\nreplicas: 1"])
def test_a_place_of_a_value_that_is_gone_or_ambiguous_is_an_error(text):
    with pytest.raises(ValueError, match="replicas"):
        generate.edited(text, r"replicas: 1$", "{{ .Values.replicas }}")


# -- the same objects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_accelerator_has_the_objects_of_its_overlay(overlay):
    chart = release({"accelerator": overlay.rpartition("/")[2]})
    assert comparable(chart.manifests) == comparable(rendered(overlay))


def test_without_values_the_chart_is_the_overlay_for_cpus():
    assert comparable(release().manifests) == comparable(rendered("overlays/cpu"))


def test_values_for_what_the_example_changes_have_its_objects():
    values = {
        "accelerator": "cuda",
        "engine": {"model": "/models/Qwen3-Coder-30B-A3B-Q4_K_M.gguf", "contextTokens": 131072},
        "storage": {
            "models": {"storageClassName": "standard"},
            "hot": {"inMemory": True},
            "cold": {"storageClassName": "standard"},
        },
        "metrics": {"serviceMonitor": True, "prometheusRule": True},
    }
    assert comparable(release(values).manifests) == comparable(rendered("example"))


def test_values_for_a_gpu_of_intel_have_the_objects_of_the_documented_patch(tmp_path):
    first, more = shown("docs/kubernetes.md", "AMD and Intel", "yaml")
    values = {
        "accelerator": "vulkan",
        "supplementalGroups": [44, 109],
        "tolerations": [],
        "engine": {"resources": {"limits": {"gpu.intel.com/i915": 1}}},
    }
    patched = comparable(applied(first + more, tmp_path))
    patched["StatefulSet", "slotkeeper"]["spec"]["template"]["spec"].pop("tolerations")  # empty
    assert comparable(release(values).manifests) == patched


# -- values --------------------------------------------------------------------------------------------


def checked(manifests: Manifests) -> None:
    """Hold objects to the schemas of Kubernetes, to its security standard, and to our settings."""
    for each in manifests.objects:
        if each["kind"] not in {MONITOR, RULES}:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)
    for each in manifests.all("StatefulSet"):
        assert violations(each["spec"]["template"]["spec"]) == []
    for each in manifests.all("ConfigMap"):
        names = {key.removeprefix(PREFIX).lower() for key in each["data"] if key.startswith(PREFIX)}
        assert names <= {*Settings.model_fields, "admin_token_file", "store_key_file"}


@pytest.mark.parametrize("values", [{}, ALL, CLAIM, {"store": STORE}], ids=["none", "all", "claim", "store"])
def test_objects_are_valid_and_helm_finds_no_fault(values):
    chart = release(values)
    checked(chart.manifests)
    assert [each for each in chart.findings if "icon" not in each["error"]] == []


def test_every_value_is_in_the_objects():
    given = keys(ALL) | keys(CLAIM) | keys({"store": STORE}) | {"store.bytes"}
    known = {key.removesuffix(".grafana_dashboard") for key in keys(DEFAULTS)}
    assert [key for key in known if not any(f"{each}.".startswith(f"{key}.") for each in given)] == []
    for values in (ALL, CLAIM, {"store": STORE}):
        text = "".join(release(values).files.values())
        expected = [45 * 12 if leaf == 45 else leaf for leaf in leaves(values)]  # minutes -> probes of 5 s
        expected = [leaf for leaf in expected if leaf != "vulkan"]  # the other values replace its own
        assert [leaf for leaf in expected if str(leaf) not in text] == []


def test_the_schema_has_exactly_the_values():
    def known(schema: Mapping[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for key, value in schema.get("properties", {}).items():
            found |= known(value, f"{prefix}{key}.") or {f"{prefix}{key}"}
        return found

    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    free = {"metrics.dashboardLabels.grafana_dashboard": "metrics.dashboardLabels"}
    ours = {free.get(key, key) for key in keys(DEFAULTS)}
    requests = {f"{where}resources.{what}" for where in ("", "engine.") for what in ("requests", "limits")}
    assert known(schema) == (ours - {"resources", "engine.resources"}) | requests | {"global"}


def test_every_value_has_a_comment():
    lines = (CHART / "values.yaml").read_text("utf-8").splitlines()
    pairs = list(itertools.pairwise(lines))
    described = [line for before, line in pairs if before.lstrip().startswith("#")]
    assert [line for line in lines if re.match(r" *\w+: .", line) and line not in described] == []


@pytest.mark.parametrize(
    "values",
    [{"accelerator": "metal"}, {"replica": 1}, {"engine": {"slots": 0}}, {"ingress": {"enabled": True}}],
    ids=str,
)
def test_a_wrong_value_is_refused(values):
    with pytest.raises(RefusedError, match=next(iter(values))):
        release(values)


def test_false_and_large_numbers_arrive_as_they_are():
    chart = release({"settings": {"SLOTKEEPER_EVACUATE": False}, "engine": {"contextTokens": 1048576}})
    assert chart.manifests.env("slotkeeper")["SLOTKEEPER_EVACUATE"] == "false"
    assert chart.manifests.env("engine")["CTX_SIZE"] == "1048576"


def test_a_change_of_a_setting_replaces_the_pods():
    one, other = (
        release({"engine": {"slots": slots}}).manifests.template["metadata"]["annotations"]
        for slots in (2, 3)
    )
    assert one.keys() == other.keys()
    assert one != other


def test_two_releases_in_a_namespace_share_no_object_and_no_pod():
    one, other = (release({"metrics": {"dashboard": True}}, name=name).manifests for name in ("one", "other"))
    named = [{(each["kind"], each["metadata"]["name"]) for each in both.objects} for both in (one, other)]
    assert named[0].isdisjoint(named[1])
    (pods,) = (each["spec"]["template"]["metadata"]["labels"] for each in other.all("StatefulSet"))
    for service in one.all("Service"):
        assert not selects(service["spec"]["selector"], pods)


def test_a_store_in_the_cluster_replaces_the_cold_volumes():
    manifests = release({"store": STORE}).manifests
    env = manifests.env_of_maps("slotkeeper")
    assert {key: value for key, value in env.items() if "STORE" in key or "COLD" in key} == {
        "SLOTKEEPER_COLD_STORE": STORE["url"],
        "SLOTKEEPER_COLD_STORE_BYTES": DEFAULTS["store"]["bytes"],
        "SLOTKEEPER_STORE_KEY_FILE": "/run/secrets/store/key",
    }
    assert "volumeClaimTemplates" not in manifests.one("StatefulSet")["spec"]
    assert "/cold" not in manifests.mounts("slotkeeper")
    assert manifests.mounts("slotkeeper")["/run/secrets/store"] == "store-key"
    assert {"secretRef": {"name": STORE["secret"]}} in manifests.container("slotkeeper")["envFrom"]
    store, dns = manifests.one("NetworkPolicy")["spec"]["egress"]
    assert store == {"ports": [{"port": STORE["port"]}]}
    assert {port["port"] for port in dns["ports"]} == {53}


def test_the_dashboard_is_the_one_of_grafana():
    manifests = release({"metrics": {"dashboard": True}}).manifests
    board = manifests.one("ConfigMap", "slotkeeper-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["data"]["slotkeeper.json"] == (ROOT / "grafana/dashboards/slotkeeper.json").read_text(
        "utf-8"
    )


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_notes_name_the_secret_the_claim_and_the_address():
    notes = release().notes
    for words in ("slotkeeper-admin", "claim slotkeeper-models", "http://slotkeeper.slotkeeper:8080"):
        assert words in notes
    assert "https://llm.example.com" in release(ALL).notes


# -- with the documents --------------------------------------------------------------------------------


def test_the_documented_command_installs_what_it_says():
    command, more = shown("docs/kubernetes.md", "With Helm", "console")
    program, verb, name, chart, *words = shlex.split(command.removeprefix("$ ").replace("\\\n", ""))
    assert (program, verb, ROOT / chart) == ("helm", "install", CHART)
    assert words[:2] == ["--namespace", "slotkeeper"]
    sets = [*words[2:], *shlex.split(more)]
    assert set(sets[::2]) == {"--set"}
    manifests = release(sets=sets[1::2], name=name).manifests
    checked(manifests)
    assert manifests.env("engine")["CTX_SIZE"] == "131072"
    assert {"medium": "Memory", "sizeLimit": "32Gi"} in [
        each.get("emptyDir") for each in manifests.pod["volumes"]
    ]
    assert manifests.all(MONITOR)
    assert manifests.all(RULES)
    assert manifests.one("ConfigMap", "slotkeeper-dashboard")
    assert manifests.one("NetworkPolicy")["spec"]["egress"][0] == {"ports": [{"port": 9000}]}

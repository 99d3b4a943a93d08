"""The objects are valid, agree with each other, and with Slotkeeper and the engine."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from containers import ROOT
from deploy.manifests import (
    ENTRYPOINTS,
    INSTALLATIONS,
    K8S,
    OVERLAYS,
    Manifests,
    rendered,
    selects,
    size,
    written,
)
from programs import program
from slotkeeper import __version__
from slotkeeper.engine.child.launch import CONTEXT_TOKENS, SLOTS, EngineKind, find_engine, recommended
from slotkeeper.engine.fingerprint import LAZY_SINCE
from slotkeeper.engine.flags import EngineFlags
from slotkeeper.environment import PREFIX, SECRETS
from slotkeeper.settings import Settings
from slotkeeper.values import Address

NATIVE_SIDECARS = "1.29"  # the first release in which they are on by default
ENGINE_END = 30  # seconds from SIGTERM to the end of an idle engine, with a large margin
MONITOR, RULES = "ServiceMonitor", "PrometheusRule"  # the operator's own kinds: no schema is at hand
VERSIONS = (NATIVE_SIDECARS, kubernetes_validate.latest_version())


def setting(manifests: Manifests, name: str) -> str:
    return manifests.env("slotkeeper")[PREFIX + name.upper()]


def volume_of(manifests: Manifests, container: str, path: str) -> str:
    return next(
        volume
        for mount, volume in manifests.mounts(container).items()
        if path == mount or path.startswith(f"{mount}/")
    )


def tag(manifests: Manifests, container: str) -> str:
    return manifests.container(container)["image"].rpartition(":")[2]


# -- each object ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("installation", [*INSTALLATIONS, "fleet"])
def test_every_object_is_valid(installation: str, version: str):
    for each in rendered(installation).objects:
        if each["kind"] not in {MONITOR, RULES}:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_loader_is_valid_and_fills_the_volume_of_the_models(manifests: Manifests):
    (loader,) = written(K8S / "loader.yaml")
    kubernetes_validate.validate(loader, VERSIONS[-1], strict=True)
    (volume,) = loader["spec"]["volumes"]
    claim = manifests.volumes()["models"]["persistentVolumeClaim"]["claimName"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    assert loader["spec"]["containers"][0]["image"] == manifests.container("slotkeeper")["image"]
    (near,) = loader["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert selects(near["labelSelector"]["matchLabels"], manifests.template["metadata"]["labels"])


def test_every_kustomization_is_an_installation_or_used_by_one():
    used = {path.resolve() for path in K8S.rglob("kustomization.yaml")}
    seen, todo = set(), [K8S / "example", K8S / "fleet", *(K8S / "overlays").iterdir()]
    while todo:
        path = (todo.pop() / "kustomization.yaml").resolve()
        seen.add(path)
        text = yaml.safe_load(path.read_text("utf-8"))
        names = [*text.get("resources", ()), *text.get("components", ())]
        todo += [path.parent / name for name in names if not name.endswith(".yaml")]
    assert seen - {(ROOT / "deploy" / "fleet" / "kustomization.yaml").resolve()} == used


# -- with each other -----------------------------------------------------------------------------------


def test_every_selector_matches_the_sidecars_pods(manifests: Manifests):
    labels = manifests.template["metadata"]["labels"]
    spec = manifests.one("StatefulSet")["spec"]
    assert selects(spec["selector"]["matchLabels"], labels)
    assert selects(manifests.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"], labels)
    assert selects(manifests.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"], labels)
    for service in manifests.all("Service"):
        assert selects(service["spec"]["selector"], labels)
    assert manifests.one("Service", spec["serviceName"])["spec"]["clusterIP"] == "None"


def test_every_named_port_is_a_port_of_the_pod(manifests: Manifests):
    ports = manifests.ports()
    for service in manifests.all("Service"):
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    rules = manifests.one("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for rule in rules for port in rule["ports"]] == ["data", "admin"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert manifests.container("slotkeeper")[name]["httpGet"]["port"] == "admin"


def test_every_mount_has_its_volume_and_every_volume_is_mounted(manifests: Manifests):
    volumes = manifests.volumes()
    mounted = {volume for name in ENTRYPOINTS for volume in manifests.mounts(name).values()}
    assert mounted == set(volumes)
    claims = {claim["metadata"]["name"] for claim in manifests.all("PersistentVolumeClaim")}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] in claims


def test_the_service_monitor_finds_the_admin_port_once_and_has_its_token():
    manifests = rendered("example")  # overlays have none, since not every cluster knows the kind
    monitor = manifests.one(MONITOR)
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"jobLabel", "selector", "endpoints"}
    found = [
        service["metadata"]["name"]
        for service in manifests.all("Service")
        if selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
    ]
    assert found == ["slotkeeper-pods"], "by two services each pod would be scraped twice"
    service = manifests.one("Service", found[0])
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "grafana" / "prometheus" / "alerts.yaml").read_text("utf-8")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) == {"port", "path", "interval", "authorization"}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == manifests.volumes()["admin"]["secret"]["secretName"]
    assert setting(manifests, "admin_token_file").rpartition("/")[2] == credentials["key"]


def test_the_operator_gets_the_rules_of_prometheus():
    """Recording rules and alerts as one object, as Prometheus reads them from its files."""
    rules = rendered("example").one(RULES)
    assert rules["apiVersion"] == "monitoring.coreos.com/v1"
    files = (ROOT / "grafana" / "prometheus" / f"{name}.yaml" for name in ("recording", "alerts"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text("utf-8"))["groups"]]
    assert rules["spec"] == {"groups": groups}


# -- with Slotkeeper -----------------------------------------------------------------------------------


def test_every_variable_is_a_setting(manifests: Manifests):
    files = {f"{name}_file" for name in SECRETS}
    names = {name.removeprefix(PREFIX).lower() for name in manifests.env("slotkeeper")}
    assert names <= {*Settings.model_fields, *files}
    # A Service called slotkeeper would add variables that look like settings.
    assert manifests.pod["enableServiceLinks"] is False


def test_the_engine_and_the_sidecar_share_slot_folder_and_models(manifests: Manifests):
    hot = volume_of(manifests, "slotkeeper", setting(manifests, "slot_dir"))
    engine = EngineFlags.parse(manifests.runs("engine").command)
    assert volume_of(manifests, "engine", str(engine.slot_save_path)) == hot
    assert "emptyDir" in manifests.volumes()[hot]
    for container in ENTRYPOINTS:
        assert volume_of(manifests, container, str(engine.model)) == "models"
    assert "runAsUser" in manifests.pod["securityContext"]
    for each in manifests.containers:
        assert "runAsUser" not in each["securityContext"], "slot files are for their owner alone"


def test_the_sidecars_ports_are_reachable_and_the_engines_port_is_not(manifests: Manifests):
    ports = manifests.ports()
    for name, port in (("listen", "data"), ("admin_listen", "admin")):
        address = Address.parse(setting(manifests, name))
        assert not address.loopback
        assert address.port == ports[port]
    engine = EngineFlags.parse(manifests.runs("engine").command)
    assert engine.host == "127.0.0.1"
    assert setting(manifests, "upstream") == engine.base


def test_volumes_have_room_for_their_byte_budgets(manifests: Manifests):
    bytes_of = TypeAdapter(ByteSize).validate_python
    hot, cold = (bytes_of(setting(manifests, f"{tier}_bytes")) for tier in ("hot", "cold"))
    volumes = manifests.volumes()
    assert size(volumes["hot"]["emptyDir"]["sizeLimit"]) >= 2 * hot, "a full one gets the pod evicted"
    claim: dict[str, Any] = volumes[volume_of(manifests, "slotkeeper", setting(manifests, "cold_dir"))]
    assert size(claim["spec"]["resources"]["requests"]["storage"]) >= hot + cold
    assert setting(manifests, "evacuate") == "true", "the hot volume goes with its pod"
    resources = manifests.container("slotkeeper")["resources"]
    if volumes["hot"]["emptyDir"].get("medium") == "Memory":
        assert size(resources["limits"]["memory"]) >= size(volumes["hot"]["emptyDir"]["sizeLimit"])


def test_the_grace_period_covers_all_steps_of_the_shutdown(manifests: Manifests):
    steps = [float(setting(manifests, name)) for name in ("drain_delay", "drain_timeout", "save_timeout")]
    assert manifests.pod["terminationGracePeriodSeconds"] >= sum(steps) + ENGINE_END
    assert [each["name"] for each in manifests.pod["containers"]] == ["slotkeeper"]
    (engine,) = manifests.pod["initContainers"]
    assert engine["restartPolicy"] == "Always", "it begins before the main container, and ends after it"


# -- with the engine -----------------------------------------------------------------------------------


def test_the_engine_has_the_flags_of_slotkeeper_up_but_its_own_default_of_checkpoints(manifests: Manifests):
    build = int(tag(manifests, "engine").rpartition("-b")[2])
    engine = EngineFlags.parse(manifests.runs("engine").command)
    assert engine.slot_save_path
    advised = recommended(
        find_engine(EngineKind.XLLAMACPP).known,
        port=engine.port,
        slot_dir=engine.slot_save_path,
        slots=engine.n_parallel or 0,
        context_tokens=engine.n_ctx // (engine.n_parallel or 1),
        eager_thinning=build < LAZY_SINCE,
        checkpoints=EngineFlags().checkpoint_cap,  # what fits depends on the model and the machine
    )
    assert manifests.runs("engine").command[1:] == (*advised, "--model", str(engine.model))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_have_the_slots_and_the_context_of_slotkeeper_up(overlay: str):
    engine = EngineFlags.parse(rendered(overlay).runs("engine").command)
    assert (engine.n_parallel, engine.n_ctx) == (SLOTS, SLOTS * CONTEXT_TOKENS)


def test_images_have_this_version_and_the_build_of_compose(manifests: Manifests):
    assert tag(manifests, "slotkeeper") == __version__
    (build,) = set(re.findall(r":-(b\d+)}", (ROOT / "docker" / "compose.yaml").read_text("utf-8")))
    assert tag(manifests, "engine").endswith(f"-{build}")
    entrypoint = re.search(
        r"^ENTRYPOINT (.+)$", (ROOT / "docker" / "Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    assert entrypoint
    assert yaml.safe_load(entrypoint[1]) == list(ENTRYPOINTS["slotkeeper"])


def test_a_release_names_the_image_as_the_manifests_do(tmp_path):
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    steps = release["jobs"]["image"]["steps"]
    (line,) = (step["run"] for step in steps if "GITHUB_ENV" in step.get("run", ""))
    env = {"GITHUB_REF_NAME": f"v{__version__}", "GITHUB_ENV": str(tmp_path / "env")}
    subprocess.run((program("bash"), "-e", "-c", line), env=env, check=True)
    name, _, version = (tmp_path / "env").read_text("utf-8").strip().partition("=")
    (pushed,) = (step["with"]["tags"] for step in steps if "tags" in step.get("with", {}))
    assert pushed.rpartition(":")[2] == f"${{{{ env.{name} }}}}"
    assert version == tag(rendered("example"), "slotkeeper")


GPUS = ("overlays/rocm", "overlays/vulkan")  # those whose devices belong to groups of the node


def test_images_and_devices_of_an_overlay_are_those_of_its_compose_file():
    for overlay in OVERLAYS:
        name = overlay.rpartition("/")[2]
        manifests = rendered(overlay)
        file = ROOT / "docker" / ("compose.yaml" if name == "cpu" else f"compose.{name}.yaml")
        image = yaml.safe_load(file.read_text("utf-8"))["services"]["engine"]["image"]
        assert manifests.container("engine")["image"] == re.sub(r"\$\{LLAMA_BUILD:-(b\d+)}", r"\1", image)
        limits = manifests.container("engine")["resources"].get("limits", {})
        assert bool(limits) == (name != "cpu"), overlay
        assert ("supplementalGroups" in manifests.pod["securityContext"]) == (overlay in GPUS)


# -- with the documents --------------------------------------------------------------------------------


def test_the_kubernetes_page_names_only_existing_paths_and_settings():
    text = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    paths = set(re.findall(r"\b(?:deploy/k8s|components)/[\w./-]*\w", text))
    assert len(paths) > len(OVERLAYS)
    assert [path for path in paths if not (K8S / path.removeprefix("deploy/k8s/")).exists()] == []
    variables = {name.removeprefix(PREFIX).lower() for name in re.findall(rf"{PREFIX}[A-Z_]+", text)}
    assert variables <= set(Settings.model_fields)


def test_the_kubernetes_page_has_the_times_of_the_manifests(manifests: Manifests):
    text = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    for name in ("drain_delay", "drain_timeout", "save_timeout"):
        assert re.search(rf"`{PREFIX}{name.upper()}`[^`]*?\b{setting(manifests, name)} s\b", text), name
    assert f"`terminationGracePeriodSeconds` ({manifests.pod['terminationGracePeriodSeconds']})" in text

"""The kustomizations that the pages show can be applied as they are, and change what they say."""

from __future__ import annotations

import os
from ipaddress import ip_network
from pathlib import Path

import kubernetes_validate
import pytest

from deploy.manifests import K8S, Manifests, rendered
from deploy.test_manifests import VERSIONS
from pages import shown
from slotkeeper.environment import PREFIX
from slotkeeper.settings import Settings

# What clusters usually give to pods: kubeadm with Flannel, k3s, Calico, EKS in a VPC, GKE and EKS with
# shared address space, Docker Desktop, and IPv6.
PODS = (
    "10.244.0.0/16",
    "10.42.0.0/16",
    "192.168.0.0/16",
    "172.31.0.0/16",
    "100.64.0.0/10",
    "fd00:10:244::/56",
)


def applied(text: str, folder: Path) -> Manifests:
    """Render a kustomization that a page shows, as if its folder were in deploy/k8s."""
    here = os.path.relpath(K8S, folder.resolve())
    (folder / "kustomization.yaml").write_text(text.replace("[../", f"[{here}/"), "utf-8")
    manifests = rendered(folder)
    for each in manifests.objects:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    return manifests


@pytest.mark.parametrize("overlay", ["vulkan", "rocm"])
def test_the_patch_for_the_groups_of_a_gpu_replaces_them(overlay, tmp_path):
    first, *_ = shown("docs/kubernetes.md", "AMD and Intel", "yaml")
    assert "[../overlays/vulkan]" in first
    manifests = applied(first.replace("/vulkan]", f"/{overlay}]"), tmp_path)
    assert manifests.pod["securityContext"]["supplementalGroups"] == [44, 109]
    assert manifests.container("engine")["resources"]["limits"] == {"amd.com/gpu": 1}


def test_the_patch_for_intel_replaces_the_device_and_the_toleration(tmp_path):
    first, more = shown("docs/kubernetes.md", "AMD and Intel", "yaml")
    manifests = applied(first + more, tmp_path)
    assert manifests.container("engine")["resources"]["limits"] == {"gpu.intel.com/i915": 1}
    assert "amd.com" not in str(manifests.objects)


def test_the_patch_for_a_fleet_sets_bucket_proxies_and_the_port_of_the_store(tmp_path):
    (text,) = shown("docs/scaling.md", "Kubernetes", "yaml")
    plain, patched = rendered("fleet"), applied(text, tmp_path)
    (rule,) = plain.one("NetworkPolicy", "slotkeeper-store")["spec"]["egress"]
    assert rule == {"ports": [{"port": 443}]}
    (rule,) = patched.one("NetworkPolicy", "slotkeeper-store")["spec"]["egress"]
    assert rule == {"ports": [{"port": 9000}]}
    assert plain.one("NetworkPolicy") == patched.one("NetworkPolicy"), "it has Valkey and DNS"
    env = patched.env_of_maps("slotkeeper")
    changed = {name for name, value in plain.env_of_maps("slotkeeper").items() if env[name] != value}
    assert changed == {f"{PREFIX}COLD_STORE", f"{PREFIX}TRUSTED_PROXIES"}


def test_the_gateway_is_trusted_in_every_usual_network_of_pods():
    value = rendered("fleet").env_of_maps("slotkeeper")[f"{PREFIX}TRUSTED_PROXIES"]
    trusted = [
        ip_network(each) for each in Settings.model_validate({"trusted_proxies": value}).trusted_proxies
    ]
    for pods in map(ip_network, PODS):
        assert any(pods.version == net.version and pods.subnet_of(net) for net in trusted), pods  # type: ignore[arg-type]

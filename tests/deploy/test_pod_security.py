"""The pods are allowed in a namespace that enforces `restricted`, and are stricter than it."""

from __future__ import annotations

from copy import deepcopy

import pytest

from deploy.manifests import K8S, Manifests, rendered, written
from deploy.pod_security import violations

LOADER = K8S / "loader.yaml"


def test_the_pods_meet_the_restricted_standard(manifests: Manifests):
    assert violations(manifests.pod) == []


def test_the_loader_meets_the_restricted_standard():
    (loader,) = written(LOADER)
    assert violations(loader["spec"]) == []


def test_root_file_systems_are_read_only_and_no_pod_has_an_api_token(manifests: Manifests):
    for container in manifests.containers:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, container["name"]
    assert manifests.pod["automountServiceAccountToken"] is False
    account = manifests.one("ServiceAccount", manifests.pod["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False


def test_the_namespace_of_the_example_enforces_the_restricted_standard():
    labels = rendered("example").one("Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("pod", "hostNetwork", True, "hostNetwork is set"),
        ("pod", "volumes", [{"name": "kfd", "hostPath": {"path": "/dev/kfd"}}], "volume kfd is a hostPath"),
        ("pod", "securityContext", {}, "engine: it may run as root"),
        ("pod", "securityContext", {"runAsNonRoot": True}, "engine: it has no seccomp profile"),
        ("engine", "privileged", True, "engine: it is privileged"),
        ("engine", "allowPrivilegeEscalation", None, "engine: privileges can be escalated"),
        ("engine", "capabilities", {"drop": ["KILL"]}, "engine: capabilities are kept"),
        (
            "engine",
            "capabilities",
            {"drop": ["ALL"], "add": ["SYS_PTRACE"]},
            "engine: capabilities are added",
        ),
        ("engine", "runAsUser", 0, "engine: it may run as root"),
    ],
)
def test_every_violation_of_the_restricted_standard_is_detected(where, name, value, said):
    pod = deepcopy(rendered("overlays/cpu").pod)
    (pod if where == "pod" else pod["initContainers"][0]["securityContext"])[name] = value
    assert said in violations(pod)

"""The Pod Security Standard `restricted`, as far as our pods could violate it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Spec = dict[str, Any]

VOLUMES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
PROFILES: Final = frozenset({"RuntimeDefault", "Localhost"})
HOST: Final = ("hostNetwork", "hostPID", "hostIPC")


def violations(pod: Spec) -> list[str]:
    """Return the violations that an API server would report, each as a sentence."""
    containers = [*pod.get("initContainers", ()), *pod.get("containers", ())]
    found = [*_of_pod(pod)]
    for container in containers:
        found += (f"{container['name']}: {what}" for what in _of_container(container, pod))
    return found


def _of_pod(pod: Spec) -> Iterator[str]:
    yield from (f"{name} is set" for name in HOST if pod.get(name))
    for volume in pod.get("volumes", ()):
        if kinds := set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kinds.pop()}"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls are set"


def _of_container(container: Spec, pod: Spec) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = pod.get("securityContext", {}) | own
    if own.get("privileged"):
        yield "it is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "privileges can be escalated"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are kept"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "it may run as root"
    if both.get("seccompProfile", {}).get("type") not in PROFILES:
        yield "it has no seccomp profile"
    if own.get("procMount", "Default") != "Default" or {"seLinuxOptions", "windowsOptions"} & both.keys():
        yield "it has options of its own for the kernel"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "it has a port of the host"

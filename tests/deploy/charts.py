"""What `helm install` would send to a cluster, in a form that compares with a kustomization."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from deploy.manifests import K8S, NAME, Manifests, Object, documents
from programs import missing

CHART: Final = K8S / "helm" / NAME
KUBERNETES: Final = "1.29"  # the oldest that the chart allows
# Labels and annotations of Helm alone. The checksum does what the hash in the name of a generated map does.
OF_HELM: Final = frozenset(
    {
        "app.kubernetes.io/instance",
        "app.kubernetes.io/managed-by",
        "checksum/config",
        "helm.sh/chart",
        "helm.sh/resource-policy",
    }
)


class RefusedError(Exception):
    """Helm refuses the values."""


@dataclass(frozen=True)
class Release:
    """A chart with values, as Helm has rendered it."""

    files: Mapping[str, str]
    findings: Sequence[Mapping[str, Any]]

    @cached_property
    def manifests(self) -> Manifests:
        texts = (text for name, text in self.files.items() if name.endswith(".yaml"))
        return Manifests(tuple(each for text in texts for each in documents(text)))

    @property
    def notes(self) -> str:
        return self.files[f"{NAME}/templates/NOTES.txt"]


def release(
    values: Mapping[str, Any] | None = None,
    *,
    sets: Sequence[str] = (),
    name: str = NAME,
    chart: Path = CHART,
) -> Release:
    """Render the chart with values, and those of `--set`. Raises RefusedError."""
    if find_spec("helm_python") is None:
        missing("helm-python-sdk")
    request = {
        "values": values or {},
        "sets": sets,
        "release": name,
        "namespace": NAME,
        "kubernetes": f"v{KUBERNETES}.0",
    }
    return _rendered(chart, json.dumps(request))


@cache
def _rendered(chart: Path, request: str) -> Release:
    words = (sys.executable, str(Path(__file__).with_name("helm.py")), str(chart))
    done = subprocess.run(words, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(done.stderr)
    answer = json.loads(done.stdout)
    return Release(answer["rendered"], answer["lint"]["messages"])


def comparable(manifests: Manifests) -> dict[tuple[str, str], Object]:
    """Return objects by kind and name, without what only Helm or only kustomize adds."""
    maps = (each["metadata"]["name"] for each in manifests.all("ConfigMap"))
    names = {name: _purpose(name) for name in maps}
    found = [_without(each, names) for each in manifests.objects if each["kind"] != "Namespace"]
    for each in found:
        each["metadata"].pop("namespace", None)
        if each["kind"] == "StatefulSet":  # their order means nothing, and a patch changes it
            each["spec"]["template"]["spec"]["volumes"].sort(key=lambda volume: volume["name"])
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def _purpose(name: str) -> str:
    """Return `engine` for `slotkeeper-engine` of Helm and for `engine-8c56b8mkt2` of kustomize."""
    return next((word for word in name.split("-") if word != NAME), NAME) if "engine" in name else NAME


def _without(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case dict():
            left = {key: _without(each, names) for key, each in value.items() if key not in OF_HELM}
            return {key: each for key, each in left.items() if key != "annotations" or each}
        case list():
            return [_without(each, names) for each in value]
        case str():
            return names.get(value, value)
    return value

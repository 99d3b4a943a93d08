"""What `kubectl apply -k` would send to a cluster, and how a kubelet reads the containers in it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from containers import ROOT, Container
from programs import program

K8S: Final = ROOT / "deploy" / "k8s"
NAME: Final = "slotkeeper"
OVERLAYS: Final = ("overlays/cpu", "overlays/cuda", "overlays/rocm", "overlays/vulkan")
INSTALLATIONS: Final = (*OVERLAYS, "example")
# The entrypoints of the images, without the arguments that the manifests give.
ENTRYPOINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "slotkeeper": ("slotkeeper",),
    "engine": ("/app/llama-server",),
}
SUFFIXES: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifests:
    """All objects of one installation."""

    objects: tuple[Object, ...]

    def all(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str = NAME) -> Object:
        (found,) = (each for each in self.all(kind) if each["metadata"]["name"] == name)
        return found

    @property
    def template(self) -> Object:
        """Return metadata and spec of the pods."""
        return self.one("StatefulSet")["spec"]["template"]

    @property
    def pod(self) -> Object:
        return self.template["spec"]

    @property
    def containers(self) -> list[Object]:
        return [*self.pod["initContainers"], *self.pod["containers"]]

    def container(self, name: str) -> Object:
        (found,) = (each for each in self.containers if each["name"] == name)
        return found

    def env(self, name: str) -> dict[str, str]:
        """Return the variables of a container, as the manifests give them."""
        container = self.container(name)
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return found | {each["name"]: each["value"] for each in container.get("env", ())}

    def env_of_maps(self, name: str) -> dict[str, str]:
        """Return the variables of a container that come from ConfigMaps."""
        sources = (source.get("configMapRef") for source in self.container(name)["envFrom"])
        maps = [self.one("ConfigMap", source["name"])["data"] for source in sources if source]
        return {key: value for data in maps for key, value in data.items()}

    def runs(self, name: str) -> Container:
        """Return the command of a container, with `$(NAME)` in its arguments replaced as a kubelet does."""
        env = self.env(name)
        words = (expanded(word, env) for word in self.container(name)["args"])
        return Container(command=(*ENTRYPOINTS[name], *words), env=env)

    def mounts(self, name: str) -> dict[str, str]:
        """Return path in a container -> name of the volume there."""
        return {each["mountPath"]: each["name"] for each in self.container(name)["volumeMounts"]}

    def volumes(self) -> dict[str, Object]:
        """Return the volumes of the pod, and those of each replica."""
        own = self.one("StatefulSet")["spec"]["volumeClaimTemplates"]
        return {each["name"]: each for each in self.pod["volumes"]} | {
            each["metadata"]["name"]: each for each in own
        }

    def ports(self) -> dict[str, int]:
        """Return every named port of the pod."""
        return {
            port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", ())
        }


def expanded(word: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` if there is such a variable, and leave it otherwise."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)


@cache
def rendered(installation: str | Path) -> Manifests:
    """Render an installation, or the kustomization in another folder, with kubectl, as a user does."""
    words = (program("kubectl"), "kustomize", str(K8S / installation))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Manifests(tuple(documents(done.stdout)))


def written(path: Path) -> list[Object]:
    """Return the objects in a file that needs no rendering."""
    return list(documents(path.read_text("utf-8")))


def documents(text: str) -> Iterator[Object]:
    return (document for document in yaml.safe_load_all(text) if document)


def size(quantity: str) -> int:
    """Return a quantity of Kubernetes, such as `16Gi`, in bytes."""
    return int(quantity[:-2]) * SUFFIXES[quantity[-2:]]


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether labels match. An empty selector would match all, so it counts as a mistake."""
    return bool(selector) and selector.items() <= labels.items()

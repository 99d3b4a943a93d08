"""Write what the Helm chart shares with the kustomizations: `python deploy/k8s/helm/generate.py [--check]`.

Templates are the files of deploy/k8s with values at some places. `files/defaults.yaml` has the ConfigMaps,
and what each overlay and the component hot-in-memory change. With `--check` nothing is written, and the exit
code is 1 if a file is out of date.
"""
# ruff: noqa: INP001 - a script beside the chart, not a package

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

HERE: Final = Path(__file__).parent
CHART: Final = HERE / "slotkeeper"
K8S: Final = HERE.parent
ACCELERATORS: Final = ("cpu", "cuda", "rocm", "vulkan")
HEAD: Final = "Written by deploy/k8s/helm/generate.py; change deploy/k8s/{} instead."
NAME: Final = '{{ include "slotkeeper.fullname" . }}'


def block(name: str, indent: int) -> str:
    """Return a line that includes a named template as lines with this indent."""
    return f'{" " * indent}{{{{- include "{name}" . | nindent {indent} }}}}\n'


def word(key: str, value: str, indent: int, as_text: str = " {{ . }}") -> str:
    """Return lines that set a key to a word, unless that is empty."""
    lines = (f"{{{{- with {value} }}}}", f"{key}:{as_text}", "{{- end }}")
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def structure(key: str, value: str, indent: int) -> str:
    """Return lines that set a key to a list or a mapping, unless that is empty."""
    return word(key, value, indent, f" {{{{- toYaml . | nindent {indent + 2} }}}}")


Edit = tuple[str, str]  # a pattern that a file has once, and its replacement
SELECTOR: Final = r"^( *)app\.kubernetes\.io/name: slotkeeper\n"  # labels by which pods are found
METADATA: Final = (
    r"^  name: slotkeeper(?P<more>-\w+)?\n(?:  labels:\n(?:    app\.kubernetes\.io/name: .+\n)?)?"
)
STATEFUL_SET: Final[Sequence[Edit]] = (
    ("replicas: 1$", "replicas: {{ .Values.replicas }}"),
    ("serviceName: slotkeeper-pods", f"serviceName: {NAME}-pods"),
    (
        "^  template:\n",
        """\
  template:
    metadata:
      annotations:
        # A change of a setting replaces the pods.
        checksum/config: {{ include (print .Template.BasePath "/configmaps.yaml") . | sha256sum }}
        {{- with .Values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
      labels:
        app.kubernetes.io/name: slotkeeper
""",
    ),
    (
        "serviceAccountName: slotkeeper\n",
        f"serviceAccountName: {NAME}\n"
        + structure("imagePullSecrets", ".Values.imagePullSecrets", 6)
        + structure("nodeSelector", ".Values.nodeSelector", 6)
        + structure("affinity", ".Values.affinity", 6)
        + structure("tolerations", '(include "slotkeeper.tolerations" . | fromYamlArray)', 6)
        + word("runtimeClassName", ".Values.runtimeClassName", 6)
        + word("priorityClassName", ".Values.priorityClassName", 6),
    ),
    ("GracePeriodSeconds: 520", "GracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}"),
    (
        "^          type: RuntimeDefault\n",
        "          type: RuntimeDefault\n"
        + structure("supplementalGroups", '(include "slotkeeper.groups" . | fromYamlArray)', 8),
    ),
    (
        "image: llama-server\n",
        'image: "{{ .Values.engine.image.repository }}:{{ include "slotkeeper.engineTag" . }}"\n'
        + word("imagePullPolicy", ".Values.engine.image.pullPolicy", 10),
    ),
    (
        "image: slotkeeper\n",
        'image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"\n'
        + word("imagePullPolicy", ".Values.image.pullPolicy", 10),
    ),
    ("^                name: engine\n", f"                name: {NAME}-engine\n"),
    (
        "^                name: slotkeeper\n",
        """\
                name: {{ include "slotkeeper.fullname" . }}
            {{- with .Values.store.secret }}
            - secretRef:
                name: {{ . }}
            {{- end }}
""",
    ),
    ("failureThreshold: 360", "failureThreshold: {{ mul .Values.engine.startMinutes 12 }}"),
    (
        r"^          resources:\n(?: {12}.*\n)+(?=          securityContext: &)",
        "          resources:\n" + block("slotkeeper.engineResources", 12),
    ),
    (
        r"^          resources:\n(?: {12}.*\n)+(?=          securityContext: \*)",
        "          resources:\n" + block("slotkeeper.resources", 12),
    ),
    (
        "^            - name: cold\n              mountPath: /cold\n",
        """\
            {{- if not .Values.store.url }}
            - name: cold
              mountPath: /cold
            {{- end }}
            {{- if .Values.store.keySecret }}
            - name: store-key
              mountPath: /run/secrets/store
              readOnly: true
            {{- end }}
""",
    ),
    ("claimName: slotkeeper-models", 'claimName: {{ include "slotkeeper.modelsClaim" . }}'),
    (
        "^            sizeLimit: 32Gi\n",
        """\
            {{- if .Values.storage.hot.inMemory }}
            medium: Memory
            {{- end }}
            sizeLimit: {{ .Values.storage.hot.sizeLimit }}
""",
    ),
    (
        "secretName: slotkeeper-admin\n            defaultMode: 0440\n",
        """\
secretName: {{ .Values.adminSecret }}
            defaultMode: 0440
        {{- with .Values.store.keySecret }}
        - name: store-key
          secret:
            secretName: {{ . }}
            defaultMode: 0440
        {{- end }}
""",
    ),
    (
        "^  volumeClaimTemplates:\n    - metadata:\n        name: cold\n",
        """\
  {{- if not .Values.store.url }}
  volumeClaimTemplates:
    - metadata:
        name: cold
        labels:
          app.kubernetes.io/name: slotkeeper
""",
    ),
    (
        r"^        accessModes: \[ReadWriteOnce\]\n",
        "        accessModes: [ReadWriteOnce]\n"
        + word("storageClassName", ".Values.storage.cold.storageClassName", 8),
    ),
    ("storage: 100Gi\n", "storage: {{ .Values.storage.cold.size }}\n  {{- end }}\n"),
)
MODELS: Final[Sequence[Edit]] = (
    (
        "^spec:\n",
        "  annotations:\n    helm.sh/resource-policy: keep  # models outlive the release\nspec:\n"
        + word("storageClassName", ".Values.storage.models.storageClassName", 2),
    ),
    (
        r"^  accessModes: \[ReadWriteOnce\]\n",
        structure("accessModes", ".Values.storage.models.accessModes", 2),
    ),
    ("storage: 100Gi", "storage: {{ .Values.storage.models.size }}"),
)
NETWORK: Final[Sequence[Edit]] = (
    ("name: monitoring", "name: {{ .Values.metrics.namespace }}"),
    (
        "^        - port: admin\n",
        "        - port: admin\n" + structure("egress", '(include "slotkeeper.egress" . | fromYamlArray)', 2),
    ),
)
MONITOR: Final[Sequence[Edit]] = (
    ("^spec:\n", "    {{- with .Values.metrics.labels }}{{ toYaml . | nindent 4 }}{{ end }}\nspec:\n"),
    ("name: slotkeeper-admin", "name: {{ .Values.adminSecret }}"),
)
# Source -> condition of its objects, and edits of its own.
TEMPLATES: Final[dict[str, tuple[str, Sequence[Edit]]]] = {
    "base/serviceaccount.yaml": ("", ()),
    "base/statefulset.yaml": ("", STATEFUL_SET),
    "base/services.yaml": ("", ()),
    "base/networkpolicy.yaml": (".Values.networkPolicy.enabled", NETWORK),
    "base/poddisruptionbudget.yaml": ("", ()),
    "base/models.yaml": ("not .Values.storage.models.existingClaim", MODELS),
    "components/prometheus/servicemonitor.yaml": (".Values.metrics.serviceMonitor", MONITOR),
}


def edited(text: str, pattern: str, replacement: str) -> str:
    """Replace the one match of a pattern. Raises ValueError if there is none, or another."""
    text, count = re.subn(pattern, replacement.replace("\\", r"\\"), text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{count} places match {pattern!r}")
    return text


def template(source: str) -> str:
    """Return a file of deploy/k8s as a template."""
    condition, edits = TEMPLATES[source]
    text = (K8S / source).read_text("utf-8")
    for pattern, replacement in edits:
        text = edited(text, pattern, replacement)
    text = re.sub(METADATA, _metadata, text, flags=re.MULTILINE)
    text = re.sub(SELECTOR, _selector, text, flags=re.MULTILINE)
    head = f"# {HEAD.format(source)}\n"
    return f"{{{{- if {condition} }}}}\n{head}{text}{{{{- end }}}}\n" if condition else head + text


def _metadata(found: re.Match[str]) -> str:
    return f"  name: {NAME}{found['more'] or ''}\n  labels:\n" + block("slotkeeper.labels", 4)


def _selector(found: re.Match[str]) -> str:
    return block("slotkeeper.selectorLabels", len(found[1]))


def defaults() -> str:
    """Return the values that overlays, components and ConfigMaps of the kustomizations have."""
    pod = loaded("base/statefulset.yaml")["spec"]["template"]["spec"]
    (engine,), (sidecar,) = pod["initContainers"], pod["containers"]
    hot = patch(loaded("components/hot-in-memory/kustomization.yaml"))
    in_memory = merged(sidecar["resources"], hot["containers"][0]["resources"])
    document = {
        "settings": variables("slotkeeper.env"),
        "engine": variables("engine.env"),
        "resources": {"onDisk": sidecar["resources"], "inMemory": in_memory},
        "accelerators": {name: accelerator(name, engine["resources"]) for name in ACCELERATORS},
    }
    head = f"# {HEAD.format('base, overlays or components')}\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=1000)


def accelerator(name: str, resources: dict[str, Any]) -> dict[str, Any]:
    """Return what an overlay changes."""
    overlay = loaded(f"overlays/{name}/kustomization.yaml")
    pod = patch(overlay)
    images = overlay.get("images") or loaded("base/kustomization.yaml")["images"]
    literals = (each.split("=", 1) for each in overlay["configMapGenerator"][0]["literals"])
    return {
        "tag": images[-1]["newTag"],
        "engine": dict(literals),
        "resources": merged(resources, pod["initContainers"][0]["resources"]),
        "supplementalGroups": pod.get("securityContext", {}).get("supplementalGroups", []),
        "tolerations": pod.get("tolerations", []),
    }


def loaded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((K8S / name).read_text("utf-8"))
    return document


def patch(kustomization: dict[str, Any]) -> dict[str, Any]:
    """Return the pod in the only patch of a kustomization."""
    (only,) = kustomization["patches"]
    pod: dict[str, Any] = yaml.safe_load(only["patch"])["spec"]["template"]["spec"]
    return pod


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings as a strategic patch does: null removes a key."""
    both = old | {
        key: merged(old.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in new.items()
    }
    return {key: value for key, value in both.items() if value is not None}


def variables(name: str) -> dict[str, str]:
    lines = (K8S / "base" / name).read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def written() -> dict[str, str]:
    """Return every generated file of the chart, by its path there."""
    templates = {f"templates/{Path(source).name}": template(source) for source in TEMPLATES}
    return templates | {"files/defaults.yaml": defaults()}


def main(argv: Sequence[str] | None = None, chart: Path = CHART) -> int:
    parser = argparse.ArgumentParser(description="Write templates and defaults of the Helm chart.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file is out of date"
    )
    args = parser.parse_args(argv)
    stale = {
        name: text
        for name, text in written().items()
        if not (chart / name).is_file() or (chart / name).read_text("utf-8") != text
    }
    if args.check:
        if stale:
            sys.stderr.write(f"out of date: {', '.join(stale)}; run `python deploy/k8s/helm/generate.py`\n")
        return int(bool(stale))
    for name, text in stale.items():
        (chart / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

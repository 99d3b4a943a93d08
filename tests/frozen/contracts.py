"""The names that users build on: `PYTHONPATH=proxy:tests:. python -m frozen.contracts` records new ones.

contracts.yaml lists them by kind. Behind a name is its meaning (a type, a default, labels), which must stay,
or a list of values, to which others may be added. Names that are gone or mean something else are recorded
only with `--break`, once docs/upgrading.md allows it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import BaseModel

from contract.test_logs import lines
from scripts import loaded
from slotkeeper import addresses
from slotkeeper.admin.admin import ASSETS, AdminPort
from slotkeeper.cli.main import add_all_settings, parsers
from slotkeeper.conversation.divergence import Cause
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.rules.base import Mode, RuleName
from slotkeeper.engine import fingerprint
from slotkeeper.environment import PREFIX, SECRETS
from slotkeeper.exchange import keys
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.states import Doing, EngineState, Spent
from slotkeeper.runtime import link
from slotkeeper.runtime.driver import Driver
from slotkeeper.scheduler.requests.figures import Unknown
from slotkeeper.scheduler.snapshots.budgets import Limits
from slotkeeper.scheduler.types import Priority, Reason
from slotkeeper.settings import Settings, in_words
from slotkeeper.store import files, manifest
from slotkeeper.store.shared_store import object_names

ROOT: Final = Path(__file__).parents[2]
CONTRACTS: Final = Path(__file__).with_name("contracts.yaml")
REFERENCE: Final = ROOT / "docs" / "reference.md"
K8S: Final = ROOT / "deploy" / "k8s"
PROMETHEUS: Final = ROOT / "grafana" / "prometheus"
POLICY: Final = """
If a name goes or changes its meaning, users' programs break. docs/upgrading.md says how that is announced and
when it may happen; then `make contracts ARGS=--break` records it.
"""
# Values that stand in answers, headers, logs and labels, by the name that the reference gives them.
VALUES: Final[dict[str, type[StrEnum]]] = {
    "cause": Cause,
    "decision": Reason,
    "doing": Doing,
    "engine state": EngineState,
    "kind": RequestKind,
    "mode of a rule": Mode,
    "oracle_unknown": Unknown,
    "priority": Priority,
    "rule": RuleName,
    "stage": Spent,
}

FREE: Final = frozenset({"engine", "version", "model"})  # labels whose values are not ours
# Parts of a Kubernetes object whose names are used elsewhere.
NAMED_PARTS: Final = {
    "containers": "container",
    "initContainers": "container",
    "ports": "port",
    "volumeClaimTemplates": "claim",
    "volumes": "volume",
}

Contracts = dict[str, Any]  # kind -> name -> its meaning, or its values


# -- what the code and the manifests have ---------------------------------------------------------------


def contracts() -> Contracts:
    """Return all names, as contracts.yaml has them."""
    return {
        "admin routes": sorted(_admin_routes()),
        "alerts": sorted(_rules("alerts.yaml", "alert")),
        "commands": _commands(),
        "compose variables": sorted(_compose_variables()),
        "files in the slot folder": _slot_files(),
        "headers of requests": _headers("Request headers"),
        "headers of responses": _headers("Response headers"),
        "helm values": _helm_values(),
        "kubernetes objects": _kubernetes(),
        "kustomizations": sorted(
            path.parent.relative_to(K8S).as_posix() for path in K8S.rglob("kustomization.yaml")
        ),
        "log events": {line.event: line.level for line in lines()},
        "metrics": _metrics(),
        "recording rules": sorted(_rules("recording.yaml", "record")),
        "settings": dict(_settings()),
        "shared store": _shared_store(),
        "tables of --keys-file": _fields(keys._Table),
        "tables of --upstreams-file": _fields(addresses._UpstreamEntry),
        "values": {name: [member.value for member in members] for name, members in VALUES.items()},
    }


def _admin_routes() -> Iterator[str]:
    """Yield all but the page's own files."""
    app = AdminPort(cast("Driver", None), Metrics(), token=None, limits=Limits()).app()
    for route in app.router.routes():
        path = route.resource.canonical if route.resource else ""
        if route.method != "HEAD" and not path.startswith(ASSETS):
            yield f"{route.method} {path}"


def _rules(file: str, kind: str) -> set[str]:
    groups = yaml.safe_load((PROMETHEUS / file).read_text("utf-8"))["groups"]
    return {rule[kind] for group in groups for rule in group["rules"]}


def _commands() -> dict[str, dict[str, Any]]:
    """Return the arguments of each command; settings, which `serve` and `up` take, are listed as such."""
    _, commands = parsers()
    return {name: dict(map(_argument, parser._actions)) for name, parser in commands.items()}


def _argument(action: argparse.Action) -> tuple[str, Any]:
    """Return an argument's name; and its choices, or the form of its value with the default."""
    form = "" if action.nargs == 0 else str(action.nargs or "")
    if action.option_strings:
        name = "/".join(action.option_strings)
        form = "" if action.nargs == 0 else " ".join(_words(action.metavar or action.dest.upper()))
    else:
        name = " ".join(_words(action.metavar or action.dest))
    if action.choices:
        return name, list(action.choices)
    has_default = action.default not in (None, False, [], argparse.SUPPRESS)
    return name, f"{form} ({in_words(action.default)})" if has_default else form


def _words(metavar: str | tuple[str, ...]) -> tuple[str, ...]:
    return (metavar,) if isinstance(metavar, str) else metavar


def _settings() -> Iterator[tuple[str, str]]:
    """Yield each variable with its flag, the form of its value, and its default."""
    serve = parsers()[1]["serve"]
    add_all_settings("serve", serve)
    flags = {action.dest: " ".join(filter(None, _argument(action))) for action in serve._actions}
    for name, field in Settings.model_fields.items():
        default = in_words(field.default)
        file = f" or {PREFIX}{name.upper()}_FILE" if name in SECRETS else ""
        yield f"{PREFIX}{name.upper()}{file}", flags[f"set_{name}"] + (f" ({default})" if default else "")


def _fields(table: type[BaseModel]) -> dict[str, str]:
    return {
        name: "needed" if field.is_required() else in_words(field.get_default(call_default_factory=True))
        for name, field in table.model_fields.items()
    }


def _headers(section: str) -> list[str]:
    """Return the headers in a section of the reference."""
    text = REFERENCE.read_text("utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    return sorted(set(re.findall(r"X-[A-Z][\w-]+", text)))


def _metrics() -> dict[str, dict[str, Any]]:
    """Return the type and the labels of each metric, and the values that each label has from the start."""
    found: dict[str, dict[str, Any]] = {}
    for family in loaded(ROOT / "docs" / "generate.py").families():
        by = f" by {', '.join(family.labels)}" if family.labels else ""
        ours = {label: known for label, known in family.labels.items() if known and label not in FREE}
        found[family.name] = {"type": family.type + by, **ours}
    return found


def _slot_files() -> dict[str, Any]:
    return {
        "names": sorted(
            {files.LOCK, files.INDEX, files.SEAL, files.QUARANTINE, files.RUN_FOLDER}
            | {link.FLAGS_FILE, fingerprint.FILE}
        ),
        "a snapshot": files._OURS.pattern,
        "format of manifests": manifest.FORMAT,
        "fields of a manifest": {field.name: str(field.type) for field in fields(manifest.Manifest)},
    }


def _shared_store() -> list[str]:
    """Return the names of objects, as their module describes them, and the forms of those that are parsed."""
    described = re.findall(r"^    (\S+) {2,}", str(object_names.__doc__), re.MULTILINE)
    return [*described, object_names._ENTRY.pattern, object_names._PART.pattern]


def _compose_variables() -> set[str]:
    found = (path.read_text("utf-8") for path in (ROOT / "docker").glob("compose*.yaml"))
    return {name for text in found for name in re.findall(r"\$\{(\w+)", text)}


def _helm_values() -> list[str]:
    values = yaml.safe_load((K8S / "helm" / "slotkeeper" / "values.yaml").read_text("utf-8"))
    return sorted(_paths(values))


def _paths(values: Any, path: str = "") -> Iterator[str]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _paths(value, f"{path}.{name}" if path else name)
    else:
        yield path


def _kubernetes() -> dict[str, list[str]]:
    """Return each object with the names in it that other objects, patches and commands use."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder in ("base", "fleet", "components"):
        for path in sorted((K8S / folder).rglob("*.yaml")):
            for each in yaml.safe_load_all(path.read_text("utf-8")):
                if "metadata" in each:
                    found[f"{each['kind']}/{each['metadata']['name']}"].update(_names(each.get("spec")))
                for made in each.get("configMapGenerator", ()):
                    found[f"ConfigMap/{made['name']}"].update()
    return {name: sorted(names) for name, names in found.items()}


def _names(part: Any, of: str = "") -> Iterator[str]:
    """Yield selectors, and the names of containers, ports, volumes and claims."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "matchLabels":
                yield from (f"selector {label}={wanted}" for label, wanted in value.items())
            else:
                yield from _names(value, key)
    elif isinstance(part, list):
        for each in part:
            if of in NAMED_PARTS and isinstance(each, dict):
                name = each.get("name") or each.get("metadata", {}).get("name")
                words = (NAMED_PARTS[of], name, each.get("containerPort"), each.get("port"))
                yield " ".join(str(word) for word in words if word)
            yield from _names(each, of)


# -- what is recorded ------------------------------------------------------------------------------------


def recorded(path: Path = CONTRACTS) -> Contracts:
    return dict(yaml.safe_load(path.read_text("utf-8"))) if path.is_file() else {}


class Dumper(yaml.SafeDumper):
    """Writes lists in lines, and a line for each name that has a meaning."""


Dumper.add_representer(
    list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)
)


def written(found: Contracts) -> str:
    return str(yaml.dump(found, Dumper=Dumper, default_flow_style=False, width=110))


def broken(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each recorded name that is gone, or has another meaning."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name, meaning in before.items():
            at = f"{path}: {name}" if path else name
            if name in now:
                yield from broken(meaning, now[name], at)
            else:
                yield f"{at} is gone"
    elif isinstance(before, list) and isinstance(now, list):
        yield from (f"{path}: {value} is gone" for value in before if value not in now)
    elif before != now:
        yield f"{path} was {before!r}, now {now!r}"


def main(argv: Sequence[str] | None = None, path: Path = CONTRACTS) -> int:
    parser = argparse.ArgumentParser(description="Record the names that users build on.")
    parser.add_argument(
        "--break", dest="breaks", action="store_true", help="also names that are gone or changed"
    )
    args = parser.parse_args(argv)
    now = contracts()
    gone = list(broken(recorded(path), now))
    if gone and not args.breaks:
        sys.stderr.write("\n".join(gone) + POLICY)
        return 1
    path.write_text(written(now), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

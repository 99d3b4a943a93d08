"""Fill the marked blocks of the documents, and write completions: `python docs/generate.py [--check]`.

Tables of settings, metrics and rules come from the code, the one of what works from the tests, and tables of
measured tokens from docs/figures.json (written by `python -m benchmarks.publish` from the last runs).

A block stands between `<!-- name:begin -->` and `<!-- name:end -->`. With `--check` nothing is written,
and the exit code is 1 when a block or a completion is not what the code says.
"""
# ruff: noqa: INP001 - a script beside the documents, not a package

from __future__ import annotations

import argparse
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it sees only its own folder

import shtab
from benchmarks.tables import MEASURED, code
from prometheus_client import Metric
from prometheus_client.registry import Collector

from slotkeeper.cli.completion import FILES
from slotkeeper.cli.docs import topics
from slotkeeper.cli.main import OF_SIDECARS, add_all_settings, parsers
from slotkeeper.conversation.divergence import CAUSES
from slotkeeper.conversation.likeness import RequestKind
from slotkeeper.conversation.rules.apply import RULES
from slotkeeper.engine.managers import MANAGERS
from slotkeeper.environment import SECRETS
from slotkeeper.observe.gauges import EngineFigures, SlotFigures
from slotkeeper.observe.metrics import Metrics
from slotkeeper.observe.request_record import ClientFigures
from slotkeeper.observe.states import ENGINE_TEXTS, EngineSeen, EngineState
from slotkeeper.scheduler.placement import Placement
from slotkeeper.scheduler.types import EngineId, Reason
from slotkeeper.settings import GROUPS, Settings, in_words

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
TYPES: Final = ("counter", "gauge", "histogram", "info")  # of metrics, in the order of their lists
MANY: Final = 5  # values of a label are listed up to this number


def heading_anchors(markdown: str) -> dict[str, str]:
    """Heading -> anchor, as the usual hosts make them: lower case, no punctuation, hyphens for spaces."""
    outside = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {title: re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def descriptions(members: type[StrEnum]) -> dict[str, str]:
    """The comment behind each member of an enum: a reader of the code looks there, so the text is there."""
    found: dict[str, str] = {}
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(members)).readline):
        if token.type == tokenize.NAME and token.string in members.__members__:
            name = token.string
        elif token.type == tokenize.COMMENT and name:
            found[name] = token.string.lstrip("# ")
        elif token.type == tokenize.NEWLINE:
            name = ""
    return found


# -- the blocks ----------------------------------------------------------------------------------------


def settings() -> str:
    """Every setting as a flag, with its default. The names of its variable and in the file follow from it."""
    lists = {title: _listed(_settings(names)) for title, names in GROUPS.items()}
    return "\n\n".join(f"**{title[0].upper()}{title[1:]}**\n\n{lines}" for title, lines in lists.items())


def _settings(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        field = Settings.model_fields[name]
        text = re.sub(r"`slotkeeper docs ([a-z-]+)`", r"[\1](\1.md)", str(field.description))
        if name in SECRETS:
            text += "; a secret, never shown"
        if default := in_words(field.default):
            text += f" ({code(default)})"
        yield "--" + name.replace("_", "-"), text


def reasons() -> str:
    texts = descriptions(Reason)
    return _listed((reason.value, _linked(texts[reason.name])) for reason in Reason)


def engine_states() -> str:
    """What `top`, the page and the log say."""
    return _listed((state.value, text) for state, text in ENGINE_TEXTS.items())


def kinds() -> str:
    texts = descriptions(RequestKind)
    return _listed((kind.value, texts[kind.name]) for kind in RequestKind)


def causes() -> str:
    """Return the names of those that a rule undoes, for the rule says what they are, and the others."""
    ruled = {cause.value: seen.rule.value for cause, seen in CAUSES.items() if seen.rule}
    same = ", ".join(code(cause) for cause, rule in ruled.items() if rule == cause)
    other = ", ".join(f"{code(cause)} ({code(rule)})" for cause, rule in ruled.items() if rule != cause)
    alone = {cause.value: seen.what for cause, seen in CAUSES.items() if not seen.rule}
    plain = [cause for cause, what in alone.items() if set(cause.split("_")) <= set(what.split())]
    explained = _listed((cause, what) for cause, what in alone.items() if cause not in plain)
    return (
        f"* Undone by the rule of the same name: {same}\n* Undone by another rule: {other}\n"
        f"* By no rule: {', '.join(map(code, plain))}\n{explained}"
    )


def _listed(members: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"* {code(name)}: {text}" for name, text in members)


def rules() -> str:
    """What a rule does by itself, what clients do, and why undoing it is safe."""
    return "\n".join(f"* {code(r.name.value)} ({code(r.default.value)}): {r.about} {r.safe}" for r in RULES)


def _linked(text: str) -> str:
    """Traps lead to their place in engine.md."""
    anchors = heading_anchors((DOCS / "engine.md").read_text("utf-8"))
    traps = {title.partition(":")[0]: anchor for title, anchor in anchors.items()}

    def link(found: re.Match[str]) -> str:
        return f"[{found[1]}](engine.md#{traps[found[1]]})"

    return re.sub(r"(?:engine\.md )?\b(T\d+)\b", link, text)


class Family(NamedTuple):
    """A metric as Prometheus shows it. `labels`: each with the values that it has from the start."""

    name: str
    type: str
    about: str
    labels: Mapping[str, Sequence[str]]


def families() -> list[Family]:
    """Return every metric; the only engine is called `x`."""
    live = Metrics()
    seen = EngineSeen(engine=EngineId("x"), state=EngineState.UP, answers=True, losses=0)
    live.watch(SlotFigures(Placement), EngineFigures(lambda: [seen]), ClientFigures(()))
    live.engine_added(seen.engine)
    return [
        Family(
            family.name + {"counter": "_total", "info": "_info"}.get(family.type, ""),
            family.type,
            family.documentation,
            _labels(collector, family),
        )
        for collector in live.registry._collector_to_names  # noqa: SLF001 - it alone knows labels without series
        for family in collector.collect()
    ]


def _labels(collector: Collector, family: Metric) -> dict[str, list[str]]:
    of_series = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
    found: dict[str, set[str]] = {label: set() for label in of_series}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                found.setdefault(label, set()).add(value)
    return {label: sorted(found[label]) for label in sorted(found)}


def metrics() -> str:
    """By type, since a name does not show it."""
    lines: dict[str, list[str]] = {}
    for family in sorted(families()):
        named = ", ".join(_label(label, values) for label, values in family.labels.items())
        line = f"* {code(family.name)}{' by ' + named if named else ''}: {family.about}"
        lines.setdefault(family.type, []).append(line)
    return "\n\n".join(f"**{kind.capitalize()}s**\n\n" + "\n".join(lines[kind]) for kind in TYPES)


def _label(name: str, values: Sequence[str]) -> str:
    listed = f" ({', '.join(values)})" if 1 < len(values) <= MANY else ""
    return code(name) + listed


@cache
def compatibility() -> str:
    """What `tests/compatibility.py` prints, in a process of its own: it collects the tests."""
    paths = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    made = subprocess.run(
        [sys.executable, "-m", "compatibility"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(made.stderr)
    return made.stdout


def managers() -> str:
    rows = (f"| {one.name} | {one.port} | {one.had} | {one.idles} | {one.do} |" for one in MANAGERS)
    head = ("program", "port", "what can be had", "what it does to an idle engine", "instead")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


BLOCKS: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "docs/configuration.md": {"settings": settings},
    "docs/dashboard.md": {"engine-states": engine_states},
    "docs/managers.md": {"managers": managers},
    "docs/reference.md": {"reasons": reasons, "metrics": metrics},
    "docs/rules.md": {"kinds": kinds, "causes": causes, "rules": rules},
    "docs/when-you-need-it.md": {"compatibility": compatibility},
    **MEASURED,
}


# -- completions for shells ----------------------------------------------------------------------------

DIRECTORIES: Final = ("DIR",)  # beginnings of metavars
PATHS: Final = ("FILE", "PATH", "TRACE", "NAME.", "A.json")


def completion(shell: str) -> str:
    """Return the script that completes the command line. It is shipped, so users do not need shtab."""
    parser, commands = parsers()
    for name in OF_SIDECARS:
        add_all_settings(name, commands[name])
    for action in parser._subparsers._group_actions[0]._choices_actions:  # type: ignore[union-attr] # noqa: SLF001
        commands[action.dest].description = action.help  # one line; shtab takes the description
    for command in commands.values():
        for action in command._actions:  # noqa: SLF001 - argparse has no public list of them
            _completed(action)
    return shtab.complete(parser, shell).rstrip() + "\n"


def _completed(action: argparse.Action) -> None:
    """Say what the words after a flag are: files, folders, topics, the values of a setting."""
    metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar or ""
    setting = Settings.model_fields.get(action.dest.removeprefix("set_"))
    if action.dest == "topic":
        action.choices = tuple(topics())
    elif setting and get_origin(setting.annotation) is Literal:
        action.choices = get_args(setting.annotation)
    elif metavar.startswith(DIRECTORIES):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif metavar.startswith(PATHS):
        action.complete = shtab.FILE  # type: ignore[attr-defined]


WRITTEN: Final[Mapping[str, Callable[[], str]]] = {
    f"proxy/slotkeeper/completions/{name}": partial(completion, shell) for shell, name in FILES.items()
}


# -- the documents -------------------------------------------------------------------------------------


def filled(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """The document with its blocks anew. KeyError for a block that it does not have."""
    for name, write in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise KeyError(name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{write()}\n{end}{rest.partition(end)[2]}"
    return text


def main(argv: Sequence[str] | None = None, folder: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Fill the blocks of the documents; write completions.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if one is out of date"
    )
    args = parser.parse_args(argv)
    stale = []
    for name, blocks in BLOCKS.items():
        path = folder / name
        text = path.read_text("utf-8")
        if (new := filled(text, blocks)) != text:
            stale.append(name)
            if not args.check:
                path.write_text(new, "utf-8")
    for name, write in WRITTEN.items():
        path, text = folder / name, write()
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(name)
            if not args.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
    if stale and args.check:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run `python docs/generate.py`\n")
    return int(bool(stale and args.check))


if __name__ == "__main__":
    raise SystemExit(main())

"""Generated files are up to date, and Grafana can read them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Final

import pytest
import yaml
from grafana.__main__ import FILES, HERE, main

from slotkeeper.observe.gauges import EngineFigures, SlotFigures
from slotkeeper.observe.metrics import Metrics
from slotkeeper.scheduler.placement import Placement

DASHBOARD: Final = json.loads((HERE / "dashboards/slotkeeper.json").read_text("utf-8"))
PANELS: Final = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
titled = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def test_no_file_differs_from_what_the_code_says():
    assert main(["--check"]) == 0, "run `python -m grafana`"


@pytest.mark.parametrize("name", FILES)
def test_a_stale_file_is_noticed_and_then_repaired(name, tmp_path, capsys):
    for each in FILES:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        shutil.copy(HERE / each, tmp_path / each)
    stale = tmp_path / name
    stale.write_text(stale.read_text("utf-8").replace("slotkeeper_", "slotkipper_"), "utf-8")

    assert main(["--check"], tmp_path) == 1
    assert name in capsys.readouterr().err
    assert "slotkipper_" in stale.read_text("utf-8")

    assert main([], tmp_path) == 0
    assert stale.read_text("utf-8") == (HERE / name).read_text("utf-8")


def test_panels_are_known_apart_and_lie_beside_each_other():
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@titled
def test_a_panel_says_what_is_good_and_asks_the_chosen_source_for_the_chosen_sidecars(panel):
    assert "Good is" in panel["description"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        windows = set(re.findall(r"\[(.+?)\]", target["expr"]))
        assert windows <= {"$__rate_interval", "$__range"}
        named = len(re.findall(r"slotkeeper_\w+", target["expr"]))
        assert target["expr"].count('job=~"$job",instance=~"$instance"') == named


def test_every_metric_is_on_the_dashboard():
    shown = set(re.findall(r"slotkeeper_\w+", json.dumps(DASHBOARD)))
    plain = {re.sub(r"_(total|bucket|count|sum|info)$", "", name) for name in shown}
    sources = (Metrics().registry, SlotFigures(Placement), EngineFigures(tuple))
    assert {family.name for source in sources for family in source.collect()} <= plain


def test_variables_narrow_what_is_shown():
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job", "instance"]


def test_grafana_finds_what_is_provisioned():
    """The paths are those of the images; the datasource has the scrape interval."""
    scraped = yaml.safe_load((HERE / "prometheus/prometheus.yaml").read_text("utf-8"))
    (source,) = read("datasources")["datasources"]
    (provider,) = read("dashboards")["providers"]
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert provider["options"]["path"].startswith("/")


def read(kind: str) -> dict:
    (path,) = Path(HERE / "provisioning" / kind).glob("*.yaml")
    return yaml.safe_load(path.read_text("utf-8"))

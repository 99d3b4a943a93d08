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


def test_generated_files_equal_the_code():
    assert main(["--check"]) == 0, "run `python -m grafana`"


@pytest.mark.parametrize("name", FILES)
def test_a_stale_file_is_detected_and_repaired(name, tmp_path, capsys):
    folder = tmp_path / "grafana"
    for each in FILES:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / each, folder / each)
    stale = folder / name
    stale.write_text(stale.read_text("utf-8").replace("slotkeeper_", "slotkipper_"), "utf-8")

    assert main(["--check"], folder) == 1
    assert name in capsys.readouterr().err
    assert "slotkipper_" in stale.read_text("utf-8")

    assert main([], folder) == 0
    assert stale.read_text("utf-8") == (HERE / name).read_text("utf-8")


def test_panels_have_unique_titles_and_do_not_overlap():
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@titled
def test_a_panel_describes_good_values_and_queries_the_chosen_source_and_sidecars(panel):
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


def test_variables_select_datasource_job_and_instance():
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job", "instance"]


def test_grafana_is_provisioned_with_the_paths_of_the_images():
    """The paths are those of the images; the datasource has the scrape interval."""
    scraped = yaml.safe_load((HERE / "prometheus/prometheus.yaml").read_text("utf-8"))
    (source,) = read("datasources")["datasources"]
    (provider,) = read("dashboards")["providers"]
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert provider["options"]["path"].startswith("/")


def read(kind: str) -> dict:
    (path,) = Path(HERE / "provisioning" / kind).glob("*.yaml")
    return yaml.safe_load(path.read_text("utf-8"))

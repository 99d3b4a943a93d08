"""The workflows: the versions of their actions, what each job may write, and what a release consists of."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from programs import program

ROOT: Final = Path(__file__).parents[2]
WORKFLOWS: Final = {
    path.name: yaml.safe_load(path.read_text("utf-8"))
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
PACKAGES: Final = WORKFLOWS["release.yml"]["jobs"]["packages"]
SBOM: Final = "build/assets/slotkeeper.cdx.json"


def steps() -> list[tuple[str, dict[str, Any]]]:
    """Return all steps, each with its workflow."""
    return [
        (name, step)
        for name, flow in WORKFLOWS.items()
        for job in flow["jobs"].values()
        for step in job["steps"]
    ]


def using(action: str) -> list[dict[str, Any]]:
    """Return the inputs of the steps of the job `packages` that use an action."""
    return [
        step.get("with", {}) for step in PACKAGES["steps"] if step.get("uses", "").startswith(f"{action}@")
    ]


def recipe(target: str) -> str:
    """Return what make would run."""
    done = subprocess.run(
        [program("make"), "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_each_action_is_pinned_to_one_major_version():
    pinned: dict[str, set[str]] = {}
    for _, step in steps():
        if action := step.get("uses"):
            name, _, version = action.partition("@")
            pinned.setdefault(name, set()).add(version)
    assert pinned
    for name, versions in pinned.items():
        assert len(versions) == 1, name
        assert re.fullmatch(r"(release/)?v\d+", min(versions)), name


def test_no_step_has_an_expression_of_github_in_its_script():
    """It would be code that whoever names the tag can write; a variable is only text."""
    assert [step["run"] for _, step in steps() if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_job_may_write_only_what_it_says(name):
    flow = WORKFLOWS[name]
    assert flow["permissions"] == {"contents": "read"}
    writes = {
        job: {what for what, access in one.get("permissions", {}).items() if access == "write"}
        for job, one in flow["jobs"].items()
    }
    expected = {
        "packages": {"id-token", "attestations"},
        "page": {"contents"},
        "image": {"packages", "id-token"},
        "chart": {"packages", "id-token"},
    }
    assert writes == (expected if name == "release.yml" else {job: set() for job in writes})


def test_what_is_published_is_what_is_attested_and_kept():
    provenance, sbom = using("actions/attest")
    (index,) = using("pypa/gh-action-pypi-publish")
    (kept,) = using("actions/upload-artifact")
    assert provenance["subject-path"].split() == ["build/dist/*", "build/assets/*"]
    assert sbom == {"subject-path": "build/dist/*", "sbom-path": SBOM}
    assert index["packages-dir"] == "build/dist/"
    assert kept["path"].split() == ["build/dist/", "build/assets/"]


def test_the_release_gets_all_that_was_kept():
    page = WORKFLOWS["release.yml"]["jobs"]["page"]
    assert page["needs"] == "packages"
    assert page["steps"][-1]["run"].endswith("dist/* assets/*")


def test_make_packages_writes_these_files_with_locked_tools():
    text = recipe("packages")
    assert "--require-hashes -r requirements/release.lock" in text
    assert f"--output-file {SBOM}" in text
    assert "hatchling build --directory build/dist" in text
    assert "> build/assets/slotkeeper.rb" in text
    locked = (ROOT / "requirements" / "release.lock").read_text("utf-8")
    assert set(re.findall(r"^(cyclonedx-bom|uv|hatchling)==", locked, re.MULTILINE)) == {
        "cyclonedx-bom",
        "uv",
        "hatchling",
    }

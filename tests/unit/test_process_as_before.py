"""What one test changes in its process, the next one does not see: `tests/conftest.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import pytest

CONFTEST: Final = Path(__file__).parents[1] / "conftest.py"

CHANGES: Final = """
import asyncio, logging, os, signal, sys
from slotkeeper.observe.log import configure

class Other(asyncio.DefaultEventLoopPolicy):
    pass

def test_changes(capsys, tmp_path):
    configure("info", "json")
    logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger().setLevel(logging.DEBUG)
    logging.disable(logging.CRITICAL)
    os.environ["SLOTKEEPER_LISTEN"] = "elsewhere"
    os.environ["HOME"] = "elsewhere"
    os.environ.pop("PATH")
    os.chdir(tmp_path)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    asyncio.set_event_loop_policy(Other())
"""
LOOKS: Final = """
import asyncio, logging, os, signal, sys
import structlog

def test_log():
    assert not structlog.is_configured()

def test_library_log():
    root = logging.getLogger()
    assert root.level == logging.WARNING
    assert root.manager.disable == 0
    assert not any(type(handler) is logging.StreamHandler for handler in root.handlers)

def test_environment():
    assert "SLOTKEEPER_LISTEN" not in os.environ
    assert os.environ["HOME"] != "elsewhere"
    assert os.environ["PATH"]

def test_folder():
    assert os.getcwd() == os.path.dirname(__file__)

def test_signal_handlers():
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

def test_event_loop_policy():
    assert type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy
"""
KINDS: Final = LOOKS.count("def test_")


@pytest.mark.parametrize("with_fixture", [True, False])
def test_only_without_the_fixture_is_each_change_visible_to_the_next_test(tmp_path, with_fixture):
    """Both modules run in a pytest of their own, with or without our conftest."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_1.py").write_text(CHANGES)
    (tmp_path / "test_2.py").write_text(LOOKS)
    report = tmp_path / "report.xml"
    if with_fixture:
        (tmp_path / "conftest.py").write_text(CONFTEST.read_text("utf-8"))
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, check=False)
    suite = ET.parse(report).getroot()[0]  # noqa: S314 -- our own
    seen = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors")}
    assert seen == {"tests": 1 + KINDS, "failures": 0 if with_fixture else KINDS, "errors": 0}

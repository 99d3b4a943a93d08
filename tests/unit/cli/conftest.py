"""A command line that runs in this process."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slotkeeper.cli.main import main


@pytest.fixture
def run_cli(capsys):
    """Run a command line; return its exit code and its output, with white space joined."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code: Any = main(list(words))
        except SystemExit as left:  # raised by argparse
            code = left.code
        out, err = capsys.readouterr()
        return code, re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", err)

    return run

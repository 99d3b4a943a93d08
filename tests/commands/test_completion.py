"""The scripts of `slotkeeper completion`: they equal the parser, and what Tab offers in real shells."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Final

import pytest

from commands.process import SLOTKEEPER, ended, environ, shown, terminal
from contract.test_docs import generate
from patience import PATIENCE
from programs import program
from slotkeeper.cli.completion import FILES, script
from slotkeeper.cli.docs import topics

PAGES: Final = set(topics())
# In bash as Tab does it: the function that `complete` registered, and the words it leaves.
ASK_BASH: Final = """
set -eu
eval "$({slotkeeper} completion bash)"
function=$(complete -p slotkeeper | grep --only-matching --perl-regexp '(?<=-F )\\S+')
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
"$function" slotkeeper "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
OFFERED: Final = {  # what is typed -> what Tab offers
    "slotkeeper do": {"docs", "doctor"},
    "slotkeeper und": {"undrain"},
    "slotkeeper health --": {"--help", "--live", "--admin", "--admin-ca"},
    "slotkeeper serve --log-level ": {"debug", "info", "warning", "error"},
    "slotkeeper serve --upstreams": {"--upstreams-file"},
    "slotkeeper up --upstream": set(),
    "slotkeeper snapshots r": {"rm"},
    "slotkeeper docs ": PAGES,
    "slotkeeper up --model my": {"my.gguf", "mydir"},
    "slotkeeper serve --slot-dir my": {"mydir"},
    "slotkeeper lint my": {"my.gguf", "mydir"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mydir").mkdir()
    (tmp_path / "my.gguf").touch()
    return tmp_path


def offered(*command: str, folder: Path) -> set[str]:
    """Return the first word of each line that a shell prints."""
    done = subprocess.run(
        command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return {line.split()[0].rstrip("/") for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("shell", FILES)
def test_the_command_prints_the_script_that_the_parser_gives(shell):
    done = ended("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == script(shell) == generate.completion(shell), "run `python docs/generate.py`"


def test_another_shell_is_wrong_usage():
    done = ended("completion", "csh")
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr


@pytest.mark.parametrize("line", OFFERED)
def test_bash_offers_commands_flags_values_and_files(line, folder):
    words = " ".join(shlex.quote(word) for word in line.split(" "))
    ask = ASK_BASH.format(slotkeeper=shlex.join(SLOTKEEPER), words=words)
    assert offered(program("bash"), "--norc", "-c", ask, folder=folder) == OFFERED[line]


@pytest.mark.parametrize("line", OFFERED)
def test_fish_offers_commands_flags_values_and_files(line, folder):
    ask = f"{shlex.join(SLOTKEEPER)} completion fish | source; complete --do-complete {shlex.quote(line)}"
    assert offered(program("fish"), "--no-config", "-c", ask, folder=folder) == OFFERED[line]


@pytest.mark.parametrize("line", [line for line in OFFERED if OFFERED[line]])
def test_zsh_offers_commands_flags_values_and_files(line, folder):
    zsh = program("zsh")
    setup = (
        "autoload -U compinit; compinit -u -d dump; setopt no_list_ambiguous; LISTMAX=999;"
        f' eval "$({shlex.join(SLOTKEEPER)} completion zsh)"; print set""up\n'
    )
    with terminal(zsh, "-f", "-i", "-V", cwd=folder, env=environ({"TERM": "dumb"})) as (_, keys):
        os.write(keys, setup.encode())
        shown(keys, "setup")
        os.write(keys, f"{line}\t".encode())
        shown(keys, *OFFERED[line])

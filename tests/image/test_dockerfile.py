"""The Dockerfile, read as text; test_image.py builds and runs it."""

from __future__ import annotations

import re
import subprocess

from containers import ROOT
from image.dockerfile import PATH, image, instructions
from programs import program
from slotkeeper.environment import PREFIX
from slotkeeper.settings import Settings


def test_hadolint_finds_nothing():
    done = subprocess.run([program("hadolint"), str(PATH)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_base_is_pinned_by_tag_and_digest_in_every_stage():
    found = instructions()
    (base,) = (rest for name, rest in found if name == "ARG" and rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=\S+:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert {rest.split()[0] for name, rest in found if name == "FROM"} == {"${BASE}"}


def test_the_images_variables_are_settings():
    ours = {name.removeprefix(PREFIX).lower() for name in image().env if name.startswith(PREFIX)}
    assert ours
    assert ours <= set(Settings.model_fields)


def test_the_images_user_is_a_number_and_not_root():
    """Kubernetes can check that a number is not root, but not a name."""
    user, group = map(int, image().user.split(":"))
    assert user
    assert group


def test_only_copied_files_reach_the_builder():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        word
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    }
    assert "*" in lines
    assert allowed == copied

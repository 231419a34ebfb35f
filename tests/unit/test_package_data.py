"""What is no Python and lies in a package is in the wheel: every such file has a glob, every glob has a file."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from asyncrl.config import presets
from buffers.stores.redis_client import _FOLDER

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
PACKAGES = ("asyncrl", "buffers", "learners", "producers", "weightsync")


def files_in(package: Path) -> set[Path]:
    """Data files, those behind links to folders too (`asyncrl/configs`): setuptools follows them."""
    found = set()
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {Path(folder) / name for name in names if not name.endswith((".py", ".pyc"))}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_data_file_is_in_the_wheel(package: str) -> None:
    home = ROOT / package
    matched = {pattern: set(home.glob(pattern)) for pattern in PACKAGE_DATA[package]}
    assert all(matched.values()), f"a glob without a file: {matched}"
    assert files_in(home) == set().union(*matched.values())
    assert home / "py.typed" in files_in(home)


def test_the_code_opens_its_files_inside_the_package() -> None:
    """Not in `configs/` beside it, which a wheel does not have: the links stay unresolved."""
    assert presets.FOLDER.is_relative_to(Path(presets.__file__).parents[1]) and presets.names()
    assert {presets.FOLDER / f"{name}.toml" for name in presets.names()} <= files_in(ROOT / "asyncrl")
    assert _FOLDER.is_relative_to(ROOT / "buffers") and list(_FOLDER.glob("*.lua"))


def test_the_page_about_extras_names_them_all() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {word for cell in table for word in cell.replace(",", " ").replace("`", " ").split()}
    assert named == set(extras)

"""Names of the product in scripts that no suite runs: a renamed one would be noticed late."""

from __future__ import annotations

import ast
import runpy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "tests" / "mutation" / "mutants.py"
PACKAGES = {"asyncrl", "buffers", "weightsync", "producers", "learners"}
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").glob("*.py")])


def source_of(module: str) -> Path | None:
    place = ROOT / module.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


@cache
def names_in(module: str) -> set[str]:
    """What a module defines or imports at any depth, and the modules in its folder."""
    path = source_of(module)
    assert path is not None, module
    found = {item.stem for item in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing_names(source: str) -> list[str]:
    """Names of the product in a source text that do not exist: imported ones, and attributes of imported modules."""
    tree, modules, wrong = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for alias in node.names:
                if source_of(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif alias.name not in names_in(node.module):
                    wrong.append(f"{node.module}.{alias.name}")
    used = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    for node in used:
        module = modules.get(node.value.id)  # type: ignore[attr-defined]
        if module and node.attr not in names_in(module):
            wrong.append(f"{module}.{node.attr}")
    return wrong


def test_a_name_that_is_gone_is_seen() -> None:
    text = (
        "from learners.batch import assembly as batches, gone\nfrom asyncrl.errors import nothing\nbatches.decode_it()"
    )
    assert missing_names(text) == ["learners.batch.gone", "asyncrl.errors.nothing", "learners.batch.assembly.decode_it"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_of_the_product_exists(path: Path) -> None:
    assert missing_names(path.read_text()) == []


def test_the_text_that_a_mutant_replaces_is_in_its_file_once() -> None:
    mutants = runpy.run_path(str(MUTANTS))["MUTANTS"]
    counts = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in mutants}
    assert len(mutants) > 50 and {name: count for name, count in counts.items() if count != 1} == {}

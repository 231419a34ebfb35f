"""The second edits that a change lacks, as messages that name the file to edit. Only the sources are read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

LOSSES = "learners/algorithms/losses.py"
CATALOGUE = "asyncrl/config/sections/algorithm_catalogue.py"
FORMS = "producers/rewards/forms/__init__.py"
PLUGINS = "asyncrl/plugins.py"
TRANSPORTS = "weightsync/transports/catalogue.py"
SECTION = "asyncrl/config/sections/weightsync.py"
OUTBOXES = "weightsync/publisher/outboxes.py"
ROUTING = "weightsync/coordinator/routing.py"
COMMANDS = "asyncrl/commands/__init__.py"


def top_level(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def check_losses(root: Path) -> Iterator[str]:
    exported = set(re.findall(r'^    "(\w+)",$', (root / LOSSES).read_text(), re.M))
    catalogue = (root / CATALOGUE).read_text()
    for path in sorted((root / "learners/algorithms").glob("*_losses.py")):
        for item in top_level(path):
            public = isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
            if public and item.returns is not None and ast.unparse(item.returns) == "TokenLoss":
                if item.name not in exported:
                    yield f"{path.name}: the loss {item.name} is not exported: add it to {LOSSES}"
                if f'"losses:{item.name}"' not in catalogue:
                    yield f"{path.name}: the loss {item.name} has no name: add it to {CATALOGUE}"


def check_forms(root: Path) -> Iterator[str]:
    listed = re.search(r"^FORMS.*= \((.*)\)$", (root / FORMS).read_text(), re.M)
    assert listed is not None
    for path in sorted((root / "producers/rewards/forms").glob("*.py")):
        for item in top_level(path):
            is_form = isinstance(item, ast.ClassDef) and "Form" in map(ast.unparse, item.bases)
            if is_form and item.name not in listed[1].split(", "):
                yield f"{path.name}: the form {item.name} is never tried: add it to FORMS in {FORMS}"


def check_engines(root: Path) -> Iterator[str]:
    plugins = (root / PLUGINS).read_text()
    for path in sorted((root / "producers/engines").rglob("*.py")):
        for item in top_level(path):
            if isinstance(item, ast.ClassDef) and item.name.endswith("Engine") and f':{item.name}"' not in plugins:
                yield f"{path.name}: the engine {item.name} has no name: add it to BUILT_IN in {PLUGINS}"


def check_transports(root: Path) -> Iterator[str]:
    catalogue = (root / TRANSPORTS).read_text()
    for path in sorted((root / "weightsync/transports").glob("*.py")):
        for item in top_level(path):
            ends = isinstance(item, ast.ClassDef) and item.name.endswith(("Inbox", "Outbox"))
            if ends and path.name != "base.py" and item.name not in catalogue:
                yield f"{path.name}: {item.name} is never made: add it to {TRANSPORTS}"
    names = re.findall(r'return \{("local".*)\}', catalogue)
    choices = re.search(r"transport: Literal\[(.*?)\]", (root / SECTION).read_text())
    assert len(names) == 1 and choices is not None
    for name in re.findall(r'"(\w+)":', names[0]):
        if f'"{name}"' not in choices[1]:
            yield f"transport {name!r} cannot be configured: add it to weightsync.transport in {SECTION}"
        if f'    "{name}": ("{name}",' not in (root / OUTBOXES).read_text():
            yield f"transport {name!r} is never opened: add it to ALLOWED in {OUTBOXES}"
        if f'"{name}"' not in (root / ROUTING).read_text():
            yield f"transport {name!r} is never chosen: add it to Router.choose in {ROUTING}"


def check_commands(root: Path) -> Iterator[str]:
    table = (root / COMMANDS).read_text()
    for path in sorted((root / "asyncrl/commands").glob("*.py")):
        for item in top_level(path):
            public = isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
            adds = public and [one.arg for one in item.args.args] == ["commands"]
            if adds and f'("{path.stem}", "{item.name}")' not in table:
                yield f"{path.name}: the commands of {item.name} are not shown: add it to COMMANDS in {COMMANDS}"


CHECKS = (check_losses, check_forms, check_engines, check_transports, check_commands)


def missing_edits(root: Path) -> list[str]:
    """All messages for the sources below `root`."""
    return [message for check in CHECKS for message in check(root)]

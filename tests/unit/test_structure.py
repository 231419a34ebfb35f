"""The structure of the product: import layers, circles, sizes, names and words, by the source alone.

`LAYERS` is the one table of arrows. A module imports only from layers below its own, lazy imports and those for type
checkers included. `docs/draw_architecture.py` draws the same imports.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "buffers", "weightsync", "producers", "learners")
MAX_LINES, MAX_METHODS, MAX_FILES = 400, 25, 20
CROWDED = {"learners/algorithms": 25, "buffers/groups": 21}

#: From the lowest layer to the highest. A name stands for the modules below it, unless a longer name does. Modules of
#: one layer are independent, but those of one name may import each other.
LAYERS = (
    "asyncrl.errors asyncrl.versions asyncrl.device_features",
    "asyncrl.plugins asyncrl.wire asyncrl.environment",
    "asyncrl.engine asyncrl.metrics asyncrl.evaluation asyncrl.net",
    "asyncrl.config.sections",
    "asyncrl.config.tree asyncrl.config.locations asyncrl.config.redis_url asyncrl.config.model_facts",
    "asyncrl.config.mode asyncrl.config.features",
    "asyncrl.config.capabilities",
    "asyncrl.config.rules",
    "asyncrl.config",
    "asyncrl",
    "asyncrl.runtime asyncrl.testing",
    "asyncrl.images",
    "asyncrl.process_plan asyncrl.audit",
    "asyncrl.monitor asyncrl.preflight asyncrl.doctor",
    "asyncrl.report asyncrl.configure",
    "asyncrl.launcher",
    "asyncrl.launcher.clusters asyncrl.runs",
    "asyncrl.trace asyncrl.demo",
    "asyncrl.planner",
    "asyncrl.commands asyncrl.python_api",
    "asyncrl.cli",
    "asyncrl.__main__",
    "buffers.values",
    "weightsync.plan weightsync.mapped_file buffers.groups",
    "weightsync.copy_digest",
    "weightsync.staging buffers.payloads buffers.stores buffers.evaluation",
    "weightsync.transports buffers.service buffers.client buffers.simulation",
    "weightsync.encoding buffers",
    "weightsync.coordinator weightsync.receiver",
    "weightsync.publisher",
    "weightsync",
    "producers.support producers.rewards.sample learners.algorithms learners.gang",
    "producers.data producers.sandbox producers.rollout producers.rewards.forms learners.models learners.batch",
    "producers.tools producers.engines producers.rewards.scorers learners.profiling learners.backends",
    "producers.environments producers.engines.hf producers.engines.vllm producers.engines.sglang "
    "learners.backends.fsdp2 learners.backends.megatron",
    "producers.agents learners.step",
    "producers.rewards learners.checkpoints",
    "producers.rewards.judges",
    "producers learners",
)
#: Packages that know of another one; every package may import `asyncrl`.
KNOWS = {
    "asyncrl": (),
    "buffers": ("asyncrl",),
    "weightsync": ("asyncrl",),
    "producers": ("asyncrl", "buffers", "weightsync"),
    "learners": ("asyncrl", "buffers", "weightsync"),
}

# What is left to rewrite: names and words.
PENDING_PACKAGES: tuple[str, ...] = ()

PREPOSITIONS = (
    "of by with for from in on at as to into over under beside below above after before between through without within"
)
#: `on_x` is a callback, `from_x` a constructor, `to_x` and `as_x` convert: only these bare words are refused.
CONVENTIONS = frozenset({"on", "to", "as"})
FOREIGN = frozenset({"from_native_response"})  # methods that a library calls
PARTICIPLES = frozenset(
    [
        "shown",
        "told",
        "held",
        "kept",
        "said",
        "found",
        "raised",
        "judged",
        "made",
        "given",
        "taken",
        "known",
        "seen",
        "heard",
        "left",
        "sent",
        "placed",
        "named",
        "parsed",
        "decoded",
        "flattened",
        "joined",
        "resumed",
        "settled",
        "chosen",
        "wanted",
        "written",
        "drawn",
        "begun",
        "asked",
        "spoken",
        "trained",
        "derived",
        "overridden",
        "redacted",
        "damaged",
        "checked",
        "merged",
        "beside",
        "translated",
        "granted",
        "awaited",
        "noted",
    ]
)
BANNED = re.compile(
    r"\b(nobody|somebody|who|whoever|whom|is told|are told|so many|of which|beside|see the module|all of it|"
    r"twice is once|for want of)\b",
    re.IGNORECASE,
)


# ---------------------------------------------------------------- reading


@cache
def sources() -> dict[str, tuple[Path, str, ast.Module]]:
    """Module name -> path, text and tree, of all packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            found[name] = (path, text, ast.parse(text))
    return found


def nearest(name: str) -> str:
    """The module that holds a dotted name; empty for modules of others."""
    while name and name not in sources():
        name = name.rpartition(".")[0]
    return name


@cache
def imports() -> dict[str, dict[str, int]]:
    """Module -> module that it imports -> line: at module level, in functions, and for type checkers."""
    modules = sources()
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, (_, _, tree) in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [one if one in modules else node.module for one in full]
            else:
                continue
            for target in map(nearest, targets):
                if target and target != name:
                    found[name].setdefault(target, node.lineno)
    return found


def circles(edges: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Strongly connected components of more than one module."""
    numbers: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = low[name] = len(numbers)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in numbers:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], numbers[other])
        if low[name] == numbers[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sources():
        if name not in numbers:
            visit(name)
    return found


@cache
def layers() -> dict[str, int]:
    return {name: place for place, names in enumerate(LAYERS) for name in names.split()}


def unit(module: str) -> str:
    """The longest name of the table that stands for a module."""
    name = module
    while name and name not in layers():
        name = name.rpartition(".")[0]
    return name


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(one) for one in node.decorator_list]
    return any("property" in name or name.endswith(".setter") for name in names)


# ---------------------------------------------------------------- arrows


def test_no_circles() -> None:
    found = circles(imports())
    assert not found, "circles of imports:\n" + "\n".join(" <-> ".join(members) for members in found)


def test_every_module_has_a_layer() -> None:
    assert not [name for name in sources() if not unit(name)]


def test_no_arrow_upwards() -> None:
    wrong = []
    for module, targets in imports().items():
        for target, line in targets.items():
            mine, other = unit(module), unit(target)
            if mine != other and layers()[other] >= layers()[mine]:
                wrong.append(f"{module}:{line} imports {target} ({mine} is not above {other})")
    assert not wrong, "\n".join(wrong)


def test_packages_know_only_those_below() -> None:
    wrong = [
        f"{module}:{line} imports {target}"
        for module, targets in imports().items()
        for target, line in targets.items()
        if (mine := module.partition(".")[0]) != (other := target.partition(".")[0]) and other not in KNOWS[mine]
    ]
    assert not wrong, "\n".join(wrong)


def test_facades_are_for_others() -> None:
    """A module does not import the package that it is in: the package may import the module."""
    wrong = [
        f"{module} imports {target}"
        for module, targets in imports().items()
        for target in targets
        if module.startswith(f"{target}.") and module in imports().get(target, {})
    ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- sizes


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): text.count("\n")
        for path, text, _ in sources().values()
        if text.count("\n") > MAX_LINES
    }
    assert not long, f"more than {MAX_LINES} lines: {long}"


def test_classes_are_small() -> None:
    large = []
    for name, (_, _, tree) in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
                if count > MAX_METHODS:
                    large.append(f"{name}.{node.name}: {count} methods")
    assert not large, "\n".join(large)


def test_folders_are_clear() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path, _, _ in sources().values():
        counts[str(path.parent.relative_to(ROOT))] += 1
    crowded = {folder: count for folder, count in counts.items() if count > CROWDED.get(folder, MAX_FILES)}
    assert not crowded, crowded


def test_files_of_tests_have_names_of_their_own() -> None:
    """Test folders are no packages, so pytest collects one file of each name and fails at the second."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name not in ("conftest.py", "__init__.py"):
            folders[path.name].append(str(path.parent.relative_to(ROOT)))
    twice = {name: found for name, found in folders.items() if len(found) > 1}
    assert not twice, twice


def test_the_formatter_is_switched_off_for_tables_alone() -> None:
    """`# fmt: skip` stands at the end of a dictionary, list, tuple, set or call over several lines."""
    wrong = []
    for name, (_, text, _) in sources().items():
        for number, line in enumerate(text.splitlines(), 1):
            if "fmt: skip" in line and not re.match(r"\s*[\])}]+,?\s+# fmt: skip", line):
                wrong.append(f"{name}:{number}")
            if "fmt: off" in line:
                wrong.append(f"{name}:{number}")
    assert not wrong, wrong


# ---------------------------------------------------------------- names and words


def test_functions_have_names_of_the_field() -> None:
    wrong = []
    for name, (_, _, tree) in sources().items():
        if name.partition(".")[0] in PENDING_PACKAGES:
            continue
        for node in functions(tree):
            if is_property(node) or node.name in FOREIGN:
                continue
            plain = node.name.lstrip("_")
            first, more, _ = plain.partition("_")
            constructor = any(ast.unparse(one) in ("classmethod", "staticmethod") for one in node.decorator_list)
            preposition = first in PREPOSITIONS.split() and not (more and first in CONVENTIONS)
            if (preposition and not (first == "from" and constructor)) or plain.startswith("on_the_"):
                wrong.append(f"{name}:{node.lineno} {node.name} begins with a preposition")
            elif plain in PARTICIPLES:
                wrong.append(f"{name}:{node.lineno} {node.name} is a bare participle")
    assert not wrong, f"{len(wrong)} names:\n" + "\n".join(wrong)


def texts(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Comments and docstrings with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                for offset, line in enumerate(first.value.value.splitlines()):
                    yield first.lineno + offset, line


@pytest.mark.parametrize("package", PACKAGES)
def test_words_are_plain(package: str) -> None:
    if package in PENDING_PACKAGES:
        pytest.skip("not rewritten yet")
    wrong = []
    for name, (_, text, tree) in sources().items():
        if name.partition(".")[0] == package:
            wrong += [
                f"{name}:{line} {found[0]!r}: {words.strip()[:90]}"
                for line, words in texts(text, tree)
                if (found := BANNED.search(words))
            ]
    assert not wrong, f"{len(wrong)} places:\n" + "\n".join(wrong)

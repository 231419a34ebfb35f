"""`pip install asyncrl` into an empty environment, without a network.

The environment has the wheel, and links to the files of exactly those packages that its metadata requires.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asyncrl import __version__

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("asyncrl", "buffers", "learners", "producers", "weightsync")
#: Modules that extras bring (docs/install.md); IPython is there where a notebook is, jinja2 where transformers renders.
OPTIONAL = {
    *("torch", "torch_npu", "transformers", "safetensors", "jinja2", "tensorboard", "peft", "torchao", "liger_kernel"),
    *("vllm", "sglang", "aiohttp", "megatron", "fsspec", "math_verify", "jsonschema", "mcp", "gymnasium", "verifiers"),
    *("wandb", "mlflow", "swanlab", "trackio", "IPython", "matplotlib", "pandas", "PIL", "google"),
}
#: Prints the top-level modules that imports anywhere in the packages name, also inside a function: a line of those that
#: are not installed, a line of those that are.
LIST_IMPORTS = f"""
import ast
import importlib.util
import sys
from pathlib import Path

named = set()
for package in {PACKAGES}:
    for path in Path(importlib.util.find_spec(package).origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {{alias.name for alias in node.names}}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named.add(node.module)
names = {{name.partition(".")[0] for name in named}} - sys.stdlib_module_names
absent = {{name for name in names if importlib.util.find_spec(name) is None}}
print(*absent)
print(*names - absent)
"""
#: What a host without torch opens: the files of the package, and the services.
USE = """
import asyncrl, buffers.main, producers.main, producers.rewards.main, weightsync.main
from asyncrl.demo.demo import quickstart
from asyncrl.config import presets
from buffers.stores import redis

config = asyncrl.Config.open(quickstart())
config["buffer.max_staleness"] = 8
config.save("mine.toml")
print(asyncrl.Config.open("mine.toml")["buffer.max_staleness"], len(presets.names()), redis.__file__)
"""


def required(names: list[str]) -> Iterator[Distribution]:
    """The installed distributions behind requirements, and those that they require in turn."""
    known: set[tuple[str, str]] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        found = distribution(wanted.name)
        assert found.version in wanted.specifier, f"{wanted}: {found.version} is installed"
        extras = {"", *wanted.extras}
        if new := extras - {extra for name, extra in known if name == found.name}:
            if (found.name, "") not in known:
                yield found
            known |= {(found.name, extra) for extra in extras}
            asked = [Requirement(line) for line in found.requires or ()]
            waiting += [one for one in asked if any(applies(one, extra) for extra in new)]


def applies(wanted: Requirement, extra: str) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment in `env`. The wheel is built from a copy: no build folder stays in the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "env")], check=True, timeout=60)
    site = next((place / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    asked = [Requirement(line) for line in ours(place).requires or ()]
    for found in required([str(one) for one in asked if applies(one, "")]):
        for file in found.files or ():
            target = site / file
            if ".." not in file.parts and not target.exists():  # what is outside are scripts
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(found.locate_file(file))))
    return place


def ours(place: Path) -> Distribution:
    return PathDistribution(next((place / "env").glob("lib/python*/site-packages/asyncrl-*.dist-info")))


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python ...` of the environment, which sees nothing of the one of the tests."""
    env = {"PATH": os.environ["PATH"], "HOME": str(place), "HF_HUB_OFFLINE": "1"}
    command = [str(place / "env" / "bin" / "python"), "-I", *words]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=110, check=False)


def test_every_import_is_required_or_optional(place: Path) -> None:
    done = run(place, "-c", LIST_IMPORTS)
    assert done.returncode == 0, done.stderr
    absent, present = ({*line.split()} for line in done.stdout.splitlines())
    assert "torch" in absent and "zmq" in present  # nothing is there but what is required
    assert absent <= OPTIONAL, f"add to dependencies in pyproject.toml: {sorted(absent - OPTIONAL)}"
    homes = packages_distributions()
    named = {canonicalize_name(Requirement(line).name) for line in ours(place).requires or ()}
    imported = present - {*PACKAGES, *OPTIONAL}
    indirect = {name for name in imported if not named & {canonicalize_name(home) for home in homes[name]}}
    assert not indirect, f"comes with another package, so it may leave: add to dependencies: {indirect}"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--version"], 0, __version__),
        (["explain", "buffer.max_staleness"], 0, "int >= 0"),
        (["explain", "config.extra"], 0, "error[config.extra]"),
        (["presets", "dapo"], 0, "DAPO (arXiv"),
        (["schema"], 0, '"max_staleness"'),
        (
            ["init", "theirs.toml", "--from", str(ROOT / "tests" / "unit" / "foreign" / "trl-script.py")],
            2,
            "written: theirs.toml",
        ),
        (["doctor"], 0, "torch"),
    ],
)
def test_commands_work_without_torch(place: Path, words: list[str], code: int, text: str) -> None:
    done = run(place, "-m", "asyncrl", *words)
    assert done.returncode == code and text in done.stdout, done.stdout + done.stderr


def test_a_check_names_the_extras_that_the_configuration_needs(place: Path) -> None:
    done = run(place, "-m", "asyncrl", "check", str(ROOT / "configs" / "quickstart.toml"))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "pip install 'asyncrl[learner]'" in done.stderr and "pip install 'asyncrl[hf]'" in done.stderr, done.stderr


def test_services_and_files_of_the_package_are_there(place: Path) -> None:
    done = run(place, "-c", USE)
    assert done.returncode == 0, done.stderr
    staleness, presets, module = done.stdout.split()
    assert staleness == "8" and int(presets) > 20
    assert list((Path(module).parent).glob("*.lua")) and Path(module).is_relative_to(place)


def test_the_command_is_an_entry_point(place: Path) -> None:
    find = "from importlib.metadata import entry_points; [one] = entry_points(group='console_scripts', name='asyncrl')"
    done = run(place, "-c", f"{find}; one.load()(['--version'])")
    assert __version__ in done.stdout, done.stderr

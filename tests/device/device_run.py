"""A simulated NPU for whole runs, built once for all test runs of this source and this torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_run import Run

HERE = Path(__file__).parent / "simulated_npu"
SOURCE = HERE / "simulated_npu.cpp"
SOURCES = (SOURCE, HERE / "memory.hpp", HERE / "order.hpp")
BUILD_S = 280


def missing() -> str:
    """Why it cannot be built here."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which("g++") is None:
        return "there is no g++"
    return "" if header.exists() else f"there is no {header}"


def build(folder: Path) -> Path:
    """The library, compiled into a folder if it is not there."""
    name = hashlib.sha256(b"".join(one.read_bytes() for one in SOURCES) + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"simulated_npu-{name}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # bounded: BUILD_S of the one that builds
        if not library.exists():
            home = Path(torch.__file__).parent
            words = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-DTORCH_EXTENSION_NAME=simulated_npu"]
            words += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", f"-I{sysconfig.get_paths()['include']}"]
            words += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", str(SOURCE)]
            words += ["-o", f"{library}.new", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib"]
            words += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_S, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            Path(f"{library}.new").replace(library)
    return library


def install(folder: Path, library: Path, *, devices: int, reports: Path | None = None) -> Path:
    """A folder with the package torch_npu and its settings, for PYTHONPATH."""
    shutil.copytree(HERE / "torch_npu", folder / "torch_npu", dirs_exist_ok=True)
    settings = {"library": str(library), "devices": devices, "reports": "" if reports is None else str(reports)}
    (folder / "torch_npu" / "settings.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Path:
    if why := missing():
        pytest.skip(f"the simulated NPU cannot be built: {why}")
    return build(request.config.cache.mkdir("simulated_npu"))


class DeviceRun(Run):
    """A run whose learner and producers use simulated NPUs."""

    library: Path
    devices = 4

    def environment(self) -> dict[str, str]:
        found = super().environment()
        reports = self.folder / "reports"
        reports.mkdir(exist_ok=True)
        package = install(self.folder / "npu", self.library, devices=self.devices, reports=reports)
        return found | {"PYTHONPATH": os.pathsep.join((str(package), found["PYTHONPATH"]))}

    def train(self, *settings: str, timeout: float = 280) -> Any:
        """Launch all with two ranks and two producers on devices of their own."""
        return self.launch("learner.device=npu", "producers.device=npu", "learner.ranks=2", *settings, timeout=timeout)

    def reports(self, role: str) -> list[dict[str, Any]]:
        """Counters of the processes of a role that came to their end."""
        every = [json.loads(path.read_text()) for path in (self.folder / "reports").iterdir()]
        return [one for one in every if any(role in word for word in one["argv"])]


@pytest.fixture
def npu_run(tmp_path: Path, tiny_model: Path, library: Path) -> Iterator[DeviceRun]:
    run = DeviceRun(tmp_path, tiny_model)
    run.fresh, run.library = True, library
    yield run
    run.close()


def python(code: str, library: Path, folder: Path, *, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter with two of the devices."""
    package = install(folder, library, devices=2)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(package), str(HERE.parents[2])))}
    return subprocess.run(
        [sys.executable, "-c", code], input=given, env=env, capture_output=True, text=True, timeout=120, check=False
    )

"""`asyncrl doctor`: probes in made environments, and what becomes of a probe that hangs, crashes or prints."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.doctor import machine, run, software
from asyncrl.doctor.machine import MISSING, OK, WARN, WRONG, Found
from asyncrl.doctor.probe_process import PROBES
from asyncrl.runtime.host_facts import filesystem

ROOT = Path(__file__).resolve().parents[2]
ALL_DAY = 600.0


def program(folder: Path, name: str, text: str) -> Path:
    """A program on a PATH of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def package(folder: Path, name: str, code: str, version: str = "1.0") -> None:
    """A package and its metadata, as pip leaves them."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages come before those that are installed, in the probes' processes."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    return folder


# ---------------------------------------------------------------- whole


def test_light_probes_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    light = [
        "python",
        "processor",
        "memory",
        "disk",
        "shared memory",
        "limits",
        "sockets",
        "clock",
        "sqlite",
        "devices",
    ]
    words = [word for name in light for word in ("--only", name)]
    assert main(["doctor", *words, "--json", "--limit", str(ALL_DAY)]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told["probes"]] == light
    assert all(one["state"] in (OK, WARN, MISSING) and one["says"] for one in told["probes"]), told
    assert all(one["remedy"] for one in told["probes"] if one["state"] != OK)


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.doctor.run, asyncrl.doctor.probe_process\n"
        "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert not {"torch", "redis", "vllm", "transformers", "numpy", "msgspec"} & set(done.stdout.split())


def test_text_and_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {
        "python": Found(OK, "fine"),
        "redis": Found(MISSING, "none", "install it"),
        "disk": Found(WARN, "slow", "x"),
    }
    monkeypatch.setattr(run, "probe", lambda name, limit_s: findings[name])
    assert run.doctor_command(only=list(findings)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["ok", "python", "fine"] and said[2].strip() == "-> install it"
    assert said[-1] == "1 ok, 1 to look at, 1 not there (optional), 0 wrong"
    findings["disk"] = Found(WRONG, "full", "free some")
    assert run.doctor_command(only=list(findings)) == 1


def test_an_unknown_probe_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "warp"]) == 2
    assert "the probes are: python, " in capsys.readouterr().err


# ---------------------------------------------------------------- probes that misbehave


def test_a_probe_that_hangs_is_killed_with_its_children(made: Path) -> None:
    marker = made / "pid"
    package(
        made,
        "torch",
        f"""
        import pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path({str(marker)!r}).write_text(str(child.pid))
        time.sleep(600)
    """,
    )
    found = run.probe("torch", limit_s=4.0)
    assert found.state == WRONG and "no answer within 4 s" in found.says
    if marker.exists():  # else the machine was too slow to come so far
        pid, deadline = int(marker.read_text()), time.monotonic() + 60
        while time.monotonic() < deadline and alive(pid):
            time.sleep(0.05)
        assert not alive(pid)


def test_a_probe_that_cannot_be_killed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        pid, stdout, stderr = -1, None, None

        def __init__(self, *_: object, **__: object) -> None: ...

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("probe", timeout)

        communicate = wait

    monkeypatch.setattr(run.subprocess, "Popen", Stuck)
    monkeypatch.setattr(run.os, "killpg", lambda _pid, _signal: None)
    assert "no answer within 4 s" in run.probe("disk", limit_s=4.0).says


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_probe_that_crashes_or_prints_is_a_finding(made: Path) -> None:
    package(made, "torch", "import os\nos.abort()\n")
    found = run.probe("torch", limit_s=ALL_DAY)
    assert found.state == WRONG and "SIGABRT" in found.says and found.remedy
    (made / "torch" / "__init__.py").write_text('print("asyncrl")\nimport sys\nsys.exit(3)\n')
    found = run.probe("torch", limit_s=ALL_DAY)
    assert found.state == WRONG and "code 3" in found.says


# ---------------------------------------------------------------- made environments: software


def test_ascend_package_without_its_toolkit_is_named_as_the_cause(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    package(made, "torch", 'raise ImportError("libhccl.so: cannot open shared object file")')
    package(made, "torch_npu", "", version="2.13.0")
    found = run.probe("torch", limit_s=ALL_DAY)
    assert found.state == WRONG and "torch_npu 2.13.0 is installed, CANN is not found" in found.says
    assert "pip uninstall torch_npu" in found.remedy
    found = run.probe("ascend", limit_s=ALL_DAY)
    assert found.state == WRONG and "breaks `import torch`" in found.says


def test_torch_that_is_broken_otherwise(made: Path) -> None:
    package(made, "torch", 'raise OSError("undefined symbol: x")')
    found = run.probe("torch", limit_s=ALL_DAY)
    assert found.state == WRONG and "undefined symbol" in found.says and "force-reinstall" in found.remedy


TORCH = """
    __version__ = {version!r}
    class version:
        cuda = {cuda!r}
    class cuda:
        @staticmethod
        def is_available(): return {count} > 0
        @staticmethod
        def device_count(): return {count}
        @staticmethod
        def get_device_properties(index):
            class P:
                name, total_memory = "NVIDIA H200", 141 << 30
            return P
"""


def test_torch_and_its_devices(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(made, "torch", TORCH.format(version="2.13.0", cuda="13.0", count=1))
    found = run.probe("torch", limit_s=ALL_DAY)
    assert (found.state, found.says) == (OK, "torch 2.13.0; cuda:0 NVIDIA H200, 141 GiB")
    (made / "torch" / "__init__.py").write_text(textwrap.dedent(TORCH.format(version="2.4.1", cuda=None, count=0)))
    assert "older than 2.9" in run.probe("torch", limit_s=ALL_DAY).says


def test_a_build_for_cpus_beside_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "fake_torch.py").write_text(textwrap.dedent(TORCH.format(version="2.13.0+cpu", cuda=None, count=0)))
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("fake_torch")
    monkeypatch.setattr(software.importlib, "import_module", lambda name: made)
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: object())
    found = software.torch(nodes=tmp_path)
    assert found.state == WRONG and "a build for CPUs" in found.says and "0 of 1 CUDA" in found.says


def test_engine_of_an_environment_beside_this_one(tmp_path: Path) -> None:
    prefix = tmp_path / ".venv"
    found = software.engine("vllm", prefix=str(prefix))
    assert found.state == MISSING and "make vllm" in found.remedy
    python = program(tmp_path / ".venv-vllm" / "bin", "python", "echo 0.33.0")
    assert software.engine("vllm", prefix=str(prefix)) == Found(OK, f"vllm 0.33.0 in {python}")
    program(tmp_path / ".venv-vllm" / "bin", "python", "echo 'ImportError: libcudart.so.13' >&2; exit 1")
    found = software.engine("vllm", prefix=str(prefix))
    assert found.state == WRONG and "libcudart.so.13" in found.says and "pins its torch" in found.remedy


def test_engine_that_hangs_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "STEP_S", 0.3)
    program(tmp_path / ".venv-sglang" / "bin", "python", "sleep 600")
    found = software.engine("sglang", prefix=str(tmp_path / ".venv"))
    assert found.state == WRONG and "longer than 0.3 s" in found.says


@pytest.mark.parametrize(
    ("says", "state"),
    [
        ("Redis server v=7.0.15 sha=0:0", WARN),
        ("Redis server v=7.2.10 sha=0:0", WARN),
        ("Redis server v=7.2.11 sha=0:0", OK),
        ("Redis server v=7.4.5 sha=0:0", WARN),
        ("Redis server v=7.4.6 sha=0:0", OK),
        ("Redis server v=8.0.4 sha=0:0", OK),
        ("Redis server v=8.2.1 sha=0:0", WARN),
        ("Redis server v=8.2.2 sha=0:0", OK),
        ("Redis server v=8.4.0 sha=0:0", OK),
        ("Valkey server v=8.1.4 sha=0:0", OK),
        ("hello", WARN),
    ],
)
def test_versions_of_redis(says: str, state: str, tmp_path: Path) -> None:
    program(tmp_path, "redis-server", f"echo '{says}'")
    found = software.redis(path=str(tmp_path))
    assert found.state == state, found
    assert ("known holes below 7.2.11, 7.4.6" in found.says) == (state == WARN and says != "hello")


def test_no_redis(tmp_path: Path) -> None:
    found = software.redis(path=str(tmp_path))
    assert found.state == MISSING and "sqlite" in found.remedy


def test_sandbox(tmp_path: Path) -> None:
    assert software.sandbox(path=str(tmp_path)).remedy == "apt-get install bubblewrap"
    said = "bwrap: No permissions to create new namespace"
    program(tmp_path, "bwrap", f"echo '{said}' >&2; exit 1")
    kernel = tmp_path / "sys"
    (kernel / "kernel").mkdir(parents=True)
    found = software.sandbox(path=str(tmp_path), kernel=kernel)
    assert found.state == WARN and said in found.says and "seccomp=unconfined" in found.remedy
    (kernel / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    assert software.sandbox(path=str(tmp_path), kernel=kernel).remedy == "sysctl kernel.unprivileged_userns_clone=1"
    program(tmp_path, "bwrap", 'if [ "$1" = --version ]; then echo bubblewrap 9; fi')
    assert software.sandbox(path=str(tmp_path)) == Found(OK, "bubblewrap 9, namespaces work")


def test_packages_and_versions() -> None:
    assert software.packages().state == OK
    assert software.numbers("2.13.0+cpu") == (2, 13, 0) and software.numbers("7.2") == (7, 2)
    assert software.numbers("2.10.0") > software.numbers("2.9.1")
    assert software.sqlite().state == OK


# ---------------------------------------------------------------- made environments: machine


def test_interpreter() -> None:
    assert machine.python((3, 10, 4)).state == WRONG and machine.python((3, 12, 0)).state == OK


def test_share_of_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    found = machine.processor(tmp_path / "cpu.max")
    assert found.state == WARN and ("1 of them" in found.says or "1 cores" in found.says)
    assert "for this container" not in machine.processor(tmp_path / "none").says


def test_memory_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    (tmp_path / "max").write_text("max\n")
    assert machine.memory(tmp_path / "meminfo", tmp_path / "max").state == OK
    (tmp_path / "max").write_text(f"{1 << 30}\n")
    found = machine.memory(tmp_path / "meminfo", tmp_path / "max")
    assert found.state == WARN and "at most 1.0 GiB" in found.says
    assert machine.memory(tmp_path / "none", tmp_path / "max").state == WARN


def test_devices_by_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert machine.devices(tmp_path).state == MISSING
    for name in ("nvidia0", "nvidia1", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine.devices(tmp_path) == Found(OK, "2 x cuda")
    (tmp_path / "davinci0").touch()
    assert "CANN" in machine.devices(tmp_path, ascend=tmp_path / "none").remedy
    assert machine.devices(tmp_path, ascend=tmp_path).state == OK


def test_disk(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    found = machine.disk(tmp_path, mounts)
    assert found.state == WARN and "(nfs4)" in found.says and "local disk" in found.remedy
    assert filesystem(Path("/usr"), mounts) == "ext4"
    assert machine.disk(tmp_path / "none", mounts).state == WRONG


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(total: int, free: int) -> None:
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("U", (), {"total": total, "free": free}))

    usage(64 << 20, 64 << 20)
    assert "--shm-size" in machine.shared_memory(tmp_path).remedy
    usage(64 << 30, 1 << 30)
    assert "asyncrl-*" in machine.shared_memory(tmp_path).remedy
    usage(64 << 30, 60 << 30)
    assert machine.shared_memory(tmp_path).state == OK


def test_limits() -> None:
    assert machine.limits(lambda which: (1024, 524288)).remedy.startswith("ulimit -n 4096")
    assert machine.limits(lambda which: (1024, 2048)).remedy.startswith("ulimit -n 2048")
    assert machine.limits(lambda which: (-1, -1)) == Found(
        OK, "unlimited open files (hard unlimited), unlimited processes"
    )


def test_sockets_in_a_long_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    found = machine.sockets(deep)
    assert found.state == WARN and "107 fit" in found.says
    assert machine.sockets(Path("/tmp")).state == OK


def test_clock() -> None:
    assert machine.clock(state=5).state == WARN and machine.clock(state=0).state == OK
    assert "in the past" in machine.clock(state=0, now=0.0).says
    assert "cannot be asked" in machine.clock(state=-1).says


def test_every_probe_has_a_place_in_the_documentation() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert [name for name in PROBES if f"| {name} |" not in page] == []

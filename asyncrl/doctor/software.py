"""Probes of software: packages, torch, Ascend, engines, extras, Redis, SQLite, the sandbox."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

from asyncrl.doctor.machine import MISSING, OK, WARN, WRONG, Found
from asyncrl.runtime.device import device_nodes

#: Versions below these have known holes in scripts (CVE-2025-49844 and others), unless the distribution patched them.
PATCHED_REDIS: dict[tuple[int, ...], tuple[int, ...]] = {
    (7, 2): (7, 2, 11),
    (7, 4): (7, 4, 6),
    (8, 0): (8, 0, 4),
    (8, 2): (8, 2, 2),
}
LEAST_TORCH = (2, 9)
ENGINES = {"vllm": "vllm", "sglang": "sglang"}
#: Package -> its extra, purpose, and module.
EXTRAS = {
    "transformers": ("learner", "models and tokenizers", "transformers"),
    "flash-attn": ("flash", "attention of packed rows on CUDA", "flash_attn"),
    "liger-kernel": ("cuda", "learner.liger", "liger_kernel"),
    "megatron-core": ("megatron", "learner.backend = \"megatron\"", "megatron.core"),
    "peft": ("lora", "learner.lora", "peft"),
    "torchao": ("optim-8bit", "adamw_8bit", "torchao"),
    "aiohttp": ("http", "engines behind HTTP", "aiohttp"),
    "tensorboard": ("learner", "curves", "tensorboard"),
}  # fmt: skip
STEP_S = 60.0
_VERSION = (
    "import importlib, sys; m = importlib.import_module(sys.argv[1]); print(getattr(m, '__version__', 'unknown'))"
)


def packages() -> Found:
    """Packages of the core are installed, in supported versions."""
    try:
        wanted = importlib.metadata.requires("asyncrl") or []
    except importlib.metadata.PackageNotFoundError:
        return Found(
            WARN,
            "asyncrl runs from a folder and is not installed: its requirements are not known",
            "pip install -e . in the checkout",
        )
    old, absent = [], []
    for line in wanted:
        name = re.match(r"[\w.\-]+", line)
        if name is None or "extra ==" in line or ("Windows" in line and os.name == "nt"):
            continue
        least = re.search(r">=\s*([\d.]+)", line)
        try:
            have = importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            absent.append(name[0])
            continue
        if least and numbers(have) < numbers(least[1]):
            old.append(f"{name[0]} {have} (needs {least[1]})")
    if absent or old:
        what = [f"missing: {', '.join(absent)}"] * bool(absent) + [f"too old: {', '.join(old)}"] * bool(old)
        return Found(WRONG, "; ".join(what), "pip install --upgrade asyncrl")
    return Found(OK, f"asyncrl {importlib.metadata.version('asyncrl')} with all that it needs")


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def installed_version(package: str) -> str:
    """The installed version; empty without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch(nodes: Path = Path("/dev")) -> Found:
    """torch can be imported and sees the devices."""
    if importlib.util.find_spec("torch") is None:
        return Found(
            MISSING,
            "not installed: this host can run the buffer, weight sync and reward workers",
            "pip install 'asyncrl[learner]' where models run",
        )
    try:
        found = importlib.import_module("torch")
    except Exception as error:  # any exception of a broken installation is the finding
        return broken_torch(error)
    version = str(found.__version__)
    if numbers(version) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return Found(WRONG, f"torch {version} is older than {least}", f"pip install 'torch>={least}'")
    count = found.cuda.device_count() if found.cuda.is_available() else 0
    shown = [f"torch {version}"]
    for index in range(count):
        properties = found.cuda.get_device_properties(index)
        shown.append(f"cuda:{index} {properties.name}, {properties.total_memory / (1 << 30):.0f} GiB")
    there = len(device_nodes(nodes)["cuda"])
    if there > count:
        why = "a build for CPUs" if found.version.cuda is None else f"built for CUDA {found.version.cuda}"
        remedy = "install the build for this driver (nvidia-smi shows its CUDA), or look at CUDA_VISIBLE_DEVICES"
        return Found(WRONG, f"{'; '.join(shown)} ({why}) sees {count} of {there} CUDA devices", remedy)
    return Found(OK, "; ".join(shown))


def broken_torch(error: Exception) -> Found:
    """Why `import torch` fails. torch_npu registers itself with torch: without CANN the import fails."""
    said = f"import torch: {type(error).__name__}: {error}".splitlines()[0][:300]
    if installed_version("torch_npu") and re.search(r"libhccl|libascendcl|libge_runner|torch_npu|npu", str(error)):
        remedy = "source /usr/local/Ascend/ascend-toolkit/set_env.sh, or pip uninstall torch_npu where no NPU is"
        return Found(
            WRONG, f"{said} (torch_npu {installed_version('torch_npu')} is installed, CANN is not found)", remedy
        )
    return Found(WRONG, said, "install torch anew: pip install --force-reinstall --no-deps torch")


def ascend(root: Path = Path("/usr/local/Ascend")) -> Found:
    version = installed_version("torch_npu")
    home = os.environ.get("ASCEND_HOME_PATH", "") or (str(root) if root.exists() else "")
    if not version:
        return Found(
            MISSING,
            f"torch_npu is not installed{f'; CANN at {home}' if home else ''}",
            "pip install 'asyncrl[npu]'" if home else "nothing, on hosts without an NPU",
        )
    if not home:
        return Found(
            WRONG,
            f"torch_npu {version} without CANN: it breaks `import torch`",
            "pip uninstall torch_npu, or install CANN and source its set_env.sh",
        )
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # see torch
        return broken_torch(error)
    have = installed_version("torch")
    if numbers(have)[:2] != numbers(version)[:2]:
        return Found(WRONG, f"torch_npu {version} does not match torch {have}", f"pip install torch=={version}")
    return Found(OK, f"torch_npu {version}, CANN at {home}")


def vllm() -> Found:
    return engine("vllm")


def sglang() -> Found:
    """The sglang engine's server."""
    return engine("sglang")


def engine(name: str, prefix: str = sys.prefix) -> Found:
    """An engine in this environment, or in the one that `make NAME` creates; really imported."""
    sibling = Path(prefix).parent / f".venv-{name}" / "bin" / "python"
    if importlib.util.find_spec(ENGINES[name]) is not None:
        python = sys.executable
    elif sibling.exists():
        python = str(sibling)
    else:
        return Found(
            MISSING,
            f"not in this environment, and there is no {sibling.parent.parent}",
            f"make {name}: an environment of its own, since {name} pins its torch",
        )
    try:
        done = subprocess.run(
            [python, "-c", _VERSION, ENGINES[name]],
            capture_output=True,
            text=True,
            check=False,
            timeout=STEP_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Found(WRONG, f"import {name} in {python} takes longer than {STEP_S:g} s", f"make {name} makes it anew")
    except OSError as error:
        return Found(WRONG, f"{python}: {error.strerror}", f"make {name} makes it anew")
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or [f"code {done.returncode}"])[-1]
        return Found(
            WRONG,
            f"import {name} in {python}: {last[:300]}",
            f"make {name}: an environment of its own, since {name} pins its torch",
        )
    return Found(OK, f"{name} {done.stdout.split()[-1]} in {python}")


def extras() -> Found:
    """Optional packages, by their metadata, without importing them."""
    have = {package: installed_version(package) for package in EXTRAS}
    broken = [package for package, version in have.items() if version and not importable(EXTRAS[package][2])]
    shown = ", ".join(f"{package} {version}" for package, version in have.items() if version)
    if broken:
        return Found(
            WRONG,
            f"{', '.join(broken)}: installed, and not to be found by Python",
            f"pip install --force-reinstall --no-deps {' '.join(broken)}",
        )
    absent = [package for package, version in have.items() if not version]
    if absent:
        names = sorted({EXTRAS[package][0] for package in absent})
        what = ", ".join(f"{package} ({EXTRAS[package][1]})" for package in absent)
        return Found(
            MISSING, f"{shown or 'none'}; without {what}", f"pip install 'asyncrl[{','.join(names)}]' as needed"
        )
    return Found(OK, shown)


def importable(module: str) -> bool:
    """Whether Python finds the module."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def redis(path: str | None = None) -> Found:
    """A Redis or Valkey server on the PATH, and whether it has known holes."""
    server = next((found for name in ("redis-server", "valkey-server") if (found := shutil.which(name, path=path))), "")
    if not server:
        return Found(
            MISSING,
            "no redis-server or valkey-server on the PATH",
            'apt-get install redis-server, or buffer.store = "sqlite" (the default)',
        )
    try:
        done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found(WRONG, f"{server}: {error}", 'install it anew, or use buffer.store = "sqlite"')
    version = re.search(r"v=([\d.]+)", done.stdout)
    if version is None:
        return Found(WARN, f"{server} does not tell its version")
    name = "Valkey" if "valkey" in done.stdout.lower() else "Redis"
    return judged_redis(f"{name} {version[1]} at {server}", name, numbers(version[1]))


def judged_redis(shown: str, name: str, version: tuple[int, ...]) -> Found:
    """The finding for a version. Distributions patch without a new number, so it is never more than a warning."""
    if name != "Redis":
        return Found(OK, shown)
    line = version[:2]
    least = PATCHED_REDIS.get(line)
    old = version < least if least else line < max(PATCHED_REDIS)
    if not old:
        return Found(OK, shown)
    known = ", ".join(".".join(map(str, one)) for one in sorted(PATCHED_REDIS.values()))
    return Found(
        WARN,
        f"{shown}: scripts have known holes below {known}, where the distribution has not mended it",
        "upgrade it; until then let only the buffer reach it",
    )


def sqlite() -> Found:
    version = tuple(map(int, sqlite3.sqlite_version.split(".")))
    if version < (3, 35):
        return Found(WRONG, f"SQLite {sqlite3.sqlite_version}", "use a Python that has SQLite 3.35 or newer")
    return Found(OK, f"SQLite {sqlite3.sqlite_version}")


def sandbox(
    path: str | None = None,
    kernel: Path = Path("/proc/sys"),
    command: tuple[str, ...] = ("/bin/true",),
) -> Found:
    """Programs of a model can be isolated: bubblewrap and namespaces, really tried."""
    bwrap = shutil.which("bwrap", path=path)
    without = "the code task and sandboxed tools need it; nothing else does"
    if not bwrap:
        return Found(MISSING, f"no bubblewrap: {without}", "apt-get install bubblewrap")
    options = "--unshare-all --die-with-parent --ro-bind / / --tmpfs /tmp --proc /proc --dev /dev"
    words = [bwrap, *shlex.split(options), *command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found(WARN, f"{bwrap}: {error}", "look at the container's seccomp and AppArmor rules")
    if done.returncode == 0:
        version = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
        return Found(OK, f"{version.strip() or bwrap}, namespaces work")
    said = ([line for line in done.stderr.splitlines() if line.strip()] or [f"code {done.returncode}"])[-1]
    return Found(WARN, f"{bwrap}: {said[:200]} ({without})", userns_remedy(kernel))


def userns_remedy(kernel: Path = Path("/proc/sys")) -> str:
    """The remedy for the setting that forbids user namespaces."""
    rules = {
        "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    }
    for name, (bad, remedy) in rules.items():
        try:
            if (kernel / name).read_text().strip() == bad:
                return remedy
        except OSError:
            continue
    return "start the container with --security-opt seccomp=unconfined, or run the reward workers on the host"


def gang() -> Found:
    """Ranks of a gang find each other: torch's rendezvous over Gloo on this host."""
    if importlib.util.find_spec("torch") is None:
        return Found(MISSING, "without torch there is no gang")
    code = (
        "import datetime, json, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, 1, True, timeout=datetime.timedelta(seconds=20))\n"
        "d.init_process_group('gloo', store=s, rank=0, world_size=1, timeout=datetime.timedelta(seconds=20))\n"
        "d.destroy_process_group(); print(json.dumps({'nccl': d.is_nccl_available()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=STEP_S, check=False)
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or [f"code {done.returncode}"])[-1]
        remedy = "set GLOO_SOCKET_IFNAME to an interface whose address the host name has (lo for one host)"
        return Found(WRONG, f"a group of one rank over Gloo: {last[:300]}", remedy)
    nccl = json.loads(done.stdout.splitlines()[-1])["nccl"]
    return Found(OK, f"Gloo works; NCCL {'is there' if nccl else 'is not in this torch'}")

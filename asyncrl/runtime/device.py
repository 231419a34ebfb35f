"""The only module that distinguishes cuda, npu and cpu, and nccl, hccl and gloo.

Guarantees:
1. no other module branches on a device type: it asks `supports(feature)` or calls a method that has no effect on
   devices without the feature;
2. torch is imported inside the methods, so that contracts stay light;
3. the CPU is a device like the others, with Gloo as its collective backend.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncrl.device_features import DEVICES
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Capabilities(NamedTuple):
    """Properties of a device type: collective backend, variable that hides devices, module, features, files."""

    dist_backend: str
    visible_env: str
    module: str  # imported first so that torch knows the type; empty: built into torch
    features: frozenset[str]
    nodes: str = ""  # pattern of its files in /dev, one per device; empty: none


MEMORY_EVENTS = 200_000  # entries in the allocator's history

#: Features are explained in `asyncrl.device_features`.
TABLE: dict[str, Capabilities] = {
    "cpu": Capabilities("gloo", "", "", DEVICES["cpu"]),
    "cuda": Capabilities("nccl", "CUDA_VISIBLE_DEVICES", "", DEVICES["cuda"], r"nvidia\d+"),
    "npu": Capabilities("hccl", "ASCEND_RT_VISIBLE_DEVICES", "torch_npu", DEVICES["npu"], r"davinci\d+"),
}


def device_nodes(folder: Path = Path("/dev")) -> dict[str, list[str]]:
    """The accelerators of this host by type: their files in the order of their numbers. torch is not asked."""
    try:
        names = sorted(os.listdir(folder), key=lambda name: (len(name), name))
    except OSError:
        names = []
    types = {kind: known.nodes for kind, known in TABLE.items() if known.nodes}
    return {kind: [name for name in names if re.fullmatch(nodes, name)] for kind, nodes in types.items()}


def rocm_devices(folder: Path = Path("/dev"), nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    """Number of AMD GPUs: nodes of the kernel's compute driver with SIMD units (those without are CPUs)."""
    if not (folder / "kfd").exists():
        return 0
    try:
        texts = [(node / "properties").read_text() for node in nodes.iterdir()]
    except OSError:
        return 0
    return sum(bool(re.search(r"^simd_count [1-9]", text, re.MULTILINE)) for text in texts)


class Device:
    """One device of this process: `type` (cpu, cuda, npu) and `index`."""

    def __init__(self, kind: str, index: int = 0) -> None:
        if kind not in TABLE:
            raise ConfigError("config.type", f"device {kind!r} is not auto or one of {', '.join(TABLE)}")
        self.type = kind
        self.index = index
        self._known = TABLE[kind]

    @staticmethod
    def find(name: str = "auto", *, index: int = 0) -> Device:
        """The device of that name (`auto`, `cpu`, `cuda`, `npu`, `cuda:1`); `index` if the name has none.

        Raises `config.type` if torch does not see it. A CUDA or NPU device becomes the current one.
        """
        kind, _, number = name.partition(":")
        if kind == "auto":
            kind = _accelerator() or "cpu"
        device = Device(kind, int(number) if number.isdigit() else index)
        device._activate()
        return device

    def _activate(self) -> None:
        if self.type == "cpu":
            self.index = 0
            return
        if self._known.module:
            try:
                importlib.import_module(self._known.module)
            except (ImportError, OSError) as error:
                raise ConfigError("config.extra", f"device {self.type}: {error}") from error
        module = self._torch_module()
        if not module.is_available():
            raise ConfigError("config.type", f"torch sees no {self.type} device on this host")
        if self.index >= module.device_count():
            raise ConfigError("config.type", f"{self}: this host has {module.device_count()} of them")
        module.set_device(self.index)

    def _torch_module(self) -> Any:
        import torch

        return torch.get_device_module(self.type)

    def __repr__(self) -> str:
        return "cpu" if self.type == "cpu" else f"{self.type}:{self.index}"

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(repr(self))

    @property
    def dist_backend(self) -> str:
        """The collective backend of tensors on this device."""
        return self._known.dist_backend

    @property
    def group_string(self) -> str:
        """Argument of `init_process_group`: CPU tensors (orders, batches) always use Gloo. Without other devices its
        name stands alone: after an import of torch._dynamo, "cpu:gloo" leaves the group without a default backend.
        """
        return "gloo" if self.type == "cpu" else f"cpu:gloo,{self.type}:{self.dist_backend}"

    @property
    def visible_env(self) -> str:
        """The environment variable that selects a process's devices; empty if there is none."""
        return self._known.visible_env

    @property
    def pin_memory_ok(self) -> bool:
        """Whether host memory can be pinned (FSDP's CPU offload raises without an accelerator otherwise)."""
        return self.supports("pin_memory")

    @property
    def varlen_ok(self) -> bool:
        """Whether torch's kernel for packed sequences runs here: NVIDIA devices of compute capability 8.0 or more."""
        import torch

        if not self.supports("varlen_attention") or torch.version.hip or not torch.cuda.is_available():
            return False
        return torch.cuda.get_device_capability(self.index) >= (8, 0)

    def supports(self, feature: str) -> bool:
        """Whether this device has the feature (see `TABLE`)."""
        return feature in self._known.features

    def synchronize(self) -> None:
        """Wait for the work queued on the device; no effect on a CPU, where calls return when done."""
        if self.type != "cpu":
            self._torch_module().synchronize(self.index)

    def empty_cache(self) -> None:
        """Release cached blocks; no effect on a CPU."""
        if self.type != "cpu":
            self._torch_module().empty_cache()

    def release_memory(self) -> None:
        """Return freed memory to other processes: cached blocks of a device, pages of the heap on a CPU (glibc)."""
        if self.type != "cpu":
            self.empty_cache()
        elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)

    def memory(self) -> dict[str, int]:
        """`used` and `peak` in bytes: of the allocator on an accelerator, resident memory of this process on a CPU."""
        if self.type != "cpu":
            module = self._torch_module()
            return {"used": module.memory_allocated(self.index), "peak": module.max_memory_allocated(self.index)}
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"used": used, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    @property
    def title(self) -> str:
        """The name of the device in torch, such as "NVIDIA H200"; "cpu" for a CPU."""
        return "cpu" if self.type == "cpu" else str(self._torch_module().get_device_name(self.index))

    def mark(self) -> Any:
        """A mark for `seconds_between`: on an accelerator an event in its stream, without waiting."""
        if self.type == "cpu":
            return time.monotonic()
        event = self._torch_module().Event(enable_timing=True)
        event.record()
        return event

    def wait_for(self, mark: Any) -> None:
        """Wait until the device has passed a mark."""
        if self.type != "cpu":
            mark.synchronize()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one; waits until the device has passed both."""
        if self.type == "cpu":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def record_memory(self, on: bool) -> bool:
        """Start or stop the history of the allocator; False if the device has none (a CPU, an NPU)."""
        if not self.supports("memory_history"):
            return False
        memory = self._torch_module().memory
        if on:
            memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")
        else:
            memory._record_memory_history(enabled=None)
        return True

    def memory_snapshot(self) -> dict[str, Any]:
        """The allocator's memory and its history since `record_memory(True)`; empty if the device has none."""
        if not self.supports("memory_history"):
            return {}
        found: dict[str, Any] = self._torch_module().memory._snapshot(self.index)
        return found

    def seed_all(self, seed: int) -> None:
        """Seed torch on the CPU and on every device of this type."""
        import torch

        torch.manual_seed(seed)  # also seeds the accelerators that torch knows

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Generator states, uint8, by name (`cpu`, and the device's own)."""
        import torch

        states = {"cpu": torch.get_rng_state()}
        if self.type != "cpu":
            states[self.type] = self._torch_module().get_rng_state(self.index)
        return states

    def set_rng_state(self, states: dict[str, torch.Tensor]) -> None:
        """Restore `rng_state`; states of other device types are ignored."""
        import torch

        if "cpu" in states:
            torch.set_rng_state(states["cpu"].cpu())
        if self.type != "cpu" and self.type in states:
            self._torch_module().set_rng_state(states[self.type].cpu(), self.index)


def collective_backend(choice: str = "auto") -> str:
    """The collective backend between processes of a run: `choice`, or for `auto` that of this host's device."""
    return TABLE[_accelerator() or "cpu"].dist_backend if choice == "auto" else choice


def device_module(backend: str) -> str:
    """The package that registers this collective backend with torch; empty if torch includes it."""
    return TABLE[_type_of(backend)].module


def collective_device(backend: str, name: str = "") -> Device:
    """The device whose tensors this collective backend carries, or the one of that name.

    Raises `config.type` or `config.extra` if this process cannot use it.
    """
    return Device.find(name or _type_of(backend))


def _type_of(backend: str) -> str:
    for kind, known in TABLE.items():
        if known.dist_backend == backend:
            return kind
    raise ConfigError("config.type", f"collective backend {backend!r} is not one of a known device")


def _accelerator() -> str | None:
    """The type of this host's accelerator, or None. (`torch.accelerator.*` raises on a CPU: call only this.)"""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in TABLE else None

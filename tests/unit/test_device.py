"""The device layer on a CPU, and its selection logic for a device that is not there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.runtime.device import TABLE, Device


def test_the_cpu_is_a_device_like_the_others() -> None:
    device = Device.find("cpu")
    assert (device.type, device.index, repr(device)) == ("cpu", 0, "cpu")
    assert (device.dist_backend, device.group_string, device.visible_env) == ("gloo", "gloo", "")
    assert not device.pin_memory_ok
    device.synchronize()  # torch.accelerator's own would raise here
    device.empty_cache()
    memory = device.memory()
    assert 1 << 20 < memory["used"] <= memory["peak"] * 2
    assert torch.ones(1, device=device.torch_device).device.type == "cpu"


def test_generator_states_round_trip() -> None:
    device = Device("cpu")
    device.seed_all(5)
    state = device.rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert state["cpu"].dtype == torch.uint8


def test_group_strings_keep_cpu_tensors_on_gloo() -> None:
    assert Device("cuda", 3).group_string == "cpu:gloo,cuda:nccl"
    assert Device("npu").group_string == "cpu:gloo,npu:hccl"
    assert repr(Device("cuda", 3)) == "cuda:3"
    assert Device("npu").visible_env == "ASCEND_RT_VISIBLE_DEVICES"


def test_features_come_from_the_table() -> None:
    assert Device("cuda").supports("flash_attention") and not Device("npu").supports("flash_attention")
    assert Device("npu").supports("fused_attention") and not Device("cpu").supports("varlen_attention")
    assert not Device("cpu").supports("ipc")
    assert set(TABLE) == {"cpu", "cuda", "npu"}


HAS_NPU = importlib.util.find_spec("torch_npu") is not None


@pytest.mark.skipif(torch.accelerator.is_available() or HAS_NPU, reason="this host has an accelerator")
def test_auto_without_an_accelerator_is_the_cpu() -> None:
    assert repr(Device.find("auto")) == "cpu"
    assert repr(Device.find("cpu", index=3)) == "cpu"


def test_what_is_not_there_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="tpu"):
        Device.find("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda"):
            Device.find("cuda")
    if not HAS_NPU:
        with pytest.raises(ConfigError):
            Device.find("npu")


HCCL = """
import torch, torch.distributed as dist
from asyncrl.runtime.device import Device
made = []
def creator(store, rank, size, timeout):
    made.append(rank)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("hccl", creator, devices=["cpu"])
device = Device("npu")
dist.init_process_group(device.dist_backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert dist.get_backend() == "hccl" and made == [0] and tensor.tolist() == [1, 1, 1]
dist.destroy_process_group()
print("selected", dist.get_default_backend_for_device("cpu"), device.group_string)
"""

NPU = """
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("npu")
import asyncrl.runtime.device
print(asyncrl.runtime.device._accelerator())
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hccl_is_selected_by_name_over_a_stand_in() -> None:
    assert "selected" in run(HCCL)


def test_an_npu_is_found_by_torch_s_own_question() -> None:
    assert run(NPU).strip() == "npu"


def test_torch_is_not_imported_with_the_module() -> None:
    assert run("import sys, asyncrl.runtime.device; print('torch' in sys.modules)").strip() == "False"

"""Stands in for torch_npu: `npu` is the device of simulated_npu.cpp, `hccl` Gloo that refuses tensors of the host.

`settings.json`, in its folder, names the built library, the number of devices, and a folder: every process writes its
counters there at its end. Not variables: producers get few of those that a launcher has.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text())


def _load() -> Any:
    os.environ["SIMULATED_NPU_DEVICES"] = str(SETTINGS["devices"])
    spec = importlib.util.spec_from_file_location("simulated_npu", SETTINGS["library"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _load()
torch.utils.rename_privateuse1_backend("npu")


def _index(device: Any) -> int:
    if device is None:
        return _C.current_device()
    return device if isinstance(device, int) else torch.device(device).index or 0


class device:  # as in torch.cuda
    def __init__(self, number: Any) -> None:
        self.number, self.old = _index(number), 0

    def __enter__(self) -> None:
        self.old = _C.current_device()
        _C.set_device(self.number)

    def __exit__(self, *_: Any) -> None:
        _C.set_device(self.old)


def new_stream(device: Any = None, priority: int = 0) -> Any:
    return torch.Stream(device=torch.device("npu", _index(device)), priority=priority)


def new_event(enable_timing: bool = False, **_: Any) -> Any:
    return torch.Event(torch.device("npu", _index(None)), enable_timing=enable_timing)


npu: Any = types.ModuleType("torch.npu")
vars(npu).update(
    is_available=lambda: _C.count() > 0,
    device_count=_C.count,
    set_device=lambda device: _C.set_device(_index(device)),
    current_device=_C.current_device,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    manual_seed=lambda seed: None,
    manual_seed_all=lambda seed: None,
    synchronize=lambda device=None: _C.synchronize(_index(device)),
    empty_cache=lambda: None,
    memory_allocated=lambda device=None: _C.used(_index(device)),
    max_memory_allocated=lambda device=None: _C.peak(_index(device)),
    reset_peak_memory_stats=lambda device=None: _C.reset_peak(_index(device)),
    mem_get_info=lambda device=None: (8 << 30, 64 << 30),
    get_device_name=lambda device=None: "Simulated NPU",
    get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
    set_rng_state=lambda state, device=None: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
    default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=20),
    stream=lambda given: given,
    Stream=new_stream,
    Event=new_event,
    device=device,
)
sys.modules["torch.npu"] = npu
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def _make_group(given: Any, _: Any = None) -> Any:
    gloo = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)
    return _C.make_backend(gloo, given.group_rank, given.group_size)


dist.Backend.register_backend("hccl", _make_group, extended_api=True, devices=["npu"])


def npu_fusion_attention(
    q: Any, k: Any, v: Any, head_num: int, input_layout: str, *, scale: float = 1.0, sparse_mode: int = 0, **more: Any
) -> Any:
    """The fused operator over packed sequences (TND) or rows (BSND), by plain attention."""

    def one(*parts: Any) -> Any:  # [S, H, D] each
        heads = [part.transpose(0, 1)[None] for part in parts]
        grouped = heads[0].shape[1] != heads[1].shape[1]
        causal = sparse_mode in (2, 3)
        return F.scaled_dot_product_attention(*heads, is_causal=causal, scale=scale, enable_gqa=grouped)[0].transpose(
            0, 1
        )

    if input_layout == "TND":
        ends = [[0, *map(int, more[name])] for name in ("actual_seq_qlen", "actual_seq_kvlen")]
        spans = zip(*ends, *(side[1:] for side in ends), strict=False)  # starts have one more
        out = torch.cat([one(q[a:c], k[b:d], v[b:d]) for a, b, c, d in spans])
    elif input_layout == "BSND":
        out = torch.stack([one(q[row], k[row], v[row]) for row in range(q.shape[0])])
    else:
        raise NotImplementedError(input_layout)
    return (out, None, None, None, 0, 0, 0)


def npu_rotary_mul(*_: Any) -> Any:
    raise NotImplementedError


def _report(folder: str) -> None:
    counters = {"argv": sys.argv[:4], "operators": len(_C.operators()), "collectives": _C.collectives()}
    counters |= {"copies": _C.copies(), "peak": [_C.peak(number) for number in range(_C.count())]}
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(counters))


if SETTINGS["reports"]:
    atexit.register(_report, SETTINGS["reports"])

"""The features of torch's device types, as data: for `asyncrl.runtime.device` and `asyncrl.config.capabilities`.

Only the standard library is imported: `asyncrl doctor` looks at a machine without anything else.
"""

from __future__ import annotations

#: Features of torch's device types: fused_adamw, flash_attention (by the package flash_attn), fused_attention (by the
#: device's own package), varlen_attention (torch's kernel), triton, ipc (handles between processes), memory_history (of
#: the allocator), pin_memory, streams, trace (by torch's own profiler), float64.
DEVICES: dict[str, frozenset[str]] = {
    "cpu": frozenset({"fused_adamw", "float64"}),
    "cuda": frozenset({
        "fused_adamw", "flash_attention", "varlen_attention", "triton", "ipc", "memory_history",
        "pin_memory", "streams", "trace", "float64",
    }),
    "npu": frozenset({"fused_attention", "pin_memory", "streams"}),
}  # fmt: skip

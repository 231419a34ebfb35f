"""Peak performance of accelerators by torch's device name: the denominator of `mfu`. Pure.

Figures are those of vendors' data sheets for dense bfloat16 and float16 products (half of a figure "with sparsity").
Other devices and float32 have no `mfu` unless `learner.profile.peak_flops` is set.
Example: `peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")` is 989.4e12; of "NVIDIA H100 PCIe" 756e12.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """A device: a pattern of its name, operations per second, the source; `half_only`: no bfloat16 units."""

    pattern: str
    flops: float
    source: str
    half_only: bool = False


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet"
#: The first matching pattern counts, so variants come before the plain name.
TABLE = (
    Peak(r"\bGB200\b", 2500e12, "NVIDIA GB200 NVL72 data sheet: 5 PFLOPS with sparsity per GPU"),
    Peak(r"\bB200\b", 2250e12, "NVIDIA HGX B200 data sheet: 4.5 PFLOPS with sparsity per GPU"),
    Peak(r"\bH200 NVL\b", 835e12, "NVIDIA H200 Tensor Core GPU data sheet: 1671 TFLOPS with sparsity"),
    Peak(r"\bG?H200\b", 989.4e12, "NVIDIA H200 and GH200 data sheets: 1979 TFLOPS with sparsity"),
    Peak(r"\bH100 NVL\b", 835e12, _HOPPER + ": 1671 TFLOPS with sparsity"),
    Peak(r"\bH100 PCIe\b", 756e12, _HOPPER + ": 1513 TFLOPS with sparsity"),
    Peak(r"\bH[18]00\b", 989.4e12, _HOPPER + ": 1979 TFLOPS with sparsity (SXM)"),
    Peak(r"\bH20\b", 148e12, "NVIDIA H20 data sheet"),
    Peak(r"\bA[18]00\b", 312e12, "NVIDIA A100 Tensor Core GPU data sheet"),
    Peak(r"\bA40\b", 149.7e12, "NVIDIA A40 data sheet"),
    Peak(r"\bA30\b", 165e12, "NVIDIA A30 Tensor Core GPU data sheet"),
    Peak(r"\bA10\b", 125e12, "NVIDIA A10 Tensor Core GPU data sheet"),
    Peak(r"\bL40S\b", 362e12, "NVIDIA L40S data sheet: 733 TFLOPS with sparsity (362.05 dense)"),
    Peak(r"\bL40\b", 181e12, "NVIDIA L40 data sheet"),
    Peak(r"\bL4\b", 121e12, "NVIDIA L4 Tensor Core GPU data sheet: 242 TFLOPS with sparsity"),
    Peak(r"\bRTX 4090\b", 165.2e12, "NVIDIA Ada GPU architecture white paper, appendix A (float32 sums)"),
    Peak(r"\bV100\b", 125e12, "NVIDIA V100 Tensor Core GPU data sheet (SXM2)", half_only=True),
    Peak(r"\bT4\b", 65e12, "NVIDIA T4 Tensor Core GPU data sheet", half_only=True),
    Peak(r"\bMI3(00|25)X\b", 1307.4e12, "AMD Instinct MI300X and MI325X data sheets"),
    Peak(r"\bMI250X\b", 191.5e12, "AMD Instinct MI250X data sheet: 383 TFLOPS for both dies, torch sees one"),
)


def peak_flops(name: str, dtype: str) -> float:
    """Return operations per second of a device for products in `dtype` (a name of `model.dtype`); 0 if unknown."""
    if dtype not in ("bfloat16", "float16"):
        return 0.0
    found = next((one for one in TABLE if re.search(one.pattern, name)), None)
    return 0.0 if found is None or (found.half_only and dtype != "float16") else found.flops

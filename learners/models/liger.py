"""Liger's fused kernels (arXiv 2410.10989) for norms, rotary embeddings and gated MLPs, on devices with Triton.

Guarantees:
1. only layers change: log-probs still come from `learners.models.logprobs`, never from Liger's losses;
2. a device without Triton, a missing package or an unknown architecture is an error.

The rotary embedding replaces that of transformers for all models of the architecture in this process. Results equal
those of the plain layers up to rounding.
"""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.runtime.device import Device

WHERE = "learner.liger"
#: Options that would replace the model's forward or its loss.
OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def install(model: Any, device: Device) -> None:
    """Replace the layers of a model of transformers in place.

    Raises:
        ConfigError: `config.conflict`, `config.extra` or `config.model`.
    """
    if not device.supports("triton"):
        raise ConfigError("config.conflict", f"Liger's kernels need a device with Triton, not {device}", where=WHERE)
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
        from liger_kernel.transformers import monkey_patch
    except (ImportError, OSError) as error:
        remedy = "pip install 'asyncrl[cuda]'"
        raise ConfigError("config.extra", f"liger-kernel: {error}", where=WHERE, remedy=remedy) from error
    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError("config.model", f"Liger has no kernels for {kind!r}", where=WHERE)
    apply(model=model, **OFF)

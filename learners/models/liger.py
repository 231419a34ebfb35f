"""Liger's fused kernels (arXiv 2410.10989) for norms, rotary embeddings and gated MLPs, on devices with Triton.

Guarantees:
1. only the layers change: log-probs come from `learners.models.logprobs` as without it, never from Liger's own losses;
2. a device without Triton, a missing package and an architecture that Liger does not know are refused, not left as they
   were in silence.
Its rotary embedding takes the place of transformers' for all models of the architecture in this process. Results equal
those of the plain layers up to rounding; where there is a GPU, `tests/unit/test_liger.py` compares them.

Example: Qwen3: every RMSNorm (of queries and keys too) and every MLP of the instance, and `apply_rotary_pos_emb`.
"""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.runtime.device import Device

WHERE = "learner.liger"
#: What replaces the model's forward or its loss.
OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def install(model: Any, device: Device) -> None:
    """Change the layers of a model of transformers in place.

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

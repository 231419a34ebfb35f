"""Metrics of a step, from sums over its updates and from what was known before the first."""

from __future__ import annotations

from asyncrl.config import AlgorithmConfig
from learners.step.batch_passes import Prepared


def start_metrics(ready: Prepared, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return metrics known before the first update."""
    found: dict[str, float] = {}
    if ready.kl is not None:
        found["kl_reference"] = ready.kl
    if algorithm.kl.where != "off":
        found["kl_coeff"] = ready.kl_coeff
    if ready.high is not None:
        found["entropy_threshold"] = ready.entropy_threshold
    if algorithm.entropy_target or algorithm.entropy_coeff:
        found["entropy_coeff"] = algorithm.entropy_coeff if ready.entropy_coeff is None else ready.entropy_coeff
    return found


def update_metrics(totals: dict[str, float], *, tokens: int, updates: int, lr: float, norm: float) -> dict[str, float]:
    """Means over the mini-batches (loss) and over the tokens of the batch (the rest); the largest gradient norm."""
    found = {
        "loss": totals["loss"] / updates,
        "entropy": totals["entropy_sum"] / max(tokens, 1),
        "grad_norm": norm,
        "lr": lr,
    }
    if "entropy_kept_sum" in totals:
        found["entropy_kept_share"] = totals["entropy_kept_sum"] / max(tokens, 1)
    for name in ("teacher_kl", "teacher_jsd"):
        if f"{name}_sum" in totals:
            found[name] = totals[f"{name}_sum"] / max(totals["teacher_tokens"], 1)
    if "kl_reference_sum" in totals:
        found["kl_reference"] = totals["kl_reference_sum"] / max(tokens, 1)
    return found

"""Importance weights of proximal over behaviour policy: they correct for tokens sampled by an older policy.

There are three policies: `behaviour` was recorded by the generator, `proximal` has the learner's weights at the start
of the step, `current` carries the gradient. The loss clips current / proximal; a correction is the weight proximal /
behaviour (arXiv 2505.24298, 2110.00641). If proximal is SET to behaviour (bypass), every weight is 1, because the
loss's own ratio is already the correction. Losses without a ratio (REINFORCE) use the current policy, detached, as
`proximal`.
Guarantees:
1. weights have no gradient and are 0 outside the mask, where inputs may be NaN or infinite;
2. log-ratios are clamped to +-20 before `exp`, in float32 or wider, whatever dtype the model runs in;
3. `keep` is the mask without the rejected tokens, whose weights are 0: a loss over the original mask divides by the
original count, a loss over `keep` by the kept count;
4. each row is complete in one piece, so results do not depend on the split. Corrections with `needs_whole_batch` are
called once, on the flat tokens of the whole batch.

All tensors are flat, `[N]`; `sequences` gives each token's row.
Example: for a row with proximal - behaviour = 0.5, 1.0, -0.5, the weights of `tis` are 1.65, 2 (truncated), 0.61; those
of `icepop` with upper 2 are 1.65, 0, 0.61; `tis` with level sequence truncates e^1 = 2.72 to 2 for all three tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.rejection import (
    LOG_RATIO_LIMIT,
    RejectOption,
    Threshold,
    m2po_keep,
    rejection_mask,
)
from learners.algorithms.tensors import masked, masked_mean, sequence_lengths, sequence_means, sequence_sums
from learners.algorithms.types import Correction

#: `masked` is defined in `tensors` and re-exported for existing users.
__all__ = [
    "CORRECTIONS",
    "Bounds",
    "Level",
    "icepop",
    "is_weights",
    "log_ratio",
    "m2po",
    "masked",
    "mis",
    "needs_whole_batch",
    "none",
    "prox_loglinear",
    "rejection",
    "tis",
]

Level = Literal["token", "sequence", "geometric"]


class Bounds(NamedTuple):
    """Weights are clamped to [floor, upper], or with `lower` set to 0 outside [lower, upper]. None: no such bound."""

    upper: float | None
    lower: float | None = None
    floor: float = 0.0


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return `new - old` clamped to +-20, without gradient where the clamp acts; 0 outside the mask."""
    return (masked(new, mask) - masked(old, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# ---------------------------------------------------------------- weights


def is_weights(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor | None = None,
    *,
    level: Level = "token",
    upper: float | None = 2.0,
    lower: float | None = None,
    floor: float = 0.0,
    batch_normalize: bool = False,
) -> Tensor:
    """Return importance weights `exp(z)`, `[N]`, from d = proximal - behaviour.

    `level` selects z: the token's d (token), its sum over the row (sequence: the ratio of whole responses) or its mean
    over the row (geometric); the last two need `sequences`. Without `lower`, weights are clamped to [floor, upper]
    (upper None: not truncated). With `lower`, they are 0 outside [lower, upper], bounds included, and the mask of the
    loss does not change. `batch_normalize` then divides by the mean weight over tokens (token) or rows with a token, if
    it is above 1e-8; call it once, on the whole batch. Raises `config.type`.
    """
    raw = masked(_log_weights(proximal, behaviour, mask, sequences, level).exp(), mask)
    weights = masked(_bound(raw, Bounds(upper, lower, floor)), mask)
    return _normalize(weights, mask, sequences, level) if batch_normalize else weights


def tis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    level: Level = "token",
    upper: float | None = 2.0,
    floor: float = 0.0,
    batch_normalize: bool = False,
    reject: tuple[RejectOption, ...] = (),
    thresholds: tuple[Threshold, ...] = (),
) -> Correction:
    """Truncated importance sampling: `min(ratio, upper)`, but at least `floor`; upper None: not truncated.

    arXiv 2505.24298 (decoupled objective, token level), arXiv 2505.24034. `level`: token (upper 1.5 to 5), sequence (2
    to 10) or geometric (near 1). `reject` and `thresholds` are those of `rejection.rejection_mask`, for example level
    sequence with seq_sum_k1 and [0.5, 2]. `batch_normalize` takes the mean before any rejection. Raises `config.type`.
    """
    bounds = Bounds(upper, None, floor)
    return _weight_tokens(
        proximal,
        behaviour,
        mask,
        sequences,
        level=level,
        bounds=bounds,
        batch_normalize=batch_normalize,
        reject=reject,
        thresholds=thresholds,
    )


def mis(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    level: Level = "sequence",
    lower: float = 0.5,
    upper: float = 2.0,
    batch_normalize: bool = False,
    reject: tuple[RejectOption, ...] = (),
    thresholds: tuple[Threshold, ...] = (),
) -> Correction:
    """Masked importance sampling: the ratio inside [lower, upper], else 0 (the token still counts as trained).

    At token level this is `icepop`. Raises `config.type`.
    """
    bounds = Bounds(upper, lower)
    return _weight_tokens(
        proximal,
        behaviour,
        mask,
        sequences,
        level=level,
        bounds=bounds,
        batch_normalize=batch_normalize,
        reject=reject,
        thresholds=thresholds,
    )


def icepop(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    lower: float = 0.5,
    upper: float = 5.0,
    batch_normalize: bool = False,
) -> Correction:
    """IcePop (arXiv 2510.18855, double-sided masking): the token's ratio inside [lower, upper], else 0."""
    return mis(
        proximal, behaviour, mask, sequences, level="token", lower=lower, upper=upper, batch_normalize=batch_normalize
    )


# ---------------------------------------------------------------- masks without weights


def none(proximal: Tensor, behaviour: Tensor, mask: Tensor, sequences: Tensor) -> Correction:
    """No correction: weight 1 inside the mask. For losses that already contain the ratio to the behaviour policy."""
    return _keep_correction(proximal, mask)


def rejection(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    options: tuple[RejectOption, ...] = ("seq_mean_k3",),
    thresholds: tuple[Threshold, ...] = (0.01,),
) -> Correction:
    """Rejection only: weight 1 for tokens that `rejection.rejection_mask` keeps, else 0. Raises `config.type`."""
    keep = rejection_mask(proximal, behaviour, mask, sequences, options=options, thresholds=thresholds)
    return _keep_correction(proximal, keep)


def m2po(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, sequences: Tensor, *, threshold: float = 0.04
) -> Correction:
    """M2PO (arXiv 2510.01161): weight 0 for tokens that raise the log-ratio's second moment above `threshold`, else 1.

    Needs the whole batch, see `needs_whole_batch`.
    """
    return _keep_correction(proximal, m2po_keep(proximal, behaviour, mask, threshold=threshold))


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "none": none,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "rejection": rejection,
    "m2po": m2po,
}


def needs_whole_batch(correction: Callable[..., Correction], options: Mapping[str, Any]) -> bool:
    """Return whether the correction depends on all rows and must be called before the batch is split.

    True for `m2po`, for the option `batch_normalize`, and for plugins with a true attribute `whole_batch`.
    """
    whole = correction is m2po or bool(getattr(correction, "whole_batch", False))
    return whole or bool(options.get("batch_normalize", False))


# ---------------------------------------------------------------- the proximal policy without a forward pass


def prox_loglinear(
    behaviour: Tensor, current: Tensor, versions: Tensor, mask: Tensor, *, current_version: int
) -> Tensor:
    """Return proximal log-probs as a mix of behaviour and current ones, `[N]`, no gradient, 0 outside the mask.

    `versions` int64 `[N]`: the version that sampled each token. With `lag = current_version - version`, the current
    policy has the share `(lag - 1) / lag`, and 0 at lag 0 or 1, where the proximal policy is the behaviour policy. The
    result depends on the current policy, so recompute it in every optimizer step. arXiv 2512.06547 (log-linear
    interpolation).
    """
    old, new = masked(behaviour.detach(), mask), masked(current.detach(), mask)
    lags = torch.where(mask & (versions >= 0), current_version - versions, 0).clamp(min=0)
    share = ((lags - 1).clamp(min=0) / lags.clamp(min=1)).to(old.dtype)
    return masked(old + share * (new - old), mask)


# ---------------------------------------------------------------- helpers


def _log_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, sequences: Tensor | None, level: str) -> Tensor:
    """Return the log of each token's weight, clamped to +-20."""
    gap = masked(proximal.detach(), mask) - masked(behaviour.detach(), mask)
    if level == "token":
        found = gap
    elif sequences is None or level not in ("sequence", "geometric"):
        raise ConfigError(
            "config.type", f"importance weights: level {level!r} is not known: one of token, sequence, geometric"
        )
    else:
        rows = sequence_sums if level == "sequence" else sequence_means
        found = rows(gap, mask, sequences)[sequences]
    return found.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _bound(raw: Tensor, bounds: Bounds) -> Tensor:
    """Clamp the weights, or with `lower` replace those outside the bounds by 0."""
    top = math.inf if bounds.upper is None else bounds.upper
    bottom = bounds.floor if bounds.lower is None else bounds.lower
    if not 0 <= bottom <= top:
        raise ConfigError(
            "config.type", f"importance weights: bounds {bottom} and {top} must satisfy 0 <= lower <= upper"
        )
    return raw.clamp(bottom, top) if bounds.lower is None else torch.where((raw >= bottom) & (raw <= top), raw, 0.0)


def _normalize(weights: Tensor, mask: Tensor, sequences: Tensor | None, level: str) -> Tensor:
    """Divide the weights by their mean, over tokens or over rows that have a token."""
    if level == "token" or sequences is None:
        mean = masked_mean(weights, mask)
    else:
        mean = masked_mean(sequence_means(weights, mask, sequences), sequence_lengths(mask, sequences) > 0)
    return torch.where(mean > 1e-8, weights / mean, weights)


def _weight_tokens(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    level: Level,
    bounds: Bounds,
    batch_normalize: bool,
    reject: Sequence[RejectOption],
    thresholds: Sequence[Threshold],
) -> Correction:
    """Return bounded weights, 0 for rejected tokens; the mean of `batch_normalize` includes rejected tokens."""
    raw = masked(_log_weights(proximal, behaviour, mask, sequences, level).exp(), mask)
    weights = masked(_bound(raw, bounds), mask)
    truncated = mask & (weights != raw)
    if batch_normalize:
        weights = _normalize(weights, mask, sequences, level)
    keep = rejection_mask(proximal, behaviour, mask, sequences, options=reject, thresholds=thresholds)
    return Correction(masked(weights, keep), keep, truncated)


def _keep_correction(like: Tensor, keep: Tensor) -> Correction:
    """Return weight 1 where `keep`, else 0."""
    return Correction(masked(torch.ones_like(like.detach()), keep), keep)

"""Metrics of the gap between proximal and behaviour policy and of the correction, for the batch and by lag.

Guarantees:
1. a table holds only sums and counts: tables add up, so no metric depends on the split of the batch;
2. values outside the mask, NaN included, have no effect; rows without a trained token are left out; no gradient;
3. quantiles come from a histogram with fixed bins, log-spaced in the log-ratio: a quantile lies in the same bin as the
exact one, and a bin is at most 14 % of its log-ratio wide (0.0002 around ratio 1);
4. nothing is NaN: metrics without tokens are 0, and missing lags are left out.

Effective sample sizes are shares, `(sum w)^2 / (n sum w^2)`: 1 for equal weights, 1/n if only one counts.
Example: row weights 1, 1, 4 give the ess 36 / (3 * 18) = 0.667 and the step scale sqrt(0.667) = 0.816.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from learners.algorithms.rejection import LOG_RATIO_LIMIT
from learners.algorithms.tensors import masked, sequence_lengths, sequence_means, sequence_sums, wide
from learners.algorithms.types import Correction

#: Buckets of a row's lag in learner steps, one row of a table each.
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LAG_ENDS = (0, 1, 2, 4, 8)

#: Bins of d = proximal - behaviour, on both sides of a central bin for |d| <= 1e-4.
_SIDE = 96
_ENDS = tuple(1e-4 * (LOG_RATIO_LIMIT / 1e-4) ** (end / _SIDE) for end in range(_SIDE + 1))
BIN_EDGES = (*(-end for end in reversed(_ENDS)), *_ENDS)
BINS = len(BIN_EDGES) - 1
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

_TOKEN_COLUMNS = (
    "tokens",
    "gap",
    "gap_abs",
    "k3",
    "ratio",
    "ratio_square",
    "weight",
    "weight_square",
    "truncated",
    "rejected",
    "clipped",
    "dual_clipped",
    "moved",
    "gated",
)
_ROW_COLUMNS = (
    "rows",
    "proximal_ppl",
    "behaviour_ppl",
    "mean_gap",
    "mean_gap_abs",
    "ppl_ratio",
    "row_ratio_square",
    "row_weight",
    "row_weight_square",
)
COLUMNS = (*_TOKEN_COLUMNS, *_ROW_COLUMNS)


# ---------------------------------------------------------------- sums


def correction_table(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    lags: Tensor,
    correction: Correction | None = None,
    clipped: Tensor | None = None,
    dual_clipped: Tensor | None = None,
    gated: Tensor | None = None,
    current: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Sum the statistics of one piece of a batch by lag, `[buckets, columns + bins]`; pieces add up. No tokens: zeros.

    Log-probs, mask and row numbers are flat, `[N]`. `lags` `[S]` has the lag of each row in steps; the last rows may
    have no tokens. `correction` is the one that the loss used (None: all weights are 1). `clipped`, `dual_clipped`
    and `gated`, bool `[N]`, come from the loss; `current` has the log-probs that the loss used. `shares` `[S]` are the
    weights of rows (`aggregation.row_shares`; None: 1). The last columns are a histogram of d = proximal - behaviour.
    """
    new, old = masked(proximal.detach(), mask), masked(behaviour.detach(), mask)
    raw = new - old
    gap = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = masked(gap.exp(), mask)
    weights = masked(torch.ones_like(ratio) if correction is None else correction.weights, mask).to(gap.dtype)
    keep = mask if correction is None else mask & correction.keep
    hit, bounded, smooth = (
        (torch.zeros_like(mask) if found is None else found & mask).to(gap.dtype)
        for found in (clipped, dual_clipped, gated)
    )
    moved = torch.zeros_like(gap) if current is None else new - masked(current.detach(), mask)
    bucket = torch.bucketize(lags.to(mask.device), torch.tensor(_LAG_ENDS, device=mask.device))
    truncated = torch.zeros_like(mask) if correction is None or correction.truncated is None else correction.truncated
    tokens = torch.stack(
        [
            mask.to(gap.dtype),
            gap,
            gap.abs(),
            masked(torch.expm1(gap) - gap, mask),
            ratio,
            ratio * ratio,
            weights,
            weights * weights,
            (mask & truncated).to(gap.dtype),
            (mask & ~keep).to(gap.dtype),
            hit,
            bounded,
            moved.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
            smooth,
        ],
        -1,
    )
    rows = _row_sums(new, old, weights, mask, sequences=sequences, count=lags.numel())
    rows = rows if shares is None else rows * shares[:, None]
    return torch.cat(
        (_bucket_sums(bucket[sequences], tokens), _bucket_sums(bucket, rows), _histogram(gap, mask, bucket[sequences])),
        -1,
    )


def _row_sums(new: Tensor, old: Tensor, weights: Tensor, mask: Tensor, *, sequences: Tensor, count: int) -> Tensor:
    """Return the row columns, `[S, columns]`, 0 for a row without tokens."""
    valid = sequence_lengths(mask, sequences, count) > 0
    policy, other = (sequence_means(values, mask, sequences, count) for values in (new, old))
    total = sequence_sums(new - old, mask, sequences, count).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = sequence_means(weights, mask, sequences, count)
    distance = other - policy
    columns = [
        torch.ones_like(policy),
        (-policy).exp(),
        (-other).exp(),
        distance,
        distance.abs(),
        distance.exp(),
        (2 * total).exp(),
        weight,
        weight * weight,
    ]
    return masked(torch.stack(columns, -1), valid[:, None])


def _bucket_sums(bucket: Tensor, values: Tensor) -> Tensor:
    """Sum the rows of `[n, columns]` by bucket into `[buckets, columns]`."""
    return values.new_zeros(len(LAG_BUCKETS), values.shape[-1]).index_add(0, bucket, values)


def _histogram(gap: Tensor, mask: Tensor, bucket: Tensor) -> Tensor:
    """Count tokens by bucket and bin, `[buckets, BINS]`."""
    inner = torch.tensor(BIN_EDGES[1:-1], dtype=gap.dtype, device=gap.device)
    places = bucket * BINS + torch.bucketize(gap, inner)
    counts = gap.new_zeros(len(LAG_BUCKETS) * BINS).index_add(0, places, mask.to(gap.dtype))
    return counts.reshape(len(LAG_BUCKETS), BINS)


# ---------------------------------------------------------------- metrics of the sums


def table_metrics(table: Tensor) -> dict[str, float]:
    """Return the metrics of the batch by name, and those of each lag that occurs as `lag/<bucket>/<name>`.

    Each lag has tokens_share and the metrics in `BY_LAG`. At lag 0, where both policies are the same, logprob_gap_mean
    and logprob_gap_max measure the numerical difference between engine and learner.
    """
    found = table.detach().double().cpu()
    overall = row_metrics(found.sum(0))
    result = dict(overall)
    tokens = float(found[:, 0].sum())
    for number, bucket in enumerate(LAG_BUCKETS):
        if found[number, 0] > 0:
            part = row_metrics(found[number])
            result[f"lag/{bucket}/tokens_share"] = float(found[number, 0]) / tokens
            result.update({f"lag/{bucket}/{name}": part[name] for name in BY_LAG})
    return result


#: Metrics that `table_metrics` returns for every lag.
BY_LAG = (
    "ess",
    "kl_behaviour",
    "clip_share",
    "truncated_share",
    "rejected_share",
    "ratio_p01",
    "ratio_p50",
    "ratio_p99",
    "logprob_gap_mean",
    "logprob_gap_max",
)


def row_metrics(sums: Tensor) -> dict[str, float]:
    """Return the metrics of one row of a table, or of the sum of its rows; all are 0 if there are no tokens.

    kl and kl_behaviour: k1 and k3 estimates of KL(behaviour || proximal) per token, with samples of the behaviour
    policy; approx_kl: k1 estimate of KL(proximal || current), the distance that mini-batches have moved the policy;
    ppl: mean over rows of exp of the row's mean negative log-prob; chi2: mean squared ratio minus 1, of tokens and of
    whole rows; ess: of the weights in the loss; ess_ratio: of the ratios before the correction; ess_rows: of the rows'
    mean weights, the input of `step_scale`; ratio_p01 ... : quantiles of the ratio.
    """
    values = dict(zip(COLUMNS, sums[: len(COLUMNS)].tolist(), strict=True))
    empty = values["tokens"] <= 0
    tokens, rows = max(values["tokens"], 1.0), max(values["rows"], 1.0)
    share = {name: values[name] / tokens for name in _TOKEN_COLUMNS}
    mean = {name: values[name] / rows for name in _ROW_COLUMNS}
    quantiles = {f"ratio_{name}": ratio_quantile(sums[len(COLUMNS) :], at) for name, at in QUANTILES.items()}
    found = {
        "kl": -share["gap"],
        "kl_behaviour": share["k3"],
        "logprob_gap_mean": share["gap_abs"],
        "logprob_gap_max": largest_gap(sums[len(COLUMNS) :]),
        "proximal_ppl": mean["proximal_ppl"],
        "behaviour_ppl": mean["behaviour_ppl"],
        "log_ppl_diff": mean["mean_gap"],
        "log_ppl_abs_diff": mean["mean_gap_abs"],
        "ppl_ratio": mean["ppl_ratio"],
        "chi2_token": share["ratio_square"] - 1,
        "chi2_seq": mean["row_ratio_square"] - 1,
        "ess": _ess(values, "weight", tokens),
        "ess_ratio": _ess(values, "ratio", tokens),
        "ess_rows": _ess(values, "row_weight", rows),
        "clip_share": share["clipped"],
        "dual_clip_share": share["dual_clipped"],
        "gated_share": share["gated"],
        "approx_kl": share["moved"],
        "truncated_share": share["truncated"],
        "rejected_share": share["rejected"],
        **quantiles,
    }
    return dict.fromkeys(found, 0.0) if empty else found


def largest_gap(counts: Tensor) -> float:
    """Return the largest |d|, rounded up to the edge of its bin (by at most 14 %, or to 1e-4); 0 without tokens."""
    filled = counts.nonzero()[:, 0].tolist()
    return max(-BIN_EDGES[filled[0]], BIN_EDGES[filled[-1] + 1]) if filled else 0.0


def _ess(values: Mapping[str, float], name: str, count: float) -> float:
    return ess_of_sums(values[name], values[f"{name}_square"], count)


def ratio_quantile(counts: Tensor, at: float) -> float:
    """Return the quantile `at` (0..1) of exp(d) from a table's bins, linear in d inside a bin; NaN without tokens."""
    totals = counts.double().cumsum(0)
    total = float(totals[-1])
    if total <= 0:
        return math.nan
    wanted = max(at * total, min(total, 0.5))
    place = int(torch.searchsorted(totals, torch.tensor(wanted, dtype=torch.float64)))
    held = float(counts[place])
    before = float(totals[place]) - held
    low, high = BIN_EDGES[place], BIN_EDGES[place + 1]
    return math.exp(low + (high - low) * (wanted - before) / held)


# ---------------------------------------------------------------- effective sample size


def ess_of_sums(total: float, squares: float, count: float) -> float:
    """Return `(sum w)^2 / (n sum w^2)` from sums over all pieces; 0 if no weight is above 0."""
    return total * total / (count * squares) if count > 0 and squares > 0 else 0.0


def ess_fraction(weights: Tensor) -> Tensor:
    """Return the effective sample size of row weights `[S]` as a share of S, a scalar; 0 if no weight is above 0."""
    found = wide(weights.detach())
    squares = (found * found).sum()
    share = found.sum() ** 2 / (max(found.numel(), 1) * squares)
    return torch.where(squares > 0, share, torch.zeros_like(share))


def step_scale(ess: float) -> float:
    """Return the factor on the learning rate of this optimizer step: the square root of the share `ess`, 0..1.

    A small effective sample size makes the gradient noisy, so the step gets smaller. arXiv 2602.17616.
    """
    return math.sqrt(min(max(ess, 0.0), 1.0))

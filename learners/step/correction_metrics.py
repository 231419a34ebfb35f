"""Metrics of correction and loss in a step: for the batch, by lag, and the mean weight of each sample.

Guarantees:
1. sums stay on the device and are read once, so no micro-batch waits for the device;
2. sums of micro-batches, mini-batches and ranks add up (`learners.algorithms.metrics`): no metric depends on the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learners.algorithms.aggregation import row_shares
from learners.algorithms.metrics import LAG_BUCKETS, correction_table, table_metrics
from learners.algorithms.tensors import masked
from learners.algorithms.types import Correction, TokenLoss

if TYPE_CHECKING:
    from learners.backends.base import Micro
    from learners.batch.micro_batches import Minibatch
    from learners.gang.gang import Gang

_encode = msgspec.msgpack.Encoder().encode

#: Metrics of the whole batch; `metrics.BY_LAG` has those of each lag.
BATCH_METRICS = (
    "kl_behaviour",
    "logprob_gap_mean",
    "logprob_gap_max",
    "ess",
    "ess_rows",
    "clip_share",
    "dual_clip_share",
    "gated_share",
    "approx_kl",
    "rejected_share",
    "ratio_p01",
    "ratio_p50",
    "ratio_p99",
    "chi2_seq",
)


class StepLog:
    """Sums of one mini-batch, or of several after `join`. `part` gives its micro-batches by number."""

    def __init__(self, part: Minibatch | None = None) -> None:
        self._part = part
        self._noted: set[int] = set()
        self._table: Tensor | None = None
        self._ratio_max: Tensor | None = None
        self._weights: list[tuple[Sequence[int], Tensor]] = []
        self._logprobs: list[tuple[Sequence[int], Tensor, Tensor]] = []  # samples, tokens of each, log-probs

    @torch.no_grad()
    def note(
        self,
        number: int,
        micro: Micro,
        *,
        current: Tensor,
        proximal: Tensor,
        correction: Correction,
        result: TokenLoss,
        learner: Tensor,
    ) -> None:
        """Add a micro-batch, once: a pass may be repeated. `learner`: log-probs of the learner's forward pass."""
        if number in self._noted:
            return
        self._noted.add(number)
        lags = torch.zeros(micro.scales.numel(), dtype=torch.int64, device=micro.lags.device)
        lags = lags.scatter_reduce(0, micro.sequences, torch.where(micro.mask, micro.lags, 0), "amax")
        table = correction_table(
            proximal,
            micro.behaviour,
            micro.mask,
            micro.sequences,
            lags=lags,
            correction=correction,
            clipped=result.clipped,
            dual_clipped=result.dual_clipped,
            gated=result.gated,
            current=current,
            shares=row_shares(micro.mask, micro.sequences, micro.siblings),
        ).double()
        gap = masked(proximal.detach(), micro.mask) - masked(micro.behaviour, micro.mask)
        ratio = masked(gap.clamp(-20, 20).exp(), micro.mask)
        largest = ratio.max() if ratio.numel() else torch.zeros((), dtype=ratio.dtype, device=ratio.device)
        self._table = table if self._table is None else self._table + table
        self._ratio_max = largest if self._ratio_max is None else torch.maximum(self._ratio_max, largest)
        if self._part is not None:
            count = micro.scales.numel()
            weights = masked(correction.weights, micro.mask)
            sums = weights.new_zeros(count).index_add_(0, micro.sequences, weights)
            tokens = weights.new_zeros(count).index_add_(0, micro.sequences, micro.mask.to(weights.dtype))
            numbers = self._part.micro[number].samples.tolist()
            self._weights.append((numbers, sums / tokens.clamp(min=1)))
            sizes = torch.bincount(micro.sequences, minlength=count)
            self._logprobs.append((numbers, sizes, learner.detach()))

    def join(self, other: StepLog) -> None:
        """Add the sums of another log."""
        self._weights += other._weights
        self._logprobs += other._logprobs
        if other._table is not None and other._ratio_max is not None:
            self._table = other._table if self._table is None else self._table + other._table
            mine = self._ratio_max
            self._ratio_max = other._ratio_max if mine is None else torch.maximum(mine, other._ratio_max)

    def metrics(self, gang: Gang) -> dict[str, float]:
        """Return metrics by catalogue name, over all ranks. Collective."""
        table = torch.zeros(0) if self._table is None else self._table.cpu()
        mine = table.double().numpy().tobytes()
        every = [np.frombuffer(part, np.float64) for part in gang.gather_shares(mine)]
        whole = sum((part for part in every if part.size), np.zeros(1))
        largest = gang.total({"ratio_max": 0.0 if self._ratio_max is None else float(self._ratio_max)})
        if whole.size == 1:
            return {}
        found = table_metrics(torch.from_numpy(whole).reshape(len(LAG_BUCKETS), -1))
        values = {name: found[name] for name in BATCH_METRICS} | {
            name: found[name] for name in found if name.startswith("lag/")
        }
        return values | {"tis_capped_share": found["truncated_share"], "ratio_max": largest["ratio_max"]}

    def weights(self, gang: Gang) -> dict[int, float]:
        """Return the mean weight of every sample over its trained tokens, by place in the batch. Collective."""
        mine = {
            number: value
            for numbers, means in self._weights
            for number, value in zip(numbers, means.tolist(), strict=True)
        }
        parts = (msgspec.msgpack.decode(part, type=dict[int, float]) for part in gang.gather_shares(_encode(mine)))
        return {number: value for part in parts for number, value in part.items()}

    def logprobs(self) -> dict[int, npt.NDArray[np.float32]]:
        """Return the learner's log-probs of every sample of this rank `[T]`, by place in the batch."""
        found: dict[int, npt.NDArray[np.float32]] = {}
        for numbers, sizes, values in self._logprobs:
            cuts = np.cumsum(sizes.cpu().numpy())[:-1]
            found.update(zip(numbers, np.split(values.float().cpu().numpy(), cuts), strict=True))
        return found

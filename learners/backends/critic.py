"""The critic: a value model beside the policy, sharded like it, with an optimizer of its own.

Made by `FSDP2Backend` where the estimator in force needs values (GAE, V-trace). Guarantees:
1. the body is that of `learner.critic.model` (the start weights of the policy where it is empty) with a scalar head; a
   reward model's folder gives its head too, else the head begins as small noise from `run.seed`, equal on every rank;
2. `V_t` is read from the hidden state BEFORE token t: it knows the prompt and the tokens before t, never t itself;
3. it shares no tensor with the policy: training one changes no bit of the other;
4. packed rows are compared with single sequences at the start, as for the policy;
5. what it saves lies in the policy's own shard files, under names that begin with `critic/`.
Weight sync and the export know nothing of it: generators need no values.

Example: prompt of 3 tokens, response of 2: their values are read at the tokens 2 and 3 of the sequence (from 0), the
value after the last one at token 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from learners.backends.base import LossFunction, Micro, Values, to_device
from learners.backends.sharded import Sharded
from learners.batch import MicroBatch, packed_row, padded_rows
from learners.gang import Gang
from learners.score_model import ScoreModel

PREFIX = "critic/"


class ValueModel(ScoreModel):
    """A scalar head over a language model's body, read at the token that predicts the target."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, positions: Tensor, targets: Tensor, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Values `[N]` of the prefixes that end at `positions` `[N]`, and zeros `[N]` in the place of entropies."""
        return super().forward(input_ids, position_ids, positions - 1, targets, whole=whole)


class Critic:
    """One rank's part. See `learners.backends.base.Critic`."""

    def __init__(self, config: Config, gang: Gang) -> None:
        from learners.backends.fsdp2 import load_model, make_optimizer, shard

        self._config = config
        self._device = gang.device
        path = config.learner.critic.model or config.model.path
        self._model = ValueModel(load_model(config, gang.device, path=path, scorer=True))
        units = shard(self._model, config, gang.device)
        optimizer = make_optimizer(self._model, config.learner.critic, config, gang.device)
        self._sharded = Sharded(self._model, units, optimizer, ranks=gang.size)

    def _forward(self, piece: MicroBatch) -> tuple[Tensor, Tensor, Micro]:
        t = to_device(piece, self._device.torch_device)
        values, zeros = self._model(t.input_ids, t.position_ids, t.positions, t.targets)
        return values, zeros, t

    @torch.no_grad()
    def values(self, micro: Sequence[MicroBatch]) -> list[Values]:
        """Values of each micro-batch, without gradient. Collective."""
        self._model.train()
        try:
            return [self._values(piece) for piece in micro]
        finally:
            self._sharded.reshard()

    def _values(self, piece: MicroBatch) -> Values:
        t = to_device(piece, self._device.torch_device)
        count = t.positions.numel()
        ends = t.positions.new_zeros(len(piece.samples)).scatter_reduce(0, t.sequences, t.positions + 1, "amax")
        places = torch.cat((t.positions, ends))
        both, _ = self._model(t.input_ids, t.position_ids, places, places)
        return Values(both[:count], both[count:])

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Forward and backward over all micro-batches; this rank's sums for metrics. Collective."""
        return self._sharded.train(micro, self._forward, loss)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm; what it was. Collective."""
        return self._sharded.clip(max_norm)

    def apply(self, lr: float) -> None:
        """Update with the gradients as they are, and forget them."""
        self._sharded.apply(lr)

    def discard(self) -> None:
        """Forget the gradients without an update."""
        self._sharded.forget()
        self._sharded.reshard()

    # ------------------------------------------------------------ for the backend

    @torch.no_grad()
    def self_check(self) -> None:
        """Three toy sequences in one row (or padded rows) against each alone."""
        from learners.backends.fsdp2 import PACKING_LIMIT, toys

        samples = toys(int(self._model.model.config.vocab_size))
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        rows = self.values([together])[0]
        alone = self.values([packed_row([sample]) for sample in samples])
        singles = Values(torch.cat([one.tokens for one in alone]), torch.cat([one.after for one in alone]))
        worst = max(float((left - right).abs().max()) for left, right in zip(rows, singles, strict=True))
        if not worst <= PACKING_LIMIT[self._config.model.dtype]:
            name = type(self._model.model).__name__
            raise AsyncRLError("learner.packing", f"values of {name} differ by {worst:.3g}")

    def state(self) -> dict[str, Tensor]:
        """Every tensor of its training state by name."""
        return self._sharded.state(PREFIX)


def wants_critic(config: Config) -> bool:
    """Whether the estimator in force needs values."""
    if config.learner.mode != "rl":
        return False
    from learners.algorithms.registry import needs_of

    needs: Any = needs_of(config.learner.algorithm)
    return bool({"critic", "values"} & set(needs))

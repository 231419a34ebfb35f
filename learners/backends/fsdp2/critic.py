"""The critic: a value model next to the policy, for estimators that need values (GAE, V-trace).

Guarantees:
1. the body is `learner.critic.model` (by default the policy's start weights) with a scalar head. A reward model's
   folder also gives its head; otherwise the head starts as small noise from `run.seed`, equal on every rank;
2. `V_t` is read from the hidden state BEFORE token t: it knows the prompt and earlier tokens, never t itself;
3. packed rows are compared with single sequences at the start, as for the policy;
4. its export is a reward model's folder: body and head load again as `learner.critic.model`.

Example: prompt of 3 tokens, response of 2: their values are read at the tokens 2 and 3 of the sequence (from 0), the
value after the last one at token 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Config
from learners.backends.base import Values, to_device
from learners.backends.fsdp2.companion import Companion
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang
from learners.models.score_model import ScoreModel

PREFIX = "critic/"


class ValueModel(ScoreModel):
    """A scalar head on a language model's body, read at the token that predicts the target."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, positions: Tensor, targets: Tensor, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return values `[N]` of the prefixes that end at `positions` `[N]`, and zeros `[N]` in place of entropies."""
        return super().forward(input_ids, position_ids, positions - 1, targets, whole=whole)


class Critic(Companion):
    def __init__(self, config: Config, gang: Gang) -> None:
        from learners.backends.fsdp2.loading import load_model

        path = config.learner.critic.model or config.model.path
        model = ValueModel(load_model(config, gang.device, path=path, scorer=True))
        super().__init__(model, config.learner.critic, config, gang, prefix=PREFIX)

    @torch.no_grad()
    def values(self, micro: Sequence[MicroBatch]) -> list[Values]:
        self._sharded.wake()
        self._model.train()
        try:
            return [self._values(piece) for piece in micro]
        finally:
            self._sharded.reshard()
            self._sharded.rest()

    def _values(self, piece: MicroBatch) -> Values:
        t = to_device(piece, self._device.torch_device)
        count = t.positions.numel()
        ends = t.positions.new_zeros(len(piece.samples)).scatter_reduce(0, t.sequences, t.positions + 1, "amax")
        places = torch.cat((t.positions, ends))
        both, _ = self._model(t.input_ids, t.position_ids, places, places)
        return Values(both[:count], both[count:])

    def _outputs(self, micro: Sequence[MicroBatch]) -> list[Values]:
        return self.values(micro)


def wants_critic(config: Config) -> bool:
    """Whether the estimator needs values."""
    if config.learner.mode != "rl":
        return False
    from learners.algorithms.registry import needs_for

    needs: Any = needs_for(config.learner.algorithm)
    return bool({"critic", "values"} & set(needs))

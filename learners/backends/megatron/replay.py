"""Replays the experts that an engine chose, in Megatron-core's routers (`asyncrl.runtime.routers` for transformers).

Megatron-core's own `RouterReplay` replays all tokens of a row or none. Guarantees:
1. a token takes the given experts, weighed by this model's own scores with their gradient; one without (-1) its own;
2. a layer that is recomputed in the backward pass takes the experts of its forward pass, also if another micro-batch
   went forward in between, as in a pipeline;
3. with split rows every tensor place takes its slice.

Example: a pipeline with recomputation runs forward 1, forward 2, backward 1: the recomputed layers of backward 1 take
the oldest experts that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from learners.backends.megatron.families import Experts
from learners.gang.topology import Topology


class Replay:
    """The routers of this rank's part of a model. `recomputes`: layers run again in the backward pass."""

    def __init__(self, model: Any, experts: Experts, place: Topology, *, recomputes: bool, split_rows: bool) -> None:
        self._chosen, self._recomputes = experts.chosen, recomputes
        self._slices, self._place = (place.tensor, place.tensor_place) if split_rows else (1, 0)
        self._routers: list[_Choice] = []
        for module in model.modules():
            if hasattr(module, "router_replay"):
                module.router_replay = _Choice(module.layer_number - 1)
                self._routers.append(module.router_replay)

    def begin(self, *, trains: bool) -> None:
        """Forget what waits: a pass that failed left it."""
        for router in self._routers:
            router.waiting, router.given = deque() if trains and self._recomputes else None, None

    def give(self, choices: Tensor | None, tokens: int) -> None:
        """Replay these choices in the next forward pass, i2 `[tokens without padding, layers * chosen]`."""
        mine = None
        if choices is not None:
            mine = nn.functional.pad(choices, (0, 0, 0, tokens - len(choices)), value=-1)
            mine = mine.view(tokens, -1, self._chosen).chunk(self._slices)[self._place].long()
        for router in self._routers:
            router.given = None if mine is None else mine[:, router.layer]


class _Choice:
    """Stands at `router_replay` of a router of Megatron-core. `waiting`: choices of layers that will be recomputed."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.given: Tensor | None = None
        self.waiting: deque[Tensor | None] | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: Any, chosen_groups: Any, compute: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        own, places = compute(scores, topk, num_groups=groups, group_topk=chosen_groups)
        given = self.given
        if self.waiting is not None:
            if torch.is_grad_enabled():  # the layer runs again
                given = self.waiting.popleft()
            else:
                self.waiting.append(given)
        if given is None:
            return own, places
        places = torch.where(given[:, :1] < 0, places, given)
        return scores.gather(1, places), places

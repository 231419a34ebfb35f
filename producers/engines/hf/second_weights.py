"""A second decoder that stays at one version of the weights while the live one goes on to newer ones.

Guarantees:
1. between `keep` and `drop` every token is made by the weights that the live model had at `keep`;
2. nothing is copied. The second model refers to the tensors of the live one; a swap gives the live model other tensors
   and, with `kept`, writes to none of the old ones (`weights.ModelWeights.exchange`);
3. after `drop` it refers to no weights and holds no K/V.
All calls come from the decode thread.

Example: version 20 is kept; versions 21 and 22 are committed. The engine holds 20 (held-out samples), 22 (training
samples) and the room for 23. `drop`: 22 and the room for 23.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from producers.engines.hf.decoder import Decoder


class SecondWeights:
    def __init__(self, model: torch.nn.Module, live: Decoder, build: Callable[[torch.nn.Module], Decoder]) -> None:
        """`build` makes a decoder for a model with the weights of `model`, which `live` decodes."""
        self._live = live
        self._source = list(model.parameters())
        self._own = [torch.nn.Parameter(one.data, requires_grad=False) for one in self._source]
        memo: dict[int, Any] = {id(one): own for one, own in zip(self._source, self._own, strict=True)}
        self.decoder = build(copy.deepcopy(model, memo))
        self.drop()

    def keep(self, version: int) -> bool:
        """Stay at this version, if it is the live one. Call `drop` before."""
        if version < 0 or version != self._live.version:
            return False
        for own, one in zip(self._own, self._source, strict=True):
            own.data = one.data
        self.decoder.swap(version, lambda: None)
        return True

    def drop(self) -> None:
        """Abort all samples and free weights and K/V."""
        self.decoder.abort(None)
        self.decoder.memory.forget()
        self.decoder.version = -1
        for own in self._own:
            own.data = own.data.new_empty(0)

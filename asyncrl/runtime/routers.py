"""The experts that the routers of a mixture of experts choose: recorded in one forward pass, replayed in another.

The kernels of an engine and of a learner differ in the last bits, so two experts with nearly equal scores change
places, and the token gets another log-prob. With routing replay (R3, arXiv 2510.11370) the learner sends every token to
the experts that the engine chose, and weighs them by its own scores, with their gradient. Guarantees:
1. a choice is the result of `topk` over the scores `[tokens, experts]` in the block that holds the experts. A block
   that does not choose so is refused at its first pass, so this holds for every family or fails;
2. with given choices the values are gathered from the layer's own scores at these places, with gradient; a token whose
   first choice is -1 takes its own;
3. the choices that were given last count until others are given: a backward pass that recomputes a layer replays the
   same ones.

Example: 2 experts of 4, scores 0.1 0.4 0.3 0.2. Alone the router takes experts 1 and 2. Given 1 and 3 it takes these,
with 0.4 and 0.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asyncrl.config.model_facts import experts_shape
from asyncrl.errors import ConfigError

TOPK = (torch.topk, torch.Tensor.topk)
HOLDER = re.compile(r"(?:^|\.)layers\.(\d+)\..*experts$")
SMALL = 256  # experts whose numbers fit in a byte


class Routers:
    """The routers of a model of transformers."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises ConfigError `config.model` if it has no experts, or none that can be found."""
        config: Any = model.config
        self.experts, self.layers, self.chosen = experts_shape(config.to_dict())
        modules = dict(model.named_modules())
        found = {name: int(held.group(1)) for name in modules if (held := HOLDER.search(name))}
        if not self.chosen or not found:
            raise ConfigError("config.model", f"{type(model).__name__} has no routers of experts that can be replayed")
        self._given: Tensor | None = None
        self._taken: dict[int, Tensor] | None = None
        self._passed: set[int] = set()  # layers that have chosen
        self._modes: list[_Choosing] = []
        for name, layer in found.items():
            self._watch(modules[name.rpartition(".")[0]], layer)

    @property
    def dtype(self) -> torch.dtype:
        """Of recorded choices."""
        return torch.uint8 if self.experts <= SMALL else torch.int16

    def _watch(self, block: torch.nn.Module, layer: int) -> None:
        """By hooks, not by another `forward`: they stay right in a copy of the model."""

        def enter(*_: Any) -> None:
            self._modes.append(_Choosing(self, layer))
            self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(*_: Any) -> None:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if layer not in self._passed:
                what = f"layer {layer} does not choose {self.chosen} of {self.experts} experts by topk"
                raise ConfigError("config.model", what, where="learner.router_replay")

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave, always_call=True)

    def nothing(self) -> Tensor:
        """The choices of no token."""
        return torch.zeros((0, self.layers, self.chosen), dtype=self.dtype)

    def give(self, choices: Tensor | None) -> None:
        """Replay these choices from now on, i2 `[tokens, layers * chosen]`, -1: the router's own; None: all its own."""
        self._given = None if choices is None else choices.view(len(choices), self.layers, self.chosen)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the choices of one forward pass: at the end of the block the list holds `[tokens, layers, chosen]`;
        layers without experts hold 0.
        """
        found: list[Tensor] = []
        self._taken = {}
        try:
            yield found
            first = next(iter(self._taken.values()))
            whole = torch.zeros((len(first), self.layers, self.chosen), dtype=self.dtype, device=first.device)
            for layer, choices in self._taken.items():
                whole[:, layer] = choices.to(self.dtype)
            found.append(whole)
        finally:
            self._taken = None

    def choose(self, layer: int, topk: Callable[..., Any], scores: Tensor, *rest: Any, **options: Any) -> Any:
        """The result of a router's `topk`, with the experts that were given."""
        own = topk(scores, *rest, **options)
        if scores.dim() != 2 or scores.shape[1] != self.experts or own.indices.shape[1] != self.chosen:
            return own  # another one, such as that over groups of experts
        self._passed.add(layer)
        if self._given is not None:
            given = self._given[:, layer].to(own.indices.dtype)
            places = torch.where(given[:, :1] < 0, own.indices, given)
            own = torch.return_types.topk((scores.gather(1, places), places))
        if self._taken is not None:
            self._taken[layer] = own.indices
        return own


class _Choosing(TorchFunctionMode):
    """Hands every `topk` within a block to its router."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers, self._layer = routers, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func not in TOPK:
            return func(*args, **options)
        scores, *rest = args or (options.pop("input"),)
        return self._routers.choose(self._layer, func, scores, *rest, **options)

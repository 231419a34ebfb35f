"""A module that is sharded over the ranks, with its own optimizer: gradients, clipping, updates and the state to save.

Guarantees:
1. gradients add up over micro-batches and are reduced over ranks once, with the last of them;
2. a gradient that is not finite changes nothing;
3. a gradient's norm is that of the whole model, whatever meshes its parts lie on;
4. `state` names every tensor of the training state, before the first update as after it;
5. weights leave layer by layer: at most one layer is whole at a time;
6. with `Rests` optimizer states are on the device during an update alone, and so are the weights between `wake` and
   `rest`; the arithmetic is the same.
It makes neither module nor optimizer: `fsdp2.shard` and `optimizers.make_optimizer` do.

Example: a policy and a critic of one layer each: `state("")` has `model/...`, `exp_avg/...`, `state("critic/")` has
`critic/model/...`, `critic/exp_avg/...`; one file holds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asyncrl.config import Config
from asyncrl.runtime.device import Device
from learners.backends.base import LossFunction, Micro
from learners.backends.fsdp2.mesh import Split, clip_gradients, sum_partial
from learners.backends.optimizers import Optimizers
from learners.batch.micro_batches import MicroBatch
from learners.models.logprobs import gather_whole

OWN = "model."  # what the root modules put before the names of Hugging Face

#: A micro-batch through the module: what the loss takes.
Forward = Callable[[MicroBatch], tuple[Tensor, Tensor, Micro]]


class Rests(NamedTuple):
    """With `learner.offload_idle`: what is idle waits on `host`, and is used on `device`; `emptied` gives the room
    that it left there to others."""

    device: torch.device
    emptied: Callable[[], None]
    host: torch.device = torch.device("cpu")

    @staticmethod
    def from_config(config: Config, device: Device) -> Rests | None:
        """None where nothing rests; with `learner.cpu_offload` all of it lies on the host anyway."""
        learner = config.learner
        if not learner.offload_idle or learner.cpu_offload:
            return None
        return Rests(device.torch_device, device.empty_cache)


class View(Protocol):
    """Under which names the parameters of a module leave, and as what."""

    def name(self, own: str) -> str:
        """Of a parameter, from its name in the module; empty: it does not leave."""

    def value(self, own: str, tensor: Tensor, parameter: Callable[[str], Tensor]) -> Tensor:
        """From the whole parameter; `parameter` gives others of the same unit."""


class Plain:
    """Every parameter as it is, by its Hugging Face name."""

    def name(self, own: str) -> str:
        """Without what the root module put before it."""
        return own.removeprefix(OWN)

    def value(self, own: str, tensor: Tensor, parameter: Callable[[str], Tensor]) -> Tensor:
        return tensor


PLAIN = Plain()


class Sharded:
    """`units` are those of `fully_shard`, root first."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Any],
        optimizer: Optimizers,
        *,
        ranks: int,
        split: Split,
        rests: Rests | None = None,
    ) -> None:
        """`ranks`: over which FSDP averages gradients; `split`: what was split before FSDP; `rests`: where what is idle
        waits, None: where it is used."""
        self.root: Any = root
        self._rests = rests
        self.units = units
        self.optimizer = optimizer
        self._split = split
        self._unsummed = False  # gradients of `split.partial` are those of single tensor ranks
        # Of each unit all that FSDP shards by itself: a layer, and experts inside it.
        self._parts: list[list[Any]] = [
            [unit] if unit is root else [part for part in unit.modules() if isinstance(part, FSDPModule)]
            for unit in units
        ]
        self.names = unit_names(root, units)  # as the module has them, by unit
        self._ranks = ranks

    def wake(self) -> None:
        """Bring weights that wait on the host back to where they are used. No gradient may be there yet."""
        if self._rests is not None:
            self.root.to(self._rests.device)

    def rest(self) -> None:
        """Let weights wait on the host; after a backward only once its gradients were used."""
        if self._rests is not None:
            self.reshard()
            self.root.to(self._rests.host)
            self._rests.emptied()

    def reshard(self) -> None:
        """Give whole weights back. FSDP leaves the root whole after a forward without a backward: its parameters are
        then other objects than those of the optimizer, and what is loaded into them is lost."""
        for parts in self._parts:
            for part in parts:
                part.reshard()

    def train(self, micro: Sequence[MicroBatch], forward: Forward, loss: LossFunction) -> dict[str, float]:
        """Forward and backward; FSDP averages gradients over ranks, so each share is multiplied by their number."""
        self.root.train()
        self._unsummed = True
        sums: dict[str, Tensor] = {}
        for number, piece in enumerate(micro):
            self.root.set_requires_gradient_sync(number == len(micro) - 1)
            logprobs, entropy, tensors = forward(piece)
            value, parts = loss(logprobs, entropy, tensors, number)
            (value * self._ranks).backward()  # type: ignore[no-untyped-call]
            for name, part in (("loss", value.detach()), *parts.items()):
                join = torch.maximum if name.endswith("_max") else torch.add
                sums[name] = join(sums[name], part) if name in sums else part
        return {name: float(value) for name, value in sums.items()}  # here, so that the device is waited for once

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm; what it was. Collective."""
        if self._unsummed and self._split.partial:
            named = {name.removeprefix(OWN): parameter for name, parameter in self.root.named_parameters()}
            sum_partial(named, self._split)
        self._unsummed = False
        return clip_gradients(self.root.parameters(), max_norm)

    def apply(self, lr: float) -> None:
        """Update with the gradients as they are, and forget them."""
        if self._rests is not None:
            self.optimizer.move(self._rests.device)
        self.optimizer.step(lr)
        self.forget()
        if self._rests is not None:
            self.optimizer.move(self._rests.host)
            self._rests.emptied()

    def step(self, *, lr: float, max_norm: float) -> tuple[float, bool]:
        """Clip and update; the norm, and whether the update was left out since it was not finite. Collective."""
        norm = self.clip(max_norm)
        skipped = not math.isfinite(norm)
        if skipped:
            self.forget()
        else:
            self.apply(lr)
        return norm, skipped

    def discard(self) -> float:
        """Forget the gradients; their global norm. Collective."""
        norm = self.clip(float("inf"))
        self.forget()
        self.reshard()
        return norm

    def forget(self) -> None:
        self.optimizer.forget()

    # ------------------------------------------------------------ weights out

    @torch.no_grad()
    def whole(self, settle: Callable[[], None] | None = None, *, view: View = PLAIN) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its Hugging Face name, whole, in compute precision. Collective: every rank exhausts it.

        Valid until the next one is asked for; with `settle` until that was called, which happens before the bytes of a
        unit are given back, once the next unit was gathered: two of them are whole at a time then.
        """
        held: list[Any] = []
        lent: list[Tensor] = []  # whole tensors that only their bytes are known of

        def give_back() -> None:
            try:
                if settle is not None:
                    settle()
            finally:
                lent.clear()
                while held:
                    held.pop().reshard()

        try:
            for parts, names in zip(self._parts, self.names, strict=True):
                if settle is None:
                    give_back()
                for part in parts:
                    part.unshard()
                give_back()
                held += parts
                for name in filter(view.name, names):
                    tensor = gather_whole(self.root.get_parameter(name).detach())
                    tensor = view.value(name, tensor, self.root.get_parameter)
                    if settle is not None:
                        lent.append(tensor)
                    yield view.name(name), tensor
        finally:
            give_back()

    # ------------------------------------------------------------ checkpoints

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Every tensor of the training state by name: this rank's parameters (those that train), their moments and step
        counts. Before the first update, too, so that a checkpoint is whole where only the critic was trained so far."""
        self.reshard()
        self.optimizer.prime()
        state: dict[str, Tensor] = {}
        for full, parameter in self.root.named_parameters():
            if not parameter.requires_grad:
                continue
            name = full.removeprefix(OWN)
            state[f"{prefix}model/{name}"] = parameter.data
            for key, value in self.optimizer.states(parameter).items():
                state[f"{prefix}{key}/{name}"] = value
        return state


def unit_names(root: nn.Module, units: Sequence[nn.Module]) -> list[list[str]]:
    """The parameter names that each unit owns itself; a tied parameter once."""
    owner: dict[int, int] = {}
    for number, unit in enumerate(units):  # the root comes first, so that a layer's claim overrides it
        for parameter in unit.parameters():
            owner[id(parameter)] = number
    names: list[list[str]] = [[] for _ in units]
    for name, parameter in root.named_parameters():
        names[owner[id(parameter)]].append(name)
    return names

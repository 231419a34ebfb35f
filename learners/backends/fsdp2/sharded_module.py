"""A sharded module with its own optimizer: gradients, clipping, updates and state.

Guarantees:
1. gradients add up over micro-batches. On several ranks each micro-batch's are reduced at once, layer by layer, so a
   rank never holds those of the whole model; copies (HSDP) are summed once, with the last micro-batch;
2. a non-finite gradient changes nothing;
3. the gradient norm covers the whole model, whatever meshes its parts lie on;
4. `state` names every tensor of the training state, before the first update as after it;
5. weights are gathered layer by layer: at most one layer is whole at a time;
6. with a `LossScale`, gradients are computed at a scale at which they do not overflow, and divided by it;
7. with `Rests`, optimizer states are on the device only during an update, and weights only between `wake` and `rest`;
   the arithmetic is the same.

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
from learners.backends.base import LossFunction, Micro, add_sums
from learners.backends.fsdp2.loss_scale import LOSS_SCALE, LossScale
from learners.backends.fsdp2.mesh import Split, clip_gradients, sum_partial
from learners.backends.optimizers import Optimizers
from learners.backends.sharded_checkpoint import local_tensor
from learners.batch.micro_batches import MicroBatch
from learners.models.logprobs import gather_whole

OWN = "model."  # prefix of the root modules before Hugging Face names

#: Runs a micro-batch through the module and returns the inputs of the loss.
Forward = Callable[[MicroBatch], tuple[Tensor, Tensor, Micro]]


class Rests(NamedTuple):
    """With `learner.offload_idle`: idle state waits on `host` and is used on `device`; `emptied` frees the device's
    cache.
    """

    device: torch.device
    emptied: Callable[[], None]
    host: torch.device = torch.device("cpu")

    @staticmethod
    def from_config(config: Config, device: Device) -> Rests | None:
        """Return None if nothing is moved; with `learner.cpu_offload` everything is on the host already."""
        learner = config.learner
        if not learner.offload_idle or learner.cpu_offload:
            return None
        return Rests(device.torch_device, device.empty_cache)


class View(Protocol):
    """How the parameters of a module are published."""

    def name(self, own: str) -> str:
        """Return the published name of a parameter; empty: it is not published."""

    def value(self, own: str, tensor: Tensor, parameter: Callable[[str], Tensor]) -> Tensor:
        """Return the published tensor of a whole parameter; `parameter` gives others of the same unit."""


class Plain:
    """Publishes every parameter unchanged, by its Hugging Face name."""

    def name(self, own: str) -> str:
        return own.removeprefix(OWN)

    def value(self, own: str, tensor: Tensor, parameter: Callable[[str], Tensor]) -> Tensor:
        return tensor


PLAIN = Plain()


class Sharded:
    """A module whose `units` are those of `fully_shard`, root first."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Any],
        optimizer: Optimizers,
        *,
        ranks: int,
        split: Split,
        rests: Rests | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """`ranks`: FSDP averages gradients over them; `split`: the split before FSDP; `rests`: where idle state
        waits; `scale`: of a model in float16.
        """
        self.root: Any = root
        self._rests = rests
        self.scale = scale
        self.units = units
        self.optimizer = optimizer
        self._split = split
        self._unsummed = False  # gradients of `split.partial` are not summed yet
        # Modules of each unit that FSDP shards separately: a layer, and experts inside it.
        self._parts: list[list[Any]] = [
            [unit] if unit is root else [part for part in unit.modules() if isinstance(part, FSDPModule)]
            for unit in units
        ]
        self.names = unit_names(root, units)  # names in the module, by unit
        self._ranks = ranks

    def wake(self) -> None:
        """Move waiting weights back to the device. No gradients may exist yet."""
        if self._rests is not None:
            self.root.to(self._rests.device)

    def rest(self) -> None:
        """Move weights to the host; after a backward only once the gradients were used."""
        if self._rests is not None:
            self.reshard()
            self.root.to(self._rests.host)
            self._rests.emptied()

    def reshard(self) -> None:
        """Free whole weights. FSDP keeps the root whole after a forward without a backward: its parameters are then
        other objects than the optimizer's, and data loaded into them is lost.
        """
        for parts in self._parts:
            for part in parts:
                part.reshard()

    def train(self, micro: Sequence[MicroBatch], forward: Forward, loss: LossFunction) -> dict[str, float]:
        """Run forward and backward; again at a lower scale if gradients overflow. Collective with a scale."""
        self.root.train()
        scale = self.scale
        if scale is None:
            return self._pass(micro, forward, loss)
        scale.begin()
        while True:
            sums = self._pass(micro, forward, loss, factor=scale.now)
            if math.isfinite(self.clip(math.inf)):
                self._divide_gradients(scale.now)
                return sums
            if not scale.lower():
                return sums
            self.forget()

    def _pass(
        self, micro: Sequence[MicroBatch], forward: Forward, loss: LossFunction, *, factor: float = 1.0
    ) -> dict[str, float]:
        """Add up the gradients of `factor` times the loss. FSDP averages them over ranks, so each loss is multiplied by
        their number.
        """
        self._unsummed = True
        sums: dict[str, Tensor] = {}
        for number, piece in enumerate(micro):
            last = number == len(micro) - 1
            # One rank holds all gradients anyway, and without the reduction saves a copy of them.
            self.root.set_requires_gradient_sync(last or self._ranks > 1)
            self.root.set_requires_all_reduce(last)
            logprobs, entropy, tensors = forward(piece)
            value, parts = loss(logprobs, entropy, tensors, number)
            (value * (self._ranks * factor)).backward()  # type: ignore[no-untyped-call]
            add_sums(sums, value, parts)
        return {name: float(value) for name, value in sums.items()}  # here, to wait for the device only once

    def _divide_gradients(self, factor: float) -> None:
        grads = [local_tensor(one.grad) for one in self.root.parameters() if one.grad is not None]
        torch._foreach_mul_(grads, 1 / factor)  # exact: a power of two

    def clip(self, max_norm: float) -> float:
        if self._unsummed and self._split.partial:
            named = {name.removeprefix(OWN): parameter for name, parameter in self.root.named_parameters()}
            sum_partial(named, self._split)
        self._unsummed = False
        return clip_gradients(self.root.parameters(), max_norm)

    def apply(self, lr: float) -> None:
        if self._rests is not None:
            self.optimizer.move(self._rests.device)
        self.optimizer.step(lr)
        if self.scale is not None:
            self.scale.settle()
        self.forget()
        if self._rests is not None:
            self.optimizer.move(self._rests.host)
            self._rests.emptied()

    def step(self, *, lr: float, max_norm: float) -> tuple[float, bool]:
        """Clip and update. Return the norm, and whether the update was skipped because it was not finite.
        Collective.
        """
        norm = self.clip(max_norm)
        skipped = not math.isfinite(norm)
        if skipped:
            self.forget()
        else:
            self.apply(lr)
        return norm, skipped

    def discard(self) -> float:
        norm = self.clip(float("inf"))
        self.forget()
        self.reshard()
        return norm

    def forget(self) -> None:
        """Drop all gradients, also those that FSDP still holds of a pass that broke off."""
        self.optimizer.forget()
        for one in (one for parts in self._parts for part in parts for one in _parameters_of(part)):
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):  # after the first forward pass
                one._unsharded_param.grad = None

    # ------------------------------------------------------------ weights out

    @torch.no_grad()
    def whole(self, settle: Callable[[], None] | None = None, *, view: View = PLAIN) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by its Hugging Face name, whole, in compute precision. Collective: every rank exhausts
        it.

        A tensor is valid until the next one. With `settle` it is valid until `settle` was called, after the next unit
        was gathered: two units are then whole at a time.
        """
        held: list[Any] = []
        lent: list[Tensor] = []  # keeps the memory of lent bytes alive

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
        """Return every tensor of the training state by name: this rank's trained parameters, their moments and step
        counts, also before the first update, and the loss scale.
        """
        self.reshard()
        self.optimizer.prime()
        state: dict[str, Tensor] = {} if self.scale is None else {prefix + LOSS_SCALE: self.scale.kept}
        for full, parameter in self.root.named_parameters():
            if not parameter.requires_grad:
                continue
            name = full.removeprefix(OWN)
            state[f"{prefix}model/{name}"] = parameter.data
            for key, value in self.optimizer.states(parameter).items():
                state[f"{prefix}{key}/{name}"] = value
        return state


def _parameters_of(part: Any) -> Iterator[Any]:
    """Yield FSDP's own parameters of a module; before torch 2.12 a module has one group of them."""
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        yield from group.fsdp_params if group is not None else ()


def unit_names(root: nn.Module, units: Sequence[nn.Module]) -> list[list[str]]:
    """Return the parameter names that each unit owns itself; a tied parameter once."""
    owner: dict[int, int] = {}
    for number, unit in enumerate(units):  # layers come after the root and override it
        for parameter in unit.parameters():
            owner[id(parameter)] = number
    names: list[list[str]] = [[] for _ in units]
    for name, parameter in root.named_parameters():
        names[owner[id(parameter)]].append(name)
    return names

"""The interface of training backends, and the tensors that pass between them and the learner.

A backend owns the model, the optimizer and their layout over ranks; it knows nothing of queues or losses. Every backend
guarantees:
1. the result of a step does not depend on the number of ranks or the split of the batch (up to rounding);
2. `iter_hf_weights` is collective: all ranks exhaust it, only rank 0 gets data, in a fixed order, with Hugging Face
   names, a tied tensor once;
3. nothing it writes needs pickle to be read;
4. ranks with the same share of a batch (`learners.gang.topology`) get the same numbers from every forward pass; only
   the counting rank must return sums for metrics.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from asyncrl.images.forward import Seen
from learners.backends.vision import Vision
from learners.batch.micro_batches import MicroBatch, Sample
from learners.models.logprobs import TokenNumbers
from learners.models.support import Supports
from weightsync.encoding.adapter import AdapterConfig
from weightsync.encoding.quantised import quantised_specs

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
PACKING_LIMIT = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}


class Micro(NamedTuple):
    """A `MicroBatch` on the device."""

    input_ids: Tensor  # i8 [R, W]
    position_ids: Tensor  # i8 [R, W]
    positions: Tensor  # i8 [N]
    targets: Tensor  # i8 [N]
    sequences: Tensor  # i8 [N]
    behaviour: Tensor  # f4 [N]
    mask: Tensor  # bool [N]
    advantages: Tensor  # f4 [N]
    lags: Tensor  # i8 [N]
    scales: Tensor  # f4 [S]
    right: Tensor  # bool [S]
    siblings: Tensor  # i8 [S]: trained tokens in the other sequences of its sample
    support: Supports | None = None  # what each target was drawn from; None: the whole vocabulary
    seen: Seen | None = None  # of a vision-language model; with M-RoPE `position_ids` are [4, R, W]
    teacher: Tensor | None = None  # f4 [N]: log-probs of teachers, NaN without one
    top_ids: Tensor | None = None  # i8 [N, K]: their likeliest tokens
    top_logprobs: Tensor | None = None  # f4 [N, K]
    top_current: Tensor | None = None  # f4 [N, K]: the policy's log-probs of `top_ids`, with gradient
    experts: Tensor | None = None  # i2 [R * W, layers * chosen], see `MicroBatch`


class WeightSpec(NamedTuple):
    """One exported tensor: Hugging Face name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Values(NamedTuple):
    """A critic's predictions for a micro-batch: before each response token `[N]`, and after the last one `[S]`."""

    tokens: Tensor
    after: Tensor


class UpdateInfo(NamedTuple):
    """`grad_norm` before clipping; `skipped`: it was not finite and the weights are unchanged."""

    grad_norm: float
    skipped: bool
    loss_scale: float = 0.0  # factor on the loss against underflow of gradients; 0: none
    overflows: int = 0  # passes since the update before that were repeated with a lower one

    def scaling(self) -> dict[str, float]:
        """Return its metrics by catalogue name; empty without a scale."""
        return {"loss_scale": self.loss_scale, "grad_overflows": float(self.overflows)} if self.loss_scale else {}


#: (log-probs [N], entropy [N], micro-batch, its number) -> (its share of the loss, sums for metrics).
LossFunction = Callable[[Tensor, Tensor, Micro, int], tuple[Tensor, Mapping[str, Tensor]]]


class Companion(Protocol):
    """A model that trains next to the policy, with its own optimizer, in the backend's checkpoints."""

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Like `Backend.train`; a critic's loss gets values in place of log-probs, zeros in place of entropies."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm and return the norm before. Collective."""

    def apply(self, lr: float) -> None:
        """Update with the current gradients and clear them."""

    def discard(self) -> None:
        """Clear the gradients without an update."""


class Critic(Companion, Protocol):
    def values(self, micro: Sequence[MicroBatch]) -> list[Values]:
        """Return values of each micro-batch, without gradient. Collective."""


class ProcessRewardModel(Companion, Protocol):
    """A language model whose log-ratio to a frozen one gives process rewards."""

    def forward(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return log-probs `[N]` of each micro-batch, without gradient. Collective."""

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return log-probs `[N]` of each micro-batch under the frozen model. Collective."""

    def remember(self) -> None:
        """Store weights and optimizer for `restore`."""

    def restore(self) -> None:
        """Return to the state stored by `remember`, if there is one."""

    def release(self) -> None:
        """Drop the state stored by `remember`."""


class Snapshot(Protocol):
    """A copy of this rank's part of a checkpoint, on the host."""

    def save(self, folder: Path) -> Path:
        """Write the file that `Backend.save` would have written. Runs on any thread, without collectives."""


class Adapters(Protocol):
    """What a policy with trained adapters publishes: the base once, then adapters."""

    settings: AdapterConfig

    def specs(self) -> list[WeightSpec]:
        """Return the specs of `iter_weights`, in its order, with peft's names."""

    def iter_weights(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Yield name and bytes of every adapter tensor, like `Backend.iter_hf_weights` without lending. Collective."""

    def iter_base(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Like `Backend.iter_hf_weights`, for the weights under the adapter. Collective."""


class Backend(Protocol):
    """A model that trains. `Backend(config, gang)` loads the start weights.

    Log-probs of a target with a support are those of the softmax over it; entropies are of the full softmax.
    `supports`: the back-end does so; one without it gets no samples with supports.
    """

    supports: bool

    @property
    def critic(self) -> Critic | None:
        """The value model; None if the estimator needs no values."""

    @property
    def process_reward(self) -> ProcessRewardModel | None:
        """The process reward model; None if the estimator needs none."""

    @property
    def adapters(self) -> Adapters | None:
        """The published adapters (`asyncrl.config.mode.sends_adapters`); None if versions are full weights."""

    def self_check(self) -> None:
        """Raise `learner.packing` if packed rows disagree with single sequences."""

    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return log-probs `[N]` of each micro-batch, without gradient. Collective."""

    def forward_numbers(self, micro: Sequence[MicroBatch], *, squares: bool = False) -> list[TokenNumbers]:
        """Return log-probs and entropies, and with `squares` sums of squares, all `[N]`, without gradient.
        Collective.
        """

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return log-probs `[N]` of each micro-batch under the frozen start weights (`model.path`), over the same
        supports. Collective.
        """

    def renew_reference(self) -> None:
        """Make the current weights those of the reference; with `learner.preference.iteration`. Collective."""

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Run forward and backward over all micro-batches and add up gradients. Return this rank's sums. Collective."""

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        """Clip, update and clear the gradients. Collective."""

    def discard(self) -> float:
        """Clear the gradients without an update and return their global norm. Collective."""

    def weight_specs(self) -> list[WeightSpec]:
        """Return the specs of `iter_hf_weights`, in its order."""

    def iter_hf_weights(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Yield name and bytes of every tensor, in the dtype of its spec (`weightsync.dtype`). Collective: every rank
        must exhaust it. With `settle`, bytes may be lent: they change after `settle` returned, which this iterator
        calls on the thread that asks for the next tensor.
        """

    def save(self, folder: Path) -> Path:
        """Write this rank's part of weights, optimizer and generator states; return the file. Collective."""

    def snapshot(self) -> Snapshot:
        """Return a host copy of what `save` would write now. Collective."""

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, from any number of ranks. Collective."""

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with tokenizer files, by rank 0; companions in the folders `critic` and
        `process_reward` below it. Collective.
        """


def to_device(micro: MicroBatch, device: torch.device, vision: Vision | None = None) -> Micro:
    def long(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

    seen = None
    if vision is None:
        input_ids, position_ids = (long(ids).view(-1, micro.width) for ids in (micro.input_ids, micro.position_ids))
    else:
        input_ids, position_ids, seen = vision.see(micro, device)
    return Micro(
        input_ids=input_ids,
        position_ids=position_ids,
        positions=long(micro.positions),
        targets=long(micro.targets),
        sequences=long(micro.sequences),
        behaviour=torch.tensor(micro.behaviour, device=device),
        mask=torch.tensor(micro.mask, device=device).bool(),
        advantages=torch.tensor(micro.advantages, device=device),
        lags=long(micro.lags),
        scales=torch.tensor(micro.scales, device=device),
        right=torch.tensor(micro.right, device=device).bool(),
        siblings=long(micro.siblings),
        support=Supports.from_arrays(micro.support_counts, micro.support_ids, device),
        seen=seen,
        experts=torch.tensor(micro.experts, device=device).view(input_ids.numel(), -1) if micro.experts.size else None,
        **_teaching(micro, device),
    )


def _teaching(micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    if not micro.teacher.size:
        return {}
    found = {"teacher": torch.tensor(micro.teacher, device=device)}
    if micro.top_ids.size:
        shape = (micro.teacher.size, -1)
        found["top_ids"] = torch.tensor(micro.top_ids.astype(np.int64), device=device).view(shape)
        found["top_logprobs"] = torch.tensor(micro.top_logprobs, device=device).view(shape)
    return found


def extra_inputs(micro: Micro) -> dict[str, Any]:
    """Return further arguments for a policy, if there are any: score models take none."""
    named = {"support": micro.support, "seen": micro.seen, "experts": micro.experts}
    return {name: value for name, value in named.items() if value is not None}


def add_sums(sums: dict[str, Tensor], value: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Add the loss of a micro-batch and its sums for metrics; of a name that ends in `_max` the largest is kept."""
    for name, part in (("loss", value.detach()), *parts.items()):
        join = torch.maximum if name.endswith("_max") else torch.add
        sums[name] = join(sums[name], part) if name in sums else part


def check_packing(together: Tensor, singles: Sequence[Tensor], dtype: str, what: str) -> None:
    """Raise `learner.packing` if the outputs `[N]` of packed rows are not those of single sequences."""
    worst = float((together - torch.cat(list(singles))).abs().max())
    if not worst <= PACKING_LIMIT[dtype]:
        raise AsyncRLError("learner.packing", f"{what} differ by {worst:.3g}")


def published_dtype(config: Config) -> str:
    """Return the dtype of published weights: `weightsync.dtype`; that of the model for `auto`, and before and next to
    quantised matrices.
    """
    sync = config.weightsync
    return config.model.dtype if sync.dtype == "auto" or sync.quantised else sync.dtype


def published_specs(specs: list[WeightSpec], config: Config) -> list[WeightSpec]:
    """Return what is published for tensors in `published_dtype`: with quantised matrices their scales as well."""
    kind = config.weightsync.quantised
    return [WeightSpec(*spec) for spec in quantised_specs(specs, kind)] if kind else specs


def tensor_bytes(tensor: Tensor, dtype: torch.dtype, *, lend: bool) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor in a dtype, on the host: a copy, or with `lend` its own memory if that fits."""
    if lend and tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        # Not tensor.numpy(): that pins the storage that it views, and FSDP could not free the whole layer.
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        return np.frombuffer(memoryview(memory), dtype=np.uint8)
    own = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
    return own.view(-1).view(torch.uint8).numpy()


def toy_samples(vocabulary: int) -> list[Sample]:
    """Return three sequences for the check at the start."""
    return [_toy(length, vocabulary) for length in (7, 12, 5)]


def _toy(length: int, vocabulary: int) -> Sample:
    tokens = (np.arange(3, 3 + length, dtype=np.int32) * 7 + length) % vocabulary
    ones = np.ones(length - 2)
    return Sample(tokens, 2, -ones.astype(np.float32), ones.astype(np.uint8), 0.0)

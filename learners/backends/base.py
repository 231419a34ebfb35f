"""What the learner asks of a training backend, and the tensors that pass between them.

A backend owns the model, the optimizer and
their layout over ranks; it knows nothing of batches, queues or losses. Guarantees asked of every backend:
1. the result of a step does not depend on the number of ranks or on how the batch was cut (up to rounding);
2. `iter_hf_weights` is collective: all ranks run it to its end, rank 0 alone gets the data, in a fixed order, in
   Hugging Face names, a tied tensor once;
3. nothing it writes needs pickle to be read;
4. ranks that have the same share of a batch (`learners.gang.topology`) get the same numbers of every forward pass;
   sums for
   metrics are asked of the one that counts alone, the others may give none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config import Config
from learners.batch.micro_batches import MicroBatch, Sample
from learners.models.logprobs import TokenNumbers
from weightsync.encoding.adapter import AdapterConfig

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
    """`grad_norm` before clipping; `skipped` where it was not finite and the weights were left as they were."""

    grad_norm: float
    skipped: bool


#: (log-probs [N], entropy [N], the micro-batch, its number) -> (this piece's share of the loss, sums for metrics).
LossFunction = Callable[[Tensor, Tensor, Micro, int], tuple[Tensor, Mapping[str, Tensor]]]


class Companion(Protocol):
    """A model that trains beside the policy, with an optimizer of its own; in the checkpoints of the backend."""

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """As `Backend.train`; a critic's loss gets values in the place of log-probs, zeros in that of entropies."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a global norm; what it was. Collective."""

    def apply(self, lr: float) -> None:
        """Update with the gradients as they are, and forget them."""

    def discard(self) -> None:
        """Forget the gradients without an update."""


class Critic(Companion, Protocol):
    def values(self, micro: Sequence[MicroBatch]) -> list[Values]:
        """Values of each micro-batch, without gradient. Collective."""


class ProcessRewardModel(Companion, Protocol):
    """A language model whose log-ratio to a frozen one becomes process rewards."""

    def forward(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch, without gradient. Collective."""

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch under the frozen one. Collective."""

    def remember(self) -> None:
        """Keep weights and optimizer as they are, for `restore`."""

    def restore(self) -> None:
        """Back to what `remember` saw; nothing where there is nothing remembered."""

    def release(self) -> None:
        """Drop what `remember` saw."""


class Snapshot(Protocol):
    """This rank's part of a checkpoint, copied to the host."""

    def save(self, folder: Path) -> Path:
        """Write it as `Backend.save` would have; the file. On any thread, with no word to the other ranks."""


class Adapters(Protocol):
    """What is published of a policy whose adapters alone train: the base once, then adapters."""

    settings: AdapterConfig

    def specs(self) -> list[WeightSpec]:
        """What `iter_weights` gives, in its order: peft's names."""

    def iter_weights(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Name and bytes of every tensor of the adapter, as `Backend.iter_hf_weights` without lending. Collective."""

    def iter_base(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """As `Backend.iter_hf_weights`, of the weights under the adapter. Collective."""


class Backend(Protocol):
    """A model that trains. Made by `Backend(config, gang)`; loads the start weights at once."""

    @property
    def critic(self) -> Critic | None:
        """The value model where the estimator in force needs values, else None."""

    @property
    def process_reward(self) -> ProcessRewardModel | None:
        """The process reward model where the estimator in force needs process rewards, else None."""

    @property
    def adapters(self) -> Adapters | None:
        """Where versions are published as adapters (`asyncrl.config.mode.sends_adapters`), else None: as
        whole weights."""

    def self_check(self) -> None:
        """Raise `learner.packing` where rows as they are fed disagree with single sequences."""

    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch, without gradient. Collective."""

    def forward_numbers(self, micro: Sequence[MicroBatch], *, squares: bool = False) -> list[TokenNumbers]:
        """Log-probs and entropies, and with `squares` sums of squares, all `[N]`, without gradient. Collective."""

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch under the frozen start weights (`model.path`). Collective."""

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Forward and backward over all micro-batches; gradients add up. This rank's sums for metrics. Collective."""

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        """Clip, update, forget the gradients. Collective."""

    def discard(self) -> float:
        """Forget the gradients without an update; their global norm. Collective."""

    def weight_specs(self) -> list[WeightSpec]:
        """What `iter_hf_weights` gives, in its order."""

    def iter_hf_weights(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Name and bytes of every tensor, in the dtype of its spec (`weightsync.dtype`). Collective: every rank must
        exhaust it, with `settle` or without. With it bytes may be lent: they change once it has returned; it is called
        by this iterator, on the thread that asks for the next tensor."""

    def save(self, folder: Path) -> Path:
        """Write this rank's part of weights, optimizer and generator states; the file. Collective."""

    def snapshot(self) -> Snapshot:
        """A copy on the host of what `save` would write now: no later update changes it. Collective."""

    def load(self, folder: Path) -> None:
        """Undo of `save`, from any number of ranks. Collective."""

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with the tokenizer's files, by rank 0; the models beside the policy likewise, in
        folders below it (`critic`, `process_reward`). Collective."""


def to_device(micro: MicroBatch, device: torch.device) -> Micro:
    """The tensors of a micro-batch, on the device."""

    def long(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

    return Micro(
        input_ids=long(micro.input_ids).view(-1, micro.width),
        position_ids=long(micro.position_ids).view(-1, micro.width),
        positions=long(micro.positions),
        targets=long(micro.targets),
        sequences=long(micro.sequences),
        behaviour=torch.tensor(micro.behaviour, device=device),
        mask=torch.tensor(micro.mask, device=device).bool(),
        advantages=torch.tensor(micro.advantages, device=device),
        lags=long(micro.lags),
        scales=torch.tensor(micro.scales, device=device),
        right=torch.tensor(micro.right, device=device).bool(),
    )


def published_dtype(config: Config) -> str:
    """The dtype in which weights leave: `weightsync.dtype`, for `auto` that of the model."""
    return config.model.dtype if config.weightsync.dtype == "auto" else config.weightsync.dtype


def tensor_bytes(tensor: Tensor, dtype: torch.dtype, *, lend: bool) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in a dtype, on the host: a copy, or with `lend` the very bytes where they are as wanted."""
    if lend and tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        # Not tensor.numpy(): that pins the storage that it views, and FSDP could not free the whole layer.
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        return np.frombuffer(memoryview(memory), dtype=np.uint8)
    own = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
    return own.view(-1).view(torch.uint8).numpy()


def toy_samples(vocabulary: int) -> list[Sample]:
    """Three sequences for the check at the start."""
    return [_toy(length, vocabulary) for length in (7, 12, 5)]


def _toy(length: int, vocabulary: int) -> Sample:
    tokens = (np.arange(3, 3 + length, dtype=np.int32) * 7 + length) % vocabulary
    ones = np.ones(length - 2)
    return Sample(tokens, 2, -ones.astype(np.float32), ones.astype(np.uint8), 0.0)

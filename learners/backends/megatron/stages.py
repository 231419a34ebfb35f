"""Runs micro-batches through the pipeline stages of a Megatron-core model: schedule, log-probs, losses.

Guarantees:
1. Megatron-core's schedule orders the stages (one forward, one backward); `finalize_model_grads` reduces gradients
   once, with the last backward: sums over shares, partial sums over tensor places, tied heads;
2. every tensor place of the last stage computes the loss with gradients. Its numbers go to the other stages, which run
   the loss on them without gradient, so results and logs are the same on every rank;
3. hidden states of a micro-batch are freed after its backward.

Example: 2 stages, 3 micro-batches: stage 0 is one forward ahead of stage 1, and gets the log-probs of the three
micro-batches in one message at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import Config
from asyncrl.runtime.device import Device
from learners.backends.base import LossFunction, Micro, to_device
from learners.backends.megatron.cpu_shim import cuda_stand_ins
from learners.backends.megatron.families import Facts
from learners.backends.megatron.model import bounds, hidden_states
from learners.backends.megatron.replay import Replay
from learners.batch.micro_batches import MicroBatch
from learners.gang.topology import Topology
from learners.models.logprobs import TokenNumbers, chunked_logprobs, split_logprobs, token_numbers
from learners.models.vocabulary import Vocabulary


class Found(NamedTuple):
    """Result of a micro-batch; without a loss `value` is 0 and there are no sums."""

    numbers: TokenNumbers  # detached
    value: Tensor
    sums: Mapping[str, Tensor]


class Stages:
    """Runs this rank's part of the pipeline."""

    def __init__(self, facts: Facts, settings: Any, config: Config, place: Topology, device: Device) -> None:
        self._facts, self._settings, self._place, self._device = facts, settings, place, device
        self._temperature = config.sampling.temperature
        self._chunk = config.learner.logprob_chunk_tokens

    def run(
        self,
        model: Any,
        micro: Sequence[MicroBatch],
        loss: LossFunction | None = None,
        *,
        squares: bool = False,
        replay: Replay | None = None,
    ) -> list[Found]:
        """Run forward, and with a loss backward (`model` is then that of `wrap`); `replay`: of the model's routers.
        Collective; the same result on every rank.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        given = [to_device(piece, self._device.torch_device) for piece in micro]
        multiple = self._place.tensor if self._settings.sequence_parallel else 1
        if replay is not None:
            replay.begin(trains=loss is not None)

        def forward(numbers: Iterator[int], stage: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)

            def last(hidden: Tensor) -> tuple[Tensor, Tensor, Found]:
                values = self._numbers(getattr(stage, "module", stage), hidden, given[number], squares=squares)
                value, sums = _compute_loss(loss, values, given[number], number)
                found = Found(_detach(values), value.detach().clone(), sums)
                return value, torch.zeros((), dtype=torch.int), found

            ends = bounds(micro[number], multiple=multiple)
            if replay is not None:
                replay.give(given[number].experts, ends[-1])
            return hidden_states(stage, given[number], ends), last

        with cuda_stand_ins(self._device), torch.set_grad_enabled(loss is not None):
            found = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(range(len(micro))),
                model=[model],
                num_microbatches=len(micro),
                seq_length=1,
                micro_batch_size=1,
                forward_only=loss is None,
            )
        return found if self._place.pipeline == 1 else self._spread(found, given, loss, squares=squares)

    def _numbers(self, model: Any, hidden: Tensor, tensors: Micro, *, squares: bool) -> TokenNumbers:
        """Return the last stage's numbers for a micro-batch; with gradients if they are enabled."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self._settings.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if self._facts.scores:
            return _score(hidden[:, 0], model.output_layer.weight, tensors)
        weight = model.shared_embedding_or_output_weight() if self._facts.tied else model.output_layer.weight
        each = self._facts.padded_rows(self._place.tensor) // self._place.tensor
        start = each * self._place.tensor_place
        weight = weight[: min(each, self._facts.vocab - start)]  # without padding
        states = hidden[:, 0][tensors.positions]
        options: dict[str, Any] = {"temperature": self._temperature, "chunk_tokens": self._chunk}
        options["support"] = tensors.support
        found: tuple[Tensor, Tensor] | TokenNumbers
        if self._place.tensor > 1:
            split = Vocabulary(parallel_state.get_tensor_model_parallel_group(), start)
            found = split_logprobs(states, weight, tensors.targets, split, squares=squares, **options)
        elif torch.is_grad_enabled():
            found = chunked_logprobs(states, weight, tensors.targets, **options)
        else:
            found = token_numbers(states, weight, tensors.targets, squares=squares, **options)
        return found if isinstance(found, TokenNumbers) else TokenNumbers(*found, None)

    @torch.no_grad()
    def _spread(
        self, found: list[Found], given: Sequence[Micro], loss: LossFunction | None, *, squares: bool
    ) -> list[Found]:
        """Send the results of the last stage to all stages."""
        from megatron.core import parallel_state

        sizes = [micro.targets.numel() + self._facts.scores * micro.scales.numel() for micro in given]
        flat = torch.zeros(3 if squares else 2, sum(sizes), device=self._device.torch_device)
        for one, room in zip(found, torch.split(flat, sizes, dim=1), strict=False):  # other stages have no results
            for row, numbers in zip(room, one.numbers, strict=False):
                row.copy_(numbers)
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        if found:
            return found
        every = []
        for number, part in enumerate(torch.split(flat, sizes, dim=1)):
            values = TokenNumbers(part[0], part[1], part[2] if squares else None)
            every.append(Found(values, *_compute_loss(loss, values, given[number], number)))
        return every


def _compute_loss(
    loss: LossFunction | None, values: TokenNumbers, tensors: Micro, number: int
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss; 0 and no sums without one."""
    count = tensors.targets.numel()  # a critic has values after responses, too
    return (
        (torch.zeros(()), {})
        if loss is None
        else loss(values.logprobs[:count], values.entropy[:count], tensors, number)
    )


def _score(hidden: Tensor, weight: Tensor, tensors: Micro) -> TokenNumbers:
    """Return values `[N + S]` from hidden states `[T, H]`: before each response token, then after the last ones. Zeros
    stand for entropies.
    """
    ends = tensors.positions.new_zeros(tensors.scales.numel())
    ends = ends.scatter_reduce(0, tensors.sequences, tensors.positions + 1, "amax")
    values = hidden[torch.cat((tensors.positions, ends))].float() @ weight[0].float()
    return TokenNumbers(values, torch.zeros_like(values), torch.zeros_like(values))


def _detach(values: TokenNumbers) -> TokenNumbers:
    return TokenNumbers(values.logprobs.detach(), values.entropy.detach(), values.square_sums)

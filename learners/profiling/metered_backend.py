"""Counts the passes of a training backend: operations of the models, and seconds of passes without gradient.

Guarantees:
1. calls and results pass through unchanged;
2. operations are those of the models for the samples of the batch (`learners.profiling.flops`), without padding, masked
   scores and recomputation; over a gang every share counts once;
3. on an accelerator, seconds are measured between two events of its stream and read once per step, so no pass waits;
4. a model of unknown architecture has no `model_flops`; this is reported once.

Example: one `forward_logprobs` and one `train` over rows of 1000 tokens: 4 forward passes of operations, and the
seconds of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.runtime.model_folder import load_config
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang
from learners.profiling.device_peaks import peak_flops
from learners.profiling.flops import Costs, model_costs

#: Methods of a backend that run without gradient.
FORWARD = ("forward_logprobs", "forward_numbers", "reference_logprobs", "values", "forward")


class Meter:
    """Costs of the passes of a step. `say` reports once why there are no figures."""

    def __init__(self, config: Config, gang: Gang, *, say: Callable[[str], None] = lambda _: None) -> None:
        self._gang, self._device = gang, gang.device
        self._spans: list[tuple[Any, Any]] = []
        self._operations = 0
        self._peak = config.learner.profile.peak_flops or peak_flops(gang.device.title, config.model.dtype)
        self.known = True
        self._config, self._say = config, say
        self._costs: dict[tuple[str, bool], Costs | None] = {}

    def wrap(self, backend: Any) -> Any:
        learner, path = self._config.learner, self._config.model.path
        policy = self.costs(path, scorer=learner.mode == "reward_model")
        return Metered(backend, self, policy, reference=policy, frozen=bool(learner.lora.rank))

    def wrap_companion(self, name: str, model: Any) -> Any:
        """Return a companion model with counted passes."""
        learner, path = self._config.learner, self._config.model.path
        if name == "critic":
            return Metered(model, self, self.costs(learner.critic.model or path, scorer=True))
        start = learner.process_reward.model or path
        frozen = self.costs(learner.process_reward.reference or start)
        return Metered(model, self, self.costs(start), reference=frozen)

    def costs(self, path: str, *, scorer: bool = False) -> Costs | None:
        """Return the costs of the model in a folder; None if unknown."""
        key = (path, scorer)
        if key not in self._costs:
            self._costs[key] = self._read(path, scorer)
        return self._costs[key]

    def _read(self, path: str, scorer: bool) -> Costs | None:
        try:
            config = load_config(path, trust_remote_code=self._config.model.trust_remote_code)
            return model_costs(config.to_dict(), scorer=scorer)
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            if self.known:
                self._say(f"no model_flops and no mfu: {path}: {error}")
            self.known = False
        return None

    @contextmanager
    def measure_scoring(self) -> Iterator[None]:
        """Measure a pass without gradient."""
        start = self._device.mark()
        with torch.profiler.record_function("asyncrl: forward without gradient"):
            yield
        self._spans.append((start, self._device.mark()))

    def count(self, costs: Costs | None, micro: Sequence[MicroBatch], *, train: bool, frozen: bool = False) -> None:
        """Add a forward pass over these micro-batches, with `train` also a backward pass; `frozen`: to adapters
        only.
        """
        for piece in micro if costs is not None else ():
            assert costs is not None
            lengths, predicted = sample_lengths(piece), int(piece.targets.size)
            forward = costs.forward(lengths, predicted=predicted)
            self._operations += costs.training(lengths, predicted=predicted, frozen=frozen) if train else forward

    def take(self) -> tuple[float, float]:
        """Return and reset seconds of passes without gradient on this rank, and operations over all shares.
        Collective.
        """
        seconds = sum(self._device.seconds_between(start, end) for start, end in self._spans)
        total = self._gang.total({"operations": float(self._operations)})["operations"]
        self._spans, self._operations = [], 0
        return seconds, total

    def figures(self, operations: float, times: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of a step by catalogue name, from operations over all shares and the parts of its time."""
        memory = self._device.memory()
        used, peak = float(memory["used"]), float(memory["peak"])
        found = {"memory_bytes": used, "memory_peak_bytes": max(used, peak)}  # Linux counts the two separately
        if not self.known or not operations:
            return found
        each = operations / self._gang.size
        computing = max(times["proximal_s"] + times["train_s"], 1e-9)
        found |= {"model_flops": operations, "tflops_per_device": each / computing / 1e12}
        if self._peak:
            found |= {"mfu": each / computing / self._peak, "mfu_step": each / max(times["step_s"], 1e-9) / self._peak}
        return found


class Metered:
    """A backend or companion with counted passes. Everything else passes through."""

    def __init__(
        self, model: Any, meter: Meter, costs: Costs | None, *, reference: Costs | None = None, frozen: bool = False
    ) -> None:
        self._model, self._meter, self._costs, self._reference = model, meter, costs, reference
        self._frozen = frozen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name in ("critic", "process_reward"):
            return None if found is None else self._meter.wrap_companion(name, found)
        if name in FORWARD:
            return self._count_forward(found, self._reference if name == "reference_logprobs" else self._costs)
        return self._count_train(found) if name == "train" else found

    def _count_forward(self, call: Callable[..., Any], costs: Costs | None) -> Callable[..., Any]:
        def forward(micro: Sequence[MicroBatch], **options: Any) -> Any:
            self._meter.count(costs, micro, train=False)
            with self._meter.measure_scoring():
                return call(micro, **options)

        return forward

    def _count_train(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def train(micro: Sequence[MicroBatch], loss: Any) -> Any:
            self._meter.count(self._costs, micro, train=True, frozen=self._frozen)
            with torch.profiler.record_function("asyncrl: forward and backward"):
                return call(micro, loss)

        return train


def sample_lengths(micro: MicroBatch) -> list[int]:
    """Return tokens of every sample of a micro-batch, without padding. A padded row ends with its last predicted token;
    one without predictions counts whole.
    """
    starts, lengths = micro.cu_seqlens[:-1], np.diff(micro.cu_seqlens)
    if micro.input_ids.size > micro.width:
        ends = np.zeros(starts.size, np.int64)
        np.maximum.at(ends, micro.sequences, micro.positions + 2)
        lengths = np.where(ends > 0, ends - starts, lengths)
    return [int(length) for length in lengths]

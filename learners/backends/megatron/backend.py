"""Training with Megatron-core: matrices split over tensor places, layers over pipeline stages, batches over shares.

Guarantees, in addition to those of `learners.backends.base`:
1. master weights and optimizer states are float32 and divided over the shares; compute runs in `model.dtype`; gradients
   are summed in float32;
2. this backend runs the pipeline schedule: `train` gets micro-batches and a loss and runs them through all stages;
3. every rank has log-probs, losses and metrics: the last stage computes them with gradients and sends its numbers to
   the other stages, which run the loss on them;
4. packed rows are compared with single sequences at the start (`self_check`);
5. checkpoints load in any other layout, also on one rank, and in the backend fsdp2; its checkpoints load here.

Without CUDA, Megatron-core runs with stand-ins (`cpu_shim`). Critics, process reward models, reward models, mixtures of
experts and context parallelism are not supported.
Example: 4 ranks, tensor = 2, pipeline = 2: one share; ranks 2 and 3 compute the losses, rank 2's sums count, rank 0
publishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.model_folder import load_config, load_generation_config
from learners.backends.base import (
    DTYPES,
    LossFunction,
    Snapshot,
    UpdateInfo,
    WeightSpec,
    add_sums,
    check_packing,
    published_dtype,
    toy_samples,
)
from learners.backends.hf_folder import build_skeleton, write_folder
from learners.backends.megatron import model as models
from learners.backends.megatron.checkpoint import Store, host_shard, pieces
from learners.backends.megatron.cpu_shim import cuda_stand_ins
from learners.backends.megatron.families import read_facts
from learners.backends.megatron.mapping import (
    Local,
    Source,
    check_layout,
    find_holder,
    rank_buffers,
    rank_parameters,
    tensor_shapes,
    tensor_sources,
)
from learners.backends.megatron.optimizer import Optimizer, wrap
from learners.backends.megatron.replay import Replay
from learners.backends.megatron.stages import Stages
from learners.backends.megatron.weights import Folder, assemble, export_tensors, unstack_sources
from learners.batch.micro_batches import MicroBatch, packed_row, padded_rows
from learners.gang.gang import Gang, waiting_s
from learners.models.logprobs import TokenNumbers
from learners.models.policy_model import check_head


class MegatronBackend:
    supports = True
    critic = None
    process_reward = None
    adapters = None  # all weights are trained

    def __init__(self, config: Config, gang: Gang) -> None:
        self._config, self._gang, self._device, self._place = config, gang, gang.device, gang.topology
        models.require()
        models.refuse(config, self._place, self._device)
        path = config.model.path
        try:
            self._hf = load_config(path, trust_remote_code=config.model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError("config.model", f"{path}: {error}") from error
        generation = Path(path) / "generation_config.json"
        self._generation = load_generation_config(path) if generation.exists() else None
        check_head(self._hf)
        self._facts = read_facts(self._hf.to_dict())
        check_layout(self._facts, self._place)
        self._shapes = self._check_names(path)
        self._stacked = Folder(Path(path), self._skeleton).stacked()
        self._fused = models.has_engine(self._device)
        self._locals = {local.name: local for local in rank_parameters(self._facts, self._place, fused=self._fused)}
        self._sent_name, self._sent_dtype = DTYPES[published_dtype(config)]
        self._reference: Any = None  # created on first use
        with cuda_stand_ins(self._device):
            minutes = math.ceil(waiting_s(config) / 60)
            with gang.meeting():
                models.join_groups(self._place, seed=config.run.seed + models.SEED_OFFSET, minutes=minutes)
            self._settings, self._model = self._build()
            self._ddp = wrap(self._model, self._settings)
            self._optimizer = Optimizer(self._ddp, config.learner.optim, bf16=self._settings.bf16)
        for parameter, whole in self._start(self._model):
            self._optimizer.fill(parameter, {"model": whole}.__getitem__, states=False)
        self._replay = self._make_replay()
        self._stages = Stages(self._facts, self._settings, config, self._place, self._device)

    def _make_replay(self) -> Replay | None:
        """Return the routers of the policy, if they replay; a reference chooses for itself."""
        learner, experts = self._config.learner, self._facts.experts
        if not learner.router_replay or experts is None:
            return None
        split = bool(self._settings.sequence_parallel)
        recomputes = learner.gradient_checkpointing
        return Replay(self._model, experts, self._place, recomputes=recomputes, split_rows=split)

    def _check_names(self, path: str) -> dict[str, tuple[int, ...]]:
        """Return every tensor of transformers' model and its shape, in the publishing order of the backend fsdp2: what
        is outside the layers, then layer by layer, each in the order of its modules.

        Raises:
            ConfigError: `config.model`: the mapping has other tensors.
        """
        self._skeleton = build_skeleton(self._hf, trust_remote_code=self._config.model.trust_remote_code)
        theirs = {name: tuple(one.shape) for name, one in self._skeleton.named_parameters()} if self._skeleton else {}
        ours = tensor_shapes(self._facts)
        if odd := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            why = f"the model has {theirs.get(odd[0])}, the backend megatron maps {ours.get(odd[0])}"
            raise ConfigError("config.model", f"{path}: {odd[0]}: {why}")
        return {name: theirs[name] for name in sorted(theirs, key=lambda name: name.startswith("model.layers."))}

    def _build(self) -> tuple[Any, Any]:
        """Return settings and model of this rank, with parameters checked against the mapping."""
        settings = models.transformer_config(
            self._facts, self._config, self._place, self._device, eps=float(self._hf.rms_norm_eps)
        )
        model = models.build(self._facts, self._hf, settings, self._place, self._device)
        built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        planned = {name: local.shape for name, local in self._locals.items()}
        if built != planned:
            odd = sorted(name for name in built.keys() | planned.keys() if built.get(name) != planned.get(name))
            raise AsyncRLError("internal", f"{odd[0]}: {built.get(odd[0])} is built, {planned.get(odd[0])} is mapped")
        models.mark_split(model, {name: local.axis for name, local in self._locals.items()})
        return settings, model

    @torch.no_grad()
    def _start(self, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter with its start weights, float32, on the host."""
        folder = Folder(Path(self._config.model.path), self._skeleton)
        try:
            for local in rank_buffers(self._facts, self._place):
                model.get_buffer(local.name).copy_(assemble(local, folder.read))
            for name, parameter in model.named_parameters():
                yield parameter, assemble(self._locals[name], folder.read)
        finally:
            folder.close()

    # ------------------------------------------------------------ forward and backward

    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        return [found.numbers.logprobs for found in self._stages.run(self._model, micro, replay=self._replay)]

    def forward_numbers(self, micro: Sequence[MicroBatch], *, squares: bool = False) -> list[TokenNumbers]:
        return [found.numbers for found in self._stages.run(self._model, micro, squares=squares, replay=self._replay)]

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        if self._reference is None:
            with cuda_stand_ins(self._device):
                self._reference = self._build()[1]
            for parameter, whole in self._start(self._reference):
                parameter.requires_grad_(False).copy_(whole)
        return [found.numbers.logprobs for found in self._stages.run(self._reference, micro)]

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        for found in self._stages.run(self._ddp, micro, loss, replay=self._replay):
            add_sums(sums, found.value, found.sums)
        return {name: float(value) for name, value in sums.items()}  # here, to wait for the device only once

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        with cuda_stand_ins(self._device):
            return self._optimizer.step(lr=lr, max_norm=max_norm)

    def discard(self) -> float:
        with cuda_stand_ins(self._device):
            return self._optimizer.discard()

    def self_check(self) -> None:
        """Compare three toy sequences in one row (or padded rows) with each alone, through all stages."""
        samples = toy_samples(self._facts.vocab)
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        rows, *singles = self.forward_logprobs([together, *(packed_row([sample]) for sample in samples)])
        check_packing(rows, singles, self._config.model.dtype, f"log-probs of {self._hf.model_type}")

    # ------------------------------------------------------------ weights out

    def weight_specs(self) -> list[WeightSpec]:
        """First what is outside the layers, then layer by layer, experts one by one: the order of fsdp2."""
        return [
            WeightSpec(name, self._sent_name, some[0].part.shape) for name, some in self._sources(unstack=True).items()
        ]

    def _sources(self, *, unstack: bool) -> dict[str, list[Source]]:
        """Return the senders of every tensor by the names of transformers; with `unstack` by those of the folder."""
        every = tensor_sources(self._facts, self._place, fused=self._fused)
        ordered = {name: every[name] for name in self._shapes}
        return unstack_sources(ordered, self._stacked) if unstack else ordered

    def _export(self, dtype: torch.dtype, *, unstack: bool) -> Iterator[tuple[str, Tensor]]:
        parameters, sources = dict(self._model.named_parameters()), self._sources(unstack=unstack)
        return export_tensors(parameters, sources, rank=self._gang.rank, dtype=dtype)

    def iter_hf_weights(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Yield name and bytes in the order of `weight_specs` on rank 0. Nothing is lent."""
        for name, whole in self._export(self._sent_dtype, unstack=True):
            yield name, whole.view(-1).view(torch.uint8).numpy()

    def export_hf(self, folder: Path) -> None:
        write_folder(
            self.whole(),
            folder,
            dtype=DTYPES[self._config.model.dtype][1],
            gang=self._gang,
            config=self._hf,
            generation=self._generation,
            tokenizer=Path(self._config.model.path),
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor by its name in transformers, in `model.dtype`, on rank 0. Collective: every rank
        exhausts it.
        """
        return self._export(DTYPES[self._config.model.dtype][1], unstack=False)

    # ------------------------------------------------------------ checkpoints

    def save(self, folder: Path) -> Path:
        """Write one safetensors file per rank: its part of weights and states, and its generator states."""
        return self.snapshot().save(folder)

    def snapshot(self) -> Snapshot:
        self._device.synchronize()
        boxes = []
        for number, (name, parameter) in enumerate(self._model.named_parameters()):
            states, local = self._optimizer.whole(parameter), self._locals[name]
            holder, holders = find_holder(local, self._place)
            if not local.copy and number % holders == holder:  # one of its holders writes it
                boxes += pieces(local, states)
        count = torch.tensor(self._optimizer.updates)
        steps = {f"step/{name}": count.clone() for name in self._shapes}
        return host_shard(boxes, rank=self._gang.rank, extra=self._device.rng_state(), steps=steps)

    def load(self, folder: Path) -> None:
        """Load from the files of any layout; generator states if the number of ranks is the same."""
        store = Store(folder)
        try:
            for name, parameter in self._model.named_parameters():
                self._optimizer.fill(parameter, partial(_read_stored, store, self._locals[name]), states=True)
            self._optimizer.updates = store.step(next(iter(self._shapes)))
            extra = store.extra(rank=self._gang.rank, ranks=self._gang.size)
        finally:
            store.close()
        if extra:
            self._device.set_rng_state(extra)


def _read_stored(store: Store, local: Local, kind: str) -> Tensor:
    """Return a whole parameter (`model`) or a state of it from a checkpoint."""
    return assemble(local, partial(store.read, kind))

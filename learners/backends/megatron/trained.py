"""One model that trains with Megatron-core: this rank's part of it, its optimizer, its tensors in files.

The policy is one (`backend`), and so is a critic (`critic`): they share process groups and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import CompanionConfig, Config, OptimConfig
from asyncrl.errors import AsyncRLError, ConfigError
from learners.backends.base import DTYPES, LossFunction, add_sums, toy_samples
from learners.backends.hf_folder import SCORER, build_skeleton, write_folder
from learners.backends.megatron import model as models
from learners.backends.megatron.checkpoint import Store, pieces
from learners.backends.megatron.cpu_shim import cuda_stand_ins
from learners.backends.megatron.families import read_facts
from learners.backends.megatron.layers import has_engine
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
from learners.backends.megatron.stages import Found, Stages
from learners.backends.megatron.weights import Folder, assemble, export_tensors, unstack_sources
from learners.batch.micro_batches import MicroBatch, packed_row, padded_rows
from learners.gang.gang import Gang
from learners.models.score_model import new_head
from weightsync.plan.buckets import Box

HEAD = "score.weight"


class Trained:
    """`hf`: its config of transformers; `prefix`: of its names in checkpoints; `scores`: its head gives one number for
    each token, not logits.
    """

    def __init__(
        self,
        path: str,
        hf: Any,
        config: Config,
        gang: Gang,
        optim: OptimConfig | CompanionConfig,
        *,
        prefix: str = "",
        scores: bool = False,
    ) -> None:
        self.hf, self._path, self._prefix = hf, Path(path), prefix
        self._config, self._gang, self._place, self._device = config, gang, gang.topology, gang.device
        if scores:
            hf.architectures = [SCORER]
        self.facts = read_facts(hf.to_dict())._replace(scores=scores)
        check_layout(self.facts, self._place)
        self._shapes = self._check_names()
        self._fused = has_engine(self._device)
        self._locals = {local.name: local for local in rank_parameters(self.facts, self._place, fused=self._fused)}
        with cuda_stand_ins(self._device):
            self._settings, self.model = self._build()
            self._ddp = wrap(self.model, self._settings)
            self.optimizer = Optimizer(self._ddp, optim, bf16=self._settings.bf16)
        for parameter, whole in self._start(self.model):
            self.optimizer.fill(parameter, {"model": whole}.__getitem__, states=False)
        self._replay = self._make_replay()
        self._stages = Stages(self.facts, self._settings, config, self._place, self._device)

    def _make_replay(self) -> Replay | None:
        """Return the routers of the policy, if they replay; companions and a reference choose for themselves."""
        learner, experts = self._config.learner, self.facts.experts
        if not learner.router_replay or experts is None or self._prefix:
            return None
        split = bool(self._settings.sequence_parallel)
        recomputes = learner.gradient_checkpointing
        return Replay(self.model, experts, self._place, recomputes=recomputes, split_rows=split)

    def _check_names(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor of transformers' model and its shape, in the publishing order of the backend fsdp2: what
        is outside the layers, then layer by layer, each in the order of its modules.

        Raises:
            ConfigError: `config.model`: the mapping has other tensors.
        """
        self._skeleton = build_skeleton(self.hf, trust_remote_code=self._config.model.trust_remote_code)
        if self._skeleton is not None:
            self.hf.architectures = [type(self._skeleton).__name__]
        theirs = {name: tuple(one.shape) for name, one in self._skeleton.named_parameters()} if self._skeleton else {}
        ours = tensor_shapes(self.facts)
        if odd := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            why = f"the model has {theirs.get(odd[0])}, the backend megatron maps {ours.get(odd[0])}"
            raise ConfigError("config.model", f"{self._path}: {odd[0]}: {why}")
        return {name: theirs[name] for name in sorted(theirs, key=lambda name: name.startswith("model.layers."))}

    def _build(self) -> tuple[Any, Any]:
        """Return settings and model of this rank, with parameters checked against the mapping."""
        settings = models.transformer_config(
            self.facts, self._config, self._place, self._device, eps=float(self.hf.rms_norm_eps)
        )
        model = models.build(self.facts, self.hf, settings, self._place, self._device)
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
        folder = Folder(self._path, self._skeleton)
        read: Any = folder.read
        if self.facts.scores and not folder.has(HEAD):
            head = new_head(self._skeleton, self._config.run.seed)
            read = lambda part: head if part.name == HEAD else folder.read(part)  # noqa: E731 - else a function of its own
        try:
            for local in rank_buffers(self.facts, self._place):
                model.get_buffer(local.name).copy_(assemble(local, read))
            for name, parameter in model.named_parameters():
                yield parameter, assemble(self._locals[name], read)
        finally:
            folder.close()

    def freeze_start(self) -> Any:
        """Return a further model with the start weights, without gradients."""
        with cuda_stand_ins(self._device):
            model = self._build()[1]
        for parameter, whole in self._start(model):
            parameter.requires_grad_(False).copy_(whole)
        return model

    # ------------------------------------------------------------ forward and backward

    def run(self, micro: Sequence[MicroBatch], *, frozen: Any = None, squares: bool = False) -> list[Found]:
        """Run forward, without gradient; `frozen`: a model of `freeze_start` instead of this one. Collective."""
        if frozen is not None:
            return self._stages.run(frozen, micro)
        return self._stages.run(self.model, micro, squares=squares, replay=self._replay)

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        for found in self._stages.run(self._ddp, micro, loss, replay=self._replay):
            add_sums(sums, found.value, found.sums)
        return {name: float(value) for name, value in sums.items()}  # here, to wait for the device only once

    def toy_rows(self) -> list[MicroBatch]:
        """Return three toy sequences in one row (or padded rows), then each alone."""
        samples = toy_samples(self.facts.vocab)
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        return [together, *(packed_row([sample]) for sample in samples)]

    # ------------------------------------------------------------ weights out

    def sources(self, *, unstack: bool) -> dict[str, list[Source]]:
        """Return the senders of every tensor by the names of transformers; with `unstack` by those of the folder."""
        every = tensor_sources(self.facts, self._place, fused=self._fused)
        ordered = {name: every[name] for name in self._shapes}
        return unstack_sources(ordered, Folder(self._path, self._skeleton).names()) if unstack else ordered

    def export(self, dtype: torch.dtype, *, unstack: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of `sources`, whole, on rank 0. Collective: every rank exhausts it."""
        parameters, sources = dict(self.model.named_parameters()), self.sources(unstack=unstack)
        return export_tensors(parameters, sources, rank=self._gang.rank, dtype=dtype)

    def write(self, folder: Path, generation: Any = None) -> None:
        """Write a Hugging Face folder in `model.dtype`, by rank 0. Collective."""
        dtype = DTYPES[self._config.model.dtype][1]
        write_folder(
            self.export(dtype, unstack=False),
            folder,
            dtype=dtype,
            gang=self._gang,
            config=self.hf,
            generation=generation,
            tokenizer=Path(self._config.model.path),
            trust_remote_code=self._config.model.trust_remote_code,
        )

    # ------------------------------------------------------------ checkpoints

    def boxes(self) -> tuple[list[tuple[str, Box, Tensor]], dict[str, Tensor]]:
        """Return this rank's boxes of weights and states, and the step counts by name. Collective."""
        boxes = []
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            states, local = self.optimizer.whole(parameter), self._locals[name]
            holder, holders = find_holder(local, self._place)
            if not local.copy and number % holders == holder:  # one of its holders writes it
                boxes += pieces(local, {self._prefix + kind: value for kind, value in states.items()})
        count = torch.tensor(self.optimizer.updates)
        return boxes, {f"{self._prefix}step/{name}": count.clone() for name in self._shapes}

    def load(self, store: Store) -> None:
        store.check(f"{self._prefix}model", self._shapes)
        for name, parameter in self.model.named_parameters():
            read = partial(_read_stored, store, self._locals[name], self._prefix)
            self.optimizer.fill(parameter, read, states=True)
        self.optimizer.updates = store.step(next(iter(self._shapes)), prefix=self._prefix)


def _read_stored(store: Store, local: Local, prefix: str, kind: str) -> Tensor:
    """Return a whole parameter (`model`) or a state of it from a checkpoint."""
    return assemble(local, partial(store.read, prefix + kind))

"""Training with PyTorch's FSDP2: parameters, gradients and optimizer states sharded over the ranks.

Guarantees, in addition to those of `learners.backends.base`:
1. master weights and optimizer states are float32; compute runs in `model.dtype`; gradients are reduced in float32;
2. packed rows are compared with single sequences by the model's own forward at the start (`self_check`);
3. a non-finite gradient changes nothing;
4. published weights are not gathered where every rank can write its own rows (`own_rows`); else by layer or in parts
   of some MiB (`gathering`): one is whole at a time, two with lending.

Every rank reads its own part of the weights if the files allow it (`start_weights`), otherwise the whole model: a host
with R ranks then needs R copies in memory at the start. Rows, matrices or experts may also be split over ranks
(`learners.models.sequence_parallel`, `mesh`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.capabilities import refuse
from asyncrl.config.mode import sends_adapters
from asyncrl.runtime.model_folder import model_json
from asyncrl.runtime.model_tensors import stacked_parts
from asyncrl.runtime.routers import Routers
from learners.backends.base import (
    DTYPES,
    LossFunction,
    Snapshot,
    UpdateInfo,
    WeightSpec,
    check_packing,
    extra_inputs,
    to_device,
    toy_samples,
)
from learners.backends.fsdp2 import mesh as layout
from learners.backends.fsdp2.companion import (
    Companion,
    Critic,
    ProcessRewardModel,
    wants_critic,
    wants_process_rewards,
)
from learners.backends.fsdp2.loading import (
    build_optimizer,
    language_layers,
    load_model,
    make_policy,
    plain_attention,
    shard,
)
from learners.backends.fsdp2.lora import FOLDER, Adapters, Leaving, Lora, check
from learners.backends.fsdp2.loss_scale import LOSS_SCALE, LossScale
from learners.backends.fsdp2.own_rows import OwnRows
from learners.backends.fsdp2.reference import PREFIX, Reference
from learners.backends.fsdp2.sharded_module import PLAIN, Rests, Sharded, View
from learners.backends.fsdp2.weights_out import WeightsOut
from learners.backends.hf_folder import write_folder
from learners.backends.sharded_checkpoint import (
    HostShard,
    host_shard,
    load_shards,
    local_parts,
    local_tensor,
    read_about,
)
from learners.backends.vision import Vision, freeze_parts
from learners.batch.micro_batches import NO_EXPERTS, MicroBatch, packed_row, padded_rows
from learners.gang.gang import Gang
from learners.models.logprobs import TokenNumbers


class FSDP2Backend:
    supports = True

    def __init__(self, config: Config, gang: Gang) -> None:
        refuse(config, model_json(config.model.path), role="learner", device=gang.device.type)
        self._config = config
        self._gang = gang
        self._device = gang.device
        self._dtype = DTYPES[config.model.dtype][1]
        hf = load_model(config, gang.device, say=_print if gang.lead else str)
        parts = stacked_parts(hf, config.model.path)
        self._vision = Vision.open(config)
        self._lora = Lora(hf, language_layers(hf), config, gang) if config.learner.lora.rank else None
        self._identity = "" if self._lora is None else self._lora.identity
        freeze_parts(hf, config.learner.vision)
        self._view: View = PLAIN if self._lora is None else Leaving(self._lora, merged=True)
        self._policy = make_policy(hf, config)
        if config.learner.router_replay:
            self._policy.routers = Routers(hf)
        self._reference: Reference | None = None  # created on first use
        self._units, split = shard(self._policy, config, gang)
        optimizer = build_optimizer(self._policy, self._units, config.learner.optim, config, gang.device)
        self._sharded = Sharded(
            self._policy,
            self._units,
            optimizer,
            ranks=layout.data_mesh(gang).size(),
            split=split,
            rests=Rests.from_config(config, gang.device),
            scale=LossScale() if config.model.dtype == "float16" else None,
        )
        self.weights_out = WeightsOut(self._sharded, parts, self._view, config, gang)
        self._adapters = Adapters(self._lora, self._sharded, config, gang) if self._lora is not None else None
        self.adapters = self._adapters if sends_adapters(config) else None
        self.critic = Critic(config, gang) if wants_critic(config) else None
        self.process_reward = (
            ProcessRewardModel(config, gang, reference=self.reference_logprobs)
            if wants_process_rewards(config)
            else None
        )
        if config.learner.preference.iteration and config.learner.mode in ("dpo", "kto"):
            self._reference = Reference(config, gang)
        self._config_json = hf.config
        self._generation = getattr(hf, "generation_config", None)

    # ------------------------------------------------------------ forward and backward

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Any]:
        tensors = to_device(micro, self._device.torch_device, self._vision)
        top_ids = tensors.top_ids if torch.is_grad_enabled() else None
        logprobs, entropy, *top = self._policy(
            tensors.input_ids,
            tensors.position_ids,
            tensors.positions,
            tensors.targets,
            whole=False,
            **extra_inputs(tensors),
            **({} if top_ids is None else {"top_ids": top_ids}),
        )
        return logprobs, entropy, tensors._replace(top_current=top[0]) if top else tensors

    def _ready(self) -> None:
        self._policy.train()
        if self._lora is not None:
            self._lora.quiet()

    @torch.no_grad()
    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        self._ready()
        try:
            return [self._forward(piece)[0] for piece in micro]
        finally:
            self._sharded.reshard()

    @torch.no_grad()
    def forward_numbers(self, micro: Sequence[MicroBatch], *, squares: bool = False) -> list[TokenNumbers]:
        self._ready()
        found = []
        try:
            for piece in micro:
                if squares:
                    t = to_device(piece, self._device.torch_device, self._vision)
                    found.append(
                        self._policy(
                            t.input_ids, t.position_ids, t.positions, t.targets, squares=True, **extra_inputs(t)
                        )
                    )
                else:
                    found.append(TokenNumbers(*self._forward(piece)[:2], None))
        finally:
            self._sharded.reshard()
        return found

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """With adapters, their base is the reference."""
        if self._lora is not None:
            with self._lora.disable():
                return self.forward_logprobs([replace(piece, experts=NO_EXPERTS) for piece in micro])
        if self._reference is None:
            self._reference = Reference(self._config, self._gang)
        return self._reference.logprobs(micro)

    def renew_reference(self) -> None:
        self._sharded.reshard()
        if self._reference is not None:
            self._reference.renew(self._policy)

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        return self._sharded.train(micro, self._forward, loss)

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        norm, skipped = self._sharded.step(lr=lr, max_norm=max_norm)
        if (scale := self._sharded.scale) is None:
            return UpdateInfo(norm, skipped)
        overflows = scale.take_overflows() + sum(model.take_overflows() for model in self._companions().values())
        return UpdateInfo(norm, skipped, scale.now, overflows)

    def discard(self) -> float:
        return self._sharded.discard()

    @torch.no_grad()
    def self_check(self) -> None:
        """Compare three toy sequences in one row (or padded rows) with each alone, by the model's full logits."""
        vocabulary = int(self._config_json.get_text_config().vocab_size)
        samples = toy_samples(vocabulary)
        if self._vision is not None:
            samples += self._vision.toy_samples()
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        rows = self.forward_logprobs([together])[0].float()
        singles = []
        with plain_attention(self._policy.model, self._config):
            for sample in samples:
                t = to_device(packed_row([sample]), self._device.torch_device, self._vision)
                inputs = (t.input_ids, t.position_ids, t.positions, t.targets)
                singles.append(self._policy(*inputs, whole=True, **extra_inputs(t))[0].float())
        self._sharded.reshard()
        check_packing(rows, singles, self._config.model.dtype, f"log-probs of {type(self._policy.model).__name__}")
        for model in self._companions().values():
            model.self_check()

    # ------------------------------------------------------------ weights out

    def weight_specs(self) -> list[WeightSpec]:
        return self.weights_out.specs()

    def iter_hf_weights(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        return self.weights_out.iter_bytes(settle)

    def own_rows(self) -> OwnRows | None:
        """Return this rank's rows of the same tensors; None if the layout needs a gathering."""
        return self.weights_out.own_rows()

    def export_hf(self, folder: Path) -> None:
        """Companions go into folders below it; with adapters it holds merged weights, and a folder with the
        adapters.
        """
        write_folder(
            self._sharded.whole(view=self._view),
            folder,
            dtype=self._dtype,
            gang=self._gang,
            config=self._config_json,
            generation=self._generation,
            tokenizer=Path(self._config.model.path),
            trust_remote_code=self._config.model.trust_remote_code,
        )
        if self._adapters is not None:
            self._adapters.export(folder / FOLDER)
        for name, model in self._companions().items():
            if model.exported:
                model.export(folder / name)

    def _companions(self) -> dict[str, Companion]:
        """Return the companions by the name of their export folder."""
        found = {"critic": self.critic, "process_reward": self.process_reward}
        return {name: model for name, model in found.items() if model is not None}

    def resident(self) -> Iterator[Tensor]:
        """This rank's tensors of weights and optimizer states, of every model, between two steps."""
        for value in self._state().values():
            yield from local_parts(value).values()
        models = [self._policy, *(model.module for model in self._companions().values())]
        process = None if self.process_reward is None else self.process_reward.reference
        models += [one.module for one in (self._reference, process) if one is not None]
        for parameter in (parameter for model in models for parameter in model.parameters()):
            yield local_tensor(parameter.data)

    # ------------------------------------------------------------ checkpoints

    def _state(self) -> dict[str, Tensor]:
        """Return every tensor of the training state by name, with companions and a reference that is renewed."""
        state = self._sharded.state()
        for model in self._companions().values():
            state |= model.state()
        if self._reference is not None and self._config.learner.preference.iteration:
            state |= self._reference.state()
        return state

    def save(self, folder: Path) -> Path:
        """Write one safetensors file per rank with its boxes and generator states."""
        return self._shard(copy=False).save(folder)

    def snapshot(self) -> Snapshot:
        return self._shard(copy=True)

    def _shard(self, *, copy: bool) -> HostShard:
        self._device.synchronize()
        return host_shard(
            self._state(), rank=self._gang.rank, extra=self._device.rng_state(), copy=copy, about=self._identity
        )

    def load(self, folder: Path) -> None:
        """Load boxes from any number of files; generator states if the number of ranks is the same."""
        check(read_about(folder), self._identity)
        state = self._state()
        # Earlier versions, or another setting, had none; such a reference begins as the start weights.
        optional = [name for name in state if name.endswith(LOSS_SCALE) or name.startswith(PREFIX)]
        extra = load_shards(folder, state, rank=self._gang.rank, ranks=self._gang.size, optional=optional)
        if extra:
            self._device.set_rng_state(extra)


# ---------------------------------------------------------------- building


def _print(text: str) -> None:
    print(text, flush=True)

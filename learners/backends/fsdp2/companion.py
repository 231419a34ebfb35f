"""A model that trains next to the policy: sharded like it, with its own optimizer, in the same checkpoints. Base of
`critic` and `process_reward`.

Guarantees:
1. it shares no tensor with the policy;
2. its state lies in the policy's shard files, under names with its prefix;
3. its export is a Hugging Face folder that loads back to the same values (`hf_folder`), with the policy's tokenizer;
4. `restore` resets weights and optimizer to `remember`, bit by bit.

It is never published. Each one needs the memory of a policy's weights and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import CompanionConfig, Config
from asyncrl.errors import AsyncRLError
from learners.backends.base import LossFunction, Micro, to_device
from learners.backends.fsdp2.mesh import data_mesh
from learners.backends.fsdp2.sharded_module import Rests, Sharded
from learners.backends.hf_folder import write_folder
from learners.backends.sharded_checkpoint import local_parts
from learners.batch.micro_batches import MicroBatch, packed_row, padded_rows
from learners.gang.gang import Gang


class Companion:
    """One rank's part. `module` is a root module such as `PolicyModel` or `ScoreModel`, on the host."""

    def __init__(self, module: Any, settings: CompanionConfig, config: Config, gang: Gang, *, prefix: str) -> None:
        from learners.backends.fsdp2.loading import build_optimizer, shard

        self.exported = settings.export
        self._config = config
        self._gang = gang
        self._device = gang.device
        self._prefix = prefix
        self._model = module
        units, split = shard(module, config, gang)
        optimizer = build_optimizer(module, units, settings, config, gang.device)
        self._sharded = Sharded(
            module,
            units,
            optimizer,
            ranks=data_mesh(gang).size(),
            split=split,
            rests=Rests.from_config(config, gang.device),
        )
        self._sharded.rest()
        self._memory: dict[str, Tensor] | None = None

    def _forward(self, piece: MicroBatch) -> tuple[Tensor, Tensor, Micro]:
        t = to_device(piece, self._device.torch_device)
        found = self._model(t.input_ids, t.position_ids, t.positions, t.targets)
        return found[0], found[1], t

    @torch.no_grad()
    def forward(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Return its output for each response token, `[N]` by micro-batch, without gradient. Collective."""
        self._sharded.wake()
        self._model.train()
        try:
            return [self._forward(piece)[0] for piece in micro]
        finally:
            self._sharded.reshard()
            self._sharded.rest()

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        self._sharded.wake()
        return self._sharded.train(micro, self._forward, loss)

    def clip(self, max_norm: float) -> float:
        return self._sharded.clip(max_norm)

    def apply(self, lr: float) -> None:
        self._sharded.apply(lr)
        self._sharded.rest()

    def discard(self) -> None:
        self._sharded.forget()
        self._sharded.reshard()
        self._sharded.rest()

    # ------------------------------------------------------------ undo

    def remember(self) -> None:
        """Copy this rank's weights and optimizer states to the host."""
        self._memory = {
            name + part: held.detach().to("cpu", copy=True)
            for name, value in self.state().items()
            for part, held in local_parts(value).items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self.discard()
            for name, value in self.state().items():
                for part, held in local_parts(value).items():
                    held.copy_(memory[name + part])

    def release(self) -> None:
        self._memory = None

    # ------------------------------------------------------------ for the backend

    @torch.no_grad()
    def self_check(self) -> None:
        """Compare three toy sequences in one row (or padded rows) with each alone."""
        from learners.backends.base import PACKING_LIMIT, toy_samples
        from learners.backends.fsdp2.loading import plain_attention

        samples = toy_samples(int(self._model.model.config.vocab_size))
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        [rows] = self._outputs([together])
        with plain_attention(self._model.model, self._config):
            said = self._outputs([packed_row([one]) for one in samples])
        singles = [torch.cat(parts) for parts in zip(*said, strict=True)]
        worst = max(float((left - right).abs().max()) for left, right in zip(rows, singles, strict=True))
        if not worst <= PACKING_LIMIT[self._config.model.dtype]:
            name = type(self._model.model).__name__
            raise AsyncRLError("learner.packing", f"outputs of {name} differ by {worst:.3g}")

    def _outputs(self, micro: Sequence[MicroBatch]) -> Sequence[Sequence[Tensor]]:
        """Return all outputs for each micro-batch."""
        return [(found,) for found in self.forward(micro)]

    def state(self) -> dict[str, Tensor]:
        """Return every tensor of the training state by name."""
        return self._sharded.state(self._prefix)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        self._sharded.wake()
        try:
            yield from self._sharded.whole()
        finally:
            self._sharded.rest()

    def export(self, folder: Path) -> None:
        """Write its Hugging Face folder, by rank 0. Collective."""
        from learners.backends.base import DTYPES

        hf = self._model.model
        write_folder(
            self._whole(),
            folder,
            dtype=DTYPES[self._config.model.dtype][1],
            gang=self._gang,
            config=hf.config,
            generation=getattr(hf, "generation_config", None),
            tokenizer=Path(self._config.model.path),
        )

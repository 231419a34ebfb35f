"""Models that train next to the policy: sharded like it, with their own optimizers, in the same checkpoints.

Guarantees:
1. they share no tensor with the policy;
2. their states lie in the policy's shard files, under names with their prefixes;
3. packed rows are compared with single sequences at the start, as for the policy;
4. an export is a Hugging Face folder that loads back to the same values (`hf_folder`), with the policy's tokenizer: a
   critic's as `learner.critic.model`, a process reward model's as `learner.process_reward.model`;
5. `restore` resets weights and optimizer to `remember`, bit by bit.

They are never published. Each one needs the memory of a policy's weights and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import CompanionConfig, Config
from learners.backends.base import DTYPES, LossFunction, Micro, Values, check_packing, to_device, toy_samples
from learners.backends.fsdp2.loading import build_optimizer, load_model, plain_attention, shard
from learners.backends.fsdp2.loss_scale import LossScale
from learners.backends.fsdp2.mesh import data_mesh
from learners.backends.fsdp2.reference import Reference
from learners.backends.fsdp2.sharded_module import Rests, Sharded
from learners.backends.hf_folder import write_folder
from learners.backends.sharded_checkpoint import local_parts
from learners.batch.micro_batches import MicroBatch, packed_row, padded_rows
from learners.gang.gang import Gang
from learners.models.policy_model import PolicyModel
from learners.models.score_model import ScoreModel


class Companion:
    """One rank's part. `module` is a root module such as `PolicyModel` or `ScoreModel`, on the host."""

    def __init__(self, module: Any, settings: CompanionConfig, config: Config, gang: Gang, *, prefix: str) -> None:
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
            scale=LossScale() if config.model.dtype == "float16" else None,
        )
        self._sharded.rest()
        self._memory: dict[str, Tensor] | None = None

    @property
    def module(self) -> Any:
        return self._model

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

    def take_overflows(self) -> int:
        return 0 if self._sharded.scale is None else self._sharded.scale.take_overflows()

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
        samples = toy_samples(int(self._model.model.config.vocab_size))
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        [rows] = self._outputs([together])
        with plain_attention(self._model.model, self._config):
            said = self._outputs([packed_row([one]) for one in samples])
        for row, singles in zip(rows, zip(*said, strict=True), strict=True):
            check_packing(row, singles, self._config.model.dtype, f"outputs of {type(self._model.model).__name__}")

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
        hf = self._model.model
        write_folder(
            self._whole(),
            folder,
            dtype=DTYPES[self._config.model.dtype][1],
            gang=self._gang,
            config=hf.config,
            generation=getattr(hf, "generation_config", None),
            tokenizer=Path(self._config.model.path),
            trust_remote_code=self._config.model.trust_remote_code,
        )


# ---------------------------------------------------------------- the critic


class ValueModel(ScoreModel):
    """A scalar head on a language model's body, read at the token that predicts the target."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, positions: Tensor, targets: Tensor, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return values `[N]` of the prefixes that end at `positions` `[N]`, and zeros `[N]` in place of entropies."""
        return super().forward(input_ids, position_ids, positions - 1, targets, whole=whole)


class Critic(Companion):
    """The critic, for estimators that need values (GAE, V-trace).

    The body is `learner.critic.model` (by default the policy's start weights) with a scalar head. A reward model's
    folder also gives its head; otherwise the head starts as small noise from `run.seed`, equal on every rank. `V_t` is
    read from the hidden state BEFORE token t: it knows the prompt and earlier tokens, never t itself. Example: prompt
    of 3 tokens, response of 2: their values are read at the tokens 2 and 3 of the sequence (from 0), the value after
    the last one at token 4.
    """

    def __init__(self, config: Config, gang: Gang) -> None:
        path = config.learner.critic.model or config.model.path
        model = ValueModel(load_model(config, gang.device, path=path, scorer=True))
        super().__init__(model, config.learner.critic, config, gang, prefix="critic/")

    @torch.no_grad()
    def values(self, micro: Sequence[MicroBatch]) -> list[Values]:
        self._sharded.wake()
        self._model.train()
        try:
            return [self._values(piece) for piece in micro]
        finally:
            self._sharded.reshard()
            self._sharded.rest()

    def _values(self, piece: MicroBatch) -> Values:
        t = to_device(piece, self._device.torch_device)
        count = t.positions.numel()
        ends = t.positions.new_zeros(len(piece.samples)).scatter_reduce(0, t.sequences, t.positions + 1, "amax")
        places = torch.cat((t.positions, ends))
        both, _ = self._model(t.input_ids, t.position_ids, places, places)
        return Values(both[:count], both[count:])

    def _outputs(self, micro: Sequence[MicroBatch]) -> list[Values]:
        return self.values(micro)


# ---------------------------------------------------------------- the process reward model

TEMPERATURE = 1.0
Logprobs = Callable[[Sequence[MicroBatch]], list[Tensor]]


class ProcessRewardModel(Companion):
    """A language model whose log-ratio to a frozen one gives process rewards (`learners.algorithms.prime`).

    It starts from `learner.process_reward.model` (by default the policy's start weights). Its reference is
    `learner.process_reward.reference` (by default its own start weights), also after a restart; if that is
    `model.path`, the run's reference model is used (`reference`: its log-probs). Both give log-probs at temperature 1:
    before the first update they are equal, and all process rewards are 0. Both are over the whole vocabulary, also if
    draws were cut.
    """

    def __init__(self, config: Config, gang: Gang, *, reference: Logprobs) -> None:
        settings = config.learner.process_reward
        start = settings.model or config.model.path
        model = PolicyModel(
            load_model(config, gang.device, path=start),
            temperature=TEMPERATURE,
            chunk_tokens=config.learner.logprob_chunk_tokens,
        )
        super().__init__(model, settings, config, gang, prefix="process_reward/")
        frozen = settings.reference or start
        same = Path(frozen).resolve() == Path(config.model.path).resolve()
        self.reference: Reference | None = None  # of its own
        if not same or config.sampling.temperature != TEMPERATURE:
            self.reference = Reference(config, gang, path=frozen, temperature=TEMPERATURE)
            reference = self.reference.logprobs
        self.reference_logprobs: Logprobs = lambda micro: reference([piece.drop_support() for piece in micro])


def wants(config: Config, *names: str) -> bool:
    """Whether the estimator needs one of these (`learners.algorithms.registry.needs_for`)."""
    from learners.algorithms.registry import needs_for

    return config.learner.mode == "rl" and bool(set(names) & set(needs_for(config.learner.algorithm)))


def wants_critic(config: Config) -> bool:
    """Whether the estimator needs values."""
    return wants(config, "critic", "values")


def wants_process_rewards(config: Config) -> bool:
    """Whether the estimator needs process rewards."""
    return wants(config, "process")

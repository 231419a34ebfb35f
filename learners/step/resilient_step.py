"""One step on every rank, repeated without the groups that break it.

Guarantees:
1. a group that breaks the packer, the loss or the gradient is found, quarantined with its reason, and the step is
   trained with the rest from its start weights: a replay of the rest gives the same bits;
2. every rank takes part in every probe, and all reach the same result;
3. if every group fails alone, the cause lies elsewhere (broken weights or loss function): no group is quarantined and
   the update is skipped;
4. a batch without a trained token is a skipped update.

On several ranks an error inside the model (not in the loss) still ends the gang, because its ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import LearnerConfig
from asyncrl.errors import AsyncRLError
from learners.backends.base import Backend
from learners.batch.assembly import assemble, replayed_share
from learners.batch.bad_groups import describe_error, find_bad_groups, not_finite
from learners.batch.estimates import Whole
from learners.batch.micro_batches import Minibatch, StepBatch, decode_share, encode_share
from learners.gang.gang import Gang
from learners.step import supervised
from learners.step.batch_passes import Prepared, prepare
from learners.step.coefficients import apply_settings, next_coefficients, start_coefficients
from learners.step.critic import is_warm
from learners.step.process_reward import process_step
from learners.step.tuned_settings import apply_tuning
from learners.step.update import StepResult, probe_step, train_step

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData

#: Removes a group from a step: step, group, reason.
Quarantine = Callable[[int, int, str], None]

PROBE, TRAIN, SKIP = b"probe", b"train", b"skip"


class StepRunner:
    """Runs the steps of one rank. Only rank 0 calls `quarantine` and `say`; `stats` are those of its newest batch."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        gang: Gang,
        backend: Backend,
        quarantine: Quarantine,
        say: Callable[[str], None],
        group_size: int = 0,
        seed: int = 0,
        rewards: Sequence[str] = (),
    ) -> None:
        """`group_size`: samples with a higher index are greedy baselines (0: there are none). `seed`: of PF-PPO's
        draws. `rewards`: names of the configured rewards.
        """
        self.stats: dict[str, float] = {}
        self.coefficients = start_coefficients(config.algorithm)  # of the next step
        self.critic_warm = False  # the critic's warm-up ended early
        self._now = 0  # the current step
        self._group_size = group_size
        self._seed = seed
        self._rewards = tuple(rewards)
        self._baselines: dict[int, float] = {}  # score of the greedy response by group
        self._whole: Whole | None = None  # rank 0: the current batch
        self._config = config
        self._gang = gang
        self._backend = backend
        self._quarantine = quarantine
        self._say = say
        self._base = config
        self._tuning = ""
        self._given = config.mode != "rl"  # without rewards and advantages
        self._advantages: tuple[float, ...] = ()

    def retune(self, tuning: str) -> None:
        """Set the overrides of the next step. On every rank."""
        if tuning != self._tuning:
            self._config, self._tuning = apply_tuning(self._base, tuning), tuning
            self._say(f"tuned settings from this step on: {tuning or 'those of the configuration'}")
        self.coefficients = apply_settings(self.coefficients, self._config.algorithm)

    def groups_log(self, batch: ClaimedBatch, result: StepResult) -> dict[str, Any]:
        """Return a line of metrics/groups.jsonl: what the loss did with each group of the batch."""
        lines, place, weights = [], 0, self._sample_weights(result)
        for group in batch.groups:
            samples = range(place, place + len(group.samples))
            place += len(group.samples)
            lines.append(
                {
                    "g": group.group,
                    "indexes": [sample.index for sample in group.samples],
                    "advantages": [round(value, 6) for value in self._advantages[samples.start : samples.stop]],
                    "tokens": [s.response.size if s.mask is None else int(s.mask.sum()) for s in group.samples],
                    "weights": [round(weights[n], 6) if n in weights else None for n in samples],
                }
            )
        return {"step": batch.step, "replayed": batch.replayed, "groups": lines}

    def _sample_weights(self, result: StepResult) -> dict[int, float]:
        """Return mean importance weights by sample, over the trained tokens of all its sequences."""
        whole, found = self._whole, dict[int, list[tuple[float, int]]]()
        if whole is None or not whole.cuts:
            return dict(result.weights)
        for number, weight in result.weights.items():
            cut = whole.cuts[number]
            tokens = int(whole.rollouts.mask[cut.sample, cut.start : cut.stop].sum())
            found.setdefault(cut.sample, []).append((weight, tokens))
        totals = {sample: max(sum(tokens for _, tokens in rows), 1) for sample, rows in found.items()}
        return {
            sample: sum(weight * (tokens / totals[sample]) for weight, tokens in rows) for sample, rows in found.items()
        }

    # ------------------------------------------------------------ packing

    def cut(self, batch: ClaimedBatch) -> tuple[ClaimedBatch, list[bytes]]:
        """Return the batch to train and the shares of the ranks. Groups that break the packer are quarantined."""
        batch = self._drop_greedy(batch)
        why, cut = self._pack(batch)
        if why:
            self._say(f"error: the batch of step {batch.step} cannot be assembled: {why}; looking for the group")
            batch = self._drop_groups(
                batch, find_bad_groups(batch.groups, lambda groups: self._pack(_select_groups(batch, groups))[0])
            )
            why, cut = self._pack(batch)
        if why or cut is None:
            raise AsyncRLError("sample.invalid", f"the batch of step {batch.step}: {why}", where="learner")
        self.stats, self._advantages, self._whole = cut.stats, cut.advantages, cut.whole
        return batch, [encode_share(share) for share in cut.shares]

    def _drop_greedy(self, batch: ClaimedBatch) -> ClaimedBatch:
        """Remove the greedy responses from the batch and keep their scores."""
        if not self._group_size:
            return batch
        groups = []
        for group in batch.groups:
            greedy = [sample.reward for sample in group.samples if sample.index >= self._group_size]
            if greedy:
                self._baselines[group.group] = greedy[0]
            rest = tuple(sample for sample in group.samples if sample.index < self._group_size)
            groups.append(msgspec.structs.replace(group, samples=rest))
        known = {group.group for group in groups}
        self._baselines = {number: score for number, score in self._baselines.items() if number in known}
        return msgspec.structs.replace(batch, groups=tuple(groups))

    def _pack(self, batch: ClaimedBatch) -> tuple[str, StepBatch | None]:
        """Return the packer's failure, or its result."""
        try:
            cut = (
                supervised.assemble(batch, self._config, ranks=self._gang.shares)
                if self._given
                else assemble(
                    batch,
                    algorithm=self._config.algorithm,
                    ranks=self._gang.shares,
                    packing=self._config.packing,
                    max_tokens=self._config.micro_batch_tokens,
                    seed=self._seed,
                    baselines=self._baselines or None,
                    rewards=self._rewards,
                )
            )
            if self._config.router_replay and not self._given:
                cut.stats["router_replay_share"] = replayed_share(batch)
        except MemoryError:
            raise
        except Exception as error:  # a bad group may raise anything
            return describe_error("packer", error), None
        return not_finite(cut), cut

    def _drop_groups(self, batch: ClaimedBatch, bad: Mapping[int, str]) -> ClaimedBatch:
        for group, why in bad.items():
            self._quarantine(batch.step, group, why)
        return _select_groups(batch, [group for group in batch.groups if group.group not in bad])

    # ------------------------------------------------------------ training

    def train(self, data: bytes, *, step: int, batch: ClaimedBatch | None) -> tuple[StepResult, ClaimedBatch | None]:
        """Train this rank's share. Return the result and, on rank 0, the batch as it was trained. Collective."""
        self._now = step
        result = self._step(data, step)
        if not result.broken:
            return result, batch
        shares: list[bytes] | None = None
        if batch is not None:
            self._say(f"error: step {step} broke: {result.broken}; looking for the group")
            batch, shares = self._separate(batch)
            goes_on = self._gang.share(TRAIN if shares else SKIP) == TRAIN
        else:
            goes_on = self._follow()
        if not goes_on:
            return result, batch
        return self._step(self._gang.scatter(shares), step), batch

    def _step(self, data: bytes, step: int) -> StepResult:
        share = decode_share(data)
        if self._given:
            return supervised.train_step(share, backend=self._backend, gang=self._gang, config=self._config, step=step)
        prepared = self._prepare(share, self._whole)
        if prepared.first:
            self._advantages = prepared.first
        result = train_step(
            share,
            backend=self._backend,
            gang=self._gang,
            config=self._config,
            step=step,
            prepared=prepared,
            critic_warm=self.critic_warm,
        )
        if prepared.process is not None:
            prepared.process.settle()
        self.critic_warm = self.critic_warm or is_warm(result.metrics, self._config.critic)
        if not result.broken:
            self._move(share, prepared, result)
        return result

    def _move(self, share: Sequence[Minibatch], prepared: Prepared, result: StepResult) -> None:
        """Update the coefficients for the next step. Collective."""
        samples = 0
        if prepared.kl is not None and self._config.algorithm.kl.controller == "adaptive":
            samples = int(self._gang.total({"samples": float(_samples(share))})["samples"])
        trained = result.metrics["lr"] > 0 and "entropy" in result.metrics  # otherwise the policy did not change
        self.coefficients = next_coefficients(
            self.coefficients,
            self._config.algorithm,
            kl=prepared.kl if trained else None,
            samples=samples,
            entropy=result.metrics.get("entropy") if trained else None,
        )

    def _prepare(self, share: Sequence[Minibatch], whole: Whole | None) -> Prepared:
        ready = prepare(
            share,
            backend=self._backend,
            gang=self._gang,
            algorithm=self._config.algorithm,
            whole=whole,
            kl_coeff=self.coefficients.kl,
            bootstrap=self._config.critic.bootstrap,
            process=process_step(share, backend=self._backend, gang=self._gang, config=self._config, step=self._now),
        )
        return ready._replace(entropy_coeff=self.coefficients.entropy)

    def _probe(self, data: bytes, whole: Whole | None = None) -> str:
        share = decode_share(data)
        if self._given:
            return supervised.probe_step(share, backend=self._backend, gang=self._gang, config=self._config)
        prepared = self._prepare(share, whole)
        why = probe_step(share, backend=self._backend, gang=self._gang, config=self._config, prepared=prepared)
        if prepared.process is not None:
            prepared.process.settle()
        return why

    def _separate(self, batch: ClaimedBatch) -> tuple[ClaimedBatch, list[bytes] | None]:
        """On rank 0: quarantine the groups that fail alone. Return the rest and its shares; None to skip the step."""

        def ask(groups: Sequence[GroupData]) -> str:
            why, cut = self._pack(_select_groups(batch, groups))
            if why or cut is None:
                return why
            self._gang.share(PROBE)
            return self._probe(self._gang.scatter([encode_share(share) for share in cut.shares]), cut.whole)

        bad = find_bad_groups(batch.groups, ask) if batch.groups else {}
        if not bad or len(bad) == len(batch.groups):
            return batch, None
        return self.cut(self._drop_groups(batch, bad))

    def _follow(self) -> bool:
        """On other ranks: take part in probes until rank 0 decides. Return whether the step continues."""
        while (word := self._gang.share(None)) == PROBE:
            self._probe(self._gang.scatter(None))
        return word == TRAIN


def _samples(share: Sequence[Minibatch]) -> int:
    return sum(micro.samples.size for part in share for micro in part.micro)


def _select_groups(batch: ClaimedBatch, groups: Sequence[GroupData]) -> ClaimedBatch:
    return msgspec.structs.replace(batch, groups=tuple(groups))

"""Replays recorded batches through the real backend and update, without sockets or a buffer.

Started by `asyncrl replay` as `python -m learners.replay --config OUT/config.toml --name replay`, once per rank. It
reads OUT/plan.json and writes OUT/steps.jsonl and OUT/end.json.

Guarantees:
1. every step trains the groups that the run trained, with the configuration and tuned settings of that step, by
   `learners.step.resilient_step`: with unchanged settings on a CPU the weights are bitwise equal;
2. `--set` overrides both from the step after `since` on. So do the rewards of a score file, for groups that it scored
   completely: a group never mixes rewards of the two;
3. the run folder is only read. Settings that change the model are applied by a save and a load, as in a restart.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config, load
from asyncrl.errors import AsyncRLError
from asyncrl.metrics import CATALOGUE, open_lines
from asyncrl.runs.replay_report import END, LINES, PLAN, Done, End, Plan, Step
from asyncrl.runs.score_file import GroupScores, read_scores, responses_digest
from asyncrl.runtime import batch_file
from asyncrl.runtime.role import RoleArgs, Stop, run
from asyncrl.runtime.run_dir import RunDir, write_atomic

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData
    from learners.backends.base import Backend
    from learners.gang.gang import Gang
    from learners.step.resilient_step import StepRunner
    from learners.step.update import StepResult

PREFIX = "learner.algorithm."


class Order(msgspec.Struct, frozen=True):
    """Settings of the next step, from rank 0."""

    config: str  # name of the archived configuration
    tuning: str


def body(args: RoleArgs, config: Config, stop: Stop) -> None:
    """Join the gang, replay, compare the final weights."""
    import torch

    from learners.gang.gang import Gang
    from learners.main import _quiet

    torch.set_num_threads(config.learner.torch_threads)
    _quiet()
    out = RunDir(config.run_dir).root
    plan = msgspec.json.decode((out / PLAN).read_bytes(), type=Plan)
    gang = Gang.join(config)
    Replay(plan, out, gang=gang).run(stop)
    gang.leave()


class Replay:
    """One rank of a replay."""

    def __init__(self, plan: Plan, out: Path, *, gang: Gang) -> None:
        self._plan = plan
        self._out = out
        self._gang = gang
        self._archive = RunDir(Path(plan.run)).archive
        self._configs: dict[tuple[str, bool], Config] = {}
        self._config: Config | None = None  # in force
        self._backend: Any = None
        self._runner: StepRunner | None = None
        self._left_out: list[int] = []
        self._scores: dict[tuple[int, int], GroupScores] = {}

    def run(self, stop: Stop) -> None:
        """Replay all steps and measure the distance of the final weights."""
        end = End(device=str(self._gang.device.type), ranks=self._gang.size)
        for step in self._plan.steps:
            if stop.is_set():
                raise AsyncRLError("role.failed", f"asked to end before step {step.step}", where="replay")
            order, batch = self._next(step)
            fresh = self._backend is None
            self._use(order, step.step)
            if fresh:
                end.start_digest = self._digest(step.step - 1)
            self._step(step, batch)
        if self._plan.overrides or self._plan.rescored:
            end.weights, end.notes = self._distance()
        if self._gang.lead:
            write_atomic(self._out / END, msgspec.json.encode(end))

    # ------------------------------------------------------------ a step

    def _next(self, step: Step) -> tuple[Order, ClaimedBatch | None]:
        """Return the settings of the step on every rank, and its batch on rank 0."""
        batch, text = None, None
        if self._gang.lead:
            from learners.batch.archive import read_step

            batch, meta = read_step(self._archive, step.step)
            batch = self._replace_rewards(self._select_trained(batch, step))
            text = msgspec.msgpack.encode(Order(meta.config, batch.tuning))
        return msgspec.msgpack.decode(self._gang.share(text), type=Order), batch

    @staticmethod
    def _select_trained(batch: ClaimedBatch, step: Step) -> ClaimedBatch:
        """Return the batch with the groups that the run trained in this step."""
        groups = tuple(group for group in batch.groups if group.group in step.groups)
        missing = sorted(set(step.groups) - {group.group for group in groups})
        if missing:
            what = f"the archive of step {step.step} does not hold group {missing[0]}, which the run trained in it"
            why = batch.invalid.get(missing[0], "")
            raise AsyncRLError("replay.missing", f"{what}: {why}" if why else what, where="replay")
        return msgspec.structs.replace(batch, groups=groups)

    def _replace_rewards(self, batch: ClaimedBatch) -> ClaimedBatch:
        """Replace rewards by those of the score file."""
        wanted = self._plan.rescored.get(batch.step, ())
        if not wanted:
            return batch
        if not self._scores:
            self._scores = {(one.step, one.group): one for one in read_scores(Path(self._plan.rewards))[1]}
        groups = [
            _replace_rewards(group, self._scores[batch.step, group.group]) if group.group in wanted else group
            for group in batch.groups
        ]
        return msgspec.structs.replace(batch, groups=tuple(groups))

    def _use(self, order: Order, step: int) -> None:
        """Apply the settings of a step."""
        changed = step > self._plan.since
        config = self._settings(order.config, changed)
        before = self._runner  # its coefficients continue
        if self._backend is None:
            self._backend = self._build(config, self._plan.checkpoint)
        elif _backend_settings(config) != _backend_settings(self._settings_in_force):
            self._backend = self._rebuild(config)
        if self._runner is None or config is not self._config:
            from learners.checkpoints.checkpoint import read_state
            from learners.step.resilient_step import StepRunner

            self._runner = StepRunner(
                config.learner,
                gang=self._gang,
                backend=self._backend,
                quarantine=self._quarantine,
                say=_say,
                seed=config.run.seed,
                group_size=config.sampling.group_size if config.sampling.greedy_baseline else 0,
                rewards=[one.label for one in config.reward],
            )
            if before is not None:
                self._runner.coefficients, self._runner.critic_warm = before.coefficients, before.critic_warm
            elif self._plan.checkpoint:
                state = read_state(Path(self._plan.checkpoint))
                self._runner.critic_warm = state.critic_warm
                if state.coefficients is not None:
                    self._runner.coefficients = state.coefficients
        self._config = config
        self._runner.retune(drop_overrides(order.tuning, self._plan.overrides if changed else ()))

    @property
    def _settings_in_force(self) -> Config:
        assert self._config is not None
        return self._config

    def _settings(self, name: str, changed: bool) -> Config:
        """Return the configuration of the run, with `--set` applied if it is in force."""
        overrides = self._plan.overrides if changed else ()
        if (name, bool(overrides)) not in self._configs:
            self._configs[name, bool(overrides)] = load(batch_file.config_path(self._archive, name), overrides)
        return self._configs[name, bool(overrides)]

    def _build(self, config: Config, checkpoint: str) -> Backend:
        from asyncrl.plugins import find
        from learners.checkpoints.checkpoint import find_problem

        self._gang.device.seed_all(config.run.seed + self._gang.topology.share)
        backend: Backend = find("asyncrl.backends", config.learner.backend)(config, self._gang)
        backend.self_check()
        if checkpoint:
            if why := find_problem(Path(checkpoint)):
                raise AsyncRLError("learner.checkpoint", why, where=checkpoint)
            backend.load(Path(checkpoint))
        return backend

    def _rebuild(self, config: Config) -> Backend:
        """Move the training state into a model and optimizer built with other settings."""
        with tempfile.TemporaryDirectory(dir=self._out) as folder:
            place = Path(self._gang.share(folder.encode()).decode())
            self._backend.save(place)
            self._gang.barrier()  # bounded: the timeout of the group
            self._runner = self._backend = None
            from asyncrl.plugins import find

            backend: Backend = find("asyncrl.backends", config.learner.backend)(config, self._gang)
            backend.load(place)
            self._gang.barrier()  # bounded: the timeout of the group
        return backend

    def _step(self, step: Step, batch: ClaimedBatch | None) -> None:
        runner = self._runner
        assert runner is not None
        self._left_out = []
        shares: Sequence[bytes] | None = None
        if batch is not None:
            batch, shares = runner.cut(batch)
        result, _ = runner.train(self._gang.scatter(shares), step=step.step, batch=batch)
        digest = self._digest(step.step)
        if self._gang.lead:
            line = Done(step.step, digest, _numbers(runner.stats, result), result.skipped, tuple(self._left_out))
            with open_lines(self._out / LINES) as file:
                file.write(msgspec.json.encode(line) + b"\n")
            print(f"replay: step {step.step}: {digest}", flush=True)

    def _quarantine(self, step: int, group: int, reason: str) -> None:
        _say(f"warning: group {group} of step {step} breaks here: {reason}")
        self._left_out.append(group)

    # ------------------------------------------------------------ weights

    def _digest(self, version: int) -> str:
        """Return the digest of a version as weight sync would publish it; empty on other ranks. Collective."""
        from learners.main import publish_plans

        backend, adapters = self._backend, self._backend.adapters
        whole, adapter = publish_plans(backend, bucket_bytes=self._settings_in_force.weightsync.bucket_bytes)
        if adapter is None:
            return self._layout_digest(whole, backend.iter_hf_weights())
        base = self._layout_digest(whole, adapters.iter_base())
        if not version:
            return base
        return self._layout_digest(adapter.plan, adapters.iter_weights(), base=base, adapter=adapter.text)

    def _layout_digest(self, layout: Any, weights: Iterator[tuple[str, Any]], **under: str) -> str:
        from weightsync.plan.digest import new_digest, version_digest
        from weightsync.plan.sum_digest import SUM

        place = {tensor.name: tensor.bucket for tensor in layout.tensors}
        like = SUM if self._settings_in_force.weightsync.transport == "direct" else ""
        digests = [new_digest(like) for _ in layout.bucket_bytes]
        for name, data in weights:  # in the order of the layout
            digests[place[name]].update(data)
        return version_digest([digest.hexdigest() for digest in digests], **under) if self._gang.lead else ""

    def _distance(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the distance of the final weights from those of the run. Collective."""
        if not self._plan.final:
            last = self._plan.steps[-1].step
            return {}, (f"the distance of the final weights is unknown: the run has no checkpoint of step {last}",)
        export = self._out / "export"
        self._backend.export_hf(export)
        final = Path(self._plan.final)
        if final.is_file():
            return (distance(_read_saved(export), _read_saved(final.parent)) if self._gang.lead else {}), ()
        self._backend.load(final)
        with tempfile.TemporaryDirectory(
            dir=self._out
        ) as folder:  # export it too, so that both have the names of the export
            other = Path(self._gang.share(folder.encode()).decode())
            self._backend.export_hf(other)
            return (distance(_read_saved(export), _read_saved(other)) if self._gang.lead else {}), ()


def _replace_rewards(group: GroupData, scores: GroupScores) -> GroupData:
    if responses_digest(one.response for one in group.samples) != scores.content:
        raise AsyncRLError(
            "rescore.file",
            f"the scores of group {group.group} belong to other samples than those in the archive: score it again",
            where=f"step {scores.step}",
        )
    samples = tuple(
        msgspec.structs.replace(one, reward=scores.rewards[one.index], parts=scores.parts.get(one.index, {}), turns=())
        for one in group.samples
    )
    return msgspec.structs.replace(group, samples=samples)


def _read_saved(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                yield name, file.get_tensor(name)


def distance(mine: Iterator[tuple[str, Any]], other: Iterator[tuple[str, Any]]) -> dict[str, float]:
    """Return the L2 distance, the distance relative to the norm of `other`, and the largest difference."""
    known = dict(mine)
    square, norm, largest = 0.0, 0.0, 0.0
    for name, tensor in other:
        difference = known[name].double() - tensor.double()
        square += float(difference.square().sum())
        norm += float(tensor.double().square().sum())
        largest = max(largest, float(difference.abs().max())) if difference.numel() else largest
    return {"distance": square**0.5, "relative": (square / norm) ** 0.5 if norm else 0.0, "largest": largest}


def drop_overrides(tuning: str, overrides: Sequence[str]) -> str:
    """Return the tuned settings without those that `--set` overrides."""
    named = {override.partition("=")[0].strip() for override in overrides}
    if not tuning or not named:
        return tuning
    left = {key: value for key, value in msgspec.json.decode(tuning, type=dict[str, Any]).items() if key not in named}
    return msgspec.json.encode(left).decode() if left else ""


def _backend_settings(config: Config) -> tuple[Any, ...]:
    """Return the settings that models and optimizers are built with."""
    from learners.backends.fsdp2.companion import wants_critic, wants_process_rewards

    learner = config.learner
    critic, process = learner.critic, learner.process_reward
    optims = [
        (one.name, one.beta1, one.beta2, one.eps, one.weight_decay, one.momentum)
        for one in (learner.optim, critic, process)
    ]
    return (
        config.model,
        config.sampling.temperature,
        learner.backend,
        learner.packing,
        learner.logprob_chunk_tokens,
        learner.gradient_checkpointing,
        learner.cpu_offload,
        learner.compile,
        learner.lora,
        *optims,
        wants_critic(config),
        critic.model,
        wants_process_rewards(config),
        process.model,
        process.reference,
    )


def _numbers(stats: dict[str, float], result: StepResult) -> dict[str, float]:
    """Return the step's metrics by catalogue name, and the mean importance weight over samples."""
    known = {name: value for name, value in (stats | result.metrics).items() if name in CATALOGUE}
    if result.weights:
        known["weight_mean"] = sum(result.weights.values()) / len(result.weights)
    return known


def _say(text: str) -> None:
    print(f"replay: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    return run("learner", body, argv)


if __name__ == "__main__":
    sys.exit(main())

"""The learner's main loop, the same on every rank. Rank 0 has `services`; the other ranks follow its orders.

Guarantees:
1. a step is: claim, cut, train, publish version `step`, commit, record, and a checkpoint every few steps;
2. a checkpoint holds the buffer's ledger; the buffer retires groups only after the checkpoint is durable
   (`learners.checkpoints.saving`);
3. the run ends between two steps, with a checkpoint, when all steps are done or after SIGTERM;
4. an update with a non-finite gradient is skipped and reported; `MAX_SKIPPED` such steps in a row end the run;
5. if the buffer loses its state, the learner saves its weights and registers again with their ledger: nothing in them
   is trained twice;
6. if the buffer is gone for good, the learner writes a checkpoint with its own account and exits with code 69. No step
   is lost;
7. a failed checkpoint is reported, counted and tried again. `learner.checkpoint_failures` failures in a row, or a
   failure of the last checkpoint, end the run with `disk.full`.

    start --> claim --> train --> publish --> commit --> record --(every n)--> checkpoint --> checkpointed
                ^                                                                   |
                +-------------------------------------------------------------------+--> end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from asyncrl.config import Config, dump
from asyncrl.errors import AsyncRLError, StateLost, Unavailable
from asyncrl.metrics import drop_repeated_steps, read_lines
from asyncrl.runs.exported import record_step
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.run_dir import RunDir, write_atomic
from learners.backends.base import Backend
from learners.batch import sample_log
from learners.checkpoints import checkpoint
from learners.checkpoints.saving import Checkpoints
from learners.device_turns import DeviceTurns
from learners.direct_weights import DirectWeights, send_weights
from learners.engine_gap import EngineGap
from learners.gang.gang import Gang
from learners.profiling.metered_backend import Meter
from learners.profiling.profiler import Profiler
from learners.rank_zero import Services
from learners.row_weights import RowWeights
from learners.step.coefficients import Coefficients
from learners.step.resilient_step import StepRunner
from learners.step.timing import StepTimes
from learners.step.update import StepResult

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch

MAX_SKIPPED, MAX_EMPTY = 3, 50  # steps in a row: of failed updates, and without anything to train


class Order(msgspec.Struct, frozen=True):
    """An order of rank 0 about `step`.

    train: a share of the batch follows; with `publish` the weights are published afterwards. stage: copy the published
    weights out, for engines that missed them (transport `direct`). save: write a checkpoint, as the buffer lost its
    state. end: stop, because all is done or for `reason`. leave: the buffer is gone; write a checkpoint, exit code 69.
    """

    step: int
    publish: bool = False
    reason: str = ""
    what: Literal["train", "stage", "save", "end", "leave"] = "train"
    settle: bool = False  # the checkpoint in progress has ended
    tuning: str = ""  # settings of this step changed by `asyncrl tune`
    coefficients: Coefficients | None = None  # from the checkpoint that this start continues
    critic_warm: bool = False  # likewise


class Learner:
    """One rank of the learner."""

    def __init__(
        self,
        config: Config,
        *,
        gang: Gang,
        backend: Backend,
        services: Services | None,
        turns: DeviceTurns | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._progress = progress  # called after every step, for the watchdog
        self._gang = gang
        self._run = RunDir(config.run_dir)
        self._meter = Meter(config, gang, say=_say if gang.lead else lambda _: None)
        self._backend = backend = self._meter.wrap(backend)
        self._times = StepTimes()
        self._profiler = Profiler(
            config.learner.profile, rank=gang.rank, device=gang.device, root=self._run.root, say=_say
        )
        self._services = services
        self._saver = Checkpoints(config, gang=gang, backend=backend, durable=self._durable, say=_say)
        self._runner = StepRunner(
            config.learner,
            gang=gang,
            backend=backend,
            quarantine=self._quarantine,
            say=_say,
            seed=config.run.seed,
            group_size=config.sampling.group_size if config.sampling.greedy_baseline else 0,
            rewards=[one.label for one in config.reward],
        )
        self._turns = turns or DeviceTurns(config, gang)
        self._rows = RowWeights(config, gang=gang, backend=backend, services=services)
        self._direct = DirectWeights(config, gang=gang, backend=backend, services=services, rows=self._rows)
        self._based = False  # this process has staged the base weights of the adapters
        self._skipped: Counter[bool] = Counter()  # updates in a row: of empty batches, and failed ones
        self._gap = EngineGap(config, say=_say if gang.lead else None)

    def run(self) -> str:
        """Train to the end. Return why the run ended early; empty if all steps are done."""
        try:
            return self._run_to_the_end()
        finally:
            self._saver.close()

    def _run_to_the_end(self) -> str:
        step = self._restore()
        self._times.take()
        while True:
            self._profiler.start_step(step + 1)
            order, batch, data = self._next(step)
            if order.what in ("end", "leave"):
                break
            if order.what == "stage":
                self._direct.stage()
                continue
            if order.what == "save":
                self._start_again(step)
                self._times.lap("checkpoint")
                continue
            self._runner.retune(order.tuning)
            self._times.lap("assemble")
            self._turns.begin(self._services)
            self._times.lap("wait")
            result, batch = self._runner.train(data, step=order.step, batch=batch)
            step = order.step
            self._check(result, step)
            self._gap.look(result.metrics, step)
            if self._services is not None and batch is not None:
                self._services.note_trained(batch)
            failpoint("learner.after_step")
            scoring, operations = self._meter.take()
            self._times.lap("train", proximal=scoring)
            if order.publish:
                self._publish(step)
            self._times.lap("publish")
            self._commit(step)
            self._times.lap("commit")
            times = self._times.take()
            # Record before the checkpoint: after a kill between the two the step is trained again and gets its line.
            self._record(batch, result, times | self._meter.figures(operations, times))
            self._times.lap("commit")
            if step < self._config.learner.steps and step % self._config.learner.checkpoint_every == 0:
                self._checkpoint(step)
                self._times.lap("checkpoint")
            self._turns.end(self._backend)
            self._profiler.end_step(step)
            self._progress()
        self._profiler.close(step)
        self._saver.settle()
        if step > self._saver.saved:
            self._turns.begin()
            self._checkpoint(step, last=True)
            self._turns.end(self._backend)
        if order.what == "leave":
            raise self._trouble(order.reason)
        self._finish(step, order.reason)
        return order.reason

    # ------------------------------------------------------------ parts of the loop

    def _restore(self) -> int:
        """Load the newest checkpoint, register with the buffer and publish the start weights. Return the step."""
        found: tuple[checkpoint.State, Path] | None = None
        if self._services is not None:
            found = checkpoint.newest(self._run.checkpoints, say=_say)
        place = self._gang.share(str(found[1]).encode() if found else b"").decode()
        state = found[0] if found else checkpoint.State(step=0, ledger="")
        if place:
            self._backend.load(Path(place))
        publish = False
        if self._services is not None:
            publish = self._services.register(step=state.step, ledger=state.ledger, digests=state.digests)
        start = Order(state.step, publish, coefficients=state.coefficients, critic_warm=state.critic_warm)
        order = self._share(start if self._services is not None else None)
        if order.coefficients is not None:
            self._runner.coefficients = order.coefficients
        self._runner.critic_warm = order.critic_warm
        self._saver.resume_from(order.step)
        if order.publish:
            self._publish(order.step)
        self._turns.end(self._backend)
        return order.step

    def _start_again(self, step: int) -> None:
        """The buffer lost its state: save the current weights and register with their ledger."""
        self._saver.settle()
        self._turns.begin()
        if step > self._saver.saved:
            self._checkpoint(step, wait=True)
        order = Order(step, self._services.register_again(step)) if self._services is not None else None
        if self._share(order).publish:
            self._publish(step)
        self._turns.end(self._backend)

    def _trouble(self, reason: str) -> AsyncRLError:
        trouble = self._services.trouble if self._services is not None else None
        return trouble or Unavailable("net.unreachable", reason)

    def _next(self, done: int) -> tuple[Order, ClaimedBatch | None, bytes]:
        """Return the order after `done` steps, the batch (rank 0) and this rank's share of it."""
        batch: ClaimedBatch | None = None
        order, shares = None, None
        if self._services is not None:
            order, batch, shares = self._decide(self._services, done)
            order = msgspec.structs.replace(order, settle=self._saver.has_ended())
        order = self._share(order)
        if order.settle:
            self._saver.settle()
        return order, batch, self._gang.scatter(shares) if order.what == "train" else b""

    def _decide(self, services: Services, done: int) -> tuple[Order, ClaimedBatch | None, list[bytes] | None]:
        """Choose the next order on rank 0, after `done` steps."""
        step = done + 1
        try:
            services.raise_trouble()
            if done >= self._config.learner.steps:
                return Order(done, what="end"), None, None
            batch = services.claim(step)
            if batch is None and services.publisher.stage_wanted == done:
                return Order(done, what="stage"), None, None
            self._times.lap("wait", fetch=services.fetch_s if batch is not None else 0.0)
            if batch is None:
                return Order(done, what="end", reason="asked to stop"), None, None
            failpoint("learner.after_claim")
            self._runner.retune(batch.tuning)
            batch, shares = self._runner.cut(batch)
        except StateLost as error:
            services.trouble = error
            _say(f"warning: {error.message}; registering again with what the weights of step {done} hold")
            return Order(done, what="save"), None, None
        except Unavailable as error:
            services.trouble = error
            return Order(done, what="leave", reason=error.message), None, None
        return Order(step, services.wants_publish(batch), tuning=batch.tuning), batch, shares

    def _share(self, order: Order | None) -> Order:
        data = None if order is None else msgspec.msgpack.encode(order)
        return msgspec.msgpack.decode(self._gang.share(data), type=Order)

    def _check(self, result: StepResult, step: int) -> None:
        """Stop before the commit if the update failed in several steps in a row."""
        self._skipped = self._skipped + Counter([result.is_empty]) if result.skipped else Counter()
        count, most = self._skipped[result.is_empty], MAX_EMPTY if result.is_empty else MAX_SKIPPED
        if result.skipped and self._gang.lead:
            _say(f"error: step {step}: {result.trouble}; the update was skipped ({count} in a row)")
        if (overflows := result.metrics.get("grad_overflows")) and self._gang.lead:
            scale = result.metrics["loss_scale"]
            _say(f"step {step}: gradients overflowed float16; {overflows:.0f} passes repeated, loss scale {scale:g}")
        if count >= most:
            raise AsyncRLError("learner.nonfinite", f"{count} steps in a row up to step {step}: {result.trouble}")

    def _publish(self, version: int) -> None:
        """With adapters the base goes out first: as version 0, or after a restart without becoming the target."""
        services, adapters = self._services, self._backend.adapters
        settle = services.settle if services is not None else None
        if self._config.weightsync.transport == "direct":
            self._direct.publish(version)
        elif adapters is None and not self._rows.publish(version):
            weights = self._backend.iter_hf_weights(settle)
            send_weights(weights, partial(services.publish, version) if services else None)
        if adapters is None:
            return
        if not self._based:
            send_weights(adapters.iter_base(settle), partial(services.stage_base, version) if services else None)
            self._based = True
        if version:
            send_weights(adapters.iter_weights(), partial(services.publish_adapter, version) if services else None)

    def _quarantine(self, step: int, group: int, reason: str) -> None:
        if self._services is not None:
            self._services.quarantine(step, group, reason)

    def _commit(self, step: int) -> None:
        failpoint("learner.before_commit")
        if self._services is not None:
            self._services.commit(step)
        failpoint("learner.after_commit")

    def _record(self, batch: ClaimedBatch | None, result: StepResult, values: dict[str, float]) -> None:
        """Write the records of a step. Collective, because any rank may hold the sampled responses."""
        count = self._config.log.samples_per_step
        mine = result.log.logprobs() if count and result.log is not None else {}
        kept = sample_log.gather(self._gang, mine, batch, count) if count else {}
        if self._services is None or batch is None:
            return
        values = (
            self._runner.stats
            | result.metrics
            | self._saver.stats
            | values
            | {
                "step": batch.step,
                "version": batch.step,
                "replayed": int(batch.replayed),
                "checkpoint_failures": float(self._saver.failures),
                "tokens_per_s": self._runner.stats["tokens"] / max(values["step_s"], 1e-9),
            }
        )
        self._services.record(values, batch, self._runner.groups_log(batch, result), logprobs=kept)
        self._saver.note(values, self._services.evaluated)

    def _checkpoint(self, step: int, *, wait: bool = False, last: bool = False) -> None:
        """Write a checkpoint, or start to. Training continues after a failure, but the last checkpoint must succeed."""
        self._saver.settle()
        state, fence = None, _no_fence
        if self._services is not None:
            fence = self._services.mark.check
            state = checkpoint.State(
                step=step,
                ledger=self._services.ledger(step),
                digests=dict(self._services.digests),
                ranks=self._gang.size,
                config=dump(self._config),
                coefficients=self._runner.coefficients,
                critic_warm=self._runner.critic_warm,
            )
        self._saver.save(step, state, fence=fence, wait=wait, last=last)

    def _durable(self, state: checkpoint.State) -> None:
        """On rank 0: a checkpoint is durable, so the buffer may retire its groups."""
        failpoint("learner.before_checkpointed")
        if self._services is not None:
            self._services.checkpointed(state.step, state.ledger)
        failpoint("learner.after_checkpointed")

    def _await_others(self) -> None:
        """Wait for the evaluation of the last step, and other policies. All ranks take part, so none looks hung."""
        while True:
            waits = b"1" if self._services is not None and self._services.awaits_others() else b""
            if not self._gang.share(waits if self._services is not None else None):
                break
            self._direct.stage_if_wanted(self._config.learner.steps)
            self._progress()
        if self._services is not None:
            self._saver.note({}, self._services.evaluated)

    def _finish(self, step: int, reason: str) -> None:
        """Export the final weights and write the result if the run is complete; say goodbye to the buffer."""
        if not reason:
            self._await_others()
            failpoint("learner.at_export")
            self._turns.begin()
            with record_step(self._run, step, lead=self._gang.lead):
                self._backend.export_hf(self._run.export)
            self._turns.end(self._backend)
        if self._services is None:
            return
        if not reason:  # ask for the ledger before saying goodbye
            ledger = msgspec.json.decode(self._services.ledger(step) or "{}")
            lines = read_lines(self._run.metrics / "learner.jsonl")
            write_atomic(self._run.result, msgspec.json.encode(run_result(step, lines, ledger)))
        failpoint("learner.at_goodbye")
        self._services.end(step, done=not reason, reason=reason or "all steps are done")


def _no_fence() -> None:
    """Fence of the ranks other than 0."""


def run_result(step: int, lines: Iterable[dict[str, Any]], ledger: Any) -> dict[str, Any]:
    """The content of `result.json`, from the lines of `learner.jsonl`. Steps that were trained again count once."""
    steps = drop_repeated_steps(lines)

    def mean(name: str, part: Sequence[Mapping[str, Any]]) -> float:
        return float(sum(line[name] for line in part)) / max(len(part), 1)

    return {
        "steps": step,
        "reward_first5": mean("reward_mean", steps[:5]),
        "reward_last5": mean("reward_mean", steps[-5:]),
        "lag_mean": mean("lag_mean", steps),
        "lag_max": max((line["lag_max"] for line in steps), default=0.0),
        "ledger": ledger,
    }


def _say(text: str) -> None:
    print(f"learner: {text}", flush=True)

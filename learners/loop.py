"""The learner's main loop, the same on every rank.

Called by `learners.main`. Rank 0 has `services`; the others follow the orders that it shares. Guarantees:
1. a step is: claim, cut, train, publish version `step`, commit it, record, and a checkpoint every few steps;
2. a checkpoint holds the buffer's ledger; the buffer retires groups only after it is durable;
3. the end (all steps done, or SIGTERM) comes between two steps, with a checkpoint;
4. updates with a gradient that is not finite are skipped and said; `MAX_SKIPPED` steps of them in a row end the run.

    start --> claim --> train --> publish --> commit --> record --(every n)--> checkpoint --> checkpointed
                ^                                                                   |
                +-------------------------------------------------------------------+--> end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import Config, dump
from asyncrl.errors import AsyncRLError
from asyncrl.metrics import read_lines
from asyncrl.rundir import RunDir, write_atomic
from learners import checkpoint
from learners.backends.base import Backend
from learners.batch import assemble, decode_share, encode_share
from learners.gang import Gang
from learners.services import Services
from learners.update import StepResult, train_step

if TYPE_CHECKING:
    from buffers.client import ClaimedBatch

MAX_SKIPPED = 3


class Order(msgspec.Struct, frozen=True):
    """What rank 0 tells the gang: train `step`, or end (`step` 0). `publish`: the weights go out after it."""

    step: int
    publish: bool = False
    reason: str = ""


class Learner:
    """One rank of the learner. `run` is the loop."""

    def __init__(
        self, config: Config, *, gang: Gang, backend: Backend, services: Services | None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._config = config
        self._progress = progress  # told after every step: a watchdog listens
        self._gang = gang
        self._backend = backend
        self._services = services
        self._run = RunDir(config.run_dir)
        self._saved = 0  # step of the newest checkpoint
        self._stats: dict[str, float] = {}  # of the batch in training, on rank 0
        self._skipped = 0

    def run(self) -> str:
        """Train to the end; why it ended (empty: all steps are done)."""
        step = self._restore()
        while True:
            started = time.monotonic()
            order, batch, data = self._next(step + 1)
            if not order.step:
                break
            waited = time.monotonic() - started
            result = train_step(
                decode_share(data), backend=self._backend, gang=self._gang, config=self._config.learner, step=order.step
            )
            self._check(result, order.step)
            step = order.step
            trained = time.monotonic()
            if order.publish:
                self._publish(step)
            published = time.monotonic()
            self._commit(step)
            last = step == self._config.learner.steps
            if last or step % self._config.learner.checkpoint_every == 0:
                self._checkpoint(step)
            times = {"wait_s": waited, "train_s": trained - started - waited, "publish_s": published - trained,
                     "checkpoint_s": time.monotonic() - published, "step_s": time.monotonic() - started}  # fmt: skip
            self._record(batch, result.metrics | times)
            self._progress()
        if step > self._saved:
            self._checkpoint(step)
        self._finish(step, order.reason)
        return order.reason

    # ------------------------------------------------------------ parts of the loop

    def _restore(self) -> int:
        """Load the newest checkpoint, register with the buffer, publish the start weights; the step reached."""
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
        order = self._share(Order(state.step, publish) if self._services is not None else None)
        self._saved = order.step
        if order.publish:
            self._publish(order.step)
        return order.step

    def _next(self, step: int) -> tuple[Order, ClaimedBatch | None, bytes]:
        """The order for `step`, rank 0's batch, and this rank's share of it."""
        batch: ClaimedBatch | None = None
        order, shares = None, None
        if self._services is not None:
            if step <= self._config.learner.steps:
                batch = self._services.claim(step)
            if batch is None:
                order = Order(0, reason="" if step > self._config.learner.steps else "asked to stop")
            else:
                shares = self._cut(batch)
                order = Order(step, self._services.wants_publish(batch))
        order = self._share(order)
        return order, batch, self._gang.scatter(shares) if order.step else b""

    def _cut(self, batch: ClaimedBatch) -> list[bytes]:
        learner = self._config.learner
        cut = assemble(
            batch, advantage=learner.algorithm.advantage, ranks=self._gang.size, packing=learner.packing,
            max_tokens=learner.micro_batch_tokens, minibatches=learner.algorithm.minibatches,
        )  # fmt: skip
        self._stats = cut.stats
        return [encode_share(share) for share in cut.shares]

    def _share(self, order: Order | None) -> Order:
        data = self._gang.share(msgspec.msgpack.encode(order) if order is not None else None)
        return msgspec.msgpack.decode(data, type=Order)

    def _check(self, result: StepResult, step: int) -> None:
        """Stop before the commit where the loss has been broken for several steps."""
        self._skipped = self._skipped + 1 if result.skipped else 0
        if result.skipped and self._gang.lead:
            _say(f"error: step {step}: the gradient is not finite; the update was skipped ({self._skipped} in a row)")
        if self._skipped >= MAX_SKIPPED:
            raise AsyncRLError("learner.nonfinite", f"{self._skipped} steps in a row up to step {step}")

    def _publish(self, version: int) -> None:
        weights = self._backend.iter_hf_weights()
        if self._services is not None:
            self._services.publish(version, weights)
        else:
            for _ in weights:  # collective: take part to the end
                pass

    def _commit(self, step: int) -> None:
        if self._services is not None:
            self._services.commit(step)

    def _record(self, batch: ClaimedBatch | None, values: dict[str, float]) -> None:
        if self._services is None or batch is None:
            return
        values = self._stats | values | {
            "step": batch.step, "version": batch.step, "replayed": int(batch.replayed),
            "tokens_per_s": self._stats["tokens"] / max(values["step_s"], 1e-9),
        }  # fmt: skip
        self._services.record(values, batch)

    def _checkpoint(self, step: int) -> None:
        state = None
        if self._services is not None:
            state = checkpoint.State(
                step=step, ledger=self._services.buffer.ledger(step=step), digests=self._services.digests,
                ranks=self._gang.size, config=dump(self._config),
            )  # fmt: skip
        checkpoint.save(
            self._run.checkpoints, state, step=step, backend=self._backend, gang=self._gang,
            keep=self._config.learner.checkpoint_keep,
        )  # fmt: skip
        self._saved = step
        if self._services is not None:
            self._services.buffer.checkpointed(step=step)

    def _finish(self, step: int, reason: str) -> None:
        """Export the final weights and write the result where the run is complete; say goodbye."""
        if not reason:
            self._backend.export_hf(self._run.export)
        if self._services is None:
            return
        if not reason:  # the buffer's ledger before it hears that the run is over
            ledger = msgspec.json.decode(self._services.buffer.ledger(step=step) or "{}")
            lines = read_lines(self._run.metrics / "learner.jsonl")
            write_atomic(self._run.result, msgspec.json.encode(result_of(step, lines, ledger)))
        self._services.end(done=not reason, reason=reason or "all steps are done")


def result_of(step: int, lines: Sequence[Mapping[str, Any]], ledger: Any) -> dict[str, Any]:
    """What `result.json` holds, from the metrics of all processes of the run; of a step trained again the last line."""
    steps = [by_step for _, by_step in sorted({line["step"]: line for line in lines if "step" in line}.items())]

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

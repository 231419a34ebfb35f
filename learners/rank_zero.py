"""Everything that rank 0 of the learner says to the outside: buffer, weight sync, metrics, samples, heartbeats.

Guarantees:
1. weights of a version are staged for the generators before the buffer hears of the version, so that a producer may
   hold it when the next lease is granted;
2. a wait for a batch shows the buffer's diagnosis, and ends with it after `learner.batch_timeout_s` (`hang`);
3. a group that cannot be trained is quarantined with its reason before the step begins;
4. after a restart nothing is published while recorded batches lead back to a version that generators already hold;
5. heartbeats come from a thread with a connection of its own: a long poll does not hold them up;
6. a buffer that forgot this learner or does not answer ends no step: it is noted as `trouble`, what it should have
   heard stands in the account, and the loop decides between two steps;
7. records that cannot be written (a full disk) are counted and said, and end nothing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.config import Config
from asyncrl.config.mode import streams
from asyncrl.errors import AsyncRLError, StateLost, Unavailable
from asyncrl.metrics import MetricsLog
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import NotYet
from learners.batch import sample_log as shown
from learners.batch.archive import Archive
from learners.batch.assembly import unusable
from learners.evaluations import LastEvaluations
from learners.ledger_account import Account, EpochMark

if TYPE_CHECKING:
    from buffers.client.client import ClaimedBatch

POLL_S = 2.0
SAY_EVERY_S = 10.0
SILENT_S = 5.0  # then the service that does not answer is named
#: Numbers of the newest step that the heartbeats carry, for whoever watches without the run's folder.
TOLD = ("reward_mean", "lag_mean", "lag_max", "bound_max", "tokens_per_s", "step_s", "wait_s")
LEAVE_S = 3.0  # how long a request may stay without an answer once the process was asked to end

Weights = Iterable[tuple[str, npt.NDArray[np.uint8]]]


class BufferClient(Protocol):
    """What this module uses of `buffers.client.client.LearnerClient`."""

    def register(self, *, step: int, ledger: str, takeover: bool, fingerprint: str, digests: dict[int, str]) -> Any: ...
    def claim(self, *, step: int, version: int, wait_s: float) -> Any: ...
    def commit(self, *, step: int, version: int, digest: str) -> None: ...
    def quarantine(self, *, step: int, groups: Iterable[int], reason: str) -> None: ...
    def ledger(self, *, step: int) -> str: ...
    def checkpointed(self, *, step: int) -> None: ...
    def evaluations(self, *, seen: int) -> Any: ...
    def goodbye(self, *, done: bool, reason: str) -> None: ...
    def close(self) -> None: ...


class WeightPublisher(Protocol):
    """What this module uses of `weightsync.publisher.publisher.Publisher`."""

    digests: dict[int, str]
    stats: dict[str, float]

    def start(self, *, epoch: int) -> None: ...
    def committed_version(self) -> int: ...
    def publish(self, version: int, plan: Any, chunks: Weights, *, base: str = "", adapter: str = "") -> Any: ...
    def stage_base(self, version: int, plan: Any, chunks: Weights) -> Any: ...
    def settle(self) -> None: ...
    def close(self, *, hurry: bool = False) -> None: ...


class AdapterPlan(NamedTuple):
    """How adapters are published. `text`: their configuration, as manifests carry it."""

    plan: Any
    text: str


class Services:
    """The outside of the learner. `plan` is the layout of the published weights, `adapter` that of adapters of them."""

    def __init__(
        self,
        config: Config,
        *,
        buffer: BufferClient,
        publisher: WeightPublisher,
        plan: Any,
        stop: Stop,
        takeover: bool = False,
        fingerprint: str = "",
        heart: Heart | None = None,
        decode: Any = None,
        vocabulary: int = 0,
        adapter: AdapterPlan | None = None,
    ) -> None:
        self.buffer = buffer
        self.publisher = publisher
        self.digests: dict[int, str] = {}
        self.account = Account("")
        self.mark = EpochMark(RunDir(config.run_dir).learner)
        self.trouble: StateLost | Unavailable | None = None  # the buffer forgot this learner, or is gone
        self._config = config
        self._plan = plan
        self._adapter = adapter
        self._base = ""  # digest of the weights that adapters are published over
        self._stop = stop
        self._takeover = takeover
        self._fingerprint = fingerprint
        self._heart = heart
        self._vocabulary = vocabulary  # 0: not known
        self._lost_lines = 0  # steps whose records could not be written
        self.fetch_s = 0.0  # of the newest batch: its payloads read and checked, after the buffer's answer
        self._publishes = not streams(config)
        self._decode = decode or (lambda ids: " ".join(map(str, ids)))
        self._committed = -1
        self._ahead = -1  # the version of the generators that recorded batches lead back to
        run = RunDir(config.run_dir).create()
        self._log = MetricsLog(run.metrics / "learner.jsonl")
        self._samples = run.samples
        self._groups = run.metrics / "groups.jsonl"
        self._tracker = _tracker(config, run)
        self._archive = Archive(config, say=_say) if config.log.archive else None
        self._evaluations = LastEvaluations(
            config,
            ask=lambda seen: buffer.evaluations(seen=seen),
            track=self._tracker.log if self._tracker is not None else None,
        )
        self.evaluated = self._evaluations.figures

    # ------------------------------------------------------------ start and end

    def register(self, *, step: int, ledger: str, digests: dict[int, str]) -> bool:
        """Tell the buffer where this learner starts; whether the weights of `step` are to be published first."""
        self.digests = dict(digests)
        self.account = Account(ledger)
        failpoint("learner.at_register")
        answer = self._register(step, takeover=self._takeover)
        failpoint("learner.after_register")
        self.publisher.start(epoch=answer.epoch)
        self._committed = self.publisher.committed_version()
        # Where the recorded batches end before what generators hold, those versions never come again: they go back.
        catching_up = step < self._committed <= answer.replay_to
        self._ahead = self._committed if catching_up else -1
        print(
            f"learner: epoch {answer.epoch}, step {step}, batches recorded up to {answer.replay_to}, "
            f"generators hold version {self._committed}",
            flush=True,
        )
        return self._publishes and not catching_up

    def register_again(self, step: int) -> None:
        """The buffer has lost its state: tell it what the weights of `step` hold. Generators have them already."""
        answer = self._register(step, takeover=False)
        self.trouble = None
        print(f"learner: registered again: epoch {answer.epoch}, step {step}", flush=True)

    def _register(self, step: int, *, takeover: bool) -> Any:
        ledger = self.account.text(step=step, epoch=self.mark.highest().epoch)
        answer = self.buffer.register(
            step=step, ledger=ledger, takeover=takeover, fingerprint=self._fingerprint, digests=self.digests
        )
        self.mark.take(answer.epoch)
        return answer

    def raise_trouble(self) -> None:
        """What an earlier call met; the step under way was ended first."""
        if self.trouble is not None:
            raise self.trouble

    def _tell(self, call: Callable[[], None]) -> bool:
        """Say something to the buffer that the account also knows; False where it could not be said (`trouble`)."""
        if self.trouble is None:
            try:
                call()
            except (StateLost, Unavailable) as error:
                print(f"learner: error: {error.message}", flush=True)
                self.trouble = error
        return self.trouble is None

    def awaits_evaluation(self) -> bool:
        """At the end of the run: whether an evaluation is still to be waited for; comes back within a second."""
        try:
            waits = "" if self._stop.is_set() or self.trouble is not None else self._evaluations.awaited()
        except (StateLost, Unavailable) as error:
            self.trouble, waits = error, ""
        self._waiting(waits)
        return bool(waits)

    def end(self, step: int, *, done: bool, reason: str) -> None:
        """Say goodbye to the buffer. A round of weights under way is given up: nobody needs it any more."""
        if not self._tell(lambda: self.buffer.goodbye(done=done, reason=reason)):
            if isinstance(self.trouble, StateLost):
                self.register_again(step)
                self._tell(lambda: self.buffer.goodbye(done=done, reason=reason))
            self.raise_trouble()

    def close(self, *, hurry: bool = False) -> None:
        """Stop the heart, close connections and files. `hurry`: wait for no generator that still takes a version."""
        if self._heart is not None:
            self._heart.stop()
        self.publisher.close(hurry=hurry)
        self.buffer.close()
        self._log.close()
        if self._tracker is not None:
            self._tracker.close()

    # ------------------------------------------------------------ one step

    def claim(self, step: int) -> ClaimedBatch | None:
        """The batch of `step` without its unusable groups; None where the end was asked for while waiting."""
        started = said = time.monotonic()
        limit = self._config.learner.batch_timeout_s
        while not self._stop.is_set():
            answer = self.buffer.claim(step=step, version=step - 1, wait_s=POLL_S)
            if not isinstance(answer, NotYet):
                self._waiting("")
                arrived = getattr(self.buffer, "answered", 0.0) or time.monotonic()
                batch = self._usable(answer)
                self.fetch_s = time.monotonic() - arrived
                return batch
            self.mark.check()  # a buffer that went back may take this learner for the registered one again
            now = time.monotonic()
            diagnosis = f"step {step}: {answer.ready} of {answer.wanted} groups are ready; {answer.diagnosis}"
            self._waiting(diagnosis)
            if now - started > limit:
                raise AsyncRLError("hang", f"no batch within {limit:g} s. {diagnosis}", where="learner")
            if now - said > SAY_EVERY_S:
                print(f"learner: waits {now - started:.0f} s. {diagnosis}", flush=True)
                said = now
        return None

    def _usable(self, batch: ClaimedBatch) -> ClaimedBatch:
        if self._archive is not None:
            self._archive.put(batch, epoch=self.mark.epoch)
        limit = self._config.learner.micro_batch_tokens
        bad = dict(batch.invalid)
        for group in batch.groups:
            if why := unusable(group, max_tokens=limit, vocabulary=self._vocabulary):
                bad[group.group] = why
        for number, why in bad.items():
            self.quarantine(batch.step, number, why)
        return msgspec.structs.replace(batch, groups=tuple(g for g in batch.groups if g.group not in bad))

    def quarantine(self, step: int, group: int, reason: str) -> None:
        """A group of the claimed step cannot be trained: it is dead, with its reason."""
        print(f"learner: warning: group {group} of step {step} is quarantined: {reason}", flush=True)
        self.account.bury(step, group, reason)
        if self._archive is not None:
            self._archive.bury(step, group, reason)
        self._tell(lambda: self.buffer.quarantine(step=step, groups=[group], reason=reason))

    def note_trained(self, batch: ClaimedBatch) -> None:
        """The weights hold the groups of this step now."""
        self.account.train(batch.step, [group.group for group in batch.groups])

    def wants_publish(self, batch: ClaimedBatch) -> bool:
        """False without generators, and while a recorded batch leads to a version that they already left behind."""
        return self._publishes and not (batch.replayed and batch.step < self._ahead)

    def settle(self) -> None:
        """For the iterator that `publish` is given: copy what it gave so far, before it takes the bytes back."""
        self.publisher.settle()

    def publish(self, version: int, weights: Weights) -> str:
        """Stage the weights of a version; their digest. `weights` is exhausted in any case (it is collective)."""
        with _exhausted(weights) as rest:
            manifest = self.publisher.publish(version, self._plan, rest)
        return self._published(version, manifest)

    def stage_base(self, version: int, weights: Weights) -> None:
        """Stage the weights that the adapters to come are added to, which are version 0; where that has been left
        behind (after a restart) without making them the target."""
        if not version:
            self._base = self.publish(0, weights)
            return
        with _exhausted(weights) as rest:
            self._base = str(self.publisher.stage_base(0, self._plan, rest).digest)

    def publish_adapter(self, version: int, weights: Weights) -> str:
        """Stage a version that is an adapter of the weights staged before; its digest. `weights` as in `publish`."""
        assert self._adapter is not None
        with _exhausted(weights) as rest:
            manifest = self.publisher.publish(
                version, self._adapter.plan, rest, base=self._base, adapter=self._adapter.text
            )
        return self._published(version, manifest)

    def _published(self, version: int, manifest: Any) -> str:
        self.digests[version] = manifest.digest
        for old in sorted(self.digests)[: -2 * self._config.buffer.max_staleness - 4]:
            del self.digests[old]
        return str(manifest.digest)

    def commit(self, step: int) -> None:
        """The step is done: its groups are trained, and version `step` exists."""
        self._tell(lambda: self.buffer.commit(step=step, version=step, digest=self.digests.get(step, "")))

    def ledger(self, step: int) -> str:
        """What a checkpoint of `step` holds of the buffer: its own words, or what this learner knows by itself."""
        said: list[str] = []
        if self._tell(lambda: said.append(self.buffer.ledger(step=step))):
            return said[0]
        return self.account.text(step=step, epoch=self.mark.epoch)

    def checkpointed(self, step: int, ledger: str) -> None:
        """A checkpoint of `step` with this ledger is durable."""
        self.account.renew(step, ledger)
        self._tell(lambda: self.buffer.checkpointed(step=step))

    # ------------------------------------------------------------ records

    def record(
        self,
        values: dict[str, float],
        batch: ClaimedBatch,
        groups: dict[str, Any] | None = None,
        *,
        logprobs: Mapping[int, list[float]] = MappingProxyType({}),
    ) -> None:
        """The step's line of metrics, its samples, the tracker, and one line on the terminal. `logprobs`: the learner's
        of the samples that are kept, by their place in the batch."""
        step, values = batch.step, values | batch.lengths | self.publisher.stats
        self._evaluations.between_steps()
        try:
            self._write_records(values, batch, groups, logprobs)
        except OSError as error:
            self._lost_lines += 1
            print(
                f"learner: ERROR: the records of step {step} are lost ({self._lost_lines} so far): {error}", flush=True
            )
        if self._heart is not None:
            told = {name: values[name] for name in TOLD if name in values}
            busy = 1 - values["wait_s"] / max(values["step_s"], 1e-9)
            self._heart.stats = {**told, "step": float(step), "version": float(step), "busy_share": busy}
        wait = 100 * values["wait_s"] / max(values["step_s"], 1e-9)
        bound = self._config.buffer.max_staleness
        print(
            f"step {step}/{self._config.learner.steps} reward {values['reward_mean']:.3f} "
            f"lag {values['lag_mean']:.1f}/{bound} tok/s {values['tokens_per_s']:.0f} wait {wait:.0f}% "
            f"loss {values.get('loss', 0.0):.4f} grad {values.get('grad_norm', 0.0):.3f} "
            f"entropy {values.get('entropy', 0.0):.3f} {values['step_s']:.2f} s"
            + (" (replayed)" if batch.replayed else ""),
            flush=True,
        )

    def _write_records(
        self,
        values: dict[str, float],
        batch: ClaimedBatch,
        groups: dict[str, Any] | None,
        logprobs: Mapping[int, list[float]],
    ) -> None:
        if groups is not None:
            with self._groups.open("ab", buffering=0) as file:
                file.write(msgspec.json.encode({"t": time.time(), **groups}) + b"\n")
        self._log.write(values, groups_of_step=[group.group for group in batch.groups])
        if self._tracker is not None:
            self._tracker.log({**batch.ledger, **values}, step=batch.step)
        with self._samples.open("ab", buffering=0) as file:
            for line in shown.lines(batch, self._config.log.samples_per_step, self._decode, logprobs):
                file.write(msgspec.json.encode(line) + b"\n")

    def waits_for(self) -> str:
        """What the learner waits for, as its heartbeats say; empty while it works."""
        return self._heart.waiting_for if self._heart is not None else ""

    def _waiting(self, what: str) -> None:
        if self._heart is not None:
            self._heart.waiting_for = what


@contextmanager
def _exhausted(weights: Weights) -> Iterator[Iterator[tuple[str, npt.NDArray[np.uint8]]]]:
    """An iterator of them that comes to its end even where its reader fails: other ranks go through it, too."""
    rest = iter(weights)
    try:
        yield rest
    finally:
        for _ in rest:
            pass


def _say(text: str) -> None:
    print(f"learner: {text}", flush=True)


def _tracker(config: Config, run: RunDir) -> Any:
    """Curves in the run folder; online trackers have processes of their own (`learners.trackers.main`)."""
    if not config.log.tensorboard:
        return None
    from asyncrl.plugins import TrackerRun, find

    given = TrackerRun(project=config.trackers.project, name=config.run.name, id="", folder=run.tensorboard)
    return find("asyncrl.trackers", "tensorboard")(given)


class Silence:
    """What to do while an answer is overdue: name the service once, give up once the process was asked to end."""

    def __init__(self, service: str, *, limit_s: float, stop: Stop) -> None:
        self._service = service
        self._limit_s = limit_s
        self._stop = stop
        self._said = False

    def __call__(self, overdue_s: float) -> bool:
        """Whether to give the request up; called again and again while an answer is overdue."""
        if overdue_s < SILENT_S:
            self._said = False
        elif not self._said:
            self._said = True
            print(
                f"learner: warning: the {self._service} does not answer since {SILENT_S:g} s; giving up after "
                f"{self._limit_s:g} s",
                flush=True,
            )
        return self._stop.is_set() and overdue_s >= LEAVE_S


class Heart:
    """A thread that sends heartbeats over its own connection. `beat(stats, waiting_for)` sends one.

    `ended` is set by `stop`: a beat under way should then be given up.
    """

    def __init__(self, beat: Any, *, every_s: float, close: Any = None, ended: threading.Event | None = None) -> None:
        self.stats: dict[str, float] = {}
        self.waiting_for = "its model to load"
        self._beat = beat
        self._close = close
        self._every_s = every_s
        self._ended = ended or threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heart-{os.getpid()}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            stats = {name: value for name, value in self.stats.items() if math.isfinite(value)}
            try:
                self._beat(stats, waiting_for=self.waiting_for)
            except Unavailable:
                continue  # the main thread's own request reports it
            except AsyncRLError as error:
                print(f"learner: heartbeat refused: {error.message}", flush=True)
                break
        if self._close is not None:
            self._close()

    def stop(self) -> None:
        """End the thread; waits for a beat under way."""
        self._ended.set()
        self._thread.join(timeout=5.0)

"""Rank 0's connections: buffer, weight sync, records and heartbeats.

Guarantees:
1. the weights of a version are staged before the buffer learns of the version, so a producer may hold it at the next
   lease;
2. a wait for a batch reports the buffer's diagnosis, and fails with it after `learner.batch_timeout_s` (`hang`);
3. a group that cannot be trained is quarantined with a reason before the step begins;
4. after a restart nothing is published while recorded batches lead to a version that generators already hold;
5. heartbeats use their own thread and connection, so a long poll does not delay them;
6. a lost or silent buffer ends no step: the error is stored in `trouble`, the account holds the undelivered messages,
   and the loop decides between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.config import Config
from asyncrl.config.capabilities import BACKENDS
from asyncrl.config.judges import teacher_of
from asyncrl.config.mode import publishes, streams
from asyncrl.config.model_facts import experts_shape
from asyncrl.errors import AsyncRLError, StateLost, Unavailable
from asyncrl.images.model_inputs import open_inputs
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.model_folder import model_json
from asyncrl.runtime.role import Stop
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import NotYet
from learners.batch.archive import Archive
from learners.batch.assembly import image_problem, unusable
from learners.evaluations import LastEvaluations
from learners.heartbeat import Heart
from learners.ledger_account import Account, EpochMark
from learners.other_policies import OthersWait
from learners.step_records import StepRecords

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData
    from buffers.client.learner import LearnerClient
    from weightsync.publisher.publisher import Publisher
    from weightsync.staging import Fill

POLL_S = 2.0
CHECKS = 4  # groups that are checked in parallel
POLL_OTHERS_S = 0.5
REPORT_EVERY_S = 10.0

Weights = Iterable[tuple[str, npt.NDArray[np.uint8]]]


class AdapterPlan(NamedTuple):
    """Layout of published adapters. `text`: their configuration for the manifest."""

    plan: Any
    text: str


class Services:
    """Rank 0's connections. `plan` is the layout of the published weights, `adapter` the layout of their adapters."""

    def __init__(
        self,
        config: Config,
        *,
        buffer: LearnerClient,
        publisher: Publisher,
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
        self.trouble: StateLost | Unavailable | None = None  # the buffer lost its state or is gone
        self._config = config
        self.plan = plan
        self._adapter = adapter
        self._base = ""  # digest of the base weights under published adapters
        self._stop = stop
        self._takeover = takeover
        self._fingerprint = fingerprint
        self._heart = heart
        self._vocabulary = vocabulary  # 0: unknown
        self._routing = experts_shape(model_json(config.model.path) if config.learner.router_replay else {})
        self._looks = config.learner.backend in BACKENDS  # those of other packages may see in their own way
        self._images = open_inputs(config) if self._looks else None
        self._history = ""  # head of the history's chain, as told with the newest commit
        self.fetch_s = 0.0  # time to read and check the payloads of the newest batch
        self._publishes = not streams(config)
        self._committed = -1
        self._ahead = -1  # version of the generators, while recorded batches lead to it
        run = RunDir(config.run_dir).create()
        self._records = StepRecords(config, run, decode or (lambda ids: " ".join(map(str, ids))))
        self._archive = Archive(config, say=_print) if config.log.archive else None
        self._others = OthersWait(config)
        self._evaluations = LastEvaluations(
            config,
            ask=lambda seen: buffer.evaluations(seen=seen),
            track=self._records.tracker.log if self._records.tracker is not None else None,
        )
        self.evaluated = self._evaluations.figures

    # ------------------------------------------------------------ start and end

    def register(self, *, step: int, ledger: str, digests: dict[int, str]) -> bool:
        """Register with the buffer at `step`. Return whether the weights of `step` must be published first."""
        self.digests = dict(digests)
        self.account = Account(ledger)
        failpoint("learner.at_register")
        answer = self._register(step, takeover=self._takeover)
        failpoint("learner.after_register")
        self.publisher.start(epoch=answer.epoch)
        self._committed = self.publisher.committed_version()
        # If the recorded batches end before the version that generators hold, that version is lost: generators go back.
        catching_up = step < self._committed <= answer.replay_to
        self._ahead = self._committed if catching_up else -1
        print(
            f"learner: epoch {answer.epoch}, step {step}, batches recorded up to {answer.replay_to}, "
            f"generators hold version {self._committed}",
            flush=True,
        )
        return self._publishes and not catching_up

    def register_again(self, step: int) -> bool:
        """Register after the buffer lost its state, with the ledger of `step`. Return whether to publish its weights:
        if generators hold a later version, the batches that led to it are lost, and generators have to go back.
        """
        answer = self._register(step, takeover=False)
        self.trouble = None
        print(f"learner: registered again: epoch {answer.epoch}, step {step}", flush=True)
        lost, self._ahead = step < self._ahead, -1
        return self._publishes and lost

    def _register(self, step: int, *, takeover: bool) -> Any:
        ledger = self.account.text(step=step, epoch=self.mark.highest().epoch)
        answer = self.buffer.register(
            step=step, ledger=ledger, takeover=takeover, fingerprint=self._fingerprint, digests=self.digests
        )
        self.mark.take(answer.epoch)
        return answer

    def raise_trouble(self) -> None:
        """Raise the stored error of an earlier call."""
        if self.trouble is not None:
            raise self.trouble

    def _send(self, call: Callable[[], None]) -> bool:
        """Send a message that the account also holds. Return False if delivery failed (`trouble`)."""
        if self.trouble is None:
            try:
                call()
            except (StateLost, Unavailable) as error:
                print(f"learner: error: {error.message}", flush=True)
                self.trouble = error
        return self.trouble is None

    def awaits_others(self) -> bool:
        """At the end of the run: whether an evaluation is in progress, or another policy still trains. Returns within
        a second.
        """
        try:
            waits = "" if self._stop.is_set() or self.trouble is not None else self._evaluations.describe_pending()
        except (StateLost, Unavailable) as error:
            self.trouble, waits = error, ""
        if not waits and self._config.run.other_policies and not self._stop.wait(POLL_OTHERS_S):
            waits = self._others.describe()
        self.set_waiting(waits)
        return bool(waits)

    def end(self, step: int, *, done: bool, reason: str) -> None:
        """Tell the buffer that the learner ends."""
        if not self._send(lambda: self.buffer.goodbye(done=done, reason=reason)):
            if isinstance(self.trouble, StateLost):
                self.register_again(step)
                self._send(lambda: self.buffer.goodbye(done=done, reason=reason))
            self.raise_trouble()

    def close(self, *, hurry: bool = False) -> None:
        """Close connections and files. `hurry`: do not wait for generators that still receive a version."""
        if self._heart is not None:
            self._heart.stop()
        self.publisher.close(hurry=hurry)
        self.buffer.close()
        self._records.close()

    # ------------------------------------------------------------ one step

    def claim(self, step: int) -> ClaimedBatch | None:
        """Return the batch of `step` without unusable groups; None if the process should end, or stage weights."""
        started = reported = time.monotonic()
        limit = self._config.learner.batch_timeout_s
        while not self._stop.is_set():
            answer = self.buffer.claim(step=step, version=step - 1, wait_s=POLL_S)
            if not isinstance(answer, NotYet):
                self.set_waiting("")
                arrived = getattr(self.buffer, "answered", 0.0) or time.monotonic()
                batch = self._usable(answer)
                self.fetch_s = time.monotonic() - arrived
                return batch
            if self.publisher.stage_wanted == step - 1:
                return None
            self.mark.check()  # a buffer with lost state may accept this learner again
            now = time.monotonic()
            diagnosis = f"step {step}: {answer.ready} of {answer.wanted} groups are ready; {answer.diagnosis}"
            self.set_waiting(diagnosis)
            if now - started > limit:
                raise AsyncRLError("hang", f"no batch within {limit:g} s. {diagnosis}", where="learner")
            if now - reported > REPORT_EVERY_S:
                print(f"learner: waits {now - started:.0f} s. {diagnosis}", flush=True)
                reported = now
        return None

    def _usable(self, batch: ClaimedBatch) -> ClaimedBatch:
        if self._archive is not None:
            self._archive.put(batch, epoch=self.mark.epoch, history=self._history)
        learner = self._config.learner

        def check(group: GroupData) -> str:
            why = unusable(
                group,
                max_tokens=learner.micro_batch_tokens,
                vocabulary=self._vocabulary,
                teacher=teacher_of(self._config, str(group.row.get("data_source") or "")),
                routing=self._routing,
                one_row=learner.mode != "rl",
            )
            return why or (image_problem(group, batch.images, self._images) if self._looks else "")

        bad = dict(batch.invalid)
        with ThreadPoolExecutor(CHECKS) as pool:  # images are decoded
            for group, why in zip(batch.groups, pool.map(check, batch.groups), strict=True):
                if why:
                    bad[group.group] = why
        for number, why in bad.items():
            self.quarantine(batch.step, number, why)
        return msgspec.structs.replace(batch, groups=tuple(g for g in batch.groups if g.group not in bad))

    def quarantine(self, step: int, group: int, reason: str) -> None:
        """Report that a group of the claimed step cannot be trained."""
        print(f"learner: warning: group {group} of step {step} is quarantined: {reason}", flush=True)
        self.account.quarantine(step, group, reason)
        if self._archive is not None:
            self._archive.quarantine(step, group, reason)
        self._send(lambda: self.buffer.quarantine(step=step, groups=[group], reason=reason))

    def note_trained(self, batch: ClaimedBatch) -> None:
        """Record that the weights now contain the groups of this step."""
        self.account.train(batch.step, [group.group for group in batch.groups])

    def wants_publish(self, batch: ClaimedBatch) -> bool:
        """Whether to publish after this batch: not without generators, nor for a version older than theirs."""
        wanted = self._publishes and publishes(self._config, batch.step)
        return wanted and not (batch.replayed and batch.step < self._ahead)

    def settle(self) -> None:
        """Finish copying the bytes that the iterator of `publish` yielded, so that it may reuse them."""
        self.publisher.settle()

    def publish(self, version: int, weights: Weights | Fill) -> str:
        """Stage the weights of a version and return their digest. `weights` is collective and always exhausted, or
        fills a slot.
        """
        if callable(weights):
            return self.record_digest(version, self.publisher.publish(version, self.plan, weights))
        with exhaust(weights) as rest:
            manifest = self.publisher.publish(version, self.plan, rest)
        return self.record_digest(version, manifest)

    def stage_base(self, version: int, weights: Weights) -> None:
        """Stage the base weights of the adapters (version 0); after a restart without making them the target."""
        if not version:
            self._base = self.publish(0, weights)
            return
        with exhaust(weights) as rest:
            self._base = str(self.publisher.stage_base(0, self.plan, rest).digest)

    def publish_adapter(self, version: int, weights: Weights) -> str:
        """Stage a version as an adapter of the base and return its digest."""
        assert self._adapter is not None
        with exhaust(weights) as rest:
            manifest = self.publisher.publish(
                version, self._adapter.plan, rest, base=self._base, adapter=self._adapter.text
            )
        return self.record_digest(version, manifest)

    def record_digest(self, version: int, manifest: Any) -> str:
        """Keep the digest of a published version for the buffer and for checkpoints; return it."""
        self.digests[version] = manifest.digest
        for old in sorted(self.digests)[: -2 * self._config.buffer.max_staleness - 4]:
            del self.digests[old]
        return str(manifest.digest)

    def commit(self, step: int) -> None:
        """Commit the step: its groups are trained and version `step` exists."""

        def tell() -> None:
            self._history = self.buffer.commit(step=step, version=step, digest=self.digests.get(step, "")) or ""

        self._send(tell)

    def ledger(self, step: int) -> str:
        """Return the ledger for a checkpoint of `step`; the account's if the buffer does not answer."""
        answer: list[str] = []
        if self._send(lambda: answer.append(self.buffer.ledger(step=step))):
            return answer[0]
        return self.account.text(step=step, epoch=self.mark.epoch)

    def checkpointed(self, step: int, ledger: str) -> None:
        """Report that a checkpoint of `step` with this ledger is durable."""
        self.account.renew(step, ledger)
        self._send(lambda: self.buffer.checkpointed(step=step))

    # ------------------------------------------------------------ records

    def record(
        self,
        values: dict[str, float],
        batch: ClaimedBatch,
        groups: dict[str, Any] | None = None,
        *,
        logprobs: Mapping[int, list[float]] = MappingProxyType({}),
    ) -> None:
        """Write the records of a step. `logprobs`: the learner's log-probs of the logged samples, by place in the
        batch.
        """
        self._evaluations.poll()
        stats = self._records.write(values | batch.lengths | self.publisher.stats, batch, groups, logprobs)
        if self._heart is not None:
            self._heart.stats = stats

    def waits_for(self) -> str:
        """Return what the learner waits for, for heartbeats; empty while it works."""
        return self._heart.waiting_for if self._heart is not None else ""

    def set_waiting(self, what: str) -> None:
        """Tell the buffer what the learner waits for; empty: for nothing."""
        if self._heart is not None:
            self._heart.waiting_for = what


@contextmanager
def exhaust(weights: Iterable[tuple[str, Any]]) -> Iterator[Iterator[tuple[str, Any]]]:
    """Yield an iterator that is exhausted even if its reader fails: the other ranks run through it too."""
    rest = iter(weights)
    try:
        yield rest
    finally:
        for _ in rest:
            pass


def _print(text: str) -> None:
    print(f"learner: {text}", flush=True)

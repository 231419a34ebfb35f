"""The front desk of the buffer service: answers, refusals, and the messages that concern no group.

The base of `buffers.service.service.BufferService`. Hello, heartbeat, status; metrics/roles.jsonl and
metrics/buffer.jsonl.
Guarantees:
1. an answer is queued here and leaves only with the flush of its drain;
2. a process of another run, schema or model is refused at its hello (`handshake.mismatch`, `wire.schema`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.errors import UNREADABLE, AsyncRLError, HandshakeError, WireError
from asyncrl.metrics import CATALOGUE, MetricsLog
from asyncrl.metrics.length_bias import LengthWatch
from asyncrl.net.responder import Call
from asyncrl.runtime.run_dir import RunDir, endpoint, run_id
from asyncrl.wire import Buffer, Message
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.machine import Groups
from buffers.service.clock import AwakeClock
from buffers.service.replies import status_json
from buffers.stores.base import Store

ROLES = ("producer", "reward", "learner", "observer")
TOLD_S = 5.0  # a shorter standstill is not worth a line


class Poll(msgspec.Struct):
    """A request that waits here."""

    call: Call
    until: float


class Desk:
    def __init__(
        self,
        config: Config,
        *,
        groups: Groups,
        store: Store,
        evaluations: Evaluations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = AwakeClock(clock, self._stood_still)  # the simulator injects a clock of its own
        self.groups = groups
        self.evaluations = evaluations
        self.store = store
        self.bad_frames = 0
        self.counters: Counter[str] = Counter()
        run = RunDir(config.run_dir)
        self._roles_log = MetricsLog(run.metrics / "roles.jsonl")
        self._buffer_log = MetricsLog(run.metrics / "buffer.jsonl")
        self._fingerprint = ("", "")  # of whom, which
        self._sessions = 0
        self._replies: list[tuple[Call, Message, Sequence[Buffer]]] = []
        self._lease_polls: dict[str, Poll] = {}
        self._reward_polls: dict[str, Poll] = {}
        self._lengths = LengthWatch()  # the bias alarm's running means

    def _stood_still(self, seconds: float) -> None:
        """What is told in wall time goes on with the wall's."""
        self.groups.wall_offset += seconds
        if seconds >= TOLD_S:
            print(f"buffer: it stood still for {seconds:.1f} s, which count against nobody's lease", flush=True)

    def _answer(self, call: Call, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        self._replies.append((call, message, payloads))

    def _refuse(self, call: Call, error: AsyncRLError) -> None:
        self.counters[f"refused:{error.code}"] += 1
        self._answer(call, wire.Refused(error.code, error.message, error.where))

    def _check_fingerprint(self, who: str, fingerprint: str) -> None:
        owner, known = self._fingerprint
        if not fingerprint:
            return
        if known and fingerprint != known:
            raise HandshakeError("handshake.mismatch", f"{who} runs model {fingerprint}, {owner} runs {known}")
        self._fingerprint = (owner or who, fingerprint)

    def _hello(self, call: Call, now: float) -> None:
        hello: wire.Hello = call.message
        mine = run_id(self.config)
        if hello.schema != wire.SCHEMA:
            raise HandshakeError(
                "wire.schema", f"{hello.name} speaks schema {hello.schema}, this service {wire.SCHEMA}"
            )
        if hello.run_id and hello.run_id != mine:
            raise HandshakeError("handshake.mismatch", f"{hello.name} belongs to run {hello.run_id}, this is {mine}")
        if hello.role not in ROLES:
            raise WireError("wire.unexpected", f"role {hello.role!r} is unknown")
        self._check_fingerprint(hello.name, hello.fingerprint)
        if hello.role == "producer":
            self.evaluations.greet(hello.name, hello.evaluation_rows, now)
        self._sessions += 1
        shown = self._shown(hello)
        if hello.role in ("producer", "reward"):
            polls = self._lease_polls if hello.role == "producer" else self._reward_polls
            polls.pop(hello.name, None)
            self.groups.hello(hello.role, hello.name, pid=hello.pid, host=hello.host, now=now)
            self.evaluations.hello(hello.role, hello.name, now)
        endpoints = {"weightsync": endpoint(self.config, "weightsync")}
        self._answer(
            call,
            wire.Welcome(mine, self.groups.service_epoch, self._sessions, self.groups.meta.version, endpoints, *shown),
        )

    def _shown(self, hello: wire.Hello) -> tuple[str, str, int, int]:
        """Folder, nonce, size of a file and of a payload for a producer that may be on this host."""
        return "", "", 0, 0

    def _heartbeat(self, call: Call, now: float) -> None:
        beat: wire.Heartbeat = call.message
        self._check_beat(beat)
        if beat.role == "learner":
            worker = self.groups.workers.get(("learner", beat.name))
            if self.groups.meta.learner == (beat.name, beat.pid, beat.host) and worker is not None:
                worker.seen, worker.stats = now, beat.stats
                worker.waits(beat.waiting_for, now)
        else:
            self.groups.heartbeat(
                beat.role,
                beat.name,
                pid=beat.pid,
                host=beat.host,
                now=now,
                waiting_for=beat.waiting_for,
                stats=beat.stats,
                holds=beat.holds,
            )
            self.evaluations.heartbeat(beat.role, beat.name, pid=beat.pid, holds=beat.holds, now=now)
        self._roles_log.write(
            beat.stats, role=beat.role, name=beat.name, pid=beat.pid, host=beat.host, waiting_for=beat.waiting_for
        )
        cancelled = self.groups.take_cancelled(beat.name, again=True) if beat.role == "producer" else ()
        self._answer(call, wire.Ok(cancelled=cancelled))

    def _check_beat(self, beat: wire.Heartbeat) -> None:
        """Roles and metrics are those that are known; parts of the reward are named by the learner alone."""
        if beat.role not in ROLES:
            raise WireError("wire.unexpected", f"role {beat.role!r} is unknown")
        leads = beat.role == "learner" and self.groups.meta.learner == (beat.name, beat.pid, beat.host)
        unknown = [name for name in beat.stats if name not in CATALOGUE and not (leads and name.startswith("reward/"))]
        if unknown:
            raise WireError("wire.unexpected", f"metric {unknown[0][:200]!r} is not in the catalogue")

    def _status(self, call: Call, now: float) -> None:
        extra = {
            "store": self.store.kind,
            "run_id": run_id(self.config),
            "counters": {
                **self.counters,
                "bad_frames": self.bad_frames,
                **{f"discarded_checkpoints:{why}": count for why, count in sorted(self.groups.discarded.items())},
            },
            "endpoints": {name: endpoint(self.config, name) for name in ("buffer", "weightsync")},
            "evaluation": self.evaluations.status(now),
        }
        self._answer(call, wire.StatusReply(status_json(self.groups, now, extra)))

    def _tune(self, call: Call, now: float) -> None:
        ask: wire.Tune = call.message
        if ask.undo_to >= 0:
            number, changed, note = self.groups.undo_tune(ask.undo_to, author=ask.author, now=now)
        else:
            try:
                changes = msgspec.json.decode(ask.changes, type=dict[str, Any])
            except UNREADABLE as error:
                raise WireError("wire.decode", f"changes: {error}") from None
            number, changed, note = self.groups.tune(changes, author=ask.author, now=now)
        self._answer(call, wire.Tuned(number, msgspec.json.encode(changed).decode(), note))

    def _of_judges(self) -> dict[str, float]:
        """The numbers of every judge."""
        values: dict[str, float] = {}
        for one in self.groups.judges_now(self._clock()):
            family = f"judge/{one['judge']}"
            values |= {f"{family}/{name}": one[name] for name in ("waiting", "leased", "scored", "late", "failures")}
            values[f"{family}/refused"] = sum(one["refused"].values())
            if one["call_s"] is not None:
                values[f"{family}/call_s"] = one["call_s"]
        return values

    def write_metrics(self, **labels: Any) -> None:
        """One line of metrics/buffer.jsonl."""
        values = {
            **self.groups.ledger_counts(),
            "outstanding": self.groups.outstanding,
            "version": self.groups.meta.version,
            "ingest_bytes": self.counters["ingest_bytes"],
            "duplicates": self.counters["duplicates"],
            "bad_frames": self.bad_frames,
            "discarded_checkpoints": sum(self.groups.discarded.values()),
            **self._lengths.values(),
            **self._of_judges(),
        }
        self._buffer_log.write(values, **labels)

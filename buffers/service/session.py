"""Handshake, heartbeat, status and tuning requests; the logs metrics/roles.jsonl and metrics/buffer.jsonl.

Guarantee: a process of another run, schema or model is refused at its hello (`handshake.mismatch`, `wire.schema`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.errors import UNREADABLE, HandshakeError, WireError
from asyncrl.metrics import CATALOGUE, MetricsLog
from asyncrl.net.responder import Call
from asyncrl.runtime.run_dir import RunDir, endpoint, run_id
from buffers.groups.diagnosis import describe_judges
from buffers.groups.group_table import ledger_counts
from buffers.payloads.record_format import GUEST_BYTES
from buffers.service.context import Context
from buffers.service.producer_requests import ProducerRequests
from buffers.service.replies import status_json
from buffers.service.reward_requests import RewardRequests

ROLES = ("producer", "reward", "learner", "observer")
MOST_ROLES_BYTES = 256 << 20  # of metrics/roles.jsonl: guests write it
WAIT_CHARS = 500  # of the reason why a process waits


class Session:
    """Messages that concern a process instead of a group."""

    def __init__(self, context: Context, producers: ProducerRequests, rewards: RewardRequests, *, store: str) -> None:
        self.context = context
        self.store = store  # its kind, for the status
        self._polls = {"producer": producers.polls, "reward": rewards.polls}
        run = RunDir(context.config.run_dir)
        self._run_id = run_id(context.config)
        self._endpoints = {name: endpoint(context.config, name) for name in ("buffer", "weightsync")}
        self._roles_log = MetricsLog(run.metrics / "roles.jsonl", most_bytes=MOST_ROLES_BYTES)
        self._buffer_log = MetricsLog(run.metrics / "buffer.jsonl")
        self._sessions = 0

    def hello(self, call: Call) -> None:
        """A process introduces itself and holds nothing."""
        hello: wire.Hello = call.message
        context, machine = self.context, self.context.machine
        mine = self._run_id
        if hello.schema != wire.SCHEMA:
            raise WireError("wire.schema", f"{hello.name} speaks schema {hello.schema}, this service {wire.SCHEMA}")
        if hello.run_id and hello.run_id != mine:
            raise HandshakeError("handshake.mismatch", f"{hello.name} belongs to run {hello.run_id}, this is {mine}")
        if hello.role not in ROLES:
            raise WireError("wire.unexpected", f"role {hello.role!r} is unknown")
        context.check_fingerprint(hello.name, hello.fingerprint, leads=hello.role == "learner")
        if hello.role == "producer":
            context.evaluations.greet(hello.name, hello.evaluation_rows)
        self._sessions += 1
        if hello.role in self._polls:
            self._polls[hello.role].remove(hello.name)
            machine.hello(hello.role, hello.name, pid=hello.pid, host=hello.host, now=context.now)
            context.evaluations.hello(hello.role, hello.name)
        files: tuple[str, str, int, int] = ("", "", 0, 0)
        # On this host they share files with the service. With a stand-by all bytes are written by one process.
        if hello.role in ("producer", "reward") and not context.config.network.standby:
            buffer = context.config.buffer
            files = (*context.segments.location(), min(buffer.segment_bytes, GUEST_BYTES), buffer.place_bytes)
        endpoints = {"weightsync": self._endpoints["weightsync"]}
        version = machine.table.meta.version
        welcome = wire.Welcome(mine, machine.service_epoch, self._sessions, version, endpoints, *files)
        context.answer(call, welcome)

    def heartbeat(self, call: Call) -> None:
        """A process is alive."""
        beat: wire.Heartbeat = call.message
        context, machine = self.context, self.context.machine
        leads = beat.role == "learner" and machine.table.meta.learner == (beat.name, beat.pid, beat.host)
        _check_beat(beat, leads=leads)
        if beat.role == "learner":
            worker = machine.workers.get("learner", beat.name)
            if leads and worker is not None:
                worker.seen, worker.stats = context.now, beat.stats
                worker.update_wait(beat.waiting_for, context.now)
        else:
            machine.heartbeat(
                beat.role,
                beat.name,
                pid=beat.pid,
                host=beat.host,
                now=context.now,
                waiting_for=beat.waiting_for[:WAIT_CHARS],
                stats=beat.stats,
                holds=beat.holds,
            )
            context.evaluations.heartbeat(beat.role, beat.name, pid=beat.pid, holds=beat.holds)
        if leads or context.peers.may_log(beat.role, beat.name, context.now):
            waits = beat.waiting_for[:WAIT_CHARS]
            self._roles_log.try_write(
                beat.stats, role=beat.role, name=beat.name, pid=beat.pid, host=beat.host, waiting_for=waits
            )
        cancelled = machine.workers.take_cancelled(beat.name, again=True) if beat.role == "producer" else ()
        # Often enough to count as alive, for leases and in the status.
        longest_s = min(context.config.buffer.lease_timeout_s / 5, context.config.run.silent_timeout_s / 2)
        every_s = context.peers.interval_s(longest_s)
        if every_s <= context.config.log.heartbeat_s:
            every_s = 0.0
        context.answer(call, wire.Ok(cancelled=cancelled, every_s=every_s))

    def status(self, call: Call) -> None:
        """A `StatusRequest`."""
        context = self.context
        discarded = sorted(context.machine.partial.discarded.items())
        extra = {
            "store": self.store,
            "run_id": self._run_id,
            "counters": {
                **context.counters,
                "bad_frames": context.bad_frames,
                **{f"discarded_checkpoints:{why}": count for why, count in discarded},
            },
            "endpoints": self._endpoints,
            "evaluation": context.evaluations.status(),
        }
        context.answer(call, wire.StatusReply(status_json(context.machine, context.evaluations, extra)))

    def tune(self, call: Call) -> None:
        """A `Tune` message: change settings of the running system, or undo changes."""
        ask: wire.Tune = call.message
        machine, now = self.context.machine, self.context.now
        if ask.undo_to >= 0:
            number, changed, note = machine.undo_tune(ask.undo_to, author=ask.author, now=now)
        else:
            try:
                changes = msgspec.json.decode(ask.changes, type=dict[str, Any])
            except UNREADABLE as error:
                raise WireError("wire.decode", f"changes: {error}") from None
            number, changed, note = machine.tune(changes, author=ask.author, now=now)
        self.context.answer(call, wire.Tuned(number, msgspec.json.encode(changed).decode(), note))

    # ------------------------------------------------------------ metrics

    def write_metrics(self, **labels: Any) -> None:
        """Append a line to metrics/buffer.jsonl."""
        context, machine = self.context, self.context.machine
        values = {
            **ledger_counts(machine.table),
            "outstanding": machine.table.outstanding,
            "version": machine.table.meta.version,
            "ingest_bytes": context.counters["ingest_bytes"],
            "duplicates": context.counters["duplicates"],
            "bad_frames": context.bad_frames,
            "discarded_checkpoints": sum(machine.partial.discarded.values()),
            **context.lengths.values(),
            **self._judge_metrics(),
        }
        self._buffer_log.try_write(values, **labels)

    def _judge_metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for one in describe_judges(self.context.machine.scoring, self.context.evaluations.table.queue):
            family = f"judge/{one['judge']}"
            values |= {f"{family}/{name}": one[name] for name in ("waiting", "leased", "scored", "late", "failures")}
            values[f"{family}/refused"] = sum(one["refused"].values())
            if one["call_s"] is not None:
                values[f"{family}/call_s"] = one["call_s"]
        return values

    def close(self) -> None:
        self._roles_log.close()
        self._buffer_log.close()


def _check_beat(beat: wire.Heartbeat, *, leads: bool) -> None:
    """Roles and metrics are known ones; only the registered learner reports parts of the reward."""
    if beat.role not in ROLES:
        raise WireError("wire.unexpected", f"role {beat.role!r} is unknown")
    unknown = [name for name in beat.stats if name not in CATALOGUE and not (leads and name.startswith("reward/"))]
    if unknown:
        raise WireError("wire.unexpected", f"metric {unknown[0][:200]!r} is not in the catalogue")

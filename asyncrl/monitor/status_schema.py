"""The published form of `asyncrl status --json`: the answers of both services and the state of a run's files.

`docs/status.schema.json` is generated from here. Guarantees:
1. a field keeps its name and meaning while `schema` keeps its number; new fields have defaults;
2. missing values have their defaults; a service without an answer has only `error` and `code`. Times are seconds, `at`
   and `t` since the epoch; groups are prompts with all their samples.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1


class Launcher(msgspec.Struct):
    """A living launcher on this host."""

    target: str  # all, buffer, producers, rewards, learner, weightsync
    pid: int


class Alive(msgspec.Struct):
    """The newest sign of life of a role, from its file in the run folder."""

    role: str
    pid: int
    host: str
    age_s: float  # since the sign
    state: str = ""  # of the process where it is on this host (R, S, T for stopped), "ended", else empty
    waiting_for: str = ""  # empty: it works
    waiting_s: float = 0.0  # for how long without a break


class Worker(msgspec.Struct):
    """A producer, reward worker or learner, as the buffer knows it."""

    name: str
    pid: int
    host: str
    age_s: float | None = None  # since its last heartbeat
    waiting_for: str = ""
    waiting_s: float = 0.0
    stats: dict[str, float] = {}  # of its last heartbeat; names: docs/metrics.md
    judge: str = ""  # whose samples a reward worker scores


class Judge(msgspec.Struct):
    """Reward workers of one kind, and the samples that are for them."""

    judge: str
    workers: int = 0
    waiting: int = 0  # samples that no worker has leased
    leased: int = 0  # with workers
    scored: int = 0  # since the service started
    late: int = 0  # scores that came after another worker's
    failures: int = 0
    refused: dict[str, int] = {}  # scores by reason
    call_s: float | None = None  # mean time of a call


class Fault(msgspec.Struct):
    """Why the buffer ends the run."""

    code: str
    message: str


class Tuning(msgspec.Struct):
    """Settings that were changed while the run goes on."""

    number: int = 0  # of the last change; 0: none
    author: str = ""
    changed: dict[str, Any] = {}  # key -> value in force
    settings: dict[str, Any] = {}  # every setting that can be tuned, as it is in force
    depth: int = 0  # batches that may be in flight in addition to the one in training
    batch_groups: int = 0  # groups of the next batch


class Buffer(msgspec.Struct):
    """What the buffer says."""

    error: str = ""
    code: str = ""  # of the error: docs/errors.md
    role: str = "buffer"
    run_id: str = ""
    store: str = ""  # redis, sqlite
    service_epoch: int = 0
    ledger: dict[str, int] = {}  # issued, and groups by state: leased, unscored, ready, claimed, trained, retired, ...
    by_state: dict[str, int] = {}  # the same by the names of the states
    dropped: dict[str, int] = {}  # groups by reason
    dead: dict[str, int] = {}
    version: int = 0  # weight version of the newest commit
    step: int = 0
    epoch: int = 0  # of the learner
    outstanding: int = 0  # leased + unscored + ready + claimed
    total_groups: int = 0  # that the run will train
    done: bool = False
    fault: Fault | None = None
    learner: Worker | None = None
    producers: list[Worker] = []
    rewards: list[Worker] = []
    judges: list[Judge] = []
    waiting_for: str = ""  # why the learner's next batch is not ready
    tuning: Tuning = msgspec.field(default_factory=Tuning)
    counters: dict[str, float] = {}  # since the service started
    endpoints: dict[str, str] = {}
    evaluation: dict[str, Any] = {}  # running, ended, last, ...; empty where evaluations are off


class Member(msgspec.Struct):
    """A generator, as the weight-sync service knows it."""

    state: str  # joining, stale, syncing, serving, dead
    version: int = -1
    digest: str = ""
    pid: int = 0
    host: str = ""
    silent_s: float = 0.0
    why: str = ""  # why it does not serve
    said: str = ""  # an error that it reported outside of rounds
    relay: str = ""  # where it passes versions on
    transport: str = ""
    encoding: str = ""
    source: str = ""
    transport_why: str = ""


class WeightSync(msgspec.Struct):
    """What the weight-sync service says."""

    error: str = ""
    code: str = ""
    epoch: int = 0
    version: int = -1  # the newest that was published; -1: none
    digest: str = ""
    bytes: int = 0
    publisher: str = ""
    committed: int = -1  # held by the generators that serve
    round: int = 0
    round_state: str = ""
    members: dict[str, Member] = {}
    transport: str = ""
    received: int = 0  # frames since the service started
    bad_frames: int = 0
    gone_peers: int = 0


class Status(msgspec.Struct, kw_only=True):
    """The whole. With `--connect` alone `buffer` (and what it leads to) is all there is."""

    schema: int = SCHEMA
    at: float = 0.0
    run: str = ""  # the folder
    name: str = ""
    steps: int = 0  # that the run will take
    silent_timeout_s: float = 10.0
    launchers: list[Launcher] = []
    last_step: dict[str, Any] = {}  # the newest line of metrics/learner.jsonl
    result: dict[str, Any] = {}  # how it ended; empty while it goes on
    queue: dict[str, Any] = {}  # the newest line of metrics/buffer.jsonl
    workers: dict[str, dict[str, Any]] = {}  # the newest line of each name in metrics/roles.jsonl
    alive: dict[str, Alive] = {}
    buffer: Buffer = msgspec.field(default_factory=Buffer)
    weightsync: WeightSync | None = None


def schema_text() -> str:
    """JSON schema of the whole: docs/status.schema.json."""
    found = msgspec.json.schema(Status)
    found = {
        "$comment": f"asyncrl status --json, schema {SCHEMA}. Generated from asyncrl/monitor/status_schema.py.",
        **found,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n"

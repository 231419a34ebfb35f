"""Messages that every role and every service exchange: handshake, heartbeat, status, tuning."""

from __future__ import annotations

from asyncrl.wire.base import SCHEMA, Message, Name, Version, Whole


class Hello(Message, frozen=True, tag=1):
    """A role introduces itself to a service. Answer: `Welcome` or `Refused`."""

    role: Name  # producer | reward | learner | observer
    name: Name
    pid: Whole
    host: Name
    run_id: str = ""  # empty: accept any run
    fingerprint: str = ""  # model fingerprint; empty: not checked
    schema: int = SCHEMA
    evaluation_rows: Whole = 0  # prompts of an evaluation in this producer's data; 0: not read yet


class Welcome(Message, frozen=True, tag=2):
    """The service accepts; `session` is a unique number of this process."""

    run_id: str
    service_epoch: int
    session: int
    version: int  # newest committed version the service knows
    endpoints: dict[str, str] = {}  # addresses of the run's other services by name
    segments: str = ""  # folder of the payloads, for a producer or reward worker on the same host
    nonce: str = ""  # content of the file `nonce` there: a process that reads it sees the same folder
    segment_bytes: int = 0  # size of a file that a producer writes there
    place_bytes: int = 0  # smallest payload that should go by file


class Refused(Message, frozen=True, tag=3):
    """The service refused the request and changed nothing. `code` is in `asyncrl.errors.CATALOGUE`."""

    code: str
    message: str
    where: str = ""


class Ok(Message, frozen=True, tag=4):
    """Done. In answers to a producer's heartbeat, `cancelled` are leases (group, token) whose samples are no longer
    needed. In the answer to a `Commit`, `detail` is the head of the history's chain, which the learner archives.
    `every_s`: in answers to heartbeats of a large fleet, the interval of heartbeats and of requests without work.
    """

    detail: str = ""
    cancelled: tuple[tuple[int, int], ...] = ()
    every_s: float = 0.0


class Heartbeat(Message, frozen=True, tag=5):
    """Sent every few seconds by every worker; renews its leases. `stats`: metrics by catalogue name. Answer: `Ok`.

    A producer lists the leases that it works on (`holds`: group, token). Its other leases are lost after a while: their
    grant never arrived, or a store that was restored to an older state forgot their samples.
    """

    role: Name
    name: Name
    pid: Whole
    host: Name
    waiting_for: str  # empty while it works; else the reason why it waits
    stats: dict[str, float] = {}
    holds: tuple[tuple[int, int], ...] | None = None  # None: unknown


class StatusRequest(Message, frozen=True, tag=6):
    """Ask a service for its state. Answer: `StatusReply`."""


class StatusReply(Message, frozen=True, tag=7):
    """The state of a service as JSON text (`asyncrl status --json` prints it)."""

    json: str


class Stop(Message, frozen=True, tag=8):
    """Ask a service to end after it has written everything. Answer: `Ok`."""

    reason: str


class Replies(Message, frozen=True, tag=9):
    """Several answers in one message, to requests of kind 2: (request number, header of the answer), without payloads.

    A burst of small answers then wakes both ends up only once.
    """

    answers: tuple[tuple[int, bytes], ...]


class Tune(Message, frozen=True, tag=10):
    """Change settings of a running system. `changes`: JSON object, key -> value. Answer: `Tuned` or `Refused`.

    With `undo_to` >= 0 `changes` is empty and the settings of that number are restored (0: those of the TOML).
    """

    changes: str
    author: str
    undo_to: Version = -1


class Tuned(Message, frozen=True, tag=11):
    """The change has the number `number` and is in force; `changed`: JSON object, key -> [old, new]."""

    number: int
    changed: str
    note: str = ""  # settings that take effect later, and when

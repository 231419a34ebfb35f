"""Messages between the learner and the buffer: registration, batches, commits, checkpoints, evaluations."""

from __future__ import annotations

from asyncrl.wire.base import Message, Name, Place, Version, Whole


class Register(Message, frozen=True, tag=40):
    """The learner starts. `step` and `ledger` come from its checkpoint (0 and empty without one).

    Answer: `Registered`, or `Refused` with `learner.duplicate`.
    """

    name: Name
    pid: Whole
    host: Name
    step: Whole
    ledger: str  # JSON of buffers.groups.records.Ledger as it was saved in the checkpoint
    takeover: bool = False
    fingerprint: str = ""
    digests: dict[Whole, str] = {}
    once: int = 0  # random: a late copy with the same number registers nothing


class Registered(Message, frozen=True, tag=41):
    """`epoch` fences the learner; `replay_to` is the last step whose batch is recorded."""

    epoch: int
    run_id: str
    replay_to: int
    segments: str = ""  # folder of the payloads, for a learner on the same host
    nonce: str = ""  # content of the file `nonce` there: a process that reads it sees the same folder


class Claim(Message, frozen=True, tag=42):
    """Ask for the batch of `step`, which starts from `version`; waits up to `wait_s`. Answer: `Batch` or `NotYet`.

    Idempotent: the same step gives the same groups in the same order.
    """

    epoch: Whole
    step: Whole
    version: Version
    wait_s: float
    by_place: bool = False  # answer with places in the segment files instead of payload frames


class NotYet(Message, frozen=True, tag=43):
    """The batch is not complete; `diagnosis` names the processes that the run waits for."""

    diagnosis: str
    ready: int
    wanted: int


class GroupHead(Message, frozen=True):
    """One group of a batch. `records` are encoded `Samples`, one payload frame each, in the order of arrival."""

    group: int
    bound: int  # the largest lag this group may have
    row: str
    records: tuple[bytes, ...]
    rewards: dict[int, float]  # sample index -> reward
    parts: dict[int, dict[str, float]]
    times: dict[str, float] = {}  # issued, unscored, ready, claimed: seconds since the epoch


class Batch(Message, frozen=True, tag=44):
    """The batch of a step; the payload frames, or their `places`, follow in the order of the records."""

    step: int
    version: int
    groups: tuple[GroupHead, ...]
    replayed: bool = False
    ledger: dict[str, int] = {}
    places: tuple[Place, ...] = ()
    tuning: str = ""  # JSON object: the learner's settings changed by `asyncrl tune`, as recorded with this batch
    lengths: dict[str, float] = {}  # mean lengths so far, by metric: trained and issued (length bias)


class Commit(Message, frozen=True, tag=45):
    """The optimizer step is done: the step's groups are TRAINED and the next claim starts from `version`.

    `digest` is the digest of the weights of `version`. Answer: `Ok`. Idempotent. `groups` are the groups that the
    weights were trained on in this step. If the recorded batch differs, the service has lost state and refuses
    (`buffer.lost_state`).
    """

    epoch: Whole
    step: Whole
    version: Whole
    digest: str = ""
    groups: tuple[int, ...] | None = None  # None: unknown


class Quarantine(Message, frozen=True, tag=46):
    """Groups of a claimed step that the learner cannot use (validation, packer, loss). Answer: `Ok`; they are DEAD."""

    epoch: Whole
    step: Whole
    groups: tuple[int, ...]
    reason: str


class LedgerRequest(Message, frozen=True, tag=47):
    """Ask for the ledger to store in a checkpoint of `step`. Answer: `LedgerReply`."""

    epoch: Whole
    step: Whole


class LedgerReply(Message, frozen=True, tag=48):
    """The ledger as JSON: what `Register` takes back."""

    ledger: str


class Checkpointed(Message, frozen=True, tag=49):
    """A checkpoint that contains `step` is durable: groups trained up to it are RETIRED. Answer: `Ok`."""

    epoch: Whole
    step: Whole


class Goodbye(Message, frozen=True, tag=50):
    """The learner ends; `done` when the run is complete. Answer: `Ok`."""

    epoch: Whole
    done: bool
    reason: str = ""
    step: Whole = 0  # steps in its weights: a service that knows fewer has lost some


class EvaluationsRequest(Message, frozen=True, tag=51):
    """Ask for evaluations that ended after those that the learner knows. Answer: `EvaluationsReply`."""

    seen: int  # `round` of the last known one, 0 without one: rounds grow, even if a store is lost


class EvaluationsReply(Message, frozen=True, tag=52):
    """`ended`: a JSON line of metrics each; `running`: the step whose evaluation runs or waits, or empty."""

    ended: tuple[str, ...]
    running: str = ""

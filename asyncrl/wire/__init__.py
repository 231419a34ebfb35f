"""Every message that crosses a process, and the one boundary that decodes them.

A message on the wire is

    [prefix 32 bytes][header: msgpack of a tagged, array-like, frozen struct][payload]...

The prefix is `magic 4s, schema u8, kind u8, frames u16, request u64, payload_bytes u64, check u64`, little-endian. The
check is xxh3_64 of the header and all payload frames, xor xxh3_64 of the prefix before it: a flipped bit of the request
number must not join an answer to another request. Guarantees:
1. `decode` is the only decoder; whatever a frame holds, it raises nothing but `WireError` (faults.md F19, F20);
2. decoding is strict: unknown tags, surplus fields, other schema numbers and sizes over the limit are errors;
3. no pickle; arrays are raw little-endian buffers that are read without a copy (`numpy.frombuffer`, read-only);
4. new fields have defaults and go last; golden bytes of every message stand in `tests/unit/golden_messages.json`.
It does not validate meaning (token ids, log-probs): `validate_samples` does, at ingest and before batching.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Union

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from asyncrl.errors import UNREADABLE, WireError
from asyncrl.versions import Runs

SCHEMA: Final = 1
MAGIC: Final = b"ARL1"
PREFIX: Final = struct.Struct("<4sBBHQQQ")
_HEAD: Final = struct.Struct("<4sBBHQQ")  # the prefix before its check
REQUEST: Final = 0
REPLY: Final = 1
REQUEST_MANY: Final = 2  # a request whose asker also takes its answer as one of several in `Replies`
ALIGNMENT: Final = 64
DTYPES: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(f"<{name}") for name in ("i4", "f4", "u1", "i8")}
MAX_HEADER_BYTES: Final = 16 << 20
#: A sending copy is cheaper than pyzmq's release bookkeeping below this size (measured crossover 84 KB to 1 MB).
COPY_THRESHOLD_BYTES: Final = 256 << 10

LARGEST: Final = 1 << 62  # what comes after it still fits where 64 bits are all there is
Whole = Annotated[int, Meta(ge=0, le=LARGEST)]
Version = Annotated[int, Meta(ge=-1, le=LARGEST)]  # -1: none yet
Name = Annotated[str, Meta(max_length=200)]  # of a process or a role: services keep tables by it
Buffer = bytes | bytearray | memoryview
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages: frozen, positional on the wire, surplus fields refused. They cannot form cycles: no GC."""


# ---------------------------------------------------------------- general


class Hello(Message, frozen=True, tag=1):
    """A role introduces itself to a service. Answer: `Welcome` or `Refused`."""

    role: Name  # producer | reward | learner | observer
    name: Name
    pid: Whole
    host: Name
    run_id: str = ""  # empty: accept any run
    fingerprint: str = ""  # model fingerprint; empty: not checked
    schema: int = SCHEMA
    evaluation_rows: Whole = 0  # prompts of an evaluation, as this producer reads them; 0: it has not looked


class Welcome(Message, frozen=True, tag=2):
    """The service accepts; `session` is a number of its own for this process."""

    run_id: str
    service_epoch: int
    session: int
    version: int  # newest committed version the service knows
    endpoints: dict[str, str] = {}  # address of the run's other services by name
    segments: str = ""  # folder of the payloads, for a producer on the same host
    nonce: str = ""  # content of the file `nonce` there: who reads it sees the same folder
    segment_bytes: int = 0  # size of a file that a producer writes there
    place_bytes: int = 0  # payloads of so many bytes and more are worth it


class Refused(Message, frozen=True, tag=3):
    """The service did not do it. `code` stands in `asyncrl.errors.CATALOGUE`; nothing was changed."""

    code: str
    message: str
    where: str = ""


class Ok(Message, frozen=True, tag=4):
    """Done. To a producer's heartbeat: `cancelled` are leases (group, token) whose samples nobody wants any more."""

    detail: str = ""
    cancelled: tuple[tuple[int, int], ...] = ()


class Heartbeat(Message, frozen=True, tag=5):
    """Sent every few seconds by every worker; renews its leases. `stats`: metrics by catalogue name. Answer: `Ok`.

    A producer names the leases that it works on (`holds`: group, token): others of its name are lost after a while, as
    their grant never arrived, or its samples were taken by a store that went back.
    """

    role: Name
    name: Name
    pid: Whole
    host: Name
    waiting_for: str  # empty while it works; else what it waits for
    stats: dict[str, float] = {}
    holds: tuple[tuple[int, int], ...] | None = None  # None: not said


class StatusRequest(Message, frozen=True, tag=6):
    """Ask a service for its state. Answer: `StatusReply`."""


class StatusReply(Message, frozen=True, tag=7):
    """The state of a service as JSON text (`asyncrl status --json` prints it)."""

    json: str


class Stop(Message, frozen=True, tag=8):
    """Ask a service to end after it has written everything. Answer: `Ok`."""

    reason: str


class Replies(Message, frozen=True, tag=9):
    """Several answers in one message, to requests of kind 2: (request number, header of the answer), no payloads.

    Bursts of small answers cost a wake-up of both ends each; together they cost one.
    """

    answers: tuple[tuple[int, bytes], ...]


class Tune(Message, frozen=True, tag=10):
    """Change settings of a running system. `changes`: JSON object, key -> value. Answer: `Tuned` or `Refused`.

    With `undo_to` >= 0 `changes` is empty and the settings become those of that number again (0: of the TOML).
    """

    changes: str
    author: str
    undo_to: Version = -1


class Tuned(Message, frozen=True, tag=11):
    """The change has the number `number` and is in force; `changed`: JSON object, key -> [old, new]."""

    number: int
    changed: str
    note: str = ""  # what is not in force at once, and when it will be


# ---------------------------------------------------------------- producers


class LeaseRequest(Message, frozen=True, tag=20):
    """Ask for up to `max_groups` groups to generate; waits in the service up to `wait_s`. Answer: `Leases`."""

    producer: Name
    engine_version: Version
    max_groups: Whole
    wait_s: float


class Lease(Message, frozen=True):
    """One group to generate. `token` fences: an answer under an older token of the group is refused.

    `missing` are the sample indices still wanted (all of them at the first attempt).
    """

    group: int
    token: int
    attempt: int
    missing: tuple[int, ...]
    seed: int
    deadline_version: int


class Begun(Message, frozen=True):
    """The beginning of a sample that another producer could not finish. It has a payload frame of its own with
    `response` i4 `[length]` and `logprobs` f4 `[length]`; `digests` are of the versions in `runs`.
    """

    group: int
    index: int
    length: int
    runs: Runs
    digests: dict[int, str]
    fields: tuple[Field, ...]


class Leases(Message, frozen=True, tag=21):
    """Granted leases, maybe none; `reason` says what a producer without work waits for, `done` that none will come.

    `begun`: what is there of missing samples, to be continued from there or begun anew.
    """

    leases: tuple[Lease, ...]
    version: int
    reason: str = ""
    done: bool = False
    begun: tuple[Begun, ...] = ()


class Field(Message, frozen=True):
    """One array inside a payload buffer."""

    name: str
    dtype: str  # a key of DTYPES
    offset: int
    count: int


class SampleHead(Message, frozen=True):
    """What is known of one sample beside its arrays.

    `length` response tokens; `runs` cover them; `finish` is stop | length | abort.

    `rows`: where the context of a session was not a pure extension of what came before, the tokens of several
    sequences stand in one sample. A row that starts at token `start` of the response has a prompt of its own instead of
    the group's: its first `prompt_tokens` tokens, which `mask` leaves out. Without a row that starts at 0 the first
    sequence goes on from the group's prompt. `turns`: rewards of single turns, each at the turn's last token; the
    sample's reward contains them.
    """

    index: int
    length: int
    finish: str
    runs: Runs
    rows: tuple[tuple[int, int], ...] = ()  # (start, prompt_tokens), ascending
    turns: tuple[tuple[int, float], ...] = ()  # (place of a sampled token, reward), ascending


class Samples(Message, frozen=True, tag=22):
    """Finished samples of one group. Answer: `SamplesReply`.

    The payload holds `prompt` i4 `[P]`, `response` i4 `[sum T]`, `logprobs` f4 `[sum T]` (of the distribution sampled
    from) and, where a token was not sampled by the policy, `mask` u1 `[sum T]`.
    """

    producer: Name
    group: int
    token: int
    samples: tuple[SampleHead, ...]
    digests: dict[Whole, str]  # version -> digest of the weights that this engine loaded for it
    fields: tuple[Field, ...]
    row: str  # JSON of the prompt's row: data_source, ground_truth, extra_info; at the first answer of a lease
    prompt_tokens: int
    logprobs_of: str = "processed"  # processed: after temperature; raw: temperature 1
    rewards: dict[int, float] = {}  # from an environment that scores itself: these samples skip the reward workers
    parts: dict[int, dict[str, float]] = {}  # of these rewards, by name


class SamplesReply(Message, frozen=True, tag=23):
    """What became of them: `accepted`, `duplicate`, or refused with a reason per sample index."""

    accepted: tuple[int, ...]
    duplicate: tuple[int, ...] = ()
    refused: dict[int, str] = {}
    cancelled: tuple[tuple[int, int], ...] = ()  # leases (group, token): generate nothing more for them


class Place(Message, frozen=True):
    """Where a record lies in a segment file; `checksum` is xxh3_64 of its header and payload."""

    segment: int
    offset: int
    header_bytes: int
    payload_bytes: int
    checksum: int


class SamplesAt(Message, frozen=True, tag=25):
    """Finished samples that a producer on the service's host wrote into a file of its own: header and payload of a
    `Samples`. Answer: `SamplesReply`; `Refused` with `wire.place` where they are not there: then they are sent.
    """

    producer: Name
    place: Place


class Piece(Message, frozen=True):
    """Tokens `start .. start + count` of a sample that is being generated; `runs` cover these."""

    index: int
    start: int
    count: int
    runs: Runs


class Pieces(Message, frozen=True, tag=28):
    """Checkpoints of samples under way, of one group. Answer: `PiecesReply`.

    The payload holds `response` i4 `[sum count]` and `logprobs` f4 `[sum count]`, in the order of `samples`.
    """

    producer: Name
    group: int
    token: int
    samples: tuple[Piece, ...]
    digests: dict[Whole, str]  # version -> digest of the weights that this engine loaded for it
    fields: tuple[Field, ...]


class PiecesReply(Message, frozen=True, tag=29):
    """`kept`: sample -> tokens of it that the service holds now; the next piece starts there. `refused`: why a sample
    needs no more of them."""

    kept: dict[int, int]
    refused: dict[int, str] = {}
    cancelled: tuple[tuple[int, int], ...] = ()  # leases (group, token): generate nothing more for them


class LeaseReturn(Message, frozen=True, tag=24):
    """A producer gives leases back (it stops, or cannot make them). Answer: `Ok`.

    With `dead` set the group is not tried again: the prompt itself is at fault (too long, not encodable).
    """

    producer: Name
    groups: tuple[tuple[int, int], ...]  # (group, token)
    reason: str
    dead: bool = False


# ---------------------------------------------------------------- rewards


class RewardRequest(Message, frozen=True, tag=30):
    """Ask for up to `max_samples` unscored samples; waits up to `wait_s`. Answer: `RewardWork` + one payload each."""

    worker: Name
    max_samples: Whole
    wait_s: float
    judge: Name = ""  # samples that this judge has to score; empty: the default one


class RewardItem(Message, frozen=True):
    """One sample to score. Its payload holds `prompt` i4 `[P]`, `response` i4 `[T]` and, where some tokens were not
    sampled by the policy, `mask` u1 `[T]`; `rows` as in `SampleHead`.
    """

    group: int
    index: int
    token: int  # fences this reward lease
    attempt: int
    row: str  # JSON
    finish: str
    fields: tuple[Field, ...]
    judge: str = ""  # by whom it is to be scored
    rows: tuple[tuple[int, int], ...] = ()


class RewardWork(Message, frozen=True, tag=31):
    """Samples to score, maybe none."""

    items: tuple[RewardItem, ...]
    done: bool = False


class Score(Message, frozen=True):
    """The reward of one sample: the weighted sum and its parts by name."""

    group: int
    index: int
    token: int
    reward: float
    parts: dict[str, float] = {}
    answer: str = ""  # that the function found in the response, where it says so
    text: str = ""  # of the response, for samples of an evaluation alone


class RewardFailure(Message, frozen=True):
    """A reward that could not be computed. Never a reward of 0: the sample is tried again elsewhere."""

    group: int
    index: int
    token: int
    reason: str  # raised | timeout | memory | not_finite | died | parts
    detail: str = ""


class Scores(Message, frozen=True, tag=32):
    """Scores and failures. Answer: `ScoresReply`."""

    worker: Name
    scores: tuple[Score, ...]
    failures: tuple[RewardFailure, ...] = ()
    reward_version: str = ""
    judge: Name = ""  # for whom the worker scores: one message is of one judge


class ScoresReply(Message, frozen=True, tag=33):
    """How many were taken; refused ones (old token, unknown group) by `group:index` with a reason."""

    accepted: int
    refused: dict[str, str] = {}


# ---------------------------------------------------------------- learner


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
    once: int = 0  # random: a copy that arrives late is known by it and registers nothing


class Registered(Message, frozen=True, tag=41):
    """`epoch` fences the learner; `replay_to` is the last step whose batch is recorded."""

    epoch: int
    run_id: str
    replay_to: int
    segments: str = ""  # folder of the payloads, for a learner on the same host
    nonce: str = ""  # content of the file `nonce` there: who reads it sees the same folder


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
    """The batch is not complete; `diagnosis` names who is waited for."""

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
    lengths: dict[str, float] = {}  # mean lengths so far, by metric: trained against issued (the bias alarm)


class Commit(Message, frozen=True, tag=45):
    """The optimizer step is done: the step's groups are TRAINED and the next claim starts from `version`.

    `digest` is that of the weights of `version`. Answer: `Ok`. Idempotent. `groups` are those that the weights hold of
    the step: where the recorded batch is another one, the service has lost something and says so (`buffer.lost_state`).
    """

    epoch: Whole
    step: Whole
    version: Whole
    digest: str = ""
    groups: tuple[int, ...] | None = None  # None: not said


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
    """The learner asks for evaluations that ended after those it knows. Answer: `EvaluationsReply`."""

    seen: int  # `round` of the last one that it knows, 0 without one: these numbers grow, over any loss of a store


class EvaluationsReply(Message, frozen=True, tag=52):
    """`ended`: JSON, a line of metrics each; `running`: of which step one runs or waits, in words, else empty."""

    ended: tuple[str, ...]
    running: str = ""


# ---------------------------------------------------------------- weight sync


class Tensor(Message, frozen=True):
    """One tensor of a manifest: where its bytes lie. `dtype` is a safetensors name (F32, BF16, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class Manifest(Message, frozen=True):
    """What a version consists of. `plan` is the digest of the layout; `digest` that of all bytes in bucket order.

    `encoding` "full": all weights. "adapter": the tensors of a LoRA adapter on top of weights with the digest `base`;
    `adapter` is its configuration as JSON, and both enter `digest`.
    """

    version: Whole
    plan: str
    bucket_bytes: tuple[int, ...]
    bucket_digests: tuple[str, ...]
    digest: str
    encoding: str = "full"
    base: str = ""
    adapter: str = ""
    signature: str = ""  # by the key of the run, where it has one: of all the other fields


class Hop(Message, frozen=True):
    """A lossless step from one version to the next: `nbytes[k]` encoded bytes turn bucket k of `base` into the next."""

    base: Whole
    base_digest: str
    nbytes: tuple[int, ...]


class BaseOffer(Message, frozen=True):
    """The whole weights that an adapter is added to, offered beside it to those who lack them."""

    manifest: Manifest
    offers: dict[str, str]
    tensors: tuple[Tensor, ...] = ()  # sent once per layout


class Publish(Message, frozen=True, tag=60):
    """The learner offers `manifest` on the transports of `offers` (name -> address). Answer: `Published`."""

    publisher: str
    epoch: Whole
    manifest: Manifest
    offers: dict[str, str]
    tensors: tuple[Tensor, ...] = ()  # sent once per layout
    hops: tuple[Hop, ...] = ()  # oldest first; the last one leads to this version, each one to the base of the next
    base: BaseOffer | None = None  # of an adapter


class Published(Message, frozen=True, tag=61):
    """The round that carries it. `needs_tensors`: send again with the layout."""

    round: int
    needs_tensors: bool = False


class RoundRequest(Message, frozen=True, tag=62):
    """The publisher asks how a round stands, waits up to `wait_s` for a change. Answer: `RoundReply`."""

    epoch: Whole
    round: Whole
    wait_s: float
    seen: str = ""  # state that the asker already knows
    transport_done: str = ""  # "" | sent | failed:<why>


class RoundReply(Message, frozen=True, tag=63):
    """State of a round: preparing | transferring | committed | superseded | failed."""

    round: int
    state: str
    generation: int = 0  # of the collective group
    members: dict[str, str] = {}  # member -> its state
    ranks: dict[str, int] = {}  # member -> rank in the collective; the publisher is rank 0
    rendezvous: str = ""
    detail: str = ""
    hops: tuple[Hop, ...] = ()  # the collective carries these instead of the buckets, where there are any
    hops_wanted: bool = True  # whether a member is there that could take hops: else they need not be encoded
    digest: str = ""  # of the version that the collective carries; empty: no group is formed


class MemberPoll(Message, frozen=True, tag=64):
    """A generator reports where it stands and asks what to do; doubles as its heartbeat. Answer: `Instruction`."""

    member: Name
    pid: Whole
    host: Name
    fingerprint: str
    state: str  # joining | stale | prepared | serving
    version: Version
    digest: str
    round: Whole
    wait_s: float
    transports: tuple[str, ...] = ()
    has_plan: str = ""
    error: str = ""
    encodings: tuple[str, ...] = ("full",)
    relay: str = ""  # where it serves the version that it holds to others (transport `stream`)
    order: int = 0  # grows with every poll on its host (a monotonic clock): an older one is a late copy; 0: not told
    base: str = ""  # digest of the whole weights that it holds, under an adapter where there is one


class Instruction(Message, frozen=True, tag=65):
    """What a generator does next: wait | receive | commit | abort | stop."""

    action: str
    round: int = 0
    manifest: Manifest | None = None
    tensors: tuple[Tensor, ...] = ()
    transport: str = ""
    address: str = ""
    rank: int = 0
    world_size: int = 0
    generation: int = 0
    deadline_s: float = 0.0
    version: int = -1  # newest committed version
    detail: str = ""
    hops: tuple[Hop, ...] = ()  # receive: these instead of the buckets, one after the other; empty: the buckets
    source: str = ""  # who serves it: the publisher, or the member that relays


class Fetch(Message, frozen=True, tag=66):
    """A puller asks who holds a version for a piece of it; it may ask again. Answer: `Fetched`, one payload frame.

    `digest` names the version. Blob `blob` is a bucket of it, or with `base` (the digest of the version that the first
    hop starts from) bucket `blob % buckets` of hop `blob // buckets`. Refused with `sync.failed` where it is gone.
    """

    digest: str
    base: str
    blob: int
    offset: int
    nbytes: int


class Fetched(Message, frozen=True, tag=67):
    """The bytes from `offset` of a blob of `size` bytes: as many as were asked for, fewer at its end."""

    blob: int
    offset: int
    size: int


AnyMessage = Union[
    Hello,
    Welcome,
    Refused,
    Ok,
    Heartbeat,
    StatusRequest,
    StatusReply,
    Stop,
    Replies,
    Tune,
    Tuned,
    LeaseRequest,
    Leases,
    Samples,
    SamplesReply,
    LeaseReturn,
    SamplesAt,
    Pieces,
    PiecesReply,
    RewardRequest,
    RewardWork,
    Scores,
    ScoresReply,
    Register,
    Registered,
    Claim,
    NotYet,
    Batch,
    Commit,
    Quarantine,
    LedgerRequest,
    LedgerReply,
    Checkpointed,
    Goodbye,
    EvaluationsRequest,
    EvaluationsReply,
    Publish,
    Published,
    RoundRequest,
    RoundReply,
    MemberPoll,
    Instruction,
    Fetch,
    Fetched,
]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)
_samples_decoder = msgspec.msgpack.Decoder(Samples)


class Packet(msgspec.Struct, frozen=True, gc=False):
    """A decoded message with its payload frames and the number that joins a reply to its request."""

    message: Any
    payloads: tuple[Buffer, ...] = ()
    request: int = 0
    kind: int = REQUEST
    header: Buffer = b""
    checksum: int = 0  # xxh3_64 of header and payloads, verified


def encode_header(message: Message) -> bytes:
    """The msgpack form of one message."""
    return _encoder.encode(message)


def encode(message: Message, payloads: Sequence[Buffer] = (), *, request: int = 0, kind: int = REQUEST) -> list[Buffer]:
    """The frames of a message: prefix, header, payloads."""
    header = _encoder.encode(message)
    digest = xxhash.xxh3_64(header)
    size = 0
    for payload in payloads:
        digest.update(payload)
        size += memoryview(payload).nbytes
    head = _HEAD.pack(MAGIC, SCHEMA, kind, len(payloads), request, size)
    check = digest.intdigest() ^ xxhash.xxh3_64_intdigest(head)
    return [head + check.to_bytes(8, "little"), header, *payloads]


def decode(frames: Sequence[Buffer], *, max_bytes: int = 1 << 31) -> Packet:
    """The message of these frames.

    Raises:
        WireError: whatever is wrong with them; `code` tells (prefix, schema, size, checksum, decode).
    """
    kind, request, checksum = _check_prefix(frames, max_bytes)
    return Packet(decode_header(frames[1]), tuple(frames[2:]), request, kind, frames[1], checksum)


def decode_header(header: Buffer) -> Any:
    """The message of a header. Raises `WireError` like `decode`."""
    try:
        return _decoder.decode(header)
    except (OverflowError, TypeError, *UNREADABLE) as error:
        raise WireError("wire.decode", f"header: {error}") from None


def _check_prefix(frames: Sequence[Buffer], max_bytes: int) -> tuple[int, int, int]:
    if len(frames) < 2 or memoryview(frames[0]).nbytes != PREFIX.size:
        raise WireError("wire.prefix", "a message has a prefix of 32 bytes and a header")
    magic, schema, kind, count, request, size, check = PREFIX.unpack(frames[0])
    if magic != MAGIC:
        raise WireError("wire.prefix", f"magic is {magic!r}, not {MAGIC!r}")
    if schema != SCHEMA:
        raise WireError("wire.schema", f"schema {schema}, this process speaks {SCHEMA}")
    if kind not in (REQUEST, REPLY, REQUEST_MANY) or count != len(frames) - 2:
        raise WireError("wire.prefix", f"kind {kind}, {count} payload frames announced, {len(frames) - 2} present")
    payload_bytes = sum(memoryview(frame).nbytes for frame in frames[2:])
    header_bytes = memoryview(frames[1]).nbytes
    if payload_bytes != size:
        raise WireError("wire.size", f"{size} payload bytes announced, {payload_bytes} present")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_bytes:
        raise WireError("wire.size", f"header {header_bytes} B, payload {payload_bytes} B, limit {max_bytes} B")
    digest = xxhash.xxh3_64()
    for frame in frames[1:]:
        digest.update(frame)
    checksum = digest.intdigest()
    if checksum ^ xxhash.xxh3_64_intdigest(memoryview(frames[0])[: _HEAD.size]) != check:
        raise WireError("wire.checksum", "checksum of prefix, header and payload does not match")
    return kind, request, checksum


def request_of(frames: Sequence[Buffer]) -> int | None:
    """The request number of a prefix that may be damaged elsewhere, so that its sender can be told; else None."""
    if frames and memoryview(frames[0]).nbytes == PREFIX.size:
        magic, _, kind, _, request, _, _ = PREFIX.unpack(frames[0])
        if magic == MAGIC and kind in (REQUEST, REQUEST_MANY):
            return int(request)
    return None


def decode_samples(header: Buffer) -> Samples:
    """A stored `Samples` header. Raises `WireError` like `decode`."""
    try:
        return _samples_decoder.decode(header)
    except (OverflowError, TypeError, *UNREADABLE) as error:
        raise WireError("wire.decode", f"samples: {error}") from None


# ---------------------------------------------------------------- payload arrays


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[tuple[Field, ...], bytes]:
    """One payload buffer of the arrays in the given order, each start aligned to 64 bytes, and its field table."""
    fields, parts, offset = [], [], 0
    for name, array in arrays.items():
        code = array.dtype.str.lstrip("<|")
        if code not in DTYPES or array.ndim != 1:
            raise ValueError(f"{name}: dtype {array.dtype} with {array.ndim} dimensions cannot be sent")
        fields.append(Field(name, code, offset, array.size))
        data = array.tobytes()
        padding = -len(data) % ALIGNMENT
        parts.append(data + bytes(padding))
        offset += len(data) + padding
    return tuple(fields), b"".join(parts)


def pack_parts(arrays: Mapping[str, tuple[str, Sequence[npt.NDArray[Any]]]]) -> tuple[tuple[Field, ...], bytes]:
    """Like `pack_arrays`, where an array is given as (dtype, its parts `[n]` in order): they are copied once."""
    fields: list[Field] = []
    pieces: list[Any] = []  # buffers and arrays: what `join` takes
    offset = 0
    for name, (code, parts) in arrays.items():
        count = 0
        for part in parts:
            if part.dtype != DTYPES[code] or part.ndim != 1:
                raise ValueError(f"{name}: dtype {part.dtype} with {part.ndim} dimensions cannot be sent as {code}")
            pieces.append(part if part.flags.c_contiguous else part.tobytes())
            count += part.size
        size = count * DTYPES[code].itemsize
        padding = -size % ALIGNMENT
        pieces.append(bytes(padding))
        fields.append(Field(name, code, offset, count))
        offset += size + padding
    return tuple(fields), b"".join(pieces)


def unpack_arrays(fields: Sequence[Field], payload: Buffer) -> dict[str, npt.NDArray[Any]]:
    """Read-only views `[count]` into the payload, by name. Raises `WireError` where a field leaves the buffer."""
    view = memoryview(payload)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for field in fields:
        dtype = DTYPES.get(field.dtype)
        if dtype is None or field.name in arrays:
            raise WireError("wire.decode", f"field {field.name!r}: dtype {field.dtype!r} unknown or name repeated")
        end = field.offset + field.count * dtype.itemsize
        if field.offset < 0 or field.count < 0 or end > view.nbytes or field.offset % dtype.itemsize:
            raise WireError("wire.decode", f"field {field.name!r} leaves its payload of {view.nbytes} bytes")
        arrays[field.name] = np.frombuffer(view, dtype=dtype, count=field.count, offset=field.offset)
    return arrays


def validate_samples(
    head: Samples, payload: Buffer, *, group_size: int, vocab_size: int = 0, newest_version: int | None = None
) -> str:
    """Why these samples may not be trained on; the empty string where they may (faults.md F21).

    Cheap numpy checks: lengths agree, indices in range, log-probs finite and not positive, token ids inside the
    vocabulary (where `vocab_size` is known), no version newer than `newest_version`, no empty response.
    """
    return checked_arrays(head, payload, group_size=group_size, vocab_size=vocab_size, newest_version=newest_version)[1]


def checked_arrays(
    head: Samples, payload: Buffer, *, group_size: int, vocab_size: int = 0, newest_version: int | None = None
) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The arrays of some samples (read-only views), and what `validate_samples` says about them."""
    try:
        arrays = unpack_arrays(head.fields, payload)
    except WireError as error:
        return {}, f"layout: {error.message}"
    for name in ("prompt", "response", "logprobs"):
        if name not in arrays:
            return {}, f"layout: field {name} is missing"
    return arrays, _check_heads(head, group_size, newest_version) or _check_arrays(head, arrays, vocab_size)


def _check_heads(head: Samples, group_size: int, newest_version: int | None) -> str:
    if not head.samples:
        return "empty: no samples"
    seen: set[int] = set()
    for sample in head.samples:
        if not 0 <= sample.index < group_size or sample.index in seen:
            return f"index: sample {sample.index} of a group of {group_size}"
        seen.add(sample.index)
        if sample.length < 1:
            return f"empty: sample {sample.index} has no tokens"
        if sample.finish not in ("stop", "length", "abort"):
            return f"finish: {sample.finish!r}"
        covered, newest = 0, -1
        for version, count in sample.runs:
            if count < 1 or version < 0:
                return f"runs: sample {sample.index} has an empty run or a negative version"
            covered += count
            newest = version if version > newest else newest
        if covered != sample.length:
            return f"length: runs of sample {sample.index} cover {covered} of {sample.length} tokens"
        if newest_version is not None and newest > newest_version:
            return f"version: {newest} was never published (newest {newest_version})"
        if (sample.rows or sample.turns) and (wrong := _check_rows(sample)):
            return wrong
    return ""


def _check_rows(sample: SampleHead) -> str:
    ends = [*(start for start, _ in sample.rows[1:]), sample.length]
    for (start, prompt), end in zip(sample.rows, ends, strict=False):  # no rows, one end
        if start < 0 or prompt < 1 or start + prompt >= end:
            return f"rows: {start}..{end} of sample {sample.index} with {prompt} prompt tokens"
    last = -1
    for place, reward in sample.turns:
        if not last < place < sample.length or not math.isfinite(reward):
            return f"turns: reward {reward} at token {place} of sample {sample.index} after {last}"
        last = place
    return ""


_WANTED: Final = {"prompt": "i4", "response": "i4", "logprobs": "f4", "mask": "u1"}


def _check_mask(head: Samples, mask: npt.NDArray[Any] | None) -> str:
    """What is wrong with the tokens that the policy did not sample."""
    if mask is None:
        spread = next((sample for sample in head.samples if sample.rows), None)
        return f"mask: sample {spread.index} has rows with prompts and none" if spread else ""
    if mask.size and int(mask.max()) > 1:
        return "mask: it holds more than 0 and 1"
    start = 0
    for sample in head.samples:
        mine = mask[start : start + sample.length]
        start += sample.length
        if not mine.any():
            return f"mask: no token of sample {sample.index} was sampled"
        if any(mine[first : first + prompt].any() for first, prompt in sample.rows):
            return f"mask: a token of a row's prompt in sample {sample.index} is called sampled"
        if any(not mine[place] for place, _ in sample.turns):
            return f"turns: a reward of sample {sample.index} stands at a token that was not sampled"
    return ""


def _check_arrays(head: Samples, arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> str:
    total = sum(sample.length for sample in head.samples)
    if arrays["prompt"].size != head.prompt_tokens or head.prompt_tokens < 1:
        return f"length: {arrays['prompt'].size} prompt tokens, {head.prompt_tokens} announced"
    for name in ("response", "logprobs", "mask"):
        if name in arrays and arrays[name].size != total:
            return f"length: {name} has {arrays[name].size} entries for {total} tokens"
    for field in head.fields:
        if _WANTED.get(field.name, field.dtype) != field.dtype:
            return f"layout: {field.name} is {field.dtype}, not {_WANTED[field.name]}"
    wrong = _check_mask(head, arrays.get("mask"))
    if wrong:
        return wrong
    logprobs = arrays["logprobs"]
    # Both pass a NaN on, and a comparison with NaN is False.
    if not (np.minimum.reduce(logprobs) > -math.inf and np.maximum.reduce(logprobs) <= 1e-4):
        return "logprobs: not finite or above 0"
    if vocab_size:
        low = min(int(arrays["prompt"].min()), int(arrays["response"].min()))
        high = max(int(arrays["prompt"].max()), int(arrays["response"].max()))
        if low < 0 or high >= vocab_size:
            return f"vocabulary: token id {low if low < 0 else high} outside 0..{vocab_size - 1}"
    return ""

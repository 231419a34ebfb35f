"""Frames of a message and back: the only encoder and the only decoder.

A message on the wire is

    [prefix 32 bytes][header: msgpack of a tagged, array-like, frozen struct][payload]...

The prefix is `magic 4s, schema u8, kind u8, frames u16, request u64, payload_bytes u64, check u64`, little-endian. The
check is xxh3_64 of the header and all payload frames, xor xxh3_64 of the prefix before it. So a flipped bit in the
request number cannot attach an answer to another request. Guarantees:
1. `decode` raises nothing but `WireError`, whatever the frames hold (faults.md F19, F20);
2. decoding is strict: unknown tags, surplus fields, other schema numbers and sizes over the limit are errors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Union

import msgspec
import xxhash

from asyncrl.errors import UNREADABLE, WireError
from asyncrl.wire.base import SCHEMA, Buffer, Message
from asyncrl.wire.images import FetchImages, Images, StoreImages
from asyncrl.wire.rewards import RewardRequest, RewardWork, Scores, ScoresReply, TeacherLogprobs
from asyncrl.wire.session import (
    Heartbeat,
    Hello,
    Ok,
    Refused,
    Replies,
    StatusReply,
    StatusRequest,
    Stop,
    Tune,
    Tuned,
    Welcome,
)
from asyncrl.wire.training import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EvaluationsReply,
    EvaluationsRequest,
    Goodbye,
    LedgerReply,
    LedgerRequest,
    NotYet,
    Quarantine,
    Register,
    Registered,
)
from asyncrl.wire.weights import Fetch, Fetched, Instruction, MemberPoll, Publish, Published, RoundReply, RoundRequest
from asyncrl.wire.work import LeaseRequest, LeaseReturn, Leases, Pieces, PiecesReply, Samples, SamplesAt, SamplesReply

MAGIC: Final = b"ARL1"
PREFIX: Final = struct.Struct("<4sBBHQQQ")
_HEAD: Final = struct.Struct("<4sBBHQQ")  # the prefix before its check
REQUEST: Final = 0
REPLY: Final = 1
REQUEST_MANY: Final = 2  # a request whose answer may be one of several in `Replies`
MAX_HEADER_BYTES: Final = 16 << 20
#: Below this size copying a frame is cheaper than pyzmq's release bookkeeping (crossover 84 KB to 1 MB).
COPY_THRESHOLD_BYTES: Final = 256 << 10
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
    TeacherLogprobs,
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
    StoreImages,
    FetchImages,
    Images,
]
#: What the payload store keeps of a group.
Record = Union[Samples, TeacherLogprobs]
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)
_samples_decoder = msgspec.msgpack.Decoder(Samples)
_record_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


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
        WireError: for any defect; `code` names it (prefix, schema, size, checksum, decode).
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
    payload_bytes = sum([memoryview(frame).nbytes for frame in frames[2:]])
    header_bytes = memoryview(frames[1]).nbytes
    if payload_bytes != size:
        raise WireError("wire.size", f"{size} payload bytes announced, {payload_bytes} present")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_bytes:
        raise WireError("wire.size", f"header {header_bytes} B, payload {payload_bytes} B, limit {max_bytes} B")
    digest = xxhash.xxh3_64(frames[1])
    for frame in frames[2:]:
        digest.update(frame)
    checksum = digest.intdigest()
    if checksum ^ xxhash.xxh3_64_intdigest(memoryview(frames[0])[: _HEAD.size]) != check:
        raise WireError("wire.checksum", "checksum of prefix, header and payload does not match")
    return kind, request, checksum


def peek_request(frames: Sequence[Buffer]) -> int | None:
    """The request number of a prefix, even if the rest is damaged, so that the sender can get an answer; else None."""
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


def decode_record(header: Buffer) -> Record:
    """The header of a stored record of a group. Raises `WireError` like `decode`."""
    try:
        return _record_decoder.decode(header)
    except (OverflowError, TypeError, *UNREADABLE) as error:
        raise WireError("wire.decode", f"record: {error}") from None

"""A claimed batch as arrays: what the learner gets of the wire form.

Guarantees:
1. arrays are read-only views into the payloads; only the support of draws is decoded;
2. every record is validated again; a group that fails is named in `invalid` and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl import wire
from asyncrl.errors import UNREADABLE, WireError
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, FloatArray, IntArray
from asyncrl.wire.support import NAMES as SUPPORT

TOP = ("teacher_ids", "teacher_top")
_decode_row = msgspec.json.Decoder(dict[str, Any]).decode


class Teaching(msgspec.Struct, frozen=True, gc=False):
    """What a teacher said about a sample: `logprobs` f4 `[T]`, and maybe its likeliest tokens (`TeacherLogprobs`)."""

    teacher: str
    version: str
    logprobs: FloatArray
    top_ids: Any = None  # i4 [T, K]
    top_logprobs: Any = None  # f4 [T, K]


class SampleData(msgspec.Struct, frozen=True, gc=False):
    """One sample of a claimed group: `response` i4 `[T]`, `logprobs` f4 `[T]`, `mask` u1 `[T]` or None
    (all sampled).
    """

    index: int
    response: IntArray
    logprobs: FloatArray
    mask: Any  # NDArray[uint8] | None
    runs: Runs
    finish: str
    reward: float
    parts: dict[str, float]
    digests: dict[int, str]
    rows: tuple[tuple[int, int], ...] = ()  # as in `wire.SampleHead`, and so are turns, images and others
    turns: tuple[tuple[int, float], ...] = ()
    support: wire.Support | None = None  # of each draw; None: nothing was cut
    images: tuple[tuple[int, str], ...] = ()
    teaching: Teaching | None = None
    experts: Any = None  # u1 or i2 `[P + T - 1, layers, chosen]`, that the tokens went through; None: not recorded
    others: tuple[tuple[int, str, Runs], ...] = ()


class GroupData(msgspec.Struct, frozen=True, gc=False):
    """One claimed group: `prompt_ids` i4 `[P]`, the samples sorted by index."""

    group: int
    bound: int
    row: dict[str, Any]
    prompt_ids: IntArray
    samples: tuple[SampleData, ...]
    times: dict[str, float]


class Frames(NamedTuple):
    """A claimed batch in wire form: what an archive keeps. One payload per record, in the order of the groups."""

    batch: wire.Batch
    payloads: tuple[Buffer, ...]


class ClaimedBatch(msgspec.Struct, frozen=True):
    """The batch of a step. `invalid` are groups that fail validation here (reason), left out of `groups`."""

    step: int
    version: int
    replayed: bool
    groups: tuple[GroupData, ...]
    ledger: dict[str, int]
    invalid: dict[int, str] = {}
    lengths: dict[str, float] = {}  # mean lengths so far, by metric (the bias alarm)
    tuning: str = ""  # JSON object: settings of the learner that were tuned, in force for this step
    frames: Frames | None = None  # as it came
    images: dict[str, bytes] = {}  # digest -> encoded image, of all groups (`asyncrl.images.batches`)


def decode_row(text: str) -> dict[str, Any]:
    """The row of a prompt; it came from a peer, so it may be anything."""
    try:
        return _decode_row(text) if text else {}
    except UNREADABLE as error:
        raise WireError("wire.decode", f"row: {error}") from None


def decode_batch(batch: wire.Batch, payloads: Sequence[Buffer]) -> ClaimedBatch:
    """A batch in wire form (from the service, or from an archive) as arrays: views into the payloads."""
    groups: list[GroupData] = []
    invalid: dict[int, str] = {}
    place = 0
    for head in batch.groups:
        mine = payloads[place : place + len(head.records)]
        place += len(head.records)
        try:
            groups.append(group_data(head, mine))
        except WireError as error:
            invalid[head.group] = error.message
    return ClaimedBatch(
        batch.step,
        batch.version,
        batch.replayed,
        tuple(groups),
        batch.ledger,
        invalid,
        lengths=batch.lengths,
        tuning=batch.tuning,
        frames=Frames(batch, tuple(payloads)),
    )


def group_data(head: wire.GroupHead, payloads: Sequence[Buffer]) -> GroupData:
    """Views into the payloads. Where two records hold the same sample the first one counts, as it did at the buffer."""
    samples: dict[int, SampleData] = {}
    taught: list[tuple[wire.TeacherLogprobs, Buffer]] = []
    prompt: Any = None
    row, rewards, parts = head.row, head.rewards, head.parts
    for record, payload in zip(head.records, payloads, strict=True):
        message = wire.decode_record(record)
        if isinstance(message, wire.TeacherLogprobs):
            taught.append((message, payload))
            continue
        row = row or message.row
        arrays, why = wire.checked_arrays(message, payload, group_size=1 << 20)
        if why:
            raise WireError("wire.decode", why)
        prompt = arrays["prompt"] if prompt is None else prompt
        response, logprobs, mask = arrays["response"], arrays["logprobs"], arrays.get("mask")
        support = wire.Support(*(arrays[name] for name in SUPPORT)) if SUPPORT[0] in arrays else None
        experts = wire.unpack_experts(arrays, [message.prompt_tokens + item.length for item in message.samples])
        start = 0
        for item, chosen in zip(message.samples, experts, strict=True):
            begin, start, index = start, start + item.length, item.index
            if index in samples or index not in rewards:
                continue
            samples[index] = SampleData(
                index,
                response[begin:start],
                logprobs[begin:start],
                None if mask is None else mask[begin:start],
                item.runs,
                item.finish,
                rewards[index],
                parts.get(index, {}),
                message.digests,
                item.rows,
                item.turns,
                None if support is None else support.cut(begin, start),
                item.images,
                None,
                chosen,
                item.others,
            )
    if prompt is None or samples.keys() != rewards.keys():
        raise WireError("wire.decode", "samples are missing")
    for answer, payload in taught:
        if answer.index in samples and samples[answer.index].teaching is None:
            samples[answer.index] = _add_teaching(samples[answer.index], answer, payload)
    ordered = tuple(samples[index] for index in sorted(samples))
    return GroupData(head.group, head.bound, decode_row(row), prompt, ordered, head.times)


def _add_teaching(sample: SampleData, answer: wire.TeacherLogprobs, payload: Buffer) -> SampleData:
    arrays, why = wire.checked_teacher(answer, payload, length=sample.response.size)
    if why:
        raise WireError("wire.decode", f"teacher {answer.judge}: {why}")
    top = [None if name not in arrays else arrays[name].reshape(sample.response.size, -1) for name in TOP]
    teaching = Teaching(answer.judge, answer.version, arrays["teacher_logprobs"], *top)
    return msgspec.structs.replace(sample, teaching=teaching)

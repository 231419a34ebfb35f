"""Answers of the buffer that carry payloads or a report: batches, reward work, the status.

It reads the state machine and the segments and changes neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.wire import (
    Batch,
    Buffer,
    GroupHead,
    IntArray,
    Place,
    RewardItem,
    SampleHead,
    decode_record,
    decode_samples,
    pack_arrays,
    unpack_arrays,
)
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.batches import Claimed
from buffers.groups.diagnosis import describe_judges
from buffers.groups.group_table import GroupTable, ledger_counts, reasons
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Group, State
from buffers.groups.scoring import ToScore
from buffers.payloads.segments import Segments

SHOWN = ("response", "mask")  # arrays that reward workers get, next to the prompt


def batch_by_place(claimed: Claimed, table: GroupTable) -> Batch:
    """The batch with places instead of payloads, for a learner that reads the segment files itself."""
    members = [table.groups[number] for number in claimed.batch.groups]
    heads = tuple(_group_head(group, [b""] * len(group.records), "") for group in members)
    places = tuple(
        Place(r.segment, r.offset, r.header_bytes, r.payload_bytes, r.checksum)
        for group in members
        for r in group.records
    )
    batch = claimed.batch
    return Batch(batch.step, batch.version, heads, claimed.replayed, ledger_counts(table), places, tuning=batch.tuning)


def batch_reply(claimed: Claimed, table: GroupTable, segments: Segments) -> tuple[Batch, list[Buffer], list[int]]:
    """The batch with one payload per record, and the groups whose bytes are damaged: then it is not to be sent."""
    heads: list[GroupHead] = []
    payloads: list[Buffer] = []
    damaged: list[int] = []
    for number in claimed.batch.groups:
        group = table.groups[number]
        try:
            parts = [segments.read(record) for record in group.records]
        except AsyncRLError:
            damaged.append(number)
            continue
        headers = [bytes(header) for header, _ in parts]
        row = _find_row(headers)
        heads.append(_group_head(group, headers, row))
        payloads.extend(payload for _, payload in parts)
    batch = claimed.batch
    reply = Batch(batch.step, batch.version, tuple(heads), claimed.replayed, ledger_counts(table), tuning=batch.tuning)
    return reply, payloads, damaged


def _group_head(group: Group, headers: list[bytes], row: str) -> GroupHead:
    return GroupHead(
        group=group.id,
        bound=group.bound,
        row=row,
        records=tuple(headers),
        rewards={index: float(sample.reward or 0.0) for index, sample in group.samples.items()},
        parts={index: sample.parts for index, sample in group.samples.items() if sample.parts},
        times={"issued": group.issued, "unscored": group.unscored, "ready": group.ready, "claimed": group.claimed},
    )


def reward_reply(
    items: list[ToScore], groups: Mapping[int, Any], segments: Segments
) -> tuple[tuple[RewardItem, ...], list[Buffer], list[int]]:
    """The samples to score, each with a payload of its own, and the groups whose bytes are damaged.

    `groups`: groups of training and prompts of an evaluation, by id.
    """
    work: list[RewardItem] = []
    payloads: list[Buffer] = []
    damaged: set[int] = set()
    opened: dict[tuple[int, int], _Opened] = {}  # a record is decoded once for all its samples
    for item in items:
        group = groups[item.group]
        sample = group.samples[item.index]
        place = item.group, sample.record
        try:
            found = opened.get(place) or opened.setdefault(place, _open(group, sample.record, segments))
        except AsyncRLError:
            damaged.add(item.group)
            continue
        start, part = found.parts[item.index]
        arrays = {name: array[start : start + sample.length] for name, array in found.arrays.items()}
        fields, data = pack_arrays({"prompt": found.prompt} | arrays)
        images = tuple([digest for _, digest in part.images])
        task = (item.group, item.index, item.token, item.attempt, found.row, sample.finish, fields, item.judge)
        work.append(RewardItem(*task, part.rows, images))
        payloads.append(data)
    return tuple(work), payloads, sorted(damaged)


class _Opened(NamedTuple):
    """A record of samples: what reward workers see of it. `parts`: index -> place of the first token, and the head."""

    row: str
    prompt: IntArray
    arrays: dict[str, Any]  # of all its tokens
    parts: dict[int, tuple[int, SampleHead]]


def _open(group: Any, record: int, segments: Segments) -> _Opened:
    header, payload = segments.read(group.records[record])
    head = decode_samples(header)
    row = head.row or _find_row([segments.read(other)[0] for other in group.records])
    arrays = unpack_arrays(head.fields, payload)
    parts, start = {}, 0
    for part in head.samples:
        parts[part.index] = start, part
        start += part.length
    prompt = arrays.pop("prompt")
    shown = {name: array for name, array in arrays.items() if name in SHOWN}
    return _Opened(row, prompt, shown, parts)


def _find_row(headers: Iterable[Buffer]) -> str:
    """The prompt's row, which is in one of a group's records."""
    rows = (getattr(decode_record(header), "row", "") for header in headers)
    return next((row for row in rows if row), "")


def status_json(machine: GroupMachine, evaluations: Evaluations, extra: dict[str, Any]) -> str:
    """The status of the buffer as JSON text."""
    table, now, workers = machine.table, machine.tx.now, machine.workers
    counts = ledger_counts(table)
    fault = machine.budget.fault
    status = {
        "role": "buffer",
        "service_epoch": machine.service_epoch,
        "ledger": counts,
        "by_state": {state.name: counts[state.name.lower()] for state in State},
        "dropped": reasons(table, State.DROPPED),
        "dead": reasons(table, State.DEAD),
        "version": table.meta.version,
        "step": table.meta.version,
        "outstanding": table.outstanding,
        "total_groups": machine.settings.total_groups,
        "done": table.meta.done,
        "epoch": table.meta.epoch,
        "fault": None if fault is None else {"code": fault[0], "message": fault[1]},
        "learner": _learner_status(machine),
        "tuning": {
            "number": machine.live.tuning.number,
            "author": machine.live.tuning.author,
            "changed": machine.live.tuning.values,
            "settings": machine.live.tunable(),
            "depth": machine.settings.depth,
            "batch_groups": machine.live.plan.size(table.frontier + 1),
        },
        "producers": workers.status("producer", now),
        "rewards": workers.status("reward", now),
        "judges": describe_judges(machine.scoring, evaluations.table.queue),
        "waiting_for": machine.diagnosis(now) if machine.batches.asked_since else "",
        **extra,
    }
    return msgspec.json.encode(status).decode()


def _learner_status(machine: GroupMachine) -> dict[str, Any] | None:
    name, pid, host = machine.table.meta.learner
    if not name:
        return None
    worker, now = machine.workers.get("learner", name), machine.tx.now
    return {
        "name": name,
        "pid": pid,
        "host": host,
        "age_s": round(now - worker.seen, 3) if worker else None,
        "waiting_for": worker.waiting_for if worker else "",
        "waiting_s": worker.waited_s(now) if worker else 0.0,
        "stats": worker.stats if worker else {},
    }

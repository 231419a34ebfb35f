"""The bytes of checkpoints: pieces of samples under way on their way into the segments, and back with a lease.

Guarantees:
1. a piece is checked like a finished sample before it is kept: lengths, runs, indices, log-probs, versions, supports,
   and that it ends within `sampling.max_new_tokens`. A piece of turns (`turns` i8 `[3 k]`: tokens, finish and digest
   of the context of each) holds whole turns, and is the only one of its message;
2. pieces lie in the segment files like samples and their places in the group's row, so a kill -9 of the service loses
   none that was answered;
3. what does not fit into an answer, or is damaged, is not handed out: these samples start anew.
It decides nothing about ages and weights: `buffers.groups.partial_samples` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl import wire
from asyncrl.errors import AsyncRLError, WireError
from asyncrl.wire import Buffer
from asyncrl.wire.support import NAMES as SUPPORT
from buffers.groups.machine import GroupMachine
from buffers.groups.records import PartialSample, Record
from buffers.payloads.record_format import checksum_of
from buffers.payloads.segments import Segments

Arrays = Mapping[str, npt.NDArray[Any]]
_WANTED = {"response": "i4", "logprobs": "f4"}
TURNS = "turns"


def check(
    head: wire.Pieces, payload: Buffer, *, group_size: int, max_tokens: int, newest_version: int, cut: bool = False
) -> tuple[Arrays, str]:
    """The arrays of some pieces (read-only views; the support decoded), and why they may not be kept; empty where they
    may. `cut`: whether they must come with the support of their draws.
    """
    try:
        arrays = wire.unpack_arrays(head.fields, payload)
        support = wire.unpack_support(arrays)
    except WireError as error:
        return {}, f"layout: {error.message}"
    named = {field.name: field.dtype for field in head.fields if field.name not in SUPPORT}
    if named.pop(TURNS, "i8") != "i8" or named != _WANTED:
        return {}, "layout: the fields are response i4, logprobs f4 and turns i8"
    if (support is not None) != cut:
        return {}, f"support: {'it is missing' if cut else 'no draw of this run is cut exactly'}"
    total = sum(item.count for item in head.samples)
    if not head.samples or any(arrays[name].size != total for name in _WANTED):
        return {}, f"length: the arrays do not hold the {total} tokens of {len(head.samples)} pieces"
    if len({item.index for item in head.samples}) < len(head.samples):
        return {}, "index: a sample stands there twice"
    if why := wire.find_wrong_digests(head):
        return {}, why
    if TURNS in arrays and (why := _wrong_turns(arrays[TURNS], total, len(head.samples))):
        return {}, why
    reasons = (_wrong_head(item, group_size, max_tokens, newest_version) for item in head.samples)
    reason = next(filter(None, reasons), "")
    logprobs = arrays["logprobs"]
    if not reason and not (np.minimum.reduce(logprobs) >= wire.LOWEST_LOGPROB and np.maximum.reduce(logprobs) <= 1e-4):
        reason = f"logprobs: not finite, above 0 or below {wire.LOWEST_LOGPROB:g}"
    if support is not None and not reason:
        why = support.find_problem(arrays["response"])
        reason = f"support: {why}" if why else ""
        arrays.update(zip(SUPPORT, support, strict=True))
    return arrays, reason


def _wrong_head(item: wire.Piece, group_size: int, max_tokens: int, newest_version: int) -> str:
    if not 0 <= item.index < group_size:
        return f"index: sample {item.index} of a group of {group_size}"
    if item.start < 0 or item.count < 1 or item.start + item.count > max_tokens:
        return f"length: tokens {item.start} .. {item.start + item.count} of at most {max_tokens}"
    if any(count < 1 or version < 0 for version, count in item.runs):
        return f"runs: sample {item.index} has an empty run or a negative version"
    if sum(count for _, count in item.runs) != item.count:
        return f"length: the runs of sample {item.index} do not cover {item.count} tokens"
    newest = max(version for version, _ in item.runs)
    if newest > newest_version:
        return f"version: {newest} was never published (newest {newest_version})"
    return ""


def _wrong_turns(coded: npt.NDArray[Any], total: int, pieces: int) -> str:
    if pieces > 1 or not coded.size or coded.size % 3:
        return f"turns: {coded.size} numbers for {pieces} pieces, not three for each turn of one"
    counts, finishes = coded[::3], coded[1::3]
    if np.minimum.reduce(counts) < 1 or np.maximum.reduce(counts) > total or int(counts.sum()) != total:
        return f"turns: they do not have the {total} tokens"
    return "" if np.isin(finishes, (0, 1)).all() else "turns: a finish is neither 0 (stop) nor 1 (length)"


def store(head: wire.Pieces, item: wire.Piece, arrays: Arrays, segments: Segments) -> Record:
    """Queue one piece for the segment file."""
    start = 0
    for other in head.samples:
        if other.index == item.index:
            break
        start += other.count
    cut = {name: arrays[name][start : start + item.count] for name in _WANTED}
    if TURNS in arrays:
        cut[TURNS] = arrays[TURNS]
    if SUPPORT[0] in arrays:
        support = wire.Support(*(arrays[name] for name in SUPPORT))
        cut |= wire.pack_support(support.cut(start, start + item.count))
    fields, payload = wire.pack_arrays(cut)
    message = wire.Pieces(head.producer, head.group, head.token, (item,), head.digests, fields)
    header = wire.encode_header(message)
    return segments.append(header, payload, checksum_of(header, payload), again=False)


def load(
    leases: Sequence[wire.Lease], machine: GroupMachine, segments: Segments, *, max_bytes: int
) -> tuple[tuple[wire.Begun, ...], list[Buffer], set[Record]]:
    """What was begun of the missing samples of these leases, a payload for each, and the records that are damaged."""
    heads: list[wire.Begun] = []
    payloads: list[Buffer] = []
    damaged: set[Record] = set()
    room = max_bytes // 2  # the rest of the answer is small
    for lease in leases:
        for index, found in sorted(machine.table.groups[lease.group].partial.items()):
            if found.length * 8 > room:
                continue
            try:
                fields, payload = _join_pieces(found, segments)
            except AsyncRLError:
                damaged.update(found.pieces)
                continue
            if len(payload) > room:  # of its support
                continue
            room -= len(payload)
            heads.append(wire.Begun(lease.group, index, found.length, found.runs, found.digests, fields))
            payloads.append(payload)
    return tuple(heads), payloads, damaged


def _join_pieces(found: PartialSample, segments: Segments) -> tuple[tuple[wire.Field, ...], bytes]:
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_WANTED, TURNS)}
    supports: list[tuple[wire.Support | None, int]] = []
    for record in found.pieces:
        header, payload = segments.read(record)
        arrays = wire.unpack_arrays(wire.decode_header(header).fields, payload)
        for name in parts.keys() & arrays.keys():
            parts[name].append(arrays[name])
        supports.append((wire.unpack_support(arrays), arrays["response"].size))
    if len(parts[TURNS]) not in (0, len(found.pieces)):
        raise WireError("store.corrupt", "some pieces of a sample are turns and some are not")
    coded = {name: ({**_WANTED, TURNS: "i8"}[name], held) for name, held in parts.items() if held}
    if (support := wire.join_supports(supports)) is not None:
        coded |= {name: ("u1", [array]) for name, array in wire.pack_support(support).items()}
    fields, data = wire.pack_parts(coded)
    if any(field.count != found.length for field in fields if field.name in _WANTED):
        raise WireError("store.corrupt", f"the pieces hold {fields[0].count} tokens, not {found.length}")
    return fields, data

"""Micro-batches: sequences packed into rows, balanced over ranks, and encoded for transfer between ranks.

Guarantees:
1. a sequence lies completely in one row; a row holds at most `micro_batch_tokens` tokens;
2. ranks exchange numpy arrays and msgpack, never pickle.

Example: sequences of 5, 3, 3 and 1 tokens, rows of at most 6, 2 ranks: rows {5, 1} and {3, 3}, one for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from asyncrl.errors import UNREADABLE, WireError
from asyncrl.wire import Field, Support, join_supports, pack_arrays, unpack_arrays

Array = npt.NDArray[Any]
NOTHING = np.zeros(0, np.int32)
NO_FLOATS = np.zeros(0, np.float32)
NO_EXPERTS = np.zeros(0, np.int16)


class Sample(msgspec.Struct, frozen=True):
    """One sequence for training: a sample, or one of several that share its advantage."""

    tokens: Array  # i4 [P + T]
    prompt_tokens: int
    behaviour: Array  # f4 [T]
    mask: Array  # u1 [T]: 1 where the policy sampled the token
    advantage: float  # of every token, if `advantages` is None
    number: int = 0  # its place among the sequences of the batch
    advantages: Array | None = None  # f4 [T]
    lags: Array | None = None  # i4 [T]: training version minus the token's; None: 0
    scale: float = 1.0  # weight by lag
    right: bool = False  # the answer is right
    support: Support | None = None  # of each draw [T]; None: nothing was cut
    owner: int = -1  # number of the sample that it is a row of; -1: it counts as a sample of its own
    siblings: int = 0  # trained tokens in the other rows of the sample
    images: tuple[bytes, ...] = ()  # encoded, in the order of their placeholders
    image_places: tuple[int, ...] = ()  # in `tokens`, of the last of them; the others have the first placeholders
    teacher: Array | None = None  # f4 [T]: log-probs of a teacher; None: it has none
    top_ids: Array | None = None  # i4 [T, K]: the teacher's likeliest tokens
    top_logprobs: Array | None = None  # f4 [T, K]
    experts: Array | None = None  # [P + T - 1, layers, chosen]: to replay; None: the router chooses


class MicroBatch(msgspec.Struct, frozen=True):
    """Input of one forward pass: flat arrays over R rows of W tokens, and over the N response tokens in them.

    Packed: one row of consecutive sequences. Not packed: one sequence per row, padded on the right.
    """

    width: int  # W
    input_ids: Array  # i4 [R * W]
    position_ids: Array  # i4 [R * W], from 0 in every sequence
    cu_seqlens: Array  # i4 [S + 1]: where sequences begin in the flat tokens
    positions: Array  # i4 [N]: flat index of the token that predicts the target
    targets: Array  # i4 [N]
    sequences: Array  # i4 [N]: number of the sequence inside this micro-batch
    behaviour: Array  # f4 [N]
    mask: Array  # u1 [N]
    advantages: Array  # f4 [N]
    lags: Array  # i4 [N]: training version minus the token's
    scales: Array  # f4 [S]: weight of each sequence by lag
    right: Array  # u1 [S]: 1 if the answer is right
    samples: Array  # i4 [S]: place of each sequence among those of the batch
    support_counts: Array = NOTHING  # i4 [N]: ids that each target was drawn from, 0: all; empty: nothing was cut
    support_ids: Array = NOTHING  # i4 [sum counts]
    owners: Array = NOTHING  # i4 [S]: number of the sample of each sequence, unique in the mini-batch of all ranks
    siblings: Array = NOTHING  # i4 [S]: trained tokens in the other sequences of its sample
    image_counts: Array = NOTHING  # i4 [S]: images of each sequence; empty: none has any
    images: tuple[bytes, ...] = ()  # encoded, in the order of the sequences
    image_places: Array = NOTHING  # i4, one for each of `images`: its place in the sequence; -1: the next placeholder
    teacher: Array = NO_FLOATS  # f4 [N]: log-probs of teachers, NaN without one; empty: no sequence has any
    top_ids: Array = NOTHING  # i4 [N * K]: their likeliest tokens
    top_logprobs: Array = NO_FLOATS  # f4 [N * K]
    #: i2 [R * W * layers * chosen]: experts of every token to replay, -1: the router chooses; empty: everywhere
    experts: Array = NO_EXPERTS

    def drop_support(self) -> MicroBatch:
        """Return it for a model that did not sample: log-probs over the whole vocabulary."""
        return replace(self, support_counts=NOTHING, support_ids=NOTHING)


class Minibatch(msgspec.Struct, frozen=True):
    """One optimizer step: micro-batches and the global denominators of the loss."""

    tokens: int  # trained tokens over all ranks
    sequences: int  # samples (or rows: `learner.algorithm.sequence`) with a trained token, over all ranks
    micro: tuple[MicroBatch, ...]
    right: int = 0  # trained tokens of right answers, over all ranks


class StepBatch(msgspec.Struct, frozen=True):
    """A batch split for the gang: `shares[rank]` has one mini-batch per optimizer step; `stats` are metrics."""

    shares: tuple[tuple[Minibatch, ...], ...]
    stats: dict[str, float]
    advantages: tuple[float, ...] = ()  # of the first trained token of every sample
    whole: Any = None  # `estimates.Whole`, for estimates after the forward passes


_FIELDS = {
    "input_ids": "i4",
    "position_ids": "i4",
    "cu_seqlens": "i4",
    "positions": "i4",
    "targets": "i4",
    "sequences": "i4",
    "behaviour": "f4",
    "mask": "u1",
    "advantages": "f4",
    "lags": "i4",
    "scales": "f4",
    "right": "u1",
    "samples": "i4",
    "support_counts": "i4",
    "support_ids": "i4",
    "owners": "i4",
    "siblings": "i4",
    "image_counts": "i4",
    "image_places": "i4",
    "teacher": "f4",
    "top_ids": "i4",
    "top_logprobs": "f4",
    "experts": "i2",
}


def pack(lengths: Sequence[int], *, limit: int, multiple: int = 1) -> list[list[int]]:
    """Return rows of item numbers with at most `limit` tokens each.

    First-fit-decreasing finds the smallest number of rows. It is rounded up to a multiple of `multiple`, and the items
    are spread over that many rows, the longest to the emptiest row. If that overflows, the first-fit rows are returned.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    rows: list[list[int]] = []
    loads: list[int] = []
    for item in order:
        for row, load in enumerate(loads):
            if load + lengths[item] <= limit:
                rows[row].append(item)
                loads[row] += lengths[item]
                break
        else:
            rows.append([item])
            loads.append(lengths[item])
    count = min(-(-len(rows) // multiple) * multiple, len(lengths))
    spread: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in order:
        row = loads.index(min(loads))
        spread[row].append(item)
        loads[row] += lengths[item]
    return spread if max(loads, default=0) <= limit else rows


def pad(lengths: Sequence[int], *, limit: int) -> list[list[int]]:
    """Return micro-batches of item numbers with similar lengths, so that rows x longest stays within `limit`."""
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    batches: list[list[int]] = []
    for item in order:
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > limit:
            batches.append([])
        batches[-1].append(item)
    return batches


def balance(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return item numbers per rank, the same count for each (-1 fills up), the costliest to the least loaded rank."""
    each = max(1, -(-len(costs) // ranks))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < each), key=lambda rank: (loads[rank], rank))
        shares[rank].append(item)
        loads[rank] += costs[item]
    return [share + [-1] * (each - len(share)) for share in shares]


def packed_row(sequences: Sequence[Sample]) -> MicroBatch:
    """Return one row of consecutive sequences; without sequences one token that is not trained."""
    if not sequences:
        return _micro([], np.zeros(1, np.int32), np.zeros(1, np.int32), starts=[], width=1, end=1)
    lengths = [sequence.tokens.size for sequence in sequences]
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    tokens = np.concatenate([sequence.tokens for sequence in sequences])
    return _micro(sequences, tokens, positions, starts=starts.tolist(), width=tokens.size, end=tokens.size)


def padded_rows(sequences: Sequence[Sample]) -> MicroBatch:
    """Return one sequence per row, padded on the right: attention is causal, so no token sees the padding."""
    if not sequences:
        return packed_row([])
    width = max(sequence.tokens.size for sequence in sequences)
    tokens = np.zeros((len(sequences), width), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : sequence.tokens.size] = sequence.tokens
    positions = np.tile(np.arange(width, dtype=np.int32), len(sequences))
    starts = [row * width for row in range(len(sequences))]
    return _micro(sequences, tokens.reshape(-1), positions, starts=starts, width=width, end=tokens.size)


def _micro(
    sequences: Sequence[Sample], tokens: Array, position_ids: Array, *, starts: Sequence[int], width: int, end: int
) -> MicroBatch:
    def concatenate(parts: list[Array], dtype: str) -> Array:
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    counts = [sequence.mask.size for sequence in sequences]
    images = tuple(image for sequence in sequences for image in sequence.images)
    first = [start + sequence.prompt_tokens - 1 for start, sequence in zip(starts, sequences, strict=True)]
    support = join_supports((sequence.support, count) for sequence, count in zip(sequences, counts, strict=True))
    return MicroBatch(
        width=width,
        input_ids=tokens,
        position_ids=position_ids,
        cu_seqlens=np.array([*starts, end], np.int32),
        positions=concatenate([np.arange(low, low + n) for low, n in zip(first, counts, strict=True)], "i4"),
        targets=concatenate([sequence.tokens[sequence.prompt_tokens :] for sequence in sequences], "i4"),
        sequences=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        behaviour=concatenate([sequence.behaviour for sequence in sequences], "f4"),
        mask=concatenate([sequence.mask for sequence in sequences], "u1"),
        advantages=concatenate([_expand(s.advantages, s.advantage, s.mask.size) for s in sequences], "f4"),
        lags=concatenate([_expand(s.lags, 0, s.mask.size) for s in sequences], "i4"),
        scales=np.array([s.scale for s in sequences], np.float32),
        right=np.array([s.right for s in sequences], np.uint8),
        samples=np.array([sequence.number for sequence in sequences], np.int32),
        support_counts=NOTHING if support is None else support.counts,
        support_ids=NOTHING if support is None else support.ids,
        owners=np.array([sequence.owner for sequence in sequences], np.int32),
        siblings=np.array([sequence.siblings for sequence in sequences], np.int32),
        image_counts=np.array([len(sequence.images) for sequence in sequences], np.int32) if images else NOTHING,
        images=images,
        image_places=np.array([place for one in sequences for place in _image_places(one)], np.int32),
        experts=_experts(sequences, starts, tokens.size),
        **_teaching(sequences),
    )


def _experts(sequences: Sequence[Sample], starts: Sequence[int], tokens: int) -> Array:
    """What each of `tokens` places replays; the last token of a sequence went through no expert of the engine."""
    shape = next((one.experts.shape[1:] for one in sequences if one.experts is not None), None)
    if shape is None:
        return NO_EXPERTS
    found = np.full((tokens, *shape), -1, np.int16)
    for start, one in zip(starts, sequences, strict=True):
        if one.experts is not None:
            found[start : start + len(one.experts)] = one.experts
    return found.reshape(-1)


def _teaching(sequences: Sequence[Sample]) -> dict[str, Array]:
    """What teachers say about the sequences; NaN for those without one."""
    if all(sequence.teacher is None for sequence in sequences):
        return {}
    width = max(0 if one.top_ids is None else one.top_ids.shape[1] for one in sequences)
    parts = [_taught(one, width) for one in sequences]
    names = ("teacher", "top_ids", "top_logprobs")
    return {name: np.concatenate(every) for name, every in zip(names, zip(*parts, strict=True), strict=True)}


def _taught(one: Sample, width: int) -> tuple[Array, Array, Array]:
    size = one.mask.size
    teacher = np.full(size, np.nan, np.float32) if one.teacher is None else one.teacher.astype(np.float32)
    if one.top_ids is None or one.top_logprobs is None:
        return teacher, np.zeros(size * width, np.int32), np.full(size * width, np.nan, np.float32)
    return teacher, one.top_ids.reshape(-1).astype(np.int32), one.top_logprobs.reshape(-1).astype(np.float32)


def _image_places(sequence: Sample) -> list[int]:
    return [-1] * (len(sequence.images) - len(sequence.image_places)) + list(sequence.image_places)


def _expand(values: Array | None, otherwise: float, count: int) -> Array:
    return np.full(count, otherwise) if values is None else values


# ---------------------------------------------------------------- between ranks


class _ShareHead(msgspec.Struct, frozen=True, array_like=True):
    """`micro[m][k]`: width and, by field, number of elements of micro-batch k of mini-batch m. Every image of the share
    is there once: `shown[i]` are those of micro-batch i, by place in `images`.
    """

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    right: tuple[int, ...]
    micro: tuple[tuple[tuple[int, ...], ...], ...]
    fields: tuple[Field, ...]
    images: tuple[bytes, ...] = ()
    shown: tuple[tuple[int, ...], ...] = ()


def encode_share(share: Sequence[Minibatch]) -> bytes:
    """Encode a rank's share: length of the head, head in msgpack, one buffer of arrays."""
    pieces = [micro for part in share for micro in part.micro]
    arrays = {
        name: np.concatenate([getattr(micro, name) for micro in pieces]).astype(dtype)
        for name, dtype in _FIELDS.items()
    }
    fields, payload = pack_arrays(arrays)
    places = {image: place for place, image in enumerate(dict.fromkeys(image for m in pieces for image in m.images))}
    head = msgspec.msgpack.encode(
        _ShareHead(
            tuple(part.tokens for part in share),
            tuple(part.sequences for part in share),
            tuple(part.right for part in share),
            tuple(tuple((m.width, *(getattr(m, name).size for name in _FIELDS)) for m in part.micro) for part in share),
            fields,
            tuple(places),
            tuple(tuple(places[image] for image in m.images) for m in pieces) if places else (),
        )
    )
    return len(head).to_bytes(8, "little") + head + payload


def decode_share(data: bytes | memoryview) -> tuple[Minibatch, ...]:
    """Decode `encode_share`; the arrays are views into `data`."""
    view = memoryview(data)
    end = 8 + int.from_bytes(view[:8], "little")
    try:
        head = msgspec.msgpack.decode(view[8:end], type=_ShareHead)
    except UNREADABLE as error:
        raise WireError("wire.decode", f"share of a rank: {error}") from None
    # A copy where the payload does not start at a multiple of 8 bytes: unaligned arrays are slow.
    arrays = unpack_arrays(head.fields, bytes(view[end:]))
    offsets = dict.fromkeys(_FIELDS, 0)
    shown = iter(head.shown)

    def images() -> tuple[bytes, ...]:
        return tuple(head.images[place] for place in next(shown, ()))

    return tuple(
        Minibatch(tokens, sequences, tuple(_cut(micro, arrays, offsets, images()) for micro in pieces), right)
        for tokens, sequences, right, pieces in zip(head.tokens, head.sequences, head.right, head.micro, strict=True)
    )


def _cut(
    sizes: Sequence[int], arrays: Mapping[str, Array], offsets: dict[str, int], images: tuple[bytes, ...]
) -> MicroBatch:
    width, *counts = sizes
    taken: dict[str, Array] = {}
    for name, count in zip(_FIELDS, counts, strict=True):
        taken[name] = arrays[name][offsets[name] : offsets[name] + count]
        offsets[name] += count
    return MicroBatch(width=width, images=images, **taken)

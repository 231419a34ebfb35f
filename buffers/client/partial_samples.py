"""Packs and unpacks partial samples: the pieces that a producer sends, and those of others that it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, FloatArray, IntArray


class TurnMark(NamedTuple):
    """A turn of a session in a partial sample: its sampled tokens, how it ended, and a digest of its context."""

    tokens: int
    finish: str
    context: int


class PieceData(msgspec.Struct, frozen=True):
    """Tokens of a sample from its token `start` on: `token_ids` i4 `[n]`, `logprobs` f4 `[n]`, `runs` and the
    support of draws over these. `turns`: the tokens are those of whole turns; such a piece is sent alone.
    """

    index: int
    start: int
    token_ids: IntArray
    logprobs: FloatArray
    runs: Runs
    support: wire.Support | None = None
    turns: tuple[TurnMark, ...] = ()


class BegunSample(msgspec.Struct, frozen=True):
    """The first tokens of a sample, made by other producers: `token_ids` i4 `[k]`, `logprobs` f4 `[k]`, `runs` over
    `[0, k)`, the digests of the weights that made them by version, and the support of draws. `turns`: they are the
    sampled tokens of these turns.
    """

    index: int
    token_ids: IntArray
    logprobs: FloatArray
    runs: Runs
    digests: dict[int, str]
    support: wire.Support | None = None
    turns: tuple[TurnMark, ...] = ()


FINISHES = ("stop", "length")

#: Partial samples of leases, by (group, token).
BegunOf = Mapping[tuple[int, int], tuple[BegunSample, ...]]


def pack_pieces(
    name: str, lease: wire.Lease, pieces: Sequence[PieceData], digests: Mapping[int, str]
) -> tuple[wire.Pieces, bytes]:
    """The message with some pieces of a leased group, and its payload."""
    arrays: dict[str, Any] = {
        "response": np.concatenate([piece.token_ids for piece in pieces]).astype(np.int32),
        "logprobs": np.concatenate([piece.logprobs for piece in pieces]).astype(np.float32),
    }
    if marks := [mark for piece in pieces for mark in piece.turns]:
        coded = [(mark.tokens, FINISHES.index(mark.finish), mark.context) for mark in marks]
        arrays["turns"] = np.asarray(coded, np.int64).reshape(-1)
    support = wire.join_supports((piece.support, len(piece.token_ids)) for piece in pieces)
    fields, payload = wire.pack_arrays(arrays if support is None else arrays | wire.pack_support(support))
    heads = tuple(wire.Piece(piece.index, piece.start, len(piece.token_ids), piece.runs) for piece in pieces)
    used = sorted({version for piece in pieces for version, _ in piece.runs})
    known = {version: digests[version] for version in used if version in digests}
    return wire.Pieces(name, lease.group, lease.token, heads, known, fields), payload


def unpack_begun(answer: wire.Leases, payloads: Sequence[Buffer]) -> BegunOf:
    """The partial samples in an answer. Raises `WireError` if head and payload disagree."""
    tokens = {lease.group: lease.token for lease in answer.leases}
    if len(payloads) != len(answer.begun) or any(head.group not in tokens for head in answer.begun):
        raise WireError("wire.decode", f"{len(answer.begun)} partial samples, {len(payloads)} payloads")
    found: dict[tuple[int, int], tuple[BegunSample, ...]] = {}
    for head, payload in zip(answer.begun, payloads, strict=True):
        arrays = wire.unpack_arrays(head.fields, payload)
        response, logprobs = arrays.get("response"), arrays.get("logprobs")
        if response is None or logprobs is None or not len(response) == len(logprobs) == head.length:
            raise WireError("wire.decode", f"partial sample of group {head.group}: not {head.length} tokens")
        support = wire.unpack_support(arrays)
        if support is not None and (why := support.find_problem(response)):
            raise WireError("wire.decode", f"partial sample of group {head.group}: support: {why}")
        key = head.group, tokens[head.group]
        turns = _read_marks(arrays["turns"]) if "turns" in arrays else ()
        sample = BegunSample(head.index, response, logprobs, head.runs, head.digests, support, turns)
        found[key] = (*found.get(key, ()), sample)
    return found


def _read_marks(coded: Any) -> tuple[TurnMark, ...]:
    return tuple(TurnMark(count, FINISHES[finish], context) for count, finish, context in coded.reshape(-1, 3).tolist())

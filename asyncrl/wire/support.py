"""The support of each draw of a sample: the token ids that top-p, top-k and min-p left, and its form in payloads.

The learner computes log-probs over these ids alone, so that importance weights and gradients belong to the distribution
that was sampled from (arXiv 2512.02556, keep sampling mask). Guarantees:
1. ids of a token ascend; a token without ids was drawn from the whole vocabulary, or was not sampled;
2. in a payload, `support_counts` and `support_ids` hold varints (7 bits a byte, the lowest first): the number of ids of
   each token, and for each id its distance to the one before it, less 1. An id takes 1 to 3 bytes of 152 000, and none
   if it is the only one: it is the token itself;
3. coded parts of a sample can be joined as bytes. Its size is limited before it is decoded (`MOST_IDS`).

Example: the tokens 4, 9 and 7. The first could be 3, 4 or 300, the second any, the third no other: counts
`[3, 0, 1]`, ids `[3, 4, 300, 7]`; bytes `03 00 01` and `03 00 a7 02`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.errors import WireError
from asyncrl.wire.base import IntArray

Array = npt.NDArray[Any]
NAMES: Final = ("support_counts", "support_ids")
MOST_BYTES: Final = 5  # of a varint: 32 bits
MOST_IDS: Final = 1 << 23  # of one message; decoded in about 300 MiB
LARGEST_ID: Final = (1 << 31) - 1


class Support(NamedTuple):
    """`counts` i4 `[T]`: ids of each token, 0 where nothing was cut; `ids` i4 `[sum counts]`, ascending in a token."""

    counts: IntArray
    ids: IntArray

    def cut(self, start: int, stop: int) -> Support:
        """The tokens `start .. stop`."""
        first, end = (int(self.counts[:place].sum(dtype=np.int64)) for place in (start, stop))
        return Support(self.counts[start:stop], self.ids[first:end])

    def find_problem(self, tokens: IntArray, mask: Array | None = None) -> str:
        """Why this cannot be the support of draws that gave `tokens` i4 `[T]`; empty if it can."""
        if self.counts.size != tokens.size:
            return f"{self.counts.size} counts for {tokens.size} tokens"
        cut = self.counts > 0
        if mask is not None and bool((cut & (mask == 0)).any()):
            return "ids at a token that was not sampled"
        owners = np.repeat(np.arange(tokens.size), self.counts)
        held = np.zeros(tokens.size, bool)
        held[owners[self.ids == tokens[owners]]] = True
        if not np.array_equal(held, cut):
            return f"token {int(np.flatnonzero(held != cut)[0])} is not among the ids that it was drawn from"
        return ""


def join_supports(parts: Iterable[tuple[Support | None, int]]) -> Support | None:
    """The support of parts in order, each with its number of tokens; None if nothing was cut anywhere."""
    given = list(parts)
    if not [part for part, _ in given if part is not None]:
        return None
    every = [uncut(count) if part is None else part for part, count in given]
    return Support(*(np.concatenate([part[place] for part in every]).astype(np.int32) for place in (0, 1)))


def uncut(tokens: int) -> Support:
    """The support of tokens that were drawn from the whole vocabulary."""
    return Support(np.zeros(tokens, np.int32), np.zeros(0, np.int32))


def pack_support(support: Support) -> dict[str, npt.NDArray[np.uint8]]:
    """The arrays of a payload, by name, next to its `response`."""
    steps = np.diff(support.ids.astype(np.int64), prepend=-1) - 1
    starts = (np.cumsum(support.counts, dtype=np.int64) - support.counts)[support.counts > 0]
    steps[starts] = support.ids[starts]
    several = np.repeat(support.counts != 1, support.counts)
    return dict(zip(NAMES, (_pack_varints(support.counts), _pack_varints(steps[several])), strict=True))


def unpack_support(arrays: Mapping[str, Array]) -> Support | None:
    """The support in a payload's arrays; None without one. Raises `wire.decode` if it is damaged."""
    if NAMES[0] not in arrays and NAMES[1] not in arrays:
        return None
    for name in NAMES:
        if name not in arrays or arrays[name].dtype != np.uint8:
            raise WireError("wire.decode", f"support: {name} u1 is missing")
        if (count := int(np.count_nonzero(arrays[name] < 128))) > MOST_IDS:
            raise WireError("wire.decode", f"support: {count} ids in one message, {MOST_IDS} are allowed")
    counts, steps = (_unpack_varints(arrays[name]) for name in NAMES)
    tokens, stored = arrays.get("response"), np.where(counts == 1, 0, counts)
    if tokens is None or tokens.size != counts.size:
        raise WireError(
            "wire.decode", f"support: {counts.size} counts for {0 if tokens is None else tokens.size} tokens"
        )
    if int(stored.sum()) != steps.size:
        raise WireError("wire.decode", f"support: {steps.size} ids, {int(stored.sum())} are announced")
    ends = np.cumsum(steps + 1)
    before = np.concatenate(([0], ends))[np.cumsum(stored) - stored]
    coded = ends - np.repeat(before, stored) - 1
    if coded.size and int(coded.max()) > LARGEST_ID:
        raise WireError("wire.decode", f"support: id {int(coded.max())}")
    several = np.repeat(counts != 1, counts)
    ids = np.empty(several.size, np.int32)
    ids[several], ids[~several] = coded, tokens[counts == 1]
    return Support(counts.astype(np.int32), ids)


def _pack_varints(values: Array) -> npt.NDArray[np.uint8]:
    given = values.astype(np.int64)
    sizes = np.ones(given.size, np.int64)
    for place in range(1, MOST_BYTES):
        sizes += given >> (7 * place) > 0
    starts = np.cumsum(sizes) - sizes
    data = np.empty(int(sizes.sum()), np.uint8)
    for place in range(MOST_BYTES):
        long = sizes > place
        more = (sizes[long] > place + 1).astype(np.int64) << 7
        data[starts[long] + place] = (given[long] >> (7 * place) & 127) | more
    return data


def _unpack_varints(data: Array) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate(([0], ends[:-1] + 1)) if ends.size else ends
    sizes = ends - starts + 1
    if (data.size and data[-1] >= 128) or (sizes.size and int(sizes.max()) > MOST_BYTES):
        raise WireError("wire.decode", "support: a number does not end")
    values = np.zeros(ends.size, np.int64)
    for place in range(int(sizes.max(initial=0))):
        long = sizes > place
        values[long] |= (data[starts[long] + place].astype(np.int64) & 127) << (7 * place)
    return values

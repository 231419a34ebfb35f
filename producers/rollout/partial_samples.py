"""Long samples in pieces: what the buffer has of a sample under way, and how one goes on that another producer began.

Guarantees:
1. pieces leave in order and without a gap; where the buffer has less than was sent (its store went back), they go on
   from there;
2. a sample that was begun elsewhere is a request of its own, whose prompt ends with the tokens that are there; what is
   delivered is the whole sample: tokens, log-probs and runs of all its producers, the prompt without them;
3. what was begun is left alone, and the sample begun anew, where it cannot be continued: it has all tokens or a stop
   token already, or this engine holds other weights under a version that made it.
It sends nothing and waits for nothing.

Example: with `checkpoint_tokens = 512` a sample of 1300 tokens is sent as 512 and 512 tokens while it is generated, and
as a whole at its end. Killed at token 1200, its producer leaves 1024, and another makes the last 276.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from asyncrl.config import SamplingConfig
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.versions import Runs, cut_runs, joined_runs
from asyncrl.wire import FloatArray, IntArray, PiecesReply
from buffers.client.partial_samples import BegunSample, PieceData
from producers.rollout.rollout import parts_of

MESSAGE_TOKENS = 1 << 16  # in one message at most; the rest goes with the next one


class Made(NamedTuple):
    """Tokens of a sample `[n]`, their log-probs, and the runs over them."""

    token_ids: IntArray
    logprobs: FloatArray
    runs: Runs

    def then(self, other: Made) -> Made:
        """These and those that follow."""
        tokens = np.concatenate([self.token_ids, other.token_ids])
        return Made(tokens, np.concatenate([self.logprobs, other.logprobs]), joined_runs(self.runs, other.runs))

    def cut(self, start: int, stop: int) -> Made:
        """The tokens `start .. stop`."""
        return Made(self.token_ids[start:stop], self.logprobs[start:stop], cut_runs(self.runs, start, stop))


class Trail:
    """See the module. `request` is that of the group, `begun` what others made, `digests` are those of this engine."""

    def __init__(self, request: GenRequest, begun: Sequence[BegunSample], digests: Mapping[int, str]) -> None:
        self._request = request
        usable = [one for one in begun if one.index in request.indices and continues(one, request, digests)]
        self.begun = {one.index: one for one in usable}
        self._foreign = {version: digest for one in usable for version, digest in one.digests.items()}
        self._made: dict[int, Made] = {one.index: Made(one.token_ids, one.logprobs, one.runs) for one in usable}
        self._kept = {one.index: len(one.token_ids) for one in usable}
        self._full: set[int] = set()  # samples of which the buffer takes no more pieces

    def parts(self, sampling: SamplingConfig) -> tuple[list[GenRequest], list[GenRequest]]:
        """Requests for what starts from the prompt, one after the other, and one for each sample that goes on."""
        request = self._request
        fresh = tuple(index for index in request.indices if index not in self.begun)
        started = parts_of(replace(request, indices=fresh), sampling) if fresh else []
        going_on = [
            part for index, one in sorted(self.begun.items()) for part in parts_of(continued(request, one), sampling)
        ]
        return started, going_on

    def take(self, delta: GenDelta) -> None:
        """Tokens of a sample under way."""
        made = Made(delta.token_ids, delta.logprobs, delta.runs)
        before = self._made.get(delta.index)
        self._made[delta.index] = made if before is None else before.then(made)

    def pieces(self, indices: Collection[int]) -> list[PieceData]:
        """What the buffer does not have of these samples, which are under way."""
        found: list[PieceData] = []
        room = MESSAGE_TOKENS
        for index, made in self._made.items():
            if index not in indices:
                continue
            start = self._kept.get(index, 0)
            stop = min(len(made.token_ids), start + room)
            if stop > start and index not in self._full:
                found.append(PieceData(index, start, *made.cut(start, stop)))
                room -= stop - start
        return found

    def kept(self, reply: PiecesReply) -> None:
        """The buffer's answer to some pieces."""
        self._kept |= reply.kept
        self._full |= reply.refused.keys()

    def whole(self, sample: GenDelta) -> GenDelta:
        """The finished sample of a request with the tokens that it went on from; the trail of it ends."""
        self._made.pop(sample.index, None)
        one = self.begun.get(sample.index)
        if one is None:
            return sample
        before = Made(one.token_ids, one.logprobs, one.runs)
        return replace(sample, **before.then(Made(sample.token_ids, sample.logprobs, sample.runs))._asdict())

    def digests(self, runs: Sequence[Runs], own: Mapping[int, str]) -> dict[int, str]:
        """The digests of the versions in these runs: this engine's, else those of who made them."""
        known = {**self._foreign, **own}
        return {version: known[version] for part in runs for version, _ in part if version in known}

    def saved(self, samples: Sequence[GenDelta]) -> tuple[int, int]:
        """How many of these were continued, and how many of their tokens were there."""
        mine = [self.begun[sample.index] for sample in samples if sample.index in self.begun]
        return len(mine), sum(len(one.token_ids) for one in mine)


def continues(one: BegunSample, request: GenRequest, digests: Mapping[int, str]) -> bool:
    """Whether this engine may go on from there."""
    if not 0 < len(one.token_ids) < request.max_new_tokens or np.isin(one.token_ids, request.stop_ids).any():
        return False
    return all(digests.get(version, digest) == digest for version, digest in one.digests.items())


def continued(request: GenRequest, one: BegunSample) -> GenRequest:
    """The request for the rest of a sample of a group; before those that start now, as its tokens age."""
    return replace(
        request,
        id=f"{request.id}:{one.index}",
        indices=(one.index,),
        begun=len(one.token_ids),
        prompt_ids=np.concatenate([request.prompt_ids, one.token_ids]),
        max_new_tokens=request.max_new_tokens - len(one.token_ids),
        priority=request.priority - 1,
    )

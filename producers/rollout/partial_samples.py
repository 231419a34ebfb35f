"""Long samples in pieces: which tokens of a sample the buffer has, and how to continue another producer's sample.

Guarantees:
1. pieces leave in order and without a gap; if the buffer has less than was sent (its store went back), they go on from
   there;
2. a continued sample is a separate request whose prompt ends with the existing tokens; the delivered sample is whole:
   tokens, log-probs and runs of all its producers, the prompt without them;
3. a sample that cannot be continued starts again: it has all tokens or a stop token already, this engine holds other
   weights under a version that made it, or only one of the two records the support of draws.
It sends nothing and waits for nothing.

Example: with `checkpoint_tokens = 512` a sample of 1300 tokens is sent as 512 and 512 tokens while it is generated, and
as a whole at its end. Killed at token 1200, its producer leaves 1024, and another makes the last 276.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from asyncrl.config import SamplingConfig
from asyncrl.engine import Engine, GenDelta, GenRequest
from asyncrl.versions import Runs, cut_runs, joined_runs
from asyncrl.wire import FloatArray, IntArray, PiecesReply, Support, join_supports
from buffers.client.partial_samples import BegunSample, PieceData
from producers.rollout.rollout import split_request
from weightsync.receiver.digests import DigestsSince

MESSAGE_TOKENS = 1 << 16  # in one message at most; the rest goes with the next one


class Tokens(NamedTuple):
    """Tokens of a sample `[n]`, their log-probs, and the runs and the support over them."""

    token_ids: IntArray
    logprobs: FloatArray
    runs: Runs
    support: Support | None = None

    def extend(self, other: Tokens) -> Tokens:
        """These tokens followed by others."""
        tokens = np.concatenate([self.token_ids, other.token_ids])
        support = join_supports((part.support, len(part.token_ids)) for part in (self, other))
        logprobs = np.concatenate([self.logprobs, other.logprobs])
        return Tokens(tokens, logprobs, joined_runs(self.runs, other.runs), support)

    def cut(self, start: int, stop: int) -> Tokens:
        """The tokens `start .. stop`."""
        support = None if self.support is None else self.support.cut(start, stop)
        runs = cut_runs(self.runs, start, stop)
        return Tokens(self.token_ids[start:stop], self.logprobs[start:stop], runs, support)

    @staticmethod
    def read(part: GenDelta | BegunSample) -> Tokens:
        return Tokens(part.token_ids, part.logprobs, part.runs, part.support)


class Trail:
    """The pieces of one group. `begun` are samples of other producers, `digests` those of this engine."""

    def __init__(self, request: GenRequest, begun: Sequence[BegunSample], digests: Mapping[int, str]) -> None:
        self._request = request
        usable = [one for one in begun if one.index in request.indices and can_continue(one, request, digests)]
        self.begun = {one.index: one for one in usable}
        self._foreign = {version: digest for one in usable for version, digest in one.digests.items()}
        self._since = DigestsSince(digests)
        self._made: dict[int, Tokens] = {one.index: Tokens.read(one) for one in usable}
        self._kept = {one.index: len(one.token_ids) for one in usable}
        self._full: set[int] = set()  # the buffer takes no more pieces of these

    def parts(self, sampling: SamplingConfig) -> tuple[list[GenRequest], list[GenRequest]]:
        """Requests that start from the prompt, one after the other, and one for each continued sample."""
        request = self._request
        fresh = tuple(index for index in request.indices if index not in self.begun)
        started = split_request(replace(request, indices=fresh), sampling) if fresh else []
        going_on = [
            part
            for index, one in sorted(self.begun.items())
            for part in split_request(continuation(request, one), sampling)
        ]
        return started, going_on

    def engine(self, engine: Engine, _keep: Any) -> Engine:
        """The engine for the environment: it yields tokens of samples under way by itself."""
        return engine

    def take(self, delta: GenDelta) -> None:
        """Add tokens of a sample under way."""
        made = Tokens.read(delta)
        before = self._made.get(delta.index)
        self._made[delta.index] = made if before is None else before.extend(made)

    def pieces(self, indices: Collection[int]) -> list[PieceData]:
        """The tokens of these samples that the buffer does not have."""
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

    def take_reply(self, reply: PiecesReply) -> None:
        """Take the buffer's answer to some pieces."""
        self._kept |= reply.kept
        self._full |= reply.refused.keys()

    def complete_sample(self, sample: GenDelta) -> GenDelta:
        """The finished sample with the tokens that it continued; its trail ends."""
        self._made.pop(sample.index, None)
        one = self.begun.get(sample.index)
        if one is None:
            return sample
        return replace(sample, **Tokens.read(one).extend(Tokens.read(sample))._asdict())

    def digests(self, runs: Sequence[Runs], own: Mapping[int, str]) -> dict[int, str]:
        """The digests of the versions in these runs: this engine's, else those of the other producers."""
        known = self._since.resolve({**self._foreign, **own})
        return {version: known[version] for part in runs for version, _ in part if version in known}

    def count_saved(self, samples: Sequence[GenDelta]) -> tuple[int, int]:
        """How many of these samples were continued, and how many tokens that saved."""
        mine = [self.begun[sample.index] for sample in samples if sample.index in self.begun]
        return len(mine), sum(len(one.token_ids) for one in mine)


def can_continue(one: BegunSample, request: GenRequest, digests: Mapping[int, str]) -> bool:
    """Whether this engine may continue the sample."""
    if not 0 < len(one.token_ids) < request.max_new_tokens or np.isin(one.token_ids, request.stop_ids).any():
        return False
    if one.turns or (one.support is not None) != request.support:  # made under other settings
        return False
    return has_known_weights(one, digests)


def has_known_weights(one: BegunSample, digests: Mapping[int, str]) -> bool:
    """Whether this engine holds no other weights under a version that made the sample."""
    return all(digests.get(version, digest) == digest for version, digest in one.digests.items())


def continuation(request: GenRequest, one: BegunSample) -> GenRequest:
    """The request for the rest of a sample; ahead of new samples, because its tokens age."""
    return replace(
        request,
        id=f"{request.id}:{one.index}",
        indices=(one.index,),
        begun=len(one.token_ids),
        prompt_ids=np.concatenate([request.prompt_ids, one.token_ids]),
        max_new_tokens=request.max_new_tokens - len(one.token_ids),
        priority=request.priority - 1,
    )

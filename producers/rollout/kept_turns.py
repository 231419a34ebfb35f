"""Turns that survive their producer: the buffer has the finished turns of a session, another producer replays them.

The environment plays the sample from its start. As long as it asks with the context that a kept turn answered, token
for token, it gets that turn; from the first other context on, the engine answers. So an environment restores its state
by being played again, tools included, and needs no code for that. Guarantees:
1. a turn is replayed only behind the exact context (tokens and images) that it was sampled behind, in the order in
   which the turns were made, with its log-probs, versions and support;
2. turns leave whole, in order and without a gap; if the buffer has less than was sent (its store went back), they go on
   from there;
3. from a context that no kept turn answers on, the sample is new: what was kept of it is replaced in the buffer at the
   end of that turn, and the history says so (`discard`, `replaced`);
4. turns are not replayed if this engine holds other weights under a version that made one of them;
5. a turn that its agent left or cut by a stop string is not kept, nor are those after it.

Example: with `producers.checkpoint_tokens = 256`, a session of turns of 200, 100 and 50 tokens sends its first two
turns together when the second one ends. If its producer dies in the third, another one replays two and samples one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config import SamplingConfig
from asyncrl.engine import Engine, GenDelta, GenRequest, join_deltas
from asyncrl.versions import Runs
from asyncrl.wire import PiecesReply
from buffers.client.partial_samples import BegunSample, PieceData, TurnMark
from producers.rollout.partial_samples import Tokens, has_known_weights
from producers.rollout.rollout import split_request
from weightsync.receiver.digests import DigestsSince


class KeptTurn(NamedTuple):
    """A turn and the digest of its context."""

    tokens: Tokens
    finish: str
    context: int


class _Record:
    """The turns of one sample."""

    def __init__(self, begun: BegunSample | None) -> None:
        self.replays = deque(_split_turns(begun) if begun is not None else ())
        self.kept = len(begun.token_ids) if begun is not None else 0  # tokens that the buffer has
        self.turns: list[KeptTurn] = []
        self.replayed_tokens = 0
        self.is_new = False  # it left the kept turns: they must be replaced
        self.is_full = False  # no more of it is kept

    def unsent(self) -> list[KeptTurn]:
        """The turns behind the tokens that the buffer has."""
        place, found = 0, []
        for turn in self.turns:
            if place >= self.kept:
                found.append(turn)
            place += len(turn.tokens.token_ids)
        return found


class TurnTrail:
    """The kept turns of the samples of one group; takes the place of `Trail` where samples have turns. `begun` are
    samples of other producers, `digests` those of this engine."""

    def __init__(self, request: GenRequest, begun: Sequence[BegunSample], digests: Mapping[int, str]) -> None:
        self._request = request
        usable = {
            one.index: one
            for one in begun
            if one.turns and (one.support is not None) == request.support and has_known_weights(one, digests)
        }
        self._foreign = {version: digest for one in usable.values() for version, digest in one.digests.items()}
        self._since = DigestsSince(digests)
        self._records = {index: _Record(usable.get(index)) for index in request.indices}
        self._asked: dict[str, int] = {}  # turn in progress -> digest of its context

    def parts(self, sampling: SamplingConfig) -> tuple[list[GenRequest], list[GenRequest]]:
        """As `Trail.parts`: every sample is played from its start."""
        return split_request(self._request, sampling), []

    def engine(self, engine: Engine, keep: Callable[[list[GenDelta]], Awaitable[bool]]) -> Any:
        """The engine for the environment: it replays, and keeps what it makes."""
        return _KeepingEngine(engine, self, keep) if self._request.delta_tokens else engine

    def replay(self, request: GenRequest) -> GenDelta | None:
        """The kept turn that answers this request; None if the engine has to."""
        record, context = self._records[request.indices[0]], _context_digest(request)
        if record.replays:
            turn = record.replays.popleft()
            if turn.context == context and len(turn.tokens.token_ids) <= request.max_new_tokens:
                record.turns.append(turn)
                record.replayed_tokens += len(turn.tokens.token_ids)
                return GenDelta(request.id, request.indices[0], finish=turn.finish, **turn.tokens._asdict())
            record.replays.clear()
            record.kept, record.is_new = 0, True
        self._asked[request.id] = context
        return None

    def take(self, delta: GenDelta) -> None:
        """Add a turn that the engine made."""
        record = self._records[delta.index]
        record.turns.append(KeptTurn(Tokens.read(delta), delta.finish or "stop", self._asked.pop(delta.id)))
        made = sum(len(turn.tokens.token_ids) for turn in record.turns)
        if made > self._request.max_new_tokens:  # of several rows: more than the buffer keeps of a sample
            record.is_full = True

    def stop_keeping(self, index: int) -> None:
        """No more of this sample is kept: its next turns follow one that is not."""
        self._records[index].is_full = True

    def pieces(self, indices: Collection[int]) -> list[PieceData]:
        """The turns of these samples that the buffer does not have, if they are long enough to be sent: one piece."""
        for index in indices:
            record = self._records[index]
            turns = [] if record.is_full else record.unsent()
            if turns and (
                record.is_new or sum(len(one.tokens.token_ids) for one in turns) >= self._request.delta_tokens
            ):
                record.is_new = False
                joined = turns[0].tokens
                for turn in turns[1:]:
                    joined = joined.extend(turn.tokens)
                marks = tuple(TurnMark(len(one.tokens.token_ids), one.finish, one.context) for one in turns)
                return [PieceData(index, record.kept, *joined, turns=marks)]
        return []

    def take_reply(self, reply: PiecesReply) -> None:
        """Take the buffer's answer to a piece."""
        for index, length in reply.kept.items():
            self._records[index].kept = length
        for index in reply.refused:
            self._records[index].is_full = True

    def complete_sample(self, sample: GenDelta) -> GenDelta:
        """The finished sample: the session has its turns already."""
        return sample

    def digests(self, runs: Sequence[Runs], own: Mapping[int, str]) -> dict[int, str]:
        """As `Trail.digests`."""
        known = self._since.resolve({**self._foreign, **own})
        return {version: known[version] for part in runs for version, _ in part if version in known}

    def count_saved(self, samples: Sequence[GenDelta]) -> tuple[int, int]:
        """How many of these samples have replayed turns, and how many tokens that saved."""
        saved = [count for sample in samples if (count := self._records[sample.index].replayed_tokens)]
        return len(saved), sum(saved)


class _KeepingEngine:
    """Everything that is not here passes through to the engine."""

    def __init__(self, engine: Engine, trail: TurnTrail, keep: Callable[[list[GenDelta]], Awaitable[bool]]) -> None:
        self._engine = engine
        self._trail = trail
        self._keep = keep
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """One turn. Ends without a token, like an aborted request, once the lease is lost."""
        if self._is_lost:
            return
        if (kept := self._trail.replay(request)) is not None:
            yield kept
            return
        parts: list[GenDelta] = []
        try:
            async with aclosing(self._engine.generate(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    parts.append(delta)
                    yield delta
        except GeneratorExit:  # an agent left, or its stop string came: no whole turn
            self._trail.stop_keeping(request.indices[0])
            raise
        if parts and parts[-1].finish and not await self._keep([join_deltas(parts)]):
            self._is_lost = True


def _split_turns(one: BegunSample) -> list[KeptTurn]:
    whole, place, found = Tokens.read(one), 0, []
    for mark in one.turns:
        found.append(KeptTurn(whole.cut(place, place + mark.tokens), mark.finish, mark.context))
        place += mark.tokens
    return found


def _context_digest(request: GenRequest) -> int:
    """64 bits of everything that the engine sees."""
    digest = hashlib.blake2b(np.ascontiguousarray(request.prompt_ids, np.int32).tobytes(), digest_size=8)
    for image in request.images:
        digest.update(hashlib.blake2b(image).digest())
    digest.update(np.asarray(request.image_places, np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)

"""Turns that the buffer keeps: a session gets them again behind the same contexts, and is new from another one on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_lab import SayingEngine, config_of, tokenizer_in
from msgspec.structs import replace

from asyncrl import wire
from asyncrl.engine import GenDelta, GenRequest
from buffers.client.partial_samples import BegunSample, PieceData, pack_pieces, unpack_begun
from buffers.payloads import partial_samples
from producers.data.prompts import encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import Turns
from producers.rollout.kept_turns import TurnTrail
from producers.rollout.rollout import Finished

EVERY = 4
WORDS = ("first", "the second", "3", "and the last one")
DIGESTS = {version: f"{version:032x}" for version in range(3, 40)}
LEASE = wire.Lease(7, 70, 0, (0, 1), 5, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_in(folder)


class Session:
    """One lease of a group of two samples, played with what was begun."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, digests: dict[int, str] | None = None) -> None:
        self.config = config_of(folder, 'name = "chat"\n')
        self.tokenizer = tokenizer
        self.engine = SayingEngine(tokenizer, lambda index, turn, _: WORDS[turn] + str(index))
        self.digests = DIGESTS if digests is None else digests
        self.sent: list[PieceData] = []
        self.held = True
        self.forgets = False

    def play(self, rollout: Any, begun: Sequence[BegunSample] = (), *, every: int = EVERY) -> list[Finished]:
        """The finished samples by index."""
        environment = Turns(self.config, self.tokenizer, rollout)
        row = {"prompt": [{"role": "user", "content": "hello"}]}
        prompt = encode_prompt(row, self.config.data, self.tokenizer, ())
        request = GenRequest("7:70", prompt, (0, 1), 5, 300, delta_tokens=every)
        self.trail = TurnTrail(request, begun, self.digests)
        return sorted(asyncio.run(self._run(environment, request, row)), key=lambda item: item.sample.index)

    async def _run(self, environment: Any, request: GenRequest, row: Any) -> list[Finished]:
        async def keep(deltas: list[GenDelta]) -> bool:
            for delta in deltas:
                self.trail.take(delta)
            pieces = self.trail.pieces({delta.index for delta in deltas})
            self.sent += pieces
            kept = {one.index: 0 if self.forgets else one.start + len(one.token_ids) for one in pieces}
            self.trail.take_reply(wire.PiecesReply(kept, {}))
            held, self.held = self.held, True  # another sample's answer may still say so
            return held

        engine = self.trail.engine(self.engine, keep)
        return [item async for item in environment.play(engine, request, row) if isinstance(item, Finished)]

    def begun(self, index: int, *, pieces: int) -> BegunSample:
        """What a lease hands out of the first pieces of a sample: through the buffer's own checks and files."""
        mine = [one for one in self.sent if one.index == index][:pieces]
        stored, runs = [], ()
        for one in mine:
            message, payload = pack_pieces("producer", LEASE, [one], DIGESTS)
            arrays, why = partial_samples.check(message, payload, group_size=2, max_tokens=300, newest_version=40)
            assert not why
            runs += message.samples[0].runs
            stored.append(arrays)
        joined = {name: np.concatenate([arrays[name] for arrays in stored]) for name in stored[0]}
        fields, data = wire.pack_arrays(joined)
        digests = {version: DIGESTS[version] for version, _ in runs}
        head = wire.Begun(7, index, joined["response"].size, runs, digests, fields)
        (found,) = unpack_begun(wire.Leases((LEASE,), 3, begun=(head,)), [data])[7, 70]
        return found


async def four_turns(chat: Any, row: Any) -> float:
    texts = [(await chat.say(None if not number else f"go on {number}")).text for number in range(4)]
    return float(len(texts))


def same(one: Finished, other: Finished) -> None:
    np.testing.assert_array_equal(one.sample.token_ids, other.sample.token_ids)
    np.testing.assert_array_equal(one.sample.logprobs, other.sample.logprobs)
    assert (one.sample.finish, one.reward, one.rows) == (other.sample.finish, other.reward, other.rows)
    np.testing.assert_array_equal(one.mask, other.mask)


def test_a_session_goes_on_behind_its_last_kept_turn(folder: Path, tokenizer: Tokenizer) -> None:
    first = Session(folder, tokenizer)
    whole = first.play(four_turns)
    assert [one.start for one in first.sent if one.index == 0] == [0, 7, 19]  # "3" and its end are too short alone
    second = Session(folder, tokenizer)
    second.engine.version, second.engine._turns = 20, {0: 1, 1: -1}  # two turns of sample 0 are replayed
    again = second.play(four_turns, [first.begun(0, pieces=2)])
    assert [request.indices[0] for request in second.engine.asked].count(0) == 2
    same(again[0], whole[0])
    same(again[1], whole[1])
    assert again[0].sample.runs[0][0] == 3 and again[0].sample.runs[-1][0] == 23
    assert [one.start for one in second.sent if one.index == 0] == [19]
    assert second.trail.count_saved([one.sample for one in again]) == (1, 19)
    assert second.trail.digests([again[0].sample.runs], {22: "a", 23: "b"}) == {
        3: DIGESTS[3], 4: DIGESTS[4], 22: "a", 23: "b"
    }  # fmt: skip


def test_another_context_makes_the_sample_new(folder: Path, tokenizer: Tokenizer) -> None:
    async def other(chat: Any, row: Any) -> float:
        await chat.say()
        await chat.say("another answer of the tool")
        return 1.0

    first = Session(folder, tokenizer)
    first.play(four_turns)
    second = Session(folder, tokenizer)
    second.engine._turns = {0: 0}
    again = second.play(other, [first.begun(0, pieces=3)], every=100)
    assert again[0].sample.runs[0][0] == 3  # the first turn had this very context
    np.testing.assert_array_equal(again[0].mask[:8], [1] * 7 + [0])
    assert [(one.index, one.start) for one in second.sent] == [(0, 0)]  # at once: the history says what was replaced
    assert [mark.tokens for mark in second.sent[0].turns] == [7, 12]


@pytest.mark.parametrize("why", ["other weights", "not turns", "support"])
def test_what_cannot_be_replayed_starts_anew(folder: Path, tokenizer: Tokenizer, why: str) -> None:
    first = Session(folder, tokenizer)
    whole = first.play(four_turns)
    begun = first.begun(0, pieces=2)
    if why == "not turns":
        begun = replace(begun, turns=())
    if why == "support":
        begun = replace(begun, support=wire.uncut(len(begun.token_ids)))
    second = Session(folder, tokenizer, digests=DIGESTS | {3: "another"} if why == "other weights" else None)
    same(second.play(four_turns, [begun])[0], whole[0])
    assert len(second.engine.asked) == 8
    assert second.trail.count_saved([whole[0].sample]) == (0, 0)


def test_a_store_that_went_back_gets_the_turns_again(folder: Path, tokenizer: Tokenizer) -> None:
    session = Session(folder, tokenizer)
    session.forgets = True
    session.play(four_turns)
    assert {one.start for one in session.sent} == {0}
    assert [len(one.turns) for one in session.sent if one.index == 0] == [1, 2, 3, 4]


def test_a_lost_lease_ends_the_samples(folder: Path, tokenizer: Tokenizer) -> None:
    session = Session(folder, tokenizer)
    session.held = False
    assert session.play(four_turns) == [] and len(session.engine.asked) <= 4


def test_a_turn_that_was_left_is_not_kept(folder: Path, tokenizer: Tokenizer) -> None:
    async def leaves(chat: Any, row: Any) -> float:
        await chat.say()
        return 1.0

    session = Session(folder, tokenizer)
    session.play(leaves, every=1)
    request = replace(session.engine.asked[0], id="7:70:0:1")

    async def leave() -> None:
        engine = session.trail.engine(session.engine, None)  # type: ignore[arg-type]
        deltas = engine.generate(request)
        await anext(deltas)
        await deltas.aclose()

    session.engine._turns = {}
    asyncio.run(leave())
    assert session.trail.pieces({0}) == []


def test_a_piece_of_turns_is_checked(folder: Path, tokenizer: Tokenizer) -> None:
    session = Session(folder, tokenizer)
    session.play(four_turns)
    message, payload = pack_pieces("producer", LEASE, [session.sent[0]], DIGESTS)
    arrays = dict(wire.unpack_arrays(message.fields, payload))
    limits = {"group_size": 2, "max_tokens": 300, "newest_version": 40}
    for coded, why in (
        ([6, 0, 1], "do not have the 7 tokens"),
        ([-1, 0, 1, 8, 0, 1], "do not have the 7 tokens"),
        ([7, 2, 1], "finish"),
        ([7, 0], "not three"),
        ([], "not three"),
    ):
        fields, data = wire.pack_arrays(arrays | {"turns": np.array(coded, np.int64)})
        assert why in partial_samples.check(replace(message, fields=fields), data, **limits)[1]
    fields, data = wire.pack_arrays(arrays | {"turns": np.array([7, 0, 1], np.int32)})
    assert "layout" in partial_samples.check(replace(message, fields=fields), data, **limits)[1]
    for digests in ({3: "d" * 65}, dict.fromkeys(range(100), "d")):
        assert "digests" in partial_samples.check(replace(message, digests=digests), payload, **limits)[1]

"""What a producer keeps of samples under way: pieces for the buffer, and samples that go on where others stopped."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from asyncrl.config import SamplingConfig
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.wire import PiecesReply, Support
from buffers.client.partial_samples import BegunSample
from producers.rollout import partial_samples as checkpoints
from producers.rollout.kept_turns import TurnTrail
from producers.rollout.partial_samples import Trail, continuation
from producers.rollout.rollout import run_together
from weightsync.receiver.digests import Digests

PROMPT = np.array([7, 8], np.int32)
REQUEST = GenRequest("3:9", PROMPT, (0, 1, 2), 5, 20, stop_ids=(2,), delta_tokens=4)


def begun(index: int, count: int, *, version: int = 4, digest: str = "d4", last: int = 10) -> BegunSample:
    tokens = np.arange(10, 10 + count, dtype=np.int32)
    tokens[-1] = last if last != 10 else tokens[-1]
    return BegunSample(index, tokens, np.full(count, -1.0, np.float32), ((version, count),), {version: digest})


def delta(index: int, start: int, count: int, *, version: int = 5, finish: str = "") -> GenDelta:
    tokens = np.arange(100 + start, 100 + start + count, dtype=np.int32)
    return GenDelta("x", index, tokens, np.full(count, -0.5, np.float32), ((version, count),), finish, start)


def test_pieces_go_on_where_the_buffer_says() -> None:
    trail = Trail(REQUEST, (), {})
    trail.take(delta(1, 0, 4))
    trail.take(delta(0, 0, 4))
    assert [(piece.index, piece.start, len(piece.token_ids)) for piece in trail.pieces({0, 1})] == [
        (1, 0, 4),
        (0, 0, 4),
    ]
    trail.take_reply(PiecesReply({0: 4, 1: 4}))
    assert trail.pieces({0, 1}) == []
    trail.take(delta(0, 4, 4, version=6))
    (piece,) = trail.pieces({0})
    assert (piece.start, piece.token_ids.tolist(), piece.runs) == (4, [104, 105, 106, 107], ((6, 4),))
    trail.take_reply(PiecesReply({0: 2}))  # its store went back
    (piece,) = trail.pieces({0})
    assert (piece.start, piece.runs, piece.token_ids.tolist()) == (2, ((5, 2), (6, 4)), [102, 103, *range(104, 108)])
    assert trail.pieces({1}) == [] and trail.pieces(set()) == []
    trail.take_reply(PiecesReply({0: 2}, {0: "not kept: full"}))
    assert trail.pieces({0}) == []


def test_a_message_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MESSAGE_TOKENS", 6)
    trail = Trail(REQUEST, (), {})
    trail.take(delta(0, 0, 4))
    trail.take(delta(1, 0, 4))
    assert [(piece.index, len(piece.token_ids)) for piece in trail.pieces({0, 1})] == [(0, 4), (1, 2)]
    trail.take_reply(PiecesReply({0: 4, 1: 2}))
    assert [(piece.index, piece.start) for piece in trail.pieces({0, 1})] == [(1, 2)]


def test_what_was_begun_is_a_request_of_its_own_and_the_sample_is_whole() -> None:
    trail = Trail(REQUEST, [begun(1, 6)], {4: "d4", 5: "d5"})
    (fresh,), (rest,) = trail.parts(SamplingConfig(group_size=3))
    assert fresh.indices == (0, 2) and fresh.begun == 0 and fresh.id == "3:9" and fresh.delta_tokens == 4
    assert rest.indices == (1,) and rest.begun == 6 and rest.max_new_tokens == 14 and rest.id == "3:9:1"
    assert rest.prompt_ids.tolist() == [7, 8, 10, 11, 12, 13, 14, 15] and rest.seed == 5 and rest.delta_tokens == 4
    trail.take(delta(1, 0, 4))
    (piece,) = trail.pieces({1})
    assert (piece.start, piece.runs, piece.token_ids.tolist()) == (6, ((5, 4),), [100, 101, 102, 103])
    trail.take_reply(PiecesReply({1: 0}))  # the buffer lost it all: it gets all of it, the others' tokens too
    (piece,) = trail.pieces({1})
    assert (piece.start, piece.runs) == (0, ((4, 6), (5, 4)))
    assert trail.digests([piece.runs], {5: "d5"}) == {4: "d4", 5: "d5"}
    whole = trail.complete_sample(delta(1, 0, 8, finish="stop"))
    assert whole.token_ids.tolist() == [*range(10, 16), *range(100, 108)] and whole.finish == "stop"
    assert whole.runs == ((4, 6), (5, 8)) and whole.logprobs.tolist() == [-1.0] * 6 + [-0.5] * 8
    assert trail.pieces({1}) == [] and trail.count_saved([whole]) == (1, 6)
    other = delta(0, 0, 3, finish="length")
    assert trail.complete_sample(other) is other and trail.count_saved([other]) == (0, 0)


def test_supports_stay_with_their_tokens_across_producers() -> None:
    asked = replace(REQUEST, support=True, top_k=2)
    first = replace(begun(1, 3), support=Support(np.array([2, 0, 1], np.int32), np.array([4, 10, 12], np.int32)))
    made = replace(delta(1, 0, 2), support=Support(np.array([1, 2], np.int32), np.array([100, 9, 101], np.int32)))
    trail = Trail(asked, [first], {4: "d4", 5: "d5"})
    trail.take(made)
    trail.take_reply(PiecesReply({1: 2}))
    (piece,) = trail.pieces({1})
    assert piece.support is not None and piece.support.counts.tolist() == [1, 1, 2]
    assert piece.support.ids.tolist() == [12, 100, 9, 101]
    whole = trail.complete_sample(replace(made, finish="stop")).support
    assert whole is not None and whole.counts.tolist() == [2, 0, 1, 1, 2]
    assert whole.ids.tolist() == [4, 10, 12, 100, 9, 101]


@pytest.mark.parametrize("now", [True, False])
def test_a_sample_of_other_settings_of_truncation_starts_anew(now: bool) -> None:
    held = None if now else Support(np.zeros(6, np.int32), np.zeros(0, np.int32))
    trail = Trail(replace(REQUEST, support=now), [replace(begun(1, 6), support=held)], {4: "d4"})
    assert not trail.begun


@pytest.mark.parametrize(
    "one",
    [begun(1, 20), begun(1, 6, last=2), begun(1, 6, digest="of others"), begun(7, 6)],
    ids=["complete", "stopped", "other weights", "not asked for"],
)
def test_what_cannot_be_continued_starts_anew(one: BegunSample) -> None:
    trail = Trail(REQUEST, [one], {4: "d4"})
    assert trail.parts(SamplingConfig(group_size=3)) == ([REQUEST], [])
    trail.take(delta(1, 0, 4))
    assert trail.pieces({1})[0].start == 0


def test_versions_that_this_engine_never_held_are_told_by_their_maker() -> None:
    trail = Trail(REQUEST, [begun(1, 6, version=3, digest="d3")], {4: "d4"})
    assert trail.begun and trail.digests([((3, 6), (4, 1))], {4: "d4"}) == {3: "d3", 4: "d4"}
    assert trail.digests([((9, 1),)], {4: "d4"}) == {}  # nobody knows: the buffer refuses it


def test_a_group_may_consist_of_what_was_begun_alone() -> None:
    trail = Trail(REQUEST, [begun(index, 6) for index in range(3)], {})
    started, rest = trail.parts(SamplingConfig(group_size=3))
    assert started == [] and [part.indices for part in rest] == [(0,), (1,), (2,)]
    assert len({part.id for part in rest}) == 3


def test_the_greedy_baseline_goes_on_greedily() -> None:
    trail = Trail(REQUEST, [begun(2, 6), begun(1, 6)], {})
    (fresh,), rest = trail.parts(SamplingConfig(group_size=2, greedy_baseline=True))
    assert fresh.indices == (0,) and fresh.top_k == 0
    assert [(part.indices, part.top_k) for part in rest] == [((1,), 0), ((2,), 1)]


def test_tokens_that_were_begun_go_into_the_prompt_in_order() -> None:
    part = continuation(REQUEST, begun(0, 1))
    assert part.prompt_ids.tolist() == [7, 8, 10] and part.prompt_ids.dtype == np.int32 and part.max_new_tokens == 19
    assert part.priority < REQUEST.priority


def test_parts_of_a_group_end_together() -> None:
    ended: list[str] = []

    async def part(name: str, answer: bool, wait_s: float) -> bool:
        try:
            await asyncio.sleep(wait_s)
        finally:
            ended.append(name)
        return answer

    async def fails() -> bool:
        raise RuntimeError("broken")

    asyncio.run(run_together([part("a", True, 0.0), part("b", True, 0.01)]))
    assert ended == ["a", "b"]
    asyncio.run(run_together([part("lost", False, 0.0), part("slow", True, 60)]))
    assert ended[2:] == ["lost", "slow"]
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run_together([part("slow", True, 60), fails()]))
    assert ended[4:] == ["slow"]


def test_tokens_of_weights_that_were_replaced_under_their_number_do_not_get_the_new_digest() -> None:
    """The learner went back to version 3 and published another 4 while a sample was in progress."""
    held = Digests()
    held.commit(3, "d3")
    held.commit(4, "d4")
    trails = [Trail(REQUEST, (), held), TurnTrail(REQUEST, (), held)]
    for version, digest in ((3, "d3"), (4, "other"), (4, "third"), (5, "d5")):
        held.commit(version, digest)
    runs = [((3, 2), (4, 2), (5, 2))]
    for trail in trails:
        assert trail.digests(runs, held) == {3: "d3", 4: "d4", 5: "d5"}  # the buffer knows 4 as "third": it refuses
    assert Trail(REQUEST, (), held).digests(runs, held) == {3: "d3", 4: "third", 5: "d5"}

"""Sessions: what the policy saw and said as one sample, and what the wire and the learner make of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from asyncrl import wire
from asyncrl.config import LearnerConfig, ProcessRewardConfig, parse
from asyncrl.config.sections.algorithm import AlgorithmConfig, ShapingConfig
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import WorkError
from asyncrl.versions import expand
from asyncrl.wire import Support
from learners.algorithms.aggregation import MODES
from learners.backends.base import to_device
from learners.batch.assembly import assemble, statistics, unusable
from learners.batch.estimates import ModelNumbers, convert_to_cuts, estimate_late, iter_cuts, response_length
from learners.batch.micro_batches import MicroBatch, Minibatch
from learners.gang.gang import Gang
from learners.step.batch_passes import Prepared, _sample_numbers
from learners.step.process_reward import loss_function as process_loss
from learners.step.resilient_step import StepRunner
from learners.step.update import StepResult, _terms, loss_function
from producers.agents.dialogue import _first
from producers.engines.request_checks import request_problem
from producers.rollout.rollout import Finished, submit_fields
from producers.rollout.session import Session


def said(*tokens: int, version: int = 3, finish: str = "stop") -> GenDelta:
    ids = np.array(tokens, np.int32)
    return GenDelta("7:1", 2, ids, -ids.astype(np.float32) / 10, ((version, len(tokens)),), finish)


def two_turns() -> Session:
    session = Session(np.array([1, 2], np.int32), index=2)
    session.add_turn(said(5, 6))
    session.observe([7])
    session.add_turn(said(8, version=4))
    return session


def test_the_example_of_the_module() -> None:
    session = two_turns()
    assert session.context.tolist() == [1, 2, 5, 6, 7, 8]
    assert not session.extend([1, 9])
    session.add_turn(said(4, version=5))
    done = session.finish(1.0, [0.25, 0.5])
    assert done.sample.token_ids.tolist() == [5, 6, 7, 8, 1, 9, 4]
    assert done.mask.tolist() == [1, 1, 0, 1, 0, 0, 1]
    assert done.rows == ((4, 2),)
    assert done.turns == ((1, 0.25), (3, 0.5))
    assert done.sample.logprobs.tolist() == pytest.approx([-0.5, -0.6, 0, -0.8, 0, 0, -0.4])
    assert expand(done.sample.runs).tolist() == [3, 3, 3, 4, 4, 4, 5]  # what was observed has the version in force


def test_supports_of_turns_stay_with_their_tokens() -> None:
    def drawn(*tokens: int, ids: Sequence[int], counts: Sequence[int]) -> GenDelta:
        return replace(said(*tokens), support=Support(np.array(counts, np.int32), np.array(ids, np.int32)))

    session = Session(np.array([1, 2], np.int32), index=2)
    session.add_turn(drawn(5, 6, ids=[5, 9], counts=[2, 0]))
    session.observe([7, 7])
    session.add_turn(drawn(8, ids=[8], counts=[1]))
    session.extend([1, 9])
    session.add_turn(drawn(4, ids=[3, 4, 6], counts=[3]))
    done = session.finish(1.0)
    assert done.sample.token_ids.tolist() == [5, 6, 7, 7, 8, 1, 9, 4]
    assert done.sample.support is not None
    assert done.sample.support.counts.tolist() == [2, 0, 0, 0, 1, 0, 0, 3]
    assert done.sample.support.ids.tolist() == [5, 9, 8, 3, 4, 6]
    assert done.sample.support.find_problem(done.sample.token_ids, done.mask) == ""
    assert two_turns().finish(1.0).sample.support is None
    short = _first(drawn(5, 6, 8, ids=[5, 9, 6, 8], counts=[2, 1, 1]), 2)  # of a stop string
    assert short.support is not None and short.support.ids.tolist() == [5, 9, 6]


def test_one_turn_is_a_plain_sample() -> None:
    session = Session(np.array([1, 2], np.int32), index=2)
    session.add_turn(said(5, 6, finish="length"))
    done = session.finish(0.5)
    assert (done.mask, done.rows, done.turns, done.sample.finish) == (None, (), (), "length")
    assert done.reward == 0.5


def test_a_longer_context_continues_its_row_and_only_the_new_part_is_observed() -> None:
    session = two_turns()
    assert session.extend([1, 2, 5, 6, 7, 8, 9, 9])
    session.add_turn(said(4))
    assert session.finish().mask.tolist() == [1, 1, 0, 1, 0, 0, 1]


def test_what_nothing_was_said_after_is_left_out() -> None:
    session = two_turns()
    session.observe([9, 9])
    session.extend([1, 1, 1])
    done = session.finish()
    assert done.sample.token_ids.tolist() == [5, 6, 7, 8]
    assert done.rows == ()


def test_a_context_without_a_turn_can_be_dropped() -> None:
    session = Session(np.array([1, 99, 2], np.int32), index=2, images=(b"a",))
    session.add_turn(said(5, 6))
    session.observe([7, 99], [b"b"], [1])
    session.drop_context()
    assert session.extend([1, 99, 2, 5, 6, 8], [b"a"]), "the row goes on behind its last turn"
    assert not session.extend([1, 9]) and session.rows == 2
    session.drop_context()
    assert session.rows == 1 and session.context.tolist() == [1, 99, 2, 5, 6]
    session.add_turn(said(4))
    done = session.finish()
    assert (done.sample.token_ids.tolist(), done.mask, done.images) == ([5, 6, 4], None, ())


def test_another_beginning_replaces_the_prompt_of_the_group() -> None:
    session = Session(np.array([1, 2], np.int32), index=0)
    assert not session.extend([3, 3, 3])
    session.add_turn(said(4))
    done = session.finish()
    assert done.rows == ((0, 3),)
    assert done.mask.tolist() == [0, 0, 0, 1]
    assert expand(done.sample.runs).tolist() == [3, 3, 3, 3]


def test_nothing_said_and_too_many_rewards_are_errors() -> None:
    with pytest.raises(WorkError, match="there is no turn"):
        Session(np.array([1], np.int32), index=0).finish()
    with pytest.raises(WorkError, match="3 rewards for 2 turns"):
        two_turns().finish(1.0, [1, 2, 3])
    with pytest.raises(WorkError, match="0 tokens"):
        two_turns().add_turn(said())


def test_a_turn_that_was_given_up_leaves_its_id_behind() -> None:
    """An engine may still hand out tokens of the request, or refuse another one of its name."""
    group, session = GenRequest("7:1", np.array([1, 2], np.int32), (0,), 5, 8), Session(np.array([1, 2]), index=0)
    asked = [session.request(group, max_prompt_tokens=4, max_new_tokens=4) for _ in range(3)]
    session.add_turn(said(5))
    asked += [session.request(group, max_prompt_tokens=4, max_new_tokens=4) for _ in range(2)]
    assert [one.id for one in asked] == ["7:1:0:0", "7:1:0:0.2", "7:1:0:0.3", "7:1:0:1", "7:1:0:1.2"]
    assert asked[0].seed == asked[1].seed != asked[3].seed


def test_what_an_engine_is_asked_for() -> None:
    config = parse(
        '[model]\npath="m"\n[data]\npath="x.jsonl"\nmax_prompt_tokens=4\n[sampling]\nmax_new_tokens=8\n'
        '[[reward]]\nfunction="m:f"\n[learner]\nmicro_batch_tokens=64\n'
    )
    group = GenRequest("7:1", np.array([1, 2], np.int32), (0, 1, 2, 3), 5, 8, top_p=0.9, delta_tokens=2)
    session = Session(group.prompt_ids, index=2)
    asked = []
    for context in ([1, 2], [1, 2, 5, 9], [4, 3, 2, 1, 4, 3]):
        session.extend(context)
        room = 12 - len(session.context)
        asked.append(session.request(group, max_prompt_tokens=4, max_new_tokens=min(8 - session.response_tokens, room)))
        assert request_problem(asked[-1], config, vocab=10, taken=False, version=0) == ""
        session.add_turn(said(5))
    assert [one.id for one in asked] == ["7:1:2:0", "7:1:2:1", "7:1:2:2"]
    assert [one.begun for one in asked] == [0, 2, 2]
    assert [one.prompt_ids.tolist() for one in asked] == [[1, 2], [1, 2, 5, 9], [4, 3, 2, 1, 4, 3]]
    assert asked[0].seed == 5 and len({one.seed for one in asked}) == 3
    assert {(one.top_p, one.indices, one.delta_tokens) for one in asked} == {(0.9, (2,), 0)}


# ---------------------------------------------------------------- the wire


def sent(done: Finished, **changes: Any) -> tuple[wire.Samples, bytes]:
    item = done.sample
    arrays = {"prompt": np.array([1, 2], np.int32), "response": item.token_ids, "logprobs": item.logprobs}
    if done.mask is not None:
        arrays["mask"] = done.mask
    fields, payload = wire.pack_arrays(arrays)
    head = wire.SampleHead(item.index, len(item.token_ids), item.finish, item.runs, done.rows, done.turns)
    message = wire.Samples("p", 7, 1, (msgspec.structs.replace(head, **changes),), {}, fields, "{}", 2)
    return message, payload


def three_rows() -> Finished:
    session = two_turns()
    session.extend([1, 9])
    session.add_turn(said(4, 4, version=5))
    session.extend([3, 3, 3])
    session.add_turn(said(6, version=5))
    return session.finish(1.0, [0.5, 0.25])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"rows": ((4, 0),)}, "rows"),
        ({"rows": ((4, 2), (5, 1))}, "rows"),
        ({"rows": ((-1, 2),)}, "rows"),
        ({"rows": ((9, 3),)}, "rows"),
        ({"rows": ((3, 2),)}, "mask: a token of a row's prompt"),
        ({"turns": ((2, 1.0),)}, "turns: a reward"),
        ({"turns": ((1, 1.0), (1, 1.0))}, "turns"),
        ({"turns": ((99, 1.0),)}, "turns"),
        ({"turns": ((1, float("nan")),)}, "turns"),
        ({"images": ((2, "a" * 64), (5, "b" * 64))}, ""),
        ({"images": ((2, "a" * 64), (2, "b" * 64))}, "images"),
        ({"images": ((99, "a" * 64),)}, "images"),
        ({"images": ((2, "a"),)}, "images"),
        ({"images": ((0, "a" * 64),)}, "images: one of sample 2 stands at a token that was sampled"),
    ],
)
def test_rows_and_turns_are_validated(change: dict[str, Any], why: str) -> None:
    message, payload = sent(three_rows(), **change)
    found = wire.validate_samples(message, payload, group_size=4)
    assert found.startswith(why) and bool(found) == bool(why), found


@pytest.mark.parametrize(("mask", "why"), [(2, "more than 0 and 1"), (0, "no token of sample 2")])
def test_masks_are_validated(mask: int, why: str) -> None:
    done = two_turns().finish()
    message, payload = sent(done._replace(mask=np.full(4, mask, np.uint8)))
    assert why in wire.validate_samples(message, payload, group_size=4)


def test_rows_without_a_mask_are_refused() -> None:
    message, payload = sent(three_rows()._replace(mask=None))
    assert "mask" in wire.validate_samples(message, payload, group_size=4)


@given(st.binary(max_size=40), st.lists(st.tuples(st.integers(-3, 99), st.integers(-3, 99)), max_size=4))
def test_no_rows_whatever_they_are_break_the_validation(noise: bytes, rows: list[tuple[int, int]]) -> None:
    done = three_rows()
    mask = np.resize(np.frombuffer(noise or b"\1", np.uint8), done.mask.size)
    message, payload = sent(done._replace(mask=mask), rows=tuple(rows))
    assert isinstance(wire.validate_samples(message, payload, group_size=4), str)


def test_what_a_producer_hands_to_the_client() -> None:
    plain = Finished(said(5))
    named = submit_fields([plain, two_turns().finish(0.0, [0.5], parts={"final": -0.5})])
    assert named["rewards"] == {2: 0.0}
    assert named["turns"] == {2: ((1, 0.5),)}
    assert named["parts"] == {2: {"final": -0.5}}
    assert list(named["masks"]) == [2]
    assert named["rows"] == {}


# ---------------------------------------------------------------- the learner


def sample(done: Finished, index: int, reward: float) -> Any:
    item = done.sample
    return SimpleNamespace(
        index=index,
        response=item.token_ids,
        logprobs=item.logprobs,
        mask=done.mask,
        runs=item.runs,
        finish=item.finish,
        reward=reward,
        parts={},
        digests={},
        rows=done.rows,
        turns=done.turns,
    )


def batch_of(*samples: Any) -> Any:
    one = SimpleNamespace(group=0, bound=9, row={}, prompt_ids=np.array([1, 2], np.int32), samples=samples, times={})
    return SimpleNamespace(step=6, version=5, replayed=False, groups=(one,), ledger={}, invalid={})


def sequences(micro: MicroBatch) -> list[tuple[list[int], int, list[int], list[float], list[int]]]:
    """Tokens, prompt tokens, mask, advantages and lags of every sequence."""
    found = []
    ends = micro.cu_seqlens.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        of = micro.sequences == number
        prompt = int(micro.positions[of][0]) + 1 - start
        found.append(
            (
                micro.input_ids[start:end].tolist(),
                prompt,
                micro.mask[of].tolist(),
                micro.advantages[of].astype(np.float64).round(3).tolist(),
                micro.lags[of].tolist(),
            )
        )
    return sorted(found)


def test_the_learner_trains_every_row_as_a_sequence_of_its_own() -> None:
    batch = batch_of(sample(three_rows(), 0, 1.0), sample(two_turns().finish(), 1, 0.0))
    cut = assemble(batch, algorithm=AlgorithmConfig(), ranks=1, max_tokens=64)
    (part,) = cut.shares[0]
    high, low = 0.707, -0.707
    (micro,) = part.micro
    assert sequences(micro) == [
        ([1, 2, 5, 6, 7, 8], 2, [1, 1, 0, 1], [low, low, 0, low], [2, 2, 2, 1]),
        ([1, 2, 5, 6, 7, 8], 2, [1, 1, 0, 1], [high, high, 0, high], [2, 2, 2, 1]),
        ([1, 9, 4, 4], 2, [1, 1], [high, high], [0, 0]),
        ([3, 3, 3, 6], 3, [1], [high], [0]),
    ]
    assert (part.tokens, part.sequences) == (9, 2)
    assert sorted(zip(micro.owners.tolist(), micro.siblings.tolist(), strict=True)) == [(0, 3), (0, 4), (0, 5), (1, 0)]
    assert cut.stats["tokens"] == 9
    assert cut.stats["response_length_mean"] == (7 + 4) / 2  # without the prompts of the later rows
    assert cut.stats["observed_share"] == pytest.approx(2 / 11)
    assert cut.stats["rows_mean"] == 2


def of_rows(algorithm: AlgorithmConfig, *, max_tokens: int = 64) -> tuple[Minibatch, dict[int, Tensor]]:
    """A sample with rows of 3, 2 and 1 trained tokens and one with a row of 3; log-probs `[T]` of every sequence."""
    batch = batch_of(sample(three_rows(), 0, 1.0), sample(two_turns().finish(), 1, 0.0))
    ((part,),) = assemble(batch, algorithm=algorithm, ranks=1, max_tokens=max_tokens).shares
    made = torch.Generator().manual_seed(0)
    lengths = (4, 2, 1, 4)
    return part, {n: -torch.rand(length, generator=made, dtype=torch.float64) for n, length in enumerate(lengths)}


def loss_of(part: Minibatch, logprobs: dict[int, Tensor], algorithm: AlgorithmConfig, gang: Any) -> float:
    """The loss of all micro-batches under these log-probs."""
    config = LearnerConfig(algorithm=algorithm)
    current = [torch.cat([logprobs[n] for n in piece.samples.tolist()]) for piece in part.micro]
    terms, counts = _terms(part, Prepared([current]), 0, config, backend=None, gang=gang, seed=(0, 0))  # type: ignore[arg-type]
    loss = loss_function(algorithm, counts, terms)
    return sum(
        float(loss(now, torch.zeros_like(now), to_device(piece, torch.device("cpu")), number)[0])
        for number, (piece, now) in enumerate(zip(part.micro, current, strict=True))
    )


@pytest.mark.parametrize("max_tokens", [64, 6])  # all rows together, and each for itself
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("counted", ["sample", "row"])
@pytest.mark.parametrize("mode", MODES)
def test_every_sample_counts_once_or_every_row(mode: Any, counted: Any, kept: bool, max_tokens: int) -> None:
    given: Any = {"correction": "rejection", "denominator": "kept"} if kept else {"correction": "none"}
    options = {"options": ["token_k1"], "thresholds": [1.5]} if kept else {}
    algorithm = AlgorithmConfig(
        loss="reinforce", aggregation=mode, sequence=counted, loss_scale_factor=5.0, correction_options=options, **given
    )
    part, logprobs = of_rows(algorithm, max_tokens=max_tokens)
    assert len(part.micro) == (1 if max_tokens == 64 else 4)
    behaviour = {0: [-0.5, -0.6, 0, -0.8], 1: [-0.4, -0.4], 2: [-0.6], 3: [-0.5, -0.6, 0, -0.8]}
    units: dict[Any, list[float]] = {}  # terms of the trained tokens of everything that counts once
    for number, values in logprobs.items():
        for place, value in enumerate(values.tolist()):
            inside = not kept or abs(value - behaviour[number][place]) <= math.log(1.5)
            if inside and not (number in (0, 3) and place == 2):  # the token that was observed
                units.setdefault(number if counted == "row" else number == 3, []).append(
                    (0.5**0.5 if number == 3 else -(0.5**0.5)) * value
                )
    rejected = 9 - sum(map(len, units.values()))
    assert (0 < rejected < 5) == kept
    sums, lengths = [sum(one) for one in units.values()], [len(one) for one in units.values()]
    wanted = {
        "token-mean": sum(sums) / sum(lengths),
        "token-sum": sum(sums),
        "seq-mean-token-mean": sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(units),
        "seq-mean-token-sum": sum(sums) / len(units),
        "seq-mean-token-sum-norm": sum(sums) / len(units) / 5,
    }
    found = loss_of(part, logprobs, algorithm, Gang(0, 1, None))  # type: ignore[arg-type]
    assert found == pytest.approx(wanted[mode], rel=1e-5)


def test_every_draw_of_a_sample_counts_once() -> None:
    done, other = sample(three_rows(), 0, 1.0), sample(two_turns().finish(), 1, 0.0)
    drawn = assemble(
        batch_of(done, other), algorithm=AlgorithmConfig(shaping=ShapingConfig(resample="pow")), ranks=1,
        max_tokens=64,
    )  # fmt: skip
    ((part,),) = drawn.shares
    numbers = part.micro[0].samples.tolist()
    times = {place: numbers.count(place) for place in range(4)}
    assert times == {0: 2, 1: 2, 2: 2, 3: 0} and part.sequences == 2
    assert part.micro[0].siblings[part.micro[0].samples == 0].tolist() == [3, 3]
    assert part.micro[0].owners[part.micro[0].samples == 0].tolist() == [0, 1]


def test_rows_share_the_weight_of_their_sample_in_the_process_reward_model_and_in_figures() -> None:
    part, logprobs = of_rows(AlgorithmConfig())
    (piece,) = part.micro
    micro = to_device(piece, torch.device("cpu"))
    current = torch.cat([logprobs[n] for n in piece.samples.tolist()])
    loss = process_loss([torch.zeros_like(current)], part.sequences, ProcessRewardConfig(beta=1.0))
    value, sums = loss(current, current, micro, 0)
    trained = {n: [True, True, False, True] if n in (0, 3) else [True] * 2 for n in range(4)}
    logits = [float(logprobs[n][torch.tensor(trained[n][: len(logprobs[n])])].sum()) for n in range(4)]
    each = [math.log1p(math.exp(-logit if n < 3 else logit)) for n, logit in enumerate(logits)]
    assert float(value) == pytest.approx((3 / 6 * each[0] + 2 / 6 * each[1] + 1 / 6 * each[2] + each[3]) / 2)
    assert (float(sums["right_sum"]), float(sums["sequences_sum"])) == pytest.approx((1, 2))  # the wrong answer's
    weights = {0: 1.0, 1: 2.0, 2: 4.0, 3: 5.0}
    whole = assemble(
        batch_of(sample(three_rows(), 0, 1.0), sample(two_turns().finish(), 1, 0.0)), algorithm=AlgorithmConfig(),
        ranks=1, max_tokens=64,
    ).whole  # fmt: skip
    runner: Any = SimpleNamespace(_whole=whole)
    assert StepRunner._sample_weights(runner, StepResult({}, 0, weights=weights)) == pytest.approx({0: 11 / 6, 1: 5.0})


def test_numbers_of_the_model_find_their_sample_and_their_way_back() -> None:
    batch = batch_of(sample(three_rows(), 0, 1.0), sample(two_turns().finish(), 1, 0.0))
    algorithm = AlgorithmConfig(advantage="gae")
    whole = assemble(batch, algorithm=algorithm, ranks=1, max_tokens=64).whole
    rows = [np.arange(cut.stop - cut.start, dtype=np.float32) + 10 * n for n, cut in enumerate(whole.cuts)]
    ends = [np.array([float(n)], np.float32) for n in range(len(whole.cuts))]
    found = _sample_numbers(whole, ModelNumbers(values=rows, after=ends))
    assert found.values is not None and found.after is not None
    assert found.values[0].tolist() == [0, 1, 2, 3, 0, 0, 10, 11, 0, 0, 0, 20]
    assert [end.tolist() for end in found.after] == [[2], [3]]
    assert [row.tolist() for row in convert_to_cuts(whole, found.values)] == [row.tolist() for row in rows]
    late = estimate_late(whole, found, algorithm, kl_coeff=0.0, correct=False)
    assert late.advantages is not None and late.advantages[0].shape == (12,)
    assert (late.advantages[0][[2, 4, 5, 8, 9, 10]] == 0).all()


def test_a_correction_over_the_batch_has_one_weight_for_each_sequence() -> None:
    batch = batch_of(sample(three_rows(), 0, 1.0))
    options = {"level": "sequence", "upper": 100.0, "batch_normalize": True}
    algorithm = AlgorithmConfig(advantage="gae", correction_options=options)
    whole = assemble(batch, algorithm=algorithm, ranks=1, max_tokens=64).whole
    behaviour, zeros = whole.samples[0].logprobs, np.zeros(12, np.float32)
    found = ModelNumbers(proximal=[behaviour + np.float32(0.25)], values=[zeros], after=[np.zeros(1, np.float32)])
    late = estimate_late(whole, found, algorithm, kl_coeff=0.0, correct=True)
    assert late.weights is not None
    rows = [late.weights[0][cut.start : cut.stop] for cut in whole.cuts]
    trained = [row[row > 0] for row in rows]  # prompts and observations have the weight 0
    assert all(np.ptp(row) == 0 for row in trained), "one weight for all tokens of a sequence"
    gaps = [float(np.log(row[0] / trained[0][0])) for row in trained]
    assert gaps == pytest.approx([0.25 * (row.size - trained[0].size) for row in trained], abs=1e-3)


def test_rewards_of_turns_stand_where_the_turns_end() -> None:
    batch = batch_of(sample(three_rows(), 0, 1.0), sample(two_turns().finish(), 1, 0.5))
    whole = assemble(batch, algorithm=AlgorithmConfig(), ranks=1, max_tokens=64).whole
    rewards = whole.rollouts.rewards
    assert rewards[0].tolist() == [0, 0.5, 0, 0.25, 0, 0, 0, 0, 0, 0, 0, 0.25]
    assert rewards[1, :4].tolist() == [0, 0, 0, 0.5]
    assert torch.equal(rewards.sum(-1), whole.scores)


def test_lengths_are_judged_by_row() -> None:
    one = sample(three_rows(), 0, 1.0)
    (group,) = batch_of(one).groups
    assert unusable(group, max_tokens=6) == ""
    assert "6 tokens" in unusable(group, max_tokens=5)
    assert [cut.stop - cut.start for cut in iter_cuts([one])] == [4, 2, 1]
    assert response_length(one) == 7


def test_modes_without_rewards_train_single_sequences() -> None:
    (several,), (single,) = (batch_of(sample(one, 0, 1.0)).groups for one in (three_rows(), two_turns().finish()))
    assert unusable(single, max_tokens=64, one_row=True) == ""
    assert unusable(several, max_tokens=64, one_row=True).startswith("rows: sample 0 has several sequences")


def test_samples_without_observations_have_no_figures_of_them() -> None:
    session = Session(np.array([1], np.int32), index=0)
    session.add_turn(said(5))
    assert "observed_share" not in statistics(batch_of(sample(session.finish(), 0, 1.0)), np.zeros(1))

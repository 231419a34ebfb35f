"""Routing replay without a model: the experts of samples in payloads, at the buffer, and in the learner's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bare_config import BARE
from made_batches import a_batch, a_group, a_sample
from msgspec.structs import replace

from asyncrl import wire
from asyncrl.config import parse
from asyncrl.config.rules.learner import model_problems
from asyncrl.engine import EngineCapabilities, GenDelta
from asyncrl.errors import ConfigError, ConfigErrors, WireError
from asyncrl.wire import pack_experts, unpack_experts
from asyncrl.wire.batch_arrays import group_data
from buffers.client.producer import _pack_samples
from learners.batch.assembly import assemble, replayed_share, unusable
from learners.batch.micro_batches import Minibatch, Sample, decode_share, encode_share, packed_row, padded_rows
from producers.main import refuse_unable
from producers.rollout.session import Session

MIXTURE = {"num_experts": 8, "num_hidden_layers": 3, "num_experts_per_tok": 2}


def choices(tokens: int, *, first: int = 0, dtype: Any = np.uint8) -> Any:
    """Of 3 layers, 2 for a token."""
    return ((np.arange(tokens * 6) + first) % 8).astype(dtype).reshape(tokens, 3, 2)


# ---------------------------------------------------------------- in payloads


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_of_several_samples_come_back(dtype: Any) -> None:
    given = [choices(4, dtype=dtype), None, choices(6, first=3, dtype=dtype)]
    packed = pack_experts(given)
    assert packed["experts"].nbytes == 60 * np.dtype(dtype).itemsize, "nothing is stored but the choices"
    found = unpack_experts(packed, [5, 9, 7])
    assert found[1] is None
    for one, other in ((found[0], given[0]), (found[2], given[2])):
        assert one is not None and np.array_equal(one, other) and one.dtype == dtype
    assert pack_experts([None, None]) == {} and unpack_experts({}, [3, 4]) == [None, None]


DAMAGED = {
    "no shape": ({"experts_shape": None}, [5, 7]),
    "no experts": ({"experts": None}, [5, 7]),
    "another length of a sample": ({}, [5, 8]),
    "more samples": ({}, [5, 7, 9]),
    "fewer numbers": ({"experts": np.zeros(59, np.uint8)}, [5, 7]),
    "another dtype": ({"experts": np.zeros(60, np.int32)}, [5, 7]),
    "no layer": ({"experts": np.zeros(0, np.uint8), "experts_shape": np.array([0, 2, 4, 6], np.int32)}, [5, 7]),
    "negative": ({"experts_shape": np.array([-3, -2, 4, 6], np.int32)}, [5, 7]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_experts_are_refused(name: str) -> None:
    changed, tokens = DAMAGED[name]
    arrays = pack_experts([choices(4), choices(6)]) | changed
    with pytest.raises(WireError, match="experts: "):
        unpack_experts({key: array for key, array in arrays.items() if array is not None}, tokens)


def message(runs: tuple[tuple[int, int], ...]) -> tuple[wire.Samples, bytes]:
    """A sample of 3 tokens after 2 of the prompt, packed as a producer does."""
    sample = GenDelta(
        "a", 0, np.array([5, 6, 7], np.int32), np.full(3, -0.5, np.float32), runs, "stop", experts=choices(4)
    )
    fields, payload = _pack_samples(np.array([3, 4], np.int32), [sample], None)
    head = wire.SampleHead(0, 3, "stop", runs)
    return wire.Samples("p", 1, 1, (head,), {}, fields, "{}", 2, rewards={0: 1.0}), payload


def test_a_sample_of_one_version_travels_with_its_experts() -> None:
    sent, payload = message(((4, 3),))
    head = wire.GroupHead(1, 2, "{}", (wire.encode_header(sent),), {0: 1.0}, {})
    (sample,) = group_data(head, [payload]).samples
    assert np.array_equal(sample.experts, choices(4))
    assert [field.name for field in message(((4, 2), (5, 1)))[0].fields] == ["prompt", "response", "logprobs"]


def test_the_buffer_takes_experts_only_in_a_run_that_replays_them() -> None:
    sent, payload = message(((4, 3),))
    usual = wire.SampleLimits(prompt_tokens=9, sequence_tokens=9, sequences=1, reward=1.0, scores=True)
    verdicts = [
        wire.validate_samples(sent, payload, group_size=1, limits=limits)
        for limits in (usual, replace(usual, experts=True))
    ]
    assert verdicts == ["experts: this run does not replay them (learner.router_replay)", ""]
    longer = replace(sent, samples=(wire.SampleHead(0, 4, "stop", ((4, 4),)),))
    assert "experts: 24 of 3 x 2 for [4] of [6] tokens" in wire.validate_samples(longer, payload, group_size=1)


# ---------------------------------------------------------------- sessions


def turn(session: Session, tokens: list[int]) -> None:
    size = len(session.context) + len(tokens) - 1
    session.add_turn(
        GenDelta(
            "a", 0, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), ((4, len(tokens)),), "stop",
            experts=choices(size, first=size),
        )
    )  # fmt: skip


def test_the_last_turn_of_a_session_knows_the_experts_of_all_its_tokens() -> None:
    session = Session(np.array([1, 2], np.int32), index=0)
    turn(session, [5, 6])
    session.observe([7])
    turn(session, [8])
    session.observe([9])
    sample = session.finish(1.0).sample
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.experts is not None and np.array_equal(sample.experts, choices(5, first=5))
    session.extend([1, 9])
    turn(session, [4])
    assert session.finish(1.0).sample.experts is None, "another row: each would need its own"


# ---------------------------------------------------------------- in the learner


def a_row(number: int, *, tokens: int, experts: Any) -> Sample:
    ones = np.ones(tokens - 2)
    return Sample(np.full(tokens, 3, np.int32), 2, ones.astype("f4"), ones.astype("u1"), 1.0, number, experts=experts)


@pytest.mark.parametrize("build", [packed_row, padded_rows])
def test_a_token_replays_the_experts_at_its_place(build: Any) -> None:
    sequences = [
        a_row(0, tokens=4, experts=choices(3)),
        a_row(1, tokens=6, experts=None),
        a_row(2, tokens=5, experts=choices(4)),
    ]
    micro = build(sequences)
    found = micro.experts.reshape(micro.input_ids.size, 3, 2)
    for start, one in zip(micro.cu_seqlens.tolist(), sequences, strict=False):
        size = 0 if one.experts is None else len(one.experts)
        assert size == 0 or np.array_equal(found[start : start + size], one.experts)
        assert (found[start + size : start + one.tokens.size] == -1).all()
    assert build(sequences[1:2]).experts.size == 0
    share = (minibatch_of(micro), minibatch_of(build(sequences[1:2])))
    again = decode_share(encode_share(share))
    assert np.array_equal(again[0].micro[0].experts, micro.experts) and again[1].micro[0].experts.size == 0


def minibatch_of(micro: Any) -> Any:
    return Minibatch(1, 1, (micro,))


def test_the_batch_says_how_much_is_replayed() -> None:
    known = replace(a_sample(0, [5, 6, 7], reward=1.0), experts=choices(4))
    group = a_group(1, [1, 2], [known, a_sample(1, [5, 6, 7])])
    assert replayed_share(a_batch(1, 0, [group])) == 0.5
    config = parse(BARE).learner.algorithm
    step = assemble(a_batch(1, 0, [group]), algorithm=config, ranks=1, max_tokens=64)
    (minibatch,) = step.shares[0]
    experts = [micro.experts.reshape(micro.input_ids.size, 3, 2) for micro in minibatch.micro]
    assert int(sum((one >= 0).all((1, 2)).sum() for one in experts)) == 4


def test_experts_of_another_model_set_their_group_aside() -> None:
    def why(experts: Any, routing: tuple[int, int, int] = (8, 3, 2)) -> str:
        sample = replace(a_sample(0, [5, 6, 7], reward=1.0), experts=experts)
        return unusable(a_group(1, [1, 2], [sample]), max_tokens=64, routing=routing)

    assert why(choices(4)) == "" and why(None) == ""
    assert why(choices(4), (7, 3, 2)) == "experts: sample 0 has one outside 0..6"
    assert why(choices(4), (8, 4, 2)) == "experts: sample 0 has 2 in each of 3 layers, the model 2 in each of 4"
    assert "outside" in why(np.full((4, 3, 2), -1, np.int16))


# ---------------------------------------------------------------- what is refused


REPLAY = "learner.router_replay=true"
REFUSED = {
    "learner.backend=mine": "use fsdp2",
    "learner.mode=sft": "mode rl alone",
    "learner.compile=true": "learner.compile is not supported",
    "learner.ranks=2;learner.parallel.sequence=2": "rows must be whole",
    "producers.speculative_tokens=4": "the experts of drafts are not recorded",
    **{f"producers.engine={name}": "does not record the experts of a token" for name in ("vllm", "sglang")},
}


@pytest.mark.parametrize("extra", REFUSED)
def test_what_does_not_replay_is_refused(extra: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(BARE, overrides=[REPLAY, *extra.split(";")])
    mine = [one.message for one in caught.value.errors if one.where.endswith("learner.router_replay")]
    assert len(mine) == 1 and REFUSED[extra] in mine[0]


def test_a_dense_model_and_an_engine_of_another_package_are_refused() -> None:
    config = parse(BARE, overrides=[REPLAY])
    assert "no mixture of experts" in next(model_problems(config, {"num_hidden_layers": 3})).message
    assert not list(model_problems(config, MIXTURE))
    refuse_unable(config, EngineCapabilities("e", 1, 1, experts=True))
    with pytest.raises(ConfigError, match="does not record the experts of a token"):
        refuse_unable(config, EngineCapabilities("e", 1, 1))

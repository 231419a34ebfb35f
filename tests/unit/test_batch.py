"""From claimed groups to rows: packing, balance, statistics and the encoding between ranks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import WireError
from learners.batch.assembly import assemble, group_lag, unusable
from learners.batch.estimates import describe_batch
from learners.batch.micro_batches import (
    Minibatch,
    Sample,
    balance,
    decode_share,
    encode_share,
    pack,
    packed_row,
    pad,
    padded_rows,
)


def group(number: int, rewards: list[float], *, oldest: int = 0, bound: int = 4, seed: int = 0) -> Any:
    rng = np.random.default_rng((seed, number))
    samples = []
    for index, reward in enumerate(rewards):
        length = int(rng.integers(1, 20))
        samples.append(
            SimpleNamespace(
                index=index,
                response=rng.integers(3, 90, length).astype(np.int32),
                logprobs=-rng.random(length).astype(np.float32),
                mask=None,
                runs=((oldest + index, length),),
                finish="length" if index == 0 else "stop",
                reward=reward,
                parts={"exact": reward},
                digests={},
            )
        )
    prompt = rng.integers(3, 90, rng.integers(1, 9)).astype(np.int32)
    return SimpleNamespace(group=number, bound=bound, row={}, prompt_ids=prompt, samples=tuple(samples), times={})


def claimed(groups: list[Any], *, version: int = 5) -> Any:
    return SimpleNamespace(
        step=version + 1, version=version, replayed=False, groups=tuple(groups), ledger={}, invalid={}
    )


def make(rewards_of: int = 6, **how: Any) -> Any:
    rng = np.random.default_rng(3)
    batch = claimed([group(number, rng.random(4).tolist()) for number in range(rewards_of)])
    algorithm = AlgorithmConfig(minibatches=how.pop("minibatches", 1))
    return batch, assemble(batch, **({"algorithm": algorithm, "ranks": 2, "max_tokens": 64} | how))


def trained_tokens(batch: Any) -> list[tuple[int, ...]]:
    return sorted(tuple(s.response.tolist()) for g in batch.groups for s in g.samples)


def rows_of(cut: Any) -> list[tuple[tuple[int, ...], float]]:
    """Every trained sequence as (target tokens, advantage), found again in the rows."""
    found = []
    for share in cut.shares:
        for part in share:
            for micro in part.micro:
                for number in range(len(micro.cu_seqlens) - 1):
                    of = micro.sequences == number
                    if of.any():
                        assert (micro.input_ids[micro.positions[of] + 1] == micro.targets[of]).all()
                        assert (np.diff(micro.positions[of]) == 1).all()
                        found.append((tuple(micro.targets[of].tolist()), round(float(micro.advantages[of][0]), 5)))
    return sorted(found)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_every_sequence_is_trained_once_whatever_the_cut(packing: bool, ranks: int, minibatches: int) -> None:
    batch, cut = make(ranks=ranks, packing=packing, minibatches=minibatches)
    assert [tokens for tokens, _ in rows_of(cut)] == trained_tokens(batch)
    _, reference = make(ranks=1)
    assert rows_of(cut) == rows_of(reference)  # advantages do not depend on the cut
    assert len(cut.shares) == ranks
    for number in range(minibatches):
        parts = [share[number] for share in cut.shares]
        assert len({len(part.micro) for part in parts}) == 1
        assert len({(part.tokens, part.sequences) for part in parts}) == 1
        assert parts[0].tokens == sum(int(m.mask.sum()) for part in parts for m in part.micro)
    assert sum(share.tokens for share in cut.shares[0]) == cut.stats["tokens"]
    for share in cut.shares:
        assert all(micro.input_ids.size <= 64 for part in share for micro in part.micro)


def test_packed_rows_start_their_positions_again() -> None:
    samples = [
        Sample(np.arange(3, 3 + n, dtype=np.int32), 2, np.zeros(n - 2, "f4"), np.ones(n - 2, "u1"), 1.0)
        for n in (5, 3, 4)
    ]
    row = packed_row(samples)
    assert row.width == 12 and row.cu_seqlens.tolist() == [0, 5, 8, 12]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert row.positions.tolist() == [1, 2, 3, 6, 9, 10]
    assert row.targets.tolist() == [5, 6, 7, 5, 5, 6]
    assert row.sequences.tolist() == [0, 0, 0, 1, 2, 2]
    padded = padded_rows(samples)
    assert padded.width == 5 and padded.input_ids.size == 15
    assert padded.positions.tolist() == [1, 2, 3, 6, 11, 12] and padded.targets.tolist() == row.targets.tolist()


def test_an_empty_row_has_one_token_and_trains_none() -> None:
    for build in (packed_row, padded_rows):
        row = build([])
        assert row.input_ids.size == 1 and row.targets.size == row.positions.size == 0


def test_a_small_batch_leaves_some_ranks_empty_rows() -> None:
    batch = claimed([group(0, [1.0, 0.0])])
    cut = assemble(batch, algorithm=AlgorithmConfig(), ranks=4, max_tokens=64)
    assert [len(share[0].micro) for share in cut.shares] == [1, 1, 1, 1]
    assert sum(share[0].micro[0].targets.size > 0 for share in cut.shares) == 2
    nothing = assemble(claimed([]), algorithm=AlgorithmConfig(), ranks=2, max_tokens=64)
    assert [len(share[0].micro) for share in nothing.shares] == [1, 1] and nothing.shares[0][0].tokens == 0


@given(lengths=st.lists(st.integers(1, 50), max_size=60), multiple=st.integers(1, 5), limit=st.integers(50, 120))
@hypothesis_settings(max_examples=200, deadline=None)
def test_packing_places_every_item_once_within_the_limit(lengths: list[int], multiple: int, limit: int) -> None:
    for rows in (pack(lengths, limit=limit, multiple=multiple), pad(lengths, limit=limit)):
        assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    rows = pack(lengths, limit=limit, multiple=multiple)
    assert all(sum(lengths[item] for item in row) <= limit for row in rows)
    # First-fit-decreasing needs at most 11/9 of the best plus one; rounding up to the ranks adds less than `multiple`.
    assert len(rows) <= 11 / 9 * -(-sum(lengths) * 2 // limit) + multiple
    shares = balance([sum(lengths[item] for item in row) for row in rows], multiple)
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for row in share if row >= 0) == list(range(len(rows)))


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 256).tolist()
    rows = pack(lengths, limit=1024, multiple=4)
    costs = [sum(lengths[item] for item in row) for row in rows]
    loads = [sum(costs[row] for row in share if row >= 0) for share in balance(costs, 4)]
    assert max(loads) / min(loads) < 1.02


def test_statistics_and_lag() -> None:
    groups = [group(0, [1.0, 0.0], oldest=3), group(1, [1.0, 1.0], oldest=1, bound=3), group(2, [0.0, 0.5], oldest=5)]
    batch = claimed(groups, version=5)
    assert [group_lag(g, 5) for g in groups] == [2, 4, 0]
    stats = assemble(batch, algorithm=AlgorithmConfig(), ranks=1, max_tokens=64).stats
    assert stats["lag_mean"] == 2 and stats["lag_max"] == 4 and stats["over_bound_groups"] == 1
    assert stats["zero_advantage_share"] == pytest.approx(1 / 3)
    assert stats["pass_at/2"] == pytest.approx(2 / 3)  # 0.5 is no right answer
    assert not [name for name in stats if name.startswith("pass_at/") and name != "pass_at/2"]
    assert stats["truncated_share"] == 0.5
    assert stats["reward_mean"] == stats["reward/exact"] == pytest.approx(3.5 / 6)


def test_a_part_of_the_reward_is_averaged_over_the_samples_it_applies_to() -> None:
    """A reward with `data_sources`: the rows of other sources have no such part, which is not a reward of 0."""
    groups = [group(0, [1.0, 0.0]), group(1, [0.5, 1.0]), group(2, [0.0, 0.0])]
    for sample in groups[1].samples:
        sample.parts = {"exact": sample.reward, "code": 0.75}
    groups[2].samples[0].parts = {}
    stats = assemble(claimed(groups), algorithm=AlgorithmConfig(), ranks=1, max_tokens=64).stats
    assert stats["reward/code"] == 0.75 and stats["reward/exact"] == pytest.approx(2.5 / 5)
    assert stats["reward_mean"] == pytest.approx(2.5 / 6)


def test_components_of_a_reward_are_the_rewards_alone() -> None:
    """What a reward reports besides is logged: a length would be a component of GDPO with its own advantage."""
    groups = [group(0, [1.0, 0.0]), group(1, [0.5, 1.0])]
    for number, sample in enumerate([*groups[0].samples, *groups[1].samples]):
        sample.parts = {"exact": sample.reward, "exact/length": float(number), "a/b": 2.0}
    del groups[1].samples[1].parts["a/b"]
    parts = describe_batch(claimed(groups), AlgorithmConfig()).rollouts.parts
    assert parts is not None and parts.tolist() == [[2.0, 2.0, 2.0, 0.0], [1.0, 0.0, 0.5, 1.0]], "sorted by name"
    plain = [group(0, [1.0, 0.0]), group(1, [0.5, 1.0])]
    for sample in [*groups[0].samples, *groups[1].samples]:
        sample.parts.pop("a/b", None)
    algorithm = AlgorithmConfig(advantage="gdpo")
    with_length, without = (
        assemble(claimed(found), algorithm=algorithm, ranks=1, max_tokens=64) for found in (groups, plain)
    )
    assert rows_of(with_length) == rows_of(without)


def test_a_reward_that_no_sample_of_a_batch_has_keeps_its_place_among_the_weights() -> None:
    """Rewards of some data sources: a batch may have rows of the others alone."""
    found = [group(0, [1.0, 0.0]), group(1, [0.5, 1.0])]
    given = {"ranks": 1, "max_tokens": 64, "rewards": ("style", "exact", "brief")}
    weighted = AlgorithmConfig(advantage="gdpo", advantage_options={"weights": [9.0, 2.0, 9.0]})
    alone = AlgorithmConfig(advantage="gdpo", advantage_options={"weights": [2.0]})
    assert rows_of(assemble(claimed(found), algorithm=weighted, **given)) == rows_of(
        assemble(claimed(found), algorithm=alone, ranks=1, max_tokens=64)
    )
    for rewards in (("exact", "exact/length"), ("style", "exact")):
        parts = describe_batch(claimed(found), alone, rewards=rewards).rollouts.parts
        assert parts is not None and len(parts) == 1, "the weights fit what the batch has"
    for sample in (*found[0].samples, *found[1].samples):
        sample.parts = {}
    assert describe_batch(claimed(found), AlgorithmConfig(), rewards=("exact",)).rollouts.parts is None


def test_a_masked_token_is_fed_but_not_counted() -> None:
    one = group(0, [1.0, 0.0])
    length = one.samples[0].response.size
    one.samples[0].mask = np.zeros(length, np.uint8)
    cut = assemble(claimed([one]), algorithm=AlgorithmConfig(), ranks=1, max_tokens=64)
    part = cut.shares[0][0]
    assert part.tokens == one.samples[1].response.size and part.sequences == 1
    assert part.micro[0].targets.size == length + one.samples[1].response.size


def test_groups_that_cannot_be_trained_say_why() -> None:
    good = group(0, [1.0, 0.0])
    assert unusable(good, max_tokens=64) == ""
    assert unusable(good, max_tokens=2).startswith("length")
    good.samples[1].reward = float("inf")
    assert unusable(good, max_tokens=64).startswith("reward")
    good.samples = ()
    assert unusable(good, max_tokens=64).startswith("empty")


@pytest.mark.parametrize("packing", [True, False])
def test_a_share_survives_its_encoding(packing: bool) -> None:
    _, cut = make(packing=packing, minibatches=2)
    for share in cut.shares:
        back = decode_share(encode_share(share))
        assert len(back) == len(share)
        for got, wanted in zip(back, share, strict=True):
            assert isinstance(got, Minibatch) and (got.tokens, got.sequences) == (wanted.tokens, wanted.sequences)
            for a, b in zip(got.micro, wanted.micro, strict=True):
                assert a.width == b.width
                for name in (
                    "input_ids",
                    "position_ids",
                    "cu_seqlens",
                    "positions",
                    "targets",
                    "sequences",
                    "behaviour",
                    "mask",
                    "advantages",
                ):
                    left, right = getattr(a, name), getattr(b, name)
                    assert left.dtype == right.dtype and np.array_equal(left, right), name
    with pytest.raises(WireError):
        decode_share(b"\x05\0\0\0\0\0\0\0garbage")


def test_the_same_batch_gives_the_same_bytes() -> None:
    assert encode_share(make()[1].shares[1]) == encode_share(make()[1].shares[1])


def test_torch_is_not_needed() -> None:
    import subprocess

    code = "import sys, learners.batch.assembly; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "False", done.stderr

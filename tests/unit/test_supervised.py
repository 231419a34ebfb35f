"""sft, dpo and reward models without a model: which samples stay together, losses and gradients, the cut."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from made_batches import a_batch, a_group, a_sample

from asyncrl.config import LearnerConfig, PreferenceConfig
from asyncrl.wire.batch_arrays import GroupData
from learners.backends.base import Micro, to_device
from learners.batch.micro_batches import MicroBatch, Minibatch, Sample, decode_share, encode_share
from learners.step import supervised

LN2 = float(np.log(2))


def pair(number: int, rewards: tuple[float, float], lengths: tuple[int, int] = (2, 3), **row: float) -> GroupData:
    """Prompt token 100 + number; the answers consist of 10 * number + index."""
    answers = [
        a_sample(i, np.full(length, 10 * number + i), reward=reward)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return a_group(number, [100 + number], answers, row=dict(row))


def learner(mode: str, **settings: Any) -> LearnerConfig:
    return msgspec.structs.replace(LearnerConfig(), mode=mode, **settings)


def sequences_of(piece: MicroBatch) -> list[list[int]]:
    return [piece.targets[piece.sequences == n].tolist() for n in range(len(piece.samples))]


# ---------------------------------------------------------------- assembly


def test_the_answer_with_the_higher_reward_comes_first_and_equal_ones_are_left_out() -> None:
    given = a_batch(1, 0, [pair(1, (1, 0)), pair(2, (0.25, 0.5)), pair(3, (1, 1))])
    cut = supervised.assemble(given, learner("dpo"), ranks=1)
    [part] = cut.shares[0]
    [piece] = part.micro
    found = sequences_of(piece)
    pairs = {tuple(map(tuple, found[n : n + 2])) for n in (0, 2)}
    assert pairs == {((10, 10), (11, 11, 11)), ((21, 21, 21), (20, 20))}
    assert sorted(piece.samples.tolist()) == [0, 1, 2, 3], "places in the batch; 4 and 5 are left out"
    assert (part.tokens, part.sequences, len(cut.advantages)) == (10, 4, 6)
    assert cut.stats["zero_advantage_share"] == pytest.approx(1 / 3)


def test_a_margin_is_read_from_the_row() -> None:
    config = learner("reward_model", preference=PreferenceConfig(margin_key="gap"))
    given = a_batch(1, 0, [pair(1, (1, 0), gap=0.5), pair(2, (1, 0))])
    [piece] = supervised.assemble(given, config, ranks=1).shares[0][0].micro
    by_target = dict(zip(piece.targets.tolist(), piece.advantages.tolist(), strict=True))
    assert by_target == {10: 0.5, 11: 0.0, 20: 0.0, 21: 0.0}


def test_a_group_that_is_no_pair_breaks_the_packer_by_name() -> None:
    lonely = a_group(7, [1], [a_sample(0, [1], reward=1.0)])
    with pytest.raises(ValueError, match="group 7 has 1 samples"):
        supervised.assemble(a_batch(1, 0, [lonely]), learner("dpo"), ranks=1)


def test_the_best_and_the_worst_of_more_samples_are_the_pair() -> None:
    groups = [pair(1, (0.5, 0.25, 1.0, 0.25, 1.0), (1,) * 5), pair(2, (0.5, 0.5, 0.5), (1,) * 3)]  # type: ignore[arg-type]
    cut = supervised.assemble(a_batch(1, 0, groups), learner("dpo"), ranks=1)
    [piece] = cut.shares[0][0].micro
    assert sequences_of(piece) == [[12], [11]], "the first of equal ones; a group without a preference has no pair"
    assert (cut.shares[0][0].sequences, cut.stats["zero_advantage_share"]) == (2, 0.5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pairs_stay_together_and_nothing_is_lost(ranks: int, packing: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = [tuple(map(int, rng.integers(1, 12, 2))) for _ in range(13)]
    groups = [pair(n, (1, 0), size) for n, size in enumerate(lengths)]  # type: ignore[arg-type]
    config = learner("dpo", micro_batch_tokens=40, packing=packing)
    cut = supervised.assemble(a_batch(1, 0, groups), config, ranks=ranks)
    shares = [decode_share(encode_share(share)) for share in cut.shares]
    assert len({len(part.micro) for share in shares for part in share}) == 1, "as many collectives on every rank"
    seen = []
    for piece in (piece for share in shares for part in share for piece in part.micro):
        assert piece.input_ids.size <= 40
        numbers = piece.samples.tolist()
        assert [number % 2 for number in numbers] == [0, 1] * (len(numbers) // 2)
        assert [a + 1 for a in numbers[::2]] == numbers[1::2]
        seen += numbers
    assert sorted(seen) == list(range(26))


def test_a_prompt_gets_the_answer_of_the_row_before_for_the_kl() -> None:
    given = [a_group(n, [100 + n] * n, [a_sample(0, np.full(n + 1, 10 * n), reward=float(n == 2))]) for n in (1, 2, 3)]
    part, others = supervised.assemble(a_batch(1, 0, given), learner("kto"), ranks=1).shares[0]
    found = {
        tuple(piece.input_ids[low:high].tolist())
        for piece in others.micro
        for low, high in zip(piece.cu_seqlens, piece.cu_seqlens[1:], strict=False)
    }
    assert found == {(101, 30, 30, 30, 30), (102, 102, 10, 10), (103, 103, 103, 20, 20, 20)}
    assert (part.sequences, others.sequences) == (3, 3)
    [piece] = part.micro
    assert {n: bool(right) for n, right in zip(piece.samples.tolist(), piece.right, strict=True)} == {
        0: False,
        1: True,
        2: False,
    }


# ---------------------------------------------------------------- losses


def part_of(masks: list[list[int]], margins: list[float] | None = None) -> tuple[Minibatch, Micro]:
    """One micro-batch with a sequence for each mask."""
    samples = [
        Sample(
            np.arange(1 + len(mask), dtype=np.int32), 1, np.zeros(len(mask), "f4"), np.array(mask, np.uint8), margin, n
        )
        for n, (mask, margin) in enumerate(zip(masks, margins or [0.0] * len(masks), strict=True))
    ]
    [part] = supervised.minibatch([samples], ranks=1, max_tokens=100, packing=True)
    return part, to_device(part.micro[0], torch.device("cpu"))


def value(loss: Any, numbers: list[float], micro: Micro) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient and sums."""
    given = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    found, sums = loss(given, torch.zeros_like(given), micro, 0)
    found.backward()
    gradient: Any = given.grad
    return float(found.detach()), gradient.tolist(), {name: float(number) for name, number in sums.items()}


def test_sft_is_the_mean_over_trained_tokens() -> None:
    part, micro = part_of([[1, 0, 1], [1]])
    found, gradient, _ = value(supervised.sft_loss(part), [-1.0, float("nan"), -2.0, -6.0], micro)
    assert found == pytest.approx(3.0)
    assert gradient == pytest.approx([-1 / 3, 0, -1 / 3, -1 / 3])


@pytest.mark.parametrize(
    ("settings", "difference", "wanted"),
    [
        ({}, 0.0, LN2),
        ({}, 2.0, 0.5981388693815918),  # -log sigmoid(0.2)
        ({"label_smoothing": 0.25}, 2.0, 0.5981388693815918 + 0.25 * 0.2),
        ({"loss": "hinge"}, 2.0, 0.8),
        ({"loss": "hinge"}, 20.0, 0.0),
        ({"loss": "ipo"}, 2.0, 9.0),
        # ((1 - e) x - e (x + 0.2)) / (1 - 2 e) with x = -log sigmoid(0.2)
        ({"loss": "robust", "label_smoothing": 0.25}, 2.0, 0.5981388693815918 - 0.25 * 0.2 / 0.5),
    ],
)
def test_losses_of_a_pair(settings: dict[str, Any], difference: float, wanted: float) -> None:
    part, micro = part_of([[1, 1], [0, 1]])
    reference = [torch.tensor([-1.0, -1.0, -9.0, -1.0], dtype=torch.float64)]
    loss = supervised.dpo_loss(part, PreferenceConfig(**settings), reference)
    given = [-1.0, -1.0 + difference / 2, float("nan"), -1.0 - difference / 2]
    found, gradient, sums = value(loss, given, micro)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert gradient[2] == 0 and np.isfinite(gradient).all()
    assert gradient[0] == gradient[1] == -gradient[3]
    beta = 0.1
    assert (sums["chosen_sum"], sums["rejected_sum"]) == pytest.approx((beta * difference / 2, -beta * difference / 2))
    assert sums["right_sum"] == float(difference > 0)


def test_length_average_and_no_reference() -> None:
    part, micro = part_of([[1, 1], [1]])
    settings = PreferenceConfig(loss="ipo", length_average=True, reference_free=True)
    found, gradient, _ = value(supervised.dpo_loss(part, settings, None), [-1.0, -3.0, -4.0], micro)
    assert found == pytest.approx((2.0 - 5.0) ** 2)
    assert gradient == pytest.approx([-3.0, -3.0, 6.0])


def test_means_without_a_reference() -> None:
    """Chosen: two tokens of -2 each; rejected: one of -5."""
    part, micro = part_of([[1, 1], [1]])
    given = [-2.0, -2.0, -5.0]
    settings = PreferenceConfig(loss="simpo", beta=2.0, gamma=1.5)
    found, gradient, sums = value(supervised.dpo_loss(part, settings, None), given, micro)
    assert not settings.has_reference and found == pytest.approx(np.log1p(np.exp(-(2 * 3 - 1.5))))
    slope = 2 / (1 + np.exp(2 * 3 - 1.5))
    assert gradient == pytest.approx([-slope / 2, -slope / 2, slope])
    assert (sums["chosen_sum"], sums["rejected_sum"], sums["right_sum"]) == (-4.0, -10.0, 1.0)
    odds = [np.log(np.exp(-2) / (1 - np.exp(-2))), np.log(np.exp(-5) / (1 - np.exp(-5)))]
    settings = PreferenceConfig(loss="orpo", beta=0.2)
    found, gradient, _ = value(supervised.dpo_loss(part, settings, None), given, micro)
    assert found == pytest.approx(2 + 0.2 * np.log1p(np.exp(-(odds[0] - odds[1]))))
    slope = 0.2 / (1 + np.exp(odds[0] - odds[1]))
    assert gradient[0] == pytest.approx(-0.5 - slope / (1 - np.exp(-2)) / 2) and gradient[2] > 0
    certain, gradient, _ = value(supervised.dpo_loss(part, settings, None), [0.0, 0.0, -900.0], micro)
    assert np.isfinite([certain, *gradient]).all()


def test_kto_of_a_mini_batch_by_hand() -> None:
    """Log-ratios 2 (desirable) and -1 (undesirable), KL 0.5, beta 0.1."""
    part, micro = part_of([[1, 1], [0, 1]])
    micro = micro._replace(right=torch.tensor([True, False]))
    reference = [torch.tensor([-1.0, -1.0, -9.0, -1.0], dtype=torch.float64)]
    settings = PreferenceConfig(desirable_weight=2.0, undesirable_weight=0.5)
    loss = supervised.kto_loss(part, settings, reference, 0.5)
    found, gradient, sums = value(loss, [0.0, 0.0, float("nan"), -2.0], micro)
    good, bad = (1 / (1 + np.exp(-0.1 * margin)) for margin in (1.5, 1.5))  # r - z and z - r
    assert found == pytest.approx((2 * (1 - good) + 0.5 * (1 - bad)) / 2)
    assert gradient == pytest.approx([-0.1 * good * (1 - good)] * 2 + [0.0, 0.025 * bad * (1 - bad)])
    assert sums == pytest.approx({"chosen_sum": 0.2, "rejected_sum": -0.1, "answers_sum": 2, "desirable_sum": 1})


def test_bradley_terry_scores_the_last_token_with_margin_and_centre() -> None:
    part, micro = part_of([[1, 1], [1]], [0.5, 0.0])
    settings = PreferenceConfig(center_coeff=0.01)
    found, gradient, sums = value(supervised.reward_loss(part, settings), [7.0, 1.0, 0.25], micro)
    slope = 1 / (1 + np.exp(0.25))  # sigmoid(-(1 - 0.25 - 0.5))
    assert found == pytest.approx(-np.log(1 - slope) + 0.01 * 1.25**2)
    assert gradient == pytest.approx([0.0, -slope + 0.025, slope + 0.025])
    assert sums == {"chosen_sum": 1.0, "rejected_sum": 0.25, "right_sum": 1.0, "pairs_sum": 1.0}


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_nothing_in_a_piece_is_a_loss_of_zero_that_is_connected(kind: str) -> None:
    part, _ = part_of([[1], [1]])
    [empty] = supervised.minibatch([], ranks=1, max_tokens=8, packing=True)
    micro = to_device(empty.micro[0], torch.device("cpu"))
    part = Minibatch(part.tokens, part.sequences, empty.micro)
    losses = {
        "sft": supervised.sft_loss(part),
        "dpo": supervised.dpo_loss(part, PreferenceConfig(), [torch.zeros(0)]),
        "reward": supervised.reward_loss(part, PreferenceConfig()),
    }
    found, gradient, sums = value(losses[kind], [], micro)
    assert (found, gradient) == (0.0, [])
    full, micro = part_of([[1], [1]])
    again = {
        "sft": supervised.sft_loss(full),
        "dpo": supervised.dpo_loss(full, PreferenceConfig(), [torch.zeros(2)]),
        "reward": supervised.reward_loss(full, PreferenceConfig()),
    }
    assert sums.keys() == value(again[kind], [0.0, 0.0], micro)[2].keys(), "ranks add up the same names"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing": 0.1},
        {"loss": "ipo"},
        {"loss": "ipo", "length_average": True},
        {"loss": "robust", "label_smoothing": 0.2},
        {"loss": "simpo", "beta": 2.0},
        {"loss": "orpo"},
    ],
)
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_gradients_are_those_of_finite_differences(kind: str, settings: dict[str, Any]) -> None:
    part, micro = part_of([[1, 1, 0], [1, 1], [1], [0, 1, 1]], [0.3, 0, 0.1, 0])
    micro = micro._replace(advantages=micro.advantages.double())
    preference = PreferenceConfig(center_coeff=0.05, **settings)
    reference = [torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]
    loss = {
        "sft": supervised.sft_loss(part),
        "dpo": supervised.dpo_loss(part, preference, reference),
        "reward": supervised.reward_loss(part, preference),
    }[kind]
    given = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, torch.zeros_like(x), micro, 0)[0], (given,))

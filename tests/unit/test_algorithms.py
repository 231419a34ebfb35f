"""Advantages, losses, weights and aggregation against worked numbers, and the rules that hold for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms import advantages as adv
from learners.algorithms.aggregation import MODES, Denominators, aggregate
from learners.algorithms.corrections import correction_metrics, correction_sums, is_weights
from learners.algorithms.losses import LossInputs, LossSettings, decoupled_ppo, ppo, reinforce
from learners.algorithms.registry import ADVANTAGES, LOSSES, advantage_of, loss_of
from learners.logprobs import chunked_logprobs

CASES = json.loads((Path(__file__).parent / "algorithm_cases_subset.json").read_text())["cases"]
TOLERANCE = 1e-6


def flat(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).flatten()


def mask_of(rows: Any) -> tuple[Tensor, Tensor, Denominators]:
    """Bool mask `[N]`, row number per token `[N]`, and the denominators."""
    mask = torch.tensor(rows, dtype=torch.bool)
    sequences = torch.arange(mask.shape[0])[:, None].expand(mask.shape).flatten()
    return mask.flatten(), sequences, Denominators(int(mask.sum()), int(mask.any(-1).sum()))


def close(got: Any, expected: Any) -> None:
    got = got.detach().numpy() if isinstance(got, Tensor) else np.asarray(got)
    np.testing.assert_allclose(got.reshape(-1), np.asarray(expected).reshape(-1), rtol=TOLERANCE, atol=TOLERANCE)


# ---------------------------------------------------------------- one runner per function of the cases


def run_advantage(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    mask = np.asarray(inputs["response_mask"])
    scores = (np.asarray(inputs["token_level_rewards"]) * mask).sum(-1)
    groups = np.unique(inputs["index"], return_inverse=True)[1]
    function: Callable[..., Any] = {"adv.grpo": adv.grpo, "adv.rloo": adv.rloo}[case["function"]]
    close(function(scores, groups, **case["params"])[:, None] * mask, case["expected"]["advantages"])


def run_aggregate(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    mask, sequences, counts = mask_of(inputs["mask"])
    out = aggregate(flat(inputs["loss"]), mask, sequences, mode=case["params"]["mode"], denominators=counts)
    close(out, case["expected"]["out"])


def run_distributed(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    _, _, counts = mask_of(inputs["mask"])
    ranks = inputs["rank_microbatch_rows"]
    total = 0.0
    for micro, wanted in zip(ranks, case["expected"]["piece_losses"], strict=True):
        for rows, piece in zip(micro, wanted, strict=True):
            mask, sequences, _ = mask_of([inputs["mask"][row] for row in rows])
            loss = flat([inputs["loss"][row] for row in rows])
            got = aggregate(loss, mask, sequences, mode=case["params"]["mode"], denominators=counts) * len(ranks)
            close(got, piece)
            total += float(got) / len(ranks)
    close(total, case["expected"]["mean_over_ranks_of_sum_over_microbatches"])


def run_policy(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    mask, sequences, counts = mask_of(inputs["response_mask"])
    params = case["params"]
    current = flat(inputs["log_prob"]).requires_grad_()
    proximal = flat(inputs.get("prox_log_prob", inputs.get("old_log_prob")))
    behaviour = flat(inputs["behav_log_prob"]) if "behav_log_prob" in inputs else proximal
    settings = LossSettings(
        params.get("clip_low", 0.2), params.get("clip_high", 0.2), params.get("clip_c"), params.get("cap")
    )
    function = {"policy.ppo": ppo, "offpolicy.decoupled_ppo": decoupled_ppo, "policy.reinforce": reinforce}
    if case["function"] == "policy.reinforce":  # the case has no weights: proximal = behaviour gives weight 1
        behaviour = proximal
    result = function[case["function"]](LossInputs(current, proximal, behaviour, flat(inputs["advantages"]), mask),
                                        settings)  # fmt: skip
    value = aggregate(result.loss, mask, sequences, mode=params["agg"], denominators=counts)
    value.backward()
    close(value, case["expected"]["loss"])
    close(current.grad, case["expected"]["grad_log_prob"])
    if "clipfrac" in case["expected"]:
        close(result.clipped.double().sum() / counts.tokens, case["expected"]["clipfrac"])
    if "behav_weight" in case["expected"]:
        close(is_weights(proximal, behaviour, mask, upper=settings.cap), case["expected"]["behav_weight"])


def run_weights(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    mask, _, _ = mask_of(inputs["response_mask"])
    got = is_weights(
        flat(inputs["train_log_prob"]), flat(inputs["rollout_log_prob"]), mask, upper=case["params"]["upper"]
    )
    close(got, case["expected"]["weights"])


def run_metrics(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    mask, _, counts = mask_of(inputs["response_mask"])
    sums = correction_sums(flat(inputs["train_log_prob"]), flat(inputs["rollout_log_prob"]), mask, cap=None)
    values = {name: float(value) for name, value in sums.items()}
    metrics = correction_metrics(values, counts.tokens)
    close(metrics["kl_behaviour"], case["expected"]["k3_kl"])
    close(metrics["ess"], case["expected"]["ess_token"])
    close(values["kl_sum"] / counts.tokens, case["expected"]["kl"])


def run_ess(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    weights = flat(inputs["seq_weights"])
    sums = correction_sums(weights.log(), torch.zeros_like(weights), torch.ones_like(weights).bool(), cap=None)
    metrics = correction_metrics({name: float(value) for name, value in sums.items()}, weights.numel())
    close(metrics["ess"], case["expected"]["ess_fraction"])


def run_logits(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    logits = torch.tensor(inputs["logits"], dtype=torch.float64)
    hidden, head = logits.flatten(0, -2), torch.eye(logits.shape[-1], dtype=torch.float64)
    ids = torch.tensor(inputs["token_ids"]).flatten() if "token_ids" in inputs else torch.zeros(len(hidden)).long()
    logprobs, entropy = chunked_logprobs(
        hidden, head, ids, temperature=case["params"].get("temperature", 1.0), chunk_tokens=4
    )
    if "log_probs" in case["expected"]:
        close(logprobs, case["expected"]["log_probs"])
    elif "entropy" in case["expected"]:
        close(entropy, case["expected"]["entropy"])
    else:
        mask, sequences, counts = mask_of(inputs["mask"])
        got = aggregate(entropy, mask, sequences, mode=case["params"]["agg"], denominators=counts)
        close(got, case["expected"]["entropy_loss"])


RUNNERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "adv.grpo": run_advantage, "adv.rloo": run_advantage, "agg.loss": run_aggregate,
    "agg.loss_distributed": run_distributed, "policy.ppo": run_policy, "policy.reinforce": run_policy,
    "offpolicy.decoupled_ppo": run_policy, "offpolicy.is_weights": run_weights, "offpolicy.metrics": run_metrics,
    "offpolicy.ess": run_ess, "stats.entropy_from_logits": run_logits, "loss.entropy": run_logits,
    "stats.token_logprobs": run_logits,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_worked_numbers(case: dict[str, Any]) -> None:
    RUNNERS[case["function"]](case, case["inputs"])


POISONED = [case for case in CASES if case.get("poison_masked")]


@pytest.mark.parametrize("case", POISONED, ids=[case["name"] for case in POISONED])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_masked_has_no_influence(case: dict[str, Any], poison: float) -> None:
    inputs = dict(case["inputs"])
    mask = np.asarray(inputs.get("response_mask", inputs.get("mask")), dtype=bool)
    for name in case["poison_masked"]:
        inputs[name] = np.where(mask, np.asarray(inputs[name]), poison).tolist()
    RUNNERS[case["function"]](case, inputs)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_is_zero_and_still_connected(name: str, mode: str) -> None:
    current = torch.zeros(0, requires_grad=True)
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    result = loss_of(name)(LossInputs(current, empty, empty, empty, none), LossSettings())
    value = aggregate(result.loss, none, torch.zeros(0).long(), mode=mode, denominators=Denominators(0, 0))
    value.backward()
    assert float(value.detach()) == 0 and current.grad is not None
    sums = correction_sums(empty, empty, none, cap=2.0)
    assert all(float(part) == 0 for part in sums.values())


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_but_the_current_log_probs_has_a_gradient(name: str) -> None:
    tensors = [torch.randn(5, requires_grad=True) for _ in range(4)]
    result = loss_of(name)(LossInputs(*tensors, torch.ones(5, dtype=torch.bool)), LossSettings())
    result.loss.sum().backward()
    assert tensors[0].grad is not None and all(tensor.grad is None for tensor in tensors[1:])


def test_extreme_ratios_stay_finite_and_half_precision_is_widened() -> None:
    current = torch.tensor([-1.0, -90.0, -1.0], dtype=torch.bfloat16, requires_grad=True)
    other = torch.tensor([-200.0, -1.0, -1.0], dtype=torch.bfloat16)
    inputs = LossInputs(current, other, other, torch.tensor([-1.0, -1.0, 1.0]), torch.ones(3, dtype=torch.bool))
    for name in LOSSES:
        result = loss_of(name)(inputs, LossSettings(cap=None))
        assert result.loss.dtype == torch.float32 and bool(result.loss.isfinite().all())


def test_decoupled_with_current_as_proximal_is_the_weighted_gradient_of_reinforce() -> None:
    """One optimizer step per batch: the ratio is 1, so what is left is the truncated weight."""
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    gains, mask = torch.tensor([1.0, -1.0, 2.0, -0.5]), torch.ones(4, dtype=torch.bool)
    grads = []
    for function in (decoupled_ppo, reinforce):
        current = torch.tensor([-0.8, -2.5, -0.1, -0.2], requires_grad=True)
        inputs = LossInputs(current, current.detach(), behaviour, gains, mask)
        function(inputs, LossSettings(cap=2.0)).loss.sum().backward()
        grads.append(current.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert float(grads[0][3]) == pytest.approx(0.5 * 2.0)  # exp(2.8) truncated to 2


def test_shares_count_what_was_clipped_and_capped() -> None:
    behaviour = torch.zeros(4)
    proximal = torch.tensor([0.0, 1.0, -1.0, 0.5])  # ratios 1, 2.72, 0.37, 1.65
    mask = torch.tensor([True, True, True, False])
    sums = {name: float(v) for name, v in correction_sums(proximal, behaviour, mask, cap=2.0).items()}
    metrics = correction_metrics(sums, 3)
    assert metrics["tis_capped_share"] == pytest.approx(1 / 3)
    assert metrics["ratio_max"] == pytest.approx(np.e, rel=1e-5)
    assert metrics["logprob_gap_mean"] == pytest.approx(2 / 3)


def test_equal_rewards_give_exactly_zero_and_groups_may_be_scattered() -> None:
    rewards = np.array([0.1, 1.0, 0.1, 0.0, 0.1])
    groups = np.array([7, 3, 7, 3, 7])
    for name, function in ADVANTAGES.items():
        got = function(rewards, groups)
        assert (got[[0, 2, 4]] == 0).all(), name
        assert got[1] == -got[3] > 0, name
    assert (adv.dr_grpo(rewards, groups)[[1, 3]] == [0.5, -0.5]).all()
    assert adv.grpo(np.array([3.0]), np.array([0]))[0] == 0  # a lone survivor has no baseline
    assert adv.rloo(np.array([3.0]), np.array([0]))[0] == 3
    assert adv.grpo(np.zeros(0), np.zeros(0, np.int64)).size == 0


def test_unknown_names_are_errors_that_list_the_known() -> None:
    with pytest.raises(ConfigError, match="grpo"):
        advantage_of("gae")
    with pytest.raises(ConfigError, match="decoupled_ppo"):
        loss_of("gspo")
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(torch.zeros(1), torch.ones(1).bool(), torch.zeros(1).long(), mode="x",
                  denominators=Denominators(1, 1))  # fmt: skip

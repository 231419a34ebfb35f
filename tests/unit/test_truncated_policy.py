"""Truncated sampling without bias: on a policy whose responses can all be listed, the expected gradient is exact."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.wire import Support, join_supports
from learners.backends.base import extra_inputs, to_device
from learners.batch.micro_batches import Sample, packed_row, padded_rows
from learners.models.policy_model import PolicyModel
from producers.engines.hf.sampling import Cut, sample

VOCABULARY, LENGTH, TEMPERATURE = 7, 2, 0.8
PROMPT = [3, 1, 5]
CUTS = {"top_p 0.9": (0.9, 0, 0.0), "top_p 0.7": (0.7, 0, 0.0), "top_k": (1.0, 3, 0.0), "min_p": (1.0, 0, 0.15)}
SETTINGS = Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16,
)  # fmt: skip
REWARD = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def make_policy(seed: int) -> PolicyModel:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(SETTINGS).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # far from the uniform distribution
    return PolicyModel(model, temperature=TEMPERATURE, chunk_tokens=3)


class Draws(NamedTuple):
    """All responses of a cut behaviour policy: tokens `[R, T]`, their log-probs and supports."""

    tokens: list[tuple[int, ...]]
    logprobs: list[Tensor]
    full: list[Tensor]  # log-probs before the cut
    kept: list[Tensor]  # bool [T, V]


def list_draws(policy: PolicyModel, cut: tuple[float, int, float]) -> Draws:
    found = Draws([], [], [], [])
    settings = Cut(torch.tensor([cut[0]]), torch.tensor([cut[1]]), torch.tensor([cut[2]]))
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        logits = logits_of(policy, tokens).detach()
        one = torch.ones(1)
        kept = torch.cat(
            [sample(row[None], torch.zeros(1).double(), TEMPERATURE * one, cut=settings).kept for row in logits]  # type: ignore[misc]
        )
        if all(kept[place, token] for place, token in enumerate(tokens)):
            logs = (logits / TEMPERATURE).masked_fill(~kept, -torch.inf).log_softmax(-1)
            found.tokens.append(tokens)
            found.logprobs.append(logs.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
            found.full.append((logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0])
            found.kept.append(kept)
    return found


def logits_of(policy: PolicyModel, tokens: tuple[int, ...]) -> Tensor:
    """`[T, V]`, before the temperature."""
    ids = torch.tensor([[*PROMPT, *tokens]])
    logits: Tensor = policy.model(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits


def rows(draws: Draws, *, supports: bool) -> list[Sample]:
    found = []
    for tokens, logprobs, _, kept in zip(*draws, strict=True):
        held = Support(kept.sum(-1).numpy().astype(np.int32), kept.nonzero()[:, 1].numpy().astype(np.int32))
        one = Sample(
            np.array([*PROMPT, *tokens], np.int32),
            len(PROMPT),
            logprobs.numpy(),
            np.ones(LENGTH, np.uint8),
            float(REWARD[tokens]),
            support=held if supports else None,
        )
        found.append(one)
    return found


def gradient(policy: PolicyModel, value: Tensor) -> Tensor:
    grads = torch.autograd.grad(value, list(policy.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def closed_form(policy: PolicyModel, draws: Draws) -> Tensor:
    """Gradient of the expected reward of this policy, cut to the supports of the draws, from full logits."""
    value = torch.zeros((), dtype=torch.float64)
    for tokens, kept in zip(draws.tokens, draws.kept, strict=True):
        logs = (logits_of(policy, tokens) / TEMPERATURE).masked_fill(~kept, -torch.inf).log_softmax(-1)
        value = value + REWARD[tokens] * logs.gather(-1, torch.tensor(tokens)[:, None]).sum().exp()
    return gradient(policy, value)


def expected(policy: PolicyModel, draws: Draws, *, supports: bool, build: Any = packed_row) -> Tensor:
    """Gradient that the learner's rows give on average: every response with its probability and importance weight.
    Without supports both log-probs of the weight are of the full softmax.
    """
    micro = to_device(build(rows(draws, supports=supports)), torch.device("cpu"))
    logprobs, _ = policy(micro.input_ids, micro.position_ids, micro.positions, micro.targets, **extra_inputs(micro))
    totals = torch.zeros(len(draws.tokens), dtype=torch.float64).index_add(0, micro.sequences, logprobs)
    chance = torch.stack(draws.logprobs).sum(-1)
    recorded = chance if supports else torch.stack(draws.full).sum(-1)
    scores = torch.stack([REWARD[tokens] for tokens in draws.tokens])
    return gradient(policy, (chance.exp() * (totals - recorded).exp() * scores).sum())


@pytest.mark.parametrize("build", [packed_row, padded_rows])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("cut", CUTS)
def test_the_expected_gradient_is_that_of_the_truncated_policy(cut: str, lag: int, build: Any) -> None:
    behaviour = make_policy(1)
    policy = behaviour if not lag else make_policy(1)
    if lag:  # trained since
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    draws = list_draws(behaviour, CUTS[cut])
    assert LENGTH < len(draws.tokens) < VOCABULARY**LENGTH
    assert float(torch.stack(draws.logprobs).sum(-1).exp().sum()) == pytest.approx(1.0, abs=1e-9)
    wanted = closed_form(policy, draws)
    got = expected(policy, draws, supports=True, build=build)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-6
    ignored = expected(policy, draws, supports=False, build=build)
    off = float((ignored - wanted).norm() / wanted.norm())
    print(f"{cut}, lag {lag}: without the supports the gradient is off by {off:.1%}")
    assert off > 0.05


def test_the_reference_of_a_kl_is_over_the_same_support() -> None:
    """The mean of log pi - log ref, and of k3, over all draws is KL(pi || ref), both cut to the support."""
    policy, reference = make_policy(1), make_policy(2)
    draws = list_draws(policy, CUTS["top_p 0.7"])
    micro = to_device(packed_row(rows(draws, supports=True)), torch.device("cpu"))
    inputs = (micro.input_ids, micro.position_ids, micro.positions, micro.targets)
    with torch.no_grad():
        ours, theirs = (one(*inputs, **extra_inputs(micro))[0] for one in (policy, reference))
    chance = torch.stack(draws.logprobs).sum(-1).exp()
    gap = torch.zeros(len(chance), dtype=torch.float64).index_add(0, micro.sequences, ours - theirs)
    k3 = torch.expm1(-gap) + gap
    torch.testing.assert_close((chance * k3).sum(), (chance * gap).sum(), rtol=1e-9, atol=1e-9)
    assert float((chance * gap).sum()) > 0.01


def test_rows_of_several_samples_join_their_supports() -> None:
    cut = Support(np.array([2, 1], np.int32), np.array([1, 4, 6], np.int32))
    plain = Sample(np.arange(5, dtype=np.int32), 2, np.zeros(3, np.float32), np.ones(3, np.uint8), 0.0)
    other = Sample(np.array([0, 4, 6], np.int32), 1, np.zeros(2, np.float32), np.ones(2, np.uint8), 0.0, support=cut)
    row = packed_row([plain, other])
    assert row.support_counts.tolist() == [0, 0, 0, 2, 1] and row.support_ids.tolist() == [1, 4, 6]
    assert (
        packed_row([plain]).support_counts.size == 0 and to_device(packed_row([plain]), torch.device("cpu"))[-1] is None
    )
    assert row.drop_support().support_ids.size == 0
    assert join_supports([(None, 3), (None, 2)]) is None

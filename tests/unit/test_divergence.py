"""KL estimates: expectations over a whole vocabulary against the divergence itself, gradients against finite
differences and against the true gradient, and what is 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.kl import KINDS, kl_estimate, kl_full, kl_importance_weighted


def log_policies(count: int, *, seed: int = 3, size: int = 7) -> list[Tensor]:
    """Log-probs of `count` random policies over a small vocabulary, float64, as logits that can be trained."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(count)]


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("kind", ["k1", "kl", "k3", "low_var_kl", "k1+", "k3+"])
def test_the_expectation_of_k1_and_k3_is_the_divergence(kind: Any) -> None:
    policy, reference = log_policies(2)
    expected = (policy.exp() * kl_estimate(policy, reference, kind=kind)).sum()
    torch.testing.assert_close(expected, divergence(policy, reference))


def test_the_gradient_of_k2_and_of_every_plus_is_that_of_the_divergence_on_policy() -> None:
    logits, reference = (part.clone() for part in log_policies(2))
    logits.requires_grad_()
    (true,) = torch.autograd.grad(divergence(logits.log_softmax(-1), reference), logits)
    for kind in KINDS:
        policy = logits.log_softmax(-1)
        loss = (policy.exp().detach() * kl_estimate(policy, reference, kind=kind)).sum()  # type: ignore[arg-type]
        (got,) = torch.autograd.grad(loss, logits)
        unbiased = kind.endswith("+") or kind in ("k2", "mse")
        assert torch.allclose(got, true, rtol=1e-9, atol=1e-12) is unbiased, kind


def test_importance_weighted_k3_has_the_value_and_the_gradient_of_the_divergence_off_policy() -> None:
    logits, old, reference = (part.clone() for part in log_policies(3))
    logits.requires_grad_()
    policy, mask = logits.log_softmax(-1), torch.ones(7).bool()
    true = divergence(policy, reference)
    found = (old.exp() * kl_importance_weighted(policy, old, reference, mask)).sum()
    torch.testing.assert_close(found, true)
    grads = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, true)]
    torch.testing.assert_close(*grads)


def test_full_divergence_is_that_of_the_tempered_distributions() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        logits[2] = torch.nan
        logits[1, 4] = -torch.inf  # a token that is never sampled
    mask = torch.tensor([True, True, False])
    found = kl_full(logits, reference, mask, temperature=0.7)
    for row in (0, 1):
        terms = torch.nn.functional.kl_div(
            (reference[row] / 0.7).log_softmax(-1),
            (logits[row] / 0.7).log_softmax(-1),
            log_target=True,
            reduction="none",
        )
        torch.testing.assert_close(found[row], terms.nan_to_num(0.0).sum())
    assert found[2] == 0
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[2].any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("+")])
def test_gradients_equal_finite_differences(kind: Any) -> None:
    policy = torch.tensor([-1.0, -0.3, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.4, -0.9, -0.7, -1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    assert torch.autograd.gradcheck(lambda now: kl_estimate(now, reference, mask, kind=kind), (policy,))


def test_gradient_of_the_importance_weighted_form_equals_finite_differences() -> None:
    policy = torch.tensor([-1.0, -0.3, -2.0], dtype=torch.float64, requires_grad=True)
    old, reference = torch.tensor([-1.2, -0.5, -1.5]), torch.tensor([-1.4, -0.9, -0.7])
    mask = torch.tensor([True, True, False])
    assert torch.autograd.gradcheck(lambda now: kl_importance_weighted(now, old, reference, mask), (policy,))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_the_mask_and_no_gradient_of_the_reference(kind: Any) -> None:
    policy = torch.tensor([-1.0, torch.nan, -torch.inf], requires_grad=True)
    reference = torch.tensor([-2.0, torch.inf, torch.nan], requires_grad=True)
    found = kl_estimate(policy, reference, torch.tensor([True, False, False]), kind=kind)
    assert found[1:].tolist() == [0, 0]
    found.sum().backward()
    assert reference.grad is None
    assert policy.grad is not None
    assert policy.grad[0] != 0
    assert policy.grad[1:].tolist() == [0, 0]
    empty = torch.zeros(0, requires_grad=True)
    kl_estimate(empty, torch.zeros(0), torch.zeros(0).bool(), kind=kind).sum().backward()


def test_k3_is_clamped_without_a_gradient_and_exact_for_small_distances() -> None:
    policy = torch.tensor([-25.0, 25.0, -100.0, 1e-4], requires_grad=True)
    found = kl_estimate(policy, torch.zeros(4))
    torch.testing.assert_close(found, torch.tensor([10.0, 10.0, 10.0, 5e-9]), rtol=1e-3, atol=0)
    found.sum().backward()
    assert policy.grad is not None
    assert policy.grad[:3].tolist() == [0, 0, 0]
    torch.testing.assert_close(policy.grad[3], torch.tensor(1e-4), rtol=1e-3, atol=0)
    assert kl_estimate(torch.randn(1000) * 1e-4, torch.zeros(1000)).min() >= 0


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")  # type: ignore[arg-type]

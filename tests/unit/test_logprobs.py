"""Chunked log-probs and entropy against full logits; the policy model on packed and padded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.errors import ConfigError
from learners.backends.base import to_device
from learners.batch.micro_batches import Sample, packed_row, padded_rows
from learners.models import logprobs as logprobs_module
from learners.models.logprobs import chunked_logprobs, token_numbers
from learners.models.policy_model import PolicyModel, check_head
from learners.warm_start.tiny_model import make_tiny_qwen3


def full(hidden, weight, targets, bias, temperature, *, cap=None):  # type: ignore[no-untyped-def]
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(
    ("with_bias", "used"), [(False, "both"), (True, "both"), (True, "logprobs"), (True, "entropy")]
)
def test_values_and_gradients_equal_the_full_computation(
    temperature: float, chunk: int, with_bias: bool, used: str, cap: float | None
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(17, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 17, (11,))
    inputs = [hidden, weight] + ([bias] if bias is not None else [])
    up_logprobs, up_entropy = torch.randn(11, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    options = {"bias": bias, "temperature": temperature, "cap": cap}
    results = []
    for compute in (
        lambda: chunked_logprobs(hidden, weight, targets, chunk_tokens=chunk, **options),
        lambda: full(hidden, weight, targets, **options),
    ):
        logprobs, entropy = compute()
        parts = {"logprobs": (logprobs * up_logprobs).sum(), "entropy": (entropy * up_entropy).sum()}
        loss = sum(part for name, part in parts.items() if used in (name, "both"))
        results.append((logprobs, entropy, *torch.autograd.grad(loss, inputs)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_logprobs(h, w, targets, temperature=0.8, chunk_tokens=2), (hidden, weight)
    )


@pytest.mark.parametrize(("rows", "again"), [(0, 3), (0.01, 2), (5, 2), (6, 1), (9, 1), (10, 0)])
def test_kept_chunks_are_not_computed_again_and_a_second_backward_pass_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: float, again: int
) -> None:
    inner, calls = logprobs_module._logits, []

    def counted(*given):  # type: ignore[no-untyped-def]
        calls.append(given)
        return inner(*given)

    monkeypatch.setattr(logprobs_module, "_logits", counted)
    monkeypatch.setattr(logprobs_module, "KEPT_BYTES", int(rows * 50 * 4))
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.arange(10), chunk_tokens=4)
    assert len(calls) == 3
    first = torch.autograd.grad(logprobs.sum(), [hidden, weight], retain_graph=True)
    assert len(calls) == 3 + again
    wanted = torch.autograd.grad(full(hidden, weight, torch.arange(10), None, 1.0)[0].sum(), [hidden, weight])
    for got, right in zip(first, wanted, strict=True):
        torch.testing.assert_close(got, right)
    assert all(map(torch.equal, first, torch.autograd.grad(logprobs.sum(), [hidden, weight], retain_graph=True)))
    calls.clear()
    with torch.no_grad():
        assert torch.equal(chunked_logprobs(hidden, weight, torch.arange(10), chunk_tokens=4)[0], logprobs)
    calls.clear()
    torch.autograd.grad((logprobs + entropy).sum(), [hidden, weight])
    assert len(calls) == 3  # the entropy's gradient needs the logarithm, too


def test_logits_never_exist_whole() -> None:
    """Every tensor that the function makes has at most `chunk` rows of the vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 50:
                largest = max(largest, out.shape[0])
            return out

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    with Watch():
        logprobs, entropy = chunked_logprobs(hidden, weight, torch.zeros(64).long(), chunk_tokens=16)
        (logprobs.sum() + entropy.sum()).backward()
    assert 0 < largest <= 16
    largest = 0
    with Watch():
        token_numbers(hidden, weight, torch.zeros(64).long(), chunk_tokens=16, squares=True)
    assert 0 < largest <= 16


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("scale", [1.0, 30.0])  # 30: nearly all of the probability at one token
def test_sums_of_squares_equal_those_of_the_full_softmax(temperature: float, chunk: int, scale: float) -> None:
    torch.manual_seed(3)
    hidden, weight, bias = torch.randn(11, 6) * scale, torch.randn(50, 6, requires_grad=True), torch.randn(50)
    targets = torch.randint(0, 50, (11,))
    options = {"bias": bias, "temperature": temperature, "chunk_tokens": chunk}
    got = token_numbers(hidden, weight, targets, squares=True, **options)
    wanted = (nn.functional.linear(hidden.double(), weight.double(), bias.double()) / temperature).softmax(-1)
    assert got.square_sums is not None and not any(number.requires_grad for number in got)
    torch.testing.assert_close(got.square_sums.double(), wanted.square().sum(-1), rtol=2e-5, atol=0)
    plain = token_numbers(hidden, weight, targets, **options)
    trained = chunked_logprobs(hidden, weight, targets, **options)
    assert plain.square_sums is None
    for left, middle, right in zip(got[:2], plain[:2], trained, strict=True):
        assert torch.equal(left, middle) and torch.equal(left, right)  # asking for more changes no bit


def test_no_targets_keeps_the_graph() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.zeros(0).long())
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and float(weight.grad.abs().sum()) == 0


def test_half_precision_is_computed_wide() -> None:
    torch.manual_seed(2)
    hidden = torch.randn(9, 16).bfloat16().requires_grad_()
    weight = torch.randn(30, 16).bfloat16().requires_grad_()
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.arange(9), chunk_tokens=4)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def sample(length: int, prompt: int, seed: int) -> Sample:
    tokens = np.random.default_rng(seed).integers(3, 20, length).astype(np.int32)
    ones = np.ones(length - prompt)
    return Sample(tokens, prompt, -ones.astype(np.float32), ones.astype(np.uint8), 1.0)


@pytest.mark.parametrize("layout", [packed_row, padded_rows])
def test_rows_equal_single_sequences_and_tied_heads_get_their_gradient(layout) -> None:  # type: ignore[no-untyped-def]
    model = make_tiny_qwen3(21, hidden_size=32, layers=2, head_dim=8, mlp_size=48)
    model.config.use_cache = False
    policy = PolicyModel(model, temperature=0.9, chunk_tokens=8)
    samples = [sample(9, 3, 0), sample(14, 1, 1), sample(5, 4, 2)]
    t = to_device(layout(samples), torch.device("cpu"))
    logprobs, entropy = policy(t.input_ids, t.position_ids, t.positions, t.targets)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters()}
    model.zero_grad()
    singles, entropies = [], []
    for item in samples:
        ids = torch.tensor(item.tokens, dtype=torch.long)[None]
        logs = (model(input_ids=ids).logits[0, :-1] / 0.9).log_softmax(-1)[item.prompt_tokens - 1 :]
        singles.append(logs.gather(-1, ids[0, item.prompt_tokens :, None]).squeeze(-1))
        entropies.append(-(logs.exp() * logs).sum(-1))
    torch.testing.assert_close(logprobs, torch.cat(singles), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(entropies), atol=1e-5, rtol=1e-5)
    (torch.cat(singles).sum() + 0.3 * torch.cat(entropies).sum()).backward()
    for name, p in policy.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_heads_that_scale_logits_are_refused() -> None:
    config = make_tiny_qwen3(21, hidden_size=32, layers=1, head_dim=8, mlp_size=48).config
    check_head(config)
    config.logits_scaling = 8.0
    with pytest.raises(ConfigError, match="logits_scaling"):
        check_head(config)

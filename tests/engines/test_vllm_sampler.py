"""The sampler of vLLM's second model runner, which every CUDA host has: its own code, with its GPU kernels in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample.sampler import Sampler as FirstSampler
from vllm.v1.worker.gpu.sample import sampler as second

from producers.engines.vllm.samplers import FullSoftmax, SecondFullSoftmax, record_full_softmax

VOCABULARY = 50


class States:
    """`SamplingStates` of two requests: the first one is cut and at temperature 0.7."""

    def __init__(self, *, min_p: float = 0.0) -> None:
        self.temperature = SimpleNamespace(gpu=torch.tensor([0.7, 1.0]))
        self.seeds = SimpleNamespace(gpu=torch.tensor([1, 2]))
        self.top_k, self.top_p, self.min_p = torch.tensor([5, VOCABULARY]), torch.tensor([0.8, 1.0]), min_p

    def apply_temperature(self, logits: torch.Tensor, mapping: torch.Tensor, _: Any) -> None:
        logits /= self.temperature.gpu[mapping][:, None]

    def apply_min_p(self, logits: torch.Tensor, *_: Any) -> None:
        shares = logits.softmax(-1)
        logits.masked_fill_(shares < self.min_p * shares.amax(-1, keepdim=True), -torch.inf)

    def get_top_k_top_p(self, mapping: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.top_k[mapping], self.top_p[mapping]

    def any_greedy(self, _: Any) -> bool:
        return False

    def any_explicit_seed(self, _: Any) -> bool:
        return True


def make(**settings: float) -> Any:
    found = object.__new__(second.Sampler)
    found.logprobs_mode, found.logits_processors = "raw_logprobs", []
    found.needs_logits_processing = np.ones(2, bool)
    found.thinking_budget_state = SimpleNamespace(apply=lambda *_: None)
    found.sampling_states, found.use_flashinfer, found.use_xpu_sampler = States(**settings), False, False
    found.use_fp64_gumbel = False
    return found


def run(sampler: Any, logits: torch.Tensor, *, return_logprobs: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    mapping, places = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    drawn: tuple[torch.Tensor, torch.Tensor] = sampler.sample(
        logits, mapping, mapping, np.arange(2), places, places, places, np.full(2, 9), return_logprobs=return_logprobs
    )
    return drawn


@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_log_probs_of_the_second_runner_are_of_the_full_softmax(monkeypatch: pytest.MonkeyPatch, min_p: float) -> None:
    cut: list[torch.Tensor] = []

    def drawn(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        cut.append(logits.clone())
        return logits.argmax(-1)

    monkeypatch.setattr(second, "gumbel_sample", drawn)
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    given, sampler = logits.clone(), make(min_p=min_p)
    assert torch.isinf(run(sampler, logits)[1][0]).any(), "as it is, what was cut has no log-prob"
    assert record_full_softmax(sampler) and type(sampler) is SecondFullSoftmax
    assert sampler.logprobs_mode == "processed_logprobs"
    tokens, found = run(sampler, logits)
    wanted = (given / torch.tensor([[0.7], [1.0]])).log_softmax(-1)
    torch.testing.assert_close(found.log_softmax(-1), wanted)
    assert torch.equal(cut[0], cut[1]) and torch.equal(logits, given), "draws are cut as before"
    assert tokens.tolist() == given.argmax(-1).tolist()
    assert torch.isinf(run(sampler, logits, return_logprobs=False)[1][0]).any()


def test_both_samplers_are_changed_and_no_other_one() -> None:
    class Other(FirstSampler):  # type: ignore[misc]
        """As plugins for other hardware have."""

    first = FirstSampler()
    assert record_full_softmax(first) and type(first) is FullSoftmax and record_full_softmax(first)
    assert not record_full_softmax(Other()) and not record_full_softmax(None)

"""The optimal token baseline in a step: against full softmaxes, and where rounding would make a weight negative."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner_loop import gang, make_config, model_dir
from test_presets_train import batch_of

from asyncrl.config.sections.algorithm import AlgorithmConfig
from learners.algorithms.advantages import optimal_token_baseline
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch.estimates import ModelNumbers, describe_batch, estimate_late
from learners.batch.micro_batches import decode_share
from learners.gang.gang import Gang
from learners.step.batch_passes import prepare, step_needs
from learners.step.resilient_step import StepRunner

assert gang and model_dir  # fixtures

OFF_POLICY = (
    'learner.algorithm.advantage = "optimal_token_baseline"\n'
    "learner.algorithm.advantage_options = { off_policy = true }"
)


def numbers_of(model: Any, batch: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and sums of squares of every sample `[T]`, float64, each alone by the model's full logits."""
    logprobs, squares = [], []
    for group in batch.groups:
        for sample in group.samples:
            ids = torch.tensor(np.concatenate((group.prompt_ids, sample.response)), dtype=torch.int64)[None]
            logs = model(input_ids=ids).logits[0, group.prompt_ids.size - 1 : -1].double().log_softmax(-1).detach()
            logprobs.append(logs.gather(-1, ids[0, group.prompt_ids.size :, None]).squeeze(-1))
            squares.append(logs.exp().square().sum(-1))
    return logprobs, squares


@pytest.mark.parametrize("proximal", ["recompute", "behaviour", "loglinear"])
def test_advantages_are_those_of_full_softmaxes(gang: Gang, model_dir: Path, tmp_path: Path, proximal: str) -> None:
    from transformers import AutoModelForCausalLM

    extra = f'{OFF_POLICY}\nlearner.algorithm.proximal = "{proximal}"\nlearner.algorithm.loss = "ppo"'
    config = make_config(model_dir, tmp_path / "run", extra=extra)
    algorithm, batch = config.learner.algorithm, batch_of(1)
    backend = FSDP2Backend(config, gang)
    trial = StepRunner(config.learner, gang=gang, backend=backend, say=str, quarantine=lambda *_: None)
    share = decode_share(trial.cut(batch)[1][0])
    whole = describe_batch(batch, algorithm)
    ready = prepare(share, backend=backend, gang=gang, algorithm=algorithm, whole=whole)
    assert not ready.broken and ready.advantages is not None
    logprobs, squares = numbers_of(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), batch)
    pad = torch.nn.utils.rnn.pad_sequence
    wanted = optimal_token_baseline(
        whole.rollouts._replace(proximal=pad(logprobs, batch_first=True), square_sums=pad(squares, batch_first=True)),
        off_policy=True,
    ).advantages
    assert float(wanted.abs().sum()) > 0
    for micro, got in zip(share[0].micro, ready.advantages[0], strict=True):
        rows = [wanted[number, : logprobs[number].numel()] for number in micro.samples.tolist()]
        torch.testing.assert_close(got.double(), torch.cat(rows), atol=1e-4, rtol=1e-4)


def test_rounding_makes_no_weight_negative() -> None:
    """A policy that is certain: 1 - 2 pi + sum of squares is 0 up to the rounding of float32."""
    rng = np.random.default_rng(0)
    batch = batch_of(1)
    whole = describe_batch(batch, AlgorithmConfig())
    logs = [np.full(sample.response.size, -1e-7, np.float32) for sample in whole.samples]
    sums = [np.float32(1) - rng.random(sample.response.size).astype(np.float32) * 3e-7 for sample in whole.samples]
    algorithm = AlgorithmConfig(advantage="optimal_token_baseline")
    late = estimate_late(whole, ModelNumbers(logs, square_sums=sums), algorithm, kl_coeff=0.0, correct=False)
    largest = max(sample.reward for sample in whole.samples)
    assert late.advantages is not None
    assert all(np.abs(row).max() <= largest for row in late.advantages)  # a baseline lies within the returns


def test_the_sums_are_made_for_those_who_need_them_alone() -> None:
    assert step_needs(AlgorithmConfig(advantage="optimal_token_baseline")).squares
    for advantage in ("grpo", "vtrace", "gae"):
        assert not step_needs(AlgorithmConfig(advantage=advantage)).squares

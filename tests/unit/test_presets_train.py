"""Every preset and every choice of `[learner.algorithm]` through the learner's own step, on batches made by hand."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_learner_loop import gang, make_batch, make_config, make_learner, model_dir, weights

from asyncrl.config import presets
from asyncrl.metrics import read_lines
from asyncrl.runtime.run_dir import RunDir
from learners.gang.gang import Gang

assert gang and model_dir  # fixtures
TrainPreset = Callable[[str], tuple[Any, Any, list[dict[str, Any]]]]


def batch_of(step: int, *, greedy: bool = False, apart: float = 0.0) -> Any:
    """Four samples of three prompts with rewards that differ, of two versions, one of them cut by the limit. `apart`:
    nats by which the policies that sampled may lie below the others.
    """
    batch = make_batch(step)
    rng = np.random.default_rng(step + 50)
    groups = []
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            size = sample.response.size
            runs = ((max(step - 3, 0), size // 2), (step - 1, size - size // 2)) if size > 1 else ((step - 1, 1),)
            samples.append(
                msgspec.structs.replace(
                    sample,
                    reward=float(rng.integers(0, 3)) / 2,
                    runs=runs,
                    logprobs=sample.logprobs - 2.5 - np.float32(apart) * rng.random(size, np.float32),
                    finish="length" if sample.index == 3 else "stop",
                )
            )
        if greedy:
            samples.append(msgspec.structs.replace(samples[0], index=4, reward=0.25, parts={"exact": 0.25}))
        groups.append(msgspec.structs.replace(group, samples=tuple(samples)))
    return msgspec.structs.replace(batch, groups=tuple(groups))


def trained(
    gang: Gang, model: Path, place: Path, extra: str, *, steps: int = 2, lr: float = 1e-3, apart: float = 0.0
) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Weights before and after a run with these settings (TOML), and its lines of metrics."""
    config = make_config(model, place, steps=steps, lr=lr, extra=extra)
    learner, buffer, backend, services = make_learner(config, gang)
    start = weights(backend)
    greedy = config.sampling.greedy_baseline
    buffer.batches.update({step: batch_of(step, greedy=greedy, apart=apart) for step in range(1, steps + 1)})
    try:
        learner.run()
    finally:
        services.close()
    assert not [call for call in buffer.calls if call[0] == "quarantine"]
    lines = [line for line in read_lines(RunDir(place).metrics / "learner.jsonl") if "step" in line]
    assert len(lines) == steps and not any(line.get("skipped") for line in lines)
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float)), line
    return start, weights(backend), lines


@pytest.fixture(scope="module")
def train_preset(gang: Gang, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainPreset:
    """Train with a preset on samples of other policies, once: weights before and after, and lines of metrics."""

    @functools.cache
    def train(name: str) -> tuple[Any, Any, list[dict[str, Any]]]:
        more = "learner.critic.critic_warmup = 0\n"
        if name == "adaptive_entropy":  # the entropy of a model that knows nothing is above the preset's target
            more += "learner.algorithm.entropy_target = 9\n"
        place = tmp_path_factory.mktemp(name) / "run"
        return trained(gang, model_dir, place, f'{more}learner.algorithm.preset = "{name}"', lr=0.05, apart=3.0)

    return train


NAMES = [name for name in presets.names() if name != "spin"]  # of other groups: tests/e2e/test_supervised_modes.py


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_trains_and_its_mechanism_acts(train_preset: TrainPreset, name: str) -> None:
    start, ended, lines = train_preset(name)
    assert ended != start and all(line["grad_norm"] > 0 for line in lines)
    metric = presets.load_recipe(name).acts
    # a margin may be below 0 here: the rewards of one batch say nothing of the next
    assert max(abs(line[metric]) for line in lines) > 0, metric


def test_no_two_presets_make_the_same_update(train_preset: TrainPreset) -> None:
    ended = {name: np.concatenate(list(as_arrays(train_preset(name)[1]).values())) for name in NAMES}
    for one, other in itertools.combinations(ended, 2):
        same = bool(np.abs(ended[one] - ended[other]).max() < 1e-5)
        assert same is (other in presets.load_recipe(one).equals), (one, other)


def test_the_metrics_say_what_mini_batches_and_the_dual_clip_did(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    text = (
        "learner.algorithm.loss = 'ppo'\nlearner.algorithm.loss_options = {{ dual_clip = 1.0001 }}\n"
        "learner.algorithm.minibatches = {}"
    )
    _, _, one = trained(gang, model_dir, tmp_path / "one", text.format(1))
    _, _, three = trained(gang, model_dir, tmp_path / "three", text.format(3))
    assert all(line["approx_kl"] == line["dual_clip_share"] == 0 for line in one)
    assert all(line["approx_kl"] != 0 and 0 < line["dual_clip_share"] < 1 for line in three)


CHOICES = {
    "m2po": 'correction = "m2po"',
    "mis": 'correction = "mis"\ncorrection_options = { level = "sequence", batch_normalize = true }',
    "rejection": 'correction = "rejection"\ncorrection_options = { options = ["seq_mean_k3"], thresholds = [4.0] }\n'
                 'denominator = "kept"',
    "loglinear": 'proximal = "loglinear"\nminibatches = 2',
    "kl_reward": 'advantage = "reinforce_plus_plus"\n[learner.algorithm.kl]\nwhere = "reward"\ncoeff = 0.1',
    "kl_loss": '[learner.algorithm.kl]\nwhere = "loss"\ncoeff = 0.5\nimportance_weighted = true',
    "gae": 'advantage = "gae"\nadvantage_options = { lam = 0.9 }',
    "high_entropy": "entropy_keep = 0.3\nminibatches = 3",
    "high_entropy_kept": 'entropy_keep = 0.3\ndenominator = "kept"\nproximal = "behaviour"\nloss = "ppo"',
    "high_entropy_resampled": 'entropy_keep = 0.3\n[learner.algorithm.shaping]\nresample = "pow"',
    "entropy_target": "entropy_target = 9\nentropy_step = 0.5",
    "token_baseline": 'advantage = "optimal_token_baseline"\nminibatches = 3',
    "token_baseline_bypass": 'advantage = "optimal_token_baseline"\nproximal = "behaviour"\nloss = "ppo"',
    "vtrace": 'advantage = "vtrace"\nloss = "reinforce"',
    "kl_cov": 'loss = "kl_cov"\nloss_options = { ratio = 0.2, coeff = 1.0 }\nminibatches = 3',
    "lag": '[learner.algorithm.lag]\nweight = "exp"\nstep_scale = "sqrt_ess"',
    "shaping": 'positive_coeff = 0.1\nstale_negatives = 0.05\n[learner.algorithm.shaping]\noverlong_share = 0.5\n'
               'overlong_filter = true\ncorrect_above = 0.9',
    "resample": '[learner.algorithm.shaping]\nresample = "pow"',
    "norm": 'aggregation = "seq-mean-token-sum-norm"\nloss = "gspo"\n'
            'loss_options = { clip_low = 0.2, clip_high = 0.2 }',
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_the_result_does_not_depend_on_the_cut(gang: Gang, model_dir: Path, tmp_path: Path, name: str) -> None:
    """Packed rows of 64 tokens against padded rows; beside it the settings change something at all."""
    text = f"[learner.algorithm]\n{CHOICES[name]}"
    _, packed, lines = trained(gang, model_dir, tmp_path / "packed", text)
    _, padded, others = trained(gang, model_dir, tmp_path / "padded", f"learner.packing = false\n{text}")
    _, plain, _ = trained(
        gang, model_dir, tmp_path / "plain", "learner.algorithm.minibatches = 3" if "minibatches = 3" in text else ""
    )
    assert packed != plain
    for metric in ("grad_norm", "loss", "ess", "kl_behaviour", "clip_share"):
        assert [line[metric] for line in lines] == pytest.approx([line[metric] for line in others], rel=2e-3, abs=1e-5)
    for key, value in as_arrays(packed).items():
        # AdamW divides by the size of the gradient: where that is nearly 0, rounding decides on up to a whole step.
        apart = np.abs(value - as_arrays(padded)[key])
        assert np.quantile(apart, 0.99) < 1e-5, (key, apart.max())


def as_arrays(found: Any) -> dict[str, Any]:
    return {name: np.frombuffer(bytes(data), np.float32) for name, data in dict(found).items()}

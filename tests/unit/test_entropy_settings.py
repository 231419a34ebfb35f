"""entropy_keep and entropy_target in a run: which tokens are trained, and a weight that moves and resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_algorithm_settings import key, made, refused
from test_learner_loop import gang, make_batch, make_config, make_learner, model_dir, weights
from test_presets_train import trained

from asyncrl.config.rules import notes
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.algorithm import AlgorithmConfig, KLConfig
from asyncrl.errors import Fenced
from asyncrl.metrics import read_lines
from asyncrl.runtime.run_dir import RunDir
from learners.algorithms.aggregation import Denominators
from learners.algorithms.entropy import entropy_threshold, high_entropy
from learners.backends.base import to_device
from learners.batch.micro_batches import Sample, packed_row
from learners.batch.token_selection import keep_high_entropy
from learners.checkpoints import checkpoint
from learners.gang.gang import Gang
from learners.step.batch_passes import Prepared
from learners.step.coefficients import apply_settings, next_coefficients, start_coefficients
from learners.step.resilient_step import StepRunner
from learners.step.update import StepResult, Terms, loss_function

assert gang and model_dir  # fixtures


# ---------------------------------------------------------------- which tokens


@pytest.mark.parametrize(("share", "count", "kept"), [(0.2, 10, 2), (0.29, 100, 29), (0.01, 10, 1), (1.0, 7, 7)])
def test_the_share_is_counted_in_whole_tokens(share: float, count: int, kept: int) -> None:
    values = torch.arange(float(count))
    assert entropy_threshold(values, share=share) == count - kept
    assert int(high_entropy(values, values >= 0, share=share).sum()) == kept


class Ranks:
    """A gang whose ranks ask one after another; `others` is what the rest sent."""

    def __init__(self, others: list[bytes]) -> None:
        self.others = others

    def gather_shares(self, data: bytes) -> list[bytes]:
        return [data, *self.others]


def pieces_of(sizes: list[int], seed: int = 0) -> tuple[list[Any], list[list[torch.Tensor]], torch.Tensor]:
    """One mini-batch of micro-batches with so many tokens, their entropies, and those that are trained, in a row."""
    rng = np.random.default_rng(seed)
    flat, mask = rng.random(sum(sizes)).astype(np.float32), (rng.random(sum(sizes)) < 0.7).astype(np.uint8)
    ends = np.cumsum(sizes)[:-1]
    micro = [SimpleNamespace(mask=part) for part in np.split(mask, ends)]
    entropy = [torch.from_numpy(part) for part in np.split(flat, ends)]
    return [SimpleNamespace(micro=micro)], [entropy], torch.from_numpy(flat[mask > 0])


@pytest.mark.parametrize("sizes", [[40], [10, 30], [1] * 40, [0, 40]])
def test_the_threshold_is_that_of_the_batch_however_it_is_cut(sizes: list[int]) -> None:
    share, entropy, flat = pieces_of(sizes)
    _, _, other = pieces_of([25], seed=1)
    found = keep_high_entropy(share, entropy, keep=0.3, gang=Ranks([other.numpy().tobytes()]))  # type: ignore[arg-type]
    every = torch.cat((flat, other)).sort(descending=True).values
    assert found.threshold == float(every[int(0.3 * every.numel()) - 1])
    for micro, values, kept in zip(share[0].micro, entropy[0], found.pieces[0], strict=True):
        assert kept.tolist() == [
            bool(m) and float(v) >= found.threshold for m, v in zip(micro.mask, values, strict=True)
        ]


def test_nothing_to_train_has_no_threshold() -> None:
    share, entropy, _ = pieces_of([3])
    share[0].micro[0].mask[:] = 0
    found = keep_high_entropy(share, entropy, keep=0.5, gang=Ranks([]))  # type: ignore[arg-type]
    assert found.threshold == 0 and not found.pieces[0][0].any()


@pytest.mark.parametrize("loss", ["decoupled_ppo", "reinforce", "gspo", "gmpo", "vespo", "cispo"])
def test_the_other_tokens_get_no_gradient(loss: str) -> None:
    rng = np.random.default_rng(0)
    rows = [
        Sample(
            rng.integers(3, 20, 12).astype(np.int32),
            4,
            -2 * rng.random(8).astype("f4"),
            np.ones(8, np.uint8),
            float(n) - 0.5,
            n,
        )
        for n in range(2)
    ]
    micro = to_device(packed_row(rows), torch.device("cpu"))
    high = torch.tensor([True, False] * 8)
    current = torch.full((16,), -1.0, requires_grad=True)
    terms = Terms(high=[high], proximal=[torch.full((16,), -1.0)])
    value, sums = loss_function(AlgorithmConfig(loss=loss), Denominators(16, 2), terms)(
        current, torch.zeros(16), micro, 0
    )
    value.backward()  # type: ignore[no-untyped-call]
    assert current.grad is not None and (current.grad[high] != 0).all() and (current.grad[~high] == 0).all()
    assert float(sums["entropy_kept_sum"]) == 8


def test_a_step_tells_its_threshold_and_mini_batches_share_it(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    text = "learner.algorithm.entropy_keep = 0.25\nlearner.algorithm.minibatches = {}"
    lines = {n: trained(gang, model_dir, tmp_path / str(n), text.format(n))[2] for n in (1, 3)}
    _, _, every = trained(gang, model_dir, tmp_path / "every", "")
    for line in (*lines[1], *lines[3]):
        assert line["entropy_kept_share"] == pytest.approx(0.25, abs=1.5 / line["tokens"])
    assert lines[1][0]["entropy_threshold"] == pytest.approx(lines[3][0]["entropy_threshold"], rel=1e-6)
    assert lines[1][0]["entropy_threshold"] > lines[1][0]["entropy"] == every[0]["entropy"]
    assert "entropy_threshold" not in every[0] and "entropy_coeff" not in every[0]
    assert lines[1][0]["grad_norm"] != every[0]["grad_norm"]


# ---------------------------------------------------------------- a weight that moves

ADAPTIVE = AlgorithmConfig(entropy_target=0.2, entropy_step=0.25, entropy_max=0.4)


def test_the_weight_follows_the_entropy() -> None:
    found, told = start_coefficients(ADAPTIVE), []
    for entropy in (0.1, 0.1, 0.3, 0.1, 0.3, 0.3, None, 0.3):
        found = next_coefficients(found, ADAPTIVE, kl=None, samples=0, entropy=entropy)
        told.append((round(found.entropy, 6), round(found.entropy_carried, 6)))
    assert told == [(0.25, 0.25), (0.4, 0.4), (0, 0.15), (0.4, 0.4), (0, 0.15), (0, 0), (0, 0), (0, 0)]
    assert found.kl == 0.001


def test_a_setting_that_changes_starts_again_and_a_fixed_one_is_its_setting() -> None:
    kl = KLConfig(where="reward", controller="adaptive", coeff=0.1, horizon=10.0)
    base = msgspec.structs.replace(ADAPTIVE, kl=kl)
    found = next_coefficients(start_coefficients(base), base, kl=5.0, samples=8, entropy=0.1)
    assert found.kl != 0.1 and found.entropy == 0.25 and apply_settings(found, base) == found
    other = msgspec.structs.replace(base, entropy_coeff=0.1, entropy_target=0.5)
    assert apply_settings(found, other).entropy == 0.1 and apply_settings(found, other).kl == found.kl
    fixed = msgspec.structs.replace(base, entropy_target=0.0, kl=msgspec.structs.replace(kl, controller="fixed"))
    assert (apply_settings(found, fixed).entropy, apply_settings(found, fixed).kl) == (0.0, 0.1)
    aimed = msgspec.structs.replace(base, entropy_target=0.7)  # goes on from where it is, to the new target
    assert apply_settings(found, aimed) == found


def test_a_step_that_does_not_train_the_policy_moves_no_weight() -> None:
    """As in the warm-up of a critic: the policy equals the reference, which says nothing about the penalty."""
    kl = KLConfig(where="reward", controller="adaptive", coeff=0.1, horizon=10.0)
    algorithm = msgspec.structs.replace(ADAPTIVE, kl=kl)
    runner: Any = SimpleNamespace(
        _config=SimpleNamespace(algorithm=algorithm),
        _gang=SimpleNamespace(total=lambda _: {"samples": 8.0}),
        coefficients=start_coefficients(algorithm),
    )
    for idle in ({"lr": 0.0, "entropy": 0.1}, {"lr": 0.1}):  # a warm-up; a batch without a trained token
        StepRunner._move(runner, [], Prepared(kl=0.0), StepResult(idle, 0))
        assert runner.coefficients == start_coefficients(algorithm)
    StepRunner._move(runner, [], Prepared(kl=0.0), StepResult({"lr": 0.1, "entropy": 0.1}, 0))
    assert runner.coefficients.kl == pytest.approx(0.1 * (1 - 0.2 * 8 / 10)) and runner.coefficients.entropy == 0.25


def test_the_bonus_is_paid_with_the_weight_of_the_step(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    text = "learner.algorithm.entropy_target = {}\nlearner.algorithm.entropy_step = 0.5"
    _, low, lines = trained(gang, model_dir, tmp_path / "low", text.format(9.0), steps=4)
    assert [line["entropy_coeff"] for line in lines] == [0.0, 0.5, 1.0, 1.0]  # entropy_max = 1
    _, high, lines = trained(gang, model_dir, tmp_path / "high", text.format(0.01), steps=4)
    assert [line["entropy_coeff"] for line in lines] == [0.0] * 4
    assert high == trained(gang, model_dir, tmp_path / "plain", "", steps=4)[1] != low


ENTROPY = (
    "learner.algorithm.entropy_target = 9.0\nlearner.algorithm.entropy_step = 0.02\n"
    "learner.algorithm.entropy_keep = 0.5"
)
KL = (
    'learner.algorithm.kl = { where = "reward", controller = "adaptive", horizon = 20.0 }\n'
    'learner.algorithm.advantage = "reinforce_plus_plus"'
)
TUNED = {ENTROPY: '{"learner.algorithm.entropy_coeff": 0.1}', KL: '{"learner.algorithm.kl.coeff": 0.5}'}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("extra", [ENTROPY, KL])
def test_a_restart_goes_on_with_the_weight_of_the_checkpoint(
    *, gang: Gang, model_dir: Path, tmp_path: Path, extra: str, tuned: bool
) -> None:
    """Killed after step 3, continued from the checkpoint of step 2: the same bits, settings tuned before it or not."""
    text = TUNED[extra] if tuned else ""

    def learner_in(name: str, **options: Any) -> tuple[Any, Any, Any, Any]:
        found = make_learner(make_config(model_dir, tmp_path / name, steps=5, extra=extra), gang, **options)
        for step in range(1, 6):
            found[1].batches[step] = msgspec.structs.replace(
                make_batch(step, replayed=step <= found[1].replay_to), tuning=text
            )
        return found

    whole, _, reference, services = learner_in("whole")
    whole.run()
    services.close()
    first, buffer, _, services = learner_in("cut")

    def die(step: int) -> None:
        if step == 4:
            raise Fenced("fenced", "another learner")

    buffer.on_claim = die
    with pytest.raises(Fenced):
        first.run()
    services.close()
    saved = checkpoint.newest(RunDir(tmp_path / "cut").checkpoints)
    assert saved is not None and saved[0].step == 2
    second, _, backend, services = learner_in("cut", committed=4, replay_to=4)
    second.run()
    services.close()
    assert weights(backend) == weights(reference)
    assert (
        second._runner.coefficients
        == whole._runner.coefficients
        != start_coefficients(second._runner._config.algorithm)
    )
    lines = [read_lines(RunDir(tmp_path / name).metrics / "learner.jsonl") for name in ("whole", "cut")]
    name = "entropy_coeff" if extra == ENTROPY else "kl_coeff"
    wanted, got = ({line["step"]: line[name] for line in part if "step" in line} for part in lines)
    assert got == wanted and len(set(got.values())) >= 4


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("entropy_keep=0",), "entropy_keep"),
        (("entropy_keep=1.5",), "entropy_keep"),
        (("entropy_target=-1",), "entropy_target"),
        (("entropy_target=0.5", "entropy_coeff=2"), "lies above entropy_max = 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: tuple[str, ...], said: str) -> None:
    assert said in refused(*map(key, overrides))


def test_settings_are_explained() -> None:
    config = made(key("entropy_keep=0.2"), key("entropy_target=0.3"))
    told = algorithms.explain(config.learner.algorithm)
    assert "the 20% of tokens with the highest entropy, entropy bonus towards 0.3 nats" in told
    assert list(notes.notes(config)) == []
    assert "entropy bonus x 0.01" in algorithms.explain(made(key("entropy_coeff=0.01")).learner.algorithm)
    (told,) = notes.notes(made(key("entropy_max=0.5")))
    assert "no effect without an entropy_target" in told
    (told,) = notes.notes(made(key("entropy_keep=0.5"), key("loss=gspo"), key("minibatches=2")))
    assert "that of the tokens that are kept" in told
    assert math.isclose(made(key("entropy_keep=1")).learner.algorithm.entropy_keep, 1.0)
    assert json.loads(msgspec.json.encode(start_coefficients(AlgorithmConfig())))["entropy"] == 0.0

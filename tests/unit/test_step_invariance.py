"""A step does not depend on how its batch lies: the order of rows and groups, padding, packing, rows, ranks.

Every name of the registry goes through the learner's own step (`step_lab`): estimators, losses, corrections, ways to
aggregate, the modes on rows. A name that is added to the registry is tested from then on without a change here. Tokens
that a loss chooses over the whole mini-batch (KL-Cov, Clip-Cov) are chosen as the learner does it.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from step_lab import Ended, lab_batch, lab_config, required_options, run_steps, shuffled

from asyncrl.config import CriticConfig, LearnerConfig, PreferenceConfig
from asyncrl.config.sections.algorithm import AGGREGATIONS
from asyncrl.config.sections.algorithm_catalogue import ADVANTAGES, CORRECTIONS, LOSSES

A = "learner.algorithm."
#: Options under which a name does more on the small batches here than with its defaults.
TELLING = {
    "advantage passk_training": ["advantage_options.k=2"],
    "advantage gae": ["advantage_options.lam=0.8", "advantage_options.gamma=0.9"],
    "loss kl_cov": ["loss_options.ratio=0.2", "loss_options.coeff=1.0"],
    "loss clip_cov": ["loss_options.ratio=0.3", "loss_options.lower=0.05"],
    "loss gspo": ["loss_options.clip_low=0.2", "loss_options.clip_high=0.2"],
    "correction rejection": ["correction_options.thresholds=[3.0]", "denominator=kept"],
    "correction mis": ["correction_options.level=geometric"],
}
OWN = Path(__file__).with_name("own_functions.py")
#: Beside the names by themselves: settings that look at the whole batch.
MORE = {
    "weights over their mean": ["correction=tis", "correction_options.batch_normalize=true"],
    "KL in the reward": ["advantage=reinforce_plus_plus", "kl.where=reward", "kl.coeff=0.1", "kl.controller=adaptive",
                         "kl.horizon=100"],
    "KL in the loss": ["kl.where=loss", "kl.coeff=0.5", "kl.importance_weighted=true"],
    "age": ["lag.weight=exp", "lag.step_scale=sqrt_ess", "stale_negatives=0.1", "positive_coeff=0.1"],
    "loglinear": ["proximal=loglinear"],
    "bypass": ["proximal=behaviour", "loss=ppo"],
    "shaping": ["shaping.overlong_buffer=5", "shaping.overlong_filter=true", "entropy_coeff=0.01"],
    "own KL": ["advantage=reinforce_plus_plus", "kl.where=reward", "kl.coeff=0.1", f"kl.kind={OWN}:huber"],
    "length limit": ["advantage=gae", "/learner.critic.bootstrap=true"],
}  # fmt: skip
#: On samples of several rows.
SESSIONS = {
    "rows, mean of tokens": ["aggregation=seq-mean-token-mean", "entropy_coeff=0.1", "kl.where=loss", "kl.coeff=0.5"],
    "rows, sum of tokens": ["aggregation=seq-mean-token-sum", "loss=gspo"],
    "rows, without rejected tokens": [
        "aggregation=seq-mean-token-mean", "denominator=kept", "correction=rejection",
        "correction_options.options=['token_k2']", "correction_options.thresholds=[0.3]",
    ],
    "rows, critic": ["advantage=gae", "/learner.critic.aggregation=seq-mean-token-mean", "lag.step_scale=sqrt_ess"],
    "rows, own weights": [f"aggregation={OWN}:root_length", "kl.where=loss", "kl.coeff=0.5", f"kl.kind={OWN}:huber"],
    "rows, each counts": ["aggregation=seq-mean-token-mean", "sequence=row"],
}  # fmt: skip


def of_name(kind: str, name: str, table: dict[str, Any]) -> list[str]:
    """The settings that choose a name of the registry, and what they need beside it."""
    found = [f"{kind}={name}"]
    found += [f"{kind}_options.{key}={value}" for key, value in required_options(kind, name).items()]
    found += TELLING.get(f"{kind} {name}", [])
    entry = table[name]
    if entry.weighted:
        found.append("loss=reinforce")
    if "greedy" in entry.needs:
        found.append("/sampling.greedy_baseline=true")
    return found


def literals(section: type[msgspec.Struct], field: str) -> Sequence[str]:
    words: Sequence[str] = typing.get_args(typing.get_type_hints(section)[field])
    return words


CASES: dict[str, list[str]] = {
    f"{kind} {name}": of_name(kind, name, table)
    for kind, table in (("advantage", ADVANTAGES), ("loss", LOSSES), ("correction", CORRECTIONS))
    for name, entry in table.items()
    if "process" not in entry.needs  # a second language model: tests/distributed/test_process_ranks.py
}
CASES |= {f"aggregation {way}": [f"aggregation={way}"] for way in AGGREGATIONS}
CASES |= {
    f"value aggregation {way}": ["advantage=gae", f"/learner.critic.aggregation={way}"]
    for way in literals(CriticConfig, "aggregation")
}
CASES |= MORE | SESSIONS
ON_ROWS = {f"mode {mode}": [f"/learner.mode={mode}"] for mode in literals(LearnerConfig, "mode") if mode != "rl"}
ON_ROWS |= {
    f"dpo {kind}": ["/learner.mode=dpo", f"/learner.preference.loss={kind}"]
    for kind in literals(PreferenceConfig, "loss")
}
for mode in ("sft", "kto"):
    ON_ROWS[f"mode {mode}"].append("/sampling.group_size=1")
ON_ROWS["dpo robust"].append("/learner.preference.label_smoothing=0.2")
ON_ROWS |= {"centred": ["/learner.mode=reward_model", "/learner.preference.center_coeff=0.1"]}
BY_CASE = pytest.mark.parametrize("case", [*CASES, *ON_ROWS])

#: Tokens of a row, packing, ranks; the first is one row of the whole mini-batch.
CUTS = [(4096, True, 1), (32, True, 1), (48, False, 2), (40, True, 3)]
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
DRAWN = pytest.mark.parametrize(
    ("dtype", "seed"),
    [
        pytest.param(torch.float64, 1, id="f64"),
        pytest.param(torch.float32, 3, id="f32", marks=pytest.mark.chaos),
    ],
)


def ended(case: str, batches: Sequence[Any], cut: tuple[int, bool, int], dtype: torch.dtype, *more: str) -> Ended:
    tokens, packing, ranks = cut
    lines = [
        *{**CASES, **ON_ROWS}[case],
        *more,
        f"/learner.micro_batch_tokens={tokens}",
        f"/learner.packing={str(packing).lower()}",
    ]
    config = lab_config(*(line[1:] if line.startswith("/") else A + line for line in lines), on_rows=case in ON_ROWS)
    return run_steps(config, batches, ranks=ranks, dtype=dtype)


def batches_of(case: str, seed: int, *, groups: int = 6) -> list[Any]:
    greedy = any("greedy_baseline" in line for line in {**CASES, **ON_ROWS}[case])
    size = 4 if case in CASES else 1 if case in ("mode sft", "mode kto") else 2
    rows = case in SESSIONS
    return [lab_batch(step, greedy=greedy, seed=seed, size=size, groups=groups, rows=rows) for step in (1, 2)]


def same(got: Ended, wanted: Ended, limit: float) -> None:
    """Relative to the largest of each tensor; of numbers to 1 where they are smaller."""
    for name in ("gradients", "parameters"):
        for mine, theirs in zip(getattr(got, name), getattr(wanted, name), strict=True):
            largest = max(float(theirs.abs().max()), 1e-3)
            assert float((mine - theirs).abs().max()) <= limit * largest, name
    for mine, theirs in zip([*got.metrics, *got.weights], [*wanted.metrics, *wanted.weights], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=limit, abs=limit), key


@DRAWN
@BY_CASE
def test_packing_padding_rows_and_ranks_do_not_matter(case: str, dtype: torch.dtype, seed: int) -> None:
    batches = batches_of(case, seed)
    wanted = ended(case, batches, CUTS[0], dtype)
    assert any(bool(gradient.any()) for gradient in wanted.gradients)
    for cut in CUTS[1:]:
        same(ended(case, batches, cut, dtype), wanted, LIMITS[dtype])


@DRAWN
@BY_CASE
def test_the_order_of_rows_and_groups_does_not_matter(case: str, dtype: torch.dtype, seed: int) -> None:
    """Within the mini-batches: which groups go into the first update is a matter of their order."""
    if case == "mode kto":
        return  # its KL takes every prompt with the answer of the row before it
    # Clip-Cov draws by the order of the tokens: here it takes all that are eligible.
    every = ["loss_options.ratio=1.0"] if case == "loss clip_cov" else []
    batches = batches_of(case, seed)
    wanted = ended(case, batches, CUTS[1], dtype, *every)
    mixed = [shuffled(batch, seed=seed, parts=2) for batch in batches]
    same(ended(case, mixed, CUTS[1], dtype, *every), wanted, LIMITS[dtype])


@BY_CASE
def test_ranks_without_a_row_do_not_matter(case: str) -> None:
    """Two groups, one for each update, on seven ranks: some have rows of padding alone."""
    batches = batches_of(case, 5, groups=2)
    wanted = ended(case, batches, CUTS[0], torch.float64)
    same(ended(case, batches, (4096, True, 7), torch.float64), wanted, LIMITS[torch.float64])


@pytest.mark.parametrize("term", [["entropy_coeff=0.1"], ["kl.where=loss", "kl.coeff=0.5"]], ids=["entropy", "KL"])
@pytest.mark.parametrize(
    "rejection", [["entropy_keep=0.3"], CASES["rows, without rejected tokens"][2:]], ids=["entropy", "tokens"]
)
def test_the_denominator_of_kept_tokens_is_for_the_policy_loss(term: list[str], rejection: list[str]) -> None:
    """Without a reward entropy and KL alone have a gradient, and no rejection concerns them."""
    batch = lab_batch(1)
    groups = [
        msgspec.structs.replace(
            group, samples=tuple(msgspec.structs.replace(one, reward=0.0, parts={}) for one in group.samples)
        )
        for group in batch.groups
    ]
    batch = msgspec.structs.replace(batch, groups=tuple(groups))
    shared = [f"{A}{line}" for line in (*term, *rejection, "minibatches=1")]
    kept, original = (run_steps(lab_config(*shared, f"{A}denominator={way}"), [batch]) for way in ("kept", "original"))
    assert any(bool(gradient.any()) for gradient in original.gradients)
    for mine, theirs in zip(kept.gradients, original.gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_case_is_at_work(case: str, default: Ended) -> None:
    """What these tests compare is not the same thing under all names."""
    if case in ("advantage grpo", "loss decoupled_ppo", "loss ppo", "correction tis", "aggregation token-mean"):
        return  # the default by another name
    found = ended(case, batches_of(case, 1), CUTS[0], torch.float64)
    assert any(not torch.equal(a, b) for a, b in zip(found.parameters, default.parameters, strict=False))


@pytest.fixture(scope="module")
def default() -> Ended:
    return ended("advantage grpo", batches_of("advantage grpo", 1), CUTS[0], torch.float64)

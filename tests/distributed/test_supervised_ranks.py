"""sft, dpo, kto and reward models: two ranks, small rows and padding give the result of one rank, and of torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import supervised_cases as cases
import torch
from padded_rows import collate

from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.step.supervised import minibatch, train_step
from learners.warm_start.sft import Example, completion_loss

pytestmark = pytest.mark.timeout(600)  # the first one waits for the launch of all case modules


def compare(got: dict[str, Any], wanted: dict[str, Any], *, limit: float = 1e-5) -> None:
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert value == pytest.approx(right[name], rel=limit, abs=limit), name
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, values in got["weights"].items():
        np.testing.assert_allclose(values, wanted["weights"][name], atol=limit, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", ranks.parameters([*cases.CASES, "few"], cases.LONG))
def test_two_ranks_equal_one(two: Any, one: Any, name: str) -> None:
    compare(two[0][name], one[0][name])


@pytest.mark.skipif(not ranks.HAS_MEGATRON, reason="the extra megatron is not installed")
@pytest.mark.parametrize("name", cases.MEGATRON)
def test_megatron_equals_fsdp2(two: Any, one: Any, name: str) -> None:
    compare(two[0][name], one[0][cases.MEGATRON[name][0]])


@pytest.mark.parametrize("other", ranks.parameters(itertools.chain(*cases.SAME.values()), cases.LONG))
def test_rows_and_padding_do_not_change_the_result(one: Any, other: str) -> None:
    [name] = [name for name, others in cases.SAME.items() if other in others]
    compare(one[0][other], one[0][name])


def test_the_modes_differ_and_the_reward_model_has_a_head(one: Any) -> None:
    assert one[0]["dpo"]["metrics"][2]["loss"] != one[0]["ipo"]["metrics"][2]["loss"]
    assert "score.weight" in one[0]["reward_model"]["weights"] and "score.weight" not in one[0]["dpo"]["weights"]
    for name in ("dpo", "reward_model"):
        last = one[0][name]["metrics"][2]
        assert last["score_margin"] == pytest.approx(last["chosen_score"] - last["rejected_score"], abs=1e-12)


def test_dpo_starts_at_log_2_and_its_reference_does_not_move(one: Any) -> None:
    first, _, last = one[0]["dpo"]["metrics"]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert (first["chosen_score"], first["rejected_score"]) == (0.0, 0.0)
    assert last["chosen_score"] != 0.0


def test_a_renewed_reference_is_the_policy_of_that_step_and_lies_in_checkpoints(
    one: Any, model: Path, gang: Gang, tmp_path: Path
) -> None:
    """Iterations of two steps: the third step compares with the policy after the second."""
    first, second, third = (line["loss"] for line in one[0]["renewed"]["metrics"])
    assert first == third == pytest.approx(np.log(2), abs=1e-6) != second
    config = cases.make_config(model, "dpo", "learner.preference.iteration=2")
    share = minibatch(cases.units(3, seed=1, size=2), ranks=1, max_tokens=96, packing=True)[0]
    trained = FSDP2Backend(config, gang)
    for step in (1, 2, 3):
        train_step([share], backend=trained, gang=gang, config=config.learner, step=step)
    trained.save(tmp_path)
    again = FSDP2Backend(config, gang)
    start = again.reference_logprobs(share.micro)
    again.load(tmp_path)
    for kept, frozen, old, now in zip(
        trained.reference_logprobs(share.micro),
        again.reference_logprobs(share.micro),
        start,
        again.forward_logprobs(share.micro),
        strict=True,
    ):
        assert torch.equal(kept, frozen) and not torch.equal(frozen, old) and not torch.equal(frozen, now)


def test_kto_pushes_apart_what_its_labels_part(one: Any) -> None:
    first, _, last = one[0]["kto"]["metrics"]
    assert (first["loss"], first["score_margin"], first["kto_kl"]) == (pytest.approx(0.5, abs=1e-6), 0.0, 0.0)
    assert last["score_margin"] == pytest.approx(last["chosen_score"] - last["rejected_score"], abs=1e-12)
    assert last["loss"] != first["loss"]


def test_sft_loss_is_the_cross_entropy_of_the_warm_start(model: Path, gang: Gang) -> None:
    rows = cases.units(5, seed=3, size=1)
    config = cases.make_config(model, "sft")
    share = minibatch(rows, ranks=1, max_tokens=96, packing=True)[0]
    backend = FSDP2Backend(config, gang)
    got = train_step([share], backend=backend, gang=gang, config=config.learner, step=1).metrics["loss"]
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    examples = [Example(u[0].tokens[: u[0].prompt_tokens], u[0].tokens[u[0].prompt_tokens :]) for u in rows]
    wanted = float(completion_loss(plain, collate(examples, pad_id=0)).detach())
    assert got == pytest.approx(wanted, rel=1e-5)


def test_the_reward_model_exports_a_classifier_that_gives_the_trained_scores(
    model: Path, gang: Gang, tmp_path: Path
) -> None:
    config = cases.make_config(model, "reward_model")
    backend = FSDP2Backend(config, gang)
    rows = cases.units(4, seed=1, size=2)
    share = minibatch(rows, ranks=1, max_tokens=96, packing=True)[0]
    train_step([share], backend=backend, gang=gang, config=config.learner, step=1)
    backend.export_hf(tmp_path)
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.architectures == ["Qwen3ForSequenceClassification"]
    every = [sample for unit in rows for sample in unit]
    alone = [float(loaded(torch.from_numpy(s.tokens.astype(np.int64))[None]).logits.squeeze().detach()) for s in every]
    scored = dict(zip([s.number for s in every], alone, strict=True))
    for piece in share.micro:
        scores = backend.forward_logprobs([piece])[0]
        ends = np.cumsum(np.bincount(piece.sequences, minlength=len(piece.samples))) - 1
        for number, score in zip(piece.samples.tolist(), scores[torch.from_numpy(ends)].tolist(), strict=True):
            assert score == pytest.approx(scored[number], abs=1e-5)


def test_the_reference_is_the_start_weights_also_after_a_restart(model: Path, gang: Gang, tmp_path: Path) -> None:
    config = cases.make_config(model, "dpo")
    share = minibatch(cases.units(3, seed=1, size=2), ranks=1, max_tokens=96, packing=True)[0]
    trained = FSDP2Backend(config, gang)
    before = trained.forward_logprobs(share.micro)
    train_step([share], backend=trained, gang=gang, config=config.learner, step=1)
    trained.save(tmp_path)
    again = FSDP2Backend(config, gang)
    again.load(tmp_path)
    for backend in (trained, again):
        for start, now, frozen in zip(
            before, backend.forward_logprobs(share.micro), backend.reference_logprobs(share.micro), strict=True
        ):
            assert torch.equal(frozen, start)
            assert not torch.equal(now, start)

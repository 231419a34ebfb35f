"""PPO with a critic on two ranks over Gloo against one rank, and against plain torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import critic_cases as cases
import msgspec
import numpy as np
import pytest
import torch
from ranks import HAS_MEGATRON, check_no_trace, parameters
from torch.distributed.tensor import DTensor

from asyncrl.errors import AsyncRLError, ConfigError
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch.micro_batches import decode_share
from learners.gang.gang import Gang
from learners.models.score_model import load_scorer
from learners.step import critic as critic_module
from learners.step.batch_passes import Prepared

pytestmark = pytest.mark.timeout(600)  # the first one waits for the launch of all case modules
TOLD = (
    "value_loss",
    "value_clip_share",
    "value_mean",
    "return_mean",
    "explained_variance",
    "critic_grad_norm",
    "critic_lr",
    "loss",
    "grad_norm",
    "entropy",
    "lr",
)


def compare(got: dict[str, Any], wanted: dict[str, Any], *, limit: float = 1e-5) -> None:
    for left, right in zip(got["steps"], wanted["steps"], strict=True):
        assert left["broken"] == right["broken"] == ""
        for name in TOLD:
            assert left["metrics"][name] == pytest.approx(right["metrics"][name], rel=1e-4, abs=limit), name
        same(left, right, limit)


def same(left: dict[str, Any], right: dict[str, Any], limit: float) -> None:
    for kind in ("policy", "critic"):
        assert left[kind].keys() == right[kind].keys()
        for name, values in left[kind].items():
            np.testing.assert_allclose(values, right[kind][name], atol=limit, rtol=0, err_msg=f"{kind} {name}")


@pytest.mark.parametrize("name", parameters(sorted(cases.CASES), cases.LONG))
def test_two_ranks_equal_one(two: Any, one: Any, name: str) -> None:
    compare(two[0][name], one[0][name])


@pytest.mark.skipif(not HAS_MEGATRON, reason="the extra megatron is not installed")
@pytest.mark.parametrize("name", cases.MEGATRON)
def test_megatron_equals_fsdp2_and_its_checkpoint_loads_there(
    two: Any, one: Any, gang: Gang, model: Path, name: str
) -> None:
    result = two[0][name]
    compare(result, one[0][cases.MEGATRON[name][0]])
    fresh = FSDP2Backend(cases.make_config(model), gang)
    fresh.load(Path(result["out"]))
    loaded = {"policy": cases.policy_weights(fresh), "critic": cases.critic_weights(fresh)}
    assert loaded == result["written"]
    exported = load_scorer(str(Path(result["out"]) / "export" / "critic"), seed=7, trust_remote_code=False)
    for own, parameter in exported.named_parameters():
        assert parameter.flatten().tolist() == result["written"]["critic"][f"model.{own}"], own


@pytest.mark.parametrize("name", parameters(cases.SAME, cases.LONG))
def test_rows_and_memory_settings_do_not_change_the_result(two: Any, name: str) -> None:
    compare(two[0][name], two[0]["plain"])


@pytest.mark.parametrize("name", ["minibatches", "sequence_mean", "bootstrap", "vtrace"])
def test_settings_that_should_change_the_critic_do(one: Any, name: str) -> None:
    assert one[0][name]["steps"][-1]["critic"] != one[0]["plain"]["steps"][-1]["critic"]


def test_a_narrow_clip_is_told(one: Any) -> None:
    """With several mini-batches the second one's values have moved away from those of the step's start."""
    assert one[0]["plain"]["steps"][0]["metrics"]["value_clip_share"] == 0
    assert one[0]["narrow_clip"]["steps"][-1]["metrics"]["value_clip_share"] > 0


def test_length_adaptive_lambdas_change_the_policy_and_leave_the_critics_targets(one: Any) -> None:
    vapo, plain = one[0]["vapo"]["steps"][0], one[0]["plain"]["steps"][0]
    assert vapo["policy"] != plain["policy"] and vapo["critic"] == plain["critic"]


def test_the_warm_up_trains_the_critic_alone(one: Any) -> None:
    start, steps = one[0]["warmup"]["start"], one[0]["warmup"]["steps"]
    assert steps[0]["policy"] == steps[1]["policy"] == start["policy"] != steps[2]["policy"]
    assert start["critic"] != steps[0]["critic"] != steps[1]["critic"]
    assert [step["metrics"]["lr"] for step in steps] == [0, 0, 1e-3]
    assert all(step["metrics"]["grad_norm"] > 0 for step in steps)
    # The policy does not touch the critic: two steps alone are those of a run that trains both.
    assert steps[0]["critic"] == one[0]["plain"]["steps"][0]["critic"]


def test_its_learning_rate_has_a_warm_up_of_its_own(one: Any) -> None:
    rates = [step["metrics"]["critic_lr"] for step in one[0]["plain"]["steps"]]
    assert rates == pytest.approx([1e-3, 2e-3, 2e-3])


def test_the_warm_up_ends_where_values_explain_enough(model: Path, gang: Gang) -> None:
    """For good: a later step may explain less. The steps before are those of a warm-up by number."""
    settings = "learner.critic.critic_warmup=60;learner.critic.max_grad_norm=1;learner.steps=60"
    until = "learner.critic.critic_warmup_until=0.3"
    backend = FSDP2Backend(cases.make_config(model, f"{settings};{until}"), gang)
    trial, batch = cases.make_trial(cases.make_config(model, f"{settings};{until}"), backend, gang, {}), None
    start, found, weights = cases.policy_weights(backend), [], []
    for step in range(1, 61):
        batch = msgspec.structs.replace(cases.make_batch(2 if found and trial.critic_warm else 1), step=step)
        found.append(cases.train(trial, gang, batch).metrics)
        weights.append(cases.policy_weights(backend))
        if not found[-1]["critic_alone"]:
            break
    explained = [metrics["explained_variance"] for metrics in found]
    assert max(explained[:-2]) < 0.3 <= explained[-2] and explained[-1] < 0.3
    assert 3 < len(found) < 60 and [metrics["critic_alone"] for metrics in found] == [1.0] * (len(found) - 1) + [0.0]
    assert weights[-2] == start != weights[-1]
    assert [metrics["lr"] for metrics in found] == [0.0] * (len(found) - 1) + [1e-3]


def test_the_bound_of_the_warm_up_holds(model: Path, gang: Gang) -> None:
    config = cases.make_config(model, "learner.critic.critic_warmup=2;learner.critic.critic_warmup_until=0.99")
    backend = FSDP2Backend(config, gang)
    trial = cases.make_trial(config, backend, gang, {})
    alone = [cases.train(trial, gang, cases.make_batch(step)).metrics["critic_alone"] for step in (1, 2, 3)]
    assert alone == [1, 1, 0] and not trial.critic_warm


@pytest.mark.parametrize("name", ["resume", "resume_warm"])
def test_a_checkpoint_continues_bitwise(two: Any, one: Any, name: str) -> None:
    for found in (two[0][name], one[0][name]):
        assert found["third"] == found["again"]
        for saved, loaded, after, again in (words.split() for words in found["digests"]):
            assert saved == loaded != after == again
    assert len(two[0]["resume"]["digests"]) == 2


def test_a_checkpoint_of_two_ranks_continues_on_one(model: Path, gang: Gang, two: Any) -> None:
    results, out = two
    config = cases.make_config(model)
    backend = FSDP2Backend(config, gang)
    backend.load(out / "checkpoint")
    metrics = cases.train(cases.make_trial(config, backend, gang, {}), gang, cases.make_batch(3)).metrics
    for name in TOLD:
        assert metrics[name] == pytest.approx(results["resume"]["third"][name], rel=1e-4, abs=1e-5), name
    wanted = results["plain"]["steps"][-1]  # the same three steps without a pause
    same({"policy": cases.policy_weights(backend), "critic": cases.critic_weights(backend)}, wanted, 1e-5)


def test_a_checkpoint_without_a_critic_is_refused(model: Path, gang: Gang, tmp_path: Path) -> None:
    plain = FSDP2Backend(cases.make_config(model, "learner.algorithm.advantage=grpo"), gang)
    assert plain.critic is None
    plain.save(tmp_path)
    plain.load(tmp_path)
    with pytest.raises(AsyncRLError, match=r"critic/.* are not in"):
        FSDP2Backend(cases.make_config(model), gang).load(tmp_path)


# ---------------------------------------------------------------- against plain torch


def share_of(model: Path, gang: Gang, extra: str = "") -> tuple[Any, FSDP2Backend, Any, Any]:
    config = cases.make_config(model, extra)
    backend = FSDP2Backend(config, gang)
    trial = cases.make_trial(config, backend, gang, {})
    batch = cases.make_batch(1)
    return config, backend, decode_share(trial.cut(batch)[1][0]), batch


def test_values_stand_before_their_tokens(model: Path, gang: Gang) -> None:
    """Each sample alone, through transformers' own body: the value of a token does not know the token."""
    config, backend, (part,), batch = share_of(model, gang)
    assert backend.critic is not None
    scorer = load_scorer(str(model), seed=config.run.seed, dtype=torch.float32, trust_remote_code=False)
    rows = [(group.prompt_ids, sample.response) for group in batch.groups for sample in group.samples]
    seen = 0
    for micro, found in zip(part.micro, backend.critic.values(part.micro), strict=True):
        counts = np.bincount(micro.sequences, minlength=micro.samples.size)
        for number, values, after in zip(micro.samples, found.tokens.split(counts.tolist()), found.after, strict=True):
            prompt, response = rows[number]
            ids = torch.tensor(np.concatenate((prompt, response)), dtype=torch.long)[None]
            with torch.no_grad():
                wanted = scorer.score(scorer.base_model(input_ids=ids).last_hidden_state)[0, prompt.size - 1 :, 0]
            torch.testing.assert_close(values, wanted[:-1], atol=1e-5, rtol=0)
            torch.testing.assert_close(after, wanted[-1], atol=1e-5, rtol=0)
            seen += 1
    assert seen == len(rows)


def test_one_step_equals_plain_torch(model: Path, gang: Gang, one: Any) -> None:
    """Monte-Carlo returns (gamma = lam = 1) are the reward at every token; loss, clipping, AdamW from torch."""
    config = cases.make_config(model)
    scorer = load_scorer(str(model), seed=config.run.seed, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-3, weight_decay=0.0)
    total, tokens, errors, returns = torch.zeros(()), 0, [], []
    for group in cases.make_batch(1).groups:
        for sample in group.samples:
            ids = torch.tensor(np.concatenate((group.prompt_ids, sample.response)), dtype=torch.long)[None]
            values = scorer.score(scorer.base_model(input_ids=ids).last_hidden_state)[0, group.prompt_ids.size - 1 :, 0]
            mask = torch.tensor(sample.mask).bool()
            error = values[:-1][mask] - sample.reward
            total = total + error.square().sum() / 2
            tokens += int(mask.sum())
            errors += error.tolist()
            returns += [sample.reward] * int(mask.sum())
    (total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(scorer.parameters(), 0.05)
    optimizer.step()
    metrics = one[0]["plain"]["steps"][0]["metrics"]
    assert metrics["value_loss"] == pytest.approx(float(total.detach()) / tokens, abs=1e-6)
    assert metrics["critic_grad_norm"] == pytest.approx(float(norm), rel=1e-4) and float(norm) > 0.05
    assert metrics["return_mean"] == pytest.approx(np.mean(returns), abs=1e-6)
    assert metrics["explained_variance"] == pytest.approx(1 - np.var(errors) / np.var(returns), abs=1e-5)
    for name, values in one[0]["plain"]["steps"][0]["critic"].items():
        wanted = scorer.get_parameter(name.removeprefix("model.")).detach().flatten()
        np.testing.assert_allclose(values, wanted, atol=1e-5, rtol=0, err_msg=name)


def test_a_critic_learns_what_returns_are_made_of(model: Path, gang: Gang) -> None:
    """The same batch again and again: the values come to explain its rewards."""
    config = cases.make_config(model, "learner.critic.critic_warmup=60;learner.critic.max_grad_norm=1;learner.steps=60")
    backend = FSDP2Backend(config, gang)
    trial, batch = cases.make_trial(config, backend, gang, {}), cases.make_batch(1)
    found = [cases.train(trial, gang, msgspec.structs.replace(batch, step=step)).metrics for step in range(1, 41)]
    assert found[0]["explained_variance"] < 0.1 and found[-1]["explained_variance"] > 0.5
    assert found[-1]["value_loss"] < found[0]["value_loss"] / 2


# ---------------------------------------------------------------- both or neither


@pytest.mark.parametrize("who", ["policy", "critic"])
@pytest.mark.parametrize("how", ["raises", "nan", "gradient"])
def test_what_breaks_in_one_changes_neither(model: Path, gang: Gang, who: str, how: str) -> None:
    companion = (critic_module, "value_loss") if who == "critic" else None
    says = "critic: loss" if who == "critic" else "loss"
    check_no_trace(cases, cases.make_config(model), gang, companion=companion, how=how, says=says)


# ---------------------------------------------------------------- start weights


def test_it_starts_from_a_reward_model(model: Path, gang: Gang, tmp_path: Path) -> None:
    scorer = load_scorer(str(model), seed=1, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        scorer.score.weight.fill_(0.25)
    scorer.save_pretrained(tmp_path)
    backend = FSDP2Backend(cases.make_config(model, f"learner.critic.model={tmp_path}"), gang)
    assert set(cases.critic_weights(backend)["model.score.weight"]) == {0.25}


def test_a_folder_that_is_no_model_is_named(model: Path, gang: Gang, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        FSDP2Backend(cases.make_config(model, f"learner.critic.model={tmp_path}"), gang)


def test_half_precision_has_wide_masters_and_wide_values(model: Path, gang: Gang) -> None:
    _, backend, (part,), _ = share_of(model, gang, "model.dtype=bfloat16")
    backend.self_check()
    assert backend.critic is not None
    assert {parameter.dtype for parameter in backend.critic._model.parameters()} == {torch.float32}
    assert all(found.tokens.dtype == torch.float32 for found in backend.critic.values(part.micro))


def test_it_shares_no_tensor_with_the_policy_and_is_not_exported(model: Path, gang: Gang) -> None:
    backend = FSDP2Backend(cases.make_config(model), gang)

    def places(module: Any) -> set[int]:
        return {p.to_local().data_ptr() if isinstance(p, DTensor) else p.data_ptr() for p in module.parameters()}

    assert backend.critic is not None and not places(backend._policy) & places(backend.critic._model)
    assert not any("score" in spec.name for spec in backend.weight_specs())


def test_its_export_loads_back_to_equal_values(model: Path, gang: Gang, two: Any) -> None:
    """Written by two ranks: body and head as transformers has them, and as the start of another critic."""
    results, out = two
    folder = out / "checkpoint" / "export" / "critic"
    wanted = results["resume"]["critic"]
    loaded = load_scorer(str(folder), seed=5, dtype=torch.float32, trust_remote_code=False)
    found = {f"model.{name}": value.detach().flatten().tolist() for name, value in loaded.named_parameters()}
    assert found == wanted and "model.score.weight" in found
    assert (folder / "tokenizer.json").exists()
    again = FSDP2Backend(cases.make_config(model, f"learner.critic.model={folder}"), gang)
    assert cases.critic_weights(again) == wanted
    assert not list(folder.parent.glob("process_reward"))


def test_an_estimator_without_returns_is_refused(model: Path, gang: Gang) -> None:
    config, backend, share, _ = share_of(model, gang)
    ready = Prepared(values=[[torch.zeros(1)]])
    with pytest.raises(ConfigError, match=r"Estimate\.returns"):
        critic_module.critic_step(ready, backend=backend, gang=gang, config=config.learner, lr=0.1, step=1)
    assert share


def test_a_missing_shard_of_the_critic_is_refused(model: Path, gang: Gang, two: Any, tmp_path: Path) -> None:
    shutil.copy(two[1] / "checkpoint" / "shard_00001.safetensors", tmp_path)
    with pytest.raises(AsyncRLError, match="are not in"):
        FSDP2Backend(cases.make_config(model), gang).load(tmp_path)

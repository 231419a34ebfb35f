"""PRIME with its process reward model on two ranks over Gloo against one rank, and against plain torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import critic_cases as common
import msgspec
import numpy as np
import process_cases as cases
import pytest
import torch
import warm
from ranks import PYTHON_PATH, check_no_trace, parameters
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.errors import AsyncRLError
from learners.algorithms.prime import ce_loss, prime, token_scores
from learners.algorithms.tensors import place_outcomes
from learners.algorithms.types import Rollouts
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.step import process_reward as step_module
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TOLD = (
    "process_loss",
    "process_accuracy",
    "process_reward_mean",
    "process_grad_norm",
    "process_lr",
    "loss",
    "grad_norm",
    "entropy",
    "lr",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(folder)
    save_model(folder, make_tiny_qwen3(len(tokenizer), hidden_size=32, layers=2, head_dim=8, mlp_size=48))
    return folder


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        made = Gang.join(cases.make_config(Path("m")))
        yield made
        made.leave()
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Results of two ranks, all cases in one launch."""
    out = tmp_path_factory.mktemp("two")
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment |= {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    done = warm.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            "2",
            cases.__file__,
            str(model),
            str(out),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    results = out / "results.json"  # not the exit code: Gloo has been seen to abort after the last line
    assert results.exists(), done.stdout + done.stderr
    return msgspec.json.decode(results.read_bytes()), out


@pytest.fixture(scope="module")
def one(model: Path, gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cases.run_all(model, gang, tmp_path_factory.mktemp("one"))


def compare(got: dict[str, Any], wanted: dict[str, Any], *, limit: float = 1e-5) -> None:
    for left, right in zip(got["steps"], wanted["steps"], strict=True):
        assert left["broken"] == right["broken"] == ""
        for name in TOLD:
            assert left["metrics"][name] == pytest.approx(right["metrics"][name], rel=1e-3, abs=limit), name
        assert left["advantages"] == pytest.approx(right["advantages"], abs=1e-3)
        same(left, right, limit)


def same(left: dict[str, Any], right: dict[str, Any], limit: float) -> None:
    for kind in ("policy", "process"):
        assert left[kind].keys() == right[kind].keys()
        for name, values in left[kind].items():
            # AdamW divides by the size of the gradient: where that is nearly 0, rounding decides on up to a whole step.
            apart = np.abs(np.array(values) - np.array(right[kind][name]))
            assert np.quantile(apart, 0.99) <= limit and apart.max() < 2e-3, (kind, name, apart.max())


@pytest.mark.parametrize("name", parameters(sorted(cases.CASES), cases.LONG))
def test_two_ranks_equal_one(two: Any, one: Any, name: str) -> None:
    compare(two[0][name], one[name])


@pytest.mark.parametrize("name", parameters(cases.SAME, cases.LONG))
def test_rows_and_memory_settings_do_not_change_the_result(two: Any, name: str) -> None:
    compare(two[0][name], two[0]["plain"])


@pytest.mark.parametrize("name", ["minibatches", "before", "not_normed", "penalty"])
def test_settings_that_should_change_the_policy_do(one: Any, name: str) -> None:
    assert one[name]["steps"][-1]["policy"] != one["plain"]["steps"][-1]["policy"]


def test_the_order_changes_what_is_scored_and_not_what_is_learned(one: Any) -> None:
    """The update knows the outcomes alone: the process reward model is the same in both orders, the policy is not."""
    after, before = one["plain"]["steps"], one["before"]["steps"]
    assert [step["process"] for step in after] == [step["process"] for step in before]
    assert after[0]["policy"] != before[0]["policy"] and after[0]["advantages"] != before[0]["advantages"]


def test_it_begins_as_its_reference_and_learns_by_itself(one: Any) -> None:
    plain = one["plain"]
    first = plain["steps"][0]["metrics"]
    assert first["process_reward_mean"] == 0 and first["process_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert plain["steps"][1]["metrics"]["process_reward_mean"] != 0
    assert plain["start"]["process"] != plain["steps"][0]["process"] != plain["steps"][1]["process"]
    assert [step["metrics"]["process_lr"] for step in plain["steps"]] == pytest.approx([1e-3, 2e-3, 2e-3])


# ---------------------------------------------------------------- against plain torch


def logprobs_of(model: Any, group: Any, sample: Any) -> torch.Tensor:
    ids = torch.tensor(np.concatenate((group.prompt_ids, sample.response)), dtype=torch.long)
    logs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    start = group.prompt_ids.size
    return logs[start - 1 : -1].gather(-1, ids[start:, None])[:, 0]


class Plain:
    """The process reward model of `plain` and `before` in torch and transformers alone."""

    def __init__(self, model: Path) -> None:
        options: Any = {"dtype": torch.float32}
        self.model = AutoModelForCausalLM.from_pretrained(model, **options)
        self.reference = AutoModelForCausalLM.from_pretrained(model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)

    def rows(self, batch: Any) -> tuple[torch.Tensor, ...]:
        """Both log-probs, mask, outcomes, groups; padded `[S, T]` or `[S]`."""
        pairs = [(group, sample) for group in batch.groups for sample in group.samples]
        mine = [logprobs_of(self.model, *pair) for pair in pairs]
        with torch.no_grad():
            theirs = [logprobs_of(self.reference, *pair) for pair in pairs]
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.tensor(sample.mask).bool() for _, sample in pairs], batch_first=True)
        outcomes = torch.tensor([sample.reward for _, sample in pairs])
        groups = torch.tensor([group.group for group, _ in pairs])
        return pad(mine, batch_first=True), pad(theirs, batch_first=True), mask, outcomes, groups

    def update(self, batch: Any, lr: float) -> tuple[float, float]:
        mine, theirs, mask, outcomes, _ = self.rows(batch)
        loss = ce_loss(token_scores(mine, theirs, mask, beta=0.5).q, outcomes, mask, beta=0.5)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for found in self.optimizer.param_groups:
            found["lr"] = lr
        self.optimizer.step()
        return float(loss.detach()), float(norm)

    @torch.no_grad()
    def advantages(self, batch: Any) -> list[float]:
        """Of the first trained token of each sample."""
        mine, theirs, mask, outcomes, groups = self.rows(batch)
        scores = token_scores(mine.double(), theirs.double(), mask, beta=0.5).scores
        found = prime(Rollouts(place_outcomes(outcomes.double(), mask), mask, groups, process=scores)).advantages
        return found.gather(-1, mask.long().argmax(-1, keepdim=True))[:, 0].tolist()


def test_steps_equal_plain_torch(model: Path, one: Any) -> None:
    torch_model, lrs = Plain(model), (1e-3, 2e-3, 2e-3)
    for number, lr in enumerate(lrs):
        batch, told = common.make_batch(number + 1), one["plain"]["steps"][number]
        assert told["advantages"] == pytest.approx(torch_model.advantages(batch), abs=2e-3)
        loss, norm = torch_model.update(batch, lr)
        assert told["metrics"]["process_loss"] == pytest.approx(loss, rel=1e-4)
        assert told["metrics"]["process_grad_norm"] == pytest.approx(norm, rel=1e-3)
        before = one["before"]["steps"][number]
        assert before["advantages"] == pytest.approx(torch_model.advantages(batch), abs=2e-3)
        for name, values in told["process"].items():
            apart = np.abs(np.array(values) - torch_model.model.get_parameter(name).detach().flatten().numpy())
            assert np.quantile(apart, 0.99) < 1e-5 and apart.max() < 2e-3, name


def test_it_learns_who_was_right(model: Path, gang: Gang) -> None:
    """The same batch again and again."""
    config = cases.make_config(model, "learner.steps=40;learner.optim.lr=0;learner.process_reward.max_grad_norm=10")
    backend = FSDP2Backend(config, gang)
    trial, batch = common.make_trial(config, backend, gang, {}), common.make_batch(1)
    found = [common.train(trial, gang, msgspec.structs.replace(batch, step=step)).metrics for step in range(1, 31)]
    assert found[0]["process_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert found[-1]["process_loss"] < 0.2 and found[-1]["process_accuracy"] == 1


# ---------------------------------------------------------------- checkpoints and export


@pytest.mark.parametrize("name", ["resume", "resume_before"])
def test_a_checkpoint_continues_bitwise(two: Any, one: Any, name: str) -> None:
    for found in (two[0][name], one[name]):
        assert found["third"] == found["again"]
        for saved, loaded, after, again in (words.split() for words in found["digests"]):
            assert saved == loaded != after == again
    assert len(two[0][name]["digests"]) == 2


def test_a_checkpoint_of_two_ranks_continues_on_one(model: Path, gang: Gang, two: Any) -> None:
    results, out = two
    backend = FSDP2Backend(cases.make_config(model), gang)
    backend.load(out / "checkpoint")
    common.train(common.make_trial(cases.make_config(model), backend, gang, {}), gang, common.make_batch(3))
    same(cases.weights(backend), results["plain"]["steps"][-1], 1e-5)


def test_a_checkpoint_without_it_is_refused(model: Path, gang: Gang, tmp_path: Path) -> None:
    plain = FSDP2Backend(cases.make_config(model, "learner.algorithm.advantage=grpo"), gang)
    assert plain.process_reward is None
    plain.save(tmp_path)
    with pytest.raises(AsyncRLError, match=r"process_reward/.* are not in"):
        FSDP2Backend(cases.make_config(model), gang).load(tmp_path)


def test_the_export_of_two_ranks_loads_back_to_equal_values(model: Path, gang: Gang, two: Any) -> None:
    results, out = two
    folder = out / "checkpoint" / "export" / "process_reward"
    wanted = results["resume"]["process"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert cases.whole(torch.nn.ModuleDict({"model": loaded})) == wanted
    assert (folder / "tokenizer.json").exists() and (folder / "config.json").exists()
    again = FSDP2Backend(cases.make_config(model, f"learner.process_reward.model={folder}"), gang)
    assert cases.process_weights(again) == wanted
    assert cases.common.policy_weights(again) == results["plain"]["start"]["policy"]


def test_it_starts_from_a_folder_and_compares_with_another(model: Path, gang: Gang, two: Any) -> None:
    """Not at its reference: process rewards from the first step on."""
    folder = two[1] / "checkpoint" / "export" / "process_reward"
    for extra, at_start in (
        (f"learner.process_reward.model={folder}", True),
        (f"learner.process_reward.model={folder};learner.process_reward.reference={model}", False),
        (f"learner.process_reward.reference={folder}", False),
    ):
        config = cases.make_config(model, extra)
        backend = FSDP2Backend(config, gang)
        metrics = common.train(common.make_trial(config, backend, gang, {}), gang, common.make_batch(1)).metrics
        assert (metrics["process_reward_mean"] == 0) is at_start


def test_half_precision_is_exported_as_it_computes(model: Path, gang: Gang, tmp_path: Path) -> None:
    config = cases.make_config(model, "model.dtype=bfloat16")
    backend = FSDP2Backend(config, gang)
    backend.self_check()
    common.train(common.make_trial(config, backend, gang, {}), gang, common.make_batch(1))
    backend.export_hf(tmp_path)
    masters = cases.process_weights(backend)
    found = load_file(tmp_path / "process_reward" / "model.safetensors")
    assert found.keys() == masters.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.flatten().tolist() == torch.tensor(masters[name]).bfloat16().tolist()


def test_the_export_can_be_left_out(model: Path, gang: Gang, tmp_path: Path) -> None:
    FSDP2Backend(cases.make_config(model, "learner.process_reward.export=false"), gang).export_hf(tmp_path)
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "process_reward").exists()


# ---------------------------------------------------------------- both or neither


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("case", ["policy raises", "policy gradient", "process raises", "process nan"])
def test_what_breaks_in_one_changes_neither(model: Path, gang: Gang, case: str, order: str) -> None:
    who, how = case.split()
    config = cases.make_config(model, f"learner.process_reward.update={order}")
    companion = (step_module, "outcome_losses") if who == "process" else None
    says = "process reward: loss" if who == "process" else "loss"
    check_no_trace(common, config, gang, companion=companion, how=how, says=says)


@pytest.mark.parametrize("order", ["after", "before"])
def test_a_group_that_breaks_leaves_no_trace_in_either(
    model: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Found by probes and buried; the rest is trained to the bits of a batch that never had it."""
    from learners.step import update

    inner, config = update.loss_for, cases.make_config(model, f"learner.process_reward.update={order}")

    def loss_of(algorithm: Any) -> Any:
        token_loss = inner(algorithm)

        def loss(inputs: Any) -> Any:
            if bool((inputs.behaviour == -77).any()):
                raise ValueError("poison")
            return token_loss(inputs)

        return loss

    monkeypatch.setattr(update, "loss_for", loss_of)
    batch = common.make_batch(1)
    bad = batch.groups[2]
    poisoned = tuple(msgspec.structs.replace(s, logprobs=np.full_like(s.logprobs, -77)) for s in bad.samples)
    groups = tuple(msgspec.structs.replace(g, samples=poisoned) if g is bad else g for g in batch.groups)
    digests = []
    for given in (groups, tuple(group for group in batch.groups if group is not bad)):
        backend, buried = FSDP2Backend(config, gang), dict[int, str]()
        trial = common.make_trial(config, backend, gang, buried)
        assert not common.train(trial, gang, msgspec.structs.replace(batch, groups=given)).broken
        assert list(buried) == ([bad.group] if given is groups else [])
        digests.append(common.digest(backend))
    assert digests[0] == digests[1]

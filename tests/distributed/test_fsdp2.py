"""FSDP2 on two ranks over Gloo against the same cases on one rank, and against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp2_cases as cases
import msgspec
import numpy as np
import pytest
import torch

from learners.backends.fsdp2 import FSDP2Backend
from learners.gang import Gang
from learners.update import train_step

pytestmark = pytest.mark.timeout(600)  # the first one waits for the launch of all case modules


def compare(got: dict[str, Any], wanted: dict[str, Any], *, limit: float = 1e-5) -> None:
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "ess", "ratio_max", "clip_share"):
            assert left[name] == pytest.approx(right[name], rel=limit, abs=limit), name
    for left, right in zip(got.get("by_sample", ()), wanted.get("by_sample", ()), strict=True):
        assert len(left) == len(right) and left, "a mean importance weight of every sample, on whatever rank it was"
        for (number, weight), (other, expected) in zip(left, right, strict=True):
            assert number == other and weight == pytest.approx(expected, rel=limit, abs=limit)
    assert got["names"] == wanted["names"]
    for name, values in got["weights"].items():
        np.testing.assert_allclose(values, wanted["weights"][name], atol=limit, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_two_ranks_equal_one(two: Any, one: Any, name: str) -> None:
    compare(two[0][name], one[0][name])


@pytest.mark.parametrize("name", sorted(cases.WHOLE))
def test_two_ranks_equal_one_where_the_whole_batch_is_looked_at(two: Any, one: Any, name: str) -> None:
    compare(two[0][name], one[0][name])
    assert two[0][name]["coefficients"] == pytest.approx(msgspec.to_builtins(one[0][name]["coefficients"]), rel=1e-6)
    assert (one[0][name]["kl_coeff"] not in (0.001, 0.1)) is (name == "kl_reward")


@pytest.mark.parametrize("name", ["small_rows", "padded", "checkpointing", "offload"])
def test_rows_and_memory_settings_do_not_change_the_result(two: Any, name: str) -> None:
    compare(two[0][name], two[0]["plain"])


@pytest.mark.parametrize("name", ["sequence_mean", "bypass", "minibatches"])
def test_settings_that_should_change_the_result_do(one: Any, name: str) -> None:
    assert one[0][name]["digest"] != one[0]["plain"]["digest"]


def test_one_rank_equals_plain_torch(model: Path, gang: Gang, one: Any) -> None:
    """Loss, gradient norm and weights of the first step, from full logits of single sequences and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    config = cases.make_config(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    every = cases.samples(14, 1)
    tokens = sum(int(sample.mask.sum()) for sample in every)
    loss = torch.zeros(())
    for sample in every:
        ids = torch.tensor(sample.tokens, dtype=torch.long)
        logs = policy(input_ids=ids[None]).logits[0, sample.prompt_tokens - 1 : -1].log_softmax(-1)
        current = logs.gather(-1, ids[sample.prompt_tokens :, None]).squeeze(-1)
        mask = torch.tensor(sample.mask).bool()
        weight = (current.detach() - torch.tensor(sample.behaviour)).exp().clamp(max=2.0)
        entropy = -(logs.exp() * logs).sum(-1)
        ratio = (current - current.detach()).exp()
        loss = loss + ((-sample.advantage * ratio * weight - 0.01 * entropy) * mask).sum() / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.05)
    optimizer.step()
    backend = FSDP2Backend(config, gang)
    share = cases.cut(14, 1, config, gang)
    metrics = train_step(share, backend=backend, gang=gang, config=config.learner, step=1).metrics
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert float(norm) > 0.05  # clipping was at work
    wanted = dict(policy.named_parameters())
    exported = dict(backend.iter_hf_weights())
    assert exported.keys() == wanted.keys()  # Hugging Face names, the tied head once
    for name, data in exported.items():
        got = torch.from_numpy(data.view(np.float32)).view(wanted[name].shape)
        torch.testing.assert_close(got, wanted[name].detach(), atol=1e-5, rtol=0)


def test_exported_names_dtypes_and_shapes_follow_the_plan(two: Any) -> None:
    result = two[0]["plain"]
    assert [name for name, _, _ in result["specs"]] == result["names"]
    for name, dtype, shape in result["specs"]:
        assert dtype == "F32" and len(result["weights"][name]) == int(np.prod(shape)), name
    assert "lm_head.weight" not in result["names"] and "model.embed_tokens.weight" in result["names"]


def test_half_precision_has_wide_masters_and_narrow_exports(two: Any, one: Any) -> None:
    half, plain = two[0]["half"], one[0]["plain"]
    assert half["masters"] == ["torch.float32"]
    for name, dtype, shape in half["specs"]:
        assert dtype == "BF16" and half["bytes"][name] == 2 * int(np.prod(shape)), name
    assert half["metrics"]["loss"] == pytest.approx(plain["metrics"][0]["loss"], abs=0.02)
    assert half["metrics"]["loss"] != plain["metrics"][0]["loss"]


def test_a_checkpoint_of_two_ranks_continues_bitwise_on_two(two: Any) -> None:
    resume = two[0]["resume"]
    assert resume["saved"] == resume["loaded"]
    assert resume["digest"] == resume["digest_again"] != resume["saved"]
    assert resume["third"] == resume["again"]
    assert resume["layers"] == 2


def test_a_checkpoint_of_two_ranks_continues_on_one(model: Path, gang: Gang, two: Any) -> None:
    results, out = two
    config = cases.make_config(model)
    backend = FSDP2Backend(config, gang)
    backend.load(out / "checkpoint")
    share = cases.cut(14, 3, config, gang)
    metrics = train_step(share, backend=backend, gang=gang, config=config.learner, step=3).metrics
    for name in ("loss", "grad_norm", "entropy"):
        assert metrics[name] == pytest.approx(results["resume"]["third"][name], abs=1e-5)
    values, _, _ = cases.digest(backend)
    for name, wanted in results["plain"]["weights"].items():  # the same three steps without a pause
        np.testing.assert_allclose(values[name], wanted, atol=1e-5, rtol=0, err_msg=name)


def test_a_missing_shard_is_refused(model: Path, gang: Gang, two: Any, tmp_path: Path) -> None:
    import shutil

    from asyncrl.errors import AsyncRLError

    shutil.copy(two[1] / "checkpoint" / "shard_00000.safetensors", tmp_path)
    with pytest.raises(AsyncRLError, match="are not in"):
        FSDP2Backend(cases.make_config(model), gang).load(tmp_path)


def test_the_export_is_a_hugging_face_folder(two: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = two[1] / "export"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).encode("12")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_id == 2
    wanted = two[0]["plain"]["weights"]
    for name, parameter in loaded.named_parameters():
        np.testing.assert_allclose(parameter.detach().flatten().numpy(), wanted[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_poison_on_one_rank_is_found_by_all(two: Any, one: Any, how: str) -> None:
    for results in (two[0], one[0]):
        found = results["poison"][how]
        assert sorted(map(int, found["found"])) == [1, 4] and found["left"] == [0, 2, 3, 5] and not found["broken"]
        if how == "raises":
            assert all("loss: ValueError: seen on rank" in why for why in found["found"].values())
    compare(two[0]["poison"][how], one[0]["poison"][how])


def test_orders_and_sums_reach_every_rank(two: Any) -> None:
    results = two[0]
    assert results["gather"] == ["rank 0", "rank 1rank 1"]
    assert results["share"] == "order" and results["scatter"] == ["part 0", "part 1part 1"]
    assert results["total"] == {"x": 3.0, "y_max": 1.0}


def test_a_separate_forward_gives_the_proximal_log_probs_of_the_training_forward(model: Path, gang: Gang) -> None:
    """With one mini-batch no forward is spent on proximal log-probs: they equal the current ones, detached."""
    config = cases.make_config(model)
    backend = FSDP2Backend(config, gang)
    (part,) = cases.cut(14, 1, config, gang)
    before = backend.forward_logprobs(part.micro)
    seen = []

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Any, number: int) -> Any:
        seen.append(logprobs.detach())
        return logprobs.sum() * 0, {}

    backend.train(part.micro, loss)
    assert len(before) == len(seen) == len(part.micro)
    for left, right in zip(before, seen, strict=True):
        assert torch.equal(left, right)


def test_wrong_packing_is_refused_at_the_start(model: Path, gang: Gang) -> None:
    from asyncrl.errors import AsyncRLError

    backend = FSDP2Backend(cases.make_config(model), gang)
    inner = backend._policy.model.base_model
    forward = inner.forward
    inner.forward = lambda **given: forward(**{**given, "position_ids": None})  # sequences see each other
    with pytest.raises(AsyncRLError) as caught:
        backend.self_check()
    assert caught.value.code == "learner.packing"

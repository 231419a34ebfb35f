"""Adapters: two ranks and four give the result of one, one that of a plain loop with peft; exports load elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import backend_contract as contract
import lora_cases as cases
import numpy as np
import pytest
import ranks
import supervised_cases
import torch
from padded_rows import collate
from test_backend_contract import compare

from asyncrl.errors import AsyncRLError, ConfigError
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.step.supervised import minibatch
from learners.step.supervised import train_step as supervised_step
from learners.step.update import train_step
from learners.warm_start.sft import Example, completion_loss

peft = pytest.importorskip("peft", exc_type=ImportError)
pytestmark = pytest.mark.timeout(1200)  # the first one waits for the launch of all case modules
JOBS = [(2, "lora_cases"), (4, "lora_hsdp")]
every_launch = pytest.mark.parametrize("job", JOBS, ids=["two", "hsdp"])


@pytest.mark.parametrize("name", ranks.parameters([*cases.CASES, "kl"], cases.LONG))
def test_two_ranks_equal_one(results_of: Any, one: Any, name: str) -> None:
    compare(results_of(*JOBS[0])[0][name], one[0][name], limit=2e-5)


@pytest.mark.chaos
def test_four_ranks_that_hold_the_weights_twice_equal_one(results_of: Any, one: Any) -> None:
    compare(results_of(*JOBS[1])[0]["plain"], one[0]["plain"], limit=2e-5)


@pytest.mark.parametrize("name", ranks.parameters(("small_rows", "checkpointing", "offload", "sequence"), cases.LONG))
def test_rows_and_memory_settings_do_not_change_the_result(one: Any, name: str) -> None:
    compare(one[0][name], one[0]["plain"], limit=2e-5)


def test_scale_and_targets_change_the_result(one: Any) -> None:
    assert one[0]["rslora"]["digest"] != one[0]["plain"]["digest"]


@every_launch
def test_a_checkpoint_continues_bitwise(results_of: Any, job: tuple[int, str]) -> None:
    resume = results_of(*job)[0]["resume"]
    assert resume["saved"] == resume["loaded"]
    assert resume["digest"] == resume["digest_again"] != resume["saved"]
    assert resume["third"] == resume["again"]


@every_launch
def test_a_checkpoint_of_several_ranks_continues_on_one(
    model: Path, gang: Gang, results_of: Any, one: Any, job: tuple[int, str]
) -> None:
    got = contract.continued(model, gang, results_of(*job)[1] / "checkpoint", cases.extra())
    plain = one[0]["plain"]
    compare(got, {**got, "metrics": [plain["metrics"][2]], "weights": plain["weights"]}, limit=2e-5)


@every_launch
def test_what_is_published_is_the_same_on_several_ranks(results_of: Any, one: Any, job: tuple[int, str]) -> None:
    got, wanted = results_of(*job)[0]["published"], one[0]["published"]
    assert got["specs"] == wanted["specs"] and list(got["adapter"]) == [spec[0] for spec in got["specs"]]
    for what in ("adapter", "base", "merged"):
        assert list(got[what]) == list(wanted[what]), "in the same order"
        for name, values in wanted[what].items():
            np.testing.assert_allclose(got[what][name], values, atol=2e-5, rtol=0, err_msg=name)


def test_adapters_alone_change(model: Path, one: Any) -> None:
    """The base is what the folder holds, and merged weights are W0 + (alpha / rank) B A."""
    from transformers import AutoModelForCausalLM

    start = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    found = one[0]["published"]
    assert len(found["adapter"]) == 2 * 2 * 7 and not any("lora" in name for name in found["merged"])
    shapes = {name: shape for name, _, shape in found["specs"]}
    changed = 0
    for name, values in found["base"].items():
        assert values == start[name].flatten().tolist(), name
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in shapes:
            assert found["merged"][name] == values, name
            continue
        changed += 1
        a, b = (
            np.reshape(found["adapter"][key], shapes[key]) for key in (f"{stem}.lora_A.weight", f"{stem}.lora_B.weight")
        )
        wanted = start[name].detach().double().numpy() + 32 / 3 * b @ a
        np.testing.assert_allclose(found["merged"][name], wanted.flatten(), atol=1e-6, err_msg=name)
    assert changed == 14


def test_three_steps_equal_a_plain_loop_with_peft(model: Path, gang: Gang) -> None:
    """SFT on one rank against peft, torch.optim.AdamW and cross entropy on padded rows: losses, norms, adapters."""
    from transformers import AutoModelForCausalLM

    more = "learner.lora.rank=4;learner.lora.alpha=6;learner.optim.lr=1e-2;learner.optim.max_grad_norm=0.1"
    config = supervised_cases.make_config(model, "sft", more)
    backend = FSDP2Backend(config, gang)
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    plain = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets))
    made = peft.set_peft_model_state_dict(plain, tensors_of(backend))
    assert not made.unexpected_keys and not any("lora" in key for key in made.missing_keys)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    plain.config.use_cache = False
    for step in (1, 2, 3):
        rows = supervised_cases.units(5, seed=step, size=1)
        share = minibatch(rows, ranks=1, max_tokens=96, packing=True)[0]
        got = supervised_step([share], backend=backend, gang=gang, config=config.learner, step=step).metrics
        examples = [Example(u[0].tokens[: u[0].prompt_tokens], u[0].tokens[u[0].prompt_tokens :]) for u in rows]
        loss = completion_loss(plain, collate(examples, pad_id=0))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert got["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert got["grad_norm"] == pytest.approx(float(norm), rel=1e-4) and float(norm) > 0.1
    for name, tensor in peft.get_peft_model_state_dict(plain).items():
        np.testing.assert_allclose(tensors_of(backend)[name], tensor, atol=2e-5, err_msg=name)


def tensors_of(backend: FSDP2Backend) -> dict[str, torch.Tensor]:
    assert backend._adapters is not None
    return {name: tensor.clone() for name, tensor in backend._adapters.tensors()}


def test_the_reference_is_the_base_without_a_second_model(model: Path, gang: Gang, one: Any) -> None:
    found = one[0]["forward"]
    assert found["reference"] == found["logprobs"] != found["after"], "bit by bit, after a step"
    config = contract.make_config(model, extra=cases.extra())
    backend = FSDP2Backend(config, gang)
    share = contract.cut(14, 1, config, gang)
    train_step(share, backend=backend, gang=gang, config=config.learner, step=1)
    backend.reference_logprobs(share[0].micro)
    assert backend._reference is None
    info = train_step(contract.cut(14, 2, config, gang), backend=backend, gang=gang, config=config.learner, step=2)
    assert info.metrics["grad_norm"] > 0, "adapters train on after a pass without them"


def test_dpo_compares_with_the_base(model: Path, gang: Gang) -> None:
    config = supervised_cases.make_config(model, "dpo", "learner.lora.rank=4;learner.optim.lr=1e-2")
    backend = FSDP2Backend(config, gang)
    share = minibatch(supervised_cases.units(3, seed=1, size=2), ranks=1, max_tokens=96, packing=True)[0]
    first, second = (
        supervised_step([share], backend=backend, gang=gang, config=config.learner, step=step).metrics
        for step in (1, 2)
    )
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["chosen_score"] == 0.0
    assert second["loss"] < first["loss"] and backend._reference is None


def test_half_precision_keeps_adapters_whole(model: Path, gang: Gang, one: Any, tmp_path: Path) -> None:
    """The base is held in bf16, adapters in float32; what leaves is bf16."""
    config = contract.make_config(model, extra=cases.extra("model.dtype=bfloat16"))
    backend = FSDP2Backend(config, gang)
    for name, parameter in backend._policy.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
        assert parameter.requires_grad is (".lora_" in name)
    assert {spec.dtype for spec in backend.adapters.specs()} == {"BF16"}  # type: ignore[union-attr]
    whole = FSDP2Backend(contract.make_config(model, extra="model.dtype=bfloat16"), gang)
    assert backend.weight_specs() == whole.weight_specs(), "merged weights look like those of a run without adapters"
    assert {spec[1] for spec in one[0]["half"]["specs"]} == {"BF16"}
    assert one[0]["half"]["metrics"]["loss"] == pytest.approx(one[0]["plain"]["metrics"][0]["loss"], abs=0.02)


def test_a_checkpoint_holds_adapters_and_their_moments_alone(one: Any) -> None:
    from safetensors import safe_open

    with safe_open(one[1] / "checkpoint" / "shard_00000.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith("extra/")]  # noqa: SIM118 - no mapping
    assert len(names) == 28 * 4 and all(".lora_" in name for name in names)
    assert {name.partition("/")[0] for name in names} == {"model", "step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("learner.lora.rank=2", r'"r":3.* those of this run .*"r":2'),
        ("learner.lora.alpha=8", r'"lora_alpha":32.0.* those of this run .*"lora_alpha":8.0'),
        ('learner.lora.target_modules=["q_proj"]', "its adapters are"),
        ("learner.lora.rank=0", "the checkpoint is of adapters .*, this run is not"),
    ],
)
def test_other_adapters_are_refused(model: Path, gang: Gang, one: Any, settings: str, why: str) -> None:
    backend = FSDP2Backend(contract.make_config(model, extra=cases.extra(settings)), gang)
    with pytest.raises(AsyncRLError, match=why) as caught:
        backend.load(one[1] / "checkpoint")
    assert caught.value.code == "learner.checkpoint"


def test_another_base_is_refused_and_a_copy_of_it_is_not(model: Path, gang: Gang, one: Any, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    FSDP2Backend(contract.make_config(tmp_path / "copy", extra=cases.extra()), gang).load(one[1] / "checkpoint")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "copy" / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    other = FSDP2Backend(contract.make_config(tmp_path / "copy", extra=cases.extra()), gang)
    with pytest.raises(AsyncRLError, match=r"its adapters are for weights .*, those of model.path are"):
        other.load(one[1] / "checkpoint")


def test_weights_of_all_are_no_adapters(model: Path, gang: Gang, tmp_path: Path) -> None:
    FSDP2Backend(contract.make_config(model), gang).save(tmp_path)
    backend = FSDP2Backend(contract.make_config(model, extra=cases.extra()), gang)
    with pytest.raises(AsyncRLError, match="the checkpoint is of all weights, this run is not"):
        backend.load(tmp_path)


@every_launch
def test_both_exports_load_elsewhere(model: Path, results_of: Any, one: Any, job: tuple[int, str]) -> None:
    """The merged folder in transformers, the adapter below it over the start weights in peft: the same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = results_of(*job)[1] / "export"
    assert AutoTokenizer.from_pretrained(folder).encode("12")
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = one[0]["plain"]["weights"]
    for name, parameter in merged.named_parameters():
        np.testing.assert_allclose(parameter.detach().flatten().numpy(), wanted[name], atol=2e-5, err_msg=name)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        left, right = merged(ids).logits, adapted(ids).logits
        with adapted.disable_adapter():
            start = adapted(ids).logits
    torch.testing.assert_close(left, right, atol=2e-5, rtol=0)
    assert float((left - start).abs().max()) > 1e-3


def test_dropout_is_on_where_gradients_are_computed_and_nowhere_else(model: Path, gang: Gang) -> None:
    found = {}
    for dropout in (0.0, 0.5):
        config = contract.make_config(model, extra=cases.extra(f"learner.lora.dropout={dropout}"))
        backend = FSDP2Backend(config, gang)
        backend.self_check()
        metrics = [
            train_step(
                contract.cut(14, step, config, gang), backend=backend, gang=gang, config=config.learner, step=step
            ).metrics["grad_norm"]
            for step in (1, 2)
        ]
        found[dropout] = metrics
        micro = contract.cut(14, 3, config, gang)[0].micro
        for left, right in zip(backend.forward_logprobs(micro), backend.forward_logprobs(micro), strict=True):
            assert torch.equal(left, right)
    assert found[0.0] != found[0.5]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ('["q_proj", "wq"]', "no linear layer of its decoder layers is called 'wq': there are down_proj, "),
        ('["lm_head"]', "no linear layer of its decoder layers is called 'lm_head'"),
    ],
)
def test_modules_that_are_not_there_are_named(model: Path, gang: Gang, settings: str, why: str) -> None:
    config = contract.make_config(model, extra=cases.extra(f"learner.lora.target_modules={settings}"))
    with pytest.raises(ConfigError, match=why):
        FSDP2Backend(config, gang)


def test_a_mixture_of_experts_gets_adapters_where_it_has_linear_layers(model: Path, gang: Gang) -> None:
    config = contract.make_config(model / ranks.MOE, extra=cases.extra())
    backend = FSDP2Backend(config, gang)
    result = train_step(contract.cut(14, 1, config, gang), backend=backend, gang=gang, config=config.learner, step=1)
    assert result.metrics["grad_norm"] > 0
    assert backend.adapters.settings.target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")  # type: ignore[union-attr]

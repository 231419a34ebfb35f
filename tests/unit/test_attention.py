"""Attention by sequence: the same as alone in a row and as the dense mask, and a loud no where it could be wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from asyncrl.config import parse
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.device import Device
from learners.backends.base import to_device
from learners.backends.fsdp2.loading import load_model
from learners.batch.micro_batches import Sample, packed_row, padded_rows
from learners.models import attention, segments
from learners.models.policy_model import PolicyModel
from learners.warm_start.tiny_model import make_tiny_qwen3, save_model

LENGTHS = (9, 1, 14, 2, 30)


def samples() -> list[Sample]:
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = np.random.default_rng(number).integers(3, 20, length + 1).astype(np.int32)
        made.append(Sample(tokens, 1, np.zeros(length, np.float32), np.ones(length, np.uint8), 0.0, number))
    return made


def qwen() -> torch.nn.Module:
    return make_tiny_qwen3(21, hidden_size=32, layers=2, head_dim=8, mlp_size=48).double()


def mistral(window: int) -> torch.nn.Module:
    shape = MistralConfig(
        vocab_size=21,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=window,
        use_cache=False,
    )
    torch.manual_seed(0)
    return MistralForCausalLM._from_config(shape, attn_implementation="sdpa").double().train()


def outcome(model: torch.nn.Module, rows: list) -> dict[str, torch.Tensor]:  # type: ignore[type-arg]
    """Log-probs, entropies and every gradient, from one or several rows of the same sequences."""
    policy = PolicyModel(model, chunk_tokens=16)
    policy.zero_grad()
    found = [
        policy(t.input_ids, t.position_ids, t.positions, t.targets)
        for t in (to_device(row, torch.device("cpu")) for row in rows)
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
    ((logprobs * torch.linspace(-1, 1, logprobs.numel())).sum() + entropy.sum()).backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **grads}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=1e-10, rtol=1e-10, msg=name)


def test_a_packed_row_equals_its_sequences_alone_and_the_dense_mask() -> None:
    model, made = qwen(), samples()
    dense = outcome(model, [packed_row(made)])
    assert attention.install(model) and model.config._attn_implementation == attention.BY_SEQUENCE
    packed = outcome(model, [packed_row(made)])
    same(packed, dense)
    same(packed, outcome(model, [packed_row([one]) for one in made]))
    same(packed, outcome(model, [padded_rows(made)]))


def test_no_score_is_computed_between_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is asked for: causal, and never wider than a sequence."""
    model, widths = qwen(), []
    attention.install(model)
    kernel = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **given):  # type: ignore[no-untyped-def]
        widths.append((query.shape[2], key.shape[2], given["attn_mask"] is None))
        return kernel(query, key, value, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    outcome(model, [packed_row(samples())])
    assert widths == [(length + 1, length + 1, True) for length in LENGTHS] * 2


@pytest.mark.parametrize("window", [4, 100])
def test_a_window_keeps_its_dense_mask(window: int) -> None:
    model, made = mistral(window), samples()
    dense = outcome(model, [packed_row(made)])
    assert attention.install(model)
    same(outcome(model, [packed_row(made)]), dense)
    wide = mistral(100)
    assert attention.install(wide)
    other = outcome(wide, [packed_row(made)])["logprobs"]
    assert torch.allclose(other, dense["logprobs"]) is (window == 100), "the window counts"


def test_checkpointing_changes_nothing() -> None:
    model = qwen()
    attention.install(model)
    plain = outcome(model, [packed_row(samples())])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same(outcome(model, [packed_row(samples())]), plain)


def test_a_model_that_cannot_stays_as_it_is() -> None:
    model = qwen()
    model._supports_attention_backend = False
    assert not attention.install(model)
    assert model.config._attn_implementation == "sdpa"


def test_attention_without_positions_is_refused() -> None:
    heads = torch.zeros(1, 2, 5, 4)
    with pytest.raises(AsyncRLError, match="sdpa") as caught:
        attention.attend(SimpleNamespace(is_causal=True), heads, heads, heads, None)
    assert caught.value.code == "learner.packing"


def test_lengths_of_sequences() -> None:
    assert segments.sequence_lengths(torch.tensor([[0, 1, 2, 0, 0, 1]])) == [3, 1, 2]
    assert segments.sequence_lengths(torch.tensor([[0]])) == [1]
    assert segments.sequence_lengths(torch.tensor([[0, 1, 2], [0, 1, 2]])) == [3]
    with pytest.raises(AsyncRLError):
        segments.sequence_lengths(torch.tensor([[0, 1, 0], [0, 1, 2]]))
    with pytest.raises(AsyncRLError):
        segments.sequence_lengths(torch.zeros(3, 1, 4))


@pytest.mark.parametrize(("width", "shares"), [(None, True), (3, True), (3, False)])
def test_the_kernel_of_torch_is_asked_for_every_sequence_of_a_row(
    monkeypatch: pytest.MonkeyPatch, width: int | None, shares: bool
) -> None:
    """It has no code for a CPU: here one call of it is answered by what its documentation says it computes. Torch 2.11
    has one without shared heads of keys (`enable_gqa`)."""
    asked = []

    def attends(query, key, value, ends, other, most, most_too, **given):  # type: ignore[no-untyped-def]  # noqa: PLR0917
        assert ends is other and ends.dtype == torch.int32 and most == most_too == max(ends.diff().tolist())
        assert given["window_size"] == (-1, 0) and all(t.is_contiguous() for t in (query, key))
        assert shares == given.get("enable_gqa", False) == (query.shape[1] != key.shape[1])
        asked.append(ends.diff().tolist())
        parts = zip(*(one.split(ends.diff().tolist()) for one in (query, key, value)), strict=True)
        found = [
            torch.nn.functional.scaled_dot_product_attention(
                *(one.transpose(0, 1)[None] for one in part),
                is_causal=True,
                scale=given["scale"],
                enable_gqa=True,
            )[0].transpose(0, 1)
            for part in parts
        ]
        return torch.cat(found)

    def newer(*given, enable_gqa=False, **more):  # type: ignore[no-untyped-def]
        return attends(*given, enable_gqa=enable_gqa, **more)

    made = samples()[:width]
    wanted = outcome(qwen(), [packed_row(made)])
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if shares else attends)
    model = qwen()
    assert attention.install(model, attention.VARLEN)
    same(outcome(model, [packed_row(made)]), wanted)
    assert asked == [[length + 1 for length in LENGTHS[:width]]] * 2
    same(outcome(model, [padded_rows(made)]), wanted)  # several rows: a sequence at a time
    assert len(asked) == 2


def test_the_attention_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cpu, cuda, npu = Device("cpu"), Device("cuda"), Device("npu")
    assert [attention.select_kernel("auto", one, "bfloat16") for one in (cpu, cuda, npu)] == [
        "sdpa",
        "sdpa",
        attention.FLASH,
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn" or None)
    assert [attention.select_kernel("auto", one, "bfloat16") for one in (cpu, cuda)] == ["sdpa", attention.FLASH]
    assert {attention.select_kernel("auto", one, "float32") for one in (cpu, cuda, npu)} == {"sdpa"}
    for newest, found in (("2.5.9", "eager"), ("2.6.0", attention.FLASH)):  # of flash-attn: the first with a cap
        monkeypatch.setattr(
            "transformers.utils.import_utils.is_flash_attn_greater_or_equal",
            lambda least, newest=newest: least <= newest,
        )
        kernels = [attention.select_kernel("auto", one, "bfloat16", capped=True) for one in (cpu, cuda, npu)]
        assert kernels == ["eager", found, "eager"]
        assert attention.select_kernel("auto", cuda, "float32", capped=True) == "eager"
    assert (
        attention.select_kernel("varlen", cuda, "bfloat16") == "sdpa"
        and attention.select_kernel("eager", cuda, "x") == "eager"
    )
    for device, dtype in ((cpu, "bfloat16"), (npu, "bfloat16"), (cuda, "float32")):
        with pytest.raises(ConfigError, match="half precision") as caught:
            attention.select_kernel("varlen", device, dtype)
        assert caught.value.code == "config.conflict"


def test_auto_prefers_the_kernel_of_torch_to_single_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [Device("cpu"), Device("cuda"), Device("npu")]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not any(one.varlen_ok for one in every)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (8, 0))
    found = [[attention.kernel_by_sequence(one, dtype) for one in every] for dtype in ("bfloat16", "float32")]
    assert found == [[attention.BY_SEQUENCE, attention.VARLEN, attention.BY_SEQUENCE], [attention.BY_SEQUENCE] * 3]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (7, 5))
    assert attention.kernel_by_sequence(every[1], "bfloat16") == attention.BY_SEQUENCE
    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 4))
    assert attention.kernel_by_sequence(every[1], "bfloat16") == attention.BY_SEQUENCE, "not tried on AMD"


def test_a_torch_without_windows_in_its_kernel_has_none_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.9 has no kernel."""
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    assert attention.kernel_by_sequence(Device("cuda"), "bfloat16") == attention.VARLEN
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, is_causal: None)
    assert attention.kernel_by_sequence(Device("cuda"), "bfloat16") == attention.BY_SEQUENCE
    with pytest.raises(ConfigError, match=r"torch 2\.11") as caught:
        attention.select_kernel("varlen", Device("cuda"), "bfloat16")
    assert caught.value.where == "model.attn_implementation"


def test_heads_that_the_kernel_does_not_have_attend_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(*_, **__):  # type: ignore[no-untyped-def]
        raise AssertionError("the kernel was called")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    places = torch.tensor([[0, 1, 2, 0, 1]])
    for keys, values in ((12, 12), (264, 264), (16, 8)):
        query, key, value = (torch.randn(1, 2, 5, size) for size in (keys, keys, values))
        given = {"position_ids": places, "scaling": 0.5}
        found, _ = attention.attend_varlen(torch.nn.Identity(), query, key, value, None, **given)
        wanted, _ = attention.attend(torch.nn.Identity(), query, key, value, None, **given)
        assert torch.equal(found, wanted)


def test_single_sequences_are_checked_under_the_plain_kernel() -> None:
    model = qwen()
    attention.install(model)
    with attention.plain(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == attention.BY_SEQUENCE
    model.set_attn_implementation("eager")  # what a user has named is not replaced by another kernel
    with attention.plain(model):
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("wanted", "found"), [("auto", attention.BY_SEQUENCE), ("sdpa", "sdpa"), ("eager", "eager")])
def test_the_learner_takes_it_where_nothing_is_named(tmp_path: Path, wanted: str, found: str) -> None:
    save_model(tmp_path, make_tiny_qwen3(21, hidden_size=32, layers=1, head_dim=8, mlp_size=48))
    config = parse(
        f'model.path = "{tmp_path}"\nmodel.attn_implementation = "{wanted}"\ndata.source = "a:b"\n'
        '[[reward]]\nfunction = "a:b"\n'
    )
    model = load_model(config, Device.find("cpu"))
    assert model.config._attn_implementation == found
    model.config.save_pretrained(tmp_path / "export")
    assert attention.BY_SEQUENCE not in (tmp_path / "export/config.json").read_text()
    if wanted == "auto":  # where torch's kernel runs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Device, "varlen_ok", True)
            half = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
            assert load_model(half, Device.find("cpu")).config._attn_implementation == attention.VARLEN

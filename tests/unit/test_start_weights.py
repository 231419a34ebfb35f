"""Start weights read part by part: bit by bit what transformers reads whole, and a reason where it cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.config import parse
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_tensors import INDEX, ONE, Unfit
from learners.backends import start_weights
from learners.backends.fsdp2.loading import load_model
from learners.backends.sharded_checkpoint import Box
from learners.backends.start_weights import Start
from learners.models.score_model import load_scorer
from learners.warm_start.tiny_model import make_tiny_qwen3, save_model

OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": False}
WHOLE = {**OPTIONS, "use_safetensors": True}


def qwen(folder: Path) -> None:
    save_model(folder, make_tiny_qwen3(21, hidden_size=32, layers=2, head_dim=8, mlp_size=48))


def llama(folder: Path) -> None:
    """Untied, in bfloat16 and several files, with a rotary embedding that is computed from more than its base."""
    shape = LlamaConfig(
        vocab_size=21,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    torch.manual_seed(0)
    LlamaForCausalLM(shape).bfloat16().save_pretrained(str(folder), max_shard_size="10KB")
    assert (folder / INDEX).exists()


def experts(folder: Path) -> None:
    shape = Qwen3MoeConfig(
        vocab_size=21,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=12,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(shape).save_pretrained(str(folder))
    assert any("experts.11.up_proj" in name for name in load_file(folder / "model.safetensors"))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize("make", [qwen, llama, experts])
def test_it_is_bit_by_bit_what_transformers_reads(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, **WHOLE)
    parts = start_weights.describe_model(str(tmp_path), scorer=False, seed=0, **OPTIONS)
    assert all(parameter.is_meta for parameter in parts.parameters())
    assert start_weights.fill(parts, torch.device("cpu")) == sum(p.numel() for p in whole.parameters())
    wanted, found = tensors(whole), tensors(parts)
    assert list(found) == list(wanted) and any("inv_freq" in name for name in found)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        assert isinstance(found[name], nn.Parameter) is isinstance(value, nn.Parameter)
    ids = torch.arange(3, 19)[None]
    assert torch.equal(parts(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert parts.config.to_dict() == whole.config.to_dict()
    assert parts.generation_config.to_dict() == whole.generation_config.to_dict()
    assert parts.training is whole.training
    tied = whole.config.tie_word_embeddings
    assert (parts.lm_head.weight is parts.model.embed_tokens.weight) is tied
    assert start_weights.fill(parts, torch.device("cpu")) == 0  # nothing is left to read


@pytest.mark.parametrize("own_head", [False, True])
def test_a_scorer_has_the_head_of_its_folder_or_the_one_of_the_seed(tmp_path: Path, own_head: bool) -> None:
    qwen(tmp_path)
    if own_head:
        load_scorer(str(tmp_path), seed=9, **WHOLE).save_pretrained(tmp_path)
    whole = load_scorer(str(tmp_path), seed=5, **WHOLE)
    parts = start_weights.describe_model(str(tmp_path), scorer=True, seed=5, **OPTIONS)
    start_weights.fill(parts, torch.device("cpu"))
    assert tensors(parts).keys() == tensors(whole).keys()
    assert all(torch.equal(value, tensors(parts)[name]) for name, value in tensors(whole).items())
    assert float(whole.score.weight.detach().abs().max()) > 0 and parts.config.to_dict() == whole.config.to_dict()


def test_buffers_that_were_not_computed_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong silently where buffers of a model without memory are left as they are."""
    qwen(tmp_path)
    monkeypatch.setattr("transformers.PreTrainedModel.initialize_weights", lambda self: None)
    with pytest.raises(Unfit, match="inv_freq"):
        start_weights.describe_model(str(tmp_path), scorer=False, seed=0, **OPTIONS)


def test_only_the_box_of_a_rank_is_read(tmp_path: Path) -> None:
    rows, up = torch.arange(24.0).view(6, 4), torch.arange(100.0, 116.0).view(4, 4)
    save_file({"a": rows, "up.0": up, "up.1": up + 50, "gate.0": -up, "gate.1": -up - 50}, tmp_path / "f.safetensors")
    asked: list[tuple[str, Any]] = []

    class Watched(Start):
        def _slice(self, name: str, start: Any, shape: Any) -> torch.Tensor:
            asked.append((name, shape))
            return super()._slice(name, start, shape)

    files = dict.fromkeys(("a", "up.0", "up.1", "gate.0", "gate.1"), tmp_path / "f.safetensors")
    fused = start_weights.Source((("gate.0", "up.0"), ("gate.1", "up.1")), stacked=True)
    start = Watched(files, {"a": start_weights.Source((("a",),)), "fused": fused}, {"head": rows})
    assert torch.equal(start.read("a", Box((2, 1), (3, 2), True)), rows[2:5, 1:3])
    whole = torch.stack([torch.cat((-up, up)), torch.cat((-up - 50, up + 50))])
    assert torch.equal(start.read("fused", Box((1, 3, 0), (1, 2, 3), True)), whole[1:2, 3:5, :3])
    assert torch.equal(start.read("head", Box((1, 0), (2, 4), True)), rows[1:3])
    assert asked == [("a", (3, 2)), ("gate.1", (1, 3)), ("up.1", (1, 3))]
    with pytest.raises(AsyncRLError, match="is in no file"):
        start.read("lora_A", Box((0,), (1,), True))


def changed(folder: Path, change: Any) -> None:
    path = folder / ONE
    held = load_file(path)
    change(held)
    save_file(held, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop("model.norm.weight"), "lack model.norm.weight"),
        (lambda held: held.update({"model.norm.weight": torch.ones(31)}), r"\[31\] in its files and \[32\]"),
        (lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}), "is tied to"),
    ],
)
def test_files_that_do_not_fit_are_said(tmp_path: Path, change: Any, says: str) -> None:
    qwen(tmp_path)
    changed(tmp_path, change)
    with pytest.raises(Unfit, match=says):
        start_weights.describe_model(str(tmp_path), scorer=False, seed=0, **OPTIONS)


@pytest.mark.parametrize("spoil", [b"{", b"\xff", b"[]", b'{"weight_map": 3}', b""])
def test_a_damaged_list_of_files_is_said(tmp_path: Path, spoil: bytes) -> None:
    llama(tmp_path)
    (tmp_path / INDEX).write_bytes(spoil)
    with pytest.raises(Unfit, match="cannot be listed"):
        start_weights.describe_model(str(tmp_path), scorer=False, seed=0, **OPTIONS)


def test_quantized_weights_and_gaps_in_experts_are_said(tmp_path: Path) -> None:
    experts(tmp_path)
    changed(tmp_path, lambda held: [held.pop(name) for name in list(held) if "layers.1.mlp.experts.3." in name])
    with pytest.raises(Unfit, match="have gaps"):
        start_weights.describe_model(str(tmp_path), scorer=False, seed=0, **OPTIONS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(Unfit, match="quantized"):
        start_weights.describe_model(str(tmp_path), scorer=False, seed=0, **OPTIONS)


def test_what_cannot_be_read_in_parts_is_read_whole_and_said_or_refused(tmp_path: Path) -> None:
    qwen(tmp_path)
    changed(tmp_path, lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))
    said: list[str] = []

    def load(how: str) -> Any:
        text = f'model.path = "{tmp_path}"\nlearner.load = "{how}"\ndata.source = "a:b"\n[[reward]]\nfunction = "a:b"'
        return load_model(parse(text), Device("cpu"), say=said.append)

    assert not load("auto").lm_head.weight.is_meta
    assert len(said) == 1 and "is tied to another" in said[0]
    with pytest.raises(ConfigError, match="is tied to another") as caught:
        load("parts")
    assert caught.value.code == "config.model"
    assert not load("whole").lm_head.weight.is_meta and len(said) == 1


def test_a_part_stays_where_it_was_read() -> None:
    """With cpu_offload parts are in host memory although the mesh is of another device."""
    mesh = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32))
    old = nn.Parameter(DTensor(torch.empty(4, 2, device="meta"), spec, requires_grad=False))
    with torch.no_grad():
        new = start_weights._like(old, torch.ones(4, 2))
    assert isinstance(new, nn.Parameter) and isinstance(new.data, DTensor) and new.requires_grad
    assert new.data.to_local().device.type == "cpu" and new.data.to_local().sum() == 8

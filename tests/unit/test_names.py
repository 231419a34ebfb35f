"""Names: fused, stacked and checkpoint tensors of real tiny models, in both directions."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

from weightsync.plan.buckets import TensorSpec
from weightsync.plan.names import (
    Mapped,
    Slice,
    expert_names,
    fuse_projections,
    gather,
    split_experts,
    split_projections,
    stack_experts,
)

SIZE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE),  # biases of q, k and v
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "phi3": lambda: transformers.Phi3Config(**SIZE),  # fused in its checkpoint
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZE, **MOE, head_dim=8, decoder_sparse_step=1),
    "mixtral": lambda: transformers.MixtralConfig(**SIZE, num_local_experts=4),
}
Weights = dict[str, torch.Tensor]


def make(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def saved(model: nn.Module, folder: Path) -> Weights:
    """What the checkpoint of a model holds."""
    model.save_pretrained(folder)
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def specs_of(weights: Weights) -> list[TensorSpec]:
    return [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in weights.items()]


def through(mapping: list[Mapped], weights: Weights) -> Weights:
    """The tensors of the other side."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    found = {}
    for mapped in mapping:
        data = gather(mapped, shapes, lambda name: weights[name].contiguous().view(-1).view(torch.uint8).numpy().data)
        found[mapped.target.name] = torch.tensor(data).view(torch.float32).reshape(mapped.target.shape)
    assert len(found) == len(mapping), "no name twice"
    return found


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_stacked_experts_and_their_checkpoint(kind: str, tmp_path: Path) -> None:
    """transformers itself says what the checkpoint is."""
    model = make(kind)
    inside, checkpoint = weights_of(model), saved(model, tmp_path)
    names = expert_names(kind)
    assert inside.keys() != checkpoint.keys()
    assert same(through(split_experts(specs_of(inside), names), inside), checkpoint)
    assert same(through(stack_experts(specs_of(checkpoint), names), checkpoint), inside)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_dense_models_have_the_names_of_their_checkpoint(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    inside, checkpoint = weights_of(model), saved(model, tmp_path)
    assert same(inside, checkpoint)
    for mapping in (split_experts(specs_of(inside)), stack_experts(specs_of(inside))):
        assert same(through(mapping, inside), inside)


def rows(kind: str) -> tuple[int, int, int]:
    config = CONFIGS[kind]()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * size, config.num_key_value_heads * size, config.num_key_value_heads * size


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_projections_there_and_back(kind: str) -> None:
    inside = weights_of(make(kind))
    fused = through(fuse_projections(specs_of(inside)), inside)
    layer = "model.layers.1.self_attn."
    for end in (".weight", ".bias") if kind == "qwen2" else (".weight",):
        parts = [inside[f"{layer}{part}_proj{end}"] for part in "qkv"]
        assert torch.equal(fused[f"{layer}qkv_proj{end}"], torch.cat(parts)), "as engines fuse them"
    assert not any("q_proj" in name for name in fused)
    assert any(name.endswith("mlp.gate_up_proj.weight") for name in fused) == (kind != "qwen3_moe")
    back = through(split_projections(specs_of(fused), qkv_rows=rows(kind)), fused)
    assert same(back, inside)


def test_a_fused_model_computes_what_the_split_one_does() -> None:
    """Phi-3 is Llama with fused projections: from the one's weights to the other's answers, both ways."""
    fused, split = make("phi3", 1), make("llama", 2)
    ids = torch.arange(12).reshape(2, 6) % 32
    with torch.no_grad():
        assert not torch.allclose(fused(ids).logits, split(ids).logits, atol=1e-3)
        inside = weights_of(fused)
        split.load_state_dict(through(split_projections(specs_of(inside), qkv_rows=rows("llama")), inside))
        torch.testing.assert_close(fused(ids).logits, split(ids).logits)
        other = make("llama", 3)
        plain = weights_of(other)
        fused.load_state_dict(through(fuse_projections(specs_of(plain)), plain))
        torch.testing.assert_close(fused(ids).logits, other(ids).logits)


def test_an_engine_of_both_kinds_from_a_checkpoint(tmp_path: Path) -> None:
    """Checkpoint to stacked experts, then to fused attention: the rules do not get in each other's way."""
    checkpoint = saved(make("qwen3_moe"), tmp_path)
    stacked = through(stack_experts(specs_of(checkpoint)), checkpoint)
    engine = through(fuse_projections(specs_of(stacked)), stacked)
    names = [name.removeprefix("model.layers.0.") for name in engine if ".layers.0." in name]
    assert {"self_attn.qkv_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"} <= set(
        names
    )
    back = through(split_projections(specs_of(engine), qkv_rows=rows("qwen3_moe")), engine)
    assert same(through(split_experts(specs_of(back)), back), checkpoint)


def test_the_example_of_the_docstring() -> None:
    spec = TensorSpec("model.layers.0.mlp.experts.gate_up_proj", "BF16", (4, 24, 16))
    mapped = split_experts([spec])[3]
    assert mapped.target == TensorSpec("model.layers.0.mlp.experts.1.up_proj.weight", "BF16", (12, 16))
    assert mapped.parts == (Slice(spec.name, ((1, 2), (12, 24), (0, 16))),)


def expert(number: int, kind: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(f"m.mlp.experts.{number}.{kind}_proj.weight", dtype, shape or (3, 2))


def test_partners_that_are_missing_or_differ() -> None:
    layer = [expert(n, kind, *((2, 3) if kind == "down" else ())) for n in range(11) for kind in ("gate", "up", "down")]
    made = stack_experts(layer)
    assert [mapped.target.shape for mapped in made] == [(11, 6, 2), (11, 2, 3)]
    assert [p.source.split(".")[3] for p in made[1].parts] == [str(n) for n in range(11)], "by number, not by letter"
    wrong = {
        "one matrix": layer[1:], "an expert": layer[:3] + layer[6:],
        "a kind": [spec for spec in layer if "up_" not in spec.name],
        "width": [expert(0, "gate", 3, 4), *layer[1:]], "dtype": [expert(0, "gate", dtype="F32"), *layer[1:]],
        "gate and up": [expert(0, "gate", 5, 2), expert(0, "up"), expert(0, "down", 2, 3)],
    }  # fmt: skip
    for what, specs in wrong.items():
        with pytest.raises(ValueError):
            stack_experts(specs)
            pytest.fail(what)
    q, k, v = (TensorSpec(f"a.{part}_proj.weight", "F32", (4, 2)) for part in "qkv")
    assert fuse_projections([k, v, q])[0].parts[0].source == q.name, "in the order of the fused rows"
    for specs in (
        [q, k],
        [k, v],
        [v],
        [q, k, TensorSpec(v.name, "BF16", (4, 2))],
        [q, k, TensorSpec(v.name, "F32", (4, 3))],
    ):
        with pytest.raises(ValueError):
            fuse_projections(specs)
    with pytest.raises(ValueError, match="12 rows, not 4"):
        split_projections([TensorSpec("a.qkv_proj.weight", "F32", (12, 2))], qkv_rows=(4, 4, 2))
    with pytest.raises(ValueError):
        split_projections([TensorSpec("a.gate_up_proj.weight", "F32", (5, 2))], qkv_rows=(4, 4, 4))
    for shape in ((4, 5, 2), (4, 6)):
        with pytest.raises(ValueError, match="no stack"):
            split_experts([TensorSpec("m.mlp.experts.gate_up_proj", "F32", shape)])


def test_one_whole_part_is_not_copied() -> None:
    data = np.arange(16, dtype=np.uint8)
    spec = TensorSpec("a.weight", "F32", (4,))
    view = gather(fuse_projections([spec])[0], {"a.weight": (4,)}, lambda _: data.data)
    assert np.shares_memory(view, data)

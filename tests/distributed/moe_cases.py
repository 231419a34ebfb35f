"""Mixtures of experts with the backend megatron: three families in the layouts that people run, and dense models with
split rows. `ranks` runs `run_all` on two and on four ranks, `test_moe_ranks.py` on one with fsdp2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_contract as contract
import msgspec
import torch
from ranks import MEGATRON, chosen, in_layout

from learners.backends.megatron.checkpoint import Store
from learners.backends.megatron.mapping import Part
from learners.gang.gang import Gang
from learners.step.update import train_step
from weightsync.plan.buckets import full_box

#: An epsilon above the noise of float32 gradients: AdamW would divide it by itself.
SETTINGS = ";learner.optim.eps=1e-6;sampling.temperature=0.7"
#: By ranks, layouts by name: tensor, pipeline, expert places.
LAYOUTS = {
    2: {"expert": (1, 1, 2), "tensor": (2, 1, 1)},
    4: {"expert4": (1, 1, 4), "expert_shares": (1, 1, 2), "expert_pipeline": (1, 2, 2), "expert_tensor": (2, 1, 2)},
}
SIZES: dict[str, Any] = {
    "vocab_size": 47, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {
        "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "norm_topk_prob": False,
    }),
    "deepseek_v3": ("DeepseekV3", {
        "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 4,
        "qk_nope_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 2, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
        },
    }),
}  # fmt: skip

#: By ranks: families whose layouts are of the long form.
LONG = {1: (), 2: ("mixtral",), 4: ("mixtral", "qwen3_moe")}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by family and layout; on one rank with fsdp2 and with megatron."""
    found: dict[str, Any] = {}
    for kind in chosen(FAMILIES, LONG[gang.size]):
        folder = make_family(out / kind, kind, gang)
        if gang.size == 1:
            settings = {"fsdp2": "", "alone": "learner.backend=megatron"}
        else:
            settings = {
                name: f"{MEGATRON.format(gang.size, tensor, stages)};learner.parallel.expert={expert};"
                f"learner.megatron.sequence_parallel={str(tensor > 1).lower()}"
                for name, (tensor, stages, expert) in LAYOUTS[gang.size].items()
            }
        found[kind], other = {}, None
        for name, extra in settings.items():
            found[kind][name] = trained(folder, gang, extra, out / f"{kind}_{name}", other=other)
            other = out / f"{kind}_{name}" / "first"
    if gang.size == 2:
        split = f"{MEGATRON.format(2, 2, 1)};learner.megatron.sequence_parallel=true"
        found["dense"] = trained(model, gang, split, out / "dense")
    return found


def make_family(folder: Path, kind: str, gang: Gang) -> Path:
    """A tiny model of a family, with weights and biases of routers that tell experts apart."""
    import transformers

    if gang.lead:
        name, more = FAMILIES[kind]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            made = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | more))
            with torch.no_grad():
                for parameter in made.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.15)
                for own, buffer in made.named_buffers():
                    if own.endswith("bias"):
                        buffer.normal_(std=0.1)
        made.save_pretrained(folder)
    gang.barrier()
    return folder


def trained(folder: Path, gang: Gang, settings: str, out: Path, *, other: Path | None = None) -> dict[str, Any]:
    """Log-probs, weights as they were read, three steps, a checkpoint after the first one and an export in `out`;
    weights from the checkpoint `other`.
    """
    placed = in_layout(gang, settings)
    config = contract.make_config(folder, extra=settings + SETTINGS)
    backend = contract.make_backend(config, placed)
    backend.self_check()
    start, _, names = contract.digest(backend)
    (part,) = contract.cut(14, 1, config, placed)
    logprobs = contract.to_samples(part, backend.forward_logprobs(part.micro), placed)
    metrics, first, after = [], out / "first", dict[str, list[float]]()
    if gang.lead:
        first.mkdir(parents=True)
    gang.barrier()
    for step in range(1, contract.STEPS + 1):
        share = contract.cut(14, step, config, placed)
        metrics.append(train_step(share, backend=backend, gang=placed, config=config.learner, step=step).metrics)
        if step == 1:
            backend.save(first)
            after = contract.digest(backend)[0]
    specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in backend.weight_specs()]
    weights, _, _ = contract.digest(backend)
    backend.export_hf(out / "export")
    if other is not None:
        backend.load(other)
    return {
        "start": start,
        "names": names,
        "specs": specs,
        "logprobs": logprobs,
        "metrics": metrics,
        "weights": weights,
        "folder": str(folder),
        "out": str(out),
        "first": after,
        "loaded": contract.digest(backend)[0] if other is not None else {},
    }


def gradients(result: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The clipped gradients of the first step by name in transformers: a tenth of them is AdamW's first moment."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    store = Store(Path(result["out"]) / "first")
    try:
        return {
            name: store.read("exp_avg", Part(name, tuple(one.shape), full_box(one.shape), full_box(one.shape))) * 10
            for name, one in model.named_parameters()
        }
    finally:
        store.close()


def as_told(result: dict[str, Any]) -> Any:
    """As another process tells it: log-probs by the number of a sample become text."""
    return msgspec.json.decode(msgspec.json.encode(result))

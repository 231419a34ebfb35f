"""What the backend megatron must do beside the contract of all backends: `ranks` runs it on two ranks.

Families of models, weights in and out bit by bit, what is refused, and that nothing of its stand-ins for CUDA is left
behind. `test_megatron_ranks.py` judges.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import backend_contract as contract
import msgspec
import numpy as np
import torch
from ranks import MEGATRON, alone, in_layout

from asyncrl.errors import AsyncRLError
from learners.backends.megatron import layers as megatron_layers
from learners.gang.gang import Gang
from learners.step.update import train_step

LAYOUTS = {"tensor": MEGATRON.format(2, 2, 1), "pipeline": MEGATRON.format(2, 1, 2)}
CASES = {
    "padded": "learner.packing=false",
    "checkpointing": "learner.gradient_checkpointing=true",
    "warm": "sampling.temperature=0.7;learner.optim.weight_decay=0.1",
}
VOCABULARY = 47  # odd: the last tensor place has a row of padding


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by case, of every layout and of fsdp2."""
    layouts = {name: (in_layout(gang, settings), settings) for name, settings in LAYOUTS.items()}
    found: dict[str, Any] = {"cases": {}, "families": {}}
    for name, extra in CASES.items():
        found["cases"][name] = {"fsdp2": contract.case(model, gang, extra=extra)} | {
            layout: contract.case(model, placed, extra=f"{settings};{extra}")
            for layout, (placed, settings) in layouts.items()
        }
    for name in ("qwen2", "llama", "gemma"):
        folder = make_family(out / name, name, gang)
        found["families"][name] = {"folder": str(folder), "fsdp2": trained(folder, gang, "")} | {
            layout: trained(folder, placed, settings) for layout, (placed, settings) in layouts.items()
        }
    placed, settings = layouts["tensor"]
    found["names"] = left_behind(model, placed, settings)
    found["packing"] = wrong_packing(model, placed, settings)
    found["refused"] = refused(model, placed, f"{settings};model.path=nowhere")
    return found


def make_family(folder: Path, kind: str, gang: Gang) -> Path:
    """A tiny untied model with biases (qwen2), a tied one with scaled rotary frequencies and 3 layers (llama), or a
    tied one with wide heads (gemma)."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3 if kind == "llama" else 2,  # 3: stages of unequal size
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "dtype": "float32",
        "tie_word_embeddings": kind != "qwen2",
    }  # fmt: skip
    if kind == "llama":
        sizes["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    if kind == "gemma":
        sizes["head_dim"] = 16
    names = (f"{kind.title()}Config", f"{kind.title()}ForCausalLM")
    if gang.lead:
        torch.manual_seed(3)
        made = getattr(transformers, names[1])(getattr(transformers, names[0])(**sizes))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name.endswith("bias") or (kind == "gemma" and "norm" in name):  # zeros tell nothing apart
                    parameter.normal_()
        made.save_pretrained(folder)
    gang.barrier()
    return folder


def trained(folder: Path, gang: Gang, settings: str) -> dict[str, Any]:
    """Weights as they were read, in float32 and bfloat16 (hex), and one step."""
    config = contract.make_config(folder, extra=settings)
    backend = contract.make_backend(config, gang)
    backend.self_check()
    start, _, names = contract.digest(backend)
    half = contract.make_backend(contract.make_config(folder, extra=f"{settings};model.dtype=bfloat16"), gang)
    narrow = {name: np.array(data).tobytes().hex() for name, data in half.iter_hf_weights()}
    codes = quantised(half, contract.make_config(folder, extra=f"{settings};model.dtype=bfloat16;weightsync.dtype=fp8"))
    share = contract.cut(14, 1, config, gang)
    metrics = train_step(share, backend=backend, gang=gang, config=config.learner, step=1).metrics
    weights, _, _ = contract.digest(backend)
    return {"start": start, "narrow": narrow, "codes": codes, "names": names, "metrics": [metrics], "weights": weights}


def quantised(backend: Any, config: Any) -> dict[str, str]:
    """What the backend publishes with other settings (hex), in the order of its specs."""
    before, backend._config = backend._config, config
    try:
        specs = [spec.name for spec in backend.weight_specs()]
        found = {name: np.array(data).tobytes().hex() for name, data in backend.iter_hf_weights()}
    finally:
        backend._config = before
    assert not found or list(found) == specs
    return found


def left_behind(model: Path, gang: Gang, settings: str) -> list[str]:
    """Names of torch.cuda that are not what they were after a backend has trained."""
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    config = contract.make_config(model, extra=settings)
    backend = contract.make_backend(config, gang)
    train_step(contract.cut(14, 1, config, gang), backend=backend, gang=gang, config=config.learner, step=1)
    odd = [name for name, value in before.items() if getattr(torch.cuda, name) is not value]
    return odd + (["Tensor.type"] if "cuda" in torch.zeros(1).type() else [])


def wrong_packing(model: Path, gang: Gang, settings: str) -> str:
    """What the check at the start says where the sequences of a row see each other."""
    backend = contract.make_backend(contract.make_config(model, extra=settings), gang)
    right = megatron_layers.BySequence.forward

    def whole_row(self: Any, *heads: Any, packed_seq_params: Any, **options: Any) -> Any:
        one = SimpleNamespace(cu_seqlens_q=torch.tensor([0, heads[0].shape[0]]))
        return right(self, *heads, packed_seq_params=one, **options)

    megatron_layers.BySequence.forward = whole_row  # type: ignore[method-assign]
    try:
        backend.self_check()
    except AsyncRLError as error:
        return error.code
    finally:
        megatron_layers.BySequence.forward = right  # type: ignore[method-assign]
    return ""


def refused(model: Path, gang: Gang, settings: str) -> str:
    """The error of a backend that cannot be made."""
    try:
        contract.make_backend(contract.make_config(model, extra=settings), gang)
    except AsyncRLError as error:
        return f"{error.code}: {error.message}"
    return ""


def main() -> None:
    """`megatron_cases.py MODEL CHECKPOINT OUT`: the third step from a checkpoint of two ranks, in this process alone.

    Twice, in two gangs: process groups of the first must not be taken for those of the second.
    """
    model, checkpoint, out = map(Path, sys.argv[1:])
    for _ in range(2):
        with alone() as gang:
            found = contract.continued(model, gang, checkpoint, "learner.backend=megatron")
    out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()

"""Builds a Hugging Face decoder as a Megatron-core model: this rank's tensor place and pipeline stage.

Guarantees:
1. a row is a list of sequences (`PackedSeqParams`, "thd"): positions start at 0 in every sequence and no token sees
   another sequence, on a CPU (`BySequence`) and with TransformerEngine;
2. rotary frequencies equal those of transformers;
3. the last stage returns hidden states, not logits, so Megatron-core's own loss, which is silently wrong with whole
   logits, is never called (`stages`);
4. unsupported settings are refused before anything is built.

Layers are Megatron-core's local ones, or TransformerEngine's if it is installed and there is CUDA. The latter, and
sequence-parallel norms with them, are untested.
Example: tensor = 2, pipeline = 2 and 4 layers: rank 3 holds layers 2 and 3, half of every matrix, half of the head.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.config import Config
from asyncrl.config.capabilities import REFUSED
from asyncrl.config.capabilities import refuse as refuse_requests
from asyncrl.config.rules.learner import megatron_problems
from asyncrl.errors import ConfigError
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_folder import model_json
from learners.backends.base import Micro
from learners.backends.megatron.mapping import Facts, stage_layers
from learners.batch.micro_batches import MicroBatch
from learners.gang.topology import Topology

SEED_OFFSET = 1234  # Megatron-core's own distance between the seeds of tensor places


def require() -> None:
    """Import Megatron-core, without its warnings about optional packages.

    Raises:
        ConfigError: `config.extra`: it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("megatron.core.optimizer")
            importlib.import_module("megatron.core.models.gpt")
        except ImportError as error:
            raise ConfigError("config.extra", f"learner.backend = 'megatron': {error}", where="learner") from error


def has_engine(device: Device) -> bool:
    """Whether layers of TransformerEngine are built."""
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def refuse(config: Config, place: Topology, device: Device) -> None:
    """Raise for settings, models and layouts that this backend or this machine does not support.

    Raises:
        ConfigError: `config.conflict`, `config.model`; `config.extra`: TransformerEngine is missing.
    """
    refuse_requests(config, model_json(config.model.path), role="learner", device=device.type)
    problems = [one.message for one in megatron_problems(config)]
    problems += [
        f"learner.parallel.{name}: backend 'megatron' {why}"
        for name, (why, _) in REFUSED["megatron"].items()
        if getattr(place, name, 1) > 1
    ]
    if problems:
        raise ConfigError("config.conflict", "; ".join(problems), where="learner")
    if config.learner.megatron.sequence_parallel and not has_engine(device):
        where = "learner.megatron.sequence_parallel"
        raise ConfigError("config.extra", "its norms are those of transformer_engine", where=where)


def join_groups(topology: Topology, *, seed: int, minutes: int) -> None:
    """Create Megatron-core's process groups, again if they belong to another layout or gang. `minutes`: their timeout.
    Collective.
    """
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if state.model_parallel_is_initialized():
        if _groups_fit(state, topology):
            return
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        topology.tensor, topology.pipeline, create_gloo_process_groups=False, distributed_timeout_minutes=minutes
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _groups_fit(state: Any, topology: Topology) -> bool:
    """Whether the existing groups belong to this layout and are alive."""
    try:
        alive = bool(dist.get_process_group_ranks(state.get_model_parallel_group()))
    except (KeyError, ValueError):  # a destroyed process group
        return False
    sizes = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    return alive and sizes == (topology.tensor, topology.pipeline)


def stages_text(facts: Facts, topology: Topology) -> str | None:
    """Return Megatron-core's notation of the layers by stage; None if every stage has the same number. Example: 3
    layers on 2 stages: `Ett|tL`, the embedding and two layers, a layer and the loss.
    """
    if facts.layers % topology.pipeline == 0:
        return None
    places = (topology._replace(rank=stage, size=topology.pipeline, tensor=1) for stage in range(topology.pipeline))
    return "E" + "|".join("t" * len(stage_layers(facts, place)) for place in places) + "L"


def transformer_config(facts: Facts, config: Config, topology: Topology, device: Device, *, eps: float) -> Any:
    """Return Megatron-core's settings of the model."""
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    recompute: dict[str, Any] = {}
    if config.learner.gradient_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=facts.layers,
        hidden_size=facts.hidden,
        ffn_hidden_size=facts.mlp,
        num_attention_heads=facts.heads,
        num_query_groups=facts.kv_heads,
        kv_channels=facts.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=eps,
        qk_layernorm=facts.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        pipeline_model_parallel_layout=stages_text(facts, topology),
        sequence_parallel=config.learner.megatron.sequence_parallel and topology.tensor > 1,  # not run
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )


class BySequence(nn.Module):
    """Causal attention of a row, one sequence at a time: `core_attention` of Megatron-core's local layers. Its own
    attention does not take packed rows.
    """

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """Convert heads `[T, H, D]` (keys and values `[T, G, D]`, G divides H) to `[T, H, D]`."""
        ends: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [high - low for low, high in itertools.pairwise(ends)]
        found = []
        for q, k, v in zip(*(torch.split(heads, lengths) for heads in (query, key, value)), strict=True):
            out = nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)


def layer_spec(facts: Facts, device: Device) -> Any:
    """Return the layers: Megatron-core's own with attention by sequence, or those of TransformerEngine."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if has_engine(device):  # not run
        return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=facts.qk_norm)
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=facts.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = BySequence
    return spec


def build(facts: Facts, hf: Any, settings: Any, topology: Topology, device: Device) -> Any:
    """Return this rank's part of the model, with empty weights, on the device."""
    from megatron.core.models.gpt import GPTModel

    class Policy(GPTModel):  # type: ignore[misc]  # here, to import this module without Megatron-core
        """Hidden states of the last stage instead of logits."""

        def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden_states

    model = Policy(
        settings,
        layer_spec(facts, device),
        vocab_size=facts.padded_rows(topology.tensor),
        max_sequence_length=int(hf.max_position_embeddings),
        pre_process=topology.stage == 0,
        post_process=topology.stage == topology.pipeline - 1,
        share_embeddings_and_output_weights=facts.tied,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb.inv_freq = frequencies(hf, facts.head_dim)
    if settings.bf16:
        model.bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # padding rows stay zero
    return model.to(device.torch_device)


def mark_split(model: Any, axes: Mapping[str, int | None]) -> None:
    """Mark parameters that tensor places split: gradient norms count the others once.

    Megatron-core marks only weights that it initialises itself; without the mark the norm is silently too small.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    for name, parameter in model.named_parameters():
        axis = axes[name]
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(parameter, attribute):
                delattr(parameter, attribute)
        set_tensor_model_parallel_attributes(parameter, axis is not None, -1 if axis is None else axis, 1)


def frequencies(hf: Any, head_dim: int) -> Tensor:
    """Return the rotary frequencies of transformers, `[head_dim / 2]`, float32, on the host."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary: Any = LlamaRotaryEmbedding(hf)
    if rotary.attention_scaling != 1.0 or 2 * rotary.inv_freq.numel() != head_dim:
        raise ConfigError("config.model", f"model_type {hf.model_type!r}: rotary embeddings of another kind")
    return rotary.inv_freq.detach().clone().float()  # type: ignore[no-any-return]


# ---------------------------------------------------------------- rows


def bounds(micro: MicroBatch, *, multiple: int = 1) -> list[int]:
    """Return the bounds of the sequences in the flat row. Tokens before the first sequence, and the padding to a
    multiple, are sequences of their own.
    """
    found = [int(place) for place in micro.cu_seqlens]
    found = found if found[0] == 0 else [0, *found]
    rest = -found[-1] % multiple
    return [*found, found[-1] + rest] if rest else found


def packed_params(ends: Sequence[int], device: torch.device) -> Any:
    """Return the description of a packed row for Megatron-core."""
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = max(high - low for low, high in itertools.pairwise(ends))
    cut = torch.tensor(ends, dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cut, cu_seqlens_kv=cut, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def hidden_states(model: Any, tensors: Micro, ends: Sequence[int]) -> Tensor:
    """Return `[T, 1, H]` after the last layer of this stage, normed on the last stage. Positions follow from `ends`."""
    flat = tensors.input_ids.view(1, -1)
    flat = nn.functional.pad(flat, (0, ends[-1] - flat.shape[1]))
    found: Tensor = model(
        input_ids=flat, position_ids=None, attention_mask=None, packed_seq_params=packed_params(ends, flat.device)
    )
    return found

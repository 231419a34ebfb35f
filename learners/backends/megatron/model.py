"""Builds a Hugging Face decoder as a Megatron-core model: this rank's tensor place and pipeline stage.

Guarantees:
1. a row is a list of sequences (`PackedSeqParams`, "thd"): positions start at 0 in every sequence and no token sees
   another sequence, on a CPU (`layers.BySequence`) and with TransformerEngine;
2. rotary frequencies equal those of transformers;
3. the last stage returns hidden states, not logits, so Megatron-core's own loss, which is silently wrong with whole
   logits, is never called (`stages`);
4. unsupported settings are refused before anything is built.

Layers are Megatron-core's local ones, or TransformerEngine's if it is installed and there is CUDA. The latter are
untested.
Example: tensor = 2, pipeline = 2 and 4 layers: rank 3 holds layers 2 and 3, half of every matrix, half of the head.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
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
from learners.backends.megatron.families import Experts, Facts, Latent
from learners.backends.megatron.layers import block_spec, has_engine
from learners.backends.megatron.mapping import stage_layers
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
            routing: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
            latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        except ImportError as error:
            raise ConfigError("config.extra", f"learner.backend = 'megatron': {error}", where="learner") from error
    if importlib.util.find_spec("transformer_engine") is None:  # two modules of 0.16.1 then take it for installed
        routing.te_general_gemm, latent.HAVE_TE = None, False


def refuse(config: Config, place: Topology, device: Device) -> None:
    """Raise for settings, models and layouts that this backend or this machine does not support.

    Raises:
        ConfigError: `config.conflict`, `config.model`.
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


def join_groups(topology: Topology, *, seed: int, minutes: int) -> None:
    """Create Megatron-core's process groups, again if they belong to another layout or gang. `minutes`: their timeout.
    Collective.
    """
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if state.model_parallel_is_initialized():
        if _groups_fit(state, topology):
            return
        _end_groups(state)
    state.initialize_model_parallel(
        topology.tensor,
        topology.pipeline,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=_expert_tensor(topology),
        create_gloo_process_groups=False,
        distributed_timeout_minutes=minutes,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _end_groups(state: Any) -> None:
    """Megatron-core only forgets its groups; each has threads that wake a hundred times a second."""
    made = [one for one in state._global_process_group_list or () if one is not None]
    state.destroy_model_parallel()
    state._global_process_group_list = None
    for one in made:
        with suppress(ValueError):  # it has ended, with the group of all ranks
            dist.destroy_process_group(one)


def _expert_tensor(topology: Topology) -> int:
    """Over how many ranks each expert is split. Experts of many are too narrow to split; without expert places
    Megatron-core would not sum the gradients of whole ones over tensor places.
    """
    return 1 if topology.expert > 1 else topology.tensor


def _groups_fit(state: Any, topology: Topology) -> bool:
    """Whether the existing groups belong to this layout and are alive."""
    try:
        alive = bool(dist.get_process_group_ranks(state.get_model_parallel_group()))
    except (KeyError, ValueError):  # a destroyed process group
        return False
    sizes = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
    )
    return alive and sizes == (topology.tensor, topology.pipeline, topology.expert)


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
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    recompute: dict[str, Any] = {}
    if config.learner.gradient_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return (MLATransformerConfig if facts.latent else TransformerConfig)(
        num_layers=facts.layers,
        hidden_size=facts.hidden,
        ffn_hidden_size=facts.mlp,
        num_attention_heads=facts.heads,
        num_query_groups=facts.kv_heads,
        kv_channels=facts.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=eps,
        qk_layernorm=facts.qk_norm or facts.latent is not None,
        gated_linear_unit=True,
        activation_func=partial(nn.functional.gelu, approximate="tanh") if facts.gemma else nn.functional.silu,
        layernorm_zero_centered_gamma=facts.gemma,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=_expert_tensor(topology),
        pipeline_model_parallel_layout=stages_text(facts, topology),
        sequence_parallel=config.learner.megatron.sequence_parallel and topology.tensor > 1,
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
        **(_expert_settings(facts.experts, facts.layers, grouped=has_engine(device)) if facts.experts else {}),
        **(_latent_settings(facts.latent) if facts.latent else {}),
    )


def _expert_settings(experts: Experts, layers: int, *, grouped: bool) -> dict[str, Any]:
    """No auxiliary loss, and biases of routers stay: experts are balanced in pretraining. `grouped`: one kernel for all
    experts, of TransformerEngine.
    """
    limited = experts.groups != experts.chosen_groups
    return {
        "num_moe_experts": experts.total,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.inner,
        "moe_layer_freq": [int(layer not in experts.dense) for layer in range(layers)],
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_topk_scaling_factor": None if experts.scale == 1.0 else experts.scale,
        "moe_router_num_groups": experts.groups if limited else None,
        "moe_router_group_topk": experts.chosen_groups if limited else None,
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32" if experts.float32 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
    }


def _latent_settings(latent: Latent) -> dict[str, Any]:
    """`rope_type` is rope, with the frequencies of transformers; YaRN then only scales the scores."""
    factor, mscale = latent.scale
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "rope",
        "rotary_scaling_factor": factor,
        "mscale_all_dim": mscale,
    }


def build(facts: Facts, hf: Any, settings: Any, topology: Topology, device: Device) -> Any:
    """Return this rank's part of the model, with empty weights, on the device."""
    from megatron.core.models.gpt import GPTModel

    class Policy(GPTModel):  # type: ignore[misc]  # here, to import this module without Megatron-core
        """Hidden states of the last stage instead of logits."""

        def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden_states

    model = Policy(
        settings,
        block_spec(settings, device),
        vocab_size=facts.padded_rows(topology.tensor),
        max_sequence_length=int(hf.max_position_embeddings),
        pre_process=topology.stage == 0,
        post_process=topology.stage == topology.pipeline - 1,
        share_embeddings_and_output_weights=facts.tied and not facts.scores,
        position_embedding_type="rope",
    )
    if facts.scores and model.post_process:  # every tensor place has the head whole
        model.output_layer = nn.Linear(facts.hidden, 1, bias=False, dtype=settings.params_dtype)
    if facts.gemma and model.pre_process:
        scale = torch.tensor(facts.hidden**0.5, dtype=settings.params_dtype)  # rounded as the weights are
        model.embedding.register_forward_hook(lambda _module, _inputs, found: found * scale.to(found.device))
    rotary = frequencies(hf, facts.latent.rope if facts.latent else facts.head_dim)
    for module in model.modules():
        if getattr(module, "rotary_pos_emb", None) is not None:
            module.rotary_pos_emb.inv_freq = rotary  # latent attention has its own in every layer
        if getattr(module, "expert_bias", None) is not None:
            module._apply_expert_bias = _count_nothing  # the bias stays: no tokens are counted, by a compiled function
    if settings.bf16:
        model.bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # padding rows stay zero
    return model.to(device.torch_device)


def _count_nothing(*_: Any, **__: Any) -> None: ...


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

"""Loads a model for FSDP2 and splits it over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.config import Config, OptimConfig
from asyncrl.config.capabilities import find_folder_refusals
from asyncrl.config.model_facts import ATTENTION_CAP, find_cap
from asyncrl.errors import ConfigError
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_folder import load_model as read_model
from asyncrl.runtime.model_folder import model_json
from asyncrl.runtime.model_tensors import Unfit
from learners.backends import start_weights
from learners.backends.base import DTYPES
from learners.backends.fsdp2 import mesh as layout
from learners.backends.optimizers import Optimizers, make_optimizer
from learners.backends.vision import vision_part
from learners.gang.gang import Gang
from learners.models import attention, liger
from learners.models import sequence_parallel as sequence
from learners.models.policy_model import PolicyModel
from learners.models.score_model import ScoreModel, load_scorer


def load_model(
    config: Config, device: Device, *, path: str = "", scorer: bool = False, say: Callable[[str], Any] = str
) -> Any:
    """Return the causal language model of `path` (default `model.path`) with float32 weights, without a cache: on the
    host, or (`learner.load`) for `shard` to read.

    `scorer`: its body with a scalar head, as in mode reward_model. `say` reports why it was read whole.
    """
    path, scorer = path or config.model.path, scorer or config.learner.mode == "reward_model"
    shape = model_json(path)
    wanted = attention.select_kernel(
        config.model.attn_implementation,
        device,
        config.model.dtype,
        capped=find_cap(shape, ATTENTION_CAP) is not None,
    )
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": wanted,
        "use_safetensors": True,
        "trust_remote_code": config.model.trust_remote_code,
    }
    for refused in find_folder_refusals(config, shape, "fsdp2", key=path, scores=scorer):
        raise refused.error()
    try:
        model = _load_parts(config, path, scorer=scorer, say=say, **options)
        if model is None and scorer:
            model = load_scorer(path, seed=config.run.seed, **options)
        elif model is None:
            model = read_model(path, "language", **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError("config.model", f"{path}: {error}") from error
    remove_dropout(model)
    model.config.use_cache = False  # with a cache, packed rows are silently wrong
    asked = config.model.attn_implementation
    if asked == attention.VARLEN_SETTING:
        attention.install(model, attention.VARLEN)
    elif asked == "auto" and wanted == "sdpa" and not config.learner.compile:  # compiled layers use the dense mask
        attention.install(model, attention.kernel_by_sequence(device, config.model.dtype))
    if config.learner.liger:
        liger.install(model, device)
    if config.learner.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def remove_dropout(model: nn.Module) -> None:
    """Switch off a model's own dropout: two passes of one policy would have different log-probs. Adapters, which come
    later, have theirs (`learner.lora.dropout`). Its config.json stays.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "layerdrop"):
                setattr(module, name, 0.0)


def _load_parts(config: Config, path: str, *, scorer: bool, say: Callable[[str], Any], **options: Any) -> Any | None:
    """Return the model without weights, for `shard` to read; None if it must be read whole."""
    how = config.learner.load
    if how == "whole" or (config.learner.lora.rank and path == config.model.path):  # adapters need a whole model
        return None
    try:
        return start_weights.describe_model(path, scorer=scorer, seed=config.run.seed, **options)
    except Unfit as why:
        if how == "parts":
            raise ConfigError("config.model", f"{path}: {why}", where="learner.load = 'parts'") from why
        say(f"learner: every rank reads the whole of {path}: {why}")
        return None


def make_policy(hf: Any, config: Config) -> PolicyModel | ScoreModel:
    """Return the root module: log-probs of a language model, or scores of a reward model."""
    if config.learner.mode == "reward_model":
        return ScoreModel(hf)
    return PolicyModel(hf, temperature=config.sampling.temperature, chunk_tokens=config.learner.logprob_chunk_tokens)


def language_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers without those of a vision tower."""
    return decoder_layers(getattr(model.base_model, "language_model", model))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks, also of a vision tower: classes that the model must not split, otherwise its longest
    list of modules.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in classes]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def shard(policy: PolicyModel | ScoreModel, config: Config, gang: Gang) -> tuple[list[Any], layout.Split]:
    """Split as in `[learner.parallel]` and apply `fully_shard` to every decoder layer and the root. Return the units,
    root first.
    """
    mesh, device = layout.data_mesh(gang), gang.device
    dtype = DTYPES[config.model.dtype][1]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    if config.learner.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.pin_memory_ok)
    layers = decoder_layers(policy.model)
    if config.learner.compile:
        for layer in layers:
            layer.compile(dynamic=True)
    if gang.topology.sequence > 1:
        policy.split = sequence.install(policy.model, layers, gang)
    split = layout.split(policy.model, gang)
    layout.shard_experts(split, gang, mp_policy=precision, offload_policy=offload)
    for unit in (*layers, policy):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
    start_weights.fill(policy.model, torch.device("cpu") if config.learner.cpu_offload else device.torch_device)
    if not config.learner.cpu_offload:
        policy.to(device.torch_device)
    return [policy, *layers], split


def build_optimizer(
    module: nn.Module, units: Sequence[nn.Module], optim: OptimConfig, config: Config, device: Device
) -> Optimizers:
    """Return the optimizer of a sharded module: fused if the device supports it and holds the states."""
    fused = device.supports("fused_adamw") and not config.learner.cpu_offload
    vision = config.learner.vision
    scales = {"": 1.0, "tower": vision.tower_lr_scale, "projector": vision.projector_lr_scale}
    return make_optimizer(module, units[1:], optim, fused=fused, lr_scale=lambda name: scales[vision_part(name)])


def plain_attention(model: Any, config: Config) -> AbstractContextManager[None]:
    """For the check at the start: use another kernel than the tested one. Compiled layers stay, as they would compile
    again.
    """
    return nullcontext() if config.learner.compile else attention.plain(model)

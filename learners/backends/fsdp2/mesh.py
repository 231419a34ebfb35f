"""Meshes of a gang, and the split of models over ranks before FSDP: matrices, experts, rows.

The model's own plan in transformers (`DistributedConfig`) decides how modules are split. This is the only module that
uses these young interfaces.

Guarantees:
1. tensor parallelism: gradients of weights that every tensor rank holds whole but uses on its own heads (q_norm,
   k_norm) are in `Split.partial` and are summed once per update. The hooks of transformers would sum them once per
   micro-batch, which counts early micro-batches several times;
2. expert parallelism: gradients of experts are sums over all ranks, like all others. Neighbours have different experts,
   whatever else they split; copies of HSDP have all experts each;
3. a plan that splits fused matrices into separate pieces is refused, because another layout could not read its
   checkpoint;
4. a model without a plan, or with one that does not divide, raises `config.model` before training.

Example: 4 ranks with tensor = 2: mesh (shard 2, tensor 2); q_proj `[64, 32]` is `[16, 32]` on every rank, q_norm `[8]`
is `[4]`, the same on ranks 0 and 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.config.capabilities import REFUSED
from asyncrl.errors import ConfigError
from learners.gang.gang import Gang

#: In a plan: a weight that is whole on every tensor rank, with the gradient of the rank's own heads.
PARTIAL = "replicated_with_grad_allreduce"


class Split(NamedTuple):
    """Result of a split. `partial`: names of parameters whose gradients are summed over `group`; `experts`: modules
    that FSDP shards separately, over `expert_mesh`.
    """

    partial: tuple[str, ...] = ()
    group: Any = None
    experts: tuple[Any, ...] = ()
    expert_mesh: DeviceMesh | None = None


def check(gang: Gang) -> None:
    """Raise `config.conflict` for layouts without support in FSDP2."""
    for name, (why, remedy) in REFUSED["fsdp2"].items():
        if getattr(gang.topology, name, 1) > 1:
            where = f"learner.parallel.{name}"
            raise ConfigError("config.conflict", f"backend 'fsdp2' {why}", where=where, remedy=remedy)


def data_mesh(gang: Gang) -> DeviceMesh:
    """Return the ranks over which weights are sharded and gradients reduced: `[shard]`, or `[replicate, shard]` (HSDP).

    Raises:
        ConfigError: `config.conflict`: a layout without support in this backend.
    """
    check(gang)
    place = gang.topology
    if place.replicate == place.tensor == 1:
        return gang.mesh(shard=gang.size)
    mesh = _grid(gang)
    return mesh["replicate", "shard"] if place.replicate > 1 else mesh["shard"]


def _grid(gang: Gang) -> DeviceMesh:
    place = gang.topology
    shard = gang.size // (place.replicate * place.tensor)
    return gang.mesh(replicate=place.replicate, shard=shard, tensor=place.tensor)


def split(model: Any, gang: Gang) -> Split:
    """Split a model of transformers by its plans and the topology, before FSDP. Collective.

    Raises:
        ConfigError: `config.model`: its plans do not fit.
    """
    place = gang.topology
    if place.tensor == place.expert == 1:
        return Split()
    try:
        return _tensors(model, gang) if place.tensor > 1 else _experts(model, gang)
    except ValueError as error:  # the model has no plan, or it does not divide
        raise ConfigError("config.model", f"{type(model).__name__}: {error}", where="learner.parallel") from error


def _tensors(model: Any, gang: Gang) -> Split:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = _grid(gang)["tensor"]
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=gang.topology.tensor))
    if scattered := sorted(name for name, style in plan.items() if style.startswith("packed")):
        raise ValueError(f"{scattered[0]} is fused: it cannot be split over tensor ranks; experts can be by expert")
    modules = dict(model.named_modules())
    partial = [
        f"{name}.{own}"
        for name, style in plan.items()
        if style == PARTIAL and name in modules
        for own, _ in modules[name].named_parameters(recurse=False)
    ]
    _untie(model)  # the plan names both of a tied pair
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != PARTIAL})
    model.tie_weights()
    return Split(tuple(partial), mesh.get_group())


def _untie(model: Any) -> None:
    """Give each module of a tied pair its own parameter with the same memory."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = torch.nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            seen.add(id(parameter))


def _experts(model: Any, gang: Gang) -> Split:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    size, copies = gang.topology.expert, gang.topology.replicate
    config = DistributedConfig(fsdp_size=gang.size, ep_size=size)
    _, plan, _ = model._resolve_parallel_plans(config)
    shards: dict[str, int] = {"replicate": copies} if copies > 1 else {}
    mesh = gang.mesh(**shards, shard=gang.size // (copies * size), expert=size)
    alone = gang.mesh(each=gang.size, tensor=1)["tensor"]
    apply_expert_parallelism(model, mesh["expert"], alone, plan)
    modules = dict(model.named_modules())
    experts = tuple(modules[name] for name, style in plan.items() if style == "ep_dispatch_experts")
    return Split(experts=experts, expert_mesh=mesh[*shards, "shard"])


def shard_experts(split: Split, gang: Gang, **policies: Any) -> None:
    """Apply `fully_shard` to the experts over the ranks that hold the same ones."""
    for module in split.experts:
        assert split.expert_mesh is not None
        fully_shard(module, mesh=split.expert_mesh, **policies)
        # Experts see the tokens of all ranks, so FSDP must divide by the same number as for other weights.
        module.set_gradient_divide_factor(float(data_mesh(gang).size()))
        if split.expert_mesh.size(-1) > 1:  # torch divides twice where nothing is sharded
            module.set_force_sum_reduction_for_comms(True)  # needed for this factor, except on NCCL


@torch.no_grad()
def sum_partial(parameters: Any, split: Split) -> None:
    for name in split.partial:
        grad = parameters[name].grad
        if grad is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            torch.distributed.all_reduce(local, group=split.group)  # bounded: the timeout of the group


@torch.no_grad()
def clip_gradients(parameters: Any, max_norm: float) -> float:
    """Scale gradients to a global norm of at most `max_norm`, whatever their meshes. Return the norm before.
    Collective.

    `torch.nn.utils.clip_grad_norm_` does not support several meshes. Squares are summed over the dimensions that shard
    a gradient: a replica counts once.
    """
    by_mesh: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        over: tuple[Any, ...] = (None,)
        if isinstance(grad, DTensor):
            sharded = (dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
            over = (grad.device_mesh, *sharded)
            grad = grad.to_local()
        by_mesh.setdefault(over, []).append(grad)
    total = 0.0
    for (mesh, *dims), grads in by_mesh.items():
        squares = torch.stack(torch._foreach_norm(grads)).float().square().sum()
        # Offloaded gradients are on the host, where the mesh's group may have no transport.
        squares = squares.to(mesh.device_type if mesh is not None else squares.device)
        for dim in dims:
            torch.distributed.all_reduce(squares, group=mesh.get_group(dim))  # bounded: the timeout of the group
        total += float(squares)
    norm = math.sqrt(total)
    if norm > max_norm:
        for grads in by_mesh.values():
            torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
    return norm

"""Megatron-core's distributed optimizer: AdamW with float32 master weights divided over the shares.

Guarantees:
1. gradients are summed over the shares in float32, never averaged: losses have global denominators;
2. the norm counts every parameter once, over all tensor places, stages and shares;
3. a non-finite gradient changes nothing;
4. every parameter decays alike, also norms and biases, as in the backend fsdp2;
5. `whole` and `fill` handle whole parameters with their states, whatever part this rank updates.

While it is built, Megatron-core exchanges names of parameter groups between ranks as pickled objects: inside the gang,
never from a file.
Example: at 2 shares each rank updates one half of the flat memory of all parameters, then they gather the new weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import CompanionConfig, OptimConfig
from learners.backends.base import UpdateInfo

STATES = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """`ddp` is the model in Megatron-core's `DistributedDataParallel`."""

    def __init__(self, ddp: Any, optim: OptimConfig | CompanionConfig, *, bf16: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self._ddp = ddp
        self._all_shares = parallel_state.get_data_parallel_group()
        self._shares_of_experts = parallel_state.get_expert_data_parallel_group()
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=0.0,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            decoupled_weight_decay=True,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        # Empty overrides: without them norms and biases would not decay.
        self._inner = get_megatron_optimizer(settings, [ddp], config_overrides={}, use_gloo_process_groups=False)

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        """Clip by the global norm and update; do nothing if the norm is not finite. Collective."""
        norm = self.clip(max_norm)
        skipped = not math.isfinite(norm)
        if skipped:
            self.forget()
        else:
            self.apply(lr)
        return UpdateInfo(norm, skipped)

    def clip(self, max_norm: float) -> float:
        """Clip by the global norm, if it is finite, and return the norm before. Collective."""
        norm = self._norm()
        if max_norm < norm < math.inf:
            self._clip(norm, max_norm)
        return norm

    def apply(self, lr: float) -> None:
        """Update with gradients that `clip` has prepared, and clear them. Collective."""
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step_with_ready_grads()
        self.forget()

    def discard(self) -> float:
        """Clear the gradients and return their global norm. Collective."""
        norm = self._norm()
        self.forget()
        return norm

    def forget(self) -> None:
        self._ddp.zero_grad_buffer()
        self._inner.zero_grad()

    def _norm(self) -> float:
        self._inner.prepare_grads()
        return float(self._inner.get_grad_norm())

    def _clip(self, norm: float, max_norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for each in self._inner.chained_optimizers:
            clip_grad_by_total_norm_fp32(each.get_parameters(), max_norm, norm)

    # ------------------------------------------------------------ whole states

    def _mine(self, parameter: Tensor) -> tuple[slice, dict[str, Tensor]] | None:
        """Return the flat range of a parameter that this rank updates, its master weights and states; None: no part."""
        holders = (one for one in self._inner.chained_optimizers if parameter in one.model_param_gbuf_map)
        if (inner := next(holders, None)) is None:
            return None
        part = inner._get_model_param_range_map(parameter)["param"]
        group, place = inner.model_param_group_index_map[parameter]
        master = inner.optimizer.param_groups[group]["params"][place]
        states = inner.optimizer.state[master]
        for name in STATES:
            states.setdefault(name, torch.zeros_like(master))
        if "step" not in inner.optimizer.param_groups[group]:  # fused AdamW counts by group
            states.setdefault("step", torch.zeros((), dtype=torch.float32))
        return slice(part.start, part.end), {"model": master.detach(), **{name: states[name] for name in STATES}}

    @torch.no_grad()
    def whole(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return master weights (`model`) and states of a parameter, float32, in its shape. Collective over the
        shares.
        """
        found = {}
        mine = self._mine(parameter)
        shares = self._all_shares if getattr(parameter, "allreduce", True) else self._shares_of_experts
        for name in ("model", *STATES):
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if mine is not None:
                flat[mine[0]] = mine[1][name].view(-1)
            if shares.size() > 1:
                # As integers: a sum with zeros that keeps every bit.
                dist.all_reduce(flat.view(torch.int32), group=shares)
            found[name] = flat.view(parameter.shape)
        return found

    @torch.no_grad()
    def fill(self, parameter: Tensor, read: Callable[[str], Tensor], *, states: bool) -> None:
        """Fill a parameter, and this rank's part of its master weights, from `read("model")`; with `states`
        those too.
        """
        whole = read("model").to(parameter.device)
        parameter.copy_(whole)
        mine = self._mine(parameter)
        if mine is not None:
            mine[1]["model"].copy_(whole.view(-1)[mine[0]])
        for name in STATES if states else ():
            value = read(name)
            if mine is not None:
                mine[1][name].copy_(value.view(-1)[mine[0]])

    @property
    def updates(self) -> float:
        """Number of updates of the states."""
        for states, group in self._groups():
            if "step" in group:  # fused AdamW of TransformerEngine
                return float(group["step"])
            for master in group["params"]:
                found = states.get(master, {}).get("step")
                if found is not None:
                    return float(found)
        return 0.0

    @updates.setter
    def updates(self, count: float) -> None:
        for states, group in self._groups():
            if "step" in group:
                group["step"] = int(count)
            for master in group["params"]:
                if "step" in states[master]:
                    states[master]["step"].fill_(count)

    def _groups(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the states and the groups of parameters: experts have optimizers of their own."""
        for inner in self._inner.chained_optimizers:
            if inner.optimizer is not None:  # no parameters here
                yield from ((inner.optimizer.state, group) for group in inner.optimizer.param_groups)


def wrap(model: Any, settings: Any) -> Any:
    """Return the model with a flat buffer of float32 gradients, reduced and scattered over the shares once per
    update.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
        ),
        model,
    )

    def finalize(models: Any, _: Any = None, **options: Any) -> None:
        """Finalize without the count of tokens: losses have their denominators."""
        finalize_model_grads(models, None, **options)

    settings.finalize_model_grads_func = finalize
    settings.no_sync_func = ddp.no_sync
    return ddp

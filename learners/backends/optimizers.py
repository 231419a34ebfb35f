"""Optimizers of a sharded module, by their names in `[learner.optim]`.

Guarantees:
1. every trained parameter is in exactly one optimizer; parameters of different meshes are in different groups, because
   fused kernels do not mix them;
2. `prime` creates every state without changing a weight: a checkpoint has the same tensors before the first update as
   after it;
3. AdamW's fused kernel is used if the device has one and holds the states;
4. `adamw_8bit` (arXiv 2110.02861, by torchao) stores both moments in 8 bits with a scale for each block of 256; in
   float32 if a rank's part of a tensor is smaller than 4096 or no multiple of 256. Master weights stay float32.

`muon` trains the matrices of the decoder layers; embeddings, heads, norms, biases and fused experts use AdamW with the
same learning rate, because Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982, eq. 4).
Example: Qwen3 with 2 layers and tied embeddings: 14 matrices in Muon, the embedding and 9 norms in AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config import OptimConfig
from asyncrl.errors import ConfigError
from learners.backends.muon import Muon


class Optimizers:
    """One or two torch optimizers as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def step(self, lr: float) -> None:
        """Update with the current gradients."""
        for part in self._parts:
            for group in part.param_groups:
                rate = lr * group.get("lr_scale", 1.0)
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)  # torchao uses a tensor, so that its kernel compiles once
                else:
                    group["lr"] = rate
            with _plain_on_a_cpu(part):
                part.step()

    def forget(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the states of a parameter, by name."""
        return next((part.state[parameter] for part in self._parts if part.state.get(parameter)), {})

    def move(self, device: torch.device) -> None:
        """Move the states of every parameter to a device, without step counts."""
        for part in self._parts:
            for state in part.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and value.device.type != device.type:
                        state[name] = value.to(device)

    def prime(self) -> None:
        """Create missing states."""
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and not part.state.get(parameter):
                        part.state[parameter] = _fresh(part, parameter)


def _plain_on_a_cpu(part: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Disable torchao's compilation on a CPU, which takes longer than a short run."""
    if _is_8bit(part) and all(one.device.type == "cpu" for group in part.param_groups for one in group["params"]):
        eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return eager
    return nullcontext()


def _is_8bit(part: torch.optim.Optimizer) -> bool:
    return hasattr(part, "block_size")


def _fresh(part: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    if _is_8bit(part):
        make: Any = part
        return {
            "step": torch.tensor(0.0),
            "exp_avg": make._new_buffer(parameter, True),
            "exp_avg_sq": make._new_buffer(parameter, False),
        }
    if isinstance(part, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    # Fused kernels need the step count on the device of the parameter, the others on the host.
    device = parameter.device if part.defaults.get("fused") else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def make_optimizer(
    module: nn.Module,
    layers: Iterable[nn.Module],
    optim: OptimConfig,
    *,
    fused: bool,
    lr_scale: Callable[[str], float] = lambda _: 1.0,
) -> Optimizers:
    """Return the optimizer of a sharded module's trained parameters; `layers` are its decoder layers. `lr_scale`:
    factor on the learning rate of a parameter, by its name.
    """
    scales = {id(parameter): lr_scale(name) for name, parameter in module.named_parameters()}
    matrices: list[nn.Parameter] = []
    if optim.name == "muon":
        matrices = [one for layer in layers for one in layer.parameters() if one.dim() == 2 and one.requires_grad]
    known = {id(parameter) for parameter in matrices}
    rest = [one for one in module.parameters() if one.requires_grad and id(one) not in known]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(
            Muon(
                list(_groups(matrices, scales)),
                lr=optim.lr,
                momentum=optim.momentum,
                weight_decay=optim.weight_decay,
            )
        )
    if rest:
        kind: Any = torch.optim.AdamW
        options: dict[str, Any] = {"fused": fused or None}
        if optim.name == "adamw_8bit":
            kind, options = _adamw_8bit(), {}
        parts.append(
            kind(
                list(_groups(rest, scales)),
                lr=optim.lr,
                betas=(optim.beta1, optim.beta2),
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                **options,
            )
        )
    return Optimizers(parts)


def _adamw_8bit() -> Any:
    """Import the class.

    Raises:
        ConfigError: `config.extra`: torchao is missing.
    """
    try:
        from torchao.optim import AdamW8bit
    except (ImportError, OSError) as error:
        why = f"learner.optim.name = 'adamw_8bit' needs the package torchao: {error}"
        raise ConfigError("config.extra", why, remedy="pip install 'asyncrl[optim-8bit]'") from error
    return AdamW8bit


def _groups(parameters: Iterable[nn.Parameter], scales: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """Yield groups of one mesh and one factor on the learning rate."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = getattr(parameter, "device_mesh", None), scales[id(parameter)]
        found.setdefault(key, []).append(parameter)
    for (_, scale), group in found.items():
        yield {"params": group, "lr_scale": scale}

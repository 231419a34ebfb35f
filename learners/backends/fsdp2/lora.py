"""LoRA adapters on a policy sharded by FSDP2: added by peft, trained alone, published and exported.

`W = W0 + s B A` with A `[r, in]`, B `[out, r]` and s = alpha / r (arXiv 2106.09685, equation 3) or alpha / sqrt(r)
(arXiv 2312.03732, equation 4). Guarantees:
1. only adapters have gradients, optimizer states and a place in checkpoints; the base is in `model.dtype`, adapters are
   float32;
2. every rank draws the same A from `run.seed`; B is 0, so training starts from `model.path`;
3. `off` gives the base alone, bit by bit, without a second model;
4. published numbers equal the computed ones: adapters in `model.dtype`, and merged weights are `W0 + s B A` in float32,
   rounded once, as an engine with adapters computes them;
5. a checkpoint stores the digest of its base weights and the form of its adapters; others are refused.

Only linear layers inside the decoder layers get adapters: no embeddings, head or fused experts. Dropout is active only
while gradients are computed.
Example: Qwen3 with 2 layers and rank 8: 14 pairs; checkpoints hold `model/...q_proj.lora_A.default.weight`, its two
moments and step count, and the same for B.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError
from learners.backends.base import DTYPES, WeightSpec, published_dtype, tensor_bytes
from learners.backends.fsdp2.sharded_module import OWN, Sharded
from learners.backends.vision import VISION_PARTS, vision_part
from learners.gang.gang import Gang
from learners.models.logprobs import gather_whole
from weightsync.encoding.adapter import A, AdapterConfig, B, adapter_product, config_text, peft_name

FOLDER = "adapter"  # below the merged export
_NAME = "default"  # peft's name of an unnamed adapter
_BASE = ".base_layer."  # peft's infix in names of weights under an adapter


class Lora:
    """The adapters of a model. `modules`: names of the linear layers, sorted; `identity`: stored in checkpoints."""

    def __init__(self, hf: Any, layers: Sequence[nn.Module], config: Config, gang: Gang) -> None:
        """Add adapters to a model with float32 weights, on the host. Collective.

        Raises:
            ConfigError: `config.model`: it has no such layers; `config.extra`: peft is missing.
        """
        wanted = config.learner.lora
        targets = find_targets(hf, layers, wanted.target_modules)
        self.settings = AdapterConfig(wanted.rank, wanted.alpha, targets, wanted.rslora)
        self._peft = _inject(hf, self.settings, dropout=wanted.dropout, seed=config.run.seed)
        found = {name: layer for name, layer in hf.named_modules() if hasattr(layer, A)}
        self.modules = tuple(sorted(found))
        self._layers = list(found.values())
        self._freeze(hf, config.model.dtype)
        folder = Path(config.model.path)
        base = gang.share(weights_digest(folder).encode() if gang.lead else None).decode()
        self.identity = json.dumps({"base": base, "adapter": config_text(self.settings)}, sort_keys=True)

    def _freeze(self, hf: Any, dtype: str) -> None:
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(_is_adapter(name))
            parameter.data = parameter.data.to(torch.float32 if _is_adapter(name) else DTYPES[dtype][1])

    def quiet(self) -> None:
        """Disable dropout until the next training pass."""
        for layer in self._layers:
            layer.lora_dropout.eval()

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Use the base alone. Peft's own switch would also freeze the adapters."""
        self._switch(off=True)
        try:
            yield
        finally:
            self._switch(off=False)

    def _switch(self, *, off: bool) -> None:
        layers: Sequence[Any] = self._layers
        for layer in layers:
            layer._disable_adapters = off

    # ------------------------------------------------------------ what leaves

    def pairs(self) -> Iterator[str]:
        """Yield the names of the adapters' parameters, in publishing order."""
        for module in self.modules:
            yield from (f"{module}.{half}.{_NAME}.weight" for half in (A, B))

    def save_settings(self, folder: Path, base: str) -> None:
        self._peft.base_model_name_or_path, self._peft.inference_mode = base, True
        self._peft.save_pretrained(str(folder))


class Leaving:
    """Publishes a model with adapters under the names of one without (`sharded_module.View`)."""

    def __init__(self, lora: Lora, *, merged: bool) -> None:
        """`merged`: with the adapters added; otherwise the base alone."""
        self._scaling = lora.settings.scaling if merged else None

    def name(self, own: str) -> str:
        """Return the published name of a parameter; empty: it is not published."""
        return "" if _is_adapter(own) else own.removeprefix(OWN).replace(_BASE, ".")

    def value(self, own: str, tensor: Tensor, parameter: Callable[[str], Tensor]) -> Tensor:
        """Return the published tensor of a parameter; others of its unit are whole as well."""
        if self._scaling is None or not own.endswith(f"{_BASE}weight"):
            return tensor
        module = own.removesuffix(f"{_BASE}weight")
        a, b = (parameter(f"{module}.{half}.{_NAME}.weight").detach().float() for half in (A, B))
        return adapter_product(a, b, scaling=self._scaling).add_(tensor).to(tensor.dtype)


class Adapters:
    def __init__(self, lora: Lora, sharded: Sharded, config: Config, gang: Gang) -> None:
        self.settings = lora.settings
        self._lora = lora
        self._sharded = sharded
        self._gang = gang
        self._dtype = DTYPES[config.model.dtype][1]
        self._sent_name, self._sent_dtype = DTYPES[published_dtype(config)]
        self._model = config.model.path
        self._base = Leaving(lora, merged=False)

    def specs(self) -> list[WeightSpec]:
        return [
            WeightSpec(peft_name(name), self._sent_name, tuple(self._sharded.root.get_parameter(OWN + name).shape))
            for name in self._lora.pairs()
        ]

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield peft's names and whole tensors, in compute precision. Collective."""
        self._sharded.reshard()
        for name in self._lora.pairs():
            parameter = self._sharded.root.get_parameter(OWN + name).detach()
            # Offloaded parameters are on the host, where the mesh's group may have no transport.
            yield peft_name(name), gather_whole(parameter.to(device=self._gang.device.torch_device, dtype=self._dtype))

    def iter_weights(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        for name, tensor in self.tensors():
            if self._gang.lead:
                yield name, tensor_bytes(tensor, self._sent_dtype, lend=False)

    def iter_base(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        for name, tensor in self._sharded.whole(settle, view=self._base):
            if self._gang.lead:
                yield name, tensor_bytes(tensor, self._sent_dtype, lend=settle is not None)

    def export(self, folder: Path) -> None:
        """Write the adapter in peft's format, by rank 0. Collective."""
        from safetensors.torch import save_file

        whole = {name: tensor.to(device="cpu", copy=True).contiguous() for name, tensor in self.tensors()}
        if self._gang.lead:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            self._lora.save_settings(folder, str(Path(self._model).absolute()))
        self._gang.barrier()  # bounded: the timeout of the group


def check(said: str, wanted: str) -> None:
    """Raise `learner.checkpoint` if a checkpoint's identity (empty: of all weights) is not the expected one."""
    if said == wanted:
        return
    if not said or not wanted:
        other = "of adapters (learner.lora.rank)" if said else "of all weights"
        raise AsyncRLError("learner.checkpoint", f"the checkpoint is {other}, this run is not", where="learner.lora")
    theirs, ours = json.loads(said), json.loads(wanted)
    if theirs["base"] != ours["base"]:
        why = f"its adapters are for weights {theirs['base'][:12]}, those of model.path are {ours['base'][:12]}"
    else:
        why = f"its adapters are {theirs['adapter']}, those of this run {ours['adapter']}"
    raise AsyncRLError("learner.checkpoint", why, where="learner.lora")


def weights_digest(folder: Path) -> str:
    """Return the blake3 digest of a model folder's weight files, in the order of their names."""
    from blake3 import blake3

    digest = blake3(max_threads=blake3.AUTO)
    for path in sorted(folder.glob("*.safetensors")):
        digest.update_mmap(path)
    return digest.hexdigest(length=16)


def find_targets(hf: Any, layers: Sequence[nn.Module], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the last parts of the names of linear layers that get an adapter, sorted.

    Raises:
        ConfigError: `config.model`: there are none, or some with that name lie outside the decoder layers.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    modules = [(name, module) for name, module in hf.named_modules() if not vision_part(f"{name}.")]
    linear = {name: id(module) in inside for name, module in modules if isinstance(module, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name, is_inside in linear.items() if is_inside})
    if unknown := sorted(set(wanted) - set(known)):
        what = f"no linear layer of its decoder layers is called {unknown[0]!r}"
        raise ConfigError("config.model", f"{what}: there are {', '.join(known) or 'none'}", where="learner.lora")
    targets = tuple(sorted(set(wanted) or known))
    outside = [name for name, is_inside in linear.items() if not is_inside and name.rpartition(".")[2] in targets]
    if not targets or outside:
        why = f"{outside[0]} lies outside the decoder layers" if outside else "its decoder layers have no linear layer"
        raise ConfigError("config.model", f"{type(hf).__name__}: {why}", where="learner.lora.target_modules")
    return targets


def _inject(hf: Any, settings: AdapterConfig, *, dropout: float, seed: int) -> Any:
    """Insert peft's layers into the model and return peft's settings."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("config.extra", f"learner.lora.rank needs peft: {error}", where="learner.lora") from error
    sees = any(vision_part(f"{name}.") for name, _ in hf.named_modules())
    alpha: Any = settings.lora_alpha  # other readers of the file expect an integer
    made = LoraConfig(
        r=settings.r,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=dropout,
        target_modules=list(settings.target_modules),
        exclude_modules=rf".*({'|'.join(map(re.escape, VISION_PARTS))}).*"
        if sees
        else None,  # it may have the same names
        use_rslora=settings.use_rslora,
        bias="none",
        task_type=settings.task_type,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(made, hf)
    made.target_modules = list(settings.target_modules)  # sorted; peft stores a set
    return made


def _is_adapter(name: str) -> bool:
    return name.endswith((f".{A}.{_NAME}.weight", f".{B}.{_NAME}.weight"))

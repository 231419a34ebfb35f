"""Encoding `adapter`: a version that is a LoRA adapter on top of weights that the receiver holds.

LoRA is arXiv:2106.09685, equation 3: `W = W0 + (alpha / r) B A` with A
`[r, in]` and B `[out, r]`; `use_rslora` divides by sqrt(r) (arXiv:2312.03732, equation 4). Guarantees:
1. tensors carry the names that peft saves (`base_model.model.<module>.lora_A.weight`), sorted by module, A before B, so
   that an engine can write them to an adapter folder as they are;
2. the configuration is peft's `adapter_config.json` in one canonical form: equal settings, equal text; it and the
   digest of the base are part of the version's digest (`weightsync.plan.digest.whole_digest`);
3. `check_adapter` lets nothing pass that has a tensor without its partner, another rank than announced, a module that
   is not a target, or no base.
No torch. It takes LoRA of linear layers: not embeddings, DoRA, trained biases, `modules_to_save` or ranks per module;
`plan_adapter` refuses them by name.

Example: r 8, alpha 16 on q_proj `[2048, 1024]`: A `[8, 1024]` and B `[2048, 8]`, 24,576 elements for 2,097,152; W gains
2 B A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from asyncrl.errors import UNREADABLE, HandshakeError
from asyncrl.wire import Manifest, Tensor
from weightsync.encoding import ADAPTER
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.plan.digest import whole_digest

PREFIX = "base_model.model."
A, B = "lora_A", "lora_B"
_SAVED = re.compile(rf"(?:{re.escape(PREFIX)})?(.+)\.(lora_A|lora_B)(?:\.default)?\.weight")


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What peft's `adapter_config.json` says of a LoRA adapter, as far as it matters here."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]  # last parts of module names, sorted
    use_rslora: bool = False
    bias: str = "none"
    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class _Product(Protocol):
    def __matmul__(self, other: Any) -> Any: ...


Matrix = TypeVar("Matrix", bound=_Product)


def config_text(config: AdapterConfig) -> str:
    """The configuration for `Manifest.adapter`: JSON with sorted keys and targets.

    Raises:
        ValueError: no adapter that this encoding carries.
    """
    _check_config(config)
    ordered = msgspec.structs.replace(config, target_modules=tuple(sorted(set(config.target_modules))))
    return msgspec.json.encode(ordered, order="sorted").decode()


def read_config(text: str) -> AdapterConfig:
    """The configuration of a manifest.

    Raises:
        HandshakeError: `sync.plan`, it is none.
    """
    try:
        config = msgspec.json.decode(text, type=AdapterConfig)
        _check_config(config)
    except UNREADABLE as error:
        raise HandshakeError("sync.plan", f"adapter configuration: {error}", where="weightsync") from None
    return config


def _check_config(config: AdapterConfig) -> None:
    if config.r < 1 or not math.isfinite(config.lora_alpha) or not config.target_modules:
        raise ValueError(f"r {config.r}, alpha {config.lora_alpha}, targets {config.target_modules}")
    if config.bias != "none" or config.peft_type != "LORA":
        raise ValueError(f"{config.peft_type} with bias {config.bias!r}: only LoRA without biases is carried")


# ---------------------------------------------------------------- sending


def plan_adapter(specs: Iterable[TensorSpec], config: AdapterConfig, *, bucket_bytes: int) -> Plan:
    """The layout of an adapter's tensors.

    Args:
        specs: all tensors of the adapter, in any order; names with or without peft's prefix and adapter name.

    Raises:
        ValueError: a tensor that is not LoRA of a linear layer, or `check_adapter`'s reasons.
    """
    _check_config(config)
    named = [TensorSpec(saved_name(spec.name), spec.dtype, spec.shape) for spec in specs]
    plan = plan_buckets(sorted(named, key=lambda spec: _module_and_half(spec.name)), bucket_bytes=bucket_bytes)
    _pair(plan.tensors, config)
    return plan


def saved_name(name: str) -> str:
    """The name that peft saves an adapter's tensor by, from that in the module or from itself.

    Raises:
        ValueError: it is no tensor of a LoRA of a linear layer.
    """
    module, half = _module_and_half(name)
    return f"{PREFIX}{module}.{half}.weight"


# ---------------------------------------------------------------- receiving


class Pair(msgspec.Struct, frozen=True):
    """The two tensors that change one module: a `[r, in]`, b `[out, r]`."""

    module: str
    a: Tensor
    b: Tensor


def check_adapter(manifest: Manifest, tensors: Sequence[Tensor], *, held: str) -> tuple[AdapterConfig, list[Pair]]:
    """What an adapter changes, in the order of its modules; `held`: the digest of the full weights that are there.

    Raises:
        HandshakeError: `sync.plan`, it is no adapter, not one for these weights, or its digest leaves something out.
    """
    config = read_config(manifest.adapter)
    try:
        if manifest.encoding != ADAPTER or not manifest.base:
            raise ValueError(f"encoding {manifest.encoding!r}, base {manifest.base!r}")
        if whole_digest(manifest.bucket_digests, base=manifest.base, adapter=manifest.adapter) != manifest.digest:
            raise ValueError("buckets, base and configuration do not make its digest")
        if manifest.base != held:
            raise ValueError(f"for weights {manifest.base}, here are {held or 'none'}")
        return config, _pair(tensors, config)
    except ValueError as error:
        raise HandshakeError("sync.plan", f"adapter {manifest.version}: {error}", where="weightsync") from None


def added(a: Matrix, b: Matrix, *, scaling: float) -> Matrix:
    """What a pair adds to its weight: `scaling B A`, `[out, in]`, for numpy arrays and torch tensors alike; in the
    precision that they are given in (float32, then one cast of the sum, is what a merge wants)."""
    product: Matrix = (b @ a) * scaling
    return product


def _pair(tensors: Sequence[Tensor], config: AdapterConfig) -> list[Pair]:
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        module, half = _module_and_half(tensor.name)
        if tensor.name != saved_name(tensor.name):
            raise ValueError(f"{tensor.name}: {saved_name(tensor.name)} is its name")
        if module.rpartition(".")[2] not in config.target_modules:
            raise ValueError(f"{tensor.name}: its module is no target ({', '.join(config.target_modules)})")
        halves.setdefault(module, {})[half] = tensor
    return [_checked(module, found, config.r) for module, found in halves.items()]


def _checked(module: str, found: dict[str, Tensor], rank: int) -> Pair:
    if len(found) != 2:
        raise ValueError(f"{module}: {next(iter(found))} without its partner")
    a, b = found[A], found[B]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank or a.dtype != b.dtype:
        raise ValueError(f"{module}: A {a.dtype} {a.shape} and B {b.dtype} {b.shape} are not of rank {rank}")
    return Pair(module, a, b)


def _module_and_half(name: str) -> tuple[str, str]:
    match = _SAVED.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is no tensor of a LoRA of a linear layer")
    return match[1], match[2]

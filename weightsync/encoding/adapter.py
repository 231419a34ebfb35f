"""Encoding `adapter`: a version that is a LoRA adapter on top of weights that the receiver holds.

LoRA is arXiv:2106.09685, equation 3: `W = W0 + (alpha / r) B A` with A `[r, in]` and B `[out, r]`; `use_rslora` divides
by sqrt(r) (arXiv:2312.03732, equation 4). Guarantees:
1. tensors have the names that peft saves (`base_model.model.<module>.lora_A.weight`), sorted by module, A before B, so
   that an engine can write them to an adapter folder unchanged;
2. the configuration is peft's `adapter_config.json` in one canonical form: equal settings, equal text; it and the
   digest of the base are part of the version's digest (`weightsync.plan.digest.version_digest`);
3. `check_adapter` refuses a tensor without its partner, a rank other than the announced one, a module that is not a
   target, and a missing base.
No torch. It supports LoRA of linear layers: not embeddings, DoRA, trained biases, `modules_to_save` or ranks per
module; `plan_adapter` refuses them by name.

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
from weightsync.plan.digest import version_digest

PREFIX = "base_model.model."
A, B = "lora_A", "lora_B"
_SAVED = re.compile(rf"(?:{re.escape(PREFIX)})?(.+)\.(lora_A|lora_B)(?:\.default)?\.weight")


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The used fields of peft's `adapter_config.json` of a LoRA adapter."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]  # last parts of module names, sorted
    use_rslora: bool = False
    bias: str = "none"
    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"

    @property
    def scaling(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class _Product(Protocol):
    def __matmul__(self, other: Any) -> Any: ...


Matrix = TypeVar("Matrix", bound=_Product)


def config_text(config: AdapterConfig) -> str:
    """The configuration for `Manifest.adapter`: JSON with sorted keys and targets.

    Raises:
        ValueError: this encoding does not support the adapter.
    """
    _check_config(config)
    ordered = msgspec.structs.replace(config, target_modules=tuple(sorted(set(config.target_modules))))
    return msgspec.json.encode(ordered, order="sorted").decode()


def read_config(text: str) -> AdapterConfig:
    """The configuration of a manifest.

    Raises:
        HandshakeError: `sync.plan`, it is not valid.
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
        raise ValueError(f"{config.peft_type} with bias {config.bias!r}: only LoRA without biases is supported")


# ---------------------------------------------------------------- sending


def plan_adapter(specs: Iterable[TensorSpec], config: AdapterConfig, *, bucket_bytes: int) -> Plan:
    """The layout of an adapter's tensors.

    Args:
        specs: all tensors of the adapter, in any order; names with or without peft's prefix and adapter name.

    Raises:
        ValueError: a tensor that is not LoRA of a linear layer, or `check_adapter`'s reasons.
    """
    _check_config(config)
    named = [TensorSpec(peft_name(spec.name), spec.dtype, spec.shape) for spec in specs]
    plan = plan_buckets(sorted(named, key=lambda spec: _module_and_half(spec.name)), bucket_bytes=bucket_bytes)
    _pair(plan.tensors, config)
    return plan


def peft_name(name: str) -> str:
    """The name under which peft saves an adapter's tensor, from its name in the module or from itself.

    Raises:
        ValueError: it is not a LoRA tensor of a linear layer.
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
    """The pairs of an adapter, in the order of its modules; `held`: the digest of the full weights of the receiver.

    Raises:
        HandshakeError: `sync.plan`, it is not an adapter, not for these weights, or its digest is wrong.
    """
    config = read_config(manifest.adapter)
    try:
        if manifest.encoding != ADAPTER or not manifest.base:
            raise ValueError(f"encoding {manifest.encoding!r}, base {manifest.base!r}")
        if version_digest(manifest.bucket_digests, base=manifest.base, adapter=manifest.adapter) != manifest.digest:
            raise ValueError("buckets, base and configuration do not make its digest")
        if manifest.base != held:
            raise ValueError(f"for weights {manifest.base}, here are {held or 'none'}")
        return config, _pair(tensors, config)
    except ValueError as error:
        raise HandshakeError("sync.plan", f"adapter {manifest.version}: {error}", where="weightsync") from None


def adapter_product(a: Matrix, b: Matrix, *, scaling: float) -> Matrix:
    """The change of a weight by a pair: `scaling B A`, `[out, in]`, for numpy arrays and torch tensors, in the
    precision of the inputs (for a merge: float32, then one cast of the sum)."""
    product: Matrix = (b @ a) * scaling
    return product


def _pair(tensors: Sequence[Tensor], config: AdapterConfig) -> list[Pair]:
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        module, half = _module_and_half(tensor.name)
        if tensor.name != peft_name(tensor.name):
            raise ValueError(f"{tensor.name}: {peft_name(tensor.name)} is its name")
        if module.rpartition(".")[2] not in config.target_modules:
            raise ValueError(f"{tensor.name}: its module is no target ({', '.join(config.target_modules)})")
        halves.setdefault(module, {})[half] = tensor
    return [_make_pair(module, found, config.r) for module, found in halves.items()]


def _make_pair(module: str, found: dict[str, Tensor], rank: int) -> Pair:
    if len(found) != 2:
        raise ValueError(f"{module}: {next(iter(found))} without its partner")
    a, b = found[A], found[B]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank or a.dtype != b.dtype:
        raise ValueError(f"{module}: A {a.dtype} {a.shape} and B {b.dtype} {b.shape} are not of rank {rank}")
    return Pair(module, a, b)


def _module_and_half(name: str) -> tuple[str, str]:
    match = _SAVED.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not a LoRA tensor of a linear layer")
    return match[1], match[2]

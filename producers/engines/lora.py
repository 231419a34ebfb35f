"""Adapter versions: a low-rank update that is added to the base weights once, so that decoding costs nothing more.

Called by `producers.engines.weights`. `W = W0 + s B A` (Hu et al. 2021, arXiv 2106.09685, section 4.1) with
`s = lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora` (arXiv 2312.03732). Guarantees:
1. W0 is kept, and every version is computed from it: a hundred versions one after the other leave no rounding behind;
   modules that a later adapter leaves out get W0 back;
2. an adapter of another base is refused (`sync.failed`) before anything is taken;
3. what the adapter names must be weights of this model of fitting shapes, A and B both there, with one rank, and the
   configuration one that the formula covers (no DoRA, no own ranks or alphas, no biases, no saved modules, no
   transposed weights): else `sync.plan`;
4. the product is made beside the decode loop, in float32, and rounded once to the dtype of W0. `attest` compares what
   the model holds with what was made.
Names: `[base_model.model.]MODULE.lora_A[.default].weight` `[r, in]` and `lora_B` `[out, r]`; W is `MODULE.weight`.

Example: W0 `[2, 2]` = 0, r = 1, alpha = 2, A = [[1, 2]], B = [[3], [0]]: W = 2 B A = [[6, 12], [0, 0]].
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from asyncrl.errors import UNREADABLE, AsyncRLError, WorkError
from asyncrl.wire import Buffer, Manifest, Tensor
from producers.engines.weights import DTYPES, Layout, Update, bytes_of
from weightsync.digest import Digest, whole_digest

if TYPE_CHECKING:
    from producers.engines.weights import ModelWeights

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
#: Settings that change the formula, with the values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,), "fan_in_fan_out": (False,), "bias": ("none",), "modules_to_save": (None, []),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "peft_type": ("LORA",), "lora_bias": (False,),
}  # fmt: skip


class AdapterUpdate:
    """One version of an adapter, on its way or in force."""

    def __init__(self, weights: ModelWeights, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Raises `sync.failed` on another base, `sync.plan` on an adapter that this model or formula cannot take."""
        if not manifest.base or manifest.base != weights.base:
            raise WorkError(
                "sync.failed", f"version {manifest.version} is an adapter of the base {manifest.base[:12] or '?'}, "
                f"the model holds {weights.base[:12] or 'none'}",
            )  # fmt: skip
        self.manifest = manifest
        self.layout = Layout(manifest, tensors)
        self.missing = set(range(len(self.layout.buckets)))
        self.products: dict[str, str] = {}  # parameter -> digest of the bytes that were computed for it
        self._weights = weights
        self._pairs = pairs_of(tensors, weights)
        self._scale = scale_of(manifest.adapter, rank=next(iter(self._pairs.values()))[0].shape[0])
        self._values = {item.name: torch.empty(item.shape, dtype=DTYPES[item.dtype]) for item in tensors}
        self._merged: dict[str, torch.Tensor] = {}

    def apply(self, number: int, data: Buffer) -> None:
        """Copy the tensors of one bucket out of its bytes."""
        self.layout.fill(number, data, self.held)

    def held(self, name: str) -> torch.Tensor:
        """A matrix of the adapter."""
        return self._values[name]

    def complete(self) -> None:
        """Compute the new weights of every module, beside the old ones."""
        for name, (left, right) in self._pairs.items():
            base = self._weights.base_value(name)
            a, b = (self._values[item.name].to(base.device, torch.float32) for item in (left, right))
            merged = self._weights.room.take(name, base.shape, base.dtype, base.device)
            merged.copy_(torch.addmm(base.float(), b, a, alpha=self._scale))
            self._merged[name] = merged
            self.products[name] = _digest(merged)

    def exchange(self) -> None:
        """New storages for old; W0 is kept."""
        kept = self._weights.kept
        for name in [name for name in kept if name not in self._merged]:
            self._exchange(name, kept.pop(name))
        for name, value in self._merged.items():
            first = name not in kept
            old = self._exchange(name, value, spare=not first)
            if first:
                kept[name] = old
        self._merged = {}

    def _exchange(self, name: str, value: torch.Tensor, *, spare: bool = True) -> torch.Tensor:
        parameter = self._weights.parameter(name)
        assert parameter is not None
        old, parameter.data = parameter.data, value
        if spare:
            self._weights.room.give(name, old)
        return old


def pairs_of(tensors: Sequence[Tensor], weights: ModelWeights) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by the name of the parameter that they change. Raises `sync.plan`."""
    sides: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        found = _NAME.fullmatch(tensor.name)
        if found is None or tensor.dtype not in DTYPES or len(tensor.shape) != 2:
            raise AsyncRLError("sync.plan", f"{tensor.name} {tensor.dtype} {tensor.shape} is no matrix of an adapter")
        sides.setdefault(f"{found['module']}.weight", {})[found["side"]] = tensor
    pairs = {}
    for name, pair in sides.items():
        parameter = weights.parameter(name)
        if parameter is None:
            raise AsyncRLError("sync.plan", f"an adapter of {name!r}, which this model does not have")
        if len(pair) != 2:
            raise AsyncRLError("sync.plan", f"{name}: the adapter lacks one of A and B")
        a, b = pair["A"], pair["B"]
        if a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != tuple(parameter.shape):
            raise AsyncRLError(
                "sync.plan",
                f"{name} {tuple(parameter.shape)}: A is {a.shape} and B {b.shape}, not [r, in] and [out, r]",
            )
        pairs[name] = (a, b)
    if len({a.shape[0] for a, _ in pairs.values()}) != 1:
        raise AsyncRLError("sync.plan", "an adapter of no module, or of several ranks")
    if len({id(weights.parameter(name)) for name in pairs}) != len(pairs):
        raise AsyncRLError("sync.plan", "two names of one tied weight in the adapter")
    return pairs


def scale_of(adapter: str, *, rank: int) -> float:
    """What B A is multiplied with, from the adapter's configuration as JSON. Raises `sync.plan`."""
    try:
        config = msgspec.json.decode(adapter, type=dict[str, Any])
        alpha, r = float(config["lora_alpha"]), int(config.get("r", rank))
    except (KeyError, TypeError, *UNREADABLE) as error:
        raise AsyncRLError("sync.plan", f"the adapter's configuration: {type(error).__name__}: {error}") from None
    odd = [key for key, plain in _PLAIN.items() if key in config and config[key] not in plain]
    if odd or r != rank or not math.isfinite(alpha):
        why = f"{odd[0]} = {config[odd[0]]!r}" if odd else f"r = {r} for matrices of rank {rank}, alpha = {alpha}"
        raise AsyncRLError("sync.plan", f"an adapter with {why} is not for this engine")
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def attest(update: Update, parameters: Mapping[str, torch.nn.Parameter], *, base: str) -> str:
    """Digest of the adapter in force over what is held: A, B, the base, and the products in the model. The model's own
    bytes are not those of the manifest, so they are compared with what was computed; where they differ, the digest is
    one that nobody has published."""
    assert isinstance(update, AdapterUpdate)
    digests = [update.layout.bucket_digest(number, update.held) for number in range(len(update.layout.buckets))]
    wrong = [name for name, digest in update.products.items() if _digest(parameters[name].data) != digest]
    return whole_digest([*digests, *wrong], base=base, adapter=update.manifest.adapter)


def _digest(tensor: torch.Tensor) -> str:
    digest = Digest()
    names = {dtype: name for name, dtype in DTYPES.items()}
    digest.update(bytes_of(tensor, names[tensor.dtype]).data)
    return digest.hexdigest()

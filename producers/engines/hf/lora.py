"""Adapter versions: a low-rank update that is added to the base weights once, so that decoding costs nothing more.

`weightsync.encoding.adapter` defines adapters. `W = W0 + s B A` (arXiv 2106.09685, equation 3; s as in
`AdapterConfig.scaling`). Guarantees:
1. W0 is kept, and every version is computed from it: a hundred versions leave no accumulated rounding; modules that a
   later adapter omits get W0 back;
2. an adapter of another base is refused (`sync.failed`) before anything is taken: the base may still come;
3. an adapter for a missing linear layer, another shape, or a shared weight (tied embeddings, which would change as
   well) is `sync.plan`;
4. the product is computed while decoding goes on, in float32, and rounded once to the dtype of W0. `attest` compares
   the model with the computed product.

Example: W0 `[2, 2]` = 0, r = 1, alpha = 2, A = [[1, 2]], B = [[3], [0]]: W = 2 B A = [[6, 12], [0, 0]].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.wire import Buffer, Manifest, Tensor
from producers.engines.hf.layout import DTYPES, HostBytes, Layout, Room
from weightsync.encoding.adapter import Pair, adapter_product, check_adapter
from weightsync.plan.digest import version_digest


class BaseWeights(Protocol):
    """The weights that an adapter is added to."""

    base: str  # their digest
    kept: dict[str, torch.Tensor]  # base values of the parameters that an adapter changed

    host: HostBytes

    @property
    def room(self) -> Room: ...

    def base_value(self, name: str) -> torch.Tensor: ...

    def parameter(self, name: str) -> torch.nn.Parameter | None: ...

    def linear(self, module: str) -> torch.nn.Parameter | None:
        """The weight of a linear layer; None if there is none of that name, or it shares its weight."""


class AdapterUpdate:
    """One version of an adapter, pending or current."""

    def __init__(self, weights: BaseWeights, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Raises `sync.failed` on another base, `sync.plan` on an unsupported adapter."""
        if not manifest.base or manifest.base != weights.base:
            raise WorkError(
                "sync.failed",
                f"version {manifest.version} is an adapter of the base {manifest.base[:12] or '?'}, "
                f"the model holds {weights.base[:12] or 'none'}",
            )
        self.manifest = manifest
        self.layout = Layout(manifest, tensors, HostBytes(torch.device("cpu")))
        self.missing = set(range(len(self.layout.buckets)))
        self.products: dict[str, str] = {}  # parameter -> digest of the bytes that were computed for it
        self._weights = weights
        config, pairs = check_adapter(manifest, tensors, held=weights.base)
        self._scaling = config.scaling
        self._pairs = pairs_by_parameter(pairs, weights)
        self._values = {item.name: torch.empty(item.shape, dtype=DTYPES[item.dtype]) for item in tensors}
        self._merged: dict[str, torch.Tensor] = {}

    def apply(self, number: int, data: Buffer) -> None:
        """Copy the tensors of one bucket out of its bytes."""
        self.layout.fill(number, data, self.tensor_for)

    def tensor_for(self, name: str) -> torch.Tensor:
        """A matrix of the adapter."""
        return self._values[name]

    def complete(self) -> None:
        """Compute the new weights of every module, next to the old ones."""
        for name, pair in self._pairs.items():
            base = self._weights.base_value(name)
            a, b = (self._values[item.name].to(base.device, torch.float32) for item in (pair.a, pair.b))
            merged = self._weights.room.take(name, base.shape, base.dtype, base.device)
            merged.copy_(adapter_product(a, b, scaling=self._scaling).add_(base))
            self._merged[name] = merged
            self.products[name] = self._weights.host.digest([merged])

    def exchange(self) -> None:
        """Exchange the storages; W0 is kept."""
        kept = self._weights.kept
        for name in [name for name in kept if name not in self._merged]:
            self._exchange(name, kept.pop(name))
        for name, value in self._merged.items():
            first = name not in kept
            old = self._exchange(name, value, spare=not first)
            if first:
                kept[name] = old
        self._merged = {}

    def attest(self, parameters: Mapping[str, torch.nn.Parameter], *, base: str) -> str:
        """Digest of the adapter over what the model holds: A, B, the base, and the products. The bytes of the model are
        not those of the manifest, so they are compared with the computed ones; if they differ, so does the digest."""
        host = self._weights.host
        digests = [self.layout.bucket_digest(number, self.tensor_for) for number in range(len(self.layout.buckets))]
        wrong = [name for name, digest in self.products.items() if host.digest([parameters[name].data]) != digest]
        return version_digest([*digests, *wrong], base=base, adapter=self.manifest.adapter)

    def _exchange(self, name: str, value: torch.Tensor, *, spare: bool = True) -> torch.Tensor:
        parameter = self._weights.parameter(name)
        assert parameter is not None
        old, parameter.data = parameter.data, value
        if spare:
            self._weights.room.give(name, old)
        return old


def pairs_by_parameter(pairs: Sequence[Pair], weights: BaseWeights) -> dict[str, Pair]:
    """The pairs by the parameter that they change. Raises `sync.plan` if one does not fit this model."""
    found: dict[str, Pair] = {}
    for pair in pairs:
        parameter = weights.linear(pair.module)
        if parameter is None:
            raise AsyncRLError(
                "sync.plan", f"an adapter of {pair.module!r}: no linear layer with a weight of its own here"
            )
        if (pair.b.shape[0], pair.a.shape[1]) != tuple(parameter.shape) or pair.a.dtype not in DTYPES:
            raise AsyncRLError(
                "sync.plan",
                f"{pair.module}: A is {pair.a.dtype} {pair.a.shape}, B {pair.b.shape}, the weight "
                f"{tuple(parameter.shape)}",
            )
        found[f"{pair.module}.weight"] = pair
    return found

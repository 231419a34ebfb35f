"""Inputs of one case as tensors, in the type of the run and with NaN outside the mask where the run is poisoned.

Example: `inputs.flat("log_prob")` is the `[S, T]` list of the case as `[N]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MASKS = ("response_mask", "mask")


class Inputs:
    """`raw` is the JSON of the case; every tensor is new at each call, so that a row may ask for gradients."""

    def __init__(self, raw: Mapping[str, Any], *, dtype: torch.dtype = torch.float64, poison: bool = False) -> None:
        self.raw = dict(raw)
        self.dtype = dtype
        self._poison = poison

    def __contains__(self, name: str) -> bool:
        return name in self.raw

    def __getitem__(self, name: str) -> Any:
        """The value as the file has it."""
        return self.raw[name]

    def real(self, name: str) -> Tensor:
        """Real numbers in the layout of the case. Poisoned: NaN where the layout begins as the mask's and it is 0."""
        values = torch.tensor(self.raw[name], dtype=self.dtype)
        if not self._poison or not any(mask in self.raw for mask in MASKS):
            return values
        mask = self.mask()
        if values.shape[: mask.ndim] != mask.shape:
            return values
        keep = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
        return torch.where(keep, values, torch.nan)

    def rows(self, name: str) -> Tensor:
        """Real numbers that do not stand at tokens; never poisoned."""
        return torch.tensor(self.raw[name], dtype=self.dtype)

    def maybe(self, name: str) -> Tensor | None:
        """`real`, or None where the case has no such input."""
        return self.real(name) if name in self.raw else None

    def flat(self, name: str) -> Tensor:
        """`[N]`: the rows after each other, masked places included."""
        return self.real(name).flatten()

    def per_token(self, name: str) -> Tensor:
        """One number per row, repeated for every token: `[N]`."""
        return self.rows(name)[:, None].expand(self.mask().shape).flatten()

    def whole(self, name: str) -> Tensor:
        """int64, as the file has it."""
        return torch.tensor(self.raw[name], dtype=torch.int64)

    def mask(self, name: str | None = None) -> Tensor:
        """bool, as the file has it: `[S, T]`. Without a name the first of `MASKS`."""
        found = name or next(mask for mask in MASKS if mask in self.raw)
        return torch.tensor(self.raw[found]).bool()

    def sequences(self, name: str | None = None) -> Tensor:
        """`[N]`: the number of the row of every token."""
        mask = self.mask(name)
        return torch.arange(mask.shape[0])[:, None].expand(mask.shape).flatten()

    def groups(self, name: str = "index") -> Tensor:
        """`[S]`: groups numbered in order of appearance."""
        numbers: dict[Any, int] = {}
        return torch.tensor([numbers.setdefault(group, len(numbers)) for group in self.raw[name]], dtype=torch.int64)

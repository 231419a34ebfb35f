"""Attention of a decode step in bands: short rows do not read as far as the longest one.

The slots of a step are in one block, and one call over it reads every row up to the longest: 63 samples of 60 tokens
next to one of 7000 cost as much as 64 of 7000. `slot_cache` plans the bands. Guarantees:
1. every row gets the result of one call over the whole block: the first band is all rows up to a short length, its
   results for longer rows are dropped; each further band is computed from its rows alone;
2. it acts only if K is the view of a `SlotCache` (it has `bands`); everything else, also prefills and models that
   change K and V before they attend, goes to transformers' "sdpa" unchanged;
3. a model without a configurable attention function keeps its own;
4. several tokens of a row attend without a copy of K and V for each head, which transformers makes for more than one.

Example: lengths 60 x 63 and 7000, planned: all 64 rows up to 64, then one row up to 7008: 4,096 + 7,008 positions are
read instead of 448,512.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: The name for transformers. It contains "sdpa", so that transformers itself refuses models without it.
IN_BANDS = "sdpa_in_bands"
STEP = 16  # lengths are rounded up to this, so that shapes repeat
COPIED = 3  # a row outside the first band is gathered: read, written and read again
CALL = 4096  # positions that cost as much as one more call of every layer
MOST = 4  # bands


class Band(NamedTuple):
    """These rows read the first `visible` positions; `rows` None: all of them, as a view."""

    rows: Tensor | None
    visible: int


def plan(lengths: npt.NDArray[np.int64], *, device: torch.device) -> list[Band]:
    """Bands for rows of these lengths `[live]`, the shortest first; one if a split does not pay.

    Each border is the one that saves most above the border before.
    """
    wide = -(-lengths // STEP) * STEP
    bands = [Band(None, int(wide.max()))]
    rows = np.arange(len(wide))
    while len(bands) < MOST and len(rows) * bands[-1].visible > CALL:  # else a split saves less than a call costs
        border = _border(wide[rows], gathered=len(bands) > 1)
        if border is None:
            break
        bands[-1] = bands[-1]._replace(visible=border)
        rows = rows[wide[rows] > border]
        bands.append(Band(torch.from_numpy(rows).to(device), int(wide[rows].max())))
    return bands


def _border(wide: npt.NDArray[np.int64], *, gathered: bool) -> int | None:
    """The length at which to split these rows; None if it does not pay."""
    choices, counts = np.unique(wide, return_counts=True)
    if len(choices) < 2:
        return None
    longer = len(wide) - np.cumsum(counts)[:-1]  # rows above each choice but the last
    each = COPIED if gathered else 1
    costs = each * len(wide) * choices[:-1] + COPIED * longer * choices[-1] + CALL
    best = int(costs.argmin())
    return int(choices[best]) if costs[best] < each * len(wide) * choices[-1] else None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: heads `[live, H, fed, D]` to `[live, fed, H, D]`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    bands: list[Band] | None = getattr(key, "bands", None)
    if bands is None or attention_mask is None or given.get("position_bias") is not None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
        return whole
    sdpa = _attend_grouped if query.shape[2] > 1 else sdpa_attention_forward
    out = torch.empty(0)
    for rows, visible in bands:
        keys, values, mask = key[:, :, :visible], value[:, :, :visible], attention_mask[..., :visible]
        if rows is None:
            out = sdpa(module, query, keys, values, mask, **given)[0]
        else:
            keys, values, mask = (part.index_select(0, rows) for part in (keys, values, mask))
            out[rows] = sdpa(module, query.index_select(0, rows), keys, values, mask, **given)[0]
    return out, None


def _attend_grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **given: Any
) -> tuple[Tensor, None]:
    """The tokens of all heads that share K and V attend as the tokens of one head; masks are the same for all heads."""
    del module
    live, heads, fed, width = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(live, key.shape[1], groups * fed, width)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=given.get("scaling")
    )
    return out.reshape(live, heads, fed, -1).transpose(1, 2).contiguous(), None


def install(model: Any) -> bool:
    """Let a model that was loaded with "sdpa" attend in bands; False if it cannot (it is not changed)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if not getattr(model, "_supports_attention_backend", False) or model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(IN_BANDS, attend)
    AttentionMaskInterface.register(IN_BANDS, sdpa_mask)
    model.set_attn_implementation(IN_BANDS)
    return bool(model.config._attn_implementation == IN_BANDS)


def remove(model: Any) -> None:
    """Restore "sdpa" after `install`."""
    if model.config._attn_implementation == IN_BANDS:
        model.set_attn_implementation("sdpa")

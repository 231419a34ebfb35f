"""Sharded training state in safetensors files: one per rank, read back by any number of ranks.

Called by `fsdp2`. Each rank writes the slab (a range of rows) that it holds of every tensor; where the slabs lie stands
as JSON in the file's metadata. `torch.distributed.checkpoint` would do the same, but it pickles its metadata and its
plans, and this project reads no pickle. Guarantees:
1. a file holds plain tensors and text: reading it runs no code;
2. loading fills every row of every tensor, or raises `learner.checkpoint`;
3. a tensor that every rank holds whole (a step count) is written by rank 0 alone.
It does not make the files durable or complete as a set: `learners.checkpoint` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.errors import AsyncRLError

_EXTRA = "extra/"


def slab(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a tensor (itself where it is not sharded) and the number of the first."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    placement = tensor.placements[0]
    if len(tensor.placements) != 1 or not isinstance(placement, Shard) or placement.dim != 0:
        raise AsyncRLError("internal", f"layout {tensor.placements} cannot be written as slabs of rows")
    local = tensor.to_local()
    # FSDP2 gives every rank ceil(rows / ranks) rows and the last ones what is left.
    each = -(-tensor.shape[0] // tensor.device_mesh.size())
    return local, min(each * tensor.device_mesh.get_local_rank(), tensor.shape[0])


def shard_path(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"shard_{rank:05d}.safetensors"


def save_shard(folder: Path, state: Mapping[str, Tensor], *, rank: int, extra: Mapping[str, Tensor]) -> Path:
    """Write this rank's slabs and its own `extra` tensors."""
    tensors: dict[str, Tensor] = {_EXTRA + name: value for name, value in extra.items()}
    starts: dict[str, int] = {}
    for name, value in state.items():
        if not isinstance(value, DTensor) and rank > 0:
            continue
        local, start = slab(value)
        if local.numel():
            tensors[name] = local.detach().cpu().contiguous()
            starts[name] = start
    path = shard_path(folder, rank)
    try:
        save_file(tensors, path, metadata={"starts": msgspec.json.encode(starts).decode()})
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    return path


def load_shards(folder: Path, state: Mapping[str, Tensor], *, rank: int, ranks: int) -> dict[str, Tensor]:
    """Fill the tensors of `state` in place; this rank's extras where the number of files equals `ranks`, else none."""
    paths = sorted(folder.glob("shard_*.safetensors"))
    missing = {name: slab(value)[0].shape[0] if value.dim() else 1 for name, value in state.items()}
    extra: dict[str, Tensor] = {}
    for number, path in enumerate(paths):
        with safe_open(path, framework="pt") as file:
            starts = msgspec.json.decode(file.metadata()["starts"], type=dict[str, int])
            for name in starts.keys() & state.keys():
                missing[name] -= _fill(state[name], file, name, starts[name])
            if number == rank and len(paths) == ranks:
                for key in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    if key.startswith(_EXTRA):
                        extra[key.removeprefix(_EXTRA)] = file.get_tensor(key)
    if short := [name for name, rows in missing.items() if rows]:
        raise AsyncRLError("learner.checkpoint", f"{short[0]} and {len(short) - 1} others are not in {folder}")
    return extra


def _fill(target: Tensor, file: Any, name: str, start: int) -> int:
    """Copy the rows that the file and this rank have in common; how many."""
    local, first = slab(target)
    if target.dim() == 0:
        local.copy_(file.get_tensor(name))
        return 1
    piece = file.get_slice(name)
    low = max(first, start)
    high = min(first + local.shape[0], start + piece.get_shape()[0])
    if high <= low:
        return 0
    with torch.no_grad():
        local[low - first : high - first].copy_(piece[low - start : high - start])
    return int(high - low)

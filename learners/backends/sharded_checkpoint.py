"""Sharded training state in safetensors files: one per rank, readable by any number of ranks in any layout.

Each rank writes its box (a range of every dimension) of every tensor; the starts of boxes are JSON in the file's
metadata. `torch.distributed.checkpoint` would need pickle.

Guarantees:
1. a file holds plain tensors and text: reading it runs no code;
2. loading fills every element of every tensor that is not optional, or raises `learner.checkpoint`; so does a file with
   weights of another model: more of them, or larger ones;
3. what several ranks hold (a replica, a step count) is written by one of them;
4. further boxes of a tensor in the same file are `NAME~1`, `NAME~2` and so on (experts of the backend megatron);
5. an 8-bit tensor is written in 8 bits (codes, scales, values of codes, as `NAME#part`): the same box is restored bit
   by bit, any other layout or optimizer gets the numbers.

`learners.checkpoints.checkpoint` makes the files durable and complete as a set.
Example: `[10, 4]` on 2 replicas of 2 ranks: rank 0 writes rows 0..4 with start 0, rank 1 rows 5..9 with start 5, ranks
2 and 3 nothing. With columns split over 2 ranks as well: rows 0..4, columns 2..3 have start [0, 2].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.errors import AsyncRLError

_EXTRA = "extra/"
BACK = "set the model back, or start anew in another run.dir"
WEIGHTS = "model/"  # in the names of parameters, after the prefix of a companion
#: Parts of an 8-bit tensor (arXiv 2110.02861): number i is `qmap[codes[i]] * scale[i // block]`.
PARTS = ("codes", "scale", "qmap")
#: In files: the first row of a slab of rows, or the first index of every dimension.
Start = int | tuple[int, ...]


class Box(NamedTuple):
    """A rank's part of a tensor: a range of every dimension. `first`: no earlier rank holds the same."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    first: bool


def local_box(tensor: Tensor) -> Box:
    """Return this rank's box of a tensor; the whole if the tensor is not distributed.

    Raises:
        AsyncRLError: `internal`: the part is not a box.
    """
    start, shape = [0] * tensor.dim(), list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(tuple(start), tuple(shape), first=True)
    mesh, later = tensor.device_mesh, []
    first = int(mesh.mesh.min()) == 0  # of several meshes with the same content, the one with rank 0
    for dimension, placement in enumerate(tensor.placements):
        place, size = mesh.get_local_rank(dimension), mesh.size(dimension)
        if isinstance(placement, Replicate):
            first = first and place == 0
        elif isinstance(placement, _StridedShard):
            # Apply it last: FSDP shards what tensor or expert parallelism has already split.
            later.append((placement.dim % tensor.dim(), place, size))
        elif isinstance(placement, Shard):
            _cut(start, shape, placement.dim % tensor.dim(), place, size)
        else:
            raise AsyncRLError("internal", f"layout {tensor.placements} cannot be written")
    for cut in later:
        _cut(start, shape, *cut)
    if tuple(shape) != tuple(tensor.to_local().shape):
        raise AsyncRLError("internal", f"layout {tensor.placements} of {tuple(tensor.shape)} is no box")
    return Box(tuple(start), tuple(shape), first)


def _cut(start: list[int], shape: list[int], dim: int, place: int, size: int) -> None:
    """Like `torch.chunk`: every rank gets ceil(length / size), the last ones the rest."""
    each, length = -(-shape[dim] // size), shape[dim]
    low = min(each * place, length)
    start[dim] += low
    shape[dim] = min(each, length - low)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return this rank's tensors for the file, by suffix of the name."""
    local = local_tensor(tensor)
    return {f"#{part}": getattr(local, part) for part in PARTS} if hasattr(local, "codes") else {"": local}


def own_name(key: str) -> str:
    """Return the name of the tensor that a box in a file belongs to."""
    return key.partition("~")[0]


def shard_path(folder: Path, rank: int) -> Path:
    return folder / f"shard_{rank:05d}.safetensors"


class HostShard(NamedTuple):
    """Content of a rank's file: tensors on the host, the starts of their boxes, and a note (`read_about`)."""

    rank: int
    tensors: dict[str, Tensor]
    starts: dict[str, Start]
    about: str = ""

    def save(self, folder: Path) -> Path:
        """Write the file and return its path."""
        path = shard_path(folder, self.rank)
        notes = {"about": self.about} if self.about else {}
        try:
            save_file(self.tensors, path, metadata={"starts": msgspec.json.encode(self.starts).decode(), **notes})
        except SafetensorError as error:  # for example a full disk
            raise OSError(str(error)) from error
        return path


def host_shard(
    state: Mapping[str, Tensor], *, rank: int, extra: Mapping[str, Tensor], copy: bool, about: str = ""
) -> HostShard:
    """Return this rank's boxes and its `extra` tensors; `copy`: no later update changes them."""
    tensors: dict[str, Tensor] = {_EXTRA + name: value for name, value in extra.items()}
    starts: dict[str, Start] = {}
    for name, value in state.items():
        if not isinstance(value, DTensor) and rank > 0:
            continue
        box, local = local_box(value), local_tensor(value)
        if local.numel() and box.first:
            for part, held in local_parts(value).items():
                tensors[name + part] = held.detach().to("cpu", copy=copy).contiguous()
            starts[name] = box.start if any(box.start[1:]) else (box.start or (0,))[0]
    return HostShard(rank, tensors, starts, about)


def read_about(folder: Path) -> str:
    """Return the note of `host_shard`; empty if there is none."""
    for path in sorted(folder.glob("shard_*.safetensors"))[:1]:
        with safe_open(path, framework="pt") as file:
            return str(file.metadata().get("about", ""))
    return ""


def load_shards(
    folder: Path, state: Mapping[str, Tensor], *, rank: int, ranks: int, optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """Fill the tensors of `state` in place; those in `optional` stay if the files lack them. Return this rank's extras
    if the number of files equals `ranks`.

    Raises:
        AsyncRLError: `learner.checkpoint`: the files lack elements, or hold the weights of another model.
    """
    paths = sorted(folder.glob("shard_*.safetensors"))
    boxes = {name: local_box(value) for name, value in state.items()}
    missing = {name: math.prod(box.shape) for name, box in boxes.items()}
    models = {name.partition(WEIGHTS)[0] + WEIGHTS for name in state if WEIGHTS in name}
    extra: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}  # of 8-bit tensors with other boxes in the file
    for number, path in enumerate(paths):
        with safe_open(path, framework="pt") as file:
            starts = msgspec.json.decode(file.metadata()["starts"], type=dict[str, Start])
            for key, start in starts.items():
                if (name := own_name(key)) in state:
                    missing[name] -= _fill(state[name], boxes[name], file, key, start, numbers)
                elif name.startswith(tuple(models)):
                    raise another_model(folder, name)
            if number == rank and len(paths) == ranks:
                for key in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    if key.startswith(_EXTRA):
                        extra[key.removeprefix(_EXTRA)] = file.get_tensor(key)
    if short := [name for name, elements in missing.items() if elements and name not in optional]:
        raise AsyncRLError("learner.checkpoint", f"{short[0]} and {len(short) - 1} others are not in {folder}")
    for name, values in numbers.items():
        local_tensor(state[name]).copy_(values)
    return extra


def check_box(name: str, end: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise `learner.checkpoint` if a box of a file ends outside the tensor."""
    if len(end) != len(shape) or any(map(operator.gt, end, shape)):
        what = f"the checkpoint has a larger {name} than the model, where it is {list(shape)}"
        raise AsyncRLError("learner.checkpoint", what, remedy=BACK)


def another_model(folder: Path, name: str) -> AsyncRLError:
    """The error for a checkpoint with weights that the model does not train."""
    what = f"{folder} has {name}, which is not trained: of another model, or frozen now (learner.vision)"
    return AsyncRLError("learner.checkpoint", what, remedy=BACK)


@torch.no_grad()
def _fill(target: Tensor, box: Box, file: Any, name: str, start: Start, numbers: dict[str, Tensor]) -> int:  # noqa: PLR0917
    """Copy the elements that the file and this rank share; return their number. 8-bit tensors go to `numbers`, unless
    the file has the same box.
    """
    local = local_tensor(target)
    if target.dim() == 0:
        local.copy_(file.get_tensor(name))
        return 1
    narrow, written = "#codes" in local_parts(target), name + "#codes" in file.keys()  # noqa: SIM118
    piece = file.get_slice(name + "#codes" if written else name)
    shape = tuple(piece.get_shape())
    begin = (start, *[0] * (len(shape) - 1)) if isinstance(start, int) else tuple(start)
    check_box(own_name(name), tuple(map(operator.add, begin, shape)), tuple(target.shape))
    if narrow and written and (begin, shape) == (box.start, box.shape) and _same_blocks(target, file, name):
        for part, held in local_parts(target).items():
            held.copy_(file.get_tensor(name + part))
        return math.prod(shape)
    mine, theirs, count = [], [], 1
    for low, length, other, size in zip(box.start, box.shape, begin, shape, strict=True):
        left, right = max(low, other), min(low + length, other + size)
        if right <= left:
            return 0
        mine.append(slice(left - low, right - low))
        theirs.append(slice(left - other, right - other))
        count *= right - left
    if narrow:
        local = numbers.setdefault(own_name(name), torch.zeros(box.shape, device=local.device))
    local[tuple(mine)].copy_((_numbers(file, name) if written else piece)[tuple(theirs)])
    return count


def _same_blocks(target: Tensor, file: Any, name: str) -> bool:
    return tuple(file.get_slice(f"{name}#scale").get_shape()) == tuple(local_parts(target)["#scale"].shape)


def _numbers(file: Any, name: str) -> Tensor:
    """Decode an 8-bit box."""
    codes, scale, qmap = (file.get_tensor(f"{name}#{part}") for part in PARTS)
    values: Tensor = qmap[codes.int()].view(scale.numel(), -1) * scale[:, None]
    return values.view(codes.shape)

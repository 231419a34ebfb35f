"""Training state of a Megatron-core model in the files of `sharded_checkpoint`: by Hugging Face names, for any layout.

Every rank writes its boxes of the weights and optimizer states in float32, like slabs of an FSDP2 model.

Guarantees:
1. a file holds plain tensors and text: reading it runs no code;
2. every element is written by one rank, and reading fills every element or raises `learner.checkpoint`;
3. the same layout reads the same bits, and so do other layouts and the backend fsdp2, whose files can be read here:
   boxes are only cut and joined;
4. generator states are restored only if the number of ranks is the same.

`learners.checkpoints.checkpoint` makes the files durable and complete as a set.
Example: written at tensor = 2, read at tensor = 4: rank 3 reads the lower half of rank 1's part of `gate_proj`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrl.errors import UNREADABLE, AsyncRLError
from learners.backends.megatron.mapping import Local, Part, intersect, merge_parts, slices, translate
from learners.backends.safetensors_writer import open_tensors
from learners.backends.sharded_checkpoint import HostShard, Start, another_model, check_box, own_name
from weightsync.plan.buckets import Box, full_box, volume

_EXTRA, _STARTS = "extra/", "starts"


def pieces(local: Local, states: Mapping[str, Tensor]) -> list[tuple[str, Box, Tensor]]:
    """Return the content of a file for a parameter with its states: name of the tensor, box in it, elements on the
    host.
    """
    found = []
    for name, box, parts in merge_parts(local):
        for kind, value in states.items():
            rows = torch.cat([value.detach()[slices(part.local)] for part in parts])
            rows = rows.to("cpu", copy=True).reshape([high - low for low, high in box])
            found.append((f"{kind}/{name}", box, rows))
    return found


def host_shard(
    boxes: Sequence[tuple[str, Box, Tensor]],
    *,
    rank: int,
    extra: Mapping[str, Tensor],
    steps: Mapping[str, Tensor],
) -> HostShard:
    """Return the content of this rank's file: its boxes, its `extra` tensors and, on rank 0, step counts by name."""
    tensors = {_EXTRA + name: value for name, value in extra.items()}
    starts: dict[str, Start] = {}
    written: Counter[str] = Counter()
    for own, box, value in boxes:
        if value.numel():
            name = f"{own}~{written[own]}" if written[own] else own
            written[own] += 1
            tensors[name] = value
            starts[name] = tuple(low for low, _ in box)
    for name, value in steps.items() if rank == 0 else ():
        tensors[name], starts[name] = value, 0
    return HostShard(rank, tensors, starts)


class Store:
    """The files of a checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Any] = []
        self._boxes: dict[str, list[tuple[int, str, Box]]] = {}  # by tensor: file, name in it, box
        try:
            for path in sorted(folder.glob("shard_*.safetensors")):
                self._open(path)
        except BaseException:  # also an interruption: close the files and raise again
            self.close()
            raise

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError

        try:
            file = open_tensors(path)
            self._files.append(file)
            found = msgspec.json.decode((file.metadata() or {}).get(_STARTS, ""), type=dict[str, Start])
            for name, start in found.items():
                shape = file.get_slice(name).get_shape()
                begin = (start, *[0] * len(shape))[: len(shape)] if isinstance(start, int) else start
                box = tuple((low, low + side) for low, side in zip(begin, shape, strict=True))
                self._boxes.setdefault(own_name(name), []).append((len(self._files) - 1, name, box))
        except (OSError, SafetensorError, *UNREADABLE) as error:
            raise AsyncRLError("learner.checkpoint", f"{path} cannot be read: {error}") from error

    def names(self, kind: str) -> set[str]:
        """Return the tensors of this kind (`model`, `critic/model`, ..) with parts in the files."""
        start = f"{kind}/"
        return {name.removeprefix(start) for name in self._boxes if name.startswith(start)}

    def check(self, kind: str, known: Collection[str]) -> None:
        """Raise `learner.checkpoint` if the files have other tensors of this kind."""
        if unknown := sorted(self.names(kind) - set(known)):
            raise another_model(self._folder, f"{kind}/{unknown[0]}")

    def read(self, kind: str, part: Part) -> Tensor:
        """Return the elements of a part, float32.

        Raises:
            AsyncRLError: `learner.checkpoint`: some of them are in no file, or the tensor there is larger.
        """
        name = f"{kind}/{part.name}"
        found = torch.empty([high - low for low, high in part.box], dtype=torch.float32)
        missing = volume(part.box)
        for number, key, box in self._boxes.get(name, ()):
            check_box(name, tuple(high for _, high in box), part.shape)
            common = intersect(box, part.box)
            if common is None:
                continue
            there = full_box([high - low for low, high in box])
            elements = self._files[number].get_slice(key)[slices(translate(common, box, there))]
            found[slices(translate(common, part.box, full_box(found.shape)))] = elements
            missing -= volume(common)
        if missing:
            raise AsyncRLError("learner.checkpoint", f"{missing} elements of {name} are not in {self._folder}")
        return found

    def step(self, name: str, *, prefix: str = "") -> float:
        """Return the number of updates of a tensor's states."""
        if not (found := self._boxes.get(f"{prefix}step/{name}")):
            raise AsyncRLError("learner.checkpoint", f"{prefix}step counts are not in {self._folder}")
        return float(self._files[found[0][0]].get_tensor(found[0][1]))

    def extra(self, *, rank: int, ranks: int) -> dict[str, Tensor]:
        """Return this rank's own tensors if as many ranks have written as there are now; otherwise nothing."""
        if len(self._files) != ranks:
            return {}
        file = self._files[rank]
        names = [key for key in file.keys() if key.startswith(_EXTRA)]  # noqa: SIM118 - not a mapping
        return {key.removeprefix(_EXTRA): file.get_tensor(key) for key in names}

    def close(self) -> None:
        while self._files:
            self._files.pop().__exit__(None, None, None)

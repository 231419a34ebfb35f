"""Reads Hugging Face weights into this rank's Megatron-core parameters, and sends those of all ranks to rank 0.

Guarantees:
1. a rank reads only its own parts of the files, directly from safetensors: no pickle, no whole copy; of experts that
   transformers stacks, each matrix by its name in the files (`asyncrl.runtime.model_tensors`);
2. a tensor that is missing or has another shape is `config.model`, with its name;
3. weights are sent one by one in a given order; only rank 0 gets data, one whole tensor at a time; every rank takes
   part to the end.

Example: at tensor = 2 rank 0 has the left half of `model.layers.0.mlp.down_proj.weight` and gets the right half from
rank 1 in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.runtime.model_tensors import Source as Place
from asyncrl.runtime.model_tensors import Unfit, find_sources, tensor_files
from learners.backends.megatron.mapping import Local, Part, Source, slices
from learners.backends.safetensors_writer import open_tensors
from weightsync.plan.buckets import volume


class Folder:
    """The safetensors files of a Hugging Face folder. `skeleton`: its model without memory for weights."""

    def __init__(self, path: Path, skeleton: Any) -> None:
        self._path = path
        self._open: dict[Path, Any] = {}
        try:
            self._files = tensor_files(path)
            self._places = find_sources(skeleton, self._files)
        except Unfit as error:
            raise ConfigError("config.model", f"{path}: no weights in safetensors files: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._places

    def names(self) -> dict[str, Place]:
        """Return the names in the files of every expert, by stacked tensor, and of tensors with another name there."""
        return {name: place for name, place in self._places.items() if place.stacked or place.names != ((name,),)}

    def read(self, part: Part) -> Tensor:
        """Return the elements of a part, in the dtype of the file.

        Raises:
            ConfigError: `config.model`: the folder has no such tensor or one of another shape.
        """
        from safetensors import SafetensorError

        if (place := self._places.get(part.name)) is None:
            raise ConfigError("config.model", f"{self._path}: no tensor {part.name}")
        part = expert_part(place.names, part) if place.stacked else part._replace(name=place.names[0][0])
        path = self._files[part.name]
        try:
            if path not in self._open:
                self._open[path] = open_tensors(path)
            found = self._open[path].get_slice(part.name)
            if tuple(found.get_shape()) != part.shape:
                why = f"{self._path}: {part.name} has shape {found.get_shape()}, config.json asks for {part.shape}"
                raise ConfigError("config.model", why)
            piece: Tensor = found[slices(part.box)]
        except (OSError, SafetensorError) as error:
            raise ConfigError("config.model", f"{path}: {error}") from error
        return piece

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


def expert_part(names: Sequence[Sequence[str]], part: Part) -> Part:
    """Return a part of a stacked tensor as one of a matrix in the files. `names`: of each expert, joined along rows."""
    (expert, _), (low, high), columns = part.box
    rows = part.shape[1] // len(names[expert])
    at = low - low % rows
    return Part(names[expert][low // rows], (rows, part.shape[2]), ((low - at, high - at), columns), part.local)


def unstack_sources(sources: Mapping[str, Sequence[Source]], places: Mapping[str, Place]) -> dict[str, list[Source]]:
    """Return the senders by the names of the files. `places`: of tensors that differ there (`Folder.names`)."""
    found: dict[str, list[Source]] = {}
    for name, senders in sources.items():
        if name not in places:
            found[name] = list(senders)
            continue
        names, stacked = places[name]
        found |= {one: [] for several in names for one in several}
        for source in senders:
            part = expert_part(names, source.part) if stacked else source.part._replace(name=names[0][0])
            found[part.name].append(source._replace(part=part))
    return found


def assemble(local: Local, read: Any, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a whole parameter from `read(part)` of its parts, on the host; padding is zero."""
    whole = torch.zeros(local.shape, dtype=dtype)
    for part in local.parts:
        if volume(part.box):
            whole[slices(part.local)] = read(part).to(dtype)
    return whole


def export_tensors(
    parameters: Mapping[str, Tensor], sources: Mapping[str, Sequence[Source]], *, rank: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor by name, whole, on the host of rank 0; the other ranks send and get nothing.
    Collective: every rank must exhaust it.
    """
    for name, parts in sources.items():
        mine = [source for source in parts if source.rank == rank]
        pieces = [
            parameters[source.parameter].detach()[slices(source.part.local)].to(device="cpu", dtype=dtype)
            for source in mine
        ]
        if rank:
            if pieces:
                dist.send(_bytes(torch.cat([piece.reshape(-1) for piece in pieces])), 0)
            continue
        whole = torch.empty(parts[0].part.shape, dtype=dtype)
        for source, piece in zip(mine, pieces, strict=True):
            whole[slices(source.part.box)] = piece
        for sender in sorted({source.rank for source in parts} - {0}):
            _receive(whole, [source.part for source in parts if source.rank == sender], sender)
        yield name, whole


def _receive(whole: Tensor, parts: Sequence[Part], sender: int) -> None:
    sizes = [volume(part.box) for part in parts]
    flat = torch.empty(sum(sizes), dtype=whole.dtype)
    dist.recv(_bytes(flat), sender)  # bounded: the timeout of the group
    for part, piece in zip(parts, torch.split(flat, sizes), strict=True):
        whole[slices(part.box)] = piece.view([high - low for low, high in part.box])


def _bytes(flat: Tensor) -> Tensor:
    """Return the memory of a flat tensor: Gloo does not send every dtype."""
    return flat.view(torch.uint8)

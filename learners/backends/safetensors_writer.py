"""Writes whole tensors into safetensors files of bounded size, with the index that transformers and vLLM read.

Guarantees:
1. it holds the tensors of at most one file: a file is written when the next tensor would exceed `max_bytes`, directly
   from the tensors' memory;
2. one file is `model.safetensors`; several are `model-00001-of-00003.safetensors` and so on, with
   `model.safetensors.index.json`. A tensor above the limit has its own file;
3. files get their names only when all are complete and synced; files of an earlier export are then removed;
4. a repeated name raises `internal`.

Inside a file tensors are sorted by element size, then by name: the same tensors in the same order give the same bytes.
Example: tensors of 3, 3 and 5 GB with a limit of 5 GB: three files; with 6 GB: two.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import AsyncRLError

MAX_BYTES = 5_000_000_000
STEM, INDEX = "model", "model.safetensors.index.json"
_OURS = re.compile(rf"{STEM}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(INDEX)}")
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardFiles:
    """Writes into an existing folder."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._known: set[str] = set()
        self.elements = self.bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor on the host, which must not change."""
        if name in self._known:
            raise AsyncRLError("internal", f"{name} is exported twice")
        self._known.add(name)
        if self._held and self._held_bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._held[name] = tensor.contiguous()
        self._held_bytes += tensor.nbytes
        self.elements += tensor.numel()
        self.bytes += tensor.nbytes

    def close(self) -> list[Path]:
        """Write the rest and name all files; return them.

        Raises:
            OSError: for example the disk is full.
        """
        if self._held or not self._written:
            self._write()
        count = len(self._written)
        names = [
            f"{STEM}-{n:05d}-of-{count:05d}.safetensors" if count > 1 else f"{STEM}.safetensors"
            for n in range(1, count + 1)
        ]
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
        for (path, _), name in zip(self._written, names, strict=True):
            os.replace(path, self._folder / name)
        if count > 1:
            where = {key: name for (_, keys), name in zip(self._written, names, strict=True) for key in keys}
            index = {
                "metadata": {"total_parameters": self.elements, "total_size": self.bytes},
                "weight_map": dict(sorted(where.items())),
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [self._folder / name for name in names]

    def _write(self) -> None:
        path = self._folder / f".{STEM}-{len(self._written) + 1:05d}.tmp"
        write_tensors(path, self._held)
        self._written.append((path, list(self._held)))
        self._held, self._held_bytes = {}, 0


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write and sync one safetensors file: the length of the header, the header, the bytes of the tensors."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order:
        one = tensors[name]
        header[name] = {
            "dtype": NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [place, place + one.nbytes],
        }
        place += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the first tensor to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def open_tensors(path: Path) -> Any:
    """Open a safetensors file; close it with its `__exit__`."""
    from safetensors import safe_open

    file: Any = safe_open(path, framework="pt")
    return file.__enter__()

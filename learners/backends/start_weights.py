"""Reads start weights in parts: a model is created without memory and split, then each rank reads its own parts.

Guarantees:
1. weights equal those of transformers' `from_pretrained`, bit by bit, and so do computed buffers (rotary frequencies),
   which the model's own code fills before the split;
2. a rank reads only the elements of its own boxes; it holds at most its part in float32 and one box as in the file;
3. tied weights stay one parameter;
4. models that cannot be read this way raise `Unfit` before anything is split; the caller then reads the whole model.

Supported are safetensors files with the names of the model or names that transformers renames, and conversions that
stack the matrices of experts. Quantized files are read whole.
Example: 2 ranks, a matrix `[10, 4]`: rank 1 reads rows 5..9. A mixture of 8 experts with expert = 2: rank 1 reads gate
and up of the experts 4..7 and stacks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.errors import AsyncRLError
from asyncrl.runtime.model_folder import build_model, load_config, load_generation_config
from asyncrl.runtime.model_tensors import Source, Unfit, find_sources, tensor_files
from learners.backends.sharded_checkpoint import Box, local_box
from learners.models.score_model import new_head, scalar_head

_MARK = "_asyncrl_start"


class Start:
    """What `fill` needs from a folder. `made`: tensors in no file, such as a new scalar head."""

    def __init__(self, files: Mapping[str, Path], sources: Mapping[str, Source], made: Mapping[str, Tensor]) -> None:
        self._files = files
        self._sources = sources
        self._made = made
        self._open: dict[Path, Any] = {}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements of a box, as the file has them.

        Raises:
            AsyncRLError: `internal`: the model did not have this name in `describe_model`.
        """
        if name in self._made:
            return self._made[name][_range(box.start, box.shape)]
        if name not in self._sources:
            raise AsyncRLError("internal", f"{name} is in no file: the model created it later")
        names, stacked = self._sources[name]
        if not stacked:
            return self._slice(names[0][0], box.start, box.shape)
        experts = names[box.start[0] : box.start[0] + box.shape[0]]
        return torch.stack([self._join(parts, box.start[1:], box.shape[1:]) for parts in experts])

    def _join(self, parts: Sequence[str], start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a range of rows and columns from matrices stacked along rows."""
        found, above = [], 0
        for part in parts:
            rows = self.shape(part)[0]
            low, high = max(start[0], above), min(start[0] + shape[0], above + rows)
            if low < high:
                found.append(self._slice(part, (low - above, *start[1:]), (high - low, *shape[1:])))
            above += rows
        return torch.cat(found)

    def _slice(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        file = self._file(name)
        found: Tensor = file.get_slice(name)[_range(start, shape)] if shape else file.get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the files."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def close(self) -> None:
        self._open.clear()


def _range(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(start, shape, strict=True))


# ---------------------------------------------------------------- before the split


def describe_model(path: str, *, scorer: bool, seed: int, trust_remote_code: bool, **options: Any) -> Any:
    """Return the model of a folder without its weights; `fill` reads them after the split.

    `scorer`: a classifier with one label; without a head in the folder a new one is made from `seed`, as in
    `score_model.load_scorer`. `options` as for `from_pretrained`.

    Raises:
        Unfit: the files do not hold the weights one by one.
        OSError, ValueError: the folder cannot be read.
    """
    folder = Path(path)
    files = tensor_files(folder)
    shape = load_config(path, trust_remote_code=trust_remote_code, **({"num_labels": 1} if scorer else {}))
    if getattr(shape, "quantization_config", None) is not None:
        raise Unfit("its weights are quantized")
    architectures = shape.architectures
    with torch.device("meta"):
        model = build_model(
            shape,
            "classifier" if scorer else "language",
            trust_remote_code=trust_remote_code,
            dtype=options["dtype"],
            attn_implementation=options["attn_implementation"],
        )
    model.config.architectures = architectures
    _settle_buffers(model)
    _generation(model, path)
    made: dict[str, Tensor] = {}
    with ExitStack() as stack:
        start = Start(files, sources := find_sources(model, files), made)
        stack.callback(start.close)
        if scorer:
            scalar_head(model, path)
            model.config.architectures = [type(model).__name__]
            if "score.weight" not in sources:
                made["score.weight"] = new_head(model, seed)
        _check(model, start, sources, made)
    setattr(model, _MARK, start)
    return model.eval()


@torch.no_grad()
def _settle_buffers(model: Any) -> None:
    """Compute the buffers that no file holds with the model's own code, like `from_pretrained`."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # tells transformers to skip them
    fresh = []
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, own = name.rpartition(".")
        real = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        fresh.append((name, real.fill_(torch.nan) if real.is_floating_point() else real.zero_()))
        model.get_submodule(parent)._buffers[own] = real
    try:
        model.initialize_weights()
    except (NotImplementedError, RuntimeError) as error:
        raise Unfit(f"its code wants real weights: {error}") from error
    for name, real in fresh:
        if bool(real.isnan().any()) if real.is_floating_point() else real.numel():
            raise Unfit(f"its buffer {name} is computed in the constructor")


def _generation(model: Any, path: str) -> None:
    """Set the generation config of the folder, like `from_pretrained`."""
    if model.can_generate():
        try:
            model.generation_config = load_generation_config(path)
        except OSError:
            return  # keep the model's own


def _stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that a folder must hold: parameters, a tied one once, and saved buffers."""
    yield from model.named_parameters()
    real = {name for name, _ in model.named_non_persistent_buffers()}  # type: ignore[operator]
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in real)


def _check(model: Any, start: Start, sources: Mapping[str, Source], made: Mapping[str, Tensor]) -> None:
    """Raise `Unfit` if a tensor is missing, has another shape, or if both tensors of a tied pair are in the files."""
    wanted = dict(_stored_tensors(model))
    if doubled := sorted((model.state_dict().keys() - wanted.keys()) & sources.keys()):
        raise Unfit(f"its files hold {doubled[0]}, which is tied to another tensor")
    for name, tensor in wanted.items():
        if name in made:
            continue
        if name not in sources:
            raise Unfit(f"its files lack {name}")
        names, stacked = sources[name]
        found: tuple[int, ...] = start.shape(names[0][0])
        if stacked:
            rows = {sum(start.shape(part)[0] for part in parts) for parts in names}
            found = (len(names), rows.pop() if len(rows) == 1 else -1, *found[1:])
        if found != tuple(tensor.shape):
            raise Unfit(f"{name} is {list(found)} in its files and {list(tensor.shape)} in the model")


# ---------------------------------------------------------------- after the split


@torch.no_grad()
def fill(model: Any, device: torch.device) -> int:
    """Load the weights of a split `describe_model` model to a device. Return the number of elements read; 0 for a
    complete model. Not collective.
    """
    start: Start | None = model.__dict__.pop(_MARK, None)
    if start is None:
        return 0
    known: dict[int, tuple[Tensor, Tensor]] = {}  # keep the old one alive, so that its id stays unique
    count = 0
    try:
        for prefix, module in model.named_modules():
            for place in (module._parameters, module._buffers):
                for own, old in place.items():
                    if old is None or not old.is_meta:
                        continue
                    if id(old) not in known:
                        box = local_box(old)
                        local = torch.empty(box.shape, dtype=old.dtype, device=device)
                        if local.numel():
                            local.copy_(start.read(f"{prefix}.{own}" if prefix else own, box))
                        count += local.numel()
                        known[id(old)] = (old, _like(old, local))
                    place[own] = known[id(old)][1]
    finally:
        start.close()
    return count


def _like(old: Tensor, local: Tensor) -> Tensor:
    """Return a tensor (or parameter) in the layout of another, with this local part."""
    new = local
    if isinstance(old, DTensor):
        # Not `from_local`, which moves it to the mesh's device: with cpu_offload it stays in host memory.
        new = DTensor(local, old._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new

"""Which tensors of a folder in Hugging Face format make up each tensor of transformers' model.

transformers stacks the matrices of all experts of a layer into one parameter; folders, and other engines, have a matrix
for each expert. Versions are published by the names of the folder: `stacked_parts` says which rows of a stacked
parameter a published tensor is.

Example: `model.layers.0.mlp.experts.gate_up_proj` `[8, 48, 32]` consists of 16 tensors `[24, 32]`:
`...experts.0.gate_proj.weight`, `...experts.0.up_proj.weight`, `...experts.1.gate_proj.weight` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from asyncrl.errors import UNREADABLE

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Unfit(Exception):
    """A model that cannot be read in parts, and why."""


class Source(NamedTuple):
    """Place of a tensor in the files: one name; or `stacked`: the names of each expert, joined along rows."""

    names: tuple[tuple[str, ...], ...]
    stacked: bool = False


class Part(NamedTuple):
    """A published tensor: the rows `start .. start + rows` of one expert of the parameter `name`, or (expert -1) all of
    that parameter.
    """

    name: str
    expert: int
    start: int
    rows: int

    def view(self, whole: Any) -> Any:
        """Its view of the parameter `[experts, rows, columns]`, a tensor or an array."""
        return whole if self.expert < 0 else whole[self.expert, self.start : self.start + self.rows]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape in a parameter of this shape."""
        return whole if self.expert < 0 else (self.rows, *whole[2:])


def stacked_parts(model: Any, folder: str | Path) -> dict[str, dict[str, Part]]:
    """The published tensors of every stacked parameter, in their order in its memory, and of parameters of the same
    block that have another name in the folder, such as Mixtral's router; empty for a model without experts, and for a
    folder whose names cannot be told.
    """
    try:
        sources = find_sources(model, tensor_files(Path(folder)))
    except Unfit:
        return {}
    found: dict[str, dict[str, Part]] = {}
    for name, parameter in model.named_parameters():
        if name in sources and sources[name].stacked:
            several = len(sources[name].names[0])
            rows = parameter.shape[1] // several
            found[name] = {
                one: Part(name, expert, rows * place, rows)
                for expert, names in enumerate(sources[name].names)
                for place, one in enumerate(names)
            }
    blocks = {name.partition(".experts.")[0] for name in found}
    for name, source in sources.items():
        if not source.stacked and name.rpartition(".")[0].rpartition(".")[0] in blocks and source.names[0][0] != name:
            found[name] = {source.names[0][0]: Part(name, -1, 0, 0)}
    return found


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor name. Raises `Unfit` if they cannot be listed."""
    try:
        if (folder / ONE).exists():
            with safe_open(folder / ONE, framework="pt") as file:
                return dict.fromkeys(file.keys(), folder / ONE)
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, Any])
        places = msgspec.convert(index.get("weight_map"), dict[str, str])
    except (*UNREADABLE, OSError, SafetensorError) as error:
        raise Unfit(f"its safetensors files cannot be listed: {error}") from error
    return {name: folder / file for name, file in places.items()}


def find_sources(model: Any, files: Mapping[str, Path]) -> dict[str, Source]:
    """Return the place of each tensor, by the names that transformers gives to those of the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found: dict[str, Source] = {}
    pieces: dict[str, dict[int, dict[int, str]]] = {}  # stacked tensors: expert -> part -> name
    for name in files:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            if target in found:
                raise Unfit(f"{target} stands in its files twice")
            found[target] = Source(((name,),))
        else:
            expert, part = _piece(name, pattern, converters)
            pieces.setdefault(target, {}).setdefault(expert, {})[part] = name
    for target, experts in pieces.items():
        if sorted(experts) != list(range(len(experts))) or target in found:
            raise Unfit(f"the experts of {target} have gaps")
        parts = [experts[number] for number in range(len(experts))]
        found[target] = Source(tuple(tuple(one[key] for key in sorted(one)) for one in parts), stacked=True)
    return found


def _piece(name: str, pattern: str, converters: Sequence[Any]) -> tuple[int, int]:
    """Return the expert and the part that a name in the files belongs to."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    rule = next(rule for rule in converters if pattern in rule.source_patterns)
    stacks = [type(step) for step in rule.operations] in ([MergeModulelist], [MergeModulelist, Concatenate])
    dims = [step.dim for step in rule.operations] if stacks else []
    if not (stacks and dims in ([0], [0, 1]) and "*" in pattern):
        raise Unfit(f"{name} is converted when it is read")
    number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    if number is None:
        raise Unfit(f"{name} is renamed and converted when it is read")
    return int(number[1]), rule.source_patterns.index(pattern)

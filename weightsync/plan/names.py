"""Names on the wire are those of Hugging Face checkpoints; other names are slices of them, described without tensors.

Every function takes the tensors
of one side and returns those of the other, each as slices of the first (`Mapped`). Guarantees:
1. pure; nothing is computed, so every dtype passes bit for bit, and there and back again is the identity;
2. what no rule names passes as it is, and tensors keep the order of their first slice;
3. a partner that is missing, or of another dtype or width, is an error here and not wrong weights there.

| one side (checkpoint) | other side | functions |
| --- | --- | --- |
| `mlp.experts.E.{gate,up}_proj.weight` `[I, H]` | `mlp.experts.gate_up_proj` `[N, 2I, H]` | `stack_experts`, |
| `mlp.experts.E.down_proj.weight` `[H, I]` | `mlp.experts.down_proj` `[N, H, I]` | `split_experts` |
| `{q,k,v}_proj` `[Q, H]`, `[K, H]`, `[K, H]` | `qkv_proj` `[Q+2K, H]` (weight and bias) | `fuse_projections`, |
| `{gate,up}_proj` `[I, H]` | `gate_up_proj` `[2I, H]` | `split_projections` |

Mixtral's checkpoints call the block `block_sparse_moe` and its experts' matrices w1 (gate), w3 (up), w2 (down):
`EXPERTS["mixtral"]`. Tensor-parallel shards of fused tensors are for `weightsync.plan.layouts.Shards`.

Example: from `gate_up_proj` `[4, 24, 16]`, expert 1's up projection is box `((1, 2), (12, 24), (0, 16))`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.wire import Buffer
from weightsync.plan.buckets import ITEM_BYTES, TensorSpec
from weightsync.plan.layouts import Box, runs, whole


class Slice(msgspec.Struct, frozen=True):
    """Elements `box` of the tensor `source`."""

    source: str
    box: Box


class Mapped(msgspec.Struct, frozen=True):
    """A tensor of the other side: the elements of its parts, one part after the other, in C order."""

    target: TensorSpec
    parts: tuple[Slice, ...]


class ExpertNames(msgspec.Struct, frozen=True):
    """How a family of checkpoints names its experts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


QWEN = ExpertNames()
#: By `model_type`; who is not listed uses the names of qwen2_moe (Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4.5, ...).
EXPERTS = {"qwen2_moe": QWEN, "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2")}
STACKED_BLOCK = "mlp"  # what transformers calls it, whatever the checkpoint does

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def expert_names(model_type: str) -> ExpertNames:
    """The names of a family's experts."""
    return EXPERTS.get(model_type, QWEN)


def gather(
    mapped: Mapped, shapes: Mapping[str, Sequence[int]], bytes_of: Callable[[str], Buffer]
) -> npt.NDArray[np.uint8]:
    """The bytes of one target from those of its sources; a view where the one part is whole."""
    item = ITEM_BYTES[mapped.target.dtype]
    pieces = [
        np.frombuffer(bytes_of(part.source), dtype=np.uint8)[start * item : (start + count) * item]
        for part in mapped.parts
        for start, count in runs(shapes[part.source], part.box)
    ]
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


# ---------------------------------------------------------------- experts


def stack_experts(specs: Iterable[TensorSpec], names: ExpertNames = QWEN) -> list[Mapped]:
    """Checkpoint names to the stacked tensors of transformers 5.

    Raises:
        ValueError: a layer lacks an expert or one of its matrices, or their shapes or dtypes differ.
    """
    kinds = {names.gate: "gate", names.up: "up", names.down: "down"}
    pattern = re.compile(
        rf"(.+\.){re.escape(names.block)}\.experts\.(\d+)\.({'|'.join(map(re.escape, kinds))})\.weight"
    )
    layers: dict[str, dict[str, dict[int, TensorSpec]]] = {}
    made: list[Mapped | str] = []  # a layer's prefix stands where its first expert came
    for spec in specs:
        if not (match := pattern.fullmatch(spec.name)):
            made.append(_same(spec, _rename(spec.name, names.block, STACKED_BLOCK)))
            continue
        prefix, number, kind = match[1], int(match[2]), kinds[match[3]]
        if prefix not in layers:
            layers[prefix] = {"gate": {}, "up": {}, "down": {}}
            made.append(prefix)
        layers[prefix][kind][number] = spec
    return [
        mapped for entry in made for mapped in (_stacked(entry, layers[entry]) if isinstance(entry, str) else [entry])
    ]


def _stacked(prefix: str, layer: dict[str, dict[int, TensorSpec]]) -> list[Mapped]:
    count = max(map(len, layer.values()))
    for kind, found in layer.items():
        if sorted(found) != list(range(count)):
            raise ValueError(f"{prefix}{STACKED_BLOCK}.experts: {kind} of {len(found)} experts, not of 0..{count - 1}")
        if len({(spec.dtype, spec.shape) for spec in found.values()}) != 1:
            raise ValueError(f"{prefix}{STACKED_BLOCK}.experts: {kind} differs in shape or dtype between experts")
    gate, up, down = layer["gate"], layer["up"], layer["down"]
    if gate[0].shape != up[0].shape or gate[0].dtype != up[0].dtype or len(gate[0].shape) != 2:
        raise ValueError(f"{gate[0].name} and {up[0].name} differ in shape or dtype")
    height, width = gate[0].shape
    stem = f"{prefix}{STACKED_BLOCK}.experts."
    both = TensorSpec(stem + "gate_up_proj", gate[0].dtype, (count, 2 * height, width))
    pairs = [_all(spec) for number in range(count) for spec in (gate[number], up[number])]
    alone = TensorSpec(stem + "down_proj", down[0].dtype, (count, *down[0].shape))
    return [Mapped(both, tuple(pairs)), Mapped(alone, tuple(_all(down[number]) for number in range(count)))]


def split_experts(specs: Iterable[TensorSpec], names: ExpertNames = QWEN) -> list[Mapped]:
    """The stacked tensors of transformers 5 to checkpoint names.

    Raises:
        ValueError: a stacked tensor has not three axes, or an odd number of rows.
    """
    pattern = re.compile(rf"(.+\.){STACKED_BLOCK}\.experts\.(gate_up_proj|down_proj)")
    made: list[Mapped] = []
    for spec in specs:
        if not (match := pattern.fullmatch(spec.name)):
            made.append(_same(spec, _rename(spec.name, STACKED_BLOCK, names.block)))
            continue
        if len(spec.shape) != 3 or (match[2] == "gate_up_proj" and spec.shape[1] % 2):
            raise ValueError(f"{spec.name} {spec.shape} is no stack of experts")
        count, rows, width = spec.shape
        kinds = [names.down] if match[2] == "down_proj" else [names.gate, names.up]
        height = rows // len(kinds)
        for expert in range(count):
            for place, kind in enumerate(kinds):
                name = f"{match[1]}{names.block}.experts.{expert}.{kind}.weight"
                box = ((expert, expert + 1), (place * height, (place + 1) * height), (0, width))
                made.append(Mapped(TensorSpec(name, spec.dtype, (height, width)), (Slice(spec.name, box),)))
    return made


# ---------------------------------------------------------------- projections


def fuse_projections(specs: Sequence[TensorSpec]) -> list[Mapped]:
    """Projections of one input to fused ones (`qkv_proj`, `gate_up_proj`); experts keep theirs.

    Raises:
        ValueError: a partner is missing, or differs in width or dtype.
    """
    by_name = {spec.name: spec for spec in specs}
    made = []
    for spec in specs:
        parts, stem, end = _family(spec.name)
        if not parts:
            made.append(_same(spec))
        elif spec.name == stem + parts[0] + end:
            partners = [by_name.get(stem + part + end) for part in parts]
            made.append(_fused(stem, parts, end, partners))
        elif stem + parts[0] + end not in by_name:
            raise ValueError(f"{spec.name} without {stem}{parts[0]}{end}")
    return made


def _fused(stem: str, parts: tuple[str, ...], end: str, partners: Sequence[TensorSpec | None]) -> Mapped:
    found = [spec for spec in partners if spec is not None]
    if len(found) != len(parts) or len({(spec.dtype, spec.shape[1:]) for spec in found}) != 1:
        raise ValueError(f"{stem}{{{','.join(parts)}}}{end}: one is missing, or their widths or dtypes differ")
    rows = sum(spec.shape[0] for spec in found)
    name = stem + ("qkv_proj" if parts is QKV else "gate_up_proj") + end
    return Mapped(TensorSpec(name, found[0].dtype, (rows, *found[0].shape[1:])), tuple(map(_all, found)))


def _family(name: str) -> tuple[tuple[str, ...], str, str]:
    """The projections that are fused with this one, what stands before them and behind; empty where none are."""
    match = re.fullmatch(r"(.+\.)?(\w+)(\.(?:weight|bias))", name)
    if match is None or ".experts." in name:
        return (), "", ""
    family = next((parts for parts in (QKV, GATE_UP) if match[2] in parts), ())
    return family, match[1] or "", match[3]


def split_projections(specs: Iterable[TensorSpec], *, qkv_rows: tuple[int, int, int]) -> list[Mapped]:
    """Fused projections to those of a checkpoint; `qkv_rows`: heads times head size of q, of k and of v.

    Raises:
        ValueError: a fused tensor has other rows.
    """
    made: list[Mapped] = []
    for spec in specs:
        match = re.fullmatch(r"(.+\.)?(qkv_proj|gate_up_proj)(\.(?:weight|bias))", spec.name)
        if match is None or ".experts." in spec.name:
            made.append(_same(spec))
            continue
        parts = QKV if match[2] == "qkv_proj" else GATE_UP
        rows = qkv_rows if parts is QKV else (spec.shape[0] // 2,) * 2
        if sum(rows) != spec.shape[0]:
            raise ValueError(f"{spec.name} has {spec.shape[0]} rows, not {'+'.join(map(str, rows))}")
        start = 0
        for part, height in zip(parts, rows, strict=True):
            box = ((start, start + height), *whole(spec.shape[1:]))
            target = TensorSpec((match[1] or "") + part + match[3], spec.dtype, (height, *spec.shape[1:]))
            made.append(Mapped(target, (Slice(spec.name, box),)))
            start += height
    return made


# ---------------------------------------------------------------- small parts


def _all(spec: TensorSpec) -> Slice:
    return Slice(spec.name, whole(spec.shape))


def _same(spec: TensorSpec, name: str = "") -> Mapped:
    return Mapped(TensorSpec(name or spec.name, spec.dtype, spec.shape), (_all(spec),))


def _rename(name: str, block: str, other: str) -> str:
    return name.replace(f".{block}.", f".{other}.")

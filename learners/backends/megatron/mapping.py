"""Maps Hugging Face tensors to the parameters of a Megatron-core model, for every rank. Pure.

Reading, publishing and checkpoints use these parts: each parameter consists of boxes of Hugging Face tensors.

Guarantees:
1. the parts of all ranks cover every element of every Hugging Face tensor exactly once, without copies (`Local.copy`):
   parameters that every tensor place holds whole, and the head of a model with tied embeddings on the last pipeline
   stage;
2. the parts of a parameter do not overlap; the rest is padding of the vocabulary, which stays zero; parts of one tensor
   are consecutive rows (`merge_parts`);
3. what cannot be mapped is refused by name (`read_facts`).

Layouts of Megatron-core: `linear_qkv` interleaves by key-value group (its query heads, its key head, its value head);
`linear_fc1` of a tensor place has its rows of the gate, then its rows of the other projection; `linear_proj` and
`linear_fc2` are split by columns; layers are numbered from 0 in every stage.
Example: 4 query heads and 2 key-value heads of width 8 at tensor = 2: rows 0..16 of `linear_qkv` of place 1 are rows
16..32 of `q_proj`, rows 16..24 are rows 8..16 of `k_proj`, rows 24..32 are rows 8..16 of `v_proj`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from asyncrl.config.model_facts import MEGATRON_MODELS, find_dense_variant
from asyncrl.errors import ConfigError
from learners.gang.topology import Topology
from weightsync.plan.buckets import Box, full_box

#: Tensors of a layer, in the order of its modules in transformers.
IN_LAYER = (
    *(f"self_attn.{letter}_proj.{kind}" for letter in "qkvo" for kind in ("weight", "bias")),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


class Facts(NamedTuple):
    """The numbers that decide the layout of a dense decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False  # the head is the embedding
    qk_norm: bool = False
    qkv_bias: bool = False

    def padded_rows(self, tensor: int) -> int:
        """Return rows of the embedding, rounded up so that every tensor place has the same number."""
        return -(-self.vocab // tensor) * tensor


class Part(NamedTuple):
    """Elements `box` of the Hugging Face tensor `name` are the elements `local` of a parameter."""

    name: str
    shape: tuple[int, ...]
    box: Box
    local: Box


class Local(NamedTuple):
    """One parameter of one rank. `axis`: the axis that tensor places split, None if each holds the whole. `copy`:
    another rank writes it.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    axis: int | None
    copy: bool = False


class Source(NamedTuple):
    """The sender of a part of a Hugging Face tensor: a rank and its parameter."""

    rank: int
    parameter: str
    part: Part


def read_facts(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a Hugging Face `config.json`.

    Raises:
        ConfigError: `config.model`: what this backend does not support.
    """
    kind = config.get("model_type", "")
    if kind not in MEGATRON_MODELS:
        raise _refusal(kind, f"the backend megatron builds {', '.join(MEGATRON_MODELS)}")
    if variant := find_dense_variant(config):
        raise _refusal(kind, variant)
    heads = int(config["num_attention_heads"])
    return Facts(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        mlp=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
    )


def _refusal(kind: str, why: str) -> ConfigError:
    return ConfigError("config.model", f"model_type {kind!r}: {why}")


def check_layout(facts: Facts, topology: Topology) -> None:
    """Raise `config.conflict` if a model does not divide into a layout."""
    tensor, pipeline = topology.tensor, topology.pipeline
    for what, size in (
        ("num_attention_heads", facts.heads),
        ("num_key_value_heads", facts.kv_heads),
        ("intermediate_size", facts.mlp),
    ):
        if size % tensor:
            raise _unfit(f"{what} = {size} does not divide by learner.parallel.tensor = {tensor}")
    if facts.layers < pipeline:
        raise _unfit(f"num_hidden_layers = {facts.layers} are fewer than learner.parallel.pipeline = {pipeline}")


def _unfit(why: str) -> ConfigError:
    return ConfigError("config.conflict", why, where="learner.parallel")


def stage_layers(facts: Facts, place: Topology) -> range:
    """Return the layers of a stage; if they do not divide, the first stages have one more."""
    each, rest = divmod(facts.layers, place.pipeline)
    start = place.stage * each + min(place.stage, rest)
    return range(start, start + each + (place.stage < rest))


# ---------------------------------------------------------------- one rank


def rank_parameters(facts: Facts, place: Topology, *, fused: bool = False) -> list[Local]:
    """Return the parameters of a rank by the names of Megatron-core. `fused`: norms belong to the projections after
    them, as in the layers of TransformerEngine.
    """
    found: list[Local] = []
    if place.stage == 0:
        found.append(_vocabulary(facts, place, "embedding.word_embeddings.weight", "model.embed_tokens.weight"))
    for number, layer in enumerate(stage_layers(facts, place)):
        found += _layer(facts, place, f"decoder.layers.{number}.", f"model.layers.{layer}.", fused=fused)
    if place.stage == place.pipeline - 1:
        found.append(_whole(place, "decoder.final_layernorm.weight", "model.norm.weight", (facts.hidden,)))
        if not facts.tied:
            found.append(_vocabulary(facts, place, "output_layer.weight", "lm_head.weight"))
        elif place.pipeline > 1:
            head = _vocabulary(facts, place, "output_layer.weight", "model.embed_tokens.weight")
            found.append(head._replace(copy=True))
    return found


def _layer(facts: Facts, place: Topology, own: str, theirs: str, *, fused: bool) -> Iterator[Local]:
    hidden, wide = facts.hidden, facts.heads * facts.head_dim
    attention, mlp = own + "self_attention.", own + "mlp."
    first = attention + "linear_qkv.layer_norm_weight" if fused else own + "input_layernorm.weight"
    second = mlp + "linear_fc1.layer_norm_weight" if fused else own + "pre_mlp_layernorm.weight"
    yield _whole(place, first, theirs + "input_layernorm.weight", (hidden,))
    yield _qkv(facts, place, attention + "linear_qkv.weight", theirs + "self_attn.{}_proj.weight", (hidden,))
    if facts.qkv_bias:
        yield _qkv(facts, place, attention + "linear_qkv.bias", theirs + "self_attn.{}_proj.bias", ())
    if facts.qk_norm:
        for letter in "qk":
            names = f"{attention}{letter}_layernorm.weight", f"{theirs}self_attn.{letter}_norm.weight"
            yield _whole(place, *names, (facts.head_dim,))
    yield _columns(place, attention + "linear_proj.weight", theirs + "self_attn.o_proj.weight", (hidden, wide))
    yield _whole(place, second, theirs + "post_attention_layernorm.weight", (hidden,))
    yield _gate_and_up(facts, place, mlp + "linear_fc1.weight", theirs + "mlp.{}_proj.weight")
    yield _columns(place, mlp + "linear_fc2.weight", theirs + "mlp.down_proj.weight", (hidden, facts.mlp))


def _whole(place: Topology, own: str, theirs: str, shape: tuple[int, ...]) -> Local:
    return Local(own, shape, (Part(theirs, shape, full_box(shape), full_box(shape)),), None, place.tensor_place > 0)


def _rows(name: str, total: int, rest: tuple[int, ...], *, start: int, at: int, count: int) -> Part:
    """Return `count` rows from `start` on of a tensor of `total` rows, at row `at` of the parameter."""
    return Part(name, (total, *rest), ((start, start + count), *full_box(rest)), ((at, at + count), *full_box(rest)))


def _vocabulary(facts: Facts, place: Topology, own: str, theirs: str) -> Local:
    each = facts.padded_rows(place.tensor) // place.tensor
    start = each * place.tensor_place
    count = max(0, min(each, facts.vocab - start))
    return Local(
        own, (each, facts.hidden), (_rows(theirs, facts.vocab, (facts.hidden,), start=start, at=0, count=count),), 0
    )


def _qkv(facts: Facts, place: Topology, own: str, theirs: str, rest: tuple[int, ...]) -> Local:
    """`rest`: the axes after the rows, (hidden,) of the weight, () of the bias."""
    wide, groups = facts.head_dim, facts.kv_heads // place.tensor
    queries = facts.heads // facts.kv_heads * wide  # rows of the query heads of one group
    parts = []
    for group in range(groups):
        number, at = place.tensor_place * groups + group, group * (queries + 2 * wide)
        starts = {"q": number * queries, "k": number * wide, "v": number * wide}
        places = {"q": (at, queries), "k": (at + queries, wide), "v": (at + queries + wide, wide)}
        for letter, (row, count) in places.items():
            total = (facts.heads if letter == "q" else facts.kv_heads) * wide
            parts.append(_rows(theirs.format(letter), total, rest, start=starts[letter], at=row, count=count))
    return Local(own, (groups * (queries + 2 * wide), *rest), tuple(parts), 0)


def _gate_and_up(facts: Facts, place: Topology, own: str, theirs: str) -> Local:
    each = facts.mlp // place.tensor
    start, parts = each * place.tensor_place, []
    for number, name in enumerate(("gate", "up")):
        part = _rows(theirs.format(name), facts.mlp, (facts.hidden,), start=start, at=each * number, count=each)
        parts.append(part)
    return Local(own, (2 * each, facts.hidden), tuple(parts), 0)


def _columns(place: Topology, own: str, theirs: str, shape: tuple[int, int]) -> Local:
    rows, columns = shape
    each = columns // place.tensor
    box = ((0, rows), (each * place.tensor_place, each * (place.tensor_place + 1)))
    return Local(own, (rows, each), (Part(theirs, shape, box, full_box((rows, each))),), 1)


def merge_parts(local: Local) -> list[tuple[str, Box, list[Part]]]:
    """Return the Hugging Face tensors of a parameter: name, box of all its elements, and its parts by row."""
    parts: dict[str, list[Part]] = {}
    for part in local.parts:
        parts.setdefault(part.name, []).append(part)
    return [(name, ((some[0].box[0][0], some[-1].box[0][1]), *some[0].box[1:]), some) for name, some in parts.items()]


# ---------------------------------------------------------------- all ranks


def tensor_shapes(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Return every Hugging Face tensor and its shape, in the publishing order of the backend fsdp2."""
    found = {part.name: part.shape for local in rank_parameters(facts, Topology()) for part in local.parts}
    return {name: found[name] for name in sorted(found, key=_place_in_order)}


def _place_in_order(name: str) -> tuple[int, int]:
    """First what is outside the layers, then layer by layer, each in the order of its modules."""
    layer = name.removeprefix("model.layers.")
    if layer == name:
        return -1, ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight").index(name)
    number, _, inner = layer.partition(".")
    return int(number), IN_LAYER.index(inner)


def tensor_sources(facts: Facts, topology: Topology, *, fused: bool = False) -> dict[str, list[Source]]:
    """Return the senders of the parts of every Hugging Face tensor, in the order of `tensor_shapes`: ranks of
    share 0.
    """
    found: dict[str, list[Source]] = {name: [] for name in tensor_shapes(facts)}
    for place in map(topology.peer, range(topology.size)):
        if place.share or place.sequence_place:
            continue
        for local in rank_parameters(facts, place, fused=fused):
            for part in local.parts if not local.copy else ():
                found[part.name].append(Source(place.rank, local.name, part))
    return found


# ---------------------------------------------------------------- boxes


def intersect(one: Box, other: Box) -> Box | None:
    """Return the common elements of two boxes; None if there are none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(low < high for low, high in found) else None


def translate(box: Box, outer: Box, at: Box) -> Box:
    """Move a box inside `outer` to the place `at`."""
    return tuple(
        (low - start + place, high - start + place)
        for (low, high), (start, _), (place, _) in zip(box, outer, at, strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)

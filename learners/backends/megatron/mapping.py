"""Maps Hugging Face tensors to the parameters of a Megatron-core model, for every rank. Pure.

Reading, publishing and checkpoints use these parts: each parameter consists of boxes of Hugging Face tensors. Their
names are those of transformers' parameters, which stack the matrices of all experts of a layer: `[experts, rows,
columns]`. The names in files are in `weights`.

Guarantees:
1. the parts of all ranks cover every element of every Hugging Face tensor exactly once, without copies (`Local.copy`):
   parameters that every tensor place holds whole, and the head of a model with tied embeddings on the last pipeline
   stage;
2. the parts of a parameter do not overlap; the rest is padding of the vocabulary, which stays zero; parts of one tensor
   in two dimensions are consecutive rows (`merge_parts`).

Layouts of Megatron-core: `linear_qkv` interleaves by key-value group (its query heads, its key head, its value head);
`linear_fc1` of a tensor place has its rows of the gate, then its rows of the other projection; `linear_proj` and
`linear_fc2` are split by columns; layers are numbered from 0 in every stage, experts from 0 in every expert place. Of
latent attention every tensor place holds the projections down whole.
Example: 4 query heads and 2 key-value heads of width 8 at tensor = 2: rows 0..16 of `linear_qkv` of place 1 are rows
16..32 of `q_proj`, rows 16..24 are rows 8..16 of `k_proj`, rows 24..32 are rows 8..16 of `v_proj`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.errors import ConfigError
from learners.backends.megatron.families import Experts, Facts, Latent
from learners.gang.topology import Topology
from weightsync.plan.buckets import Box, full_box


class Part(NamedTuple):
    """Elements `box` of the Hugging Face tensor `name` are the elements `local` of a parameter."""

    name: str
    shape: tuple[int, ...]
    box: Box
    local: Box


class Local(NamedTuple):
    """One parameter of one rank. `axis`: the axis that tensor places split, None if each holds the whole. `copy`:
    another rank writes it. `expert`: an expert, which ranks of the same expert place alone hold, whole.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    axis: int | None
    copy: bool = False
    expert: bool = False


class Source(NamedTuple):
    """The sender of a part of a Hugging Face tensor: a rank and its parameter."""

    rank: int
    parameter: str
    part: Part


def check_layout(facts: Facts, topology: Topology) -> None:
    """Raise `config.conflict` if a model does not divide into a layout."""
    tensor, sizes = topology.tensor, {"num_attention_heads": facts.heads, "intermediate_size": facts.mlp}
    if facts.latent is None:
        sizes["num_key_value_heads"] = facts.kv_heads
    if (experts := facts.experts) is not None:
        sizes["the inner width of shared experts"] = experts.shared
        if topology.expert == 1:
            sizes["moe_intermediate_size"] = experts.inner
        if experts.total % topology.expert:
            raise _unfit(f"{experts.total} experts do not divide by learner.parallel.expert = {topology.expert}")
    for what, size in sizes.items():
        if size % tensor:
            raise _unfit(f"{what} = {size} does not divide by learner.parallel.tensor = {tensor}")
    if facts.layers < topology.pipeline:
        raise _unfit(
            f"num_hidden_layers = {facts.layers} are fewer than learner.parallel.pipeline = {topology.pipeline}"
        )


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
        if facts.scores:
            found.append(_whole(place, "output_layer.weight", "score.weight", (1, facts.hidden)))
        elif not facts.tied:
            found.append(_vocabulary(facts, place, "output_layer.weight", "lm_head.weight"))
        elif place.pipeline > 1:
            head = _vocabulary(facts, place, "output_layer.weight", "model.embed_tokens.weight")
            found.append(head._replace(copy=True))
    return found


def rank_buffers(facts: Facts, place: Topology) -> list[Local]:
    """Return what a rank holds that is not trained: the bias of each router's choice."""
    if facts.experts is None or not facts.experts.bias:
        return []
    names = ((number, layer) for number, layer in enumerate(stage_layers(facts, place)) if facts.is_sparse(layer))
    return [
        _whole(
            place,
            f"decoder.layers.{number}.mlp.router.expert_bias",
            f"model.layers.{layer}.mlp.gate.e_score_correction_bias",
            (facts.experts.total,),
        )
        for number, layer in names
    ]


def _layer(facts: Facts, place: Topology, own: str, theirs: str, *, fused: bool) -> Iterator[Local]:
    hidden, sparse = (facts.hidden,), facts.is_sparse(int(theirs.split(".")[-2]))
    first = own + "input_layernorm.weight"
    if fused and facts.latent is None:
        first = own + "self_attention.linear_qkv.layer_norm_weight"
    second = own + ("mlp.linear_fc1.layer_norm_weight" if fused and not sparse else "pre_mlp_layernorm.weight")
    yield _whole(place, first, theirs + "input_layernorm.weight", hidden)
    if facts.latent is not None:
        yield from _latent(facts, facts.latent, place, own + "self_attention.", theirs + "self_attn.", fused=fused)
    else:
        yield from _attention(facts, place, own + "self_attention.", theirs + "self_attn.")
    yield _whole(place, second, theirs + "post_attention_layernorm.weight", hidden)
    if sparse and facts.experts is not None:
        yield from _experts(facts, facts.experts, place, own + "mlp.", theirs + "mlp.", fused=fused)
    else:
        yield from _mlp(facts.hidden, facts.mlp, place, own + "mlp.", theirs + "mlp.")


def _attention(facts: Facts, place: Topology, own: str, theirs: str) -> Iterator[Local]:
    yield _qkv(facts, place, own + "linear_qkv.weight", theirs + "{}_proj.weight", (facts.hidden,))
    if facts.qkv_bias:
        yield _qkv(facts, place, own + "linear_qkv.bias", theirs + "{}_proj.bias", ())
    for letter in "qk" if facts.qk_norm else "":
        yield _whole(place, f"{own}{letter}_layernorm.weight", f"{theirs}{letter}_norm.weight", (facts.head_dim,))
    shape = (facts.hidden, facts.heads * facts.head_dim)
    yield _columns(place, own + "linear_proj.weight", theirs + "o_proj.weight", shape)


def _latent(facts: Facts, latent: Latent, place: Topology, own: str, theirs: str, *, fused: bool) -> Iterator[Local]:
    """Multi-head latent attention."""
    query = (facts.heads * (latent.nope + latent.rope),)
    if latent.q_rank:
        norm = own + ("linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight")
        shape = (latent.q_rank, facts.hidden)
        yield _whole(place, own + "linear_q_down_proj.weight", theirs + "q_a_proj.weight", shape)
        yield _whole(place, norm, theirs + "q_a_layernorm.weight", (latent.q_rank,))
        yield _split_rows(place, own + "linear_q_up_proj.weight", theirs + "q_b_proj.weight", (*query, latent.q_rank))
    else:
        yield _split_rows(place, own + "linear_q_proj.weight", theirs + "q_proj.weight", (*query, facts.hidden))
    norm = own + ("linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight")
    names = own + "linear_kv_down_proj.weight", theirs + "kv_a_proj_with_mqa.weight"
    yield _whole(place, *names, (latent.kv_rank + latent.rope, facts.hidden))
    yield _whole(place, norm, theirs + "kv_a_layernorm.weight", (latent.kv_rank,))
    shape = (facts.heads * (latent.nope + latent.value), latent.kv_rank)
    yield _split_rows(place, own + "linear_kv_up_proj.weight", theirs + "kv_b_proj.weight", shape)
    shape = (facts.hidden, facts.heads * latent.value)
    yield _columns(place, own + "linear_proj.weight", theirs + "o_proj.weight", shape)


def _mlp(hidden: int, inner: int, place: Topology, own: str, theirs: str) -> Iterator[Local]:
    yield _gate_and_up(hidden, inner, place, own + "linear_fc1.weight", theirs + "{}_proj.weight")
    yield _columns(place, own + "linear_fc2.weight", theirs + "down_proj.weight", (hidden, inner))


def _experts(facts: Facts, experts: Experts, place: Topology, own: str, theirs: str, *, fused: bool) -> Iterator[Local]:
    """Router, shared experts, and the experts of this expert place, whole; without expert places all of them, split
    over tensor places like dense matrices.
    """
    hidden, inner, own_experts = facts.hidden, experts.inner, place.expert > 1
    yield _whole(place, own + "router.weight", theirs + "gate.weight", (experts.total, hidden))
    if experts.shared:
        yield from _mlp(hidden, experts.shared, place, own + "shared_experts.", theirs + "shared_experts.")
    each, width = experts.total // place.expert, inner // (1 if own_experts else place.tensor)
    start, all_columns = 0 if own_experts else width * place.tensor_place, (0, hidden)
    for number in range(each):
        middle = "linear_{}.weight" + str(number) if fused else f"local_experts.{number}.linear_{{}}.weight"
        name = f"{own}experts.{middle}"
        expert = each * place.expert_place + number
        plane, stacked = (expert, expert + 1), (experts.total, 2 * inner, hidden)
        rows = tuple(
            Part(
                theirs + "experts.gate_up_proj",
                stacked,
                (plane, (first + start, first + start + width), all_columns),
                ((at, at + width), all_columns),
            )
            for first, at in ((0, 0), (inner, width))  # the gate, then the other projection
        )
        yield Local(name.format("fc1"), (2 * width, hidden), rows, 0, expert=own_experts)
        down = Part(
            theirs + "experts.down_proj",
            (experts.total, hidden, inner),
            (plane, all_columns, (start, start + width)),
            full_box((hidden, width)),
        )
        yield Local(name.format("fc2"), (hidden, width), (down,), 1, expert=own_experts)


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


def _gate_and_up(hidden: int, inner: int, place: Topology, own: str, theirs: str) -> Local:
    each = inner // place.tensor
    start, parts = each * place.tensor_place, []
    for number, name in enumerate(("gate", "up")):
        part = _rows(theirs.format(name), inner, (hidden,), start=start, at=each * number, count=each)
        parts.append(part)
    return Local(own, (2 * each, hidden), tuple(parts), 0)


def _split_rows(place: Topology, own: str, theirs: str, shape: tuple[int, ...]) -> Local:
    rows, *rest = shape
    each = rows // place.tensor
    part = _rows(theirs, rows, tuple(rest), start=each * place.tensor_place, at=0, count=each)
    return Local(own, (each, *rest), (part,), 0)


def _columns(place: Topology, own: str, theirs: str, shape: tuple[int, int]) -> Local:
    rows, columns = shape
    each = columns // place.tensor
    box = ((0, rows), (each * place.tensor_place, each * (place.tensor_place + 1)))
    return Local(own, (rows, each), (Part(theirs, shape, box, full_box((rows, each))),), 1)


def merge_parts(local: Local) -> list[tuple[str, Box, list[Part]]]:
    """Return the boxes of Hugging Face tensors that a parameter consists of: name, box, and its parts by row. Those of
    experts are not merged.
    """
    if len(local.parts[0].shape) > 2:
        return [(part.name, part.box, [part]) for part in local.parts]
    parts: dict[str, list[Part]] = {}
    for part in local.parts:
        parts.setdefault(part.name, []).append(part)
    return [(name, ((some[0].box[0][0], some[-1].box[0][1]), *some[0].box[1:]), some) for name, some in parts.items()]


# ---------------------------------------------------------------- all ranks


def find_holder(local: Local, place: Topology) -> tuple[int, int]:
    """Return the number of this rank among those that hold the same elements and divide their states, and how many
    there are.
    """
    if not local.expert:
        return place.share, place.shares
    ranks = place.tensor * place.shares
    return place.rank % ranks // place.expert, ranks // place.expert


def tensor_shapes(facts: Facts) -> dict[str, tuple[int, ...]]:
    """Return every Hugging Face tensor and its shape."""
    return {part.name: part.shape for local in rank_parameters(facts, Topology()) for part in local.parts}


def tensor_sources(facts: Facts, topology: Topology, *, fused: bool = False) -> dict[str, list[Source]]:
    """Return the senders of the parts of every Hugging Face tensor: the first holder of each."""
    found: dict[str, list[Source]] = {name: [] for name in tensor_shapes(facts)}
    for place in map(topology.peer, range(topology.size)):
        for local in rank_parameters(facts, place, fused=fused):
            for part in local.parts if not local.copy and find_holder(local, place)[0] == 0 else ():
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

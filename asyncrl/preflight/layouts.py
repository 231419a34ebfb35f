"""The memory of one rank of a learner on Megatron-core, by its place in the layout. Pure; computed, not measured.

The arithmetic, for the distributed optimizer and computation in bfloat16:

- weights 2 B and gradients 4 B for each parameter of the stage, divided by `tensor` (experts: by `expert`; if
  that is 1, by `tensor`);
- master weights and Adam's moments, 12 B, divided once more by the ranks that hold the same parameters;
- activations with recomputation: the inputs of every layer of the stage, for as many micro-batches as are under way
  (`pipeline`, less the number of the stage), the working memory of one layer, and the logits of a chunk in the last.

Example: 235 billion parameters on 64 devices as 8 stages of 4 tensor and 8 expert ranks: stage 0 has 12 of 94 layers
with 29 billion parameters of experts, 3.6 billion on each rank. With its share of the rest it holds 8 GB of weights, 16
GB of gradients, and 46 GB of optimizer states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asyncrl.preflight.model_shape import Shape

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, STATE_BYTES = 2, 4, 12, 2


class Layout(NamedTuple):
    """Ranks that split the model; the others have copies and split the batch."""

    devices: int
    tensor: int
    pipeline: int
    expert: int

    @property
    def copies(self) -> int:
        """Ranks with the same attention weights."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def expert_split(self) -> int:
        """Ranks that share the experts of a stage: without expert places each expert is split as attention is."""
        return self.expert if self.expert > 1 else self.tensor

    @property
    def expert_copies(self) -> int:
        """Ranks with the same part of the experts."""
        return self.devices // (self.expert_split * self.pipeline)


class Stage(NamedTuple):
    """Parameters of a pipeline stage."""

    layers: int
    dense: int  # attention, routers, shared experts, embeddings
    experts: int


class Rank(NamedTuple):
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self)


def list_stages(shape: Shape, pipeline: int) -> list[Stage]:
    """Stages of consecutive layers, the first ones with one more if they do not divide."""
    experts = shape.experts
    each, more = divmod(shape.layers, pipeline)
    found, start = [], 0
    for number in range(pipeline):
        stop = start + each + (number < more)
        dense = sum(
            shape.attention + 2 * shape.hidden + shape.feed_forward[layer] - experts[layer]
            for layer in range(start, stop)
        )
        ends = shape.vocabulary * shape.hidden * ((number == 0) + (number == pipeline - 1))
        found.append(Stage(stop - start, dense + ends, sum(experts[start:stop])))
        start = stop
    return found


def rank_bytes(shape: Shape, stage: Stage, number: int, layout: Layout, *, tokens: int, chunk: int) -> Rank:
    """Memory of a rank of stage `number`. `tokens`: of a micro-batch; `chunk`: tokens whose logits exist at once."""
    dense, experts = stage.dense / layout.tensor, stage.experts / layout.expert_split
    optimizer = OPTIMIZER_BYTES * (dense / layout.copies + experts / layout.expert_copies)
    width = tokens / layout.tensor
    inputs = stage.layers * shape.hidden * STATE_BYTES * width * (layout.pipeline - number)
    layer = (
        width * STATE_BYTES * (8 * shape.hidden + 3 * shape.queries + 2 * shape.keys_values + 4 * shape.active_width)
    )
    logits = 3 * 4 * chunk * shape.vocabulary / layout.tensor if number == layout.pipeline - 1 else 0
    held = dense + experts
    return Rank(
        round(WEIGHT_BYTES * held), round(GRADIENT_BYTES * held), round(optimizer), round(inputs + layer + logits)
    )


def find_fullest(shape: Shape, layout: Layout, *, tokens: int = 8192, chunk: int = 1024) -> tuple[int, Rank]:
    """The stage whose ranks hold the most, and what one holds."""
    stages = enumerate(list_stages(shape, layout.pipeline))
    ranks = [(at, rank_bytes(shape, stage, at, layout, tokens=tokens, chunk=chunk)) for at, stage in stages]
    return max(ranks, key=lambda pair: pair[1].total)

"""Sequence parallelism: every packed row is split over ranks, with exact results.

Each rank of a sequence group holds the ids and positions of the whole row, and activations of its own part: the decoder
layers see `W / S` tokens. Attention is Ulysses (arXiv 2309.14509): it sees all W tokens of `heads / S` heads, with an
all-to-all before and after it. Where S does not divide the heads, U ranks share the heads, U the greatest common
divisor, and the row has C = S / U chunks (`Split.chunks`): attention sees the queries of `W / C` tokens, and keys and
values of all tokens, gathered in each layer (arXiv 2407.21783, section 3.3.2; docs/adr/0045).

Guarantees:
1. with one chunk the configured attention is called unchanged with whole rows, positions and masks; with several it
   gets its rows of a dense mask, or, without a mask, `segments.attend_part` replaces it;
2. log-probs are whole, `[N]` on every rank of the group. Each rank's gradient is that of its own tokens, so sums over
   ranks are those of the row;
3. a row whose width does not divide is padded at its end, where no token sees the padding;
4. models whose layers do not take rotary embeddings as input are refused.

The embedding of a row is computed whole on every rank. Generation is not supported.
Example: 8 tokens, 4 heads, 2 of K/V, 2 ranks: rank 1 computes norms and MLPs of the tokens 4..7, and attention of heads
2 and 3 for the tokens 0..7. With 4 ranks U = C = 2: rank 3 has the tokens 6 and 7, and attention of heads 2 and 3 for
the tokens 4..7 over the keys 0..7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.errors import AsyncRLError, ConfigError
from learners.gang.gang import Gang
from learners.models.segments import attend_part, cached_lengths

#: Prefix of the name of a wrapped attention.
PREFIX = "ulysses_"
#: Attentions that can take a chunk of the queries.
BY_CHUNK = ("sdpa", "sdpa_by_sequence", "sdpa_varlen")
_MARK = "_asyncrl_split"


class Split:
    """This rank's place among the ranks that split its rows; `heads` neighbours of them split the heads of a chunk."""

    def __init__(self, group: Any, *, place: int, size: int, heads: int = 0) -> None:
        self.group = group
        self.place = place
        self.size = size
        self.heads = heads or size
        self.heads_group: Any = group
        self.chunks_group: Any = group
        self.paused = False

    @property
    def chunks(self) -> int:
        """Chunks of the queries; 1: attention sees them whole."""
        return self.size // self.heads

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Compute rows whole on every rank in this block. Only without gradient: recomputation would not know it."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def pad(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Extend rows `[R, W]` and positions until S divides them; the last sequence of a row continues."""
        more = -input_ids.shape[1] % self.size
        if not more:
            return input_ids, position_ids
        ids = torch.cat((input_ids, input_ids[:, -1:].expand(-1, more)), 1)
        steps = torch.arange(1, more + 1, device=position_ids.device)
        return ids, torch.cat((position_ids, position_ids[:, -1:] + steps), 1)

    def part(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole row."""
        return tensor.chunk(self.size, dim)[self.place]


class States(NamedTuple):
    """Hidden states `[n, H]` at the requested places on this rank. `mine`: which of the `[N]`; None: all."""

    hidden: Tensor
    mine: Tensor | None
    asked: int  # N
    split: Split | None

    def select(self, values: Tensor) -> Tensor:
        """Return the values `[N]` of this rank's places, `[n]`."""
        return values if self.mine is None else values[self.mine]

    def whole(self, values: Tensor) -> Tensor:
        """Join this rank's values `[n]` with those of the other ranks, `[N]`."""
        if self.mine is None or self.split is None:
            return values
        result: Tensor = _Join.apply(values, self.mine, self.asked, self.split.group)  # type: ignore[no-untyped-call]
        return result


def hidden_states_at(
    body: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    places: Tensor,
    *,
    split: Split | None,
    images: dict[str, Any] | None = None,
) -> States:
    """Return hidden states at `places` `[N]`, indices into the flattened rows `[R * W]`. `images`: arguments of a
    vision-language model, whose rows are not split.
    """
    if split is None or split.paused:
        given = {"input_ids": input_ids, "position_ids": position_ids, **(images or {})}
        hidden = body(**given, use_cache=False).last_hidden_state
        return States(hidden.flatten(0, 1)[places], None, places.numel(), None)
    row, column = places // input_ids.shape[1], places % input_ids.shape[1]
    ids, positions = split.pad(input_ids, position_ids)
    hidden = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    width = ids.shape[1] // split.size
    mine = (column // width == split.place).nonzero().flatten()
    local = row[mine] * width + column[mine] % width
    return States(hidden.flatten(0, 1)[local], mine, places.numel(), split)


# ---------------------------------------------------------------- installing


def install(model: Any, layers: list[nn.Module], gang: Gang) -> Split:
    """Let the layers of a model work on parts of rows, and its attention on parts of heads. Collective.

    Raises:
        ConfigError: `config.model`: the attention cannot be wrapped; `config.conflict`: it takes no chunks.
    """
    place = gang.topology
    others = gang.size // (place.sequence * place.tensor)
    mesh = gang.mesh(others=others, sequence=place.sequence, tensor=place.tensor)
    heads = count_shared(model.config.get_text_config(), place.sequence, tensor=place.tensor)
    split = Split(mesh["sequence"].get_group(), place=place.sequence_place, size=place.sequence, heads=heads)
    if split.chunks > 1:
        grid = gang.mesh(others=others, chunks=split.chunks, heads=heads, tensor=place.tensor)
        split.chunks_group, split.heads_group = grid["chunks"].get_group(), grid["heads"].get_group()
    _wrap_attention(model, split)
    for module in model.modules():
        setattr(module, _MARK, split)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(_Cut(split, first=number == 0), with_kwargs=True)
    return split


def count_shared(config: Any, size: int, *, tensor: int) -> int:
    """Return over how many of the ranks the heads of a tensor place are split."""
    named = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return math.gcd(size, *(heads // tensor for heads in named if heads is not None))


def register_attention(name: str) -> str:
    """Register the attention over parts of rows in transformers and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(PREFIX + name, _attention_over(name))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return PREFIX + name


def _wrap_attention(model: Any, split: Split) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner = model.config._attn_implementation
    if inner not in ALL_ATTENTION_FUNCTIONS or inner not in ALL_MASK_ATTENTION_FUNCTIONS:
        why = f"attention {inner!r} of {type(model).__name__} cannot be wrapped: set it to 'sdpa'"
        raise ConfigError("config.model", why, where="model.attn_implementation with learner.parallel.sequence")
    if split.chunks > 1 and inner not in BY_CHUNK:
        raise ConfigError(
            "config.conflict",
            f"attention {inner!r} takes whole rows, and the heads of the model do not divide by it",
            where=f"learner.parallel.sequence = {split.size}",
            remedy="set model.attn_implementation = 'sdpa' (or 'varlen' on CUDA)",
        )
    model.set_attn_implementation(register_attention(inner))
    if model.config._attn_implementation != PREFIX + inner:
        raise ConfigError(
            "config.model", f"{type(model).__name__} takes no attention but its own", where="learner.parallel.sequence"
        )


def _attention_over(name: str) -> Any:
    """Return this attention over all tokens of a part of the heads."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        """Heads `[R, H, W / S, D]` to `[R, W / S, H, D]`."""
        inner, split = ALL_ATTENTION_FUNCTIONS[name], getattr(module, _MARK)
        if split.paused:
            found: Tensor = inner(module, query, key, value, attention_mask, **given)[0]
            return found, None
        query, key, value = (_tokens_whole(heads, split) for heads in (query, key, value))
        if split.chunks == 1:
            found = inner(module, query, key, value, attention_mask, **given)[0]
        else:
            found = _attend_chunk(inner, split, module, query, key, value, attention_mask, **given)
        return _heads_whole(found, split), None

    return attend


def _attend_chunk(  # noqa: PLR0917 - as transformers passes them
    inner: Any,
    split: Split,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> Tensor:
    """Attention of a chunk of the queries to all keys, `[R, W / C, H, D]`."""
    positions: Any = given.get("position_ids")
    if attention_mask is None and (positions is None or given.get("dropout")):
        why = "drops attention weights" if positions is not None else "passes no positions"
        raise AsyncRLError(
            "config.model",
            f"{type(module).__name__} {why}: its rows are split over K/V heads alone",
            where=f"learner.parallel.sequence = {split.size}",
        )
    width = query.shape[2]
    start = split.place // split.heads * width
    key, value = (_Gather.apply(heads, split.chunks_group) for heads in (key, value))  # type: ignore[no-untyped-call]
    if attention_mask is None:
        return attend_part(query, key, value, cached_lengths(positions), start, scale=given.get("scaling"))
    found: Tensor = inner(module, query, key, value, attention_mask[..., start : start + width, :], **given)[0]
    return found


class _Cut:
    """Hook before a layer: selects this rank's part of the hidden states (whole before the first layer) and of the
    rotary embeddings. Positions and masks stay whole, for attention.
    """

    def __init__(self, split: Split, *, first: bool) -> None:
        self._split = split
        self._first = first

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if self._split.paused:
            return None
        rotary = given.get("position_embeddings")
        if not (isinstance(rotary, tuple) and all(isinstance(part, Tensor) for part in rotary)):
            raise AsyncRLError(
                "config.model",
                f"{type(layer).__name__} takes no rotary embeddings from its model",
                where="learner.parallel.sequence",
            )
        given = {**given, "position_embeddings": tuple(self._split.part(part, -2) for part in rotary)}
        if self._first:
            # A view would keep the whole row in memory.
            if args:
                args = (self._split.part(args[0]).clone(), *args[1:])
            else:
                given["hidden_states"] = self._split.part(given["hidden_states"]).clone()
        return args, given


# ---------------------------------------------------------------- between the ranks


class _Exchange(torch.autograd.Function):
    """`[S, ...]`: part s goes to rank s, and part s of the result comes from rank s. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        result = torch.empty_like(tensor)
        dist.all_to_all_single(result, tensor, group=group)  # bounded: the timeout of the group
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        result: Tensor = _Exchange.apply(grad.contiguous(), ctx.group)  # type: ignore[no-untyped-call]
        return result, None


class _Gather(torch.autograd.Function):
    """Joins the chunks `[R, H, w, D]` of all ranks along the tokens; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        rows, heads, width, size = part.shape
        whole = part.new_empty(dist.get_world_size(group), rows, heads, width, size)
        dist.all_gather(list(whole), part.contiguous(), group=group)  # bounded: the timeout of the group
        return whole.permute(1, 2, 0, 3, 4).reshape(rows, heads, -1, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ranks = dist.get_world_size(ctx.group)
        rows, heads, width, size = grad.shape
        parts = grad.view(rows, heads, ranks, width // ranks, size).permute(2, 0, 1, 3, 4).contiguous()
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, list(parts), group=ctx.group)  # bounded: the timeout of the group
        return mine, None


class _Join(torch.autograd.Function):
    """Joins values of several ranks. Every rank computes the same loss, so each takes the gradient of its own
    values.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, mine: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(mine)
        result = values.new_zeros(count)
        result[mine] = values
        dist.all_reduce(result, group=group)  # bounded: the timeout of the group
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (mine,) = ctx.saved_tensors
        return grad[mine], None, None, None


def _tokens_whole(heads: Tensor, split: Split) -> Tensor:
    """Convert `[R, H, w, D]` of this rank's tokens to `[R, H / U, U * w, D]` of its heads."""
    rows, count, width, size = heads.shape
    ranks = split.heads
    parts = heads.view(rows, ranks, count // ranks, width, size).permute(1, 0, 2, 3, 4).contiguous()
    found: Tensor = _Exchange.apply(parts, split.heads_group)  # type: ignore[no-untyped-call]
    return found.permute(1, 2, 0, 3, 4).reshape(rows, count // ranks, ranks * width, size)


def _heads_whole(found: Tensor, split: Split) -> Tensor:
    """Convert `[R, U * w, H / U, D]` of this rank's heads to `[R, w, H, D]` of its tokens."""
    rows, width, count, size = found.shape
    ranks = split.heads
    parts = found.view(rows, ranks, width // ranks, count, size).permute(1, 0, 2, 3, 4).contiguous()
    back: Tensor = _Exchange.apply(parts, split.heads_group)  # type: ignore[no-untyped-call]
    return back.permute(1, 2, 0, 3, 4).reshape(rows, width // ranks, ranks * count, size)

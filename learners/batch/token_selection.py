"""Selects tokens over all ranks: for a loss (KL-Cov, Clip-Cov), or by entropy.

Guarantees:
1. every rank sees the tokens of all ranks and selects the same ones;
2. a random selection depends only on step, mini-batch and tokens;
3. the entropy threshold covers the trained tokens of the whole batch, by the weights at the start of the step. It does
   not depend on ranks, rows, micro-batches or mini-batches.

A loss that selects tokens costs one extra forward pass.
Example: entropies 0.1, 2.0 on rank 0 and 0.3, 1.0 on rank 1 with keep = 0.5: the threshold is 1.0 on both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from learners.algorithms.entropy import entropy_threshold
from learners.algorithms.types import LossInputs
from learners.batch.micro_batches import MicroBatch, Minibatch
from learners.gang.gang import Gang


class HighEntropy(NamedTuple):
    """`pieces`: by mini-batch and micro-batch of this rank, bool `[N]`; `threshold` in nats, equal on every rank."""

    pieces: list[list[Tensor]]
    threshold: float


def keep_high_entropy(
    share: Sequence[Minibatch], entropy: Sequence[Sequence[Tensor]], *, keep: float, gang: Gang
) -> HighEntropy:
    """Select the `keep` share of the batch's trained tokens with the highest entropy (arXiv 2506.01939). Collective.

    `entropy`: nats, by mini-batch and micro-batch `[N]`. Tokens at the threshold are kept. Without trained tokens the
    threshold is 0.
    """
    masks = [[torch.from_numpy(micro.mask.astype(bool)) for micro in part.micro] for part in share]
    values = [[piece.float().cpu() for piece in part] for part in entropy]
    pairs = [pair for part in zip(values, masks, strict=True) for pair in zip(*part, strict=True)]
    mine = torch.cat([torch.zeros(0), *(piece[mask] for piece, mask in pairs)])
    every = np.concatenate([np.frombuffer(part, np.float32) for part in gang.gather_shares(mine.numpy().tobytes())])
    threshold = entropy_threshold(torch.from_numpy(every), share=keep)
    pieces = [
        [(mask & (piece >= threshold)).to(like.device) for piece, mask, like in zip(*part, strict=True)]
        for part in zip(values, masks, entropy, strict=True)
    ]
    return HighEntropy(pieces, threshold if every.size else 0.0)


def choose_tokens(
    chooser: Callable[..., Tensor],
    part: Minibatch,
    known: Any,
    current: Sequence[Tensor],
    algorithm: AlgorithmConfig,
    *,
    gang: Gang,
    seed: tuple[int, int],
) -> list[Tensor]:
    """Return the selected tokens of each micro-batch of this rank, bool `[N]`. `known`: log-probs and advantages
    by micro-batch (`learners.step.update.Terms`); None: not known before the forward pass. Collective.
    """
    mine: dict[int, list[bytes]] = {}
    for number, (micro, now) in enumerate(zip(part.micro, current, strict=True)):
        for sample, rows in _rows(micro, _columns(micro, number, now, known, algorithm)):
            mine[sample] = [row.tobytes() for row in rows]
    every: dict[int, list[bytes]] = {}
    for text in gang.gather_shares(msgspec.msgpack.encode(mine)):
        every |= msgspec.msgpack.decode(text, type=dict[int, list[bytes]])
    picked = _pick(chooser, every, seed)
    device = current[0].device if current else torch.device("cpu")
    return [
        torch.cat([picked[n] for n in micro.samples.tolist()] or [torch.zeros(0, dtype=torch.bool)]).to(device)
        for micro in part.micro
    ]


def _columns(
    micro: MicroBatch, number: int, now: Tensor, known: Any, algorithm: AlgorithmConfig
) -> list[np.ndarray[Any, Any]]:
    """Return current, proximal, behaviour, advantages and mask of a micro-batch, f4 `[N]` each."""
    current = now.float().cpu().numpy()
    proximal = current if known.proximal is None else known.proximal[number].float().cpu().numpy()
    if algorithm.proximal == "behaviour":
        proximal = micro.behaviour
    advantages = micro.advantages if known.advantages is None else known.advantages[number].float().cpu().numpy()
    mask = micro.mask.astype(np.float32)
    if known.high is not None:
        mask = mask * known.high[number].cpu().numpy()
    return [current, proximal, micro.behaviour, advantages, mask]


def _rows(micro: MicroBatch, columns: Sequence[np.ndarray[Any, Any]]) -> list[tuple[int, list[np.ndarray[Any, Any]]]]:
    ends = np.cumsum(np.bincount(micro.sequences, minlength=micro.samples.size))[:-1]
    cut = [np.split(column.astype(np.float32), ends) for column in columns] if micro.samples.size else []
    return [(int(sample), [column[place] for column in cut]) for place, sample in enumerate(micro.samples)]


def _pick(chooser: Callable[..., Tensor], every: Mapping[int, list[bytes]], seed: tuple[int, int]) -> dict[int, Tensor]:
    """Return the selection among all tokens, by sample."""
    order = sorted(every)
    joined = [
        torch.frombuffer(bytearray(b"".join(every[n][column] for n in order) or bytes(4)), dtype=torch.float32)
        for column in range(5)
    ]
    lengths = [len(every[n][0]) // 4 for n in order]
    total = sum(lengths)
    current, proximal, behaviour, advantages, mask = (column[:total] for column in joined)
    sequences = torch.repeat_interleave(torch.arange(len(order)), torch.tensor(lengths, dtype=torch.int64))
    inputs = LossInputs(current, proximal, behaviour, advantages, mask > 0, sequences)
    inner = chooser.func if isinstance(chooser, functools.partial) else chooser
    extra = {}
    if "seed" in inspect.signature(inner).parameters:
        extra["seed"] = (seed[0] * 1009 + seed[1]) % (1 << 31)
    return dict(zip(order, torch.split(chooser(inputs, **extra), lengths), strict=True))

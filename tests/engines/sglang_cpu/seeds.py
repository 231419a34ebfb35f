"""A test rig: SGLang's deterministic mode on a CPU, so that `sampling_seed` counts.

SGLang offers it for GPUs: there kernels must not depend on the batch, and the hash behind its random numbers is a
binary that its CPU build does not have here. This has the same hash (MurmurHash3, 32 bits, of seed, position and
column) on torch tensors; on a CPU results differ by float noise with the batch.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & MASK


def _mixed(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & MASK
    block = (_rotated(block, 15) * 0x1B873593) & MASK
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hashes `[n, m]` in 0..2**32, as i8, of seeds `[n]`, positions `[n]` and columns `[m]`."""
    seed = seed.view(torch.int64)[:, None]
    state = torch.zeros((len(seed), len(columns)), dtype=torch.int64)
    for block in (seed & MASK, (seed >> 32) & MASK, positions.long()[:, None], columns.long()[None, :]):
        state = _mixed(state, block)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & MASK
    return state ^ (state >> 16)


def install() -> None:
    """From now on SGLang of this process has it."""
    import sglang.kernels.ops.sampling.murmur_hash as hashes

    hashes.murmur_hash32 = murmur_hash32
    import sglang.srt.batch_invariant_ops as kernels
    from sglang.srt.arg_groups import choices

    kernels.enable_batch_invariant_mode = lambda *_args, **_kwargs: None
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])

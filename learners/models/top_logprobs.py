"""Log-probs of several tokens at each place, with gradient, in chunks: the whole logits never exist."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    cap: float | None = None,
) -> Tensor:
    """Return the log-probs `[N, K]` of `ids` `[N, K]` after the hidden states `[N, H]`, as of
    `softmax(logits / temperature)`. The backward pass computes the logits of a chunk again.
    """

    def read(states: Tensor, wanted: Tensor) -> Tensor:
        logits = nn.functional.linear(states, weight, bias).float()
        if cap is not None:
            logits = (logits / cap).tanh() * cap
        return (logits / temperature).log_softmax(-1).gather(-1, wanted)

    if not ids.shape[0]:
        return hidden.sum(-1, keepdim=True)[:0].expand(0, ids.shape[1])
    pairs = zip(torch.split(hidden, chunk_tokens), torch.split(ids, chunk_tokens), strict=True)
    return torch.cat([checkpoint(read, *pair, use_reentrant=False) for pair in pairs])

"""Proves at start that the decoder of a model gives the log-probs of its plain forward.

Guarantees:
1. a model whose attention ignores the given mask or positions, or whose cache cannot be copied and cut by rows, is
   refused (`config.model`) with the size of the difference, instead of training on wrong log-probs. The check compares
   two prompts of unequal length in one batch, several samples of each, once all to the same end and once with samples
   that end early; and, for layers that do not see the whole past, a sample that begins just before that border;
2. the decoder is left in its initial state.

Example: window 512: prompts of 2, 5 and 511 tokens, 4 more each; the last one's third new token no longer sees the
first of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import ConfigError
from producers.engines.hf.cache_interface import UNFIT, call_options
from producers.engines.hf.decoder import Decoder

TOKENS = 4  # per sample
LIMIT = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_LIMIT = 0.5  # bfloat16 on random weights differs by up to 0.18 between two orders of summation
BORDERS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size", "index_topk")


def check_decoder(decoder: Decoder, model: Any, *, max_prompt: int, max_new: int, where: str) -> None:
    """Sample a few tokens of prompts of unequal length in one batch, and compare with a forward of each."""
    vocab = int(model.get_input_embeddings().weight.shape[0])
    new = min(TOKENS, max_new)

    def make_request(length: int, indices: tuple[int, ...], stop: tuple[int, ...] = ()) -> GenRequest:
        prompt = np.arange(length, dtype=np.int32) * 7 % vocab
        return GenRequest(f"check-{length}", prompt, indices, 1, new, stop_ids=stop)

    groups = [make_request(length, (0, 1, 2)) for length in sorted({min(2, max_prompt), min(5, max_prompt)})]
    longest = max_prompt + max_new - new
    crossing = [make_request(border - 1, (0,)) for border in sorted(borders(model.config)) if 6 < border <= longest]
    requests = groups + crossing
    samples = _run(decoder, requests)
    early = [make_request(len(item.prompt_ids), (0, 1, 2), _stop(item.id, samples)) for item in groups]
    samples += _run(decoder, early)
    prompts = {request.id: request.prompt_ids for request in requests}
    gap = max(_gap(model, prompts[item.id], item) for item in samples)
    limit = LIMIT.get(next(model.parameters()).dtype, HALF_LIMIT)
    if not gap <= limit:  # NaN is refused too
        raise ConfigError(
            "config.model",
            f"log-probs of decoding differ from the model's plain forward by {gap:.3g}",
            where=where,
            remedy="use another engine (producers.engine) for this model",
        )


def borders(config: Any) -> set[int]:
    """Distances beyond which some layer of the model sees no tokens."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in BORDERS)
    return {int(border) for border in found if isinstance(border, int) and border > 0}


def _stop(request: str, samples: Sequence[GenDelta]) -> tuple[int, ...]:
    """A token that ends one of the samples between its first and its last token: the caches of a group differ from the
    second token on."""
    for item in samples:
        tokens = item.token_ids.tolist() if item.id == request else []
        for place in range(1, len(tokens) - 1):
            if tokens[place] not in tokens[:place]:
                return (tokens[place],)
    return ()


def _run(decoder: Decoder, requests: Sequence[GenRequest]) -> list[GenDelta]:
    decoder.swap(0, lambda: None)
    for request in requests:
        decoder.submit(request)
    samples: list[GenDelta] = []
    try:
        while not decoder.idle:
            samples += decoder.step()
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        what = f"decoding fails: {type(error).__name__}: {error}"
        raise ConfigError("config.model", what, where=requests[0].id) from error
    decoder.reset()
    return samples


@torch.inference_mode()
def _gap(model: torch.nn.Module, prompt: npt.NDArray[np.int32], item: GenDelta) -> float:
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.concatenate([prompt, item.token_ids]).astype(np.int64)).to(device)
    new = len(item.token_ids)
    few = dict.fromkeys(call_options(model), new + 1)  # for a long prompt, only the last logits
    logits = model(input_ids=ids[None], use_cache=False, **few).logits[0, -new - 1 : -1]
    plain = torch.log_softmax(logits.float(), -1).gather(1, ids[len(prompt) :, None])[:, 0]
    return float((plain.cpu() - torch.from_numpy(item.logprobs)).abs().max())

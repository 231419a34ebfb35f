"""Proves at start that the slot path of this model gives the log-probs of its plain forward.

Called once by the hf engine, before any weights arrive. Guarantees: a model whose attention ignores the mask or the
positions that the slot sampler passes is refused (`config.model`) with the size of the disagreement, instead of
training on wrong log-probs. It leaves the decoder as it found it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import ConfigError
from producers.engines.decoder import Decoder

TOKENS = 4  # per sample
LIMIT = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_LIMIT = 0.5  # bfloat16 on random weights differs by up to 0.18 between two orders of summation


def check_decoder(decoder: Decoder, *, vocab: int, max_prompt: int, max_new: int, where: str) -> None:
    """Sample a few tokens of two prompts of unequal length in one batch, and compare with a forward of each."""
    requests = [
        GenRequest(f"check-{length}", np.arange(length, dtype=np.int32) * 7 % vocab, (0, 1), 1, min(TOKENS, max_new))
        for length in sorted({min(2, max_prompt), min(5, max_prompt)})
    ]
    prompts = {request.id: request.prompt_ids for request in requests}
    decoder.swap(0, lambda: None)
    for request in requests:
        decoder.submit(request)
    samples: list[GenDelta] = []
    while not decoder.idle:
        samples += decoder.step()
    decoder.reset()
    gap = max(_gap(decoder.model, prompts[item.id], item) for item in samples)
    limit = LIMIT.get(next(decoder.model.parameters()).dtype, HALF_LIMIT)
    if not gap <= limit:  # NaN is refused too
        raise ConfigError(
            "config.model", f"log-probs of the slot sampler differ from the model's plain forward by {gap:.3g}",
            where=where, remedy="use another engine (producers.engine) for this model",
        )  # fmt: skip


@torch.inference_mode()
def _gap(model: torch.nn.Module, prompt: npt.NDArray[np.int32], item: GenDelta) -> float:
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.concatenate([prompt, item.token_ids]).astype(np.int64)).to(device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    plain = torch.log_softmax(logits.float(), -1).gather(1, ids[len(prompt) :, None])[:, 0]
    return float((plain.cpu() - torch.from_numpy(item.logprobs)).abs().max())

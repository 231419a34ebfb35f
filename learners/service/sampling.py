"""Samples of one request, by the model object that also trains.

Guarantees:
1. the samples of a request are drawn together and with nothing else: tokens and log-probs depend on its prompt,
   parameters, seed and adapter alone. Sample j draws from a generator of its own, seeded with (seed, j);
2. log-probs are of the model at temperature 1 and without truncation, as a forward pass gives them.

Truncation keeps the `top_k` largest, then of these the smallest set with probability `top_p`.
Example: temperature 0 is greedy; `stop = []` goes on to `max_tokens`, beyond the end token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from learners.service.base_model import BaseModel
from learners.service.protocol import BadRequest
from learners.service.sampling_request import SampleRequest, SamplingParams

DEFAULT_TOKENS = 1024  # without max_tokens, or as many as the model's positions allow


class Sample(msgspec.Struct):
    """A sample under way."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool = False


class Sampler:
    def __init__(self, base: BaseModel, decode: Callable[[list[int]], str] | None, end_ids: Sequence[int]) -> None:
        """`decode`: of the model's tokenizer, for stop texts; `end_ids`: tokens that end an answer by default."""
        self._base = base
        self._decode = decode
        self._end_ids = frozenset(end_ids)

    @torch.no_grad()
    def sample(self, request: SampleRequest, *, seed: int) -> tuple[list[Sample], list[float] | None]:
        """Samples, and log-probs of the prompt where they are asked for (NaN where not). `seed`: without one of the
        request's own.

        Raises:
            BadRequest: see `SampleRequest.tokens`; the prompt is too long.
        """
        tokens, params = request.tokens(), request.sampling_params
        room = self._base.positions - len(tokens) if self._base.positions is not None else DEFAULT_TOKENS
        limit = min(DEFAULT_TOKENS, max(room, 1)) if params.max_tokens is None else params.max_tokens
        self._base.check_tokens(tokens, more=limit)
        stop_ids, stop_texts = self._read_stop(params)
        own = seed if params.seed is None else params.seed
        generators = [_generator(own, number) for number in range(request.num_samples)]
        prompt = torch.tensor([tokens], device=self._base.device)
        result = self._base.hf(input_ids=prompt, use_cache=True, logits_to_keep=1)
        cache, logits = result.past_key_values, result.logits[:, -1]
        if request.num_samples > 1:
            cache.batch_repeat_interleave(request.num_samples)
            logits = logits.expand(request.num_samples, -1)
        found = [Sample([], []) for _ in generators]
        for number in range(limit):
            logs = logits.float().log_softmax(-1)
            drawn = _draw(logs, params, generators)
            chosen = logs.gather(-1, drawn[:, None])[:, 0].tolist()
            for one, token, logprob in zip(found, drawn.tolist(), chosen, strict=True):
                if not one.stopped:
                    one.tokens.append(token)
                    one.logprobs.append(logprob)
                    one.stopped = token in stop_ids or self._has_text(one.tokens, stop_texts)
            if number + 1 == limit or all(one.stopped for one in found):
                break
            result = self._base.hf(input_ids=drawn[:, None], past_key_values=cache, use_cache=True)
            logits = result.logits[:, -1]
        return found, self._prompt_logprobs(tokens, request) if request.prompt_logprobs else None

    def _prompt_logprobs(self, tokens: list[int], request: SampleRequest) -> list[float]:
        ids = torch.tensor(tokens, device=self._base.device)
        found = self._base.logprobs(ids[:-1], ids[1:]).tolist() if len(tokens) > 1 else []
        shown = len(found) if request.prompt_logprobs_last_n is None else request.prompt_logprobs_last_n
        missing = len(tokens) - min(shown, len(found))
        return [float("nan")] * missing + found[missing - 1 :]

    def _read_stop(self, params: SamplingParams) -> tuple[frozenset[int], list[str]]:
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        if stop is None:
            return self._end_ids, []
        ids = frozenset(one for one in stop if isinstance(one, int))
        texts = [one for one in stop if isinstance(one, str) and one]
        if texts and self._decode is None:
            raise BadRequest("stop has texts, and the model folder has no tokenizer")
        return ids, texts

    def _has_text(self, tokens: list[int], texts: list[str]) -> bool:
        if not texts or self._decode is None:
            return False
        # A stop text ends with the newest token; a token has at least one byte.
        longest = max(len(text.encode()) for text in texts)
        tail = self._decode(tokens[-longest - 1 :])
        return any(text in tail for text in texts)


def _generator(seed: int, number: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def _draw(logs: Tensor, params: SamplingParams, generators: Sequence[torch.Generator]) -> Tensor:
    """One token for each row, int64 `[n]`."""
    if params.temperature <= 0:
        return logs.argmax(-1)
    weights = (logs / params.temperature).softmax(-1).cpu()  # draws are the same on every device
    if params.top_k > 0:
        smallest = weights.topk(min(params.top_k, weights.shape[-1]), -1).values[:, -1:]
        weights = weights.where(weights >= smallest, 0.0)
    if params.top_p < 1:
        ordered, places = weights.sort(dim=-1, descending=True, stable=True)
        total = weights.sum(-1, keepdim=True)
        ordered[ordered.cumsum(-1) - ordered >= params.top_p * total] = 0
        weights = torch.zeros_like(weights).scatter(-1, places, ordered)
    rows = [torch.multinomial(row, 1, generator=one) for row, one in zip(weights, generators, strict=True)]
    return torch.cat(rows).to(logs.device)

"""Proves at start that the decoder of a model gives the log-probs of its plain forward.

Guarantees:
1. a model whose attention ignores the given mask or positions, or whose cache cannot be copied and cut by rows, is
   refused (`config.model`) with the size of the difference, instead of training on wrong log-probs. The check compares
   two prompts of unequal length in one batch, several samples of each, once all to the same end and once with samples
   that end early; and, for layers that do not see the whole past, a sample that begins just before that border. With a
   `PrefixCache` also the next turn of each sample, and with drafts the same samples again, with right and wrong drafts;
2. the decoder is left in its initial state.

Example: window 512: prompts of 2, 5 and 511 tokens, 4 more each; the last one's third new token no longer sees the
first of its prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import ConfigError
from asyncrl.images.forward import Seen, join_images, stray_placeholders
from asyncrl.images.model_inputs import ImageInputs, test_image
from producers.engines.hf.cache_interface import UNFIT, call_options
from producers.engines.hf.decoder import Decoder
from producers.engines.ngram import Drafter, Line

AGAIN = "turn-2-"
TOKENS = 4  # per sample
LIMIT = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_LIMIT = 0.5  # bfloat16 on random weights differs by up to 0.18 between two orders of summation
BORDERS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size", "index_topk")


def check_decoder(
    decoder: Decoder,
    model: Any,
    *,
    max_prompt: int,
    max_new: int,
    where: str,
    images: ImageInputs | None = None,
    drafts: int = 0,
) -> None:
    """Sample a few tokens of prompts of unequal length in one batch, and compare with a forward of each; of a
    vision-language model (`images`) also prompts with images of two sizes. With `drafts`, the most per sample and step,
    the decoder gets its drafter.
    """
    vocab = int(model.get_input_embeddings().weight.shape[0])
    new = min(TOKENS, max_new)

    def make_request(length: int, indices: tuple[int, ...], stop: tuple[int, ...] = ()) -> GenRequest:
        prompt = np.arange(length, dtype=np.int32) * 7 % vocab
        return GenRequest(f"check-{length}", prompt, indices, 1, new, stop_ids=stop)

    groups = [make_request(length, (0, 1, 2)) for length in sorted({min(2, max_prompt), min(5, max_prompt)})]
    longest = max_prompt + max_new - new
    crossing = [make_request(border - 1, (0,)) for border in sorted(borders(model.config)) if 6 < border <= longest]
    requests = groups + crossing + (_image_requests(images, max_prompt, new) if images else [])
    samples = _run(decoder, requests)
    early = [make_request(len(item.prompt_ids), (0, 1, 2), _stop(item.id, samples)) for item in groups]
    samples += _run(decoder, early)
    asked = {request.id: request for request in requests}
    if decoder.prefixes is not None:
        samples += _run(decoder, groups + crossing, then=lambda one: _next_turn(asked, one, max_prompt, new))
    limit = LIMIT.get(next(model.parameters()).dtype, HALF_LIMIT)
    differ = "log-probs of decoding differ from the model's plain forward by"
    gap = max(_gap(model, asked[item.id], item, images) for item in samples)
    if not gap <= limit:  # NaN is refused too
        remedy = "use another engine (producers.engine) for this model"
        raise ConfigError("config.model", f"{differ} {gap:.3g}", where=where, remedy=remedy)
    if not drafts:
        return
    what, problem = f"producers.speculative_tokens = {drafts}", "its cache cannot forget a wrong draft"
    if decoder.memory.verifies:
        decoder.drafter = _Answers(asked, samples)
        gap = max(_gap(model, asked[item.id], item, images) for item in _run(decoder, requests))
        problem = "" if gap <= limit else f"{differ} {gap:.3g}"
    on_cpu = next(model.parameters()).device.type == "cpu"  # shared with other processes: their time is not a step's
    decoder.drafter = Drafter(drafts, clock=time.thread_time if on_cpu else time.perf_counter)
    if problem:
        remedy = "set producers.speculative_tokens = 0"
        raise ConfigError("config.conflict", f"{what}: {problem}", where=where, remedy=remedy)


class _Answers(Drafter):
    """Drafts of tokens that a decoder drew before: all right in even lanes, in odd ones the first alone."""

    def __init__(self, asked: dict[str, GenRequest], samples: Sequence[GenDelta]) -> None:
        super().__init__(TOKENS)
        ids = [[*asked[item.id].prompt_ids.tolist(), *item.token_ids.tolist()] for item in samples]
        self._known = ["".join(map(chr, tokens)) for tokens in ids]

    def draft(self, lane: int, text: str, most: int) -> str:
        found = next((known[len(text) :][:most] for known in self._known if known.startswith(text)), "")
        return found[:1] * len(found) if lane % 2 else found

    def decide(self, lines: Sequence[Line]) -> int:
        return max(len(line.draft) for line in lines)


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


def _next_turn(asked: dict[str, GenRequest], sample: GenDelta, max_prompt: int, new: int) -> GenRequest | None:
    """A request that begins with the sample, if there is room; noted in `asked`."""
    first = asked[sample.id]
    prompt = np.concatenate([first.prompt_ids, sample.token_ids, first.prompt_ids[:3]])
    if first.id.startswith(AGAIN) or len(prompt) > max_prompt:
        return None
    request = GenRequest(f"{AGAIN}{first.id}-{sample.index}", prompt.astype(np.int32), (0,), 1, new)
    asked[request.id] = request
    return request


def _run(
    decoder: Decoder, requests: Sequence[GenRequest], *, then: Callable[[GenDelta], GenRequest | None] = lambda _: None
) -> list[GenDelta]:
    """All samples of the requests, and of those that `then` gives for a finished sample."""
    decoder.swap(0, lambda: None)
    for request in requests:
        decoder.submit(request)
    samples: list[GenDelta] = []
    try:
        while not decoder.idle:
            made = decoder.step()
            samples += made
            for request in filter(None, map(then, made)):
                decoder.submit(request)
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        what = f"decoding fails: {type(error).__name__}: {error}"
        raise ConfigError("config.model", what, where=requests[0].id) from error
    decoder.reset()
    return samples


def _image_requests(images: ImageInputs, max_prompt: int, new: int) -> list[GenRequest]:
    """A prompt with one image and one with two, as far as they fit."""
    found = []
    for sides in ([(64, 32)], [(32, 64), (48, 48)]):
        pictures = tuple(test_image(*side) for side in sides)
        ids = images.expand([1, *[images.token, 2] * len(pictures), 1], pictures)
        if len(ids) <= max_prompt:
            found.append(GenRequest(f"check-{len(pictures)}-images", ids, (0, 1), 1, new, images=pictures))
    return found


@torch.inference_mode()
def _gap(model: torch.nn.Module, request: GenRequest, item: GenDelta, images: ImageInputs | None) -> float:
    device = next(model.parameters()).device
    prompt = request.prompt_ids
    ids = torch.from_numpy(np.concatenate([prompt, item.token_ids]).astype(np.int64)).to(device)
    new = len(item.token_ids)
    more: dict[str, Any] = dict.fromkeys(call_options(model), new + 1)  # for a long prompt, only the last logits
    given, seen = ids[None], None
    if images is not None and request.images:
        kinds = given == images.token  # by them the model finds its positions itself
        stray = kinds.clone()
        stray[:, : len(prompt)], kinds[:, len(prompt) :] = False, False
        arguments = join_images([images.pixels(image) for image in request.images], device)
        seen = Seen(arguments, stray, images.token)
        given = seen.mask(given)
        more |= {**(arguments or {}), **({"mm_token_type_ids": kinds.int()} if images.mrope else {})}
    with stray_placeholders(model, seen):
        logits = model(input_ids=given, use_cache=False, **more).logits[0, -new - 1 : -1]
    plain = torch.log_softmax(logits.float(), -1).gather(1, ids[len(prompt) :, None])[:, 0]
    return float((plain.cpu() - torch.from_numpy(item.logprobs)).abs().max())

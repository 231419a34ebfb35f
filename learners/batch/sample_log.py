"""The samples of a step that the run keeps for people: text, rewards, and the log-probs of engine and learner by token.

Guarantees:
1. the best and the worst samples of the batch, `log.samples_per_step` in total; the same batch gives the same ones;
2. `engine` are the recorded log-probs, `learner` those of the step's forward pass; both are null for tokens that the
   policy did not sample;
3. the joined texts of the tokens are the text of the response: a character of several tokens stands at its last one;
4. a long sample keeps its first `MAX_TOKENS` tokens; ranks send only what is kept.

A sample of several sequences (`wire.SampleHead.rows`) is one line: its inner prompts are tokens without log-probs.
Example: of rewards 1, 0, 1, 0.5 with two to keep, the samples at places 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.images.digests import image_digests
from learners.batch.assembly import group_lag
from learners.batch.estimates import Cut, iter_cuts

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import ClaimedBatch
    from learners.gang.gang import Gang

Array = npt.NDArray[Any]
Decode = Callable[[list[int]], str]
MAX_TOKENS = 256
BROKEN = "\ufffd"  # a tokenizer's text of an incomplete character
_encode = msgspec.msgpack.Encoder().encode


def places(batch: ClaimedBatch, count: int) -> list[int]:
    """Return the places of the kept samples in the batch: the best, then the worst."""
    rewards = [sample.reward for group in batch.groups for sample in group.samples]
    order = sorted(range(len(rewards)), key=lambda place: (-rewards[place], place))
    half = -(-count // 2)
    return (order[:half] + order[max(half, len(order) - (count - half)) :])[:count]


def gather(gang: Gang, mine: Mapping[int, Array], batch: ClaimedBatch | None, count: int) -> dict[int, list[float]]:
    """Return the learner's log-probs of the kept samples, by place; NaN for tokens that the policy did not sample.
    Collective.

    `mine`: log-probs of this rank by place of the sequence. `batch` on rank 0.
    """
    cuts: dict[int, Cut] = {}
    if batch is not None:
        samples, kept = [sample for group in batch.groups for sample in group.samples], set(places(batch, count))
        cuts = {
            number: cut
            for number, cut in enumerate(iter_cuts(samples))
            if cut.sample in kept and cut.start < MAX_TOKENS
        }
    chosen = msgspec.msgpack.decode(gang.share(None if batch is None else _encode(list(cuts))), type=list[int])
    part = {place: mine[place][:MAX_TOKENS].astype(np.float32).tobytes() for place in chosen if place in mine}
    found: dict[int, Array] = {}
    for text in gang.gather_shares(_encode(part)):
        for place, data in msgspec.msgpack.decode(text, type=dict[int, bytes]).items():
            if batch is not None and place in cuts:
                cut = cuts[place]
                whole = found.setdefault(cut.sample, np.full(samples[cut.sample].response.size, np.nan, np.float32))
                values = np.frombuffer(data, np.float32)
                whole[cut.start : cut.start + values.size] = values
    return {place: values[:MAX_TOKENS].tolist() for place, values in found.items()}


def lines(batch: ClaimedBatch, count: int, decode: Decode, learner: Mapping[int, list[float]]) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl of a step."""
    every = [(group, sample) for group in batch.groups for sample in group.samples]
    found = []
    for place in places(batch, count):
        group, sample = every[place]
        ids = sample.response[:MAX_TOKENS].tolist()
        trained = [True] * len(ids) if sample.mask is None else [bool(one) for one in sample.mask[:MAX_TOKENS]]
        line = {
            "step": batch.step, "group": group.group, "index": sample.index, "lag": group_lag(group, batch.version),
            "prompt": decode(group.prompt_ids.tolist()), "response": decode(sample.response.tolist()),
            "reward": sample.reward, "parts": sample.parts, "length": int(sample.response.size),
            "finish": sample.finish, "runs": sample.runs, "tokens": pieces(ids, decode),
            "engine": _numbers(sample.logprobs[:MAX_TOKENS].tolist(), trained),
        }  # fmt: skip
        if images := image_digests(group.row):
            line["images"] = list(images)
        if sample.images:
            line["shown"] = [digest for _, digest in sample.images]
        if sample.others:
            line["others"] = sample.others
        if len(known := learner.get(place, ())) == len(ids):
            line["learner"] = _numbers(known, trained)
        found.append(line)
    return found


def _numbers(values: Sequence[float], trained: Sequence[bool]) -> list[float | None]:
    return [
        round(value, 4) + 0.0 if one and np.isfinite(value) else None
        for value, one in zip(values, trained, strict=True)
    ]


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds.

    >>> pieces([2, 3], lambda ids: "".join("abcd"[one] for one in ids))
    ['c', 'd']
    """
    found: list[str] = []
    start = done = 0  # the decoded window, and its tokens with known text
    for end in range(1, len(ids) + 1):
        before, text = decode(list(ids[start:done])), decode(list(ids[start:end]))
        if text.endswith(BROKEN) and end < len(ids):
            found.append("")
            continue
        found.append(text[len(before) :])
        start, done = done, end
    return found

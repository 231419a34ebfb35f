"""Checks the meaning of samples (lengths, token ids, log-probs, versions): at ingest and before batching."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.errors import WireError
from asyncrl.wire.arrays import unpack_arrays
from asyncrl.wire.base import Buffer
from asyncrl.wire.experts import NAMES as EXPERTS
from asyncrl.wire.experts import unpack_experts
from asyncrl.wire.rewards import TeacherLogprobs
from asyncrl.wire.support import NAMES, Support, unpack_support
from asyncrl.wire.work import Pieces, SampleHead, Samples

LOWEST_LOGPROB: Final = -1000.0  # float32 draws no token of a probability below 1e-38; raw log-probs go a little lower
MOST_ROW_BYTES: Final = 16 << 20  # of a prompt's row as JSON
DIGEST_LETTERS: Final = 64  # of an image; digests of weights have at most as many
SPARE_DIGESTS: Final = 64  # of versions that made no token of the message


class SampleLimits(msgspec.Struct, frozen=True):
    """What a run's configuration allows a sample."""

    prompt_tokens: int  # of the group's prompt
    sequence_tokens: int  # of one sequence of a sample, without the group's prompt
    sequences: int  # of one sample
    reward: float  # largest absolute reward
    scores: bool  # whether producers may send rewards, because an environment scores
    support: bool = False  # whether samples come with the support of their draws
    experts: bool = False  # whether they may come with the experts of their tokens


def validate_samples(
    head: Samples,
    payload: Buffer,
    *,
    group_size: int,
    vocab_size: int = 0,
    newest_version: int | None = None,
    limits: SampleLimits | None = None,
) -> str:
    """Why these samples must not be trained; empty if they are valid.

    Cheap numpy checks: lengths agree, indices in range, log-probs finite and not positive, token ids inside the
    vocabulary (if `vocab_size` is known), no version newer than `newest_version`, no empty response, each token among
    the ids that it was drawn from, digests of a plausible length and number, nothing beyond `limits`.
    """
    beyond = _check_limits(head, limits) if limits is not None else ""
    beyond = beyond or find_wrong_digests(head)
    if beyond:
        return beyond
    return checked_arrays(head, payload, group_size=group_size, vocab_size=vocab_size, newest_version=newest_version)[1]


def find_wrong_digests(head: Samples | Pieces) -> str:
    """Why the digests of these samples or pieces may not be kept: rows and lines of the history repeat them."""
    longest = max(map(len, head.digests.values()), default=0)
    if longest > DIGEST_LETTERS:
        return f"digests: one has {longest} characters, {DIGEST_LETTERS} are allowed"
    if len(head.digests) <= SPARE_DIGESTS:  # the usual case
        return ""
    versions = {version for sample in head.samples for version, _ in sample.runs}
    if len(head.digests) > len(versions) + SPARE_DIGESTS:
        return f"digests: {len(head.digests)} for tokens of {len(versions)} versions"
    return ""


def _check_limits(head: Samples, limits: SampleLimits) -> str:
    if head.prompt_tokens > limits.prompt_tokens:
        return f"length: a prompt of {head.prompt_tokens} tokens, {limits.prompt_tokens} are allowed"
    if len(head.row) > MOST_ROW_BYTES:
        return f"length: a row of {len(head.row)} bytes, {MOST_ROW_BYTES} are allowed"
    names = {field.name for field in head.fields}
    if names.isdisjoint(NAMES) == limits.support:
        return "support: it is missing" if limits.support else "support: no draw of this run is cut exactly"
    if not limits.experts and not names.isdisjoint(EXPERTS):
        return "experts: this run does not replay them (learner.router_replay)"
    for sample in head.samples:
        longest = sample.length
        if sample.rows:
            starts = [start for start, _ in sample.rows if start]
            if len(starts) >= limits.sequences:
                return f"rows: {len(starts) + 1} sequences in sample {sample.index}, {limits.sequences} are allowed"
            longest = max(end - start for start, end in itertools.pairwise([0, *starts, sample.length]))
        if longest > limits.sequence_tokens:
            return f"length: {longest} tokens in sample {sample.index}, {limits.sequence_tokens} are allowed"
    return _check_rewards(head, limits)


def _check_rewards(head: Samples, limits: SampleLimits) -> str:
    rewards = [*head.rewards.values(), *[reward for sample in head.samples for _, reward in sample.turns]]
    if (rewards or head.parts) and not limits.scores:
        return f"reward: {head.producer} sent rewards, and no environment scores in this run"
    for parts in head.parts.values():
        rewards += parts.values()
    for reward in rewards:
        if abs(reward) > limits.reward:
            return f"reward: {reward:g} is beyond reward_workers.max_reward = {limits.reward:g}"
    return ""


def checked_arrays(
    head: Samples, payload: Buffer, *, group_size: int, vocab_size: int = 0, newest_version: int | None = None
) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The arrays of some samples (read-only views; the support decoded), and the result of `validate_samples`."""
    try:
        arrays = unpack_arrays(head.fields, payload)
        support = unpack_support(arrays)
        if not arrays.keys().isdisjoint(EXPERTS):
            unpack_experts(arrays, [head.prompt_tokens + sample.length for sample in head.samples])
    except WireError as error:
        return {}, f"layout: {error.message}"
    for name in ("prompt", "response", "logprobs"):
        if name not in arrays:
            return {}, f"layout: field {name} is missing"
    wrong = _check_heads(head, group_size, newest_version) or _check_arrays(head, arrays, vocab_size)
    if support is not None and not wrong:
        wrong = _check_support(support, arrays, vocab_size)
        arrays.update(zip(NAMES, support, strict=True))
    return arrays, wrong


def _check_support(support: Support, arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> str:
    if why := support.find_problem(arrays["response"], arrays.get("mask")):
        return f"support: {why}"
    if vocab_size and support.ids.size and int(support.ids.max()) >= vocab_size:
        return f"support: id {int(support.ids.max())} outside 0..{vocab_size - 1}"
    return ""


def _check_heads(head: Samples, group_size: int, newest_version: int | None) -> str:
    if not head.samples:
        return "empty: no samples"
    seen: set[int] = set()
    for sample in head.samples:
        if not 0 <= sample.index < group_size or sample.index in seen:
            return f"index: sample {sample.index} of a group of {group_size}"
        seen.add(sample.index)
        if sample.length < 1:
            return f"empty: sample {sample.index} has no tokens"
        if sample.finish not in ("stop", "length", "abort"):
            return f"finish: {sample.finish!r}"
        covered, newest = 0, -1
        for version, count in sample.runs:
            if count < 1 or version < 0:
                return f"runs: sample {sample.index} has an empty run or a negative version"
            covered += count
            newest = version if version > newest else newest
        if covered != sample.length:
            return f"length: runs of sample {sample.index} cover {covered} of {sample.length} tokens"
        if newest_version is not None and newest > newest_version:
            return f"version: {newest} was never published (newest {newest_version})"
        if (sample.rows or sample.turns or sample.images) and (wrong := _check_rows(sample)):
            return wrong
        if sample.others and (wrong := _check_others(sample)):
            return wrong
    return ""


def _check_rows(sample: SampleHead) -> str:
    ends = [*(start for start, _ in sample.rows[1:]), sample.length]
    for (start, prompt), end in zip(sample.rows, ends, strict=False):  # no rows, one end
        if start < 0 or prompt < 1 or start + prompt >= end:
            return f"rows: {start}..{end} of sample {sample.index} with {prompt} prompt tokens"
    last = -1
    for place, reward in sample.turns:
        if not last < place < sample.length or not math.isfinite(reward):
            return f"turns: reward {reward} at token {place} of sample {sample.index} after {last}"
        last = place
    last = -1
    for place, digest in sample.images:
        if not last < place < sample.length or len(digest) != DIGEST_LETTERS:
            return f"images: {digest[:8]!r} at token {place} of sample {sample.index} after {last}"
        last = place
    return ""


def _check_others(sample: SampleHead) -> str:
    for turns, policy, runs in sample.others:
        if turns < 0 or not policy or not runs or any(version < 0 or count < 1 for version, count in runs):
            return f"others: a turn of {policy[:20]!r} in sample {sample.index} after {turns} turns, runs {runs[:3]}"
    return ""


_WANTED: Final = {"prompt": "i4", "response": "i4", "logprobs": "f4", "mask": "u1", **dict.fromkeys(NAMES, "u1")}


def _check_mask(head: Samples, mask: npt.NDArray[Any] | None) -> str:
    """Problems of the mask, which marks the tokens that the policy sampled."""
    if mask is None:
        spread = [sample.index for sample in head.samples if sample.rows or sample.images]
        return f"mask: sample {spread[0]} has observations and none" if spread else ""
    if mask.size and int(mask.max()) > 1:
        return "mask: it holds more than 0 and 1"
    start = 0
    for sample in head.samples:
        mine = mask[start : start + sample.length]
        start += sample.length
        if not mine.any():
            return f"mask: no token of sample {sample.index} was sampled"
        if any(mine[first : first + prompt].any() for first, prompt in sample.rows):
            return f"mask: a token of a row's prompt in sample {sample.index} is called sampled"
        if any(not mine[place] for place, _ in sample.turns):
            return f"turns: a reward of sample {sample.index} stands at a token that was not sampled"
        if any(mine[place] for place, _ in sample.images):
            return f"images: one of sample {sample.index} stands at a token that was sampled"
    return ""


def _check_arrays(head: Samples, arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> str:
    total = sum([sample.length for sample in head.samples])
    if arrays["prompt"].size != head.prompt_tokens or head.prompt_tokens < 1:
        return f"length: {arrays['prompt'].size} prompt tokens, {head.prompt_tokens} announced"
    for name in ("response", "logprobs", "mask"):
        if name in arrays and arrays[name].size != total:
            return f"length: {name} has {arrays[name].size} entries for {total} tokens"
    for field in head.fields:
        if _WANTED.get(field.name, field.dtype) != field.dtype:
            return f"layout: {field.name} is {field.dtype}, not {_WANTED[field.name]}"
    wrong = _check_mask(head, arrays.get("mask"))
    if wrong:
        return wrong
    logprobs = arrays["logprobs"]
    # NaN propagates through both, and a comparison with NaN is False
    if not (np.minimum.reduce(logprobs) >= LOWEST_LOGPROB and np.maximum.reduce(logprobs) <= 1e-4):
        return f"logprobs: not finite, above 0 or below {LOWEST_LOGPROB:g}"
    if vocab_size:
        low = min(int(arrays["prompt"].min()), int(arrays["response"].min()))
        high = max(int(arrays["prompt"].max()), int(arrays["response"].max()))
        if low < 0 or high >= vocab_size:
            return f"vocabulary: token id {low if low < 0 else high} outside 0..{vocab_size - 1}"
    return ""


_TAUGHT: Final = {"teacher_logprobs": "f4", "teacher_ids": "i4", "teacher_top": "f4"}


def checked_teacher(
    head: TeacherLogprobs, payload: Buffer, *, length: int, top_k: int | None = None, vocab_size: int = 0
) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """The arrays of a teacher's answer about a response of `length` tokens, and why they must not be trained; empty if
    they are valid. `top_k`: likeliest tokens that were asked for (0: none; None: any number).
    """
    try:
        arrays = unpack_arrays(head.fields, payload)
    except WireError as error:
        return {}, f"layout: {error.message}"
    wrong = next((field for field in head.fields if _TAUGHT.get(field.name) != field.dtype), None)
    if wrong is not None or "teacher_logprobs" not in arrays:
        return (
            {},
            f"layout: {'teacher_logprobs f4 is missing' if wrong is None else f'field {wrong.name} {wrong.dtype}'}",
        )
    if arrays["teacher_logprobs"].size != length:
        return {}, f"length: {arrays['teacher_logprobs'].size} log-probs for {length} tokens"
    ids, top = (arrays.get(name, np.zeros(0, np.int32)) for name in ("teacher_ids", "teacher_top"))
    if ids.size != top.size or ids.size % length or (top_k is not None and ids.size != top_k * length):
        asked = "" if top_k is None else f", {top_k} each were asked for"
        return {}, f"length: {ids.size} likeliest tokens with {top.size} log-probs for {length} tokens{asked}"
    for values in (arrays["teacher_logprobs"], top):
        # NaN fails both comparisons. An impossible token has the lowest log-prob, never -inf.
        if values.size and not (np.minimum.reduce(values) >= LOWEST_LOGPROB and np.maximum.reduce(values) <= 1e-4):
            return {}, f"logprobs: not finite, above 0 or below {LOWEST_LOGPROB:g}"
    if vocab_size and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return {}, f"vocabulary: a token id outside 0..{vocab_size - 1}"
    return arrays, ""

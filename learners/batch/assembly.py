"""From a claimed batch to the rows that each rank trains on.

Guarantees:
1. what mixes samples (advantages, weights by lag, resampling, denominators) is computed once, on the whole batch,
   before the split. Estimators that need the model's numbers follow in `learners.step.batch_passes`, also once;
2. every rank has the same number of micro-batches (some may be empty), balanced by tokens;
3. the same batch gives the same rows (replay is bitwise).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.digests import image_digests
from asyncrl.versions import lag, oldest_version
from learners.batch import estimates
from learners.batch.micro_batches import Minibatch, Sample, StepBatch, balance, pack, packed_row, pad, padded_rows

if TYPE_CHECKING:
    from asyncrl.images.model_inputs import ImageInputs
    from asyncrl.wire import Support
    from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData

Array = npt.NDArray[Any]


def support_in(sample: Any) -> Support | None:
    """Return what each token of a sample was drawn from; None: the whole vocabulary, as in the modes without reward."""
    return getattr(sample, "support", None)


def images_in(batch: Any, group: Any) -> tuple[bytes, ...]:
    """Return the encoded images of a group's prompt, in order.

    Raises:
        KeyError: the batch lacks one: such a group must not train as text.
    """
    digests = image_digests(getattr(group, "row", None) or {})
    return tuple(batch.images[digest] for digest in digests)


def unusable(
    group: GroupData,
    *,
    max_tokens: int,
    vocabulary: int = 0,
    teacher: str = "",
    routing: tuple[int, int, int] = (0, 0, 0),
    one_row: bool = False,
) -> str:
    """Return why the learner cannot train this group; empty if it can. Checks what the wire format does not. `teacher`:
    of the group's row; `routing`: experts, layers, and experts of a token; `one_row`: a sample must be one sequence,
    with images in its prompt alone.
    """
    for cut in estimates.iter_cuts(group.samples):
        tokens = (cut.prompt or group.prompt_ids.size) + cut.stop - cut.start
        if tokens > max_tokens:
            which = group.samples[cut.sample].index
            return f"length: sample {which} has {tokens} tokens, learner.micro_batch_tokens is {max_tokens}"
    for sample in group.samples:
        if teacher and (sample.teaching is None or sample.teaching.teacher != teacher):
            return f"teacher: {teacher} has told nothing about sample {sample.index}"
        if one_row and (estimates.rows_in(sample) or getattr(sample, "images", ())):
            what = "has several sequences or images after its prompt, which only mode rl trains"
            return f"rows: sample {sample.index} {what}"
        if not np.isfinite(sample.reward):
            return f"reward: sample {sample.index} has {sample.reward}"
        if why := _misrouted(getattr(sample, "experts", None), routing):
            return f"experts: sample {sample.index} {why}"
        if vocabulary:
            support = support_in(sample)
            kept = () if support is None else (support.ids,)
            if (teaching := getattr(sample, "teaching", None)) is not None and teaching.top_ids is not None:
                kept = (*kept, teaching.top_ids)
            for ids in (group.prompt_ids, sample.response, *kept):
                if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                    return f"vocabulary: sample {sample.index} has a token outside 0..{vocabulary - 1}"
    return "" if group.samples else "empty: no samples"


def _misrouted(chosen: Array | None, routing: tuple[int, int, int]) -> str:
    if chosen is None:
        return ""
    experts, *shape = routing
    if list(chosen.shape[1:]) != shape:
        return f"has {chosen.shape[2]} in each of {chosen.shape[1]} layers, the model {shape[1]} in each of {shape[0]}"
    return "" if 0 <= int(chosen.min()) <= int(chosen.max()) < experts else f"has one outside 0..{experts - 1}"


def image_problem(group: GroupData, images: Mapping[str, bytes], inputs: ImageInputs | None) -> str:
    """Return why the images of a group cannot be trained with its tokens; empty if they can. `images`: those of the
    batch by digest; `inputs`: None for a language model."""
    shown = image_digests(group.row)
    if inputs is None:
        named = bool(shown) or any(sample.images for sample in group.samples)
        return "image: the group has images, and the model reads text alone" if named else ""
    for cut in estimates.iter_cuts(group.samples):
        sample = group.samples[cut.sample]
        first = cut.start - cut.prompt
        prompt = sample.response[first : cut.start] if cut.prompt else group.prompt_ids
        own = [(place - cut.start + prompt.size, digest) for place, digest in _later_images(sample, cut)]
        digests = [*(() if cut.prompt else shown), *(digest for _, digest in own)]
        ids = np.concatenate((prompt, sample.response[cut.start : cut.stop]))
        try:
            inputs.row(ids, [images[digest] for digest in digests], [place for place, _ in own])
        except (ValueError, ImageProblem) as error:
            return f"image: sample {sample.index}: {error}"
    return ""


def _later_images(sample: Any, cut: estimates.Cut) -> list[tuple[int, str]]:
    """Return the images among the tokens of a sequence of this sample, by their place in its response."""
    first = cut.start - cut.prompt
    return [(place, digest) for place, digest in getattr(sample, "images", ()) if first <= place < cut.stop]


def group_lag(group: GroupData, version: int) -> int:
    """Return the training version minus the oldest version of any token of the group."""
    oldest = oldest_version(run for sample in group.samples for run in sample.runs)
    return 0 if oldest is None else lag(version, oldest)


def assemble(
    batch: ClaimedBatch,
    *,
    algorithm: AlgorithmConfig,
    ranks: int,
    max_tokens: int,
    packing: bool = True,
    baselines: Mapping[int, float] | None = None,
    seed: int = 0,
    rewards: Sequence[str] = (),
) -> StepBatch:
    """Return advantages, statistics, mini-batches (whole groups, in batch order) and rows for every rank.

    `baselines`: score of the greedy response by group. `seed`: of PF-PPO's draws. `rewards`: names of the components
    that a sample may have, as no sample of a batch may have one of them.
    """
    whole = estimates.describe_batch(batch, algorithm, baselines, rewards)
    found = estimates.estimate_early(whole, algorithm, seed=seed)
    prompts = [group.prompt_ids for group in batch.groups for _ in group.samples]
    shown = [images_in(batch, group) for group in batch.groups for _ in group.samples]
    sequences = [
        _see(_sequence(number, one, prompts, whole, found), one, whole.samples[one.sample], shown, batch)
        for number, one in enumerate(whole.cuts)
    ]
    chunks = _split_groups(
        [sum(1 for _ in estimates.iter_cuts(group.samples)) for group in batch.groups], algorithm.minibatches
    )
    cut = [
        _minibatch(
            _draw(sequences[part], found.repeats, algorithm),
            ranks=ranks,
            max_tokens=max_tokens,
            packing=packing,
        )
        for part in chunks
    ]
    shares = tuple(tuple(minibatch[rank] for minibatch in cut) for rank in range(ranks))
    stats = statistics(batch, np.array(found.first))
    stats["micro_batches"] = float(sum(len(part.micro) for share in shares for part in share))
    return StepBatch(shares, stats | found.stats, found.first, whole)


def _see(sequence: Sample, cut: estimates.Cut, sample: Any, shown: Sequence[tuple[bytes, ...]], batch: Any) -> Sample:
    """Return the sequence with its images: those of the group's prompt (`shown`, by sample) and of its own tokens."""
    later = _later_images(sample, cut)
    images = () if cut.prompt else shown[cut.sample]
    offset = sequence.prompt_tokens - cut.start
    return replace(
        sequence,
        images=(*images, *(batch.images[digest] for _, digest in later)),
        image_places=tuple(place + offset for place, _ in later),
    )


def _draw(sequences: Sequence[Sample], repeats: Sequence[int], algorithm: AlgorithmConfig) -> list[Sample]:
    """Repeat each sequence as often as its sample was drawn; every draw is a sample of its own."""
    first = np.cumsum([0, *repeats]).tolist()
    return [
        replace(one, owner=first[one.owner] + copy if algorithm.sequence == "sample" else -1)
        for one in sequences
        for copy in range(repeats[one.owner])
    ]


def _sequence(
    number: int, cut: estimates.Cut, prompts: Sequence[Array], whole: estimates.Whole, found: estimates.Found
) -> Sample:
    """Return one sequence of the batch with its part of the sample's estimates."""
    of, place = cut.sample, slice(cut.start, cut.stop)
    sample = whole.samples[of]
    if sample.logprobs.size != sample.response.size:
        raise ValueError(f"{sample.logprobs.size} log-probs for {sample.response.size} tokens")
    support = support_in(sample)
    prompt = sample.response[cut.start - cut.prompt : cut.start] if cut.prompt else prompts[of]
    return Sample(
        tokens=np.concatenate((prompt, sample.response[place])).astype(np.int32),
        prompt_tokens=int(prompt.size),
        behaviour=sample.logprobs[place],
        mask=found.masks[of][place],
        advantage=found.first[of],
        number=number,
        owner=of,
        advantages=found.advantages[of][place],
        lags=found.lags[of][place],
        scale=float(found.scales[of]),
        right=bool(found.right[of]),
        support=None if support is None else support.cut(cut.start, cut.stop),
        experts=None if cut.prompt else getattr(sample, "experts", None),
        **_teaching_in(sample, place),
    )


def _teaching_in(sample: Any, place: slice) -> dict[str, Any]:
    """What a teacher said about some tokens of a sample; samples of the modes without reward have none."""
    teaching = getattr(sample, "teaching", None)
    if teaching is None:
        return {}
    found = {"teacher": teaching.logprobs, "top_ids": teaching.top_ids, "top_logprobs": teaching.top_logprobs}
    return {name: array[place] for name, array in found.items() if array is not None}


def statistics(batch: ClaimedBatch, advantages: Array) -> dict[str, float]:
    """Return metrics of the batch by catalogue name."""
    samples = [sample for group in batch.groups for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples] or [0.0])
    lengths = np.array([estimates.response_length(sample) for sample in samples] or [0])
    lags = np.array([group_lag(group, batch.version) for group in batch.groups] or [0])
    bounds = np.array([group.bound for group in batch.groups] or [0])
    flat = [len({sample.reward for sample in group.samples}) == 1 for group in batch.groups]
    stats = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
        "bound_max": float(bounds.max()),
        "over_bound_groups": float((lags > bounds).sum()),
        "zero_advantage_share": float(np.mean(flat)) if flat else 0.0,
        "tokens": float(sum(s.response.size if s.mask is None else int(s.mask.sum()) for s in samples)),
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated_share": float(np.mean([sample.finish == "length" for sample in samples])) if samples else 0.0,
        "groups": float(len(batch.groups)),
    }
    if any(sample.mask is not None for sample in samples):
        stats["observed_share"] = 1 - stats["tokens"] / max(1.0, float(lengths.sum()))
        stats["rows_mean"] = sum(1 for _ in estimates.iter_cuts(samples)) / len(samples)
    for name in sorted({name for sample in samples for name in sample.parts}):
        # Only over samples with this reward (`data_sources`): a 0 for the others would be invented.
        stats[f"reward/{name}"] = float(np.mean([sample.parts[name] for sample in samples if name in sample.parts]))
    return stats


def replayed_share(batch: ClaimedBatch) -> float:
    """Return the share of the samples whose experts the engine recorded."""
    known = [sample.experts is not None for group in batch.groups for sample in group.samples]
    return float(np.mean(known)) if known else 0.0


def _split_groups(sizes: Sequence[int], parts: int) -> list[slice]:
    """Return `parts` slices over the samples that split between groups, as equal as possible (some may be empty)."""
    ends = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    marks = [len(sizes) * part // parts for part in range(parts + 1)]
    return [slice(int(ends[low]), int(ends[high])) for low, high in itertools.pairwise(marks)]


def _minibatch(sequences: Sequence[Sample], *, ranks: int, max_tokens: int, packing: bool) -> tuple[Minibatch, ...]:
    """Return the mini-batch of every rank."""
    counts = [int(sequence.mask.sum()) for sequence in sequences]
    owners = [one.owner if one.owner >= 0 else -1 - place for place, one in enumerate(sequences)]
    totals = Counter[int]()
    for owner, count in zip(owners, counts, strict=True):
        totals[owner] += count
    sequences = [
        replace(one, owner=owner, siblings=totals[owner] - count)
        for one, owner, count in zip(sequences, owners, counts, strict=True)
    ]
    right = sum(int(sequence.mask.sum()) for sequence in sequences if sequence.right)
    lengths = [sequence.tokens.size for sequence in sequences]
    rows = pack(lengths, limit=max_tokens, multiple=ranks) if packing else pad(lengths, limit=max_tokens)
    costs = [sum(lengths[item] for item in row) for row in rows]
    per_rank = balance(costs, ranks)
    build = packed_row if packing else padded_rows
    return tuple(
        Minibatch(
            sum(counts),
            sum(count > 0 for count in totals.values()),
            tuple(build([sequences[item] for item in rows[row]] if row >= 0 else []) for row in rows_of_rank),
            right,
        )
        for rows_of_rank in per_rank
    )

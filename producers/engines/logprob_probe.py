"""Probes an engine at its start: does it record the log-probs of the distribution that it samples from, as configured?

The policy's gradient is wrong without an error if it does not, for instance if log-probs are those before the
temperature, or if a server cuts the distribution by its own defaults. First tokens are sampled after a few prompts of
ordinary tokens, at temperature 1, at that of the run, and with the run's cut (top-p, top-k, min-p). Guarantees:
1. an engine is refused if the log-prob of one token differs between samples; if differences of log-probs are not
   divided by the temperature; if log-probs are those of the cut distribution where those of the full one are wanted, or
   the other way round; or if the tokens of some samples are another share of other samples than their log-probs say;
2. the dtype of the run decides what counts as different (`asyncrl.engine.GAP_LIMIT`, as a mean over samples);
3. a policy that is certain of its next token shows little: what cannot be compared is not refused.
It cannot see wrong weights: the learner compares its own log-probs in the first step (`learner.engine_gap`).
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from asyncrl.config import Config, SamplingConfig
from asyncrl.config.mode import streams
from asyncrl.engine import GAP_LIMIT, Engine, GenRequest
from asyncrl.errors import AsyncRLError, ConfigError

PROMPTS, PROMPT_TOKENS = 4, 6
SAMPLES = 64  # of each prompt and setting
SIGMAS = 5.0  # standard errors: a sound engine is refused once in a million starts
ROUNDING = 0.01  # of a sum of probabilities in half precision
TRIES = 5  # new weights in the middle of a probe make its samples incomparable

Draw = tuple[int, float]  # of one sample: its token, and the log-prob


class Draws(NamedTuple):
    """First tokens after one prompt: at temperature 1, at the temperature of the run, and with its cut as well."""

    plain: list[Draw]
    warm: list[Draw]
    cut: list[Draw]


async def check_logprobs(engine: Engine, config: Config, ordinary_ids: Sequence[int]) -> None:
    """Probe the engine under its current weights. `ordinary_ids`: tokens that are not special.

    Raises:
        ConfigError: `config.conflict`: it records other log-probs than the run needs.
        AsyncRLError: `engine.broken`: it does not answer.
    """
    if streams(config):
        return  # rows of a data set have no distribution
    length = min(PROMPT_TOKENS, config.data.max_prompt_tokens)
    places = np.linspace(0, len(ordinary_ids) - 1, PROMPTS * length).astype(int)
    prompts = np.asarray(ordinary_ids, dtype=np.int32)[places].reshape(length, PROMPTS).T
    found: list[Draws] = []
    for attempt in range(TRIES):
        before = engine.health().version
        try:
            async with asyncio.timeout(config.run.hang_timeout_s):
                names = [f"probe/{attempt}/{at}" for at in range(PROMPTS)]
                found = [await _draw(engine, config, *one) for one in zip(prompts, names, strict=True)]
        except TimeoutError:
            what = f"no answer to the probe of its log-probs within run.hang_timeout_s = {config.run.hang_timeout_s:g}"
            raise AsyncRLError("engine.broken", what, where="producers.engine") from None
        if engine.health().version == before:
            break
    else:
        return  # new weights every moment: the learner's own comparison remains
    dtype = config.model.dtype if config.producers.dtype == "auto" else config.producers.dtype
    if problem := find_problem(found, config.training_sampling, limit=GAP_LIMIT[dtype]):
        name = config.producers.engine
        raise ConfigError(
            "config.conflict",
            f"engine {name!r} does not record the log-probs of the distribution that it samples from: {problem}",
            where="producers.engine",
            remedy="see docs/engines.md, When engine and learner differ",
        )


async def _draw(engine: Engine, config: Config, prompt: npt.NDArray[np.int32], name: str) -> Draws:
    """Sample first tokens in the three ways; a way that is another one with these settings is not sampled again."""
    sampling = config.training_sampling
    plain = GenRequest(
        f"{name}/plain", prompt, tuple(range(SAMPLES)), seed=config.run.seed, max_new_tokens=1, stop_ids=()
    )
    warm = replace(plain, id=f"{name}/warm", temperature=sampling.temperature)
    limits = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    cut = replace(warm, id=f"{name}/cut", support=sampling.wants_support, **limits)
    first = await _first_tokens(engine, plain)
    second = first if sampling.temperature == 1 else await _first_tokens(engine, warm)
    return Draws(first, second, await _first_tokens(engine, cut) if sampling.cut else second)


async def _first_tokens(engine: Engine, request: GenRequest) -> list[Draw]:
    found = {delta.index: delta async for delta in engine.generate(request) if len(delta.token_ids)}
    drawn = [found[index] for index in request.indices if index in found]  # without what was aborted
    return [(int(delta.token_ids[0]), float(delta.logprobs[0])) for delta in drawn]


# ---------------------------------------------------------------- what the samples show (pure)


def find_problem(found: Sequence[Draws], sampling: SamplingConfig, *, limit: float) -> str:
    """Why these log-probs are not those of the distribution that the samples come from, empty if nothing shows it.

    `limit`: largest mean difference of log-probs, in nats, that rounding explains.
    """
    every = [logprob for draws in found for way in draws for _, logprob in way]
    if not all(-math.inf < logprob <= limit for logprob in every):
        return "some are above 0 or not finite"
    for way in Draws._fields:
        if (gap := mean_spread(getattr(draws, way) for draws in found)) > limit:
            return f"the log-prob of one token after one prompt differs by {gap:.2g} nats between samples ({way})"
    scale = 1 / sampling.temperature
    gap = mean_difference(((one.plain, one.warm) for one in found), scale=scale, shape_only=True)
    if gap > limit * (1 + scale):
        return f"they do not follow sampling.temperature = {sampling.temperature:g} (off by {gap:.2g} nats per token)"
    gap = mean_difference(((one.warm, one.cut) for one in found), shape_only=sampling.wants_support)
    if gap > limit * 2:
        kind = "over the support of each draw" if sampling.wants_support else "before top_p, top_k and min_p"
        return f"they are not those {kind} (off by {gap:.2g} nats per token)"
    for way in Draws._fields:
        if way == "cut" and sampling.cut and not sampling.wants_support:
            continue  # log-probs before the cut: more is drawn of the tokens that are left
        predicted, seen, sigma = shares([getattr(draws, way) for draws in found])
        if abs(predicted - seen) > SIGMAS * sigma + ROUNDING:
            return (
                f"tokens whose probabilities add up to {predicted:.3f} are {seen:.3f} of the samples ({way}): is "
                "sampling changed by a server's defaults (top_p, top_k, penalties)?"
            )
    return ""


def mean_spread(prompts: Iterable[Sequence[Draw]]) -> float:
    """Mean distance of a log-prob from the mean of its token after its prompt."""
    gaps: list[float] = []
    for draws in prompts:
        means = _means(draws)
        gaps += [abs(logprob - means[token]) for token, logprob in draws]
    return float(np.mean(gaps)) if gaps else 0.0


def mean_difference(
    prompts: Iterable[tuple[Sequence[Draw], Sequence[Draw]]], *, scale: float = 1.0, shape_only: bool
) -> float:
    """Mean |scale x first - second| over the samples of the second whose tokens the first has too; `shape_only`: but
    for one constant for each prompt.
    """
    gaps: list[float] = []
    for first, second in prompts:
        known = _means(first)
        differences = [logprob - scale * known[token] for token, logprob in second if token in known]
        middle = float(np.median(differences)) if differences and shape_only else 0.0
        gaps += [abs(difference - middle) for difference in differences]
    return float(np.mean(gaps)) if gaps else 0.0


def shares(prompts: Sequence[Sequence[Draw]]) -> tuple[float, float, float]:
    """Share of samples predicted by log-probs, share seen, and the standard error of their difference.

    A sample's token is among the tokens of the samples before it with the sum of their probabilities. The differences
    of event and probability are a martingale, so that their variances add up.
    """
    predicted, seen, variance, count = 0.0, 0, 0.0, 0
    for draws in prompts:
        known: dict[int, float] = {}
        mass = 0.0
        for token, logprob in draws:
            predicted, seen, count = predicted + mass, seen + (token in known), count + 1
            variance += min(mass, 1.0) * (1 - min(mass, 1.0))
            if token not in known:
                known[token] = math.exp(logprob)
                mass += known[token]
    count = max(count, 1)
    return predicted / count, seen / count, math.sqrt(variance) / count


def _means(draws: Sequence[Draw]) -> dict[int, float]:
    """Mean log-prob of each token."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for token, logprob in draws:
        found[token].append(logprob)
    return {token: float(np.mean(logprobs)) for token, logprobs in found.items()}

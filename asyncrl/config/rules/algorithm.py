"""Rules of `[learner.algorithm]`, and changes to it while the run goes on.

Example: `proximal = "behaviour"` with `correction = "tis"`: the ratio current / behaviour already holds the whole
correction; a second weight would count it twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.algorithm_catalogue import (
    TABLES,
    effective_correction,
    effective_name,
    effective_options,
    entry,
    known_names,
    option_types,
    weight_level,
)
from asyncrl.config.sections.reward import reward_components
from asyncrl.config.tree import Config
from asyncrl.errors import near_miss
from asyncrl.plugins import is_place

KL_ERROR = 0.2  # largest error that the KL controller reacts to (`learners.algorithms.rewards.next_kl_coeff`)


def problems(config: Config) -> Iterator[Conflict]:
    algorithm = config.learner.algorithm
    if algorithm.minibatches > config.buffer.batch_groups:
        yield conflict("learner.algorithm.minibatches", "learner.algorithm.minibatches exceeds buffer.batch_groups")
    if config.learner.mode != "rl":
        return
    unknown = list(_unknown_names(algorithm))
    yield from unknown
    if unknown:
        return
    yield from option_problems(algorithm)
    yield from combination_problems(algorithm)
    yield from _unmet(config)


def _unknown_names(algorithm: AlgorithmConfig) -> Iterator[Conflict]:
    for kind, table in TABLES.items():
        name = effective_name(algorithm, kind)
        if name in table or is_place(name):
            continue  # avoids a search of the installed packages, which takes milliseconds
        names = known_names(kind)
        if name not in names:
            _, hint = near_miss(name, names)
            yield conflict(
                f"learner.algorithm.{kind}",
                f"learner.algorithm.{kind} = {name!r} is not known: one of {', '.join(names)}{hint}",
                code="config.type",
            )


def option_problems(algorithm: AlgorithmConfig) -> Iterator[Conflict]:
    """Options that the chosen built-in functions do not have, or with the wrong type."""
    for kind in TABLES:
        name = effective_name(algorithm, kind)
        options = option_types().get(kind, {}).get(name)
        if options is None:
            continue
        table = f"{kind}_options"
        for key in [key for key, known_as in options.items() if known_as["default"] == "required"]:
            if key not in effective_options(algorithm, kind):
                yield conflict(
                    f"learner.algorithm.{table}",
                    f"learner.algorithm.{table}.{key}: {kind} {name!r} needs it",
                    code="config.missing",
                )
        for key, value in effective_options(algorithm, kind).items():
            path = f"learner.algorithm.{table}.{key}"
            if key not in options:
                yield conflict(
                    path,
                    f"learner.algorithm.{table}.{key}: {kind} {name!r} has the options "
                    f"{', '.join(options) or 'none'}{near_miss(key, options)[1]}",
                    code="config.unknown_key",
                )
            elif not _fits(value, options[key]["types"]):
                shown = "off" if value is None else value
                yield conflict(
                    path,
                    f"learner.algorithm.{table}.{key} = {shown!r}: expected "
                    f"{' or '.join(map(str, options[key]['types']))}",
                    code="config.type",
                )


_TOML_KINDS: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "list": (list, tuple),
    "any": (object,),
    "off": (type(None),),
}


def _fits(value: Any, types: list[Any]) -> bool:
    """Whether a TOML value has one of the types: a name, or a list of choices."""
    for kind in types:
        if isinstance(kind, list):
            if value in kind:
                return True
        elif isinstance(value, _TOML_KINDS[kind]) and (kind in ("bool", "any") or not isinstance(value, bool)):
            return True
    return False


def combination_problems(algorithm: AlgorithmConfig) -> Iterator[Conflict]:
    """Choices that contradict each other, independent of the rest of the run."""
    correction, loss = effective_correction(algorithm), entry("loss", algorithm.loss)
    advantage = entry("advantage", algorithm.advantage)
    bypass = algorithm.proximal == "behaviour"
    if algorithm.loss == "decoupled_ppo" and bypass:
        yield conflict(
            "learner.algorithm.loss",
            "loss = 'decoupled_ppo' compares with the proximal policy and weighs by proximal / behaviour; with "
            "proximal = 'behaviour' there is no such pair: set loss = 'ppo'",
        )
    if algorithm.clip_against == "behaviour":
        yield from _clip_problems(algorithm)
    if correction != "none":
        why = ""
        if bypass and loss is not None and loss.ratio != "none":
            why = (
                f"the ratio of loss = {algorithm.loss!r} is current / behaviour (proximal = 'behaviour') and holds "
                "the whole correction"
            )
        elif bypass:
            why = (
                "with proximal = 'behaviour' the weight proximal / behaviour is 1 everywhere: it would correct nothing"
            )
        elif loss is not None and loss.ratio == "behaviour":
            why = f"loss = {algorithm.loss!r} holds the truncated ratio current / behaviour itself"
        elif advantage is not None and advantage.weighted:
            why = f"advantage = {algorithm.advantage!r} holds the truncated importance weight itself"
        if why:
            yield conflict(
                "learner.algorithm.correction",
                f"correction = {correction!r}: {why}; a weight on top would be wrong: set correction = 'none' or leave "
                "it out",
            )
    level = weight_level(algorithm)
    if algorithm.loss == "vespo" and level == "sequence":
        yield conflict(
            "learner.algorithm.correction",
            "loss = 'vespo' adds the logs of the tokens' weights up to the ratio of the row; correction = "
            f"{correction!r} of level = 'sequence' puts that of the whole row on every token: it would count once for "
            "each of them: set level = 'token'",
        )
    if algorithm.loss == "gmpo" and correction in ("icepop", "mis") and level == "token":
        yield conflict(
            "learner.algorithm.correction",
            f"loss = 'gmpo' takes the geometric mean of a row's weights; correction = {correction!r} sets single "
            "weights to 0, and one of them would silence its whole row: set correction = 'tis', or 'rejection', which "
            "leaves tokens out",
        )
    if advantage is not None and advantage.weighted and loss is not None and loss.ratio != "none":
        yield conflict(
            "learner.algorithm.loss",
            f"advantage = {algorithm.advantage!r} is made for loss = 'reinforce', not {algorithm.loss!r}: its ratio "
            "would count twice",
        )
    yield from _batch_problems(algorithm)
    yield from _term_problems(algorithm)


def _batch_problems(algorithm: AlgorithmConfig) -> Iterator[Conflict]:
    """The same for what looks at the whole batch before the loss."""
    advantage, name = entry("advantage", algorithm.advantage), effective_correction(algorithm)
    correction, resample = entry("correction", name), algorithm.shaping.resample
    over_mean = bool(effective_options(algorithm, "correction").get("batch_normalize"))
    late = ""
    if advantage is not None and {"critic", "proximal", "process"} & set(advantage.needs):
        late = f"advantage = {algorithm.advantage!r}"
    elif algorithm.kl.where == "reward":
        late = "a KL penalty in the reward"
    elif over_mean or (correction is not None and correction.whole):
        late = f"correction = {name!r}{' and batch_normalize' * over_mean}"
    if resample != "off" and late:
        yield conflict(
            "learner.algorithm.shaping.resample",
            f"shaping.resample = {resample!r} draws rows before the model has run; with {late} all rows are judged "
            "after it: set it to off",
        )
    if over_mean and algorithm.proximal == "loglinear":
        yield conflict(
            "learner.algorithm.proximal",
            "proximal = 'loglinear' is known in the loss alone; the weights of batch_normalize are computed before it, "
            "from log-probs of the whole batch, and would count twice: set proximal = 'recompute'",
        )


def _clip_problems(algorithm: AlgorithmConfig) -> Iterator[Conflict]:
    """The same for clip_against = 'behaviour'."""
    loss, why = entry("loss", algorithm.loss), ""
    if algorithm.proximal == "behaviour":
        why = "proximal = 'behaviour' compares with the behaviour policy already"
    elif loss is not None and (not loss.limit or algorithm.loss == "clip_cov"):
        why = f"loss = {algorithm.loss!r} has no limit that could be measured from the behaviour policy"
    if why:
        yield conflict("learner.algorithm.clip_against", f"clip_against = 'behaviour': {why}: leave it out")


def _term_problems(algorithm: AlgorithmConfig) -> Iterator[Conflict]:
    """The same for the denominator and the other terms of the loss: entropy and KL."""
    if algorithm.denominator == "kept" and algorithm.proximal == "loglinear":
        yield conflict(
            "learner.algorithm.denominator",
            "denominator = 'kept' counts the tokens that stay before the loss, and proximal = 'loglinear' is known in "
            "it alone: set proximal = 'recompute'",
        )
    if algorithm.entropy_target and algorithm.entropy_coeff > algorithm.entropy_max:
        yield conflict(
            "learner.algorithm.entropy_max",
            f"entropy_coeff = {algorithm.entropy_coeff:g} is where the weight starts and lies above entropy_max = "
            f"{algorithm.entropy_max:g}",
        )
    kl = algorithm.kl
    if kl.controller == "adaptive" and kl.where != "reward":
        yield conflict(
            "learner.algorithm.kl.controller",
            "kl.controller = 'adaptive' steers the penalty in the reward: set kl.where = 'reward'",
        )
    if kl.importance_weighted and (kl.where != "loss" or kl.kind not in ("auto", "k3", "low_var_kl")):
        yield conflict(
            "learner.algorithm.kl.importance_weighted",
            "kl.importance_weighted is the k3 estimator in the loss: set kl.where = 'loss' and kl.kind = 'k3'",
        )


def _unmet(config: Config) -> Iterator[Conflict]:
    """Requirements of the chosen estimator that the run does not meet."""
    algorithm, sampling = config.learner.algorithm, config.sampling
    found = entry("advantage", algorithm.advantage)
    name = f"learner.algorithm.advantage = {algorithm.advantage!r}"
    for need in found.needs if found else ():
        if need == "group" and sampling.group_size < 2:
            yield conflict(
                "sampling.group_size",
                f"{name} compares the samples of a group: sampling.group_size must be at least 2",
            )
        elif need == "greedy" and not sampling.greedy_baseline:
            yield conflict(
                "learner.algorithm.advantage",
                f"{name} subtracts the score of a greedy response: set sampling.greedy_baseline = true, and producers "
                "make one more sample of each prompt",
            )
    if sampling.greedy_baseline and sampling.over_issue:
        yield conflict(
            "sampling.over_issue",
            "sampling.greedy_baseline needs every sample of the group: set sampling.over_issue = 0",
        )
    kl, samples = algorithm.kl, config.buffer.batch_groups * sampling.group_size
    if kl.controller == "adaptive" and kl.horizon <= KL_ERROR * samples:
        yield conflict(
            "learner.algorithm.kl.horizon",
            f"kl.horizon = {kl.horizon:g}: a step of {samples} samples may take {KL_ERROR * samples / kl.horizon:.3g} "
            "of the coefficient away, and 1 or more makes it negative: set kl.horizon to the samples of several steps",
        )
    critic = config.learner.critic
    if critic.critic_warmup_until and not critic.critic_warmup:
        yield conflict(
            "learner.critic.critic_warmup_until",
            "learner.critic.critic_warmup_until ends a warm-up early, and there is none: set "
            "learner.critic.critic_warmup to the steps that it may last at most",
        )
    shaping = algorithm.shaping
    limit = shaping.overlong_max or sampling.max_new_tokens
    if shaping.overlong_buffer > limit:
        yield conflict(
            "learner.algorithm.shaping.overlong_buffer",
            f"shaping.overlong_buffer = {shaping.overlong_buffer} is above the limit of {limit} tokens",
        )


def component_problems(config: Config) -> Iterator[Conflict]:
    """Weights of gdpo that are not those of the rewards. An environment that scores may name components of its own.

    For new launches alone: a replay may have rewards of a file.
    """
    algorithm, names = config.learner.algorithm, reward_components(reward.label for reward in config.reward)
    weights = effective_options(algorithm, "advantage").get("weights")
    if algorithm.advantage != "gdpo" or not names or not isinstance(weights, list | tuple):
        return
    if len(weights) != len(names) and not any(one.scores for one in config.environments):
        yield conflict(
            "learner.algorithm.advantage_options.weights",
            f"{len(weights)} weights for {len(names)} rewards: advantage = 'gdpo' takes one for each, in the order of "
            f"their names ({', '.join(names)})",
        )


def apply_overrides(algorithm: AlgorithmConfig, overrides: Mapping[str, Any]) -> AlgorithmConfig:
    """Replace settings by keys below `learner.algorithm.`: `kl.coeff`, `loss_options.beta`.

    Raises ValueError for an unknown key, an invalid value, and settings that then contradict each other.

    >>> apply_overrides(AlgorithmConfig(), {"kl.coeff": 0.01, "advantage_options.epsilon": 1e-4}).kl.coeff
    0.01
    """
    values: dict[str, Any] = msgspec.to_builtins(algorithm)
    for key, value in overrides.items():
        *tables, leaf = key.split(".")
        node = values
        for table in tables:
            inner = node.get(table)
            if not isinstance(inner, dict):
                raise ValueError(f"{key}: no setting of the algorithm")
            node = inner
        free = len(tables) == 1 and tables[0].endswith("_options")
        if (leaf not in node and not free) or key == "preset":
            raise ValueError(f"{key}: no setting of the algorithm that can be changed")
        node[leaf] = value
    try:
        result = msgspec.convert(values, AlgorithmConfig)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    for _, message, *_ in (*_unknown_names(result), *option_problems(result), *combination_problems(result)):
        raise ValueError(message)
    if asked := _needs(result) - _needs(algorithm) - {"group", "parts"}:
        raise ValueError(
            f"advantage = {result.advantage!r} needs what this run was not started with: {', '.join(sorted(asked))}"
        )
    return result


def _needs(algorithm: AlgorithmConfig) -> set[str]:
    found = entry("advantage", algorithm.advantage)
    return set(found.needs) if found else set()

"""The algorithms by name, and what each needs.

Guarantees:
1. a built-in name has one entry here; `algorithm_options.json` holds its options with types and defaults. `make docs`
   writes that file from the signatures, and a test checks it, so checking needs no torch;
2. a plugin (entry-point groups `asyncrl.advantages`, `asyncrl.losses`, `asyncrl.corrections`) is known by name here;
   `asyncrl check` and the learner check its options after importing it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.sections.algorithm import AlgorithmConfig

_HOME = "learners.algorithms."


class Entry(NamedTuple):
    """Properties of a built-in algorithm that are known before it is imported."""

    target: str  # module:function below learners.algorithms
    paper: str = ""
    needs: tuple[str, ...] = ()  # group, critic, greedy, parts, proximal, square_sums, process
    ratio: str = "proximal"  # losses: the policy in the denominator of their ratio; none
    aggregation: str = ""  # losses that need one aggregation
    clip: bool = False  # losses that use clip_low and clip_high of the section
    limit: str = ""  # losses: what limits the distance of current from proximal, in words
    weighted: bool = False  # advantages that already include the importance weight
    whole: bool = False  # corrections that need all rows of the batch

    @property
    def dotted(self) -> str:
        """'module:function'."""
        return _HOME + self.target


_GROUP = ("group",)
ADVANTAGES: dict[str, Entry] = {
    "grpo": Entry("advantages:grpo", "2402.03300", _GROUP),
    "dr_grpo": Entry("advantages:dr_grpo", "2503.20783", _GROUP),
    "rloo": Entry("advantages:rloo", "2402.14740", _GROUP),
    "opo": Entry("advantages:opo", "2505.23585", _GROUP),
    "gpg": Entry("advantages:gpg", "2504.02546", _GROUP),
    "grpo_passk": Entry("advantages:grpo_passk", "2503.19595", _GROUP),
    "passk_training": Entry("advantages:passk_training", "2508.10751", _GROUP),
    "win_rate": Entry("advantages:win_rate", "2405.00675", _GROUP),
    "softmean": Entry("advantages:softmean", "2405.00675"),
    "gdpo": Entry("advantages:gdpo", "2601.05242", ("group", "parts")),
    "reinforce_plus_plus": Entry("advantages:reinforce_plus_plus", "2501.03262"),
    "reinforce_plus_plus_baseline": Entry("advantages:reinforce_plus_plus_baseline", "2501.03262", _GROUP),
    "remax": Entry("advantages:remax", "2310.10505", ("greedy",)),
    "optimal_token_baseline": Entry(
        "advantages:optimal_token_baseline", "2602.17616", ("group", "proximal", "square_sums")
    ),
    "gae": Entry("gae:gae", "1506.02438", ("critic",)),
    "gae_decoupled": Entry("gae:gae_decoupled", "2503.01491", ("critic",)),
    "gae_length_adaptive": Entry("gae:gae_length_adaptive", "2504.05118", ("critic",)),
    "vtrace": Entry("gae:vtrace", "1802.01561", ("critic", "proximal"), weighted=True),
    "prime": Entry("prime:prime", "2502.01456", ("group", "process")),
}
LOSSES: dict[str, Entry] = {
    "decoupled_ppo": Entry("losses:ppo", "2505.24298, 2110.00641", clip=True, limit="clip"),
    "ppo": Entry("losses:ppo", "1707.06347, 1912.09729, 2503.14476", clip=True, limit="clip"),
    "reinforce": Entry("losses:reinforce", "2504.02546", ratio="none"),
    "gspo": Entry("losses:gspo", "2507.18071", limit="clip"),
    "luspo": Entry("losses:gspo", "2602.05261", aggregation="seq-mean-token-sum", limit="clip"),
    "cispo": Entry("losses:cispo", "2506.13585", limit="clip"),
    "sapo": Entry("losses:sapo", "2511.20347", aggregation="seq-mean-token-mean", limit="gate"),
    "gmpo": Entry("losses:gmpo", "2507.20673", aggregation="seq-mean-token-mean", limit="clip"),
    "dppo_tv": Entry("losses:dppo_tv", "2602.04879", limit="trust region"),
    "dppo_kl": Entry("losses:dppo_kl", "2602.04879", limit="trust region"),
    "dro": Entry("losses:dro", "2405.19107"),
    "vespo": Entry("losses:vespo", "2602.10693"),
    "topr": Entry("losses:topr", "2503.14286"),
    "sppo": Entry("losses:sppo", "2405.00675", aggregation="seq-mean-token-sum"),
    "aipo": Entry("losses:aipo", "2505.24034", ratio="behaviour"),
    "clip_cov": Entry("losses:clip_cov", "2505.22617", clip=True, limit="clip"),
    "kl_cov": Entry("losses:kl_cov", "2505.22617"),
}
CORRECTIONS: dict[str, Entry] = {
    "none": Entry("corrections:none"),
    "tis": Entry("corrections:tis", "2505.24298"),
    "mis": Entry("corrections:mis"),
    "icepop": Entry("corrections:icepop", "2510.18855"),
    "rejection": Entry("corrections:rejection", "2512.02556"),
    "m2po": Entry("corrections:m2po", "2510.01161", whole=True),
}
#: Age in steps from which weights of single tokens cost held-out reward (docs/learning.md).
OLD_STEPS = 4
#: Losses with one ratio per row.
ROW_RATIOS = frozenset({"gspo", "luspo", "gmpo", "vespo", "topr"})
TABLES: dict[str, dict[str, Entry]] = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS}
GROUPS = {"advantage": "asyncrl.advantages", "loss": "asyncrl.losses", "correction": "asyncrl.corrections"}


def known_names(kind: str) -> list[str]:
    """Names of a kind: the built-in ones, then those of installed plugins."""
    return [*TABLES[kind], *sorted({point.name for point in entry_points(group=GROUPS[kind])} - set(TABLES[kind]))]


def entry(kind: str, name: str) -> Entry | None:
    """The entry of a built-in name; None for a plugin."""
    return TABLES[kind].get(name)


def effective_correction(algorithm: AlgorithmConfig) -> str:
    """The correction in force: resolves `auto`.

    >>> effective_correction(AlgorithmConfig()), effective_correction(AlgorithmConfig(proximal="behaviour"))
    ('tis', 'none')
    """
    if algorithm.correction != "auto":
        return algorithm.correction
    loss, advantage = entry("loss", algorithm.loss), entry("advantage", algorithm.advantage)
    held = (loss is not None and loss.ratio == "behaviour") or (advantage is not None and advantage.weighted)
    return "none" if held or algorithm.proximal == "behaviour" else "tis"


def weight_level(algorithm: AlgorithmConfig) -> str:
    """Level of the correction's weights: token, sequence, geometric; empty without weights.

    >>> weight_level(AlgorithmConfig()), weight_level(AlgorithmConfig(correction="mis"))
    ('token', 'sequence')
    """
    usual = {"tis": "token", "mis": "sequence", "icepop": "token"}.get(effective_correction(algorithm), "")
    return str(algorithm.correction_options.get("level", usual))


def level_of_age(algorithm: AlgorithmConfig) -> str:
    """Level at which the correction alone makes up for age; empty if the loss has ratios of whole responses itself.

    >>> level_of_age(AlgorithmConfig()), level_of_age(AlgorithmConfig(loss="vespo"))
    ('token', '')
    """
    return "" if algorithm.loss in ROW_RATIOS else weight_level(algorithm)


def effective_options(algorithm: AlgorithmConfig, kind: str) -> dict[str, Any]:
    """Keyword arguments of the chosen function: the short forms, overridden by its table; the word "off" is None.

    >>> effective_options(AlgorithmConfig(tis_cap="off"), "correction")
    {'upper': None}
    """
    given: dict[str, Any] = dict(getattr(algorithm, f"{kind}_options"))
    short: dict[str, Any] = {}
    if kind == "correction" and effective_correction(algorithm) == "tis":
        short = {"upper": algorithm.tis_cap}
    elif kind == "loss":
        found = entry("loss", algorithm.loss)
        short = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high} if found and found.clip else {}
    return {key: None if value == "off" else value for key, value in (short | given).items()}


def effective_name(algorithm: AlgorithmConfig, kind: str) -> str:
    """The name in force of a kind: advantage, loss or correction."""
    return effective_correction(algorithm) if kind == "correction" else str(getattr(algorithm, kind))


def derive_algorithm(algorithm: AlgorithmConfig, *, longest: int) -> AlgorithmConfig:
    """Fill in settings that default to `longest`, the number of tokens of the longest response.

    >>> derive_algorithm(AlgorithmConfig(), longest=100).loss_scale_factor
    100.0
    """
    shaping = algorithm.shaping
    limit = shaping.overlong_max or longest
    buffer = shaping.overlong_buffer or round(shaping.overlong_share * limit)
    shaping = msgspec.structs.replace(shaping, overlong_max=limit, overlong_buffer=buffer)
    factor = algorithm.loss_scale_factor or float(longest)
    return msgspec.structs.replace(algorithm, shaping=shaping, loss_scale_factor=factor)


def undo_derivation(algorithm: AlgorithmConfig, *, longest: int) -> AlgorithmConfig:
    """The inverse of `derive_algorithm`: 0 for each setting that it would set to the same value.

    >>> undo_derivation(derive_algorithm(AlgorithmConfig(), longest=100), longest=100) == AlgorithmConfig()
    True
    """
    shaping = algorithm.shaping
    buffer = round(shaping.overlong_share * (shaping.overlong_max or longest))
    shaping = msgspec.structs.replace(
        shaping,
        overlong_max=0 if shaping.overlong_max == longest else shaping.overlong_max,
        overlong_buffer=0 if shaping.overlong_buffer == buffer else shaping.overlong_buffer,
    )
    factor = 0.0 if algorithm.loss_scale_factor == longest else algorithm.loss_scale_factor
    return msgspec.structs.replace(algorithm, shaping=shaping, loss_scale_factor=factor)


@functools.cache
def option_types() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """kind -> name -> option -> its JSON schema and default, as written by `make docs`."""
    data = (Path(__file__).parent / "algorithm_options.json").read_bytes()
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = msgspec.json.decode(data)
    return found


def idle_limit(algorithm: AlgorithmConfig, *, synchronous: bool = False) -> str:
    """What limits the distance that an update may go, if it can never act: with one update per batch the ratio of
    current to proximal is 1, and in a synchronous run that to the sampling policy, too. Empty if it can act, or if
    there is none.

    >>> idle_limit(AlgorithmConfig(loss="sapo")), idle_limit(AlgorithmConfig(loss="sapo", minibatches=4))
    ('gate', '')
    """
    ages = algorithm.proximal != "recompute" or algorithm.clip_against == "behaviour"
    loss, moves = entry("loss", algorithm.loss), algorithm.minibatches > 1 or (ages and not synchronous)
    return "" if moves or loss is None else loss.limit


def explain(algorithm: AlgorithmConfig) -> str:
    """The algorithm in force in one line.

    >>> explain(AlgorithmConfig())
    'grpo(), decoupled_ppo(clip_low=0.2, clip_high=0.28) against recompute, tis(upper=2.0), token-mean'
    """

    def call(kind: str) -> str:
        options = ", ".join(f"{key}={value}" for key, value in effective_options(algorithm, kind).items())
        return f"{effective_name(algorithm, kind)}({options})"

    loss = entry("loss", algorithm.loss)
    parts = [call("advantage"), f"{call('loss')} against {algorithm.proximal}", call("correction")]
    if algorithm.clip_against == "behaviour" and loss is not None:
        parts[1] += f" with the {loss.limit} against behaviour"
    if algorithm.minibatches > 1:
        parts.append(f"{algorithm.minibatches} updates per batch")
    parts.append(loss.aggregation if loss is not None and loss.aggregation else algorithm.aggregation)
    if algorithm.entropy_keep < 1:
        parts.append(f"the {algorithm.entropy_keep:.0%} of tokens with the highest entropy")
    if algorithm.entropy_target:
        parts.append(f"entropy bonus towards {algorithm.entropy_target:g} nats")
    elif algorithm.entropy_coeff:
        parts.append(f"entropy bonus x {algorithm.entropy_coeff:g}")
    if algorithm.kl.where != "off":
        parts.append(f"KL in the {algorithm.kl.where} x {algorithm.kl.coeff:g}")
    return ", ".join(parts)

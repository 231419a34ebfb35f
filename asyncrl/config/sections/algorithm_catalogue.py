"""The algorithms by name, what each needs, and which of them fit together.

Guarantees:
1. a built-in name has one entry here; its options, with types and defaults, stand in `algorithm_options.json`, which
   `make docs` writes from the signatures (a test checks that they agree): checking needs no torch;
2. a plugin (entry-point groups `asyncrl.advantages`, `asyncrl.losses`, `asyncrl.corrections`) is known by name here,
   and its options are checked where it can be imported: by `asyncrl check` and by the learner;
3. what does not fit together is an error that says why.

Example: `proximal = "behaviour"` with `correction = "tis"`: the ratio current / behaviour holds the whole correction
already, a weight on top would count it twice.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncrl.config.sections.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from asyncrl.config import Config

_HOME = "learners.algorithms."


class Entry(NamedTuple):
    """Where a built-in algorithm lives and what is known of it before it is imported."""

    target: str  # module:function below learners.algorithms
    paper: str = ""
    needs: tuple[str, ...] = ()  # group, critic, greedy, parts, proximal, square_sums, process
    ratio: str = "proximal"  # losses: the policy whose ratio to the current one they hold; none
    aggregation: str = ""  # losses that allow one way alone
    clip: bool = False  # losses whose bounds default to clip_low and clip_high of the section
    weighted: bool = False  # advantages that hold the importance weight already
    whole: bool = False  # corrections that look at all rows of the batch

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
    "decoupled_ppo": Entry("losses:ppo", "2505.24298, 2110.00641", clip=True),
    "ppo": Entry("losses:ppo", "1707.06347, 1912.09729, 2503.14476", clip=True),
    "reinforce": Entry("losses:reinforce", "2504.02546", ratio="none"),
    "gspo": Entry("losses:gspo", "2507.18071"),
    "luspo": Entry("losses:gspo", "2602.05261", aggregation="seq-mean-token-sum"),
    "cispo": Entry("losses:cispo", "2506.13585"),
    "sapo": Entry("losses:sapo", "2511.20347", aggregation="seq-mean-token-mean"),
    "gmpo": Entry("losses:gmpo", "2507.20673", aggregation="seq-mean-token-mean"),
    "dppo_tv": Entry("losses:dppo_tv", "2602.04879"),
    "dppo_kl": Entry("losses:dppo_kl", "2602.04879"),
    "dro": Entry("losses:dro", "2405.19107"),
    "vespo": Entry("losses:vespo", "2602.10693"),
    "topr": Entry("losses:topr", "2503.14286"),
    "aipo": Entry("losses:aipo", "2505.24034", ratio="behaviour"),
    "clip_cov": Entry("losses:clip_cov", "2505.22617", clip=True),
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
TABLES: dict[str, dict[str, Entry]] = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS}
GROUPS = {"advantage": "asyncrl.advantages", "loss": "asyncrl.losses", "correction": "asyncrl.corrections"}

#: Code, message, path of the key (below learner.algorithm where it is relative).
Problem = tuple[str, str, tuple[str, ...]]
HERE = ("learner", "algorithm")


# ---------------------------------------------------------------- names and options


def known(kind: str) -> list[str]:
    """Names of a kind: the built-in ones, then those of installed plugins."""
    return [*TABLES[kind], *sorted({point.name for point in entry_points(group=GROUPS[kind])} - set(TABLES[kind]))]


def entry(kind: str, name: str) -> Entry | None:
    """The entry of a built-in name; None for a plugin."""
    return TABLES[kind].get(name)


def correction_of(algorithm: AlgorithmConfig) -> str:
    """The correction in force: what `auto` stands for.

    >>> correction_of(AlgorithmConfig()), correction_of(AlgorithmConfig(proximal="behaviour"))
    ('tis', 'none')
    """
    if algorithm.correction != "auto":
        return algorithm.correction
    loss, advantage = entry("loss", algorithm.loss), entry("advantage", algorithm.advantage)
    held = (loss is not None and loss.ratio == "behaviour") or (advantage is not None and advantage.weighted)
    return "none" if held or algorithm.proximal == "behaviour" else "tis"


def weight_level(algorithm: AlgorithmConfig) -> str:
    """What the weights of the correction in force belong to: token, sequence, geometric; empty without weights.

    >>> weight_level(AlgorithmConfig()), weight_level(AlgorithmConfig(correction="mis"))
    ('token', 'sequence')
    """
    usual = {"tis": "token", "mis": "sequence", "icepop": "token"}.get(correction_of(algorithm), "")
    return str(algorithm.correction_options.get("level", usual))


def options_of(algorithm: AlgorithmConfig, kind: str) -> dict[str, Any]:
    """Keyword arguments of the chosen function: its table, on top of the short forms; the word "off" is None.

    >>> options_of(AlgorithmConfig(tis_cap="off"), "correction"), options_of(AlgorithmConfig(loss="gspo"), "loss")
    ({'upper': None}, {})
    """
    given: dict[str, Any] = dict(getattr(algorithm, f"{kind}_options"))
    short: dict[str, Any] = {}
    if kind == "correction" and correction_of(algorithm) == "tis":
        short = {"upper": algorithm.tis_cap}
    elif kind == "loss":
        found = entry("loss", algorithm.loss)
        short = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high} if found and found.clip else {}
    return {key: None if value == "off" else value for key, value in (short | given).items()}


def chosen(algorithm: AlgorithmConfig, kind: str) -> str:
    """The name in force of a kind: advantage, loss or correction."""
    return correction_of(algorithm) if kind == "correction" else str(getattr(algorithm, kind))


def with_derived(algorithm: AlgorithmConfig, *, longest: int) -> AlgorithmConfig:
    """With what stands for `longest`, the tokens of the longest response, where it is 0.

    >>> with_derived(AlgorithmConfig(), longest=100).loss_scale_factor
    100.0
    """
    shaping = algorithm.shaping
    limit = shaping.overlong_max or longest
    buffer = shaping.overlong_buffer or round(shaping.overlong_share * limit)
    shaping = msgspec.structs.replace(shaping, overlong_max=limit, overlong_buffer=buffer)
    factor = algorithm.loss_scale_factor or float(longest)
    return msgspec.structs.replace(algorithm, shaping=shaping, loss_scale_factor=factor)


@functools.cache
def option_types() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """kind -> name -> option -> its JSON schema and default, as `make docs` wrote them."""
    data = (Path(__file__).parent / "algorithm_options.json").read_bytes()
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = msgspec.json.decode(data)
    return found


# ---------------------------------------------------------------- mistakes


def problems(config: Config) -> Iterator[Problem]:
    """Everything about the algorithms of this configuration that cannot work."""
    algorithm = config.learner.algorithm
    if algorithm.minibatches > config.buffer.batch_groups:
        yield "config.conflict", "learner.algorithm.minibatches exceeds buffer.batch_groups", (*HERE, "minibatches")
    if config.learner.mode != "rl":
        return
    unknown = list(_unknown(algorithm))
    yield from unknown
    if unknown:
        return
    yield from option_problems(algorithm)
    yield from combination_problems(algorithm)
    yield from _unmet(config)


def _unknown(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    for kind, table in TABLES.items():
        name = chosen(algorithm, kind)
        if name in table:
            continue  # without a look at every installed package, which takes milliseconds
        names = known(kind)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield (
                "config.type",
                f"learner.algorithm.{kind} = {name!r} is not known: one of {', '.join(names)}{hint}",
                (*HERE, kind),
            )


def option_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Options that the chosen built-in functions do not have, or that have the wrong type."""
    for kind in TABLES:
        name = chosen(algorithm, kind)
        options = option_types().get(kind, {}).get(name)
        if options is None:
            continue
        table = f"{kind}_options"
        for key in [key for key, known_as in options.items() if known_as["default"] == "required"]:
            if key not in options_of(algorithm, kind):
                yield ("config.missing", f"learner.algorithm.{table}.{key}: {kind} {name!r} needs it", (*HERE, table))
        for key, value in options_of(algorithm, kind).items():
            path = (*HERE, table, key)
            if key not in options:
                near = difflib.get_close_matches(key, options, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield (
                    "config.unknown_key",
                    f"learner.algorithm.{table}.{key}: {kind} {name!r} has the options "
                    f"{', '.join(options) or 'none'}{hint}",
                    path,
                )
            elif not _fits(value, options[key]["types"]):
                shown = "off" if value is None else value
                yield (
                    "config.type",
                    f"learner.algorithm.{table}.{key} = {shown!r}: expected "
                    f"{' or '.join(map(str, options[key]['types']))}",
                    path,
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


def combination_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Choices that contradict each other, whatever the rest of the run."""
    correction, loss = correction_of(algorithm), entry("loss", algorithm.loss)
    advantage = entry("advantage", algorithm.advantage)
    bypass = algorithm.proximal == "behaviour"
    if algorithm.loss == "decoupled_ppo" and bypass:
        yield (
            "config.conflict",
            "loss = 'decoupled_ppo' compares with the proximal policy and weighs by proximal / "
            "behaviour; with proximal = 'behaviour' there is no such pair: set loss = 'ppo'",
            (*HERE, "loss"),
        )
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
            yield (
                "config.conflict",
                f"correction = {correction!r}: {why}; a weight on top would be wrong: set "
                "correction = 'none' or leave it out",
                (*HERE, "correction"),
            )
    level = weight_level(algorithm)
    if algorithm.loss == "vespo" and level == "sequence":
        yield (
            "config.conflict",
            "loss = 'vespo' adds the logs of the tokens' weights up to the ratio of the row; "
            f"correction = {correction!r} of level = 'sequence' puts that of the whole row on every token: it would "
            "count once for each of them: set level = 'token'",
            (*HERE, "correction"),
        )
    if algorithm.loss == "gmpo" and correction in ("icepop", "mis") and level == "token":
        yield (
            "config.conflict",
            "loss = 'gmpo' takes the geometric mean of a row's weights; correction = "
            f"{correction!r} sets single weights to 0, and one of them would silence its whole row: set "
            "correction = 'tis', or 'rejection', which leaves tokens out",
            (*HERE, "correction"),
        )
    if advantage is not None and advantage.weighted and loss is not None and loss.ratio != "none":
        yield (
            "config.conflict",
            f"advantage = {algorithm.advantage!r} is made for loss = 'reinforce', not "
            f"{algorithm.loss!r}: its ratio would count twice",
            (*HERE, "loss"),
        )
    yield from _term_problems(algorithm)


def _term_problems(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The same for what the loss has beside the policy's: entropy and KL."""
    if algorithm.entropy_target and algorithm.entropy_coeff > algorithm.entropy_max:
        yield (
            "config.conflict",
            f"entropy_coeff = {algorithm.entropy_coeff:g} is where the weight starts and lies "
            f"above entropy_max = {algorithm.entropy_max:g}",
            (*HERE, "entropy_max"),
        )
    kl = algorithm.kl
    if kl.controller == "adaptive" and kl.where != "reward":
        yield (
            "config.conflict",
            "kl.controller = 'adaptive' steers the penalty in the reward: set kl.where = 'reward'",
            (*HERE, "kl", "controller"),
        )
    if kl.importance_weighted and (kl.where != "loss" or kl.kind not in ("auto", "k3", "low_var_kl")):
        yield (
            "config.conflict",
            "kl.importance_weighted is the k3 estimator in the loss: set kl.where = 'loss' and kl.kind = 'k3'",
            (*HERE, "kl", "importance_weighted"),
        )


def _unmet(config: Config) -> Iterator[Problem]:
    """What the chosen estimator needs and the run does not have."""
    algorithm, sampling = config.learner.algorithm, config.sampling
    found = entry("advantage", algorithm.advantage)
    name = f"learner.algorithm.advantage = {algorithm.advantage!r}"
    for need in found.needs if found else ():
        if need == "group" and sampling.group_size < 2:
            yield (
                "config.conflict",
                f"{name} compares the samples of a group: sampling.group_size must be at least 2",
                ("sampling", "group_size"),
            )
        elif need == "greedy" and not sampling.greedy_baseline:
            yield (
                "config.conflict",
                f"{name} subtracts the score of a greedy response: set sampling.greedy_baseline "
                "= true, and producers make one more sample of each prompt",
                (*HERE, "advantage"),
            )
    if sampling.greedy_baseline and sampling.over_issue:
        yield (
            "config.conflict",
            "sampling.greedy_baseline needs every sample of the group: set sampling.over_issue = 0",
            ("sampling", "over_issue"),
        )
    critic = config.learner.critic
    if critic.critic_warmup_until and not critic.critic_warmup:
        yield (
            "config.conflict",
            "learner.critic.critic_warmup_until ends a warm-up early, and there is none: set "
            "learner.critic.critic_warmup to the steps that it may last at most",
            ("learner", "critic", "critic_warmup_until"),
        )
    shaping = algorithm.shaping
    late = algorithm.kl.where == "reward" or bool(found and {"critic", "proximal", "process"} & set(found.needs))
    if shaping.resample != "off" and late:
        yield (
            "config.conflict",
            f"shaping.resample = {shaping.resample!r} draws rows before the model has run; with "
            f"{name} or a KL penalty in the reward they are judged after it: set it to off",
            (*HERE, "shaping", "resample"),
        )
    limit = shaping.overlong_max or sampling.max_new_tokens
    if shaping.overlong_buffer > limit:
        yield (
            "config.conflict",
            f"shaping.overlong_buffer = {shaping.overlong_buffer} is above the limit of {limit} tokens",
            (*HERE, "shaping", "overlong_buffer"),
        )


def explain(algorithm: AlgorithmConfig) -> str:
    """The algorithm in force in one line.

    >>> explain(AlgorithmConfig())
    'grpo(), decoupled_ppo(clip_low=0.2, clip_high=0.28) against recompute, tis(upper=2.0), token-mean'
    """

    def call(kind: str) -> str:
        options = ", ".join(f"{key}={value}" for key, value in options_of(algorithm, kind).items())
        return f"{chosen(algorithm, kind)}({options})"

    loss = entry("loss", algorithm.loss)
    parts = [call("advantage"), f"{call('loss')} against {algorithm.proximal}", call("correction")]
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


# ---------------------------------------------------------------- changes while the system runs


def overridden(algorithm: AlgorithmConfig, overrides: Mapping[str, Any]) -> AlgorithmConfig:
    """The settings with others in their place, by keys below `learner.algorithm.`: `kl.coeff`, `loss_options.beta`.

    Raises ValueError for a key that does not exist, a value that does not fit, and settings that then contradict.

    >>> overridden(AlgorithmConfig(), {"kl.coeff": 0.01, "advantage_options.epsilon": 1e-4}).kl.coeff
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
    for _, message, _ in (*_unknown(result), *option_problems(result), *combination_problems(result)):
        raise ValueError(message)
    if asked := _needs(result) - _needs(algorithm) - {"group", "parts"}:
        raise ValueError(
            f"advantage = {result.advantage!r} needs what this run was not started with: {', '.join(sorted(asked))}"
        )
    return result


def _needs(algorithm: AlgorithmConfig) -> set[str]:
    found = entry("advantage", algorithm.advantage)
    return set(found.needs) if found else set()

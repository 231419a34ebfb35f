"""Translates the settings of a run of verl, TRL, prime-rl or OpenRLHF: from its launch script, Python file or TOML.

Guarantees:
1. nothing is run: scripts are split into words, Python is parsed; values that are not constants are reported;
2. every setting is either translated or reported in a note, with a reason if it is known;
3. plain names come from `translations.toml`; values that depend on several settings are computed here.

Example: `data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=32` -> `buffer.batch_groups = 128`,
`learner.algorithm.minibatches = 4`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.suggestions import flatten, known_trainers, translation_table
from asyncrl.errors import UNREADABLE, ConfigError

VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.\-]*)(?:=(.*))?", re.DOTALL)
CALL = re.compile(r"(Config|Trainer|Arguments)$")  # calls in Python files: GRPOConfig(...), GRPOTrainer(...)


class Translation(NamedTuple):
    """The other trainer, our settings with values, and notes about the rest."""

    trainer: str
    settings: dict[str, Any]
    notes: list[str]


def translate(path: Path) -> Translation:
    """Translate a file. Raises `config.file` if it cannot be read or has no known settings."""
    given, notes = read_settings(path)
    trainer = detect_trainer(given)
    if not trainer:
        raise ConfigError(
            "config.file",
            f"no settings of {', '.join(known_trainers())} are in it",
            where=str(path),
            remedy="give the launch script, the Python file or the TOML of such a run",
        )
    settings, more = translate_settings(trainer, given)
    return Translation(trainer, settings, notes + more)


def detect_trainer(given: Mapping[str, Any]) -> str:
    """The trainer that knows most of the names; empty if none knows any."""
    known = {name: sum(key in translation_table()[name]["settings"] for key in given) for name in known_trainers()}
    best = max(known, key=lambda name: known[name])
    return best if known[best] else ""


def read_settings(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Settings of a file by full names, in order, and notes about non-constant values. Raises `config.file`."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return dict(flatten(tomllib.loads(text))), []
        if path.suffix == ".py":
            return read_python(text)
        return read_shell(text)
    except OSError as error:
        raise ConfigError("config.file", error.strerror or str(error), where=str(path)) from None
    except (SyntaxError, *UNREADABLE) as error:
        raise ConfigError("config.file", str(error), where=str(path)) from None


def read_python(text: str) -> tuple[dict[str, Any], list[str]]:
    """Constant keywords of calls such as `GRPOConfig(...)`."""
    given, notes = dict[str, Any](), list[str]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not CALL.search(ast.unparse(node.func)):
            continue
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            try:
                given[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                notes += _python_note(keyword.arg, ast.unparse(keyword.value))
    return given, notes


def _python_note(name: str, text: str) -> Iterator[str]:
    if name == "reward_funcs":
        yield f"reward_funcs = {text}: put them into a file that trains nothing; one [[reward]] for each"
    elif name in ("train_dataset", "eval_dataset"):
        where = "data.path" if name == "train_dataset" else "evaluation.path"
        yield f"{name} = {text}: save it with save_to_disk(FOLDER) or to_parquet(FILE), and name that in {where}"
    elif name not in ("args", "peft_config", "processing_class", "tokenizer"):
        yield f"{name} = {text}: no constant"


def read_shell(text: str) -> tuple[dict[str, Any], list[str]]:
    """`key.of.hydra=value`, `--flag value` and `--flag=value` of a launch script, with its own variables expanded."""
    variables: dict[str, str] = {}
    given: dict[str, Any] = {}
    flag = ""
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        value = VARIABLE.sub(
            lambda found: variables.get(found[1], os.environ.get(found[1], found[2] or found[0])), word
        )
        if flag and not value.startswith("--"):
            given[flag], flag = parse_value(value), ""
            continue
        if flag:
            given[flag], flag = True, ""
        if found := FLAG.fullmatch(value):
            name = found[1] if "." in found[1] else found[1].replace("-", "_")
            if found[2] is None:
                flag = name
            else:
                given[name] = parse_value(found[2])
        elif found := OVERRIDE.fullmatch(value):
            variables[found[1]] = found[2]
            if "." in found[1]:
                given[found[1]] = parse_value(found[2])
    return given | ({flag: True} if flag else {}), []


def parse_value(text: str) -> Any:
    """Parse a value as Hydra does: `True`, `null`, `1e-6`, `[a.parquet,b.parquet]`, else text."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        inner = re.fullmatch(r"\[(.*)\]", text)
        return [part.strip(" '\"") for part in inner[1].split(",")] if inner else text


class _Given:
    """Settings of another trainer; `left` are those that were not used yet."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.left = dict(given)

    def take(self, key: str, default: Any = None) -> Any:
        """Remove and return a value; the default if it is not set."""
        value = self.left.pop(key, None)
        return default if value is None else value

    def number(self, key: str, default: float = 0) -> float:
        """Return a number and keep it."""
        value = self.left.get(key)
        return value if isinstance(value, int | float) else default


def translate_settings(trainer: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our settings, and notes about the rest."""
    names, nothing = translation_table()[trainer]["settings"], translation_table()[trainer]["nothing"]
    rest, notes = _Given(given), list[str]()
    settings = _SPECIAL[trainer](rest, notes)
    for key, value in rest.left.items():
        if value is None or (isinstance(value, int | float) and value == -1):  # unset, in their notation
            continue
        if key in names:
            settings.setdefault(names[key], _convert_value(names[key], value))
        else:
            notes.append(f"{key} = {value!r}: {nothing.get(key, 'not translated')}")
    return _derive_settings(settings), notes


def _derive_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that follow from several others, for any trainer."""
    if settings.get("data.epochs") and settings.get("learner.steps"):
        del settings["data.epochs"]  # if both are set, the steps count, as in the other trainers
    if "learner.algorithm.clip_low" in settings:
        settings.setdefault("learner.algorithm.clip_high", settings["learner.algorithm.clip_low"])
    off = "learner.algorithm.kl.where" not in settings
    return {key: value for key, value in settings.items() if not (off and key.startswith("learner.algorithm.kl."))}


def _convert_value(key: str, value: Any) -> Any:
    """The value in the type of our setting."""
    if key.endswith(".path") and isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, str):
        return translation_table()["values"].get(key, {}).get(value, value)
    if key == "learner.gradient_checkpointing":
        return bool(value)
    return value


def _ratio(settings: dict[str, Any], notes: list[str], *, whole: float, part: float, names: str) -> None:
    """Derive `learner.algorithm.minibatches` from a batch size and a mini-batch size."""
    if not whole or not part or whole == part:
        return
    if whole % part:
        notes.append(f"{names}: {whole:g} / {part:g} is no whole number of mini-batches")
    else:
        settings["learner.algorithm.minibatches"] = int(whole // part)


def _verl(given: _Given, notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    actor = "actor_rollout_ref.actor."
    mini = given.take(f"{actor}ppo_mini_batch_size", 0)
    _ratio(
        settings,
        notes,
        whole=given.number("data.train_batch_size"),
        part=mini,
        names="data.train_batch_size / ppo_mini_batch_size",
    )
    if given.take(f"{actor}use_kl_loss"):
        settings["learner.algorithm.kl.where"] = "loss"
    elif given.take("algorithm.use_kl_in_reward"):
        settings["learner.algorithm.kl.where"] = "reward"
        given.take(f"{actor}kl_loss_coef")
        given.take(f"{actor}kl_loss_type")
    both = given.take(f"{actor}clip_ratio")
    if both is not None:
        settings |= {
            "learner.algorithm.clip_low": given.take(f"{actor}clip_ratio_low", both),
            "learner.algorithm.clip_high": given.take(f"{actor}clip_ratio_high", both),
        }
    options = {name: given.left[f"algorithm.{name}"] for name in ("gamma", "lam") if f"algorithm.{name}" in given.left}
    if given.left.get("algorithm.adv_estimator") == "gae" and options:
        settings["learner.algorithm.advantage_options"] = options
    for name in options:
        given.take(f"algorithm.{name}")
    _reward_file(settings, given)
    engine_args = {
        name: given.take(f"actor_rollout_ref.rollout.{name}")
        for name in ("gpu_memory_utilization", "tensor_model_parallel_size", "max_model_len")
    }
    _vllm(settings, engine_args, wanted=given.left.get("actor_rollout_ref.rollout.name") == "vllm")
    top_k = given.take("actor_rollout_ref.rollout.top_k", -1)
    if top_k > 0:
        settings["sampling.top_k"] = top_k
    _trackers(settings, given.take("trainer.logger", []))
    gpus = given.take("trainer.n_gpus_per_node")
    if gpus:
        notes.append(f"trainer.n_gpus_per_node = {gpus}: set learner.ranks and producers.count, which share them")
    return settings


def _reward_file(settings: dict[str, Any], given: _Given) -> None:
    """verl's `custom_reward_function`, with the keyword arguments of its function."""
    path = given.take("custom_reward_function.path")
    name = given.take("custom_reward_function.name", "compute_score")
    if path:
        settings["reward.function"] = f"{path}:{name}"
    prefix = "custom_reward_function.reward_kwargs."
    args = {key.removeprefix(prefix): given.take(key) for key in list(given.left) if key.startswith(prefix)}
    if args:
        settings["reward.args"] = args


def _vllm(settings: dict[str, Any], args: Mapping[str, Any], *, wanted: bool) -> None:
    """vLLM's own arguments are kept as they are."""
    given = {
        ("tensor_parallel_size" if name.startswith("tensor_model") else name): value
        for name, value in args.items()
        if value is not None
    }
    if wanted and given:
        settings["producers.engine_args"] = given


def _trackers(settings: dict[str, Any], loggers: Any) -> None:
    known = [
        name
        for name in ([loggers] if isinstance(loggers, str) else loggers or ())
        if name in ("wandb", "mlflow", "swanlab", "trackio")
    ]
    if known:
        settings["trackers.use"] = known


def _trl(given: _Given, notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    samples = given.take("per_device_train_batch_size", 8) * given.take("gradient_accumulation_steps", 1)
    group = given.number("num_generations", 8)
    if samples % group:
        notes.append(
            f"per_device_train_batch_size * gradient_accumulation_steps = {samples} is no multiple of "
            f"num_generations = {group:g}; buffer.batch_groups is rounded up"
        )
    settings["buffer.batch_groups"] = max(1, int(-(-samples // group)))
    notes.append(
        f"buffer.batch_groups = {settings['buffer.batch_groups']} is of one device: multiply it by their number"
    )
    if given.number("beta"):
        settings["learner.algorithm.kl.where"] = "loss"
    losses = {
        "grpo": "seq-mean-token-mean",
        "bnpo": "token-mean",
        "dapo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    loss = given.take("loss_type", "dapo")
    if loss in losses:
        settings["learner.algorithm.aggregation"] = losses[loss]
    else:
        notes.append(f"loss_type = {loss!r}: see docs/algorithms.md")
    scale = given.take("scale_rewards", "group")
    if scale in (False, "none"):
        settings["learner.algorithm.advantage"] = "dr_grpo"
    elif scale == "batch":
        notes.append("scale_rewards = 'batch': advantages are scaled by the group here")
    if given.take("use_vllm"):
        settings["producers.engine"] = "vllm_http" if given.left.get("vllm_mode") == "server" else "vllm"
    warmup, steps = given.take("warmup_ratio", 0), given.number("max_steps")
    if warmup and steps > 0:
        settings["learner.optim.warmup_steps"] = round(warmup * steps)
    elif warmup:
        notes.append(f"warmup_ratio = {warmup}: set learner.optim.warmup_steps")
    if given.take("bf16"):
        settings["model.dtype"] = "bfloat16"
    modules = given.take("lora_target_modules") or given.take("target_modules")
    if isinstance(modules, list):
        settings["learner.lora.target_modules"] = modules
    _trackers(settings, given.take("report_to", []))
    return settings


def _prime(given: _Given, notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    rollouts, group = given.take("orchestrator.batch_size"), given.number("orchestrator.rollouts_per_example", 1)
    if rollouts:
        settings["buffer.batch_groups"] = max(1, int(-(-rollouts // group)))
    tensor = given.take("inference.parallel.tp")
    if tensor:
        settings |= {"producers.engine": "vllm", "producers.engine_args": {"tensor_parallel_size": tensor}}
    if given.take("wandb") or any(key.startswith("wandb.") for key in given.left):
        settings["trackers.use"] = ["wandb"]
    environments = given.take("orchestrator.env") or given.take("orchestrator.environment")
    if environments:
        notes.append(f'orchestrator.env = {environments!r}: set environment.name = "verifiers" (docs/environments.md)')
    return settings


def _openrlhf(given: _Given, notes: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    prompts, group = given.number("rollout_batch_size"), given.number("n_samples_per_prompt", 1)
    _ratio(
        settings,
        notes,
        whole=prompts * group,
        part=given.take("train_batch_size", 0),
        names="rollout_batch_size * n_samples_per_prompt / train_batch_size",
    )
    if given.number("init_kl_coef"):
        settings["learner.algorithm.kl.where"] = "loss" if given.take("use_kl_loss") else "reward"
    both = given.take("eps_clip")
    if both is not None:
        settings |= {"learner.algorithm.clip_low": both, "learner.algorithm.clip_high": both}
    estimator = given.take("advantage_estimator", "gae")
    settings["learner.algorithm.advantage"] = _convert_value("learner.algorithm.advantage", estimator)
    options = {
        ours: value
        for ours, theirs in (("gamma", "gamma"), ("lam", "lambd"))
        if (value := given.take(theirs)) is not None
    }
    if estimator == "gae" and options:
        settings["learner.algorithm.advantage_options"] = options
    rewards = str(given.take("remote_rm_url", ""))
    if rewards:
        settings["reward.function"] = f"{rewards}:reward_func" if rewards.endswith(".py") else rewards
    if given.left.get("vllm_num_engines"):
        settings["producers.engine"] = "vllm"
        _vllm(
            settings,
            {
                "tensor_model_parallel_size": given.take("vllm_tensor_parallel_size"),
                "gpu_memory_utilization": given.take("vllm_gpu_memory_utilization"),
            },
            wanted=True,
        )
    if given.take("bf16"):
        settings["model.dtype"] = "bfloat16"
    if given.take("use_wandb"):
        settings["trackers.use"] = ["wandb"]
    return settings


_SPECIAL: dict[str, Callable[[_Given, list[str]], dict[str, Any]]] = {
    "verl": _verl,
    "trl": _trl,
    "prime-rl": _prime,
    "openrlhf": _openrlhf,
}

"""Checks the code that a configuration names: rewards, sources, engines, backends, algorithms, packages, models.

Guarantees:
1. code of the user and of plugins is imported in a separate process, for `IMPORT_TIMEOUT_S` at most;
2. packages of optional parts are located without being imported;
3. of the folders of further models (critic, process reward model, reference, judges) it reads only config.json: one
   without a configuration or weights is `config.model`, with the setting that names it; so are a process reward model
   that is not a language model, and a vocabulary smaller than the policy's.

Example: `learner.process_reward.model` names the export of a reward model: it has a scalar head, no log-probs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import Config, dump
from asyncrl.config.model_facts import VISION_MODELS, list_senses
from asyncrl.config.rules.algorithm import component_problems
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError, error_for, near_miss
from asyncrl.plugins import is_place, known_plugins
from asyncrl.process_plan.plan import ENGINES
from asyncrl.runtime.child_environment import child_environment
from asyncrl.runtime.model_folder import model_json

IMPORT_TIMEOUT_S = 60.0
#: Packages of backends in optional extras.
BACKEND_PACKAGES = {"megatron": "megatron"}

# runs in a separate process: user code may hang, print or exit
_IMPORT = """
import sys
from asyncrl.errors import ConfigError
from asyncrl.plugins import load_object
try:
    found = load_object(sys.argv[1], code="config.extra")
except ConfigError as error:
    sys.exit(error.message)
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {error}")
if not callable(found):
    sys.exit("it is not callable")
"""


def import_problem(dotted: str, *, env: Collection[str] = ()) -> str:
    """Why 'module:function' cannot be used; empty if it can. Tried in another process from this folder."""
    return _problem([sys.executable, "-c", _IMPORT, dotted], env=env)


def check_rewards(config: Config) -> Iterator[AsyncRLError]:
    """Every reward function can be imported and takes arguments that reward workers can pass."""
    validator = "producers.rewards.functions"
    known = (_package_root() / "producers" / "rewards" / "functions.py").exists()
    yield from check_models(config)
    for index, reward in enumerate(config.reward):
        if not reward.function:  # its judge is a model
            continue
        if known:
            words = ["--validate", reward.function, "--args", json.dumps(reward.args, default=str)]
            words += ["--sandbox", config.sandbox.kind]
            problem = _problem([sys.executable, "-m", validator, *words], env=reward.env)
        else:
            problem = import_problem(reward.function, env=reward.env)
        if problem:
            other = re.fullmatch(r"\[([\w.]+)\] (.*) -> (.*)", problem)  # the code of another error
            code, message, remedy = other.groups() if other else ("config.reward", problem, "")
            yield error_for(code, message, where=f"reward[{index}].function = {reward.function!r}", remedy=remedy)


def _package_root() -> Path:
    return Path(__file__).resolve().parents[2]


def _run(command: list[str], text: str = "", *, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, within `IMPORT_TIMEOUT_S`. `env`: None for that of this process."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env=environment(env),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"importing it took longer than {IMPORT_TIMEOUT_S:g} s"
    return done.returncode, done.stdout, done.stderr


def _problem(command: list[str], *, env: Collection[str] = ()) -> str:
    """Why a check of user code fails in the environment that its process will have; empty if it does not."""
    code, out, err = _run(command, env=child_environment(env))
    if code == 0:
        return ""
    lines = [line for line in (err or out).splitlines() if line.strip()]
    meant = next((line for line in reversed(lines) if not line.lstrip().startswith("->")), "")
    return re.sub(r"^error\[[\w.]+\] \S+: ", "", meant.strip()) or f"its check ended with code {code}"


def environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment, or that of this process, with this folder and the package on the Python path."""
    env = dict(os.environ if source is None else source)
    places = [os.getcwd(), str(_package_root()), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return env


def check_plugins(config: Config) -> Iterator[AsyncRLError]:
    """Engine and backend are known names."""
    for key, group, name in (
        ("producers.engine", "asyncrl.engines", config.producers.engine),
        ("learner.backend", "asyncrl.backends", config.learner.backend),
    ):
        known = known_plugins(group)
        if is_place(name):
            if problem := import_problem(name):
                yield ConfigError("config.extra", problem, where=key)
        elif name not in known:
            near, hint = near_miss(name, known)
            what = f"{name!r} is not known: one of {', '.join(sorted(known))}{hint}"
            yield ConfigError("config.type", what, where=key, suggestion=near)
    package = BACKEND_PACKAGES.get(config.learner.backend, "")
    if package and importlib.util.find_spec(package) is None:
        what = f"backend {config.learner.backend!r} needs the package {package}, which this environment lacks"
        remedy = f"pip install 'asyncrl[{config.learner.backend}]'"
        yield ConfigError("config.extra", what, where="learner.backend", remedy=remedy)
    yield from check_extras(config)
    python = config.producers.python
    if python and not shutil.which(python):
        yield ConfigError("config.type", f"no interpreter {python!r}", where="producers.python")


def check_torch(config: Config, roles: Collection[str]) -> Iterator[AsyncRLError]:
    """torch and transformers are there for the roles of this host that use them, in the environment of this command."""
    lacking = " and ".join(name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None)
    uses = []
    if "learner" in roles:
        uses.append(("learner.backend", config.learner.backend, "learner"))
    if ENGINES & {*roles} and config.producers.engine == "hf" and not config.producers.python:
        uses.append(("producers.engine", "hf", "hf"))
    for key, name, extra in uses if lacking else ():
        what = f"{name!r} needs {lacking}, which this environment lacks"
        yield ConfigError("config.extra", what, where=key, remedy=f"pip install 'asyncrl[{extra}]'")


def check_filters(config: Config) -> Iterator[AsyncRLError]:
    """Filters of the user can be imported."""
    for name in filter(is_place, config.buffer.filters):
        if problem := import_problem(name):
            yield ConfigError("config.filter", problem, where=f"buffer.filters = {name!r}")


def check_extras(config: Config) -> Iterator[AsyncRLError]:
    """Packages of adapters, optimizers and kernels in optional extras are installed."""
    if config.learner.lora.rank and importlib.util.find_spec("peft") is None:
        what = "adapters need the package peft, which this environment lacks"
        yield ConfigError("config.extra", what, where="learner.lora.rank", remedy="pip install 'asyncrl[lora]'")
    if config.learner.liger and importlib.util.find_spec("liger_kernel") is None:
        yield ConfigError(
            "config.extra",
            "learner.liger needs the package liger-kernel, which this environment lacks",
            where="learner.liger",
            remedy="pip install 'asyncrl[cuda]'",
        )
    for name in ("optim", "critic", "process_reward"):
        if getattr(config.learner, name).name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            what = f"learner.{name}.name = 'adamw_8bit' needs the package torchao, which this environment lacks"
            remedy = "pip install 'asyncrl[optim-8bit]'"
            yield ConfigError("config.extra", what, where=f"learner.{name}.name", remedy=remedy)


def check_algorithm(config: Config) -> Iterator[AsyncRLError]:
    """Estimators, losses, corrections and other functions of the user can be imported and have the configured options;
    each reward has a weight, where there are some.

    Runs in a separate process with torch; built-in ones are known without it
    (`asyncrl.config.sections.algorithm_catalogue`).
    """
    learner, algorithm = config.learner, config.learner.algorithm
    for one in component_problems(config):
        yield error_for(one.code, one.message, where=".".join(one.path))
    rl = learner.mode == "rl"
    names = {kind: algorithms.effective_name(algorithm, kind) for kind in algorithms.TABLES} if rl else {}
    others = [learner.optim.schedule, learner.critic.schedule, learner.process_reward.schedule]
    others += [algorithm.aggregation, algorithm.kl.kind] if rl else []
    if all(name in algorithms.TABLES[kind] for kind, name in names.items()) and not any(map(is_place, others)):
        return
    if any(name not in algorithms.known_names(kind) and not is_place(name) for kind, name in names.items()):
        return  # `asyncrl.config` reports it
    code, out, err = _run([sys.executable, "-m", "learners.own_parts"], dump(config))
    for line in out.splitlines():
        if line.startswith("["):
            kind, message, where = json.loads(line)
            yield error_for(kind, message, where=where)
    if code:
        last = (err.strip() or f"its check ended with code {code}").splitlines()[-1]
        yield ConfigError("config.extra", last, where="learner.algorithm")


def check_companions(config: Config) -> Iterator[AsyncRLError]:
    """Mistakes in the folders of the critic and of the process reward model."""
    learner = config.learner
    folders = {
        "critic.model": learner.critic.model,
        "process_reward.model": learner.process_reward.model,
        "process_reward.reference": learner.process_reward.reference,
    }
    vocabulary = model_json(config.model.path).get("vocab_size")
    for key, folder in folders.items():
        if folder and (problem := _folder_problem(key, Path(folder), vocabulary)):
            yield ConfigError("config.model", problem, where=f"learner.{key} = {folder!r}")


def _folder_problem(key: str, folder: Path, vocabulary: Any) -> str:
    found = model_json(folder)
    if not found or not list(folder.glob("*.safetensors")):
        return "no such folder, or it has no config.json or no *.safetensors"
    kinds = found.get("architectures") or ()
    if key.startswith("process_reward") and any("Classification" in str(kind) for kind in kinds):
        return "it is a classifier; process rewards come from a language model: name the one that it was made from"
    own = found.get("vocab_size")
    if isinstance(own, int) and isinstance(vocabulary, int) and own < vocabulary:
        return f"its vocabulary has {own} tokens, that of model.path {vocabulary}: they must share a tokenizer"
    return ""


def check_models(config: Config) -> Iterator[AsyncRLError]:
    """The folders and key files that judges name exist."""
    for table in config.judge:
        where = f"judge {table.name!r}"
        if table.kind in ("classifier", "generative"):
            folder = Path(table.model)
            if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
                yield ConfigError("config.model", f"{table.model!r} has no config.json or no weights", where=where)
            elif table.sees_images and not list_senses(model_json(folder)):
                what = f"its prompt has {{images}}, and {table.model!r} reads text alone"
                yield ConfigError("config.model", what, where=where)
        if table.api_key_file and not Path(table.api_key_file).is_file():
            yield ConfigError("config.file", f"api_key_file {table.api_key_file!r} is missing", where=where)
    for teacher in config.teacher:
        where = f"teacher {teacher.name!r}"
        vocabulary, top_k = model_json(config.model.path).get("vocab_size"), config.learner.distillation.asked_top_k
        if isinstance(vocabulary, int) and top_k > vocabulary:
            what = f"learner.distillation.top_k = {top_k}, and the vocabulary has {vocabulary} tokens"
            yield ConfigError("config.conflict", what, where="learner.distillation.top_k")
        if teacher.url and list_senses(model_json(config.model.path)):
            what = "a teacher behind a server reads text alone, and model.path has a vision tower"
            yield ConfigError("config.model", what, where=where, remedy="name a folder of the same family")
        if not teacher.url and (problem := _teacher_problem(Path(teacher.model), Path(config.model.path))):
            yield ConfigError("config.model", f"{teacher.model!r}: {problem}", where=where)
        if teacher.api_key_file and not Path(teacher.api_key_file).is_file():
            yield ConfigError("config.file", f"api_key_file {teacher.api_key_file!r} is missing", where=where)


def _teacher_problem(folder: Path, policy: Path) -> str:
    """Why a folder cannot teach the policy; empty if it can: it reads and names the policy's token ids."""
    found = model_json(folder)
    if not found or not list(folder.glob("*.safetensors")):
        return "it has no config.json or no weights"
    both = (model_json(policy), found)
    seeing = [one.get("model_type") for one in both if list_senses(one)]
    if seeing and (len(seeing) == 1 or seeing[0] != seeing[1] or seeing[0] not in VISION_MODELS):
        kinds = " and ".join(str(one.get("model_type")) for one in both)
        return (
            f"it is to see the images of the policy, and the two are of the types {kinds}: they must be of one family"
        )
    pairs = [tokenizer_entries(path) for path in (folder, policy)]
    if all(pairs) and pairs[0] != pairs[1]:
        return "its tokenizer has other tokens than that of model.path: they must share a vocabulary"
    own, wanted = (model_json(path).get("vocab_size") for path in (folder, policy))
    if not all(pairs) and own != wanted:
        return f"its vocabulary has {own} tokens, that of model.path {wanted}: they must share a tokenizer"
    return ""


def tokenizer_entries(folder: Path) -> dict[str, int]:
    """The tokens of a folder's tokenizer.json with their ids; empty without one."""
    try:
        found = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = found["model"]["vocab"]
        pairs = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], at) for at, row in enumerate(vocabulary))
        )
        return dict(pairs) | {one["content"]: one["id"] for one in found.get("added_tokens") or ()}
    except (OSError, KeyError, IndexError, TypeError, AttributeError, *UNREADABLE):
        return {}

"""Looks at everything a configuration names before anything is started, and reports all mistakes at once.

Called by `asyncrl check` and by `asyncrl launch`, which starts nothing where this finds a mistake. Guarantees:
1. every mistake is found in one pass, each with where it stands and what to do;
2. code of the user (rewards, prompt sources) is imported in another process with a time limit, never in this one;
3. nothing is written, bound for longer than the look, or left running;
4. the derived numbers are shown with their arithmetic.
It does not load the model and does not import torch or redis.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import algorithm_notes, algorithms, checkpoint_config, devices, engine_env, evaluation_config, parallel
from asyncrl.check_companions import check_companions
from asyncrl.config import Config, dump
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError, ConfigErrors, error_for
from asyncrl.evaluation import MAX_ROWS, data_of, is_due
from asyncrl.modes import bound_of, is_paired, longest_row, streams, with_epochs
from asyncrl.plan import TARGETS, names_of, threads_of
from asyncrl.plugins import BUILT_IN
from asyncrl.probe import bind_problem, redis_problem
from asyncrl.redis_secret import with_password
from asyncrl.rundir import RunDir
from asyncrl.sockets import read_keys

IMPORT_TIMEOUT_S = 60.0
#: Packages of backends that are extras.
BACKEND_PACKAGES = {"megatron": "megatron"}
COUNT_LIMIT_BYTES = 1 << 30  # larger files are not counted
REDIS_SERVERS = ("redis-server", "valkey-server")

# Run in a process of its own: user code may hang, print or exit.
_IMPORT = """
import importlib, sys
module, _, name = sys.argv[1].partition(":")
try:
    found = importlib.import_module(module)
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {error}")
for part in name.split("."):
    if not hasattr(found, part):
        sys.exit(f"module {module} has no {part!r}")
    found = getattr(found, part)
if not callable(found):
    sys.exit("it is not callable")
"""


class Finding(msgspec.Struct, frozen=True):
    """One derived number: what it is, its value and how it comes about."""

    name: str
    value: str
    arithmetic: str = ""


class Checked(msgspec.Struct, frozen=True):
    """All mistakes and all derived numbers."""

    errors: list[AsyncRLError]
    findings: list[Finding]
    notes: list[str]


def check(config: Config, roles: Sequence[str] = TARGETS["all"], *, joining: bool = False) -> Checked:
    """Everything that can be known before the start. `joining`: the services and their store live elsewhere."""
    checks: list[tuple[set[str], Callable[[Config], Iterable[AsyncRLError]]]] = [
        ({"producer", "learner"}, check_model),
        ({"producer"}, check_data),
        ({"reward"}, check_rewards),
        ({"producer", "learner"}, check_plugins),
        ({"buffer"}, check_store),
        ({"buffer", "weightsync"}, lambda config: check_ports(config, roles)),
    ]
    errors: list[AsyncRLError] = []
    for wanted_by, look in checks:
        if wanted_by & set(roles):
            errors += look(config)
    if "learner" in roles:
        errors += check_algorithm(config)
    errors += check_keys(config, joining=joining or "buffer" not in roles)
    findings = []
    if "producer" in roles:
        wrong, has, python = engine_env.look(config, env=_environment())
        errors += engine_env.url_problems(config) + wrong
        findings = [Finding("engine", has, python)] if has else []
    here = devices.found()
    errors += [error_for(code, what, where=".".join(key)) for code, what, key in devices.problems(config, roles, here)]
    places = devices.placed(config, roles, here)
    if text := devices.shown(places, here):
        findings.append(Finding("devices", text))
    notes = notes_on(config, roles)
    if places.shared:
        notes.append(f"processes share devices ({devices.shown(places, here)}): their memory has to do for all of them")
    return Checked(errors, [*derived(config, roles), *findings], notes)


# ---------------------------------------------------------------- files


def check_model(config: Config) -> Iterator[AsyncRLError]:
    """The model folder has a configuration, weights and a tokenizer; models beside it the first two."""
    yield from check_companions(config)
    folder = Path(config.model.path)
    where = f"model.path = {config.model.path!r}"
    if not folder.is_dir():
        yield ConfigError("config.model", "no such folder", where=where)
        return
    if not (folder / "config.json").is_file():
        yield ConfigError("config.model", "it has no config.json", where=where)
    if not list(folder.glob("*.safetensors")):
        yield ConfigError("config.model", "it has no *.safetensors (weights)", where=where)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    if not any((folder / name).is_file() for name in names):
        yield ConfigError("config.tokenizer", f"it has none of {', '.join(names)}", where=where)
    yield from check_layout(config, folder / "config.json")


def check_layout(config: Config, path: Path) -> Iterator[AsyncRLError]:
    """Heads and experts of the model divide by `[learner.parallel]`."""
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE):  # said where the model is loaded
        return
    if isinstance(model, dict):
        for code, message, key in parallel.model_problems(config, model):
            yield error_for(code, message, where=".".join(key))


def data_paths(config: Config) -> list[Path]:
    """The files of `data.path`."""
    return [Path(part.strip()) for part in config.data.path.split(",") if part.strip()]


def check_data(config: Config, section: str = "data") -> Iterator[AsyncRLError]:
    """The first row of every file has the prompt column; a source can be imported."""
    if section == "data" and config.evaluation.enabled:
        held_out = msgspec.structs.replace(config, data=data_of(config))
        yield from check_data(held_out, "evaluation")
    if config.data.source:
        problem = import_problem(config.data.source)
        if problem:
            yield ConfigError("config.data", problem, where=f"{section}.source = {config.data.source!r}")
    for path in data_paths(config):
        where = f"{section}.path = {str(path)!r}"
        try:
            row = first_row(path)
        except (OSError, ValueError) as error:
            yield ConfigError("config.data", getattr(error, "strerror", None) or str(error), where=where)
            continue
        if row is None:
            yield ConfigError("config.data", "it has no rows", where=where)
            continue
        wanted = {"prompt_key": config.data.prompt_key, **answer_columns(config, row)}
        for setting, column in wanted.items():
            if column not in row:
                columns = ", ".join(sorted(row)) or "none"
                message = f"no column {column!r} (data.{setting}); it has: {columns}"
                yield ConfigError("config.data", message, where=where)


def answer_columns(config: Config, row: Mapping[str, Any]) -> dict[str, str]:
    """Setting and name of the answer columns that the rows must have; none where a conversation ends in its answer."""
    if not streams(config):
        return {}
    if is_paired(config):
        return {"chosen_key": config.data.chosen_key, "rejected_key": config.data.rejected_key}
    conversation = not isinstance(row.get(config.data.prompt_key), str)  # of a .parquet file it is not known here
    return {} if conversation else {"response_key": config.data.response_key}


def settled(config: Config) -> Config:
    """The configuration with `learner.steps` from `data.epochs`, where that is set."""
    if not config.data.epochs:
        return config
    if not all(path.exists() for path in data_paths(config)):
        return config  # `check_data` says so
    counts = [count_rows(path) for path in data_paths(config)]
    try:
        return with_epochs(config, sum(filter(None, counts)) if counts and all(counts) else None)
    except ConfigError as error:
        raise ConfigErrors([error]) from None


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a .jsonl, .json or .parquet file (of the latter with empty values), None without rows."""
    if path.suffix == ".parquet":
        return _parquet_row(path)
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"unknown kind {path.suffix!r}: give .parquet, .jsonl or .json")
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".json":
            rows = json.load(file)
            if not isinstance(rows, list):
                raise ValueError("it is not a list of rows")
            row = rows[0] if rows else None
        else:
            line = next((line for line in file if line.strip()), "")
            row = json.loads(line) if line else None
    if row is not None and not isinstance(row, dict):
        raise ValueError("its first row is not an object")
    return row


def _parquet_row(path: Path) -> dict[str, Any] | None:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError("reading .parquet needs the package pyarrow") from None
    try:
        with ParquetFile(path) as file:
            return dict.fromkeys(file.schema_arrow.names) if file.metadata.num_rows else None
    except ArrowException as error:
        raise ValueError(str(error)) from None


def count_rows(path: Path) -> int | None:
    """Rows of a file; None where counting would take long or the file cannot be read."""
    try:
        if path.stat().st_size > COUNT_LIMIT_BYTES:
            return None
        if path.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as file:
                return int(file.metadata.num_rows)
        if path.suffix == ".json":
            return len(json.loads(path.read_text(encoding="utf-8")))
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, ValueError, ImportError):  # the number is a courtesy; mistakes in the file are check_data's
        return None


# ---------------------------------------------------------------- code of the user and of plugins


def import_problem(dotted: str) -> str:
    """Why 'module:function' cannot be used, empty where it can. Tried in another process from this folder."""
    return _problem([sys.executable, "-c", _IMPORT, dotted])


def check_rewards(config: Config) -> Iterator[AsyncRLError]:
    """Every reward function can be imported and takes arguments that reward workers know how to give."""
    validator = "producers.rewards.functions"
    known = (_package_root() / "producers" / "rewards" / "functions.py").exists()
    for index, reward in enumerate(config.reward):
        if known:
            problem = _problem([sys.executable, "-m", validator, "--validate", reward.function])
        else:
            problem = import_problem(reward.function)
        if problem:
            yield ConfigError("config.reward", problem, where=f"reward[{index}].function = {reward.function!r}")


def _package_root() -> Path:
    return Path(__file__).resolve().parent.parent


def _problem(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, env=_environment(),
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"importing it took longer than {IMPORT_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    meant = next((line for line in reversed(lines) if not line.lstrip().startswith("->")), "")
    return meant.strip() or f"its check ended with code {done.returncode}"


def _environment() -> dict[str, str]:
    """That of this process, with this folder and the package on the path."""
    env = dict(os.environ)
    places = [os.getcwd(), str(_package_root()), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return env


def check_plugins(config: Config) -> Iterator[AsyncRLError]:
    """Engine and backend are known names."""
    for key, group, name in (
        ("producers.engine", "asyncrl.engines", config.producers.engine),
        ("learner.backend", "asyncrl.backends", config.learner.backend),
    ):
        known = set(BUILT_IN.get(group, {})) | {point.name for point in entry_points(group=group)}
        if name not in known:
            yield ConfigError("config.type", f"{name!r} is not known: one of {', '.join(sorted(known))}", where=key)
    package = BACKEND_PACKAGES.get(config.learner.backend, "")
    if package and importlib.util.find_spec(package) is None:
        what = f"backend {config.learner.backend!r} needs the package {package}, which this environment lacks"
        remedy = f"pip install 'asyncrl[{config.learner.backend}]'"
        yield ConfigError("config.extra", what, where="learner.backend", remedy=remedy)
    yield from check_extras(config)
    python = config.producers.python
    if python and not shutil.which(python):
        yield ConfigError("config.type", f"no interpreter {python!r}", where="producers.python")


def check_extras(config: Config) -> Iterator[AsyncRLError]:
    """The packages of adapters, optimizers and kernels that are extras are installed."""
    if config.learner.lora.rank and importlib.util.find_spec("peft") is None:
        what = "adapters need the package peft, which this environment lacks"
        yield ConfigError("config.extra", what, where="learner.lora.rank", remedy="pip install 'asyncrl[lora]'")
    if config.learner.liger and importlib.util.find_spec("liger_kernel") is None:
        yield ConfigError("config.extra", "learner.liger needs the package liger-kernel, which this environment lacks",
                          where="learner.liger", remedy="pip install 'asyncrl[cuda]'")  # fmt: skip
    for name in ("optim", "critic", "process_reward"):
        if getattr(config.learner, name).name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            what = f"learner.{name}.name = 'adamw_8bit' needs the package torchao, which this environment lacks"
            remedy = "pip install 'asyncrl[optim-8bit]'"
            yield ConfigError("config.extra", what, where=f"learner.{name}.name", remedy=remedy)


def check_algorithm(config: Config) -> Iterator[AsyncRLError]:
    """Estimators, losses and corrections of plugins can be imported and have the options that are set.

    In a process of its own, with torch; built-in ones are known without it (`asyncrl.algorithms`).
    """
    algorithm = config.learner.algorithm
    if config.learner.mode != "rl" or all(
        algorithms.chosen(algorithm, kind) in table for kind, table in algorithms.TABLES.items()
    ):
        return
    command = [sys.executable, "-m", "learners.algorithms.registry"]
    try:
        done = subprocess.run(
            command, input=dump(config), capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, env=_environment(),
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield ConfigError("config.extra", f"importing it took longer than {IMPORT_TIMEOUT_S:g} s",
                          where="learner.algorithm")  # fmt: skip
        return
    for line in done.stdout.splitlines():
        if line.startswith("["):
            code, message, where = json.loads(line)
            yield error_for(code, message, where=where)
    if done.returncode:
        last = (done.stderr.strip() or f"its check ended with code {done.returncode}").splitlines()[-1]
        yield ConfigError("config.extra", last, where="learner.algorithm")


# ---------------------------------------------------------------- network and store


def check_ports(config: Config, roles: Sequence[str]) -> Iterator[AsyncRLError]:
    """`tcp://` addresses of the services that start here are free."""
    seen: dict[str, str] = {}
    for service in ("buffer", "weightsync"):
        address = str(getattr(config.network, service))
        if service not in roles or not address.startswith("tcp://"):
            continue
        if address in seen and not address.endswith(":0"):
            yield ConfigError("config.conflict", f"the same address as network.{seen[address]}",
                              where=f"network.{service} = {address!r}")  # fmt: skip
            continue
        seen[address] = service
        problem = bind_problem(address)
        if problem is not None:
            yield error_for(*problem, where=f"network.{service} = {address!r}")


def check_store(config: Config) -> Iterator[AsyncRLError]:
    """Redis answers where a URL is given; a server is on the PATH where one is to be started."""
    buffer = config.buffer
    if buffer.store == "sqlite":
        return
    if buffer.redis_url:
        try:
            problem = redis_problem(with_password(buffer.redis_url, RunDir(config.run_dir).store))
        except ConfigError as error:
            yield error
            return
        if problem:
            yield error_for("store.unreachable", problem, where="buffer.redis_url")
    elif buffer.store == "redis" and not any(shutil.which(name) for name in REDIS_SERVERS):
        yield error_for("store.no_server", f"none of {', '.join(REDIS_SERVERS)} is on the PATH", where="buffer.store")


def check_keys(config: Config, *, joining: bool) -> Iterator[AsyncRLError]:
    """The key file can be read and is private; the owner of the buffer may still have to make it."""
    path = Path(config.network.key_file)
    if not config.network.key_file or (not joining and not path.exists() and path.parent.is_dir()):
        return
    try:
        read_keys(path)
    except AsyncRLError as error:
        yield error


# ---------------------------------------------------------------- derived numbers


def derived(config: Config, roles: Sequence[str] = TARGETS["all"]) -> list[Finding]:
    """The numbers that follow from the settings, with their arithmetic."""
    buffer, sampling, learner = config.buffer, config.sampling, config.learner
    group_size, slots = sampling.group_size, config.producers.slots
    asked = sampling.asked_samples
    held = config.producers.groups_in_flight(asked)
    per_group = f"group_size {group_size}" if asked == group_size else f"(group_size + over_issue) {asked}"
    per_producer = (
        "producers.max_groups_in_flight" if config.producers.max_groups_in_flight
        else f"ceil(2 x slots {slots} / {per_group}), fewer where the K/V holds fewer"
    )  # fmt: skip
    row = longest_row(config)
    findings = [
        Finding("lag at most", f"{bound_of(config)} steps", "the whole run: rows have no age" if streams(config)
                else "max_staleness; the bound holds for every token"),
        Finding("max in flight", f"{buffer.max_in_flight_groups} groups",
                f"(pipeline_depth {buffer.depth} + 1) x batch_groups {buffer.batch_groups}"),
        Finding("samples per step", str(buffer.batch_groups * group_size),
                f"batch_groups {buffer.batch_groups} x group_size {group_size}"),
        Finding("total groups", str(config.total_groups),
                f"steps {learner.steps} x batch_groups {buffer.batch_groups}"),
        Finding("groups per producer", str(held), per_producer),
        Finding("longest sample", f"{row} tokens",
                f"max_prompt_tokens {config.data.max_prompt_tokens} + max_new_tokens {sampling.max_new_tokens}"
                f"{', twice for a pair' if is_paired(config) else ''}; "
                f"a packed row holds {learner.micro_batch_tokens}"),
    ]  # fmt: skip
    rows = [count_rows(path) for path in data_paths(config)]
    if rows and all(rows):
        count = sum(number for number in rows if number)
        findings.append(Finding("epochs", f"{config.total_groups / count:.2f}",
                                f"total groups {config.total_groups} / rows {count}"))  # fmt: skip
    findings += _evaluation_findings(config)
    if learner.mode == "rl":
        findings.append(Finding("algorithm", algorithms.explain(learner.algorithm)))
    findings.append(Finding("what starts", what_starts(config, roles)))
    return findings


def _evaluation_findings(config: Config) -> list[Finding]:
    """How often which prompts are evaluated."""
    evaluation, asked = config.evaluation, config.sampling.asked_samples
    if not evaluation.enabled:
        return []
    times = sum(is_due(config, step) for step in range(config.learner.steps + 1))
    rows = [count_rows(path) for path in data_paths(msgspec.structs.replace(config, data=data_of(config)))]
    prompts = "all held-out prompts"
    if rows and all(rows):
        count = min(sum(number for number in rows if number), evaluation.max_prompts or MAX_ROWS)
        prompts = f"{count} prompts"
    held = evaluation.held_groups(training_samples=config.producers.groups_in_flight(asked) * asked)
    how = "greedy" if evaluation.temperature == 0 else f"temperature {evaluation.temperature:g}"
    return [Finding("evaluations", str(times), f"{prompts} x {evaluation.samples} samples, {how}, at most "
                    f"{evaluation.timeout_s:g} s each; a producer holds up to {held} beside its training")]  # fmt: skip


def what_starts(config: Config, roles: Sequence[str]) -> str:
    """`1 buffer (sqlite), 1 weightsync, 2 producers (hf), 1 reward worker, 1 learner x 1 rank = 6 processes`."""
    words = {
        "buffer": f"1 buffer ({config.buffer.store})",
        "weightsync": f"1 weightsync ({config.weightsync.transport})",
        "producer": f"{_many(config.producers.count, 'producer')} ({config.producers.engine})",
        "reward": _many(config.reward_workers.count, "reward worker"),
        "learner": f"1 learner x {_many(config.learner.ranks, 'rank')} ({config.learner.backend})",
    }
    chosen = [role for role in TARGETS["all"] if role in roles]
    total = sum(len(names_of(role, config)) if role != "learner" else config.learner.ranks for role in chosen)
    return f"{', '.join(words[role] for role in chosen)} = {_many(total, 'process', 'es')}"


def _many(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else ending}"


def notes_on(config: Config, roles: Sequence[str]) -> list[str]:
    """Settings that work and may surprise."""
    notes = []
    workers = config.reward_workers.count
    counts = {"producer": config.producers.count, "learner": config.learner.ranks, "reward": workers}
    threads = sum(count * threads_of(role, config) for role, count in counts.items() if role in roles)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > 2 * cores:
        notes.append(f"{threads} busy threads on {cores} CPU cores: lower producers.threads or learner.threads")
    notes += algorithm_notes.notes(config)
    notes += (*evaluation_config.notes(config), *checkpoint_config.notes(config))
    minibatches = config.learner.algorithm.minibatches
    if minibatches > 1:
        notes.append(f"minibatches = {minibatches}: several optimizer steps per batch multiply the effective staleness")
    return notes


def render(checked: Checked) -> str:
    """The text that `asyncrl check` prints."""
    width = max((len(finding.name) for finding in checked.findings), default=0)
    lines = []
    for finding in checked.findings:
        tail = f" = {finding.arithmetic}" if finding.arithmetic else ""
        lines.append(f"  {finding.name:<{width}}  {finding.value}{tail}")
    lines += [f"note: {note}" for note in checked.notes]
    return "\n".join(lines)

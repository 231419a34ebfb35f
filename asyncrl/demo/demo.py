"""`asyncrl demo`: prompts, a warm-started tiny model, a whole run on this machine, and a check of its promises.

Guarantees:
1. the run is that of `configs/quickstart.toml` with the task's model, prompts and reward, and `--set` on top: the code
   path is that of `asyncrl launch all`;
2. the run folder is new unless `--resume` is given; models and prompts are created once and kept; with `--prepare-only`
   nothing is started;
3. it ends with 1 if a printed promise is broken. Each promise states its limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit.prove import Audit
from asyncrl.config import load
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launcher.launch import Launched, LaunchOptions, absolute, launch_config
from asyncrl.process_plan.interpreters import python_path
from asyncrl.report.data import RunData, load_run
from asyncrl.runtime.run_dir import RunDir

#: What the mean reward of the last five steps must gain over the first five.
GAINS = {"running_sum": 0.25, "add": 0.15, "long_sum": 0.15, "shapes": 0.25}
TASKS = tuple(GAINS)
STEPS = {
    "running_sum": 40,
    "add": 60,
    "long_sum": 40,
    "shapes": 60,
}  # more may exceed WALL_S
ROWS = 4096
HELD_OUT_ROWS = 64
MODEL_TIMEOUT_S = 3600.0
GAIN_STEPS = 20  # a shorter run need not show a gain
MIN_PROCESSES = 6
WALL_S = 180.0  # from the start of the roles to the last step
MODEL_DONE = "warm_start.json"  # written last by `learners.warm_start`


class Promise(msgspec.Struct, frozen=True):
    """One line of the list at the end."""

    text: str
    kept: bool
    speed: bool = False  # a busy machine may break it: reported, and no failure


def demo(
    task: str, overrides: tuple[str, ...], *, resume: bool, verbose: bool, plain: bool, prepare_only: bool = False
) -> int:
    """Run the demonstration; 0 if every promise was kept."""
    settings = task_settings(task)
    config = absolute(load(quickstart(), [*settings, *overrides]))
    data = Path(config.data.path)
    if not _set_by_user("data.path", overrides):
        _make_rows("prompts", task, data, ROWS, seed=config.run.seed)
        if task != "shapes":  # answers are rows of text
            _make_answers(task, data, seed=config.run.seed)
    if not _set_by_user("evaluation.path", overrides):
        held_out = Path(config.evaluation.path)
        _make_rows("held out", task, held_out, HELD_OUT_ROWS, seed=config.run.seed, split="heldout")
    if not (Path(config.model.path) / MODEL_DONE).exists() and not _set_by_user("model.path", overrides):
        _make_model(task, Path(config.model.path))
        config = absolute(config)
    if prepare_only:
        print(f"ready     model {config.model.path}, prompts {data}")
        return 0
    if not resume:
        _remove_run(Path(config.run.dir))
    launched = launch_config(config, LaunchOptions(verbose=verbose, plain=plain))
    if launched.outcome.code:
        return launched.outcome.code
    if launched.outcome.stopped:
        print("\nstopped before its end: what it promises is not judged. asyncrl demo --resume goes on with it")
        return 0
    return _conclude(promises(launched, load_run(launched.run), task=task), launched.run)


def _conclude(listed: list[Promise], run: RunDir) -> int:
    """Print the promises and the next commands; return the exit code."""
    broken = sum(not promise.kept for promise in listed)
    print("\npromises")
    for promise in listed:
        print(f"  {'kept  ' if promise.kept else 'slow  ' if promise.speed else 'BROKEN'}  {promise.text}")
    print(f"  {len(listed) - broken} of {len(listed)} kept")
    print(f"\nopen the report in a browser: {run.report.as_uri()}")
    return 1 if any(not promise.kept and not promise.speed for promise in listed) else 0


def _set_by_user(key: str, overrides: tuple[str, ...]) -> bool:
    """Whether the user set it: then the demonstration does not create it."""
    return any(override.partition("=")[0].strip() == key for override in overrides)


def quickstart() -> Path:
    """The configuration of the package."""
    path = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"  # in a checkout a link to configs/
    if not path.is_file():
        raise ConfigError("config.file", "configs/quickstart.toml is not installed", where=str(path))
    return path.resolve()


def task_settings(task: str) -> list[str]:
    """Changes of a task to the quickstart."""
    if task not in TASKS:
        raise ConfigError("usage", f"task {task!r} is none of {', '.join(TASKS)}")
    module, kind = ("shapes", "parquet") if task == "shapes" else ("tasks", "jsonl")
    settings = [
        f"run.name=demo-{task}",
        f"run.dir=runs/demo-{task}",
        f"model.path=runs/models/{task}",
        f"data.path=runs/data/{task}.{kind}",
        f"evaluation.path=runs/data/{task}-heldout.{kind}",
        f'reward=[{{function = "asyncrl.demo.{module}:{task}_reward"}}]',
        f"learner.steps={STEPS[task]}",
    ]
    if task == "add":
        settings += ["sampling.max_new_tokens=6", "data.max_prompt_tokens=8"]
    if task == "long_sum":
        settings += ["sampling.max_new_tokens=296", "learner.optim.lr=3e-5"]  # it swings at the quickstart's 1e-4
    if task == "shapes":  # the tokens of a picture count
        settings += ["sampling.max_new_tokens=8", "data.max_prompt_tokens=40"]

    return settings


def _make_rows(label: str, task: str, path: Path, size: int, *, seed: int, split: str = "train") -> None:
    """Rows of the task, created once; those of the split `heldout` are never trained."""
    if path.exists():
        return
    if task == "shapes":
        from asyncrl.demo import shapes
        from asyncrl.images.decoding import require_pillow

        require_pillow()
        count = shapes.write_parquet(path, shapes.prompt_rows(size, seed, split=split))
    else:
        from asyncrl.demo import tasks

        count = tasks.write_jsonl(path, tasks.prompt_rows(task, size, seed, split=split))
    print(f"{label:<9} {count} rows -> {path}", flush=True)


def _make_answers(task: str, prompts: Path, *, seed: int) -> None:
    """Rows with prompts and answers, for configs/sft.toml, dpo.toml, kto.toml and reward_model.toml; created once."""
    from asyncrl.demo import tasks

    for name, make in (("answers", tasks.answer_rows), ("pairs", tasks.pair_rows), ("labels", tasks.label_rows)):
        path = prompts.with_name(f"{prompts.stem}-{name}.jsonl")
        if not path.exists():
            print(f"{name:<9} {tasks.write_jsonl(path, make(task, ROWS, seed))} rows -> {path}", flush=True)


def _make_model(task: str, folder: Path) -> None:
    """The warm start, in a separate process with torch."""
    print(f"model     making the warm start of {task} -> {folder} (once, a few minutes on a CPU)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path()), "OMP_WAIT_POLICY": "PASSIVE"}
    module = "learners.warm_start.shapes" if task == "shapes" else "learners.warm_start.arithmetic"
    options = [] if task == "shapes" else ["--task", task]
    command = [sys.executable, "-m", module, *options, "--out", str(folder)]
    before = signal.signal(signal.SIGTERM, _end_by_sigterm)  # `run` then kills the process that makes the model
    try:
        done = subprocess.run(command, env=env, timeout=MODEL_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        raise AsyncRLError("role.failed", f"no model within {MODEL_TIMEOUT_S:g} s", where=module) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if done.returncode:
        raise AsyncRLError("role.failed", f"ended with code {done.returncode}", where=module)


def _end_by_sigterm(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _remove_run(folder: Path) -> None:
    """Remove an earlier run. A folder that does not look like one is left alone."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "config.toml").exists() and not (folder / "logs").is_dir():
        raise ConfigError("run.missing", "it is not empty and not a run; it is not removed", where=str(folder))
    RunDir(folder).lock("launch-buffer").close()  # service.duplicate if it is still running
    shutil.rmtree(folder)


# ---------------------------------------------------------------- promises


def promises(launched: Launched, data: RunData, *, task: str = "running_sum") -> list[Promise]:
    """The promises of the demonstration, and whether the run's files confirm them."""
    config, audit = launched.config, data.audit
    started = [line for line in data.processes if float(line.get("t", 0.0)) >= launched.started]
    processes = len({(line.get("role"), line.get("name"), line.get("pid")) for line in started})
    steps, last = config.learner.steps, data.last_step
    return [
        Promise(f"{processes} processes worked (at least {MIN_PROCESSES})", processes >= MIN_PROCESSES),
        Promise(f"{last} of {steps} steps were trained", last >= steps),
        *_gain_promise(data, task),
        _lag_promise(audit, config.buffer.max_staleness if config.buffer.depth else 0),
        _ledger_promise(audit),
        Promise(
            f"{audit.spans_matched} of {audit.spans} spans of tokens were made by weights with the right digest",
            0 < audit.spans_matched == audit.spans,
        ),
        _weights_promise(data),
        Promise(f"audit: lost {audit.lost}, doubled {audit.doubled}", audit.ok),
        *_wall_promise(data, steps=steps, usual=STEPS[task], started=launched.started or _first(data.processes)),
    ]


def _gain_promise(data: RunData, task: str) -> list[Promise]:
    if data.last_step < GAIN_STEPS:
        return []
    early, late = data.reward_ends()
    text = f"the reward rose by {late - early:.3f}, from {early:.3f} to {late:.3f} (last 5 steps over first 5, at least"
    return [Promise(f"{text} {GAINS[task]})", late - early >= GAINS[task])]


def _lag_promise(audit: Audit, max_staleness: int) -> Promise:
    if max_staleness == 0:
        return Promise(f"synchronous: the largest lag is {audit.lag_max} (0)", audit.trained > 0 and audit.lag_max == 0)
    text = f"asynchronous: mean lag {audit.lag_mean:.2f} (over 0), largest {audit.lag_max} (at most {max_staleness})"
    return Promise(text, audit.lag_mean > 0 and audit.lag_max <= max_staleness)


def _ledger_promise(audit: Audit) -> Promise:
    dropped, dead = sum(audit.dropped.values()), sum(audit.dead.values())
    accounted = audit.trained + dropped + dead + audit.superseded
    text = f"the ledger balances: issued {audit.issued} = trained {audit.trained} + dropped {dropped} + dead {dead}"
    return Promise(text, 0 < audit.issued == accounted)


def _weights_promise(data: RunData) -> Promise:
    """Every generator took a version, and every returned digest was the published one."""
    names = sorted({str(line.get("name")) for line in data.processes if line.get("role") == "producer"})
    taken = {name: data.count_acknowledged(name) for name in names}
    wrong = data.deliveries().wrong
    shown = ", ".join(f"{name} {count}" for name, count in taken.items()) or "no generator"
    return Promise(
        f"every generator acknowledged weights with the right digest ({shown}), {wrong} with another",
        bool(taken) and all(taken.values()) and not wrong,
    )


def _first(lines: list[dict[str, Any]]) -> float:
    return min((float(line["t"]) for line in lines), default=0.0)


def _wall_promise(data: RunData, *, steps: int, usual: int, started: float) -> list[Promise]:
    """Time limit of the default demonstration, or a shorter one."""
    if not data.steps or steps > usual:
        return []
    wall = float(data.steps[-1]["t"]) - started
    return [
        Promise(f"{wall:.1f} s from the start of the roles to the last step (under {WALL_S:g} s)", wall < WALL_S, True)
    ]

"""`asyncrl replay`: a learner alone, over the recorded batches of a run, from a checkpoint or the start.

This module plans and judges; a separate process, `python -m learners.replay`, trains (no torch is imported here).
Guarantees:
1. nothing is written into the replayed run: results go to a separate folder;
2. with unchanged settings the digest of every version is compared with the committed one; the result is the number of
   bitwise equal versions, or the first that differs;
3. changed settings apply after `--from`: earlier steps are replayed unchanged and compared; with `--rewards` alone
   those before the first step that has a group with other rewards;
4. it waits as long as the process makes progress, `run.hang_timeout_s` at most between two steps.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit.prove import Log
from asyncrl.audit.reader import Reader
from asyncrl.config import Config, dump, load
from asyncrl.config.mode import DATA_PREFIX
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.metrics import read_lines
from asyncrl.process_plan.plan import MODULES, plan
from asyncrl.runs.child_process import run_child
from asyncrl.runs.exported import exported_step
from asyncrl.runs.fork import checkpoints_in
from asyncrl.runs.replay_report import END, LINES, PLAN, Done, End, Plan, Step, judge, render
from asyncrl.runs.score_file import read_scores
from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir, format_json, write_atomic

RESULT, TEXT = "replay.json", "replay.txt"
MODULE = "learners.replay"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # of an export: one file, or several
#: Settings that a replay may change: others took effect before the batches were recorded.
CHANGEABLE = (
    "learner.algorithm.",
    "learner.optim.",
    "learner.micro_batch_tokens",
    "learner.packing",
    "learner.threads",
    "learner.logprob_chunk_tokens",
    "learner.steps",
    "learner.device",
)
_print = partial(print, flush=True)


def replay_command(
    folder: Path,
    *,
    begin: int,
    end: int | None,
    overrides: Sequence[str],
    out: Path | None,
    as_json: bool,
    rewards: Path | None = None,
) -> int:
    """Replay and report; 0 if every version that should be equal is."""
    run = RunDir(folder).require()
    todo = plan_replay(run, begin=begin, end=end, overrides=overrides, rewards=rewards)
    target = _folder(run, out)
    say: Callable[[str], None] = (lambda _: None) if as_json else _print
    started = time.monotonic()
    _run(run, todo, target, say)
    found = judge(todo, lines_in(target), _read(target / END, End), wall_s=time.monotonic() - started)
    text = render(found)
    data = format_json(found)
    write_atomic(target / RESULT, data.encode())
    write_atomic(target / TEXT, (text + "\n").encode())
    print(data if as_json else f"{text}\nreport    {target / TEXT}, {target / RESULT}")
    return 0 if found.ok else 1


# ---------------------------------------------------------------- the plan


def plan_replay(
    run: RunDir, *, begin: int, end: int | None, overrides: Sequence[str], rewards: Path | None = None
) -> Plan:
    """What to replay, from the logs. Raises `replay.missing` if something needed was not recorded."""
    _check_overrides(run, overrides)
    reader = Reader()
    for event in Log(run.history):
        reader.take(event)
    if not reader.commits:
        raise ConfigError("replay.missing", "no step was committed", where=str(run.history))
    last = max(reader.commits)
    end = last if end is None else end
    start, checkpoint = _start(run, reader, begin)
    if not start < end <= last or begin >= end:
        raise ConfigError("usage", f"steps after {begin} up to {end}: the run has {min(reader.commits)} to {last}")
    _check_archive(run, range(start + 1, end + 1))
    metrics = _metrics(run)
    steps = tuple(
        Step(number, reader.commits[number].groups, _digest(reader, number), metrics.get(number, {}))
        for number in range(start + 1, end + 1)
        if number in reader.commits
    )
    if len(steps) != end - start:
        raise ConfigError("replay.missing", f"not every step of {start + 1} to {end} was committed")
    since = max(begin, start)
    others: dict[int, tuple[int, ...]] = {}
    left: tuple[str, ...] = ()
    if rewards is not None:
        others, left = _other_rewards(run, rewards, [step for step in steps if step.step > since])
        if not overrides:
            since = min(others, default=end + 1) - 1
    return Plan(
        run=str(run.root),
        start=start,
        since=since,
        steps=steps,
        checkpoint=checkpoint,
        start_digest=_digest(reader, start),
        overrides=tuple(overrides),
        final=_final(run, end, last),
        rewards="" if rewards is None else str(rewards.resolve()),
        rescored=others,
        left=left,
    )


def _other_rewards(
    run: RunDir, path: Path, steps: Sequence[Step]
) -> tuple[dict[int, tuple[int, ...]], tuple[str, ...]]:
    """Trained groups with other rewards in the file, by step, and gaps of the file."""
    head, groups = read_scores(path)
    if Path(head.run).resolve() != run.root:
        raise ConfigError("rescore.file", f"it is of the run {head.run}", where=str(path))
    if head.teacher:
        what = f"it has log-probs of the teacher {head.teacher}, and a replay needs rewards"
        raise ConfigError("rescore.file", what, where=str(path), remedy="give a file of `asyncrl rescore --reward`")
    known = {(one.step, one.group): one for one in groups}
    wanted = [(step.step, group) for step in steps for group in step.groups]
    failed = [place for place in wanted if place in known and known[place].failed]
    absent = [place for place in wanted if place not in known]
    others: dict[int, tuple[int, ...]] = {}
    for step, group in wanted:
        if (step, group) in known and known[step, group].changed and not known[step, group].failed:
            others[step] = (*others.get(step, ()), group)
    left = []
    for what, places in (("could not be scored", failed), ("are not in the file", absent)):
        if places:
            left.append(f"{len(places)} groups {what} and keep the rewards of the run: {_some(places)}")
    return others, tuple(left)


def _some(places: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{group} of step {step}" for step, group in places[:8])
    return shown + (" and others" if len(places) > 8 else "")


def _check_overrides(run: RunDir, overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith(CHANGEABLE):
            raise ConfigError(
                "usage", f"{key} cannot be changed in a replay; what can: {', '.join(CHANGEABLE)}", where="--set"
            )
    load(run.config, overrides)


def _start(run: RunDir, reader: Reader, begin: int) -> tuple[int, str]:
    """The first version and its checkpoint: the newest at or before `begin`, else the start weights."""
    kept = checkpoints_in(run)
    usable = [step for step in kept if step <= begin]
    if begin > 0 and usable:
        return max(usable), str(kept[max(usable)])
    if min(reader.commits) == 1:
        return 0, ""
    known = ", ".join(map(str, sorted(kept))) or "none"
    raise ConfigError(
        "replay.missing",
        f"the log begins with step {min(reader.commits)} (a fork), and no checkpoint "
        f"at or before step {begin} is kept; there are: {known}",
        where=str(run.checkpoints),
    )


def _check_archive(run: RunDir, steps: range) -> None:
    archived = set(batch_file.steps_in(run.archive))
    missing = [step for step in steps if step not in archived]
    if missing:
        raise ConfigError(
            "replay.missing",
            f"the batch of step {missing[0]} is not archived ({len(missing)} of {len(steps)} are missing)",
            where=str(run.archive),
        )


def _digest(reader: Reader, version: int) -> str:
    """The committed digest of a version; for the start weights, the one that generators reported."""
    if version in reader.commits and reader.commits[version].digest:
        return reader.commits[version].digest
    known = reader.digests.get(version, set())
    if not known:
        known = {
            digests[version]
            for group in reader.groups.values()
            for digests in group.digests.values()
            if digests.get(version, DATA_PREFIX)[: len(DATA_PREFIX)] not in ("", DATA_PREFIX)
        }
    return next(iter(known)) if len(known) == 1 else ""


def _metrics(run: RunDir) -> dict[int, dict[str, float]]:
    """The numbers of every step, from its last training; the mean importance weight from the log of groups."""
    found: dict[int, dict[str, float]] = {}
    for line in read_lines(run.metrics / "learner.jsonl"):
        if "step" in line:
            found[int(line["step"])] = {
                name: float(value) for name, value in line.items() if name != "t" and isinstance(value, int | float)
            }
    for line in read_lines(run.metrics / "groups.jsonl"):
        weights = [w for group in line.get("groups", ()) for w in group.get("weights", ()) if w is not None]
        if weights and int(line["step"]) in found:
            found[int(line["step"])]["weight_mean"] = sum(weights) / len(weights)
    return found


def _final(run: RunDir, end: int, last: int) -> str:
    kept = checkpoints_in(run)
    if end in kept:
        return str(kept[end])
    weights = next((run.export / name for name in WEIGHTS if (run.export / name).exists()), None)
    return str(weights) if weights is not None and end == last == exported_step(run) else ""


# ---------------------------------------------------------------- the process


def _folder(run: RunDir, out: Path | None) -> Path:
    """An empty folder for the results; an earlier replay in it is removed."""
    target = (out or run.root.with_name(f"{run.root.name}-replay")).resolve()
    if target == run.root or run.root in target.parents or target in run.root.parents:
        raise ConfigError("usage", "a replay needs a folder outside of its run", where=str(target))
    if target.exists() and any(target.iterdir()):
        if not (target / PLAN).exists():
            raise ConfigError("usage", "it is not empty and not a replay; it is not removed", where=str(target))
        shutil.rmtree(target)
    return target


def _run(run: RunDir, todo: Plan, target: Path, say: Callable[[str], None]) -> None:
    """Start the learner and wait for its end."""
    config = load(run.config)
    own = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, dir=str(target), name=f"{config.run.name}-replay")
    )
    place = RunDir(target).create()
    write_atomic(target / PLAN, msgspec.json.encode(todo))
    write_atomic(place.config, dump(own).encode())
    say(f"replay of {todo.run}: steps {todo.start + 1} to {todo.steps[-1].step}, {len(todo.steps)} recorded batches")
    log, seen = place.logs / "replay.log", 0

    def progress() -> int:
        nonlocal seen
        done = lines_in(target)
        if len(done) > seen:
            seen = len(done)
            say(f"  step {done[-1].step}: loss {done[-1].metrics.get('loss', 0.0):.5f}")
        return seen

    words, limit_s = replay_command_line(own, place.config), config.run.hang_timeout_s
    code = run_child(
        words, log, threads=config.learner.torch_threads, limit_s=limit_s, progress=progress, where="replay"
    )
    if code:
        said = log.read_text(errors="replace").strip().splitlines()
        raise AsyncRLError(
            "role.failed",
            f"the replay ended with code {code}: {said[-1] if said else ''}",
            where="replay",
            remedy=f"see {log}",
        )


def replay_command_line(config: Config, path: Path) -> list[str]:
    """One process, or torchrun if the run had several ranks, since the split determines the rounding."""
    if config.learner.ranks == 1:
        return [sys.executable, "-m", MODULE, "--config", str(path), "--name", "replay"]
    [learner] = plan(config, ("learner",), config_path=path)
    return [MODULE if word == MODULES["learner"] else word for word in learner.argv]


def lines_in(target: Path) -> list[Done]:
    """Progress of the replay so far."""
    return [msgspec.convert(line, Done) for line in read_lines(target / LINES)]


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise AsyncRLError("role.failed", f"the replay left no {path.name}: {error}", where="replay") from None

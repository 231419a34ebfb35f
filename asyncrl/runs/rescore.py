"""`asyncrl rescore`: score the archived samples of a finished or running run again, and report the changes.

This module plans and reports; the functions run in children of a separate process, `python -m
producers.rewards.rescore`, with the limits of the run's reward workers. Guarantees:
1. nothing is written into the run: the scores go to a separate file (`asyncrl.runs.score_file`);
2. `--reward` replaces the functions of `--judge`, and parts of other judges stay as recorded; without `--judge` it
   replaces all; without `--reward` the run's functions are called again in their current state;
3. a sample that cannot be scored gets no made-up reward: it is counted with its reason, and the exit code is 1;
4. with `--teacher` the log-probs of a teacher are computed again instead: the score of a sample is their mean;
5. it waits as long as the process makes progress, `run.hang_timeout_s` at most.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncrl.config import Config, RewardFunctionConfig, dump, load
from asyncrl.config.judges import list_judges, parse_display_name
from asyncrl.config.sections.evaluation import EvaluationConfig
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.metrics import read_lines
from asyncrl.runs.child_process import run_child
from asyncrl.runs.score_file import GroupScores, Head, write_scores
from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir, format_json, write_atomic

MODULE = "producers.rewards.rescore"
PLAN, LINES, VERSIONS = "plan.json", "groups.jsonl", "versions.json"
SHOWN_GROUPS = 20
_print = partial(print, flush=True)


class Plan(msgspec.Struct, frozen=True):
    """Plan of the scoring process. `kept`: label -> weight of the recorded parts that stay in the reward."""

    run: str
    steps: tuple[int, ...]
    kept: dict[str, float] = {}
    teacher: str = ""  # compute its log-probs again, instead of rewards


class Rescored(msgspec.Struct, frozen=True):
    """The report. Means are over rescored samples; a changed group has a changed sample."""

    run: str
    file: str
    functions: tuple[str, ...]
    steps: int
    groups: int
    samples: int
    changed_groups: int
    changed_samples: int
    mean_before: float | None
    mean_after: float | None
    failed: dict[str, int]  # reason -> samples
    versions: dict[str, str]
    recorded: dict[str, int]
    changed: tuple[GroupScores, ...]
    wall_s: float
    largest_difference: float | None = None  # of a token's log-prob, with a teacher


def rescore_command(
    folder: Path, *, rewards: Sequence[str], judge: str, out: Path | None, as_json: bool, teacher: str = ""
) -> int:
    """Score again and report; 0 if every sample could be scored."""
    started = time.monotonic()
    run = RunDir(folder).require()
    if teacher:
        if rewards or judge:
            raise ConfigError("usage", "a teacher gives no reward: leave --reward and --judge out", where="--teacher")
        config, plan = plan_teacher(run, teacher)
    else:
        config, plan = plan_rescore(run, rewards=rewards, judge=judge)
    what = "teacher" if teacher else "scores"
    path = (out or run.root.with_name(f"{run.root.name}-{what}.jsonl")).resolve()
    if run.root in path.parents:
        raise ConfigError("usage", "scores go outside of the run that they are of", where=str(path))
    say: Callable[[str], None] = (lambda _: None) if as_json else _print
    say(f"rescore of {run.root}: {len(plan.steps)} archived steps")
    groups, versions = _run(config, plan, say)
    head = Head(
        run=str(run.root),
        functions=tuple(reward.function or reward.label for reward in config.reward) or (teacher,),
        judge=parse_display_name(judge) if judge else None,
        versions=versions,
        recorded=recorded_versions(run),
        t=time.time(),
        teacher=teacher,
    )
    write_scores(path, head, groups)
    found = summary(head, groups, path=path, wall_s=time.monotonic() - started)
    print(format_json(found) if as_json else render(found))
    return 1 if found.failed else 0


# ---------------------------------------------------------------- the plan


def plan_rescore(run: RunDir, *, rewards: Sequence[str], judge: str) -> tuple[Config, Plan]:
    """The configuration to score with, and the steps and judges to score."""
    config = load(run.config)
    steps = tuple(batch_file.steps_in(run.archive))
    if not steps:
        raise ConfigError("replay.missing", "no step is archived: was log.archive = true?", where=str(run.archive))
    config = msgspec.structs.replace(config, teacher=())
    known = {one.name: one for one in list_judges(config)}
    if judge and parse_display_name(judge) not in known:
        names = ", ".join(one.display_name for one in known.values()) or "none"
        raise ConfigError("reward.judge", f"{judge!r}: this run has {names}", where="--judge")
    kept = (
        {} if not judge else {one.label: one.weight for one in config.reward if one.judge != parse_display_name(judge)}
    )
    mine = tuple(one for one in config.reward if not judge or one.judge == parse_display_name(judge))
    replace = msgspec.structs.replace
    if rewards:
        if len(set(rewards)) < len(rewards):
            raise ConfigError("usage", f"a function is there twice: {', '.join(rewards)}", where="--reward")
        config = replace(
            config,
            reward=_functions(rewards, kept),
            judge=(),
            reward_workers=_limits(config, known.get(parse_display_name(judge))),
        )
    else:
        config = replace(
            config, reward=mine, judge=tuple(one for one in config.judge if not judge or one.name == judge)
        )
    if not config.reward:
        raise ConfigError("usage", "this run has no reward function: name one with --reward", where="--reward")
    return config, Plan(str(run.root), steps, kept)


def plan_teacher(run: RunDir, name: str) -> tuple[Config, Plan]:
    """The configuration with this teacher alone, and all archived steps."""
    config = load(run.config)
    steps = tuple(batch_file.steps_in(run.archive))
    if not steps:
        raise ConfigError("replay.missing", "no step is archived: was log.archive = true?", where=str(run.archive))
    mine = tuple(one for one in config.teacher if one.name == name)
    if not mine:
        names = ", ".join(one.name for one in config.teacher) or "none"
        raise ConfigError("reward.judge", f"{name!r}: the teachers of this run are {names}", where="--teacher")
    replace = msgspec.structs.replace
    buffer = replace(config.buffer, filters=())
    config = replace(config, reward=(), judge=(), teacher=mine, evaluation=EvaluationConfig(), buffer=buffer)
    return config, Plan(str(run.root), steps, teacher=name)


def _functions(rewards: Sequence[str], kept: Container[str]) -> tuple[RewardFunctionConfig, ...]:
    """New functions by their short names, by `module:name` if a short one is taken."""
    short = Counter(RewardFunctionConfig(function=function).label for function in rewards)
    plain = [RewardFunctionConfig(function=function) for function in rewards]
    return tuple(
        msgspec.structs.replace(one, name=one.function) if short[one.label] > 1 or one.label in kept else one
        for one in plain
    )


def _limits(config: Config, judge: Any) -> Any:
    """`[reward_workers]` with the limits of the judge whose functions are replaced."""
    if judge is None:
        return config.reward_workers
    return msgspec.structs.replace(
        config.reward_workers,
        count=judge.count,
        timeout_s=judge.timeout_s,
        retries=judge.retries,
        batch_samples=judge.batch_samples,
        memory_bytes=judge.memory_bytes,
    )


def recorded_versions(run: RunDir) -> dict[str, int]:
    """The reward versions in the history, and how many answers are of each."""
    counts: Counter[str] = Counter()
    for line in read_lines(run.history):
        if line.get("e") in ("score", "judged") and "version" in line:
            counts[line["version"]] += 1
    return dict(counts)


# ---------------------------------------------------------------- the process


def _run(config: Config, plan: Plan, say: Callable[[str], None]) -> tuple[list[GroupScores], dict[str, str]]:
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-rescore-"))
    try:
        write_atomic(folder / PLAN, msgspec.json.encode(plan))
        own = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(folder)))
        write_atomic(folder / "config.toml", dump(own).encode())
        _score(config, folder, say)
        groups = [msgspec.convert(line, GroupScores, strict=False) for line in read_lines(folder / LINES)]
        return groups, msgspec.json.decode((folder / VERSIONS).read_bytes(), type=dict[str, str])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _score(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Start the process and wait for its end."""
    log, lines, size = folder / "rescore.log", folder / LINES, 0

    def progress() -> int:
        nonlocal size
        if lines.exists() and (now := lines.stat().st_size) > size:
            size = now
            say(f"  {len(read_lines(lines))} groups")
        return size

    words = [sys.executable, "-m", MODULE, "--config", str(folder / "config.toml"), "--name", "rescore"]
    limit_s = config.run.hang_timeout_s
    code = run_child(words, log, threads=1, limit_s=limit_s, progress=progress, where="rescore")
    if code:
        said = log.read_text(errors="replace").strip()
        raise AsyncRLError(
            "role.failed",
            f"scoring ended with code {code}:\n{said[-2000:]}",
            where="rescore",
            remedy="correct the reward function",
        )


# ---------------------------------------------------------------- the report


def summary(head: Head, groups: Sequence[GroupScores], *, path: Path, wall_s: float) -> Rescored:
    pairs = [(one.before[index], reward) for one in groups for index, reward in one.rewards.items()]
    changed = tuple(one for one in groups if one.changed)
    failed = Counter(why.split(":")[0] for one in groups for why in one.failed.values())
    return Rescored(
        run=head.run,
        file=str(path),
        functions=head.functions,
        steps=len({one.step for one in groups}),
        groups=len(groups),
        samples=sum(len(one.before) for one in groups),
        changed_groups=len(changed),
        changed_samples=sum(len(one.changed) for one in changed),
        mean_before=fmean(old for old, _ in pairs) if pairs else None,
        mean_after=fmean(new for _, new in pairs) if pairs else None,
        failed=dict(failed),
        versions=head.versions,
        recorded=head.recorded,
        changed=changed,
        wall_s=round(wall_s, 3),
        largest_difference=max(
            (
                part["largest_difference"]
                for one in groups
                for part in one.parts.values()
                if "largest_difference" in part
            ),
            default=None,
        ),
    )


def render(found: Rescored) -> str:
    """The text of a report."""
    lines = [
        f"{found.samples} samples of {found.groups} groups in {found.steps} steps, scored by "
        f"{', '.join(found.functions)} in {found.wall_s:.1f} s",
        f"changed     {found.changed_samples} samples in {found.changed_groups} groups",
    ]
    if found.mean_before is not None:
        lines.append(f"mean        {found.mean_before:.4f} -> {found.mean_after:.4f}")
    versions = ", ".join(f"{version or 'none'} ({count} scores)" for version, count in sorted(found.recorded.items()))
    lines.append(f"version     {versions or 'none'} in the log, {', '.join(found.versions.values())} now")
    if found.changed_samples and set(found.versions.values()) <= found.recorded.keys():
        lines.append(
            "note: the files of the functions are those of the run: they are not deterministic, or what they "
            "import or read has changed"
        )
    if found.largest_difference is not None:
        lines.append(f"log-probs   differ by {found.largest_difference:.3g} at most")
    for one in found.changed[:SHOWN_GROUPS]:
        before, after = (fmean(side[index] for index in one.rewards) for side in (one.before, one.rewards))
        lines.append(
            f"  group {one.group:>6} of step {one.step:>5}: {before:.4f} -> {after:.4f}, "
            f"{len(one.changed)} of {len(one.before)} samples"
        )
    if len(found.changed) > SHOWN_GROUPS:
        lines.append(f"  and {len(found.changed) - SHOWN_GROUPS} more groups: see the file")
    lines += [f"failed      {count} samples: {reason}" for reason, count in sorted(found.failed.items())]
    return "\n".join([*lines, f"scores      {found.file}"])

"""A run folder as the roles would have left it, for tests of audit, report and status. No process runs."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import dump, parse
from asyncrl.metrics import MetricsLog
from asyncrl.runtime.run_dir import RunDir

Event = dict[str, Any]
START = 1_760_000_000.0


def digest_of(version: int) -> str:
    return f"{version:032x}"


def issue(group: int, *, version: int, bound: int = 2, samples: int = 2) -> list[Event]:
    """A group from its issue to READY, made by one version."""
    events: list[Event] = [
        {"e": "issue", "g": group},
        {
            "e": "lease",
            "g": group,
            "token": group + 1,
            "attempt": 0,
            "producer": "producer-0",
            "w": version,
            "deadline": version + bound,
            "bound": bound,
        },
    ]
    for index in range(samples):
        events.append(
            {
                "e": "sample",
                "g": group,
                "i": index,
                "token": group + 1,
                "producer": "producer-0",
                "length": 5,
                "runs": [[version, 5]],
                "digests": {str(version): digest_of(version)},
            }
        )
        events.append({"e": "score", "g": group, "i": index, "reward": 0.5, "worker": "reward-0"})
    return [*events, {"e": "unscored", "g": group}, {"e": "ready", "g": group}]


def train(step: int, groups: list[int], *, epoch: int = 1, replayed: bool = False) -> list[Event]:
    """Claim and commit of a step."""
    return [
        {"e": "claim", "step": step, "version": step - 1, "epoch": epoch, "groups": groups, "replayed": replayed},
        {"e": "commit", "step": step, "version": step, "epoch": epoch, "digest": digest_of(step), "groups": groups},
    ]


def good_history(steps: int = 4, batch: int = 2) -> list[Event]:
    """A run in which step s trains groups that version s - 2 (or 0) made, and one group was dropped."""
    events: list[Event] = [{"e": "service", "service_epoch": 1}, register(1, 0)]
    number = 0
    for step in range(1, steps + 1):
        groups = list(range(number, number + batch))
        number += batch
        for group in groups:
            events += issue(group, version=max(0, step - 2))
        events += train(step, groups)
    events += issue(number, version=0)
    events += [
        {"e": "drop", "g": number, "reason": "late"},
        {"e": "retire", "step": steps},
        {"e": "end", "done": True, "reason": "all steps are done"},
    ]
    return events


def register(epoch: int, step: int) -> Event:
    return {"e": "register", "epoch": epoch, "step": step, "pid": 40 + epoch, "host": "here"}


def write_history(path: Path, events: list[Event]) -> Path:
    lines = [msgspec.json.encode({"t": START + number * 0.05, **event}) for number, event in enumerate(events)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write_run(root: Path, *, steps: int = 60, seed: int = 0) -> RunDir:
    """A whole folder: configuration, metrics, history, samples, processes, one restart."""
    text = f"""
[run]
name = "synthetic <run>"
dir = "{root}"
[model]
path = "models/tiny"
[data]
path = "rows.jsonl"
[sampling]
group_size = 2
[buffer]
max_staleness = 2
batch_groups = 2
[learner]
steps = {steps}
[[reward]]
function = "module:reward"
"""
    run = RunDir(root).create()
    run.config.write_text(dump(parse(text)))
    write_history(run.history, good_history(steps))
    rng = random.Random(seed)
    _write_learner(run, steps, rng)
    _write_services(run, steps, rng)
    _write_words(run)
    return run


def _write_learner(run: RunDir, steps: int, rng: random.Random) -> None:
    lines = []
    for step in range(1, steps + 1):
        rise = 1 - math.exp(-step / 20)
        lines.append(
            {
                "t": START + step * 1.2,
                "step": step,
                "version": step,
                "reward_mean": 0.2 + 0.6 * rise + rng.gauss(0, 0.03),
                "reward_std": 0.4 - 0.1 * rise,
                "lag_mean": min(2, step - 1) * rng.uniform(0.6, 1),
                "bound_max": 2,
                "lag_max": min(2, step - 1),
                "loss": rng.gauss(0, 0.01),
                "grad_norm": rng.uniform(0.2, 0.6),
                "entropy": 0.4 - 0.2 * rise,
                "ess": rng.uniform(0.9, 1),
                "kl_behaviour": rng.uniform(0, 0.01),
                "response_length_mean": 28 + rng.gauss(0, 2),
                "tokens_per_s": rng.uniform(1800, 2300),
                "step_s": 1.2,
                "wait_s": rng.uniform(0, 0.2),
                "train_s": 0.9,
                "publish_s": 0.02,
                "checkpoint_s": 0.1 * (step % 10 == 0),
                "fetch_s": 0.01,
                "assemble_s": 0.02,
                "proximal_s": 0.1,
                "commit_s": 0.01,
                "tflops_per_device": 212.5,
                "mfu": 0.25,
                "mfu_step": 0.125,
            }
        )
    run.metrics.joinpath("learner.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _write_services(run: RunDir, steps: int, rng: random.Random) -> None:
    roles, queue, rounds = [], [], []
    for second in range(int(steps * 1.2)):
        t = START + second
        for name, role in (("producer-0", "producer"), ("producer-1", "producer"), ("reward-0", "reward")):
            share = rng.uniform(0.6, 1) if role == "producer" else rng.uniform(0, 0.2)
            roles.append(
                {
                    "t": t,
                    "role": role,
                    "name": name,
                    "pid": 11,
                    "host": "here",
                    "busy_share": share,
                    "waiting_for": "" if share > 0.5 else "samples",
                }
            )
        ready = rng.randint(0, 2)
        queue.append(
            {
                "t": t,
                "leased": rng.randint(0, 2),
                "unscored": 0,
                "ready": ready,
                "claimed": 2,
                "trained": second,
                "retired": 0,
                "dropped": 0,
                "dead": 0,
                "issued": second + 4,
            }
        )
    for version in range(steps + 1):
        digest = digest_of(version)
        members = {"producer-0": digest, "producer-1": digest}
        rounds.append(
            {
                "t": START + version * 1.2,
                "version": version,
                "digest": digest,
                "round": version + 1,
                "round_s": rng.uniform(0.02, 0.06),
                "members": members,
            }
        )
    for name, lines in (("roles", roles), ("buffer", queue), ("weightsync", rounds)):
        run.metrics.joinpath(f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _write_words(run: RunDir) -> None:
    names = [
        ("buffer", "buffer"),
        ("weightsync", "weightsync"),
        ("producer", "producer-0"),
        ("producer", "producer-1"),
        ("reward", "reward-0"),
        ("learner", "learner"),
    ]
    processes = [
        {"t": START, "role": role, "name": name, "pid": 10 + place, "host": "here"}
        for place, (role, name) in enumerate(names)
    ]
    run.processes.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in processes))
    samples = [
        {
            "step": step,
            "group": step,
            "lag": 1,
            "prompt": "a3b5=",
            "reward": float(step % 2),
            "response": "<script>alert('from the model')</script>",
        }
        for step in range(1, 6)
    ]
    run.samples.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in samples))
    tokens = {
        "tokens": ["<b>", "4", "b", "?"],
        "engine": [-0.5, -1.0, None, -0.001],
        "learner": [-0.5, -1.3, None, -3.0],
    }
    words = {"response": "<b>4b?", "index": 1, "length": 4, "parts": {"exact": 1.0, "<form>": 0.5}}
    with run.samples.open("ab") as file:
        file.write(msgspec.json.encode({**samples[0], "step": 9, **words, **tokens}) + b"\n")
    who = {"t": START + 30, "name": "producer-1", "role": "producer", "code": 137}
    events = [{"event": "exit", **who}, {"event": "restart", "wait_s": 0.5, **who}]
    run.logs.joinpath("launch.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in events))
    run.result.write_bytes(msgspec.json.encode({"done": True, "code": 0, "reason": "done", "wall_s": 72.0}))


def check_names(run: RunDir) -> None:
    """The synthetic names are those of the catalogue (raises KeyError where they are not)."""
    for path in sorted(run.metrics.glob("*.jsonl")):
        log = MetricsLog(run.root / "catalogue-check.jsonl")
        for line in path.read_bytes().splitlines()[:3]:
            values = msgspec.json.decode(line)
            log.write(
                {
                    key: value
                    for key, value in values.items()
                    if key != "t" and isinstance(value, int | float) and key != "pid"
                }
            )
        log.close()

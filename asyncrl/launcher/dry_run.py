"""`asyncrl launch --dry-run`: the processes that would start, with commands, files and environment.

Guarantees:
1. the plan is that of a real launch: the same function makes it from the same configuration;
2. nothing is started, locked or written, not even the run folder;
3. it holds no secrets: keys are paths of files, passwords of URLs are removed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import redact
from asyncrl.launcher.launch import LaunchOptions, absolute, checked_files, roles_here, worker_keys
from asyncrl.launcher.resume import changes
from asyncrl.preflight.threads import choose_threads
from asyncrl.process_plan import device_assignment as devices
from asyncrl.process_plan.interpreters import python_path, settle_interpreter
from asyncrl.process_plan.plan import ENGINES, Joining, ProcessPlan, only_judges, plan
from asyncrl.runtime.run_dir import RunDir


def dry_run(paths: Sequence[Path], options: LaunchOptions, *, as_json: bool = False) -> int:
    """Print the plan. Raises ConfigErrors like a launch."""
    config, checked = checked_files(paths, options)
    config = absolute(config)
    roles = roles_here(config, options)
    config = choose_threads(config)
    run = RunDir(config.run_dir)
    homed = settle_interpreter(config) if ENGINES & {*roles} else config
    joining = Joining(
        connect=options.connect,
        key=options.key,
        worker_keys=worker_keys(config, roles),
        takeover=options.takeover,
        standby=options.standby,
        judges=only_judges(config, options.target, options.judge),
        node_rank=options.node_rank,
        head=options.head,
    )
    plans = plan(
        homed, roles, config_path=run.config, joining=joining, python_path=python_path(), devices=devices.find_devices()
    )
    said = {
        "run": str(run.root),
        "resumes": run.config.exists(),
        "writes": list_outputs(run, roles),
        "changed": changes(run.config, redact(config)) if run.config.exists() else [],
        "processes": [describe_process(one) for one in plans],
        "notes": [*checked.missing, *checked.notes],
    }
    print(json.dumps(said, indent=2) if as_json else format_dry_run(said))
    return 0


def describe_process(one: ProcessPlan) -> dict[str, Any]:
    return {
        "name": one.name,
        "role": one.role,
        "command": [mask_passwords(word) for word in one.argv],
        "env": dict(one.env),
        "restarts": one.restarts,
        "ready": one.ready,
    }


def mask_passwords(text: str) -> str:
    return re.sub(r"(://[^/:@\s]*):[^@/\s]+@", r"\1:***@", text)


def list_outputs(run: RunDir, roles: Sequence[str]) -> list[str]:
    """Files that a launch writes in the run folder, with their roles."""
    places = {
        "all": (run.config, run.logs, run.alive, run.metrics),
        "buffer": (run.store, run.segments, run.history, run.sockets, run.dead),
        "learner": (run.checkpoints, run.tensorboard, run.samples, run.export, run.result, run.report),
    }
    return [str(path) for role, paths in places.items() if role in ("all", *roles) for path in paths]


def format_dry_run(said: dict[str, Any]) -> str:
    """Text for a terminal: commands to paste, and one environment if all processes share it."""
    processes = said["processes"]
    shared = dict(set.intersection(*(set(one["env"].items()) for one in processes))) if processes else {}
    lines = [f"run {said['run']}: {'goes on with what is there' if said['resumes'] else 'new'}"]
    lines += [f"changed since the last start: {change}" for change in said["changed"]]
    lines += ["", "# environment of all"] + [
        f"export {key}={shlex.quote(value)}" for key, value in sorted(shared.items())
    ]
    for one in processes:
        own = " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(one["env"].items() - shared.items()))
        lines += [
            "",
            f"# {one['name']}: at most {one['restarts']} restarts in 10 minutes"
            + (f", then {one['ready']} answers" if one["ready"] else ""),
            f"{own} {shlex.join(one['command'])}".strip(),
        ]
    lines += ["", "# written", *(f"#   {path}" for path in said["writes"])]
    lines += [f"note: {note}" for note in said["notes"]]
    return "\n".join([*lines, f"{len(processes)} processes would start; nothing was started or written"])

"""The end of a run with other policies (`[policies]`): its last weights stay published until the others are done.

A producer of another policy that restarts needs them, and the weight sync has them from the learner alone.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config, load
from asyncrl.errors import AsyncRLError
from asyncrl.runtime.run_dir import RunDir


def describe_unfinished(config: Config) -> str:
    """The other policies that have no checkpoint of their last step yet; empty if there are none."""
    found = []
    for name, folder in config.run.other_policies.items():
        run = RunDir(Path(folder))
        try:
            steps = load(run.config).learner.steps
        except AsyncRLError:
            found.append(f"policy {name}, which has not started")
            continue
        done = max(
            (int(path.name[5:]) for path in run.checkpoints.glob("step_*") if path.name[5:].isdigit()), default=0
        )
        if done < steps:
            found.append(f"policy {name}: its newest checkpoint is of step {done} of {steps}")
    return ", ".join(found)

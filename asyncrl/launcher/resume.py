"""What a launch says of the run that it goes on with, and what such a run cannot change."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config, load
from asyncrl.configure.diff import differences
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.preflight.weight_layout import BACK, refuse_other_layout
from asyncrl.runtime.run_dir import RunDir


def resume_note(run: RunDir, config: Config) -> str:
    """A note about a resumed run: its step, or that it is complete; empty for a new run."""
    found = [
        int(folder.name.rpartition("_")[2])
        for folder in run.checkpoints.glob("step_*")
        if folder.name.rpartition("_")[2].isdigit()
    ]
    if not found:
        return ""
    step, steps, anew = max(found), config.learner.steps, "another run.dir starts anew"
    if step >= steps:
        key = "data.epochs" if config.data.epochs else "learner.steps"
        return f"note: this run is over, step {step} of {steps}: raise {key} to go on; {anew}"
    return f"goes on from step {step} of {steps}; {anew}"


def refuse_changes(run: RunDir, config: Config) -> None:
    """Refuse what a run cannot change: groups in progress and in the log have the size that it began with, and versions
    of checkpoints have digests by their layout. Raises `config.conflict`.
    """
    try:
        old = load(run.config)
    except AsyncRLError:  # reported by `changes`
        return
    groups, asked = old.sampling.group_samples, config.sampling.group_samples
    if run.history.is_file() and run.history.stat().st_size and groups != asked:
        what = f"this run has groups of {groups} samples, and {asked} are asked for"
        raise ConfigError("config.conflict", what, where="sampling.group_size", remedy=BACK)
    if any(run.checkpoints.glob("step_*")):
        refuse_other_layout(old, config)


def changes(path: Path, config: Config) -> list[str]:
    """`buffer.max_staleness: 4 -> 2` of every setting that differs from the file's."""
    try:
        old = load(path)
    except AsyncRLError as error:
        return [f"the old {path.name} cannot be read: {error.message}"]
    return [f"{one.key}: {one.left!r} -> {one.right!r}" for one in differences(old, config)]

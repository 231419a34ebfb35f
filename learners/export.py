"""The weights of a checkpoint as Hugging Face folders, on demand: policy, critic, process reward model.

Started by hand: `python -m learners.export RUN [--step N] [--out FOLDER]`; under torchrun where one process has too
little memory. The learner itself exports at the end of a run; this is for runs that have not ended, or never will.
Guarantees:
1. nothing in the run is changed; the folder must be new or empty;
2. a damaged checkpoint is `learner.checkpoint`, not an export;
3. what is written is what the learner would have written at that step.
Checkpoints load on any number of ranks: one process will do.

Example: `python -m learners.export runs/my --step 20` writes runs/my/export-step_000020, with `critic` below it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import Config, load
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.plugins import find
from asyncrl.rundir import RunDir
from learners import checkpoint
from learners.gang import Gang


def export(config: Config, *, gang: Gang, step: int | None = None, out: Path | None = None) -> Path:
    """Write the folders of checkpoint `step` (None: the newest whole one); where. Collective."""
    run = RunDir(config.run_dir)
    source = _source(run, step)
    target = out or run.root / f"export-{source.name}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("usage", "it exists and is not empty: name a new folder", where=str(target))
    backend = find("asyncrl.backends", config.learner.backend)(config, gang)
    backend.load(source)
    backend.export_hf(target)
    return target


def _source(run: RunDir, step: int | None) -> Path:
    if step is None:
        found = checkpoint.newest(run.checkpoints)
        if found is None:
            raise ConfigError("usage", "the run has no checkpoint", where=str(run.checkpoints))
        return found[1]
    if step not in (known := checkpoint.steps_in(run.checkpoints)):
        raise ConfigError("usage", f"no checkpoint of step {step}; there are: {', '.join(map(str, known)) or 'none'}",
                          where=str(run.checkpoints))  # fmt: skip
    folder = checkpoint.folder_of(run.checkpoints, step)
    if why := checkpoint.problem_of(folder):
        raise AsyncRLError("learner.checkpoint", why, where=str(folder))
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """The process; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, help="of a checkpoint that is kept; the newest without it")
    parser.add_argument("--out", type=Path, help="folder; RUN/export-step_N without it")
    args = parser.parse_args(argv)
    try:
        config = load(RunDir(args.run).require().config)
        gang = Gang.join(config, anywhere=True)
        target = export(config, gang=gang, step=args.step, out=args.out)
        if gang.lead:
            print(target)
        gang.leave()
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Asks the code of producers and learners what it would refuse at its start, each in a process of its own.

Guarantees:
1. `producers.start_check` and `learners.start_check` run in the interpreter and with the environment variables of
   their role, for `LIMIT_S` at most, and are killed with all their children; what they said until then counts, and a
   note names the limit;
2. the learner is asked only about what no other check can know: a model that transformers may not know, and adapters
   at named layers. It imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import Config, dump
from asyncrl.errors import AsyncRLError, error_for
from asyncrl.preflight.code import environment
from asyncrl.preflight.derived import Finding
from asyncrl.process_plan.plan import ENGINES
from asyncrl.runtime.child_environment import child_environment
from asyncrl.runtime.model_folder import model_json
from asyncrl.runtime.start_report import MARK

LIMIT_S = 60.0
KILLED_S = 5.0  # for the output of a killed process


class StartReport(NamedTuple):
    """What the roles would refuse, and what they say about the data."""

    errors: list[AsyncRLError]
    findings: list[Finding]
    notes: list[str]

    def new_errors(self, refused: Collection[AsyncRLError]) -> list[AsyncRLError]:
        """Without those that another check has reported for the same setting."""
        known = {(error.code, _setting(error)) for error in refused}
        return [error for error in self.errors if (error.code, _setting(error)) not in known]


def ask_roles(config: Config, roles: Collection[str], *, python: str, play: bool) -> StartReport:
    """`python`: the interpreter of producers, empty for this one; `play`: also play the first row through environment
    and rewards.
    """
    report = StartReport([], [], [])
    if ENGINES & {*roles}:
        command = [python or sys.executable, "-m", "producers.start_check", *(["--play"] if play else [])]
        _ask(command, config, config.environment_variables, report)
    if not model_json(config.model.path):  # another check says so
        return report._replace(errors=[error for error in report.errors if _setting(error) != "model.path"])
    if "learner" in roles and is_learner_asked(config):
        _ask([sys.executable, "-m", "learners.start_check"], config, (), report)
    return report


def is_learner_asked(config: Config) -> bool:
    """Whether the model has to be built to know that the learner can."""
    kind = model_json(config.model.path).get("model_type")
    found = importlib.util.find_spec("transformers")
    folders = [] if found is None else [Path(place) / "models" for place in found.submodule_search_locations or ()]
    known = isinstance(kind, str) and any((folder / kind).is_dir() for folder in folders)
    return not known or bool(config.learner.lora.rank and config.learner.lora.target_modules)


def _ask(command: Sequence[str], config: Config, variables: Collection[str], report: StartReport) -> None:
    """Add what a check says to the report."""
    code, out, err = _run(command, dump(config), environment(child_environment(variables)))
    for line in out.splitlines():
        if not line.startswith(MARK):
            continue
        kind, *words = json.loads(line[len(MARK) :])
        if kind == "error":
            report.errors.append(error_for(words[0], words[1], where=words[2], remedy=words[3]))
        elif kind == "finding":
            report.findings.append(Finding(*words))
        else:
            report.notes.extend(words)
    if code is None:
        report.notes.append(f"{command[2]} was ended after {LIMIT_S:g} s: what it had not said is not checked")
    elif code:
        last = ([line for line in err.splitlines() if line.strip()] or [f"code {code}"])[-1]
        report.notes.append(f"{command[2]} failed, so this is not checked: {last}")


def _setting(error: AsyncRLError) -> str:
    """`data.path` of an error at `data.path = 'rows.jsonl'`."""
    return error.where.partition(" ")[0]


def _run(command: Sequence[str], text: str, env: dict[str, str]) -> tuple[int | None, str, str]:
    """Exit code (None: killed at the limit), output and errors."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    ) as process:
        code: int | None = None
        out = err = ""
        try:
            out, err = process.communicate(text, timeout=LIMIT_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process of user code that left the session
                out, err = process.communicate(timeout=KILLED_S)
        finally:
            _kill(process)
        return code, out, err


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

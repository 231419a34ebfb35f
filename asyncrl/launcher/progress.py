"""Terminal output during a run.

Guarantees:
1. it only reads new bytes of the run's files: it can neither block nor disturb a role;
2. warnings, errors and the learner's lines are printed with the name of the process; other lines with `--verbose`;
3. the run continues if its output cannot be written (a closed pipe, a lost terminal, a full disk): the rest of the
   output is discarded, the logs hold everything;
4. on a terminal a table is redrawn in place (rich); elsewhere one plain line per step;
5. before the first step a line says what the processes wait for, every `START_EVERY_S`; a reward that does not move is
   noted with its likely cause.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from asyncrl.metrics import JsonTail
from asyncrl.monitor.text import FIGURES, QUEUE_STATES, number
from asyncrl.runtime.run_dir import RunDir

LOOK_S = 0.5
SHOWN_STEPS = 8
START_EVERY_S = 10.0
HINT_EVERY = 50  # steps
STALE_WORKER_S = 10.0  # an older heartbeat is outdated
_STEP_LINE = re.compile(r"step \d+/\d+ ")  # of the learner; printed from its metrics instead
# Stacks after SIGUSR1 (no comma before `in`: not a traceback), which belong in the log.
_STACK_LINE = re.compile(r'\s+File "[^"]*", line \d+ in |(Current t|T)hread 0x[0-9a-f]+')
_LOUD = re.compile(r"\b(warning|warn|error|critical|fatal|traceback)\b|error\[|(Error|Exception)\b", re.IGNORECASE)


def is_loud(line: str) -> bool:
    """Whether a line is printed for every process."""
    return bool(_LOUD.search(line))


def print_line(text: str, out: TextIO | None = None) -> None:
    """Print at once, by default to stdout; discard the output from the first failure on."""
    out = out or sys.stdout
    try:
        print(text, file=out, flush=True)
    except OSError:  # `| head`, a killed `tee`, a closed terminal, a full disk
        discard_output(out)


def discard_output(out: TextIO) -> None:
    """Let the descriptor of `out` lead nowhere. What is left in its buffer would fail again, also at exit."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), out.fileno())


class RunView:
    """The newest numbers of a run: last steps, queue, and reasons of waiting workers."""

    def __init__(self, run: RunDir) -> None:
        self.steps: deque[dict[str, Any]] = deque(maxlen=SHOWN_STEPS)
        self.queue: dict[str, Any] = {}
        self.workers: dict[str, dict[str, Any]] = {}
        self._learner = JsonTail(run.metrics / "learner.jsonl")
        self._buffer = JsonTail(run.metrics / "buffer.jsonl")
        self._roles = JsonTail(run.metrics / "roles.jsonl")

    def poll(self) -> list[dict[str, Any]]:
        """Read new lines; return the new steps."""
        new = [line for line in self._learner.poll() if "step" in line]
        self.steps.extend(new)
        for line in self._buffer.poll():
            self.queue.update(line)
        for line in self._roles.poll():
            self.workers[str(line.get("name"))] = line
        return new

    def list_waiting(self, *, now: float) -> list[str]:
        """`producer-0: a newer version` of every worker that waits now."""
        return [
            f"{name}: {line['waiting_for']}"
            for name, line in sorted(self.workers.items())
            if line.get("waiting_for") and now - float(line.get("t", 0)) < STALE_WORKER_S
        ]

    def queue_text(self) -> str:
        """`leased 3 · ready 12 · trained 640`."""
        states = [f"{state} {int(self.queue[state])}" for state in QUEUE_STATES if self.queue.get(state)]
        return " · ".join(states) or "no queue yet"


def step_text(line: dict[str, Any], *, steps: int, mode: str) -> str:
    """One step as a plain line, with the figure of the learner's mode."""
    name, key = FIGURES[mode][0]
    return (
        f"step {line['step']}/{steps}  {name} {number(line, key)}  lag {number(line, 'lag_mean', '.2f')}"
        f" (max {number(line, 'lag_max', '.0f')} of {number(line, 'bound_max', '.0f')})"
        f"  {number(line, 'tokens_per_s', '.0f')} tok/s  {number(line, 'step_s', '.2f')} s"
        f" (waited {number(line, 'wait_s', '.2f')})"
    )


class Progress:
    """Prints lines of processes and the state of the run. Close it before printing anything else."""

    def __init__(
        self,
        run: RunDir,
        *,
        steps: int,
        mode: str = "rl",
        verbose: bool = False,
        plain: bool = False,
        table: bool = True,
        out: TextIO | None = None,
        hint: Callable[[Sequence[dict[str, Any]]], str] = lambda _: "",
    ) -> None:
        """`mode`: of the learner. `table`: also print the steps, as a table or as lines. `hint`: from the lines of the
        last steps, what the user should know.
        """
        self.view = RunView(run)
        self._hint = hint
        self._lines: deque[dict[str, Any]] = deque(maxlen=HINT_EVERY)
        self._next_hint = 0  # step
        self._began = self._start_said = time.monotonic()
        self._steps = steps
        self._mode = mode
        self._verbose = verbose
        self._out = out or sys.stdout
        self._next_look = 0.0
        self._show_steps = table
        self._live: Any = None
        if table and not plain and self._out.isatty():
            self._live = _rich_live(self._out)

    def say(self, name: str, line: str) -> None:
        """Print a line of a process (or of the launcher itself: name `launch`)."""
        shown_elsewhere = _STEP_LINE.match(line) or _STACK_LINE.match(line) or not line
        own = name == "launch" or (name == "learner" and not shown_elsewhere)
        if own or self._verbose or is_loud(line):
            self._print(f"[{name}] {line}")

    def tick(self) -> None:
        """Read the files from time to time."""
        now = time.monotonic()
        if not self._show_steps or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        new = self.view.poll()
        for line in new:
            if self._live is None:
                self._print(step_text(line, steps=self._steps, mode=self._mode))
        if new:
            self._lines.extend(new)
            self._give_hint(int(new[-1]["step"]))
        elif not self._lines and now >= self._start_said + START_EVERY_S:
            self._start_said = now
            waiting = "; ".join(self.view.list_waiting(now=time.time())) or "the processes load the model"
            self._print(f"[launch] no step yet after {now - self._began:.0f} s: {waiting}")
        if self._live is not None:
            self._draw(partial(self._live.update, self._table(), refresh=True))

    def _give_hint(self, step: int) -> None:
        if step >= self._next_hint and (hint := self._hint(self._lines)):
            self._next_hint = step + HINT_EVERY
            self._print(f"[launch] hint: {hint}")

    def close(self) -> None:
        """Draw the table a last time."""
        if self._live is not None:
            self.view.poll()
            self._draw(partial(self._live.update, self._table(), refresh=True))
        if self._live is not None:
            self._draw(self._live.stop)
            self._live = None

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._draw(partial(self._live.console.print, text, markup=False, highlight=False))
        else:
            print_line(text, self._out)

    def _draw(self, change: Callable[[], None]) -> None:
        """Change the terminal; drop the live view if it is lost."""
        try:
            change()
        except OSError:
            live, self._live = self._live, None
            discard_output(self._out)
            with suppress(OSError):
                live.stop()  # gives stdout and stderr back

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        name, key = FIGURES[self._mode][0]
        columns = ("step", name, "lag", "max/bound", "tok/s", "step s", "waited s", "loss", "grad")
        for column in columns:
            table.add_column(column, justify="right")
        for line in self.view.steps:
            table.add_row(
                f"{line['step']}/{self._steps}",
                number(line, key),
                number(line, "lag_mean", ".2f"),
                f"{number(line, 'lag_max', '.0f')}/{number(line, 'bound_max', '.0f')}",
                number(line, "tokens_per_s", ".0f"),
                number(line, "step_s", ".2f"),
                number(line, "wait_s", ".2f"),
                number(line, "loss", "+.4f"),
                number(line, "grad_norm", ".3f"),
            )
        waiting = "; ".join(self.view.list_waiting(now=time.time())) or "no worker"
        return Group(
            table,
            Text(f"queue    {self.view.queue_text()}"),
            Text(f"waiting  {waiting}", overflow="ellipsis", no_wrap=True),
        )


def _rich_live(out: TextIO) -> Any:
    """A display that is redrawn in place; None without rich."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    live = Live(console=Console(file=out), auto_refresh=False, transient=False)
    live.start()
    return live

"""`asyncrl.train`, `asyncrl.launch` and `asyncrl.Run`: a run from Python, with the processes of the command line.

Guarantees:
1. the run is `asyncrl launch all RUN/python.toml` in a process of its own: same code path, same guarantees;
2. the launcher dies with this process, however it ends, and every process of the run with the launcher; Ctrl-C stops
   the run with a checkpoint and is raised again;
3. `on_step` gets the lines of the metrics file here, never inside the learner: what it raises stops the run in order.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrl.audit.prove import audit_run
from asyncrl.audit.prove import render as audit_text
from asyncrl.config import load
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launcher.parent_guard import guard_command
from asyncrl.metrics import JsonTail, drop_repeated_steps, read_lines
from asyncrl.monitor.samples import group_by_step
from asyncrl.monitor.status import stop_command
from asyncrl.monitor.tune import change_settings
from asyncrl.monitor.tune import render as tune_text
from asyncrl.process_plan.interpreters import python_path
from asyncrl.process_plan.plan import environment
from asyncrl.python_api.progress import Progress
from asyncrl.python_api.settings import FILE, Config, Data, Reward, refuse_running, write_rows
from asyncrl.report import write_report
from asyncrl.runs.export import export_words
from asyncrl.runs.exported import exported_step
from asyncrl.runtime.run_dir import RunDir, read_object
from asyncrl.trace.render import story_text
from asyncrl.trace.story import load_story

POLL_S = 0.2
STOP_S = 180.0  # for the last checkpoint and export
EXPORT_S = 3600.0
OUTPUT = "python-launch.log"  # in RUN/logs
#: Settings of the short run of `Run.evaluate`: one step that changes no weight, and tells no tracker.
SHORT: dict[str, Any] = {
    "data.epochs": 0,
    "learner.steps": 1,
    "learner.optim.lr": 0.0,
    "learner.checkpoint_best": 0,
    "evaluation.source": "",
    "evaluation.at_start": True,
    "evaluation.at_end": False,
    "evaluation.every": 0,
    "buffer.store": "sqlite",
    "buffer.redis_url": "",
    "trackers.use": [],
    "trackers.prometheus_port": 0,
    "log.archive": False,
}
OnStep = Callable[[SimpleNamespace], object]


class StillRunning(TimeoutError):
    """`Run.wait` has waited long enough. A class of its own: a `TimeoutError` of `on_step` stops the run."""


class Shown:
    """A value that prints as its command does; its attributes are those of the value."""

    def __init__(self, value: Any, text: str) -> None:
        self.value, self.text = value, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __repr__(self) -> str:
        return self.text


class Run:
    """A run: its folder, and the launcher that this process started for it, if it did."""

    def __init__(self, folder: str | Path) -> None:
        self.files = RunDir(Path(folder).expanduser())
        self._launcher: subprocess.Popen[bytes] | None = None
        self._said = 0  # bytes of the output of earlier launchers
        self._steps = JsonTail(self.files.metrics / "learner.jsonl")

    def start(self) -> Run:
        """Start or resume the run of `RUN/python.toml`."""
        command = guard_command([sys.executable, "-m", "asyncrl", "launch", "all", str(self.folder / FILE)])
        with (self.files.logs / OUTPUT).open("ab") as output:
            self._said = output.tell()
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
        return self

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run that exists. Raises ConfigError `run.missing`."""
        run = cls(folder)
        run.files.require()
        return run

    def __repr__(self) -> str:
        state = "running" if self.running else "done" if self.result.get("done") else "ended"
        return f"asyncrl.Run({str(self.files.root)!r}, {state}, step {self.step})"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.files.root

    @property
    def running(self) -> bool:
        """Whether the launcher that this process started still runs."""
        return self._launcher is not None and self._launcher.poll() is None

    @property
    def step(self) -> int:
        """The last trained step."""
        lines = drop_repeated_steps(read_lines(self.files.metrics / "learner.jsonl"))
        return int(lines[-1]["step"]) if lines else 0

    @property
    def result(self) -> dict[str, Any]:
        """How the run ended (`result.json`); empty during the run."""
        return read_object(self.files.result)

    # ------------------------------------------------------------ while it runs

    def wait(self, on_step: OnStep | None = None, *, progress: bool = True, timeout_s: float = float("inf")) -> Run:
        """Wait for the end. `on_step` gets every step: `step.step`, `step.reward_mean`, ... (docs/metrics.md). If it
        raises, or on Ctrl-C, the run stops with a checkpoint.

        Raises:
            AsyncRLError: `role.failed` with the end of the output, if the launcher failed.
            TimeoutError: it did not end within `timeout_s`; the run goes on.
        """
        if self._launcher is None:
            return self
        deadline = time.monotonic() + timeout_s
        try:
            with Progress(self.files, shown=progress) as bar:
                for line in self._new_steps(deadline):
                    bar.show(line)
                    if on_step is not None:
                        on_step(SimpleNamespace(**line))
        except StillRunning:
            raise
        except BaseException:
            if self.running:
                self.stop()
            raise
        if code := self._launcher.returncode:
            raise failure(self.files, code, self._said)
        return self

    def _new_steps(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Lines of the learner's metrics until the launcher has ended."""
        while True:
            running = self.running
            lines = self._steps.poll()
            yield from lines
            if not running and not lines:
                return
            if time.monotonic() > deadline:
                raise StillRunning(f"{self!r} did not end in time")
            if running:
                time.sleep(POLL_S)

    def tune(self, **settings: Any) -> Shown:
        """Change settings of the running system, such as `max_staleness=4`; dotted keys as `**{"learner...": 1}`."""
        answer = change_settings(self.folder, settings)
        return Shown(answer, tune_text(answer))

    def stop(self) -> Run:
        """End the run with a checkpoint, and wait for that. A run that has ended stays as it is."""
        if self._launcher is None:
            stop_command(self.folder, timeout_s=STOP_S)
        elif self.running:
            self._launcher.terminate()
            self._launcher.wait(STOP_S)
        return self

    # ------------------------------------------------------------ results

    def metrics(self, name: str = "learner") -> Any:
        """A pandas table of `metrics/NAME.jsonl` (learner, buffer, roles, weightsync, evaluation); steps are its index.

        Raises ConfigError `config.extra` without pandas.
        """
        lines = read_lines(self.files.metrics / f"{name}.jsonl")
        lines = drop_repeated_steps(lines) if name == "learner" else lines
        table = _pandas().DataFrame(lines)
        return table.set_index("step") if "step" in table else table

    def samples(self, step: int | None = None) -> Any:
        """A pandas table of the best and worst samples of a step, by default of the newest one."""
        found = group_by_step(read_lines(self.files.samples))
        wanted = max(found, default=0) if step is None else step
        if wanted not in found:
            known = f"there are those of steps {min(found)} to {max(found)}" if found else "there are none yet"
            raise ConfigError("usage", f"no samples of step {wanted}: {known}", where=str(self.files.samples))
        return _pandas().DataFrame(found[wanted])

    def evaluate(self, data: Data, *, samples: int = 1, temperature: float = 1.0) -> dict[str, float]:
        """Figures of the exported weights on other rows, by the run's own rewards, in a short run of its own that
        changes no weight. Names as in docs/evaluation.md; `version` is the step of the weights.
        """
        step = exported_step(self.files)
        if step is None:
            what = "the run has no exported weights of a known step"
            raise ConfigError("usage", what, where=str(self.files.export), remedy="train it to its last step")
        files = RunDir(self.folder / "evaluate" / str(time.time_ns()))
        config = Config.open(self.files.config)
        config.settings |= SHORT | {
            "run.dir": str(files.root),
            "model.path": str(self.files.export),
            "evaluation.path": write_rows(data, files.root / "data.jsonl"),
            "evaluation.samples": samples,
            "evaluation.temperature": temperature,
        }
        try:
            launch(config, progress=False)
        finally:
            for large in (files.checkpoints, files.export, files.segments):
                shutil.rmtree(large, ignore_errors=True)
        [line] = read_lines(files.metrics / "evaluation.jsonl")
        told = {name: value for name, value in line.items() if name.startswith(("val-", "evaluation_"))}
        figures = {name: value for name, value in told.items() if "version" not in name}  # of the short run
        return figures | {"version": step}

    def audit(self) -> Shown:
        """The proof from the run's log (`asyncrl audit`)."""
        found = audit_run(self.folder)
        return Shown(found, audit_text(found))

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report; its path."""
        return write_report(self.files, out=None if out is None else Path(out))

    def export(self, out: str | Path, *, step: int | None = None, dtype: str = "auto") -> Path:
        """Write the weights of a checkpoint, by default the newest, as a folder for transformers and vLLM."""
        words = export_words(self.folder, step=step, out=Path(out), dtype=dtype, max_shard_size="5GB")
        env = environment(load(self.files.config).learner.torch_threads, python_path())
        done = subprocess.run(
            words, env={**_environment(), **env}, capture_output=True, text=True, check=False, timeout=EXPORT_S
        )
        if done.returncode:
            raise AsyncRLError("role.failed", done.stderr.strip()[-2000:] or done.stdout[-2000:], where="export")
        return Path(out)

    def trace(self, group: int) -> Shown:
        """The history of one group (`asyncrl trace`)."""
        story = load_story(self.files.require(), group)
        return Shown(story, story_text(story))


def train(
    model: str | Path,
    data: Data,
    rewards: Sequence[Reward],
    *,
    steps: int = 100,
    lr: float | None = None,
    group_size: int = 8,
    max_staleness: int = 4,
    max_prompt_tokens: int | None = None,
    max_new_tokens: int | None = None,
    dir: str | Path = "runs/train",  # noqa: A002, RUF100 - the name of the setting
    evaluation: Data | None = None,
    settings: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
    background: bool = False,
) -> Run:
    """Train a model by reinforcement learning; the run when it has ended, or at once with `background`.

    Args:
        model: folder in Hugging Face format, or a name on a hub (docs/configure.md).
        data: rows with a column `prompt`: a path, a list of dicts, a pandas or pyarrow table, a `datasets.Dataset`.
        rewards: functions, or `module:name`, `file.py:name`, `builtin:name`; several are summed (docs/rewards.md).
        steps: learner steps.
        lr: learning rate; None: by the size of the model (`asyncrl.configure.proposal.learning_rate`).
        group_size: samples per prompt.
        max_staleness: largest number of steps between the weights that sampled a token and those that it trains.
        max_prompt_tokens: longer prompts are skipped; None: a quarter more than the longest of the first ones.
        max_new_tokens: longest response; None: 1024 with an accelerator, else 128, if the model has the positions.
        dir: folder of the run. A run that is there is resumed.
        evaluation: rows that are never trained, measured during the run.
        settings: any others by dotted key (docs/configuration.md), such as {"learner.algorithm.preset": "dapo"}.
        on_step: called here with every step: `lambda s: print(s.step, s.reward_mean)`.
        progress: show a progress bar, and curves in a notebook.
        background: return while it runs; `Run.wait` and `Run.stop` end it.

    Raises:
        ConfigErrors: every mistake, before anything starts.
        AsyncRLError: the run failed; `service.duplicate`: it is running already, and stays as it is.
    """
    own = {
        "learner.steps": steps,
        "learner.optim.lr": lr,
        "sampling.group_size": group_size,
        "buffer.max_staleness": max_staleness,
        "data.max_prompt_tokens": max_prompt_tokens,
        "sampling.max_new_tokens": max_new_tokens,
    }
    chosen = {key: value for key, value in own.items() if value is not None} | dict(settings or {})
    config = Config.build(model, data, rewards, dir=dir, evaluation=evaluation, settings=chosen)
    return launch(config, background=background, on_step=on_step, progress=progress)


def launch(
    config: Config | str | Path, *, background: bool = False, on_step: OnStep | None = None, progress: bool = True
) -> Run:
    """Check and start the run of a configuration or of a TOML file, or resume it; see `train`."""
    config = config if isinstance(config, Config) else Config.open(config)
    files = RunDir(Path(config.require()["run.dir"]).expanduser())
    refuse_running(files)
    config.save(files.create().root / FILE)
    run = Run(files.root).start()
    return run if background else run.wait(on_step, progress=progress)


def failure(files: RunDir, code: int, start: int = 0) -> AsyncRLError:
    """The error of a launcher that ended with this code, and whose output begins at `start`."""
    path = files.logs / OUTPUT
    lines = [line for line in path.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    text = "\n".join(lines[-8:])
    return AsyncRLError("role.failed", f"the launcher ended with code {code}:\n{text}", remedy=f"see {path}")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(python_path())}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("config.extra", "tables need pandas", remedy="pip install 'asyncrl[notebook]'") from None
    return pandas

"""`asyncrl launch`: checks, plans and supervises a run, and reports the result.

Guarantees:
1. nothing is started or written before the whole configuration has been checked;
2. the same command resumes the run, and prints the settings that changed;
3. a second launcher of the same role of a run is refused (`service.duplicate`); more producers and reward workers may
   join at any time, under their own names;
4. no role package is imported here: roles are processes, named by their module;
5. however a run with a learner ends, `result.json` and `report.html` are written. Results that the learner wrote for a
   complete run (steps, rewards, lag, ledger) are kept, together with the end of the launch. There is no `result.json`
   during the run;
6. weights that killed learners left in shared memory are removed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from asyncrl.config import Config, dump, redact
from asyncrl.config import redis_url as redis_secret
from asyncrl.config.mode import present_roles
from asyncrl.errors import EXIT_OK, EXIT_STOPPED, AsyncRLError, ConfigError, ConfigErrors
from asyncrl.launcher.forked import ForkServer
from asyncrl.launcher.hang_watch import HangWatch
from asyncrl.launcher.liveness_watch import SilenceWatch
from asyncrl.launcher.progress import Progress, print_line
from asyncrl.launcher.resume import changes, refuse_changes, resume_note
from asyncrl.launcher.stop_signals import ignore_stop
from asyncrl.launcher.supervisor import Grace, Supervisor
from asyncrl.monitor.flat_reward import flat_reward
from asyncrl.monitor.text import shown_mode
from asyncrl.net.keys import worker_file
from asyncrl.preflight import check as checks
from asyncrl.preflight.derived import what_starts
from asyncrl.preflight.threads import choose_threads
from asyncrl.process_plan import device_assignment as devices
from asyncrl.process_plan.interpreters import python_path, settle_interpreter
from asyncrl.process_plan.plan import ENGINES, TARGETS, WORKERS, Joining, Outcome, ProcessPlan, only_judges, plan
from asyncrl.runtime.run_dir import RunDir, launcher_lock, read_object, run_keys, sibling_address, write_atomic
from asyncrl.runtime.shared_memory import remove_stale_slots

OWNERS = frozenset({"all", "services", "buffer", "learner"})  # targets that write RUN/config.toml
#: Targets that may be launched several times for one run.
SHARED = frozenset({"producers", "evaluators", "rewards", "teachers"})


class LaunchOptions(msgspec.Struct, frozen=True):
    """The command line of `asyncrl launch`."""

    target: str = "all"
    overrides: tuple[str, ...] = ()
    connect: str = ""
    key: str = ""
    takeover: bool = False
    standby: bool = False  # target buffer: wait until the serving one is gone
    verbose: bool = False
    plain: bool = False
    report: bool = True
    judge: str = ""  # target rewards: only workers of this judge (`default`: of the default one); empty: of all
    insecure_no_auth: bool = False
    node_rank: int = 0
    head: str = ""
    job: bool = False  # run by a scheduler, which restarts a job that did not end with 0


class Launched(msgspec.Struct, frozen=True):
    """The run, and how it ended."""

    config: Config
    run: RunDir
    outcome: Outcome
    started: float = 0.0  # wall time


def launch(paths: Path | Sequence[Path], options: LaunchOptions) -> Launched:
    """Run the target to its end. Raises ConfigErrors before anything is started."""
    config, checked = checked_files(paths, options, fetch=True)
    config = absolute(config)
    return _launch(point_to_services(config, options.connect) if options.connect else config, checked, options)


def checked_files(
    paths: Path | Sequence[Path], options: LaunchOptions, *, fetch: bool = False
) -> tuple[Config, checks.Checked]:
    """The configuration of the command line. `fetch`: get what it names on the hub. Raises ConfigErrors with every
    mistake.
    """
    overrides = list(options.overrides)
    if options.key:
        overrides.append(f"network.key_file={msgspec.json.encode(options.key).decode()}")
    if options.insecure_no_auth:
        overrides.append("network.insecure_no_auth=true")
    asked = {"joining": bool(options.connect), "standby": options.standby, "fetch": fetch}
    config, checked = checks.check_files(paths, overrides, options.target, **asked)
    if checked.errors or config is None:
        raise ConfigErrors(checked.errors)
    if config.service.port:
        what = "this file is a training service, not a run"
        raise ConfigError("usage", what, where="service.port", remedy="start it by: asyncrl serve")
    return config, checked


def launch_config(config: Config, options: LaunchOptions) -> Launched:
    """Like `launch`, with a given configuration."""
    only_judges(config, options.target, options.judge)  # report a wrong name before any other check
    checked = checks.check(config, roles_here(config, options), joining=bool(options.connect))
    if checked.errors:
        raise ConfigErrors(checked.errors)
    return _launch(config, checked, options)


def roles_here(config: Config, options: LaunchOptions) -> tuple[str, ...]:
    """The roles that the target starts on this host. Raises `usage` for evaluators that the run does not use."""
    if options.target == "evaluators" and not config.evaluation.separate:
        raise ConfigError("usage", "the run has no evaluators: evaluation.lane is not 'evaluators'", where="evaluators")
    return present_roles(TARGETS[options.target], config) if options.target == "all" else TARGETS[options.target]


def _launch(config: Config, checked: checks.Checked, options: LaunchOptions) -> Launched:
    config = choose_threads(config)
    check_gang(config, roles_here(config, options), options)
    started = time.time()
    run = RunDir(config.run_dir).create()
    if gang_is_done(run, config, options):
        print_line(f"run {run.root}: complete, this host of the learner has nothing left to do")
        return Launched(config, run, Outcome(EXIT_OK, "done", 0.0), started)
    with launcher_lock(run, options.target):  # until the result is written
        outcome = _launch_roles(run, config, checked, options)
    return Launched(config, run, outcome, started)


def _launch_roles(run: RunDir, config: Config, checked: checks.Checked, options: LaunchOptions) -> Outcome:
    roles, judges = roles_here(config, options), only_judges(config, options.target, options.judge)
    locks, tag = _locks(run, options)
    try:
        if "buffer" in roles:
            run_keys(config, make=not options.standby)
            redis_secret.keep(config.buffer.redis_url, run.store)
        path = settle_config(run, config, options, tag=tag)
        joining = Joining(
            connect=options.connect,
            key=options.key,
            worker_keys=worker_keys(config, roles),
            takeover=options.takeover,
            standby=options.standby,
            tag=tag,
            judges=judges,
            node_rank=options.node_rank,
            head=options.head,
        )
        homed = settle_interpreter(config) if ENGINES & {*roles} else config
        plans = plan(
            homed, roles, config_path=path, joining=joining, python_path=python_path(), devices=devices.find_devices()
        )
        print_line(f"run {run.root}: {what_starts(config, roles, judges)}")
        for note in (*checked.missing, *checked.notes):
            print_line(f"note: {note}")
        leads = "learner" in roles and not options.node_rank
        if leads:
            run.result.unlink(missing_ok=True)
        outcome = _supervise(run, config, plans, options)
    finally:
        for lock in locks:
            lock.close()
    if leads:
        with ignore_stop():
            _conclude(run, config, outcome, options)
    if outcome.code and outcome.failed:
        _print_failure(outcome, run)
    return outcome


def worker_keys(config: Config, roles: Sequence[str]) -> dict[str, str]:
    """The key files of producers and reward workers, by role; empty without keys. Raises `config.network`."""
    if not config.network.key_file:
        return {}
    path = Path(config.network.key_file)
    return {role: str(worker_file(path, "producer" if role in ENGINES else "reward")) for role in WORKERS & {*roles}}


def point_to_services(config: Config, connect: str) -> Config:
    """The configuration with the addresses of the services as seen from this host."""
    network = msgspec.structs.replace(
        config.network, buffer=connect, weightsync=sibling_address(config.network.weightsync, connect)
    )
    return msgspec.structs.replace(config, network=network)


def check_gang(config: Config, roles: Sequence[str], options: LaunchOptions) -> None:
    """A gang of several hosts needs the number of this host and the address of the first one."""
    hosts = config.cluster.learner_hosts
    if hosts == 1 or "learner" not in roles:
        if options.head or options.node_rank:
            raise ConfigError("usage", "--head and --node-rank are for a learner with cluster.learner_hosts above 1")
        return
    host, _, port = options.head.rpartition(":")
    if options.target != "learner" or not host or not port.isdigit() or not 0 <= options.node_rank < hosts:
        raise ConfigError(
            "usage",
            f"cluster.learner_hosts = {hosts}: each host runs `asyncrl launch learner` with --head HOST:PORT "
            f"and its own --node-rank 0 to {hosts - 1}",
            where="cluster.learner_hosts",
            remedy="render the jobs: asyncrl launch all CONFIG --backend slurm --render DIR",
        )


def gang_is_done(run: RunDir, config: Config, options: LaunchOptions) -> bool:
    """Whether a gang of several hosts has trained its last step. A host that restarts after that would wait for hosts
    that have ended. The ledger in the result belongs to a learner that reached its end.
    """
    if options.target != "learner" or config.cluster.learner_hosts == 1:
        return False
    result = read_object(run.result)
    return "ledger" in result and int(result["steps"]) >= config.learner.steps


def absolute(config: Config) -> Config:
    """Make the run folder and a local model folder absolute paths."""
    config = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, dir=str(Path(config.run.dir).resolve()))
    )
    model = Path(config.model.path)
    if model.is_dir():
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model.resolve())))
    return config


def _locks(run: RunDir, options: LaunchOptions) -> tuple[list[IO[str]], str]:
    """Take the locks of this launcher; the tag for names of additional workers."""
    node = f"-{options.node_rank}" if options.node_rank else ""
    names = [f"launch-{role}{node}" for role in TARGETS[options.target]]
    if options.standby:  # the host of the serving buffer holds the lock of the buffer
        names = [f"launch-standby-{socket.gethostname()}"]
    held: list[IO[str]] = []
    try:
        for name in names:
            if options.takeover and name == "launch-learner":
                continue
            held.append(run.lock(name))
    except AsyncRLError:
        for lock in held:
            lock.close()
        if options.target not in SHARED:
            raise
        return [], _tag(options)
    return held, _tag(options) if options.connect or options.standby else ""


def _tag(options: LaunchOptions) -> str:
    """A tag of this launcher. Launchers in containers have the same pid, so the host distinguishes them."""
    host = f"{socket.gethostname().split('.')[0]}-" if options.connect or options.standby else ""
    return f"{host}{os.getpid():x}"


def settle_config(run: RunDir, config: Config, options: LaunchOptions, *, tag: str) -> Path:
    """Write the resolved configuration for the children; return its path."""
    text = dump(config)
    owns = options.target in OWNERS and not options.connect and not options.standby
    if owns and (note := resume_note(run, config)):
        print_line(note)
    if run.config.exists() and run.config.read_text() == text:
        return run.config
    if not owns and (options.connect or run.config.exists()):
        path = run.logs / f"{options.target}{'-' + tag if tag else ''}.config.toml"
        write_atomic(path, text.encode())
        return path
    if run.config.exists():
        refuse_changes(run, config)
        for line in changes(run.config, redact(config)):
            print_line(f"changed since the last start: {line}")
    write_atomic(run.config, text.encode())
    return run.config


def _supervise(run: RunDir, config: Config, plans: list[ProcessPlan], options: LaunchOptions) -> Outcome:
    own = "learner" in TARGETS[options.target]  # another launcher shows the steps
    learner = config.learner
    progress = Progress(
        run,
        steps=learner.steps,
        mode=shown_mode(config),
        verbose=options.verbose,
        plain=options.plain,
        table=own,
        hint=lambda lines: flat_reward(lines, config),
    )
    try:
        hang = HangWatch(run, config) if own else None
        silence = SilenceWatch(run, limit_s=config.run.silent_timeout_s)
        return Supervisor(
            plans,
            logs=run.logs,
            say=progress.say,
            tick=progress.tick,
            grace=_grace(config, options),
            hang=hang,
            silence=silence,
            forks=ForkServer(plans, run.logs / "fork-server.log"),
        ).run()
    finally:
        progress.close()
        if own:
            remove_stale_slots(run.root / "weights")  # of killed learners


def _grace(config: Config, options: LaunchOptions) -> Grace:
    """Time limits of the stages of a stop: the learner of a job gets the scheduler's grace period, less the other
    stages.
    """
    usual = Grace()
    if not options.job:
        return usual
    return Grace(learner_s=max(usual.learner_s, config.cluster.grace_s - 3 * usual.other_s))


def exit_code(outcome: Outcome, options: LaunchOptions) -> int:
    """Exit code of the command. A scheduler treats 0 as complete, so a stopped job must not end with 0."""
    stopped = options.job and outcome.code == EXIT_OK and outcome.stopped
    return EXIT_STOPPED if stopped else outcome.code


def _conclude(run: RunDir, config: Config, outcome: Outcome, options: LaunchOptions) -> None:
    from asyncrl.report.data import load_run, summary

    data = load_run(run)
    done = outcome.code == 0 and data.last_step >= config.learner.steps
    result = read_object(run.result) | {
        "done": done,
        "code": outcome.code,
        "reason": outcome.reason,
        "wall_s": round(outcome.wall_s, 3),
        "steps": data.last_step,
        "restarts": outcome.restarts,
        "failed": outcome.failed,
        "t": time.time(),
        "given_up": outcome.given_up,
    }
    write_atomic(run.result, msgspec.json.encode(result))
    print_line("")
    for line in summary(data, outcome):
        print_line(line)
    if options.report:
        from asyncrl.report import write_report

        print_line(f"report    {write_report(run)}")


def _print_failure(outcome: Outcome, run: RunDir) -> None:
    error = AsyncRLError(
        "role.failed", outcome.reason, where=outcome.failed, remedy=f"see {run.logs / (outcome.failed + '.log')}"
    )
    for line in outcome.last_lines:
        print_line(f"  | {line}", sys.stderr)
    print_line(error.render(), sys.stderr)

"""Commands that start and end runs: launch, demo, stop."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_configs, add_folder, add_output, add_set, command, seconds

TARGETS = ("all", "services", "buffer", "producers", "evaluators", "rewards", "teachers", "learner", "weightsync")
LAUNCH_EXAMPLES = """targets:
  all         everything on this machine
  services    buffer and weight sync
  buffer, weightsync, learner     one of each per run
  producers, rewards, teachers    as many launchers as you like, on any host; rewards starts the teachers too
  evaluators                      likewise, with evaluation.lane = "evaluators"

examples:
  asyncrl launch all my.toml --set learner.steps=20
  asyncrl launch all base.toml more.toml          (more.toml wins)
  asyncrl launch all my.toml --dry-run            (nothing starts)
  asyncrl launch all game.toml --policy first     (of several policies only this one)
  asyncrl launch producers my.toml --connect tcp://10.0.0.1:5555 --key producer.key  (on another host)
  asyncrl launch buffer my.toml --standby          (on a second host: takes over if the first one dies)
  asyncrl launch rewards my.toml --judge slow      (more workers of one judge)
  asyncrl launch all my.toml --backend slurm --render jobs                         (writes the jobs of a cluster)

Ctrl-C once: the learner writes a checkpoint and everything ends; the same command resumes.
"""


def add(commands: Commands) -> None:
    _add_launch(commands)
    _add_demo(commands)
    _add_serve(commands)
    one = command(
        commands,
        "stop",
        "end a run: the learner writes a checkpoint first; the exit code is the run's",
        example="asyncrl stop runs/my",
    )
    add_folder(one)
    one.add_argument(
        "--timeout", type=seconds(0, 86400), default=180.0, metavar="S", help="how long to wait for its end"
    )
    one.set_defaults(run=_stop)


def _add_launch(commands: Commands) -> None:
    one = command(
        commands, "launch", "start the roles of a run; the same command again resumes it", epilog=LAUNCH_EXAMPLES
    )
    one.add_argument("target", metavar="TARGET", choices=TARGETS, help=f"what to start here: {', '.join(TARGETS)}")
    add_configs(one)
    one.add_argument("--connect", default="", metavar="URL", help="join the run whose buffer listens there")
    one.add_argument("--key", default="", metavar="FILE", help="key file of that run")
    one.add_argument(
        "--standby", action="store_true", help="target buffer: wait here, and take over when the serving one is gone"
    )
    one.add_argument("--judge", default="", metavar="NAME", help="target rewards: only workers of this judge")
    one.add_argument(
        "--insecure-no-auth",
        action="store_true",
        help="listen beyond this host without keys (services say so every minute)",
    )
    one.add_argument("--node-rank", type=int, default=0, metavar="N", help="number of this host in a gang of several")
    one.add_argument("--head", default="", metavar="HOST:PORT", help="where a gang of several hosts meets: on host 0")
    one.add_argument("--backend", choices=("slurm", "k8s", "ray"), help="with --render: scheduler of the jobs")
    one.add_argument("--render", type=Path, metavar="DIR", help="start nothing: write the jobs of [cluster] there")
    one.add_argument(
        "--job",
        action="store_true",
        help="as a job of a scheduler: a stop has cluster.grace_s, and the exit code 143 where it comes before the end",
    )
    one.add_argument("--takeover", action="store_true", help="fence a learner that is still registered")
    one.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would start (commands, files, environment), and start nothing",
    )
    one.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    add_output(one)
    one.set_defaults(run=_launch)


def _add_demo(commands: Commands) -> None:
    one = command(
        commands,
        "demo",
        "train a tiny model on this CPU and check the guarantees",
        example="asyncrl demo --task add --set buffer.max_staleness=0",
    )
    one.add_argument(
        "--task",
        choices=("running_sum", "add", "long_sum", "shapes"),
        default="running_sum",
        help="task of the demo (default: running_sum); long_sum takes eight minutes, shapes has pictures",
    )
    one.add_argument("--resume", action="store_true", help="resume the last demo instead of starting a new one")
    one.add_argument("--prepare-only", action="store_true", help="make the model and the prompts, start nothing")
    add_set(one)
    add_output(one)
    one.set_defaults(run=_demo)


def _add_serve(commands: Commands) -> None:
    one = command(
        commands,
        "serve",
        "serve forward_backward, optim_step and sample to clients of the Tinker API",
        example="asyncrl serve service.toml --set service.port=8000",
    )
    add_configs(one)
    one.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    import os
    import sys

    from asyncrl.config import dump
    from asyncrl.errors import ConfigError, ConfigErrors
    from asyncrl.preflight.check import check_files
    from asyncrl.runtime.run_dir import RunDir, write_atomic

    config, checked = check_files(args.configs, args.overrides, fetch=True)
    if config is None or checked.errors:
        raise ConfigErrors(checked.errors)
    if not config.service.port:
        raise ConfigError("config.missing", "a training service needs a port", where="service.port")
    os.umask(0o077)
    folder = RunDir(config.run_dir).root / "service"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "config.toml"
    write_atomic(file, dump(config).encode())
    os.execv(sys.executable, [sys.executable, "-m", "learners.service.main", str(file)])


def _launch(args: argparse.Namespace) -> int:
    import os

    from asyncrl.config.policies import policy_names
    from asyncrl.errors import ConfigError
    from asyncrl.launcher.launch import LaunchOptions, exit_code, launch

    if args.standby and args.target != "buffer":
        raise ConfigError("usage", f"--standby goes with the target buffer, not {args.target}", where="--standby")
    options = LaunchOptions(
        target=args.target,
        overrides=tuple(args.overrides),
        connect=args.connect,
        key=args.key,
        takeover=args.takeover,
        standby=args.standby,
        verbose=args.verbose,
        plain=args.plain,
        judge=args.judge,
        insecure_no_auth=args.insecure_no_auth,
        node_rank=args.node_rank,
        head=args.head,
        job=args.job,
    )
    if args.dry_run:
        from asyncrl.launcher.dry_run import dry_run

        return dry_run(args.configs, options, as_json=args.json)
    if args.json:
        raise ConfigError("usage", "--json is of --dry-run", where="launch")
    os.umask(0o077)
    if args.render or args.backend:
        return _render(args)
    if args.target == "all" and (names := policy_names(args.configs, args.overrides)):
        from asyncrl.launcher.policies import launch_policies

        return launch_policies(args.configs, options, names)
    return exit_code(launch(args.configs, options).outcome, options)


def _render(args: argparse.Namespace) -> int:
    from asyncrl.errors import ConfigError
    from asyncrl.launcher.clusters import render_command

    if not (args.render and args.backend) or args.target != "all":
        raise ConfigError("usage", "--backend and --render go together, with the target all")
    return render_command(args.configs, args.overrides, backend=args.backend, folder=args.render)


def _demo(args: argparse.Namespace) -> int:
    from asyncrl.demo.demo import demo

    return demo(
        args.task,
        tuple(args.overrides),
        resume=args.resume,
        verbose=args.verbose,
        plain=args.plain,
        prepare_only=args.prepare_only,
    )


def _stop(args: argparse.Namespace) -> int:
    from asyncrl.monitor.status import stop_command

    return stop_command(args.folder, timeout_s=args.timeout)

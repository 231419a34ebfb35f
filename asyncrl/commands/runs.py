"""Commands on the log of a run: audit, trace, rescore, replay, fork; and on its results: report, export."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_folder, add_set, command

REPLAY_EXAMPLES = """examples:
  asyncrl replay runs/my                                                all of it: are the same bits reached?
  asyncrl replay runs/my --from 20 --set learner.algorithm.clip_high=0.3    what if, after step 20?
  asyncrl replay runs/my --rewards runs/my-scores.jsonl                 what if, with the rewards of `asyncrl rescore`?
"""
RESCORE_EXAMPLES = """examples:
  asyncrl rescore runs/my --reward new_rewards:strict       what would another function have changed?
  asyncrl rescore runs/my                                   the run's own functions, in their current state
  asyncrl rescore runs/my --judge style --reward new_rewards:style     in place of one judge; the others' parts stay

It also works during a run: it scores the samples archived so far.
"""


def add(commands: Commands) -> None:
    _add_trace(commands)
    _add_rescore(commands)
    _add_replay(commands)
    one = command(
        commands,
        "audit",
        "prove from the log that nothing was lost, doubled, too old or unknown",
        example="asyncrl audit runs/my --json",
    )
    add_folder(one)
    one.add_argument("--json", action="store_true", help="the verdict and all counts, as JSON")
    one.set_defaults(run=_audit)


def _add_trace(commands: Commands) -> None:
    one = command(
        commands,
        "trace",
        "history of one group: leases, weight versions, scores, result",
        example="asyncrl trace runs/my 317",
    )
    add_folder(one)
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("group", metavar="GROUP", nargs="?", type=int, help="number of the group")
    what.add_argument("--step", type=int, metavar="N", help="instead: the groups of a step")
    what.add_argument("--dead", action="store_true", help="instead: quarantined groups and dead letters")
    what.add_argument("--latency", action="store_true", help="instead: seconds of all trained groups by stage")
    what.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="instead: the whole run as a timeline for ui.perfetto.dev (.pftrace.gz)",
    )
    one.add_argument("--json", action="store_true", help="as JSON")
    one.set_defaults(run=_trace)


def _add_rescore(commands: Commands) -> None:
    one = command(
        commands, "rescore", "score a run's archived samples again: what would have changed?", epilog=RESCORE_EXAMPLES
    )
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of a run with log.archive = true")
    one.add_argument(
        "--reward",
        dest="rewards",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="score with this function (several: their sum) instead of the run's own",
    )
    one.add_argument(
        "--judge",
        default="",
        metavar="NAME",
        help="only the part of this judge (`default`: of the "
        "rewards that name none); the others' parts stay as recorded",
    )
    one.add_argument(
        "--teacher", default="", metavar="NAME", help="compute the log-probs of this teacher again instead of rewards"
    )
    default = "RUN-scores.jsonl; RUN-teacher.jsonl with --teacher"
    one.add_argument("--out", type=Path, metavar="FILE", help=f"file of the scores (default: {default})")
    one.add_argument("--json", action="store_true", help="the report, as JSON")
    one.set_defaults(run=_rescore)


def _add_replay(commands: Commands) -> None:
    one = command(
        commands,
        "replay",
        "train a run's recorded batches again: bitwise, or with other settings",
        epilog=REPLAY_EXAMPLES,
    )
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of a run with log.archive = true")
    one.add_argument(
        "--from",
        dest="begin",
        type=int,
        default=0,
        metavar="STEP",
        help="begin after this step, from the newest checkpoint at or before it (default 0: the start weights)",
    )
    one.add_argument("--to", dest="end", type=int, metavar="STEP", help="last step (default: the last committed one)")
    add_set(one)
    one.add_argument("--rewards", type=Path, metavar="FILE", help="train on the scores that `asyncrl rescore` wrote")
    one.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (default: RUN-replay)")
    one.add_argument("--json", action="store_true", help="the comparison, as JSON")
    one.set_defaults(run=_replay)

    one = command(
        commands,
        "fork",
        "create a new run that continues from a checkpoint of another run",
        example="asyncrl fork runs/my runs/my-2 --step 40 --set learner.optim.lr=1e-5",
    )
    add_folder(one)
    one.add_argument("target", metavar="NEWDIR", type=Path, help="folder of the fork; new or empty")
    one.add_argument("--step", type=int, required=True, metavar="K", help="step whose checkpoint it starts from")
    add_set(one)
    one.set_defaults(run=_fork)


def _audit(args: argparse.Namespace) -> int:
    from asyncrl.audit.prove import audit_command

    return audit_command(args.folder, as_json=args.json)


def _trace(args: argparse.Namespace) -> int:
    if args.perfetto is not None:
        from asyncrl.trace.perfetto import perfetto_command

        return perfetto_command(args.folder, args.perfetto)
    if args.latency:
        from asyncrl.trace.latency import latency_command

        return latency_command(args.folder, as_json=args.json)
    from asyncrl.trace.render import trace_command

    return trace_command(args.folder, group=args.group, step=args.step, dead=args.dead, as_json=args.json)


def _replay(args: argparse.Namespace) -> int:
    from asyncrl.runs.replay import replay_command

    return replay_command(
        args.folder,
        begin=args.begin,
        end=args.end,
        overrides=args.overrides,
        out=args.out,
        as_json=args.json,
        rewards=args.rewards,
    )


def _rescore(args: argparse.Namespace) -> int:
    from asyncrl.runs.rescore import rescore_command

    return rescore_command(
        args.folder, rewards=args.rewards, judge=args.judge, out=args.out, as_json=args.json, teacher=args.teacher
    )


def _fork(args: argparse.Namespace) -> int:
    from asyncrl.runs.fork import fork_command

    return fork_command(args.folder, args.target, step=args.step, overrides=args.overrides)


REPORT_EXAMPLES = """examples:
  asyncrl report runs/my                          RUN/report.html
  asyncrl report runs/my --out report.html
  asyncrl report runs/a runs/b runs/c             ./comparison.html
"""


def add_results(commands: Commands) -> None:
    _add_export(commands)
    one = command(
        commands, "report", "write the run's report, or a comparison of several: one HTML file", epilog=REPORT_EXAMPLES
    )
    add_folder(one)
    one.add_argument("others", metavar="RUN", nargs="*", type=Path, help="runs to compare it with")
    one.add_argument("--out", type=Path, metavar="FILE", help="instead of RUN/report.html, or ./comparison.html")
    one.set_defaults(run=_report)


def _add_export(commands: Commands) -> None:
    one = command(
        commands,
        "export",
        "write a checkpoint's weights as a folder for transformers and vLLM",
        example="asyncrl export runs/my --step 40 --dtype bfloat16",
    )
    add_folder(one)
    one.add_argument("--step", type=int, metavar="N", help="step of a checkpoint that is kept (default: the newest)")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="new or empty (default: RUN/export-step_N)")
    one.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights (default: auto, that of model.dtype)",
    )
    one.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    one.set_defaults(run=_export)


def _report(args: argparse.Namespace) -> int:
    from asyncrl.report import write_comparison, write_report
    from asyncrl.runtime.run_dir import RunDir

    runs = [RunDir(folder).require() for folder in (args.folder, *args.others)]
    print(write_comparison(runs, out=args.out) if args.others else write_report(runs[0], out=args.out))
    return 0


def _export(args: argparse.Namespace) -> int:
    from asyncrl.runs.export import export_command

    return export_command(
        args.folder, step=args.step, out=args.out, dtype=args.dtype, max_shard_size=args.max_shard_size
    )

"""The command `asyncrl`: arguments in, exit code out.

Called from the shell (entry point, or `python -m asyncrl`). Guarantees:
1. nothing but the standard library is imported before the arguments are understood: `--help` answers at once;
2. a user's mistake is its text and an exit code, never a traceback; every mistake of a configuration comes at once;
3. no role package and nothing heavy (torch, redis, transformers, engines) is imported here or below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

TARGETS = ("all", "buffer", "producers", "rewards", "learner", "weightsync")
EXAMPLES = """examples:
  asyncrl demo                                    train a tiny model here, in a minute or two
  asyncrl check my.toml                           what would start, and what is wrong
  asyncrl launch all my.toml                      the whole run on this machine
  asyncrl status runs/my                          how it goes
  asyncrl tune runs/my max_staleness=8            change it while it runs
  asyncrl audit runs/my                           nothing lost, nothing trained twice

`asyncrl COMMAND --help` explains a command.
"""
LAUNCH_EXAMPLES = """targets:
  all         everything on this machine
  buffer, weightsync, learner     one of each per run
  producers, rewards              as many launchers as you like, on any host

examples:
  asyncrl launch all my.toml --set learner.steps=20
  asyncrl launch producers my.toml --connect tcp://10.0.0.1:5555 --key run.key     (on another host)

Ctrl-C once: the learner writes a checkpoint and everything ends; the same command resumes.
"""
TUNE_EXAMPLES = """settings:
  max_staleness, pipeline_depth, on_late, late_timeout_s, batch_groups, max_reuse, max_groups_in_flight,
  learner.algorithm.*; the dotted names of the configuration do as well

examples:
  asyncrl tune runs/my max_staleness=8 pipeline_depth=4
  asyncrl tune runs/my learner.algorithm.tis_cap=1.5
  asyncrl tune runs/my --list
  asyncrl tune runs/my --undo 0                   back to the configuration file
"""

REPLAY_EXAMPLES = """examples:
  asyncrl replay runs/my                                                all of it: are the same bits reached?
  asyncrl replay runs/my --from 20 --set learner.algorithm.clip_high=0.3    what if, after step 20?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = parser().parse_args(argv)
    from asyncrl.errors import AsyncRLError

    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except AsyncRLError as error:
        sys.stdout.flush()
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `asyncrl ... | head`
        sys.stderr.close()
        return 141


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous, disaggregated RL for language models on message queues.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action=_Version, help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_launch(commands)
    _add_demo(commands)

    one = _command(commands, "check", "find every mistake of a configuration and show the derived numbers",
                   example="asyncrl check my.toml --set buffer.max_staleness=8")  # fmt: skip
    _add_config(one)
    one.set_defaults(run=_check)

    _add_status(commands)
    _add_tune(commands)
    one = _command(commands, "audit", "prove from the log that nothing was lost, doubled, too old or unknown",
                   example="asyncrl audit runs/my --json")  # fmt: skip
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    one.add_argument("--json", action="store_true", help="the verdict and all counts, as JSON")
    one.set_defaults(run=_audit)

    _add_trace(commands)

    _add_replay(commands)
    one = _command(commands, "report", "write the run's report: one HTML file",
                   example="asyncrl report runs/my --out report.html")  # fmt: skip
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    one.add_argument("--out", type=Path, metavar="FILE", help="instead of RUN/report.html")
    one.set_defaults(run=_report)

    _add_export(commands)

    one = _command(commands, "stop", "end a run: the learner writes a checkpoint first", example="asyncrl stop runs/my")
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    one.add_argument("--timeout", type=float, default=180.0, metavar="S", help="how long to wait for its end")
    one.set_defaults(run=_stop)

    one = _command(commands, "schema", "print the JSON schema of the configuration",
                   example="asyncrl schema > asyncrl.schema.json")  # fmt: skip
    one.set_defaults(run=_schema)
    return top


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "status", "the state of a run, now", example="asyncrl status runs/my")
    one.add_argument("folder", metavar="RUN", nargs="?", type=Path, help="folder of the run")
    one.add_argument("--connect", default="", metavar="URL", help="address of the buffer, instead of a folder")
    one.add_argument("--key", default="", metavar="FILE", help="key file")
    one.add_argument("--json", action="store_true", help="everything the services know, as JSON")
    one.set_defaults(run=_status)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "trace", "one group's story: who made it, when, with which weights, what became of it",
                   example="asyncrl trace runs/my 317")  # fmt: skip
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("group", metavar="GROUP", nargs="?", type=int, help="number of the group")
    what.add_argument("--step", type=int, metavar="N", help="instead: the groups of a step")
    what.add_argument("--dead", action="store_true", help="instead: quarantined groups and dead letters")
    one.add_argument("--json", action="store_true", help="as JSON")
    one.set_defaults(run=_trace)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "export", "write a checkpoint's weights as a folder for transformers and vLLM",
                   example="asyncrl export runs/my --step 40 --dtype bfloat16")  # fmt: skip
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    one.add_argument("--step", type=int, metavar="N", help="step of a checkpoint that is kept (default: the newest)")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="new or empty (default: RUN/export-step_N)")
    one.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
                     help="of the weights (default: auto, that of model.dtype)")  # fmt: skip
    one.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    one.set_defaults(run=_export)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, *, example: str = "",
    epilog: str = "",
) -> argparse.ArgumentParser:  # fmt: skip
    """A command with an example below its options."""
    return commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog or f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def _add_config(one: argparse.ArgumentParser) -> None:
    one.add_argument("config", metavar="CONFIG.toml", type=Path, help="the run's configuration")
    _add_set(one)


def _add_set(one: argparse.ArgumentParser) -> None:
    one.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
                     help="override one setting, e.g. --set learner.steps=20; may be repeated")  # fmt: skip
    one.add_argument("--preset", dest="overrides", action="append", metavar="NAME", type=_preset_override,
                     help="settings of an algorithm, on top of the file: grpo, dapo, gspo, ... or a .toml")  # fmt: skip


def _preset_override(name: str) -> str:
    """`--preset dapo` is `--set learner.algorithm.preset=dapo`."""
    return f"learner.algorithm.preset={name}"


def _add_output(one: argparse.ArgumentParser) -> None:
    one.add_argument("--verbose", action="store_true", help="show every line of every process")
    one.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "launch", "start the roles of a run; the same command again resumes it",
                   epilog=LAUNCH_EXAMPLES)  # fmt: skip
    one.add_argument("target", metavar="TARGET", choices=TARGETS, help=f"what to start here: {', '.join(TARGETS)}")
    _add_config(one)
    one.add_argument("--connect", default="", metavar="URL", help="join the run whose buffer listens there")
    one.add_argument("--key", default="", metavar="FILE", help="key file of that run")
    one.add_argument("--takeover", action="store_true", help="fence a learner that is still registered")
    _add_output(one)
    one.set_defaults(run=_launch)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "demo", "train a tiny model here, on the CPU, and check what was promised",
                   example="asyncrl demo --task add --set buffer.max_staleness=0")  # fmt: skip
    one.add_argument("--task", choices=("running_sum", "add"), default="running_sum", help="what it learns "
                     "(default: running_sum)")  # fmt: skip
    one.add_argument("--resume", action="store_true", help="go on with the last demo instead of starting anew")
    one.add_argument("--prepare-only", action="store_true", help="make the model and the prompts, start nothing")
    _add_set(one)
    _add_output(one)
    one.set_defaults(run=_demo)


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "tune", "change settings of a running system, undo that, or list the changes",
                   epilog=TUNE_EXAMPLES)  # fmt: skip
    one.add_argument("folder", metavar="RUN", nargs="?", help="folder of the run")
    one.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="new values, read as TOML")
    one.add_argument("--undo", type=int, metavar="N", help="go back to the settings after change N (0: the file)")
    one.add_argument("--list", dest="listed", action="store_true", help="every change so far, from the history")
    one.add_argument("--connect", default="", metavar="URL", help="address of the buffer, instead of a folder")
    one.add_argument("--key", default="", metavar="FILE", help="key file")
    one.set_defaults(run=_tune)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = _command(commands, "replay", "train a run's recorded batches again: bitwise, or with other settings",
                   epilog=REPLAY_EXAMPLES)  # fmt: skip
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of a run with log.archive = true")
    one.add_argument("--from", dest="begin", type=int, default=0, metavar="STEP", help="begin after this step, from "
                     "the newest checkpoint at or before it (default 0: the start weights)")  # fmt: skip
    one.add_argument("--to", dest="end", type=int, metavar="STEP", help="last step (default: the last committed one)")
    _add_set(one)
    one.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default: RUN-replay)")
    one.add_argument("--json", action="store_true", help="the comparison, as JSON")
    one.set_defaults(run=_replay)

    one = _command(commands, "fork", "make a run of its own that goes on from a checkpoint of another",
                   example="asyncrl fork runs/my runs/my-2 --step 40 --set learner.optim.lr=1e-5")  # fmt: skip
    one.add_argument("folder", metavar="RUN", type=Path, help="folder of the run")
    one.add_argument("target", metavar="NEWDIR", type=Path, help="folder of the fork; new or empty")
    one.add_argument("--step", type=int, required=True, metavar="K", help="step whose checkpoint it starts from")
    _add_set(one)
    one.set_defaults(run=_fork)


class _Version(argparse.Action):
    """Prints the version; as an action of its own so that `--help` needs no import."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from asyncrl import __version__

        print(f"asyncrl {__version__}")
        parser.exit()


# ---------------------------------------------------------------- commands


def _launch(args: argparse.Namespace) -> int:
    from asyncrl.launch import LaunchOptions, launch

    options = LaunchOptions(
        target=args.target, overrides=tuple(args.overrides), connect=args.connect, key=args.key,
        takeover=args.takeover, verbose=args.verbose, plain=args.plain,
    )  # fmt: skip
    return launch(args.config, options).outcome.code


def _demo(args: argparse.Namespace) -> int:
    from asyncrl.demo import demo

    return demo(
        args.task, tuple(args.overrides), resume=args.resume, verbose=args.verbose, plain=args.plain,
        prepare_only=args.prepare_only,
    )  # fmt: skip


def _check(args: argparse.Namespace) -> int:
    from asyncrl.launch import check_command

    return check_command(args.config, args.overrides)


def _status(args: argparse.Namespace) -> int:
    from asyncrl.status import status_command

    return status_command(args.folder, connect=args.connect, key=args.key, as_json=args.json)


def _tune(args: argparse.Namespace) -> int:
    from asyncrl.tune import tune_command

    words = [args.folder, *args.settings] if args.connect and args.folder else args.settings  # no folder was given
    folder = Path(args.folder) if args.folder and not args.connect else None
    return tune_command(
        folder, words, undo=args.undo, listed=args.listed, connect=args.connect, key=args.key
    )  # fmt: skip


def _audit(args: argparse.Namespace) -> int:
    from asyncrl.audit import audit_command

    return audit_command(args.folder, as_json=args.json)


def _trace(args: argparse.Namespace) -> int:
    from asyncrl.trace_text import trace_command

    return trace_command(args.folder, group=args.group, step=args.step, dead=args.dead, as_json=args.json)


def _replay(args: argparse.Namespace) -> int:
    from asyncrl.replay import replay_command

    return replay_command(
        args.folder, begin=args.begin, end=args.end, overrides=args.overrides, out=args.out, as_json=args.json
    )  # fmt: skip


def _fork(args: argparse.Namespace) -> int:
    from asyncrl.fork import fork_command

    return fork_command(args.folder, args.target, step=args.step, overrides=args.overrides)


def _report(args: argparse.Namespace) -> int:
    from asyncrl.report import write_report
    from asyncrl.rundir import RunDir

    print(write_report(RunDir(args.folder).require(), out=args.out))
    return 0


def _export(args: argparse.Namespace) -> int:
    from asyncrl.export import export_command

    return export_command(
        args.folder, step=args.step, out=args.out, dtype=args.dtype, max_shard_size=args.max_shard_size
    )  # fmt: skip


def _stop(args: argparse.Namespace) -> int:
    from asyncrl.status import stop_command

    return stop_command(args.folder, timeout_s=args.timeout)


def _schema(_args: argparse.Namespace) -> int:
    import json

    from asyncrl.config import schema

    print(json.dumps(schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

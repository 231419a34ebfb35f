"""Commands that watch or change a running system: top, status, samples, tune, metrics."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_folder, add_place, command, seconds

TUNE_EXAMPLES = """settings:
  max_staleness, pipeline_depth, on_late, late_timeout_s, batch_groups, max_reuse, max_groups_in_flight,
  learner.algorithm.*; the dotted names of the configuration do as well

examples:
  asyncrl tune runs/my max_staleness=8 pipeline_depth=4
  asyncrl tune runs/my learner.algorithm.tis_cap=1.5
  asyncrl tune runs/my --list
  asyncrl tune runs/my --undo 0                   back to the configuration file
"""


def add(commands: Commands) -> None:
    _add_status(commands)
    _add_samples(commands)
    _add_tune(commands)


def _add_status(commands: Commands) -> None:
    one = command(commands, "status", "the state of a run, now", example="asyncrl status runs/my")
    add_place(one)
    one.add_argument("--json", action="store_true", help="everything the services know, as JSON")
    one.set_defaults(run=_status)


def _add_samples(commands: Commands) -> None:
    one = command(
        commands,
        "samples",
        "what the model answers: the best and the worst samples of the newest steps",
        example="asyncrl samples runs/my --step 40",
    )
    add_folder(one)
    one.add_argument("--last", type=int, default=1, metavar="N", help="of the newest N steps (default: 1)")
    one.add_argument("--step", type=int, metavar="N", help="of this step")
    one.add_argument("--full", action="store_true", help="whole texts, however long")
    one.set_defaults(run=_samples)


def _add_tune(commands: Commands) -> None:
    one = command(
        commands, "tune", "change settings of a running system, undo that, or list the changes", epilog=TUNE_EXAMPLES
    )
    one.add_argument("folder", metavar="RUN", nargs="?", help="folder of the run")
    one.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="new values, read as TOML")
    one.add_argument("--undo", type=int, metavar="N", help="go back to the settings after change N (0: the file)")
    one.add_argument("--list", dest="listed", action="store_true", help="every change so far, from the history")
    one.add_argument("--connect", default="", metavar="URL", help="address of the buffer, instead of a folder")
    one.add_argument("--key", default="", metavar="FILE", help="key file")
    one.set_defaults(run=_tune)


def _status(args: argparse.Namespace) -> int:
    from asyncrl.monitor.status import status_command

    return status_command(args.folder, connect=args.connect, key=args.key, as_json=args.json)


def _samples(args: argparse.Namespace) -> int:
    from asyncrl.monitor.samples import samples_command

    return samples_command(args.folder, last=args.last, step=args.step, full=args.full)


def _tune(args: argparse.Namespace) -> int:
    from asyncrl.monitor.tune import tune_command

    words = [args.folder, *args.settings] if args.connect and args.folder else args.settings  # no folder was given
    folder = Path(args.folder) if args.folder and not args.connect else None
    return tune_command(folder, words, undo=args.undo, listed=args.listed, connect=args.connect, key=args.key)


TOP_EXAMPLES = """examples:
  asyncrl top runs/my                             until q or Ctrl-C
  asyncrl top --connect tcp://10.0.0.5:5555       without the run's folder
  asyncrl top runs/my --once --plain              one look, as lines
"""


def add_top(commands: Commands) -> None:
    one = command(commands, "top", "watch a run: queue, lag, waiting processes, advice", epilog=TOP_EXAMPLES)
    add_place(one, "folder of the run, running or not")
    one.add_argument("--once", action="store_true", help="one look, then end")
    one.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    one.add_argument(
        "--every", type=seconds(0.1, 3600), default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )
    one.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from asyncrl.monitor.top import top_command

    return top_command(
        args.folder, connect=args.connect, key=args.key, once=args.once, as_plain=args.plain, every_s=args.every
    )


def add_metrics(commands: Commands) -> None:
    one = command(
        commands,
        "metrics",
        "a run's newest metrics in Prometheus' format: once, or at a port of this machine",
        example="asyncrl metrics runs/my --port 9464",
    )
    add_folder(one)
    one.add_argument("--port", type=_port, metavar="N", help="serve http://HOST:N/metrics until Ctrl-C")
    one.add_argument("--host", default="127.0.0.1", help="address to serve at; beyond loopback --key-file is required")
    one.add_argument("--key-file", default="", metavar="FILE", help="file with the key that each request must have")
    one.add_argument("--cert-file", default="", metavar="FILE", help="serve https with this certificate and key (PEM)")
    one.set_defaults(run=_metrics)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port is 0 to 65535; 0 takes a free one")
    return port


def _metrics(args: argparse.Namespace) -> int:
    from asyncrl.monitor.prometheus import metrics_command

    return metrics_command(
        args.folder, port=args.port, host=args.host, key_file=args.key_file, cert_file=args.cert_file
    )

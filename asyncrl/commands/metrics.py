"""Commands that show a run to other programs: metrics (Prometheus)."""

from __future__ import annotations

import argparse

from asyncrl.commands.options import Commands, add_folder, command


def add(commands: Commands) -> None:
    """Declare them."""
    one = command(
        commands,
        "metrics",
        "a run's newest metrics in Prometheus' format: once, or at a port of this machine",
        example="asyncrl metrics runs/my --port 9464",
    )
    add_folder(one)
    one.add_argument("--port", type=_port, metavar="N", help="serve http://127.0.0.1:N/metrics until Ctrl-C")
    one.set_defaults(run=_metrics)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port is 0 to 65535; 0 takes a free one")
    return port


def _metrics(args: argparse.Namespace) -> int:
    from asyncrl.monitor.prometheus import metrics_command

    return metrics_command(args.folder, port=args.port)

"""The live view of a run: top."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, command, seconds

EXAMPLES = """examples:
  asyncrl top runs/my                             until q or Ctrl-C
  asyncrl top --connect tcp://10.0.0.5:5555       without the run's folder
  asyncrl top runs/my --once --plain              one look, as lines
"""


def add(commands: Commands) -> None:
    """Declare it."""
    one = command(commands, "top", "watch a run: queue, lag, who waits, what to do", epilog=EXAMPLES)
    one.add_argument("folder", metavar="RUN", nargs="?", type=Path, help="folder of the run, running or not")
    one.add_argument("--connect", default="", metavar="URL", help="address of the buffer, instead of a folder")
    one.add_argument("--key", default="", metavar="FILE", help="key file")
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

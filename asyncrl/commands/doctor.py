"""Commands about this machine: doctor."""

from __future__ import annotations

import argparse

from asyncrl.commands.options import Commands, command, seconds

DOCTOR_EXAMPLES = """examples:
  asyncrl doctor
  asyncrl doctor --only torch --only redis
  asyncrl doctor --json > machine.json            for a bug report
"""


def add(commands: Commands) -> None:
    """Declare them."""
    one = command(
        commands, "doctor", "what this machine can run, what is wrong with it, and what to do", epilog=DOCTOR_EXAMPLES
    )
    one.add_argument("--only", action="append", default=[], metavar="PROBE", help="this probe alone; may be repeated")
    one.add_argument("--json", action="store_true", help="all findings as JSON")
    one.add_argument(
        "--limit", type=seconds(1, 3600), default=90.0, metavar="S", help="seconds for one probe (default: 90)"
    )
    one.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from asyncrl.doctor.run import doctor_command

    return doctor_command(only=args.only, as_json=args.json, limit_s=args.limit)

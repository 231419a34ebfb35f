"""Commands about this machine: keys, doctor."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, command, seconds

KEYS_EXAMPLES = """writes:
  DIR/server.key     for the buffer, weight sync and the learner: network.key_file = "DIR/server.key"
  DIR/join.key       for producers and reward workers: --key DIR/join.key

examples:
  asyncrl keys keys
  asyncrl launch all my.toml --set network.key_file=keys/server.key --set network.buffer=tcp://10.0.0.1:5555
  asyncrl launch producers my.toml --connect tcp://10.0.0.1:5555 --key join.key     (on another host)
"""


def add_keys(commands: Commands) -> None:
    one = command(commands, "keys", "make the keys with which hosts join a run", epilog=KEYS_EXAMPLES)
    one.add_argument("folder", metavar="DIR", type=Path, help="folder of the key files; made if missing")
    one.set_defaults(run=_keys)


def _keys(args: argparse.Namespace) -> int:
    import os

    from asyncrl.errors import ConfigError
    from asyncrl.net.keys import JOIN_FILE, SERVER_FILE, write_keys

    previous = os.umask(0o077)
    try:
        args.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_keys(args.folder / SERVER_FILE)
    except OSError as error:
        raise ConfigError("config.network", f"{error.strerror}", where=str(args.folder)) from None
    finally:
        os.umask(previous)
    print(f"{args.folder / SERVER_FILE}   for the buffer, weight sync and the learner (network.key_file)")
    print(f"{args.folder / JOIN_FILE}     for producers and reward workers (--key)")
    return 0


DOCTOR_EXAMPLES = """examples:
  asyncrl doctor
  asyncrl doctor --only torch --only redis
  asyncrl doctor --json > machine.json            for a bug report
"""


def add_doctor(commands: Commands) -> None:
    one = command(commands, "doctor", "check this machine: capabilities, problems and remedies", epilog=DOCTOR_EXAMPLES)
    one.add_argument(
        "--only", action="append", default=[], metavar="PROBE", help="run only this probe; may be repeated"
    )
    one.add_argument("--json", action="store_true", help="all findings as JSON")
    one.add_argument(
        "--limit", type=seconds(1, 3600), default=90.0, metavar="S", help="seconds for one probe (default: 90)"
    )
    one.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from asyncrl.doctor.run import doctor_command

    return doctor_command(only=args.only, as_json=args.json, limit_s=args.limit)

"""Commands about this machine: keys, doctor."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, command, seconds
from asyncrl.errors import ConfigError

GUESTS = ("producer", "reward", "observer")  # roles of asyncrl.net.keys, which loads the socket library

KEYS_EXAMPLES = """writes:
  DIR/server.key     for the buffer, weight sync and the learner: network.key_file = "DIR/server.key"
  DIR/producer.key   for producers: --key DIR/producer.key
  DIR/reward.key     for reward workers
  DIR/observer.key   for status and top

examples:
  asyncrl keys keys
  asyncrl launch all my.toml --set network.key_file=keys/server.key --set network.buffer=tcp://10.0.0.1:5555
  asyncrl launch producers my.toml --connect tcp://10.0.0.1:5555 --key producer.key  (on another host)
  asyncrl keys keys --add producer --name lab-b      one more key, keys/lab-b.key; running services admit it at once
  asyncrl keys keys --revoke lab-b                   running services refuse it from now on
  asyncrl keys keys --list
"""


def add_keys(commands: Commands) -> None:
    one = command(commands, "keys", "make, list and revoke the keys with which hosts join a run", epilog=KEYS_EXAMPLES)
    one.add_argument("folder", metavar="DIR", type=Path, help="folder of the key files; made if missing")
    action = one.add_mutually_exclusive_group()
    action.add_argument("--add", metavar="ROLE", choices=GUESTS, help=f"make one more key: {', '.join(GUESTS)}")
    action.add_argument("--revoke", metavar="NAME", help="admit this key no more")
    action.add_argument("--list", action="store_true", help="names and roles of the admitted keys")
    one.add_argument("--name", default="", help="with --add: name of the key and of its file")
    one.set_defaults(run=_keys)


def _keys(args: argparse.Namespace) -> int:
    import os

    from asyncrl.net.keys import SERVER_FILE

    server = args.folder / SERVER_FILE
    previous = os.umask(0o077)
    try:
        _change_keys(args, server)
    except OSError as error:
        raise ConfigError("config.network", f"{error.strerror}", where=str(args.folder)) from None
    finally:
        os.umask(previous)
    return 0


def _change_keys(args: argparse.Namespace, server: Path) -> None:
    from asyncrl.net.keys import add_key, key_path, read_keys, revoke_key, write_keys

    if args.name and not args.add:
        raise ConfigError("usage", "--name goes with --add", where="--name")
    if args.add:
        made = add_key(server, args.add, args.name)
        print(f"{made}   of role {args.add}")
    elif args.revoke:
        revoke_key(server, args.revoke)
        print(f"{args.revoke} is not admitted any more")
    elif args.list:
        roles = ("owner", *GUESTS)
        known = read_keys(server).known.values()
        for holder in sorted(known, key=lambda one: (roles.index(one.role), one.name)):
            print(f"{holder.name:<24} {holder.role}")
    else:
        args.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_keys(server)
        print(f"{server}   for the buffer, weight sync and the learner (network.key_file)")
        for role, users in zip(GUESTS, ("producers", "reward workers", "status and top"), strict=True):
            print(f"{key_path(server, role)}   for {users} (--key)")


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

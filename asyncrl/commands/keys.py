"""The command that makes the keys of a run: keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, command

EXAMPLES = """writes:
  DIR/server.key     for the buffer, weight sync and the learner: network.key_file = "DIR/server.key"
  DIR/join.key       for producers and reward workers: --key DIR/join.key

examples:
  asyncrl keys keys
  asyncrl launch all my.toml --set network.key_file=keys/server.key --set network.buffer=tcp://10.0.0.1:5555
  asyncrl launch producers my.toml --connect tcp://10.0.0.1:5555 --key join.key     (on another host)
"""


def add(commands: Commands) -> None:
    """Declare it."""
    one = command(commands, "keys", "make the keys with which hosts join a run", epilog=EXAMPLES)
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

"""Commands that read a configuration and start nothing: check, schema."""

from __future__ import annotations

import argparse

from asyncrl.commands.options import Commands, add_config, command


def add(commands: Commands) -> None:
    """Declare them."""
    one = command(commands, "check", "find every mistake of a configuration and show the derived numbers",
                   example="asyncrl check my.toml --set buffer.max_staleness=8")  # fmt: skip
    add_config(one)
    one.set_defaults(run=_check)
    one = command(commands, "schema", "print the JSON schema of the configuration",
                   example="asyncrl schema > asyncrl.schema.json")  # fmt: skip
    one.set_defaults(run=_schema)


def _check(args: argparse.Namespace) -> int:
    from asyncrl.launch import check_command

    return check_command(args.config, args.overrides)


def _schema(_args: argparse.Namespace) -> int:
    import json

    from asyncrl.config import schema

    print(json.dumps(schema(), indent=2))
    return 0

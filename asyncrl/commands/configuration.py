"""Commands that read a configuration and start nothing: check, schema."""

from __future__ import annotations

import argparse

from asyncrl.commands.options import Commands, add_configs, command


def add(commands: Commands) -> None:
    """Declare them."""
    one = command(commands, "check", "find every mistake of a configuration and show the derived numbers",
                   example="asyncrl check my.toml --set buffer.max_staleness=8")  # fmt: skip
    add_configs(one)
    one.add_argument("--json", action="store_true", help="everything as JSON, mistakes as well")
    one.set_defaults(run=_check)
    one = command(commands, "schema", "print the JSON schema of the configuration",
                   example="asyncrl schema > asyncrl.schema.json")  # fmt: skip
    one.set_defaults(run=_schema)


def _check(args: argparse.Namespace) -> int:
    from asyncrl.check_command import check_command

    return check_command(args.configs, args.overrides, as_json_text=args.json)


def _schema(_args: argparse.Namespace) -> int:
    import json

    from asyncrl.config import schema

    print(json.dumps(schema(), indent=2))
    return 0

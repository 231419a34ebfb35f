"""Commands for authors of environments: test-env."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, command

LIMIT_S = 900.0


def add(commands: Commands) -> None:
    """Declare them."""
    one = command(
        commands,
        "test-env",
        "play an environment with given answers and check its contract",
        example='asyncrl test-env my_envs:Guess --row \'{"prompt": "guess"}\'',
    )
    one.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="MODULE:NAME",
        help="or a known name (default: environment.name of --config)",
    )
    one.add_argument("--config", type=Path, metavar="CONFIG.toml", help="take [environment], model and rows from it")
    one.add_argument("--model", default="", metavar="FOLDER", help="whose tokenizer and chat template to use")
    one.add_argument("--args", default="{}", metavar="JSON", help="arguments of the environment, an object")
    one.add_argument("--row", default="", metavar="JSON", help="the row to play (default: the first of the data)")
    one.add_argument("--say", action="append", default=[], metavar="TEXT", help="what the policy says, turn by turn")
    one.add_argument("--json", action="store_true", help="findings as JSON")
    one.set_defaults(run=_test_env)


def _test_env(args: argparse.Namespace) -> int:
    from asyncrl.testing import run_contract

    words = [args.name] if args.name else []
    for flag, value in (("--config", args.config), ("--model", args.model), ("--args", args.args), ("--row", args.row)):
        words += [flag, str(value)] if value else []
    words += [word for text in args.say for word in ("--say", text)]
    return run_contract(
        "producers.environments.contract_test", [*words, *(["--json"] if args.json else [])], limit_s=LIMIT_S
    )

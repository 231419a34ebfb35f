"""Commands that read or write a configuration and start nothing: init, check, explain, presets, diff, schema."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_configs, command

INIT_EXAMPLES = """examples:
  asyncrl init                                    asks five questions
  asyncrl init my.toml --model models/m --data rows.jsonl --reward my_rewards:exact
  asyncrl init my.toml --from run_verl.sh         settings of verl, TRL and others, in our names
"""
EXPLAIN_EXAMPLES = """examples:
  asyncrl explain                                 all error codes
  asyncrl explain config.conflict                 an error
  asyncrl explain buffer.max_staleness            a setting, also: a section, a metric
"""
ANSWERS = {
    "model": "folder of the model",
    "data": "file with the prompts",
    "reward": "'module:function'",
    "preset": "algorithm (default: grpo_decoupled)",
    "name": "name of the run (default: first)",
}


def add(commands: Commands) -> None:
    _add_init(commands)
    one = command(
        commands,
        "check",
        "find every mistake of a configuration and show the derived numbers",
        example="asyncrl check my.toml --set buffer.max_staleness=8",
    )
    add_configs(one)
    one.add_argument("--json", action="store_true", help="everything as JSON, mistakes as well")
    one.set_defaults(run=_check)
    one = command(commands, "explain", "explain an error code, a setting or a metric", epilog=EXPLAIN_EXAMPLES)
    one.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        help="a code, a dotted key, a section, a metric; without it: all codes",
    )
    one.set_defaults(run=_explain)
    one = command(
        commands,
        "presets",
        "list published algorithms, or show one: settings, paper, differences from it",
        example="asyncrl presets dapo",
    )
    one.add_argument("name", metavar="NAME", nargs="?", default="", help="a preset, or a .toml; without it: all")
    one.set_defaults(run=_presets)
    one = command(
        commands,
        "diff",
        "compare two resolved configurations; exit code 1 if they differ",
        example="asyncrl diff my.toml runs/my",
    )
    one.add_argument("left", metavar="A", type=Path, help="a TOML file, or the folder of a run")
    one.add_argument("right", metavar="B", type=Path, help="another one")
    one.add_argument("--json", action="store_true", help="the differences as JSON")
    one.set_defaults(run=_diff)
    one = command(
        commands,
        "schema",
        "print the JSON schema of the configuration, for editors",
        example="asyncrl schema > asyncrl.schema.json",
    )
    one.set_defaults(run=_schema)


def _add_init(commands: Commands) -> None:
    one = command(commands, "init", "write a configuration from five answers", epilog=INIT_EXAMPLES)
    one.add_argument("out", metavar="OUT.toml", nargs="?", type=Path, help="file to write (default: NAME.toml)")
    for name, text in ANSWERS.items():
        one.add_argument(f"--{name}", default="", metavar="TEXT", help=text)
    one.add_argument(
        "--from",
        dest="theirs",
        type=Path,
        metavar="FILE",
        help="take over a run of verl, TRL, "
        "prime-rl, OpenRLHF, AReaL or slime: its launch script, Python file, TOML or YAML",
    )
    one.add_argument("--answers", type=Path, metavar="FILE.toml", help="answers by these names, instead of questions")
    one.add_argument("--force", action="store_true", help="overwrite the file")
    one.set_defaults(run=_init)


def _init(args: argparse.Namespace) -> int:
    from asyncrl.configure.wizard import init_command

    given = {name: getattr(args, name) for name in ANSWERS}
    return init_command(args.out, given, answers=args.answers, force=args.force, theirs=args.theirs)


def _check(args: argparse.Namespace) -> int:
    from asyncrl.preflight.check import check_command

    return check_command(args.configs, args.overrides, as_json=args.json)


def _explain(args: argparse.Namespace) -> int:
    from asyncrl.configure.explain import explain_command

    return explain_command(args.name)


def _presets(args: argparse.Namespace) -> int:
    from asyncrl.configure.preset_pages import presets_command

    return presets_command(args.name)


def _diff(args: argparse.Namespace) -> int:
    from asyncrl.configure.diff import diff_command

    return diff_command(args.left, args.right, as_json=args.json)


def _schema(_args: argparse.Namespace) -> int:
    import json

    from asyncrl.config import schema

    print(json.dumps(schema(), indent=2))
    return 0
